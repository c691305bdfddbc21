"""From logits to the next token. Not for loops: see `kvjax.decode`."""

import dataclasses

import jax
import jax.numpy as jnp

from .errors import KvjaxError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. A pytree: other numbers do not compile anew, other filters do.

    The filters work on the probabilities after `temperature`, each on what the one before left, as
    in Hugging Face: top-k, then top-p (Holtzman et al., arXiv:1904.09751), then min-p (Nguyen et
    al., arXiv:2407.01082).
    """

    temperature: float | None = None  # None: greedy, the most likely token
    top_k: int | None = None  # keep the k most likely
    top_p: float | None = None  # keep the fewest tokens whose probability reaches p
    min_p: float | None = None  # keep those of at least p times the largest probability

    @staticmethod
    def checked(
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
    ) -> "Sampling":
        """From what a user gives: a temperature of 0 is greedy, whatever the filters.

        Raises:
          KvjaxError: a number out of its range.
        """
        if not 0.0 <= temperature < float("inf"):
            raise KvjaxError(f"temperature is {temperature}: expected 0 (greedy) or more")
        if top_k is not None and top_k < 1:
            raise KvjaxError(f"top_k is {top_k}: expected at least 1")
        for name, value in (("top_p", top_p), ("min_p", min_p)):
            if value is not None and not 0.0 < value <= 1.0:
                raise KvjaxError(f"{name} is {value}: expected more than 0 and at most 1")
        if temperature == 0.0:
            return Sampling()
        return Sampling(temperature, top_k, top_p, min_p)


def sample(logits_BV: jax.Array, keys_B: jax.Array, sampling: Sampling, /) -> jax.Array:
    """One token per row, int32 [B].

    Args:
      logits_BV: float32.
      keys_B: a PRNG key per row; a row's token depends on its own key and logits alone.
    """
    if sampling.temperature is None:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    # The best at zero: divided by a tiny temperature, the others overflow to -inf and it stays.
    best_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
    kept_BV = keep((logits_BV - best_B1) / sampling.temperature, sampling)
    return jax.vmap(jax.random.categorical)(keys_B, kept_BV).astype(jnp.int32)


def keep(logits_BV: jax.Array, sampling: Sampling, /) -> jax.Array:
    """Logits with -inf where a filter drops the token; the most likely token always stays."""
    if sampling.top_k is not None or sampling.top_p is not None:
        order_BV = jnp.argsort(-logits_BV, axis=-1)
        ranked = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
        if sampling.top_k is not None:
            ranks = jnp.arange(ranked.shape[-1])[None, :]
            ranked = jnp.where(ranks < sampling.top_k, ranked, -jnp.inf)
        if sampling.top_p is not None:
            p = jax.nn.softmax(ranked, axis=-1)
            before = jnp.cumsum(p, axis=-1) - p
            ranked = jnp.where((before < sampling.top_p) | (before == 0.0), ranked, -jnp.inf)
        back_BV = jnp.argsort(order_BV, axis=-1)
        logits_BV = jnp.take_along_axis(ranked, back_BV, axis=-1)
    if sampling.min_p is not None:
        # p >= min_p * max(p), in logarithms.
        least = jnp.max(logits_BV, axis=-1, keepdims=True) + jnp.log(sampling.min_p)
        logits_BV = jnp.where(logits_BV >= least, logits_BV, -jnp.inf)
    return logits_BV
