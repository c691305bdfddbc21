"""`kvjax demo`: one document, one question, the plain cache beside a tiered one."""

import dataclasses
import importlib
import pathlib
import time
from typing import Any

import numpy as np
import rich.console
import rich.markup
import rich.progress

from . import chat
from .cache import Cache, cache_bytes, init_cache, measured_bytes
from .cache_config import CacheConfig
from .decode import CHUNK, prefill, stream
from .errors import KvjaxError
from .evaluate import Quality, effective_bits, first_coded, score
from .importers import load
from .model import Model
from .plots import plot_comparison
from .report import (
    Column,
    gigabytes,
    print_table,
    provenance,
    require_plotting,
    require_writable,
    without_total,
    write_json,
)
from .tokenizer import Tokenizer

# Chapters of the language reference that every Python carries, in this order.
CHAPTERS = ("with", "try", "raise", "import", "global", "nonlocal", "assert", "return", "class")
QUESTION = 'According to the document, what is the "with" statement used for?'


@dataclasses.dataclass(frozen=True)
class Demo:
    """Answer a question about a long document with the full and with a tiered cache."""

    model: str = "smollm2"
    """a Hugging Face directory, a GGUF file, or smollm2 (the model that `make` installs)"""
    document: pathlib.Path | None = None
    """a text file; default: chapters of Python's language reference"""
    document_tokens: int = 3328
    """tokens of the document that are read; the last of them are scored"""
    scored_tokens: int = 256
    """tokens at the end of the document on which both caches are compared"""
    question: str = QUESTION
    """what is asked about the document"""
    preset: str = "balanced"
    """safe, balanced, extreme, literal or full"""
    max_new_tokens: int = 48
    """longest answer"""
    cache_dtype: str = "bfloat16"
    """of exact tokens, in both caches"""
    json: pathlib.Path | None = None
    """write the results here"""
    plot: pathlib.Path | None = None
    """draw bytes and KL here (.png, .svg or .pdf)"""
    debug: bool = False
    """show the traceback of an error"""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token ids: what both tasks share, the rest of the question, the rest of the document."""

    document: list[int]
    question: list[int]
    continuation: list[int]


@dataclasses.dataclass
class Run:
    """One cache after the document, and how fast it got there and answered."""

    cache: Cache
    prefill_speed: float | None  # tokens/s, without compilation; None: too few to tell
    decode_speed: float | None
    answer: str


def run(demo: Demo, console: rich.console.Console) -> None:
    """Print the answers and one table; write what was asked for.

    Raises:
      KvjaxError: bad input, in one line.
    """
    require_writable(demo.json, demo.plot)
    require_plotting(demo.plot)
    config = CacheConfig.preset(demo.preset, dtype=demo.cache_dtype)
    if demo.max_new_tokens < 1:
        raise KvjaxError(f"max_new_tokens is {demo.max_new_tokens}: expected at least 1")
    text = read_document(demo.document)
    model, tokenizer = load_with_tokenizer(demo.model, console)
    prompt = make_prompt(tokenizer, text, demo)
    if len(prompt.document) <= first_coded(config):
        console.print("[yellow]the document is so short that no token leaves the hot window")

    runs = {}
    for name, kind in (("full", config.plain()), (demo.preset, config)):
        runs[name] = answer(model, tokenizer, prompt, kind, name, demo.max_new_tokens, console)
    plain, tiered = runs["full"], runs[demo.preset]
    with console.status("comparing the caches on the rest of the document"):
        tail = np.asarray(prompt.continuation, np.int32)[None]
        scores, _ = score(model, tail, plain.cache, tiered.cache)
    quality = scores.quality()

    columns = [_column("full cache", model, plain, None)]
    columns.append(_column(f"tiered: {demo.preset}", model, tiered, quality))
    tokens = len(prompt.document) + len(prompt.question)
    title = f"{demo.model}, {tokens} prompt tokens, {quality.scored_tokens} scored"
    print_table(console, title, columns)
    tables = {"full": measured_bytes(plain.cache), demo.preset: measured_bytes(tiered.cache)}
    if demo.json is not None:
        write_json(demo.json, _results(demo, model, prompt, runs, tables, quality))
    if demo.plot is not None:
        parts = {name: without_total(table) for name, table in tables.items()}
        plot_comparison(demo.plot, parts, scores.kl, len(prompt.document))


def load_with_tokenizer(source: str, console: rich.console.Console) -> tuple[Model, Tokenizer]:
    """A model that is to read text.

    Raises:
      KvjaxError: what is wrong with the source; no tokenizer beside the weights.
    """
    with console.status(f"loading {rich.markup.escape(source)}"):
        model, tokenizer = load(source)
    if tokenizer is None:
        raise KvjaxError(f"{source} has no tokenizer: expected a tokenizer.json beside it")
    return model, tokenizer


def read_document(file: pathlib.Path | None) -> str:
    """The text of a file, or of the language reference.

    Raises:
      KvjaxError: missing, unreadable, empty or not UTF-8.
    """
    if file is None:
        topics = importlib.import_module("pydoc_data.topics").topics
        return "\n\n".join(topics[name] for name in CHAPTERS if name in topics)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KvjaxError(f"cannot read {file}: expected a text file in UTF-8 ({error})") from None
    if not text.strip():
        raise KvjaxError(f"{file} is empty: expected some text")
    return text


def make_prompt(tokenizer: Tokenizer, text: str, demo: Demo) -> Prompt:
    """Split document and question so that both tasks start from one prefilled cache.

    Raises:
      KvjaxError: a document too short to compare anything on, or numbers that leave no document.
    """
    if demo.scored_tokens < 2 or demo.document_tokens < demo.scored_tokens + 2:
        raise KvjaxError(
            f"document_tokens is {demo.document_tokens} and scored_tokens {demo.scored_tokens}: "
            "expected the second to be at least 2, and the first larger by 2 or more"
        )
    ids = first_tokens(tokenizer, text, demo.document_tokens)
    if len(ids) < demo.scored_tokens + 2:
        raise KvjaxError(
            f"the document has {len(ids)} tokens: expected more than scored_tokens, which is "
            f"{demo.scored_tokens}"
        )
    read = tokenizer.decode(ids[: -demo.scored_tokens], skip_special=False)
    whole = tokenizer.decode(ids, skip_special=False)
    asked = _render(tokenizer, f"{read}\n\n{demo.question}")
    longer = _render(tokenizer, whole)
    shared = 0
    while shared < min(len(asked), len(longer)) - 1 and asked[shared] == longer[shared]:
        shared += 1
    continuation = longer[shared : shared + demo.scored_tokens]
    return Prompt(document=asked[:shared], question=asked[shared:], continuation=continuation)


def first_tokens(tokenizer: Tokenizer, text: str, count: int) -> list[int]:
    """The first `count` tokens of a text, or all; a book is not read whole for its first pages."""
    width = 8 * count
    while True:
        ids = tokenizer.encode(text[:width])
        # The last tokens of a cut text may be others than those of the whole.
        if width >= len(text) or len(ids) > count + 16:
            return ids[:count]
        width *= 2


def _render(tokenizer: Tokenizer, content: str) -> list[int]:
    """Ids of a user's turn; a model without a chat template just continues the text."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(f"{content}\n", add_special=True)
    messages = [{"role": "user", "content": content}]
    return tokenizer.encode(chat.render(tokenizer, messages), add_special=False)


