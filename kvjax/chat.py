"""Messages to the text that a chat model was trained on, by the Jinja template in its files."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import KvjaxError

# What a template of somebody else's may raise while it is rendered.
_REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
)


class Templated(Protocol):
    """What a template needs of a tokenizer, such as `kvjax.tokenizer.Tokenizer`."""

    @property
    def chat_template(self) -> str | None: ...
    @property
    def bos_token(self) -> str | None: ...
    @property
    def eos_token(self) -> str | None: ...


def render(
    tokenizer: Templated,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """Return the text of a chat, special tokens included, as Hugging Face would write it.

    Encode it with `tokenizer.encode(text)`: the template has put the begin token in already.

    Args:
      tokenizer: holds the template; models that were never taught to chat have none.
      messages: dicts with at least `role` and `content`, from first to last.
      add_generation_prompt: end with the mark that makes the model answer.
      **variables: what else the template asks for, such as `tools` or `enable_thinking`.

    Raises:
      KvjaxError: no template; a message without a role; the template refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise KvjaxError(
            "the model has no chat template: give it plain text, or use a model trained to chat"
        )
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise KvjaxError(
                f"message {number} has no role: expected {{'role': 'user', 'content': '...'}}"
            )
    context = {
        "messages": messages,
        "tools": None,
        "documents": None,
        "bos_token": tokenizer.bos_token or "",
        "eos_token": tokenizer.eos_token or "",
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        template = _environment().from_string(tokenizer.chat_template)
        return template.render({**context, **variables})
    except _REFUSALS as error:
        reason = " ".join(str(error).split())
        raise KvjaxError(f"the chat template does not accept these messages: {reason}") from None


class _Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for training; here only its body counts."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Settings, filters and functions that templates on the Hugging Face hub rely on."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own filter escapes HTML characters and sorts the keys."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
