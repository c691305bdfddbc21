"""The command line: `kvjax demo`, `kvjax eval`."""

import dataclasses
import os
import pathlib
import sys
from typing import Annotated

import jax
import numpy as np
import rich.console
import rich.progress
import tyro

from . import demo
from .cache import measured_bytes
from .cache_config import CacheConfig
from .errors import KvjaxError
from .evaluate import compare, effective_bits, first_coded
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


@dataclasses.dataclass(frozen=True)
class Eval:
    """Compare a cache with the full one on a text: perplexity, KL, top-1 agreement, bytes."""

    model: tyro.conf.Positional[str]
    """a Hugging Face directory, a GGUF file, or smollm2"""
    text: pathlib.Path
    """a text file"""
    tokens: int = 2560
    """how many of its tokens are read"""
    preset: str = "balanced"
    """safe, balanced, extreme, literal or full"""
    score_from: int | None = None
    """first scored position; default: where tokens start to leave the hot window"""
    capacity: int | None = None
    """tokens that the cache holds; default: as many as are read"""
    cache_dtype: str = "bfloat16"
    """of exact tokens, in both caches"""
    json: pathlib.Path | None = None
    """write the results here"""
    plot: pathlib.Path | None = None
    """draw bytes and KL here (.png, .svg or .pdf)"""
    debug: bool = False
    """show the traceback of an error"""


Command = (
    Annotated[demo.Demo, tyro.conf.subcommand("demo")]
    | Annotated[Eval, tyro.conf.subcommand("eval")]
)


def main(arguments: list[str] | None = None) -> None:
    """Run one command; bad input ends with one line and exit code 2."""
    command = tyro.cli(Command, args=arguments, prog="kvjax", description=__doc__)
    console = rich.console.Console(highlight=False)
    try:
        if isinstance(command, demo.Demo):
            demo.run(command, console)
        else:
            evaluate(command, console)
    except BrokenPipeError:
        # The reader of our output went away; what is left unflushed has no one to go to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (KvjaxError, OSError, MemoryError, jax.errors.JaxRuntimeError) as error:
        if command.debug:
            raise
        message = " ".join(str(error).split()) or "out of memory"
        print(f"kvjax: error: {message}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def evaluate(command: Eval, console: rich.console.Console) -> None:
    """`kvjax eval`."""
    require_writable(command.json, command.plot)
    require_plotting(command.plot)
    config = CacheConfig.preset(
        command.preset, dtype=command.cache_dtype, capacity=command.capacity
    )
    if command.tokens < 1:
        raise KvjaxError(f"--tokens is {command.tokens}: expected a positive number")
    text = demo.read_document(command.text)
    model, tokenizer = demo.load_with_tokenizer(command.model, console)
    ids = demo.first_tokens(tokenizer, text, command.tokens)
    if len(ids) < command.tokens:
        raise KvjaxError(
            f"{command.text} has {len(ids)} tokens: expected at least --tokens {command.tokens}"
        )
    score_from = command.score_from
    if score_from is None:
        score_from = max(first_coded(config), 1)
    with rich.progress.Progress(console=console, transient=True) as bar:
        task = bar.add_task("scoring", total=2 * len(ids))
        scores, cache = compare(
            model,
            np.asarray(ids, np.int32),
            config,
            score_from=score_from,
            dtype=command.cache_dtype,
            progress=lambda done: bar.advance(task, done),
        )
    table, quality = measured_bytes(cache), scores.quality()
    bits = effective_bits(model, cache)
    rows = {
        "perplexity": f"{quality.perplexity:.3f}",
        "perplexity, full cache": f"{quality.perplexity_full:.3f}",
        "perplexity ratio": f"{quality.perplexity_ratio:.4f}",
        "mean KL, nats": f"{quality.kl_mean:.5f}",
        "99th percentile of KL": f"{quality.kl_p99:.4f}",
        "top-1 agreement": f"{quality.top1_agreement:.2%}",
        **{f"cache, {kind}": gigabytes(size) for kind, size in table.items()},
        "bits per element": f"{bits:.2f}",
    }
    title = f"{command.model}, {len(ids)} tokens, scored from {score_from}"
    print_table(console, title, [Column(command.preset, rows)])
    if command.json is not None:
        results = {
            "command": "kvjax eval",
            "model": command.model,
            "text": command.text.name,
            "tokens": len(ids),
            "preset": command.preset,
            "score_from": score_from,
            **dataclasses.asdict(quality),
            "cache_bytes": table["total"],
            "cache_bytes_by_tier": without_total(table),
            "bits_per_element": bits,
            **provenance(),
        }
        write_json(command.json, results)
    if command.plot is not None:
        parts = {command.preset: without_total(table)}
        plot_comparison(command.plot, parts, scores.kl, score_from)
