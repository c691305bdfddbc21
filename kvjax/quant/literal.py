"""The plain code that tiered caches are usually described with; kept to be compared against.

4 bits: per token, round((x - min) / step). 1 bit: sign(x) times the token's mean |x|. No rotation,
no centring, no correction of scores, and demotion quantises the 4-bit vector anew. It loses most
of a model's quality, which `experiments/LOG.md` shows; use `nested`.
"""

import jax
import jax.numpy as jnp
from kvjax_kernels.codes import Codes, pack

from .layout import Layout


def basis(size: int) -> None:
    """No rotation."""
    del size
    return None


def layout(size: int, *, bits: int, is_key: bool) -> Layout:
    """Which optional arrays the codes have."""
    del size, is_key
    return Layout(mean=False, offset=bits > 1)


def correction(bits: int, size: int, scale: float) -> float:
    """No correction."""
    del bits, size, scale
    return 0.0


def encode(x_NSC: jax.Array, /, *, bits: int, is_key: bool) -> Codes:
    """Code blocks of tokens, each token by itself; keys and values alike."""
    del is_key
    x = x_NSC.astype(jnp.float32)
    if bits == 1:
        codes = (x >= 0).astype(jnp.uint16)
        # A centred 1-bit code is +-1/2.
        scale, offset = 2.0 * jnp.mean(jnp.abs(x), axis=-1), None
    else:
        low, high = jnp.min(x, axis=-1), jnp.max(x, axis=-1)
        # Divided before subtracting: the span of huge values overflows float32.
        scale = high / (2**bits - 1) - low / (2**bits - 1)
        step = jnp.where(scale == 0.0, 1.0, scale)[..., None]
        codes = jnp.clip(jnp.round((x - low[..., None]) / step), 0, 2**bits - 1).astype(jnp.uint16)
        offset = low + scale * (2**bits - 1) / 2
    return Codes(
        words=pack(codes, bits=bits),
        scale=scale.astype(jnp.bfloat16),
        mean=None,
        offset=None if offset is None else offset.astype(jnp.bfloat16),
        bits=bits,
        size=x.shape[-1],
    )


def demote(codes: Codes, /, *, bits: int, is_key: bool) -> Codes:
    """Quantise anew what the longer code says."""
    return codes if bits == codes.bits else encode(codes.decode(), bits=bits, is_key=is_key)
