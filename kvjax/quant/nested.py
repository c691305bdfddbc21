"""The nested code: 4 bits whose top 2 and top 1 bits are themselves codes.

Per block of tokens and head: the mean is stored apart and the rest is rotated, so that every dim
of a token is close to N(0, rms^2) and one scale per token suffices. A 4-bit code is the index of a
cell of width 0.335 * rms; dropping its low bits merges cells. So a token loses precision with age
by moving bits, never by being quantised again, and what was dropped can be fetched back.

Scales: keys take a = |y|^2 / <y, c>, which keeps the expectation of q . key; values take the least
squares a = <y, c> / <c, c>. (Sign codes with this scale are RaBitQ, Gao and Long,
arXiv:2405.12497; the rotation is QuaRot's and TurboQuant's.)
"""

import jax
import jax.numpy as jnp
import numpy as np
from kvjax_kernels.codes import Codes, pack, unpack

from .layout import Layout
from .rotation import rotation

BITS = 4
STEP = 0.335  # width of a 4-bit cell in units of the token's rms; best for a normal distribution

# Unexplained variance of a unit normal y per squared scale: E[c^2] - E[y c]^2, where the scale is
# that of the unbiased estimator. Numeric integration over the cells; tests integrate anew.
NOISE = {1: 0.0908451, 2: 0.0862388}


def basis(size: int) -> np.ndarray:
    """The symmetric orthogonal matrix [size, size] that leads into the basis of the code."""
    return rotation(size)


def layout(size: int, *, bits: int, is_key: bool) -> Layout:
    """Which optional arrays the codes have."""
    del size, bits
    return Layout(mean=is_key, offset=False)


def correction(bits: int, size: int, scale: float) -> float:
    """Factor f of the log-normal term: subtract f * |q|^2 * a^2 from a score of this code.

    The error e of a coded key is orthogonal to the key and has |e|^2 = size * NOISE * a^2. A score
    is off by scale * q . e, roughly normal with variance scale^2 |q|^2 |e|^2 / (size - 1), which
    multiplies its expected exponential by exp(variance / 2). Without the term a long coded past
    takes too much of the softmax. Negligible, and left out, at 4 bits.
    """
    if bits not in NOISE or size == 1:
        return 0.0
    return 0.5 * scale**2 * size * NOISE[bits] / (size - 1)


def encode(x_NSC: jax.Array, /, *, bits: int, is_key: bool) -> Codes:
    """Code blocks of S tokens; leading axes are free.

    Args:
      x_NSC: [..., N, S, C] any float dtype; every token is real (no padding).
      bits: 1, 2 or 4.
      is_key: unbiased scale and a stored mean; else least squares and no mean.
    """
    x = jnp.matmul(x_NSC.astype(jnp.float32), basis(x_NSC.shape[-1]), precision="highest")
    mean = None
    if is_key:
        mean = jnp.mean(x, axis=-2).astype(jnp.bfloat16)
        x = x - mean.astype(jnp.float32)[..., None, :]
    # The largest entry is divided out first: squares of huge values overflow float32.
    peak = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    y = x / jnp.where(peak == 0.0, 1.0, peak)
    rms = jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True))
    index = jnp.floor(y / jnp.where(rms == 0.0, 1.0, STEP * rms)) + 2 ** (BITS - 1)
    codes = jnp.clip(index, 0, 2**BITS - 1).astype(jnp.uint16)
    return _drop(codes, y, peak[..., 0], mean, bits=bits, is_key=is_key)


def demote(codes: Codes, /, *, bits: int, is_key: bool) -> Codes:
    """Keep the top `bits` of each code; the scale is refitted to what the longer code says.

    Raises:
      ValueError: the codes have fewer bits already.
    """
    if bits > codes.bits:
        raise ValueError(f"cannot demote {codes.bits}-bit codes to {bits} bits")
    if bits == codes.bits:
        return codes
    y = codes.centred()  # times the scale: the best estimate of the vector that is left
    raw = unpack(codes.words, bits=codes.bits, size=codes.size)
    scale = codes.scale.astype(jnp.float32)
    return _drop(raw, y, scale, codes.mean, bits=bits, is_key=is_key, have=codes.bits)


def _drop(codes, y, unit, mean, *, bits, is_key, have=BITS) -> Codes:
    """Top bits of `codes`, with the scale fitted to the vector unit * y."""
    short = codes >> (have - bits)
    c = short.astype(jnp.float32) - (2**bits - 1) / 2
    product = jnp.sum(y * c, axis=-1)
    if is_key:
        scale = jnp.sum(y * y, axis=-1) / jnp.where(product == 0.0, 1.0, product)
    else:
        scale = product / jnp.sum(c * c, axis=-1)
    return Codes(
        words=pack(short, bits=bits),
        scale=(unit * scale).astype(jnp.bfloat16),
        mean=mean,
        offset=None,
        bits=bits,
        size=codes.shape[-1],
    )
