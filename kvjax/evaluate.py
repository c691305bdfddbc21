"""What a cache costs in quality: next-token distributions against those of the plain cache."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .cache import Cache, bits_per_element, init_cache
from .cache_config import CacheConfig
from .decode import CHUNK, prefill
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
) -> tuple[Quality, Cache]:
    """Run a text through a cache of `config` and through the plain cache, and compare.

    Args:
      tokens: int [N].
      score_from: position of the first scored prediction; earlier tokens are context only.
      dtype: of exact tokens, in both caches.
      progress: called with the number of tokens done, 2N in all.

    Returns:
      (quality, the final cache of `config`).

    Raises:
      KvjaxError: nothing to score, or the text does not fit the capacity of `config`.
    """
    if not 1 <= score_from < len(tokens) - 1:
        raise KvjaxError(
            f"scoring starts at {score_from} in {len(tokens)} tokens: expected at least 1 and at "
            f"most {len(tokens) - 2}"
        )
    context = np.asarray(tokens, np.int32)[None]
    caches = []
    for kind in (config.plain(), config):
        capacity = config.capacity or len(tokens)
        cache = init_cache(model.config, kind, batch=1, capacity=capacity, dtype=dtype)
        cache.require_room(len(tokens))
        _, cache = prefill(model, context[:, :score_from], cache, chunk=chunk, progress=progress)
        caches.append(cache)
    return score(model, context[:, score_from:], caches[0], caches[1], chunk, progress)


def score(
    model: Model,
    tokens: np.ndarray,
    plain: Cache,
    other: Cache,
    chunk: int = CHUNK,
    progress: Callable[[int], None] | None = None,
) -> tuple[Quality, Cache]:
    """Compare predictions of tokens [1, N] (all but the first) from two caches of their context."""
    rows = []
    for begin in range(0, tokens.shape[1], chunk):
        piece = tokens[:, begin : begin + chunk]
        targets = tokens[:, begin + 1 : begin + chunk + 1]
        count = np.full((1,), piece.shape[1], np.int32)
        piece = np.pad(piece, ((0, 0), (0, chunk - piece.shape[1])))
        expected, plain = _logits(model, piece, plain, count)
        logits, other = _logits(model, piece, other, count)
        padded = np.pad(targets, ((0, 0), (0, chunk - targets.shape[1])))
        rows.append(np.asarray(_metrics(expected, logits, padded))[:, 0, : targets.shape[1]])
        if progress is not None:
            progress(2 * int(count[0]))
    kl, nll_full, nll, same = np.concatenate(rows, axis=1).astype(np.float64)
    return (
        Quality(
            scored_tokens=kl.size,
            perplexity=float(np.exp(nll.mean())),
            perplexity_full=float(np.exp(nll_full.mean())),
            perplexity_ratio=float(np.exp(nll.mean() - nll_full.mean())),
            kl_mean=float(kl.mean()),
            kl_p99=float(np.percentile(kl, 99)),
            top1_agreement=float(same.mean()),
        ),
        other,
    )


def effective_bits(model: Model, cache: Cache, /) -> float:
    """Bits per stored number at the capacity of the cache, everything counted."""
    return bits_per_element(model.config, cache.nbytes, tokens=cache.capacity, batch=cache.batch)


@jax.jit
def _logits(model, tokens, cache, counts):
    return model(tokens, cache, counts=counts)


@jax.jit
def _metrics(expected_BTV, logits_BTV, targets_BT):
    """[4, B, T]: KL, loss with the plain cache, loss with the other, same most likely token."""
    p, q = jax.nn.log_softmax(expected_BTV, axis=-1), jax.nn.log_softmax(logits_BTV, axis=-1)
    index = targets_BT[..., None]
    return jnp.stack(
        [
            jnp.sum(jnp.exp(p) * (p - q), axis=-1),
            -jnp.take_along_axis(p, index, axis=-1)[..., 0],
            -jnp.take_along_axis(q, index, axis=-1)[..., 0],
            (jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)).astype(jnp.float32),
        ]
    )