def answer(
    model: Model,
    tokenizer: Tokenizer,
    prompt: Prompt,
    config: CacheConfig,
    name: str,
    max_new_tokens: int,
    console: rich.console.Console,
) -> Run:
    """Prefill the document, then stream an answer to the console."""
    tail = max(len(prompt.question) + max_new_tokens, len(prompt.continuation))
    capacity = len(prompt.document) + tail
    cache = init_cache(model.config, config, batch=1, capacity=capacity)
    stamps = [time.perf_counter()]
    with rich.progress.Progress(console=console, transient=True) as bar:
        task = bar.add_task(f"prefill, {name} cache", total=len(prompt.document))

        def advance(tokens: int) -> None:
            stamps.append(time.perf_counter())
            bar.advance(task, tokens)

        document = np.asarray(prompt.document, np.int32)[None]
        _, cache = prefill(model, document, cache, progress=advance)
    # The first chunk also compiled.
    later = len(prompt.document) - CHUNK
    prefill_speed = later / (stamps[-1] - stamps[1]) if later > 0 else None

    console.print(f"[bold]{name} cache[/bold]: ", end="")
    stamps = []
    steps = stream(
        model,
        np.asarray(prompt.question, np.int32)[None],
        cache=cache,
        max_new_tokens=max_new_tokens,
        stop_tokens=tokenizer.eos_ids,
    )

    def each():
        for token in steps:
            stamps.append(time.perf_counter())
            if token[0] not in tokenizer.eos_ids:
                yield int(token[0])

    pieces = []
    for piece in tokenizer.decode_stream(each()):
        pieces.append(piece)
        console.out(piece, end="", highlight=False)
    console.print()
    # The first token came with the prompt, the second with the compilation of the step.
    timed = len(stamps) - 2
    decode_speed = timed / (stamps[-1] - stamps[1]) if timed > 0 else None
    return Run(cache, prefill_speed, decode_speed, "".join(pieces))


