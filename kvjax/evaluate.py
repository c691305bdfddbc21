"""What a cache costs in quality: next-token distributions against those of the plain cache."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .cache import Cache, bits_per_element, init_cache
from .cache_config import CacheConfig
from .decode import CHUNK, checked_prompt, prefill
from .errors import KvjaxError
from .model import Model


@dataclasses.dataclass(frozen=True)
class Quality:
    """Means over the scored tokens, each predicted from all before it."""

    scored_tokens: int
    perplexity: float  # of the text, with the cache in question
    perplexity_full: float  # with the plain cache
    perplexity_ratio: float
    kl_mean: float  # KL(plain || in question) of the next-token distributions, in nats
    kl_p99: float
    top1_agreement: float  # share of positions with the same most likely token


@dataclasses.dataclass(frozen=True)
class Scores:
    """Per scored token, float64 [N]."""

    kl: np.ndarray
    loss: np.ndarray  # nats, with the cache in question
    loss_full: np.ndarray  # with the plain cache
    same_top1: np.ndarray  # 1 or 0

    def quality(self) -> Quality:
        return Quality(
            scored_tokens=self.kl.size,
            perplexity=float(np.exp(self.loss.mean())),
            perplexity_full=float(np.exp(self.loss_full.mean())),
            perplexity_ratio=float(np.exp(self.loss.mean() - self.loss_full.mean())),
            kl_mean=float(self.kl.mean()),
            kl_p99=float(np.percentile(self.kl, 99)),
            top1_agreement=float(self.same_top1.mean()),
        )


def compare(
    model: Model,
    tokens: np.ndarray,
    config: CacheConfig,
    /,
    *,
    score_from: int,
    dtype: str = "bfloat16",
    chunk: int = CHUNK,
    progress: Callable[[int], None] | None = None,
) -> tuple[Scores, Cache]:
    """Run a text through a cache of `config` and through the plain cache, and compare.

    Args:
      tokens: int [N].
      score_from: position of the first scored prediction; earlier tokens are context only.
      dtype: of exact tokens, in both caches.
      progress: called with the number of tokens done, 2N in all.

    Returns:
      (scores, the final cache of `config`).

    Raises:
      KvjaxError: nothing to score, a token id outside the vocabulary, or a text that does not fit
        the capacity of `config`.
    """
    if not 1 <= score_from < len(tokens) - 1:
        raise KvjaxError(
            f"scoring starts at {score_from} in {len(tokens)} tokens: expected at least 1 and at "
            f"most {len(tokens) - 2}"
        )
    context, _ = checked_prompt(model, np.asarray(tokens)[None], None)
    caches = []
    for kind in (config.plain(), config):
        capacity = config.capacity or len(tokens)
        cache = init_cache(model.config, kind, batch=1, capacity=capacity, dtype=dtype)
        cache.require_room(len(tokens))
        _, cache = prefill(model, context[:, :score_from], cache, chunk=chunk, progress=progress)
        caches.append(cache)
    tail = context[:, score_from:]
    return score(model, tail, caches[0], caches[1], chunk=chunk, progress=progress)


def score(
    model: Model,
    tokens: np.ndarray,
    plain: Cache,
    other: Cache,
    /,
    *,
    chunk: int = CHUNK,
    progress: Callable[[int], None] | None = None,
) -> tuple[Scores, Cache]:
    """Compare predictions of tokens [1, N] (all but the first) from two caches of their context.

    Both caches are given up: they are overwritten, not copied.

    Returns:
      (scores, `other` with the tokens appended).
    """
    rows = []
    for begin in range(0, tokens.shape[1], chunk):
        piece, targets = (tokens[:, begin + i : begin + i + chunk] for i in (0, 1))
        count = np.full((1,), piece.shape[1], np.int32)
        expected, plain = _logits(model, _padded(piece, chunk), plain, count)
        logits, other = _logits(model, _padded(piece, chunk), other, count)
        metrics = _metrics(expected, logits, _padded(targets, chunk))
        rows.append(np.asarray(metrics)[:, 0, : targets.shape[1]])
        if progress is not None:
            progress(2 * int(count[0]))
    return Scores(*np.concatenate(rows, axis=1).astype(np.float64)), other


def _padded(piece: np.ndarray, width: int) -> np.ndarray:
    return np.pad(piece, ((0, 0), (0, width - piece.shape[1])))


def first_coded(config: CacheConfig, /) -> int:
    """Position of the first query that meets a coded token: what is past the hot window."""
    return config.sinks + config.hot + config.block - 1 if config.tiers else 0


def effective_bits(model: Model, cache: Cache, /) -> float:
    """Bits per stored number at the capacity of the cache, everything counted."""
    return bits_per_element(model.config, cache.nbytes, tokens=cache.capacity, batch=cache.batch)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _logits(model, tokens, cache, counts):
    return model(tokens, cache, counts=counts)


@jax.jit
def _metrics(expected_BTV, logits_BTV, targets_BT):
    """The fields of `Scores`, [4, B, T]."""
    p, q = jax.nn.log_softmax(expected_BTV, axis=-1), jax.nn.log_softmax(logits_BTV, axis=-1)
    index = targets_BT[..., None]
    return jnp.stack(
        [
            jnp.sum(jnp.exp(p) * (p - q), axis=-1),
            -jnp.take_along_axis(q, index, axis=-1)[..., 0],
            -jnp.take_along_axis(p, index, axis=-1)[..., 0],
            (jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)).astype(jnp.float32),
        ]
    )
