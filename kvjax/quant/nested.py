"""The nested code: 4 bits whose top 2 and top 1 bits are themselves codes.

Per block of tokens and head: the mean is stored apart and the rest is rotated, so that every dim
of a token is close to N(0, rms^2) and one scale per token suffices. A 4-bit code is the index of a
cell, about a third of the rms wide; dropping its low bits merges cells. So a token loses precision
with age by moving bits, never by being quantised again, and what was dropped can be fetched back.

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
# Widths of a 4-bit cell tried for each token, in units of its rms. 0.335 is best for a normal
# distribution; a token of d dims is only nearly normal, and the 2-bit code wants narrower cells
# than the 4-bit one. The best is that with the least 4-bit error plus a share of the 2-bit error:
# on keys of a real model that takes 14 % off the one and 10 % off the other.
STEPS = (0.235, 0.26, 0.28, 0.31, 0.335, 0.37)
SHARE_OF_2_BIT = 0.1

# |e|^2 / (size * a^2) of the error e of an unbiased key of normal dims with scale a. At 1 bit it is
# (1 - 2/pi) / 4; at 2 bits the mean over tokens with the search above (size 128; from 64 to 256 it
# moves by 1 %). Tests measure both anew.
NOISE = {1: 0.0908451, 2: 0.0871}


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
        # What is subtracted is what is stored: a plain cast there and back may be optimised away.
        rounded = jax.lax.reduce_precision(jnp.mean(x, axis=-2), exponent_bits=8, mantissa_bits=7)
        mean, x = rounded.astype(jnp.bfloat16), x - rounded[..., None, :]
    # The largest entry is divided out first: squares of huge values overflow float32.
    peak = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    y = x / jnp.where(peak == 0.0, 1.0, peak)
    return _drop(_best_codes(y), y, peak[..., 0], mean, bits=bits, is_key=is_key)


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


def _best_codes(y: jax.Array) -> jax.Array:
    """4-bit codes uint16 [..., C], each token with the best of `STEPS`."""
    rms = jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True))
    rms = jnp.where(rms == 0.0, 1.0, rms)

    def explained(codes, bits):
        """How much of |y|^2 the best multiple of a code explains."""
        c = _centred(codes >> (BITS - bits), bits)
        return jnp.sum(y * c, axis=-1) ** 2 / jnp.sum(c * c, axis=-1)

    best, best_merit = None, None
    for step in STEPS:
        index = jnp.floor(y / (step * rms)) + 2 ** (BITS - 1)
        codes = jnp.clip(index, 0, 2**BITS - 1).astype(jnp.uint16)
        merit = explained(codes, BITS) + SHARE_OF_2_BIT * explained(codes, 2)
        if best is None or best_merit is None:
            best, best_merit = codes, merit
            continue
        best = jnp.where((merit > best_merit)[..., None], codes, best)
        best_merit = jnp.maximum(merit, best_merit)
    assert best is not None
    return best


def _centred(codes: jax.Array, bits: int) -> jax.Array:
    return codes.astype(jnp.float32) - (2**bits - 1) / 2


def _drop(codes, y, unit, mean, *, bits, is_key, have=BITS) -> Codes:
    """Top bits of `codes`, with the scale fitted to the vector unit * y."""
    short = codes >> (have - bits)
    c = _centred(short, bits)
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