def _column(name: str, model: Model, done: Run, quality: Quality | None) -> Column:
    table = measured_bytes(done.cache)
    full = _bf16_bytes(model, done.cache)
    rows = {
        "prefill, tokens/s": _speed(done.prefill_speed),
        "decode, tokens/s": _speed(done.decode_speed),
        **{f"cache, {kind}": gigabytes(size) for kind, size in table.items()},
        "bits per element": f"{effective_bits(model, done.cache):.2f}",
        "share of the bf16 cache": f"{table['total'] / full:.1%}",
    }
    if quality is not None:
        rows |= {
            "mean KL from full, nats": f"{quality.kl_mean:.4f}",
            "top-1 agreement": f"{quality.top1_agreement:.1%}",
            "perplexity ratio": f"{quality.perplexity_ratio:.4f}",
        }
    return Column(name, rows)


def _speed(tokens_per_second: float | None) -> str:
    return "-" if tokens_per_second is None else f"{tokens_per_second:.1f}"


def _bf16_bytes(model: Model, cache: Cache) -> int:
    plain = cache.config.plain()
    table = cache_bytes(
        model.config, plain, tokens=cache.capacity, batch=cache.batch, dtype="bfloat16"
    )
    return table["total"]


def _results(
    demo: Demo,
    model: Model,
    prompt: Prompt,
    runs: dict[str, Run],
    tables: dict[str, dict[str, int]],
    quality: Quality,
) -> dict[str, Any]:
    caches = {
        name: {
            "prefill_tokens_per_second": done.prefill_speed,
            "decode_tokens_per_second": done.decode_speed,
            "cache_bytes": tables[name]["total"],
            "cache_bytes_by_tier": without_total(tables[name]),
            "bits_per_element": effective_bits(model, done.cache),
            "ratio_to_bf16": tables[name]["total"] / _bf16_bytes(model, done.cache),
            "answer": done.answer,
        }
        for name, done in runs.items()
    }
    return {
        "command": "kvjax demo",
        "model": demo.model,
        "preset": demo.preset,
        "question": demo.question,
        "document": "pydoc_data" if demo.document is None else demo.document.name,
        "document_tokens": demo.document_tokens,
        "cache_dtype": demo.cache_dtype,
        "prompt_tokens": len(prompt.document) + len(prompt.question),
        "caches": caches,
        "quality": dataclasses.asdict(quality),
        **provenance(),
    }
