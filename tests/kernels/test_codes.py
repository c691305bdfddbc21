"""The byte layout: documented once in words, here as literals and as a round trip."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kvjax_kernels.codes import BITS, Codes, pack, packed_bytes, unpack, unpack_fields

from tests import oracle
from tests.tolerances import EXACT, ROUNDING, assert_close

# Multiples of 16 and not; real head dims, latents.
SIZES = [1, 16, 17, 24, 80, 96, 576]

jitted_pack = jax.jit(pack, static_argnames="bits")  # one compilation where eager has ten


def random_codes(size, bits, lead=(2, 3), seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, 2**bits, (*lead, size)), jnp.uint16)


def random_packed(size, bits, *, lead=(2, 3, 4), mean, offset):
    """`Codes` of 3 blocks of 4 tokens; scales of bfloat16, as they are stored."""
    rng = np.random.default_rng(size)

    def normal(shape):
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    return Codes(
        words=jitted_pack(random_codes(size, bits, lead), bits=bits),
        scale=normal(lead),
        mean=normal((*lead[:-1], size)) if mean else None,
        offset=normal(lead) if offset else None,
        bits=bits,
        size=size,
    )


@pytest.mark.parametrize("size", SIZES)
def test_round_trip(size):
    codes = {bits: random_codes(size, bits) for bits in BITS}
    packed, unpacked = round_trips(codes)
    for bits in BITS:
        assert packed[bits].dtype == jnp.uint8
        assert packed[bits].shape == (2, 3, packed_bytes(size, bits))
        by_hand = oracle.unpacked(packed[bits], bits=bits, size=size)
        assert_close(by_hand, np.asarray(codes[bits], np.int64), EXACT)
    assert_close(unpacked, codes, EXACT)


@jax.jit
def round_trips(codes):
    """Packed and unpacked again, for each number of bits."""
    packed = {bits: pack(x, bits=bits) for bits, x in codes.items()}
    size = jax.tree.leaves(codes)[0].shape[-1]
    return packed, {bits: unpack(x, bits=bits, size=size) for bits, x in packed.items()}


def test_largest_code_in_every_place_touches_no_other():
    alone = {bits: jnp.eye(32, dtype=jnp.uint16) * (2**bits - 1) for bits in BITS}
    packed, unpacked = round_trips(alone)
    assert_close(unpacked, alone, EXACT)
    for bits in BITS:  # every bit of the bytes belongs to one code
        assert np.bitwise_xor.reduce(np.asarray(packed[bits])).tolist() == [255] * 4 * bits


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int32])
def test_any_integer_dtype_is_packed(dtype):
    codes = {bits: random_codes(24, bits) for bits in BITS}
    other = jax.tree.map(lambda x: x.astype(dtype), codes)
    assert_close(round_trips(other)[0], round_trips(codes)[0], EXACT)


def test_field_j_of_word_w_is_dim_j_times_words_plus_w():
    # 32 dims of 4 bits: 8 words of 4 fields. Dim 2 * 8 + 3 is bits 8..11 of word 3, low byte first.
    codes = jnp.zeros(32, jnp.uint16).at[2 * 8 + 3].set(0xA)
    packed = np.zeros(16, np.uint8)
    packed[2 * 3 + 1] = 0x0A
    assert_close(pack(codes, bits=4), packed, EXACT)


@pytest.mark.parametrize(
    "bits, codes, packed",
    [
        # Word w takes dims w, 16 / bits fields of it, the first in the lowest bits.
        (1, [1, 1] + [0] * 13 + [1], [0x03, 0x80]),
        (2, [1, 2] + [3, 0] * 7, [0xFD, 0xFF, 0x02, 0x00]),
        (4, [1, 2, 3, 4] * 4, [0x11, 0x11, 0x22, 0x22, 0x33, 0x33, 0x44, 0x44]),
        (8, list(range(16)), [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]),
    ],
)
def test_layout_literals(bits, codes, packed):
    assert pack(jnp.asarray(codes), bits=bits).tolist() == packed


@pytest.mark.parametrize("bits", BITS)
def test_padding_is_zero_codes(bits):
    packed = pack(jnp.full(24, 2**bits - 1), bits=bits)
    padded = oracle.unpacked(packed, bits=bits, size=32)
    assert padded.tolist() == [2**bits - 1] * 24 + [0] * 8


@pytest.mark.parametrize("bits", BITS)
def test_fields_are_contiguous_slices_of_dims(bits):
    codes = random_codes(96, bits)
    fields = unpack_fields(pack(codes, bits=bits), bits=bits)
    assert_close(fields, codes.reshape(2, 3, 16 // bits, 6 * bits), EXACT)


@pytest.mark.parametrize(
    "size, bits, expected",
    [(128, 1, 16), (128, 2, 32), (128, 4, 64), (128, 8, 128), (80, 4, 40), (96, 1, 12),
     (576, 2, 144), (16, 1, 2), (24, 1, 4), (24, 4, 16), (1, 1, 2), (17, 8, 32)],
)  # fmt: skip
def test_packed_bytes(size, bits, expected):
    assert packed_bytes(size, bits) == expected


@pytest.mark.parametrize("bits", [0, 3, 5, 16, -1])
def test_other_bits_are_refused(bits):
    message = rf"bits is {bits}: expected one of \(1, 2, 4, 8\)"
    with pytest.raises(ValueError, match=message):
        pack(jnp.zeros(16, jnp.uint16), bits=bits)
    with pytest.raises(ValueError, match=message):
        unpack(jnp.zeros(2, jnp.uint8), bits=bits, size=16)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("mean, offset", [(False, False), (True, False), (False, True)])
def test_decode_is_the_invariant(bits, mean, offset):
    codes = random_packed(24, bits, mean=mean, offset=offset)
    vectors = jax.jit(Codes.decode)(codes)
    assert (vectors.shape, vectors.dtype) == ((2, 3, 4, 24), jnp.float32)
    assert_close(vectors, oracle.decoded(codes), ROUNDING)


def test_decode_of_one_token_by_hand():
    codes = Codes(
        words=pack(jnp.asarray([[[0, 1, 2, 3]]]), bits=2),
        scale=jnp.full((1, 1), 2.0),
        mean=jnp.asarray([[10.0, 20.0, 30.0, 40.0]]),
        offset=jnp.full((1, 1), 0.25),
        bits=2,
        size=4,
    )
    assert codes.centred().tolist() == [[[-1.5, -0.5, 0.5, 1.5]]]
    assert codes.decode().tolist() == [[[7.25, 19.25, 31.25, 43.25]]]


def test_codes_are_a_pytree_with_static_bits_and_size():
    codes = random_packed(24, 4, lead=(2, 5, 3, 4), mean=True, offset=False)
    rows = jax.tree.map(lambda x: np.asarray(x)[1], codes)
    assert (rows.bits, rows.size, rows.offset) == (4, 24, None)
    assert rows.words.shape == (5, 3, 4, 16)
    other = dataclasses.replace(codes, bits=2)
    assert jax.tree.structure(codes) != jax.tree.structure(other)
