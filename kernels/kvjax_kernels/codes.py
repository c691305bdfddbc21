"""The byte layout of coded vectors: what the cache stores and every implementation reads.

A vector of C numbers becomes C codes of `bits` bits. Codes are gathered into little-endian 16-bit
words: field j of word w is dim j * W + w, with W = C * bits / 16 words (C padded to a multiple of
16 with zero codes). Neighbouring dims thus lie in neighbouring words, and one mask over a word
vector selects a contiguous slice of dims: what makes unpacking one instruction per register on a
GPU, where a pair of words is loaded as one operand pair. Words are stored as pairs of bytes.
"""

import dataclasses

import jax
import jax.numpy as jnp

WORD_BITS = 16
BITS = (1, 2, 4, 8)


def packed_bytes(size: int, bits: int) -> int:
    """Bytes that `size` codes of `bits` bits take."""
    return -(-size // WORD_BITS) * 2 * bits


def pack(codes: jax.Array, /, *, bits: int) -> jax.Array:
    """Codes [..., C] with values below 2^bits -> uint8 [..., packed_bytes(C, bits)].

    Raises:
      ValueError: `bits` is not one of 1, 2, 4, 8.

    Example:
      >>> pack(jnp.arange(16) % 2, bits=1).tolist()
      [170, 170]
    """
    _check_bits(bits)
    lead, size = codes.shape[:-1], codes.shape[-1]
    padded = -(-size // WORD_BITS) * WORD_BITS
    fields = WORD_BITS // bits
    wide = jnp.pad(codes.astype(jnp.uint16), [(0, 0)] * len(lead) + [(0, padded - size)])
    wide = wide.reshape(*lead, fields, padded // fields)
    shifts = _shifts(bits, len(lead))
    # The fields do not overlap, so their sum is their union.
    words = jnp.sum(wide << shifts, axis=-2, dtype=jnp.uint16)
    return jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(*lead, -1)


def unpack(packed: jax.Array, /, *, bits: int, size: int) -> jax.Array:
    """The inverse of `pack`: uint8 bytes -> uint16 codes [..., size]."""
    return unpack_fields(packed, bits=bits).reshape(*packed.shape[:-1], -1)[..., :size]


def unpack_fields(packed: jax.Array, /, *, bits: int) -> jax.Array:
    """Codes as they lie, padding too: uint16 [..., field, word], dim = field * words + word."""
    _check_bits(bits)
    lead = packed.shape[:-1]
    words = jax.lax.bitcast_convert_type(packed.reshape(*lead, -1, 2), jnp.uint16)
    return (words[..., None, :] >> _shifts(bits, len(lead))) & jnp.uint16(2**bits - 1)


def _shifts(bits: int, lead: int) -> jax.Array:
    fields = WORD_BITS // bits
    return (jnp.arange(fields, dtype=jnp.uint16) * bits).reshape((1,) * lead + (fields, 1))


def _check_bits(bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"bits is {bits}: expected one of {BITS}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Codes:
    """Coded vectors of N blocks of S tokens; leading axes (layer, batch, head) are free.

    Invariant: vector = mean[block] + scale[token] * (code - (2^bits - 1) / 2) + offset[token], in
    the basis of the code (for the nested code: rotated).
    """

    words: jax.Array  # uint8 [..., N, S, packed_bytes(C, bits)]
    scale: jax.Array  # [..., N, S]
    mean: jax.Array | None  # [..., N, C]
    offset: jax.Array | None  # [..., N, S]
    bits: int = dataclasses.field(metadata={"static": True})
    size: int = dataclasses.field(metadata={"static": True})  # C

    def centred(self) -> jax.Array:
        """Codes about zero, float32 [..., N, S, C]: -1.5, -0.5, 0.5, 1.5 at 2 bits."""
        codes = unpack(self.words, bits=self.bits, size=self.size)
        return codes.astype(jnp.float32) - (2**self.bits - 1) / 2

    def decode(self) -> jax.Array:
        """The vectors, float32 [..., N, S, C], in the basis of the code."""
        vectors = self.scale.astype(jnp.float32)[..., None] * self.centred()
        if self.mean is not None:
            vectors = vectors + self.mean.astype(jnp.float32)[..., None, :]
        if self.offset is not None:
            vectors = vectors + self.offset.astype(jnp.float32)[..., None]
        return vectors
