"""Chats are rendered as by Hugging Face; the chat of a real model is in test_tokenizer.py."""

import types

import pytest

from kvjax import chat
from kvjax.errors import KvjaxError

HELLO = [{"role": "user", "content": "<b>é"}]


def with_template(template):
    return types.SimpleNamespace(chat_template=template, bos_token="<s>", eos_token=None)


@pytest.mark.parametrize(
    "template, expected",
    [
        (
            "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
            "<s><b>é",
        ),
        ("{% if true %}\na\n{% endif %}\nb", "a\nb"),
        ("  {% if add_generation_prompt %}go{% endif %}", "go"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<b>é"}'),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{% generation %}a{% endgeneration %}", "a"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% if tools is none and not enable_thinking %}y{% endif %}", "y"),
    ],
)
def test_templates_render_as_in_hugging_face(template, expected):
    assert chat.render(with_template(template), HELLO) == expected


def test_variables_of_a_template():
    tokenizer = with_template("{{ add_generation_prompt }} {{ level }} {{ tools | length }}")
    assert chat.render(
        tokenizer, HELLO, add_generation_prompt=False, level=3, tools=[{"name": "f"}]
    ) == ("False 3 1")


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.missing.more }}", "has no attribute"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].__class__.__mro__ }}", "unsafe"),
        ("{{ 'a' + 1 }}", "concatenate"),
        ("{{ 'abc'.index('z') }}", "substring not found"),
    ],
)
def test_template_that_refuses(template, reason):
    with pytest.raises(KvjaxError, match="does not accept these messages") as caught:
        chat.render(with_template(template), HELLO)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_model_without_a_template():
    with pytest.raises(KvjaxError, match="no chat template"):
        chat.render(with_template(None), HELLO)


@pytest.mark.parametrize("messages", [["hello"], [{"content": "hello"}]])
def test_message_without_a_role(messages):
    with pytest.raises(KvjaxError, match="message 0 has no role"):
        chat.render(with_template("x"), messages)
