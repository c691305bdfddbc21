"""The codes by their definitions in float64, and the claims about errors that the cache rests on.

Statistics are of 1024 normal vectors of 128 dims with fixed seeds. Their bounds leave three times
what another seed was seen to move them.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.quant import CODES, literal, nested
from kvjax.quant.layout import Layout
from kvjax.quant.rotation import rotation
from tests import oracle
from tests.tolerances import EXACT, QUANTISED, ROUNDING, assert_close

STATIC = ("bits", "is_key")
ENCODE = {name: jax.jit(code.encode, static_argnames=STATIC) for name, code in CODES.items()}
DEMOTE = {name: jax.jit(code.demote, static_argnames=STATIC) for name, code in CODES.items()}
encode, demote = ENCODE["nested"], DEMOTE["nested"]

HEADS, BLOCKS, TOKENS, DIMS = 2, 8, 64, 128
DEMOTIONS = [(4, 2), (4, 1), (2, 1)]
BF16 = 2.0**-8  # greatest relative error of rounding to bfloat16


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.cache
def keys():
    """Normal vectors about a mean per head and dim that is much larger than they are."""
    mean = 5 * normal(HEADS, 1, 1, DIMS, seed=1)
    return normal(HEADS, BLOCKS, TOKENS, DIMS) + mean


@functools.cache
def coded(bits, is_key=True, start=None):
    """The codes of `keys`; with `start`, made at that many bits and demoted."""
    if start is None:
        return encode(keys(), bits=bits, is_key=is_key)
    return demote(coded(start, is_key), bits=bits, is_key=is_key)


def in_basis(x, codes):
    """What is coded of x: rotated, less the mean that is stored; float64."""
    y = oracle.wide(x) @ oracle.wide(rotation(x.shape[-1]))
    return y if codes.mean is None else y - oracle.wide(codes.mean)[..., None, :]


def centred(codes):
    raw = oracle.unpacked(codes.words, bits=codes.bits, size=codes.size)
    return raw - (2**codes.bits - 1) / 2


def errors(codes, x):
    """(error, what was coded): decoded - x and x less the mean, in the basis of the code."""
    y = in_basis(x, codes)
    return oracle.wide(codes.scale)[..., None] * centred(codes) - y, y


def dot(a, b):
    return np.sum(a * b, axis=-1)


# The rotation


def test_rotation_is_orthogonal_and_symmetric_for_every_size():
    for size in [*range(1, 257), 576]:
        matrix = rotation.__wrapped__(size)  # uncached: 256 matrices are not kept
        assert matrix.dtype == np.float32
        assert np.array_equal(matrix, matrix.T), size
        assert_close(matrix @ matrix, np.eye(size), ROUNDING, scale=1.0)


@pytest.mark.parametrize("size", [2, 16, 64, 80, 96, 128, 192, 256, 512, 576])
def test_rotation_spreads_one_dim_over_all(size):
    largest = np.abs(rotation(size)).max() * size**0.5
    assert largest <= (1.0001 if size & (size - 1) == 0 else 2.5)


def test_rotation_literals():
    signs = [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    assert_close(rotation(4), np.float32(signs) / 2, EXACT)
    third = np.float32([[1, -2, -2], [-2, 1, -2], [-2, -2, 1]]) / 3
    assert_close(rotation(3), third, ROUNDING)
    assert_close(rotation(6)[:3:2, :2], np.float32([[1, 1], [-2, -2]]) / 3 / 2**0.5, ROUNDING)
    assert rotation(1).tolist() == [[1.0]]


# The nested code


@pytest.mark.parametrize("is_key", [True, False])
def test_a_code_is_the_cell_of_its_number(is_key):
    codes = coded(4, is_key)
    y = in_basis(keys(), codes)
    rms = np.sqrt(np.mean(y * y, axis=-1, keepdims=True))
    found, fits = centred(codes), []
    for step in nested.STEPS:
        cell = np.clip(y / (step * rms), -7.5, 7.5)
        fits.append(np.all(np.abs(found - cell) <= 0.5 + 1e-4, axis=-1))  # y is rounded to float32
    assert np.all(np.any(fits, axis=0))
    assert np.sum(np.any(fits, axis=(1, 2, 3))) > 2  # tokens differ in their best step


def test_the_best_step_is_chosen():
    y = in_basis(keys(), coded(4, False))
    rms = np.sqrt(np.mean(y * y, axis=-1, keepdims=True))

    def explained(c):
        return dot(y, c) ** 2 / dot(c, c)

    def merit(index):
        return explained(index - 7.5) + nested.SHARE_OF_2_BIT * explained((index // 4) - 1.5)

    tried = [np.clip(np.floor(y / (step * rms)) + 8, 0, 15) for step in nested.STEPS]
    best = np.max([merit(index) for index in tried], axis=0)
    assert_close(merit(centred(coded(4, False)) + 7.5), best, QUANTISED, bound=1e-4 * best)


def test_mean_is_that_of_the_block_per_dim():
    y = oracle.wide(keys()) @ oracle.wide(rotation(DIMS))
    mean = y.mean(axis=-2)
    assert coded(4).mean.shape == (HEADS, BLOCKS, DIMS)
    assert_close(coded(4).mean, mean, QUANTISED, bound=BF16 * np.abs(mean) + 1e-5)
    assert coded(4, False).mean is None


@pytest.mark.parametrize("bits", [4, 2, 1])
def test_key_scale_keeps_the_products_and_value_scale_is_least_squares(bits):
    codes = coded(bits, True)
    y, c = in_basis(keys(), codes), centred(codes)
    wanted = dot(y, y) / dot(y, c)
    assert_close(codes.scale, wanted, QUANTISED, bound=1.01 * BF16 * wanted)
    codes = coded(bits, False)
    y, c = in_basis(keys(), codes), centred(codes)
    wanted = dot(y, c) / dot(c, c)
    assert_close(codes.scale, wanted, QUANTISED, bound=1.01 * BF16 * wanted)


@pytest.mark.parametrize("is_key", [True, False])
@pytest.mark.parametrize("start, bits", DEMOTIONS)
def test_demotion_keeps_the_top_bits(start, bits, is_key):
    long, short = coded(start, is_key), coded(bits, is_key, start)
    raw = [oracle.unpacked(x.words, bits=x.bits, size=DIMS) for x in (long, short)]
    assert (short.bits, short.size) == (bits, DIMS)
    assert_close(raw[1], raw[0] >> (start - bits), EXACT)
    assert_close(short.words, coded(bits, is_key).words, EXACT)  # as if coded with few at once
    if is_key:
        assert_close(short.mean, long.mean, EXACT)


@pytest.mark.parametrize("is_key", [True, False])
def test_demotion_in_two_steps_gives_the_codes_of_one(is_key):
    once, twice = coded(1, is_key, 4), demote(coded(2, is_key, 4), bits=1, is_key=is_key)
    assert_close(twice.words, once.words, EXACT)
    assert_scales_are_near(twice, once)


@pytest.mark.parametrize("is_key", [True, False])
@pytest.mark.parametrize("start, bits", DEMOTIONS)
def test_refitted_scale_is_near_that_of_the_original(start, bits, is_key):
    assert_scales_are_near(coded(bits, is_key, start), coded(bits, is_key))


def assert_scales_are_near(codes, others):
    """Within 2 % on average and 10 % each."""
    ratio = oracle.wide(codes.scale) / oracle.wide(others.scale)
    assert_close(ratio.mean(), 1.0, QUANTISED, bound=0.02)
    assert_close(ratio, np.ones_like(ratio), QUANTISED, bound=0.1)


def test_demotion_to_as_many_bits_is_the_same_and_to_more_is_refused():
    assert nested.demote(coded(2), bits=2, is_key=True) is coded(2)
    with pytest.raises(ValueError, match="cannot demote 2-bit codes to 4 bits"):
        nested.demote(coded(2), bits=4, is_key=True)


@pytest.mark.parametrize("bits, is_key, wanted", [
    (4, True, 0.0106), (2, True, 0.148), (1, True, 0.564),
    (4, False, 0.0105), (2, False, 0.129), (1, False, 0.361),
])  # fmt: skip
def test_relative_squared_error(bits, is_key, wanted):
    x = keys() - keys().mean(axis=(1, 2), keepdims=True)
    codes = encode(x, bits=bits, is_key=is_key)
    error, y = errors(codes, x)
    relative = np.mean(dot(error, error) / dot(y, y))
    assert_close(relative, wanted, QUANTISED, bound=0.03 * wanted)


@pytest.mark.parametrize("start, bits", [(None, 4), (None, 2), (None, 1), *DEMOTIONS])
def test_scores_of_keys_are_unbiased(start, bits):
    error, y = errors(coded(bits, True, start), keys())
    bound = 0.005 if start is None else 0.02  # a refitted scale is a little short
    # Over all directions of q, the slope of q . decoded on q . y is that of the vectors themselves.
    slope = dot(error + y, y) / dot(y, y)
    assert_close(slope.mean(), 1.0, QUANTISED, bound=bound)
    q = oracle.wide(normal(64, DIMS, seed=3))
    true, found = (q @ x.reshape(-1, DIMS).T for x in (y, error + y))
    assert_close(np.sum(true * found) / np.sum(true**2), 1.0, QUANTISED, bound=0.01 + bound)


def test_scores_of_value_codes_shrink():
    # What the scale of keys is for: least squares lose 1 - 2 / pi of a score at 1 bit.
    x = normal(HEADS, BLOCKS, TOKENS, DIMS)
    error, y = errors(encode(x, bits=1, is_key=False), x)
    slope = np.mean(dot(error + y, y) / dot(y, y))
    assert_close(slope, 2 / math.pi, QUANTISED, bound=0.01)


@pytest.mark.parametrize("bits, bound", [(2, 0.015), (1, 0.01)])
def test_noise_constants(bits, bound):
    """The mean of |e|^2 / (size * a^2) over normal tokens; 1 - 2/pi of the energy at 1 bit."""
    size = 128
    x = normal(1, 40, TOKENS, size)
    codes = encode(x, bits=bits, is_key=True)
    error, _ = errors(codes, x)
    noise = np.mean(dot(error, error) / (size * oracle.wide(codes.scale) ** 2))
    assert_close(nested.NOISE[bits], noise, QUANTISED, bound=bound * noise)
    if bits == 1:
        assert_close(nested.NOISE[1], (1 - 2 / math.pi) / 4, QUANTISED, bound=1e-6)


SCALE = DIMS**-0.5  # the variance of a score is 1, that of its error 0.57 at 1 bit


@functools.cache
def score_errors(bits, start=None):
    """(errors of scores, their corrections) [queries, tokens] for random queries, in a softmax."""
    codes = coded(bits, True, start)
    error, _ = errors(codes, keys())
    q = oracle.wide(normal(200, DIMS, seed=4))
    factor = nested.correction(bits, DIMS, SCALE)
    predicted = factor * dot(q, q)[:, None] * oracle.wide(codes.scale).reshape(1, -1) ** 2
    return SCALE * q @ error.reshape(-1, DIMS).T, predicted


@pytest.mark.parametrize("bits, start", [(2, None), (1, None), (2, 4), (1, 4), (1, 2)])
def test_correction_predicts_the_variance_of_scores(bits, start):
    error, predicted = score_errors(bits, start)
    variance = np.mean(error**2)
    assert_close(np.mean(2 * predicted), variance, QUANTISED, bound=0.05 * variance)
    assert_close(error.mean(), 0.0, QUANTISED, bound=0.02 * error.std())


@pytest.mark.parametrize("bits, start", [(2, None), (1, None), (2, 4), (1, 4), (1, 2)])
def test_corrected_scores_keep_their_expected_exponential(bits, start):
    error, predicted = score_errors(bits, start)
    assert np.mean(np.exp(error)) > 1 + predicted.mean() > 1.05  # too much without it
    assert_close(np.mean(np.exp(error - predicted)), 1.0, QUANTISED, bound=0.02)


def test_correction_literals():
    assert nested.correction(4, 128, 0.1) == 0.0
    assert nested.correction(1, 1, 0.1) == 0.0
    wanted = 0.5 * 0.01 * 128 * 0.0908451 / 127
    assert math.isclose(nested.correction(1, 128, 0.1), wanted, rel_tol=1e-9)
    assert nested.correction(2, 64, 0.2) == 4 * nested.correction(2, 64, 0.1)


@pytest.mark.parametrize("name", CODES)
def test_layout_says_what_encode_makes(name):
    x = jax.ShapeDtypeStruct((1, 16, 24), jnp.float32)
    for bits in (4, 2, 1):
        for is_key in (True, False):
            encode = functools.partial(CODES[name].encode, bits=bits, is_key=is_key)
            codes = jax.eval_shape(encode, x)
            made = Layout(mean=codes.mean is not None, offset=codes.offset is not None)
            assert CODES[name].layout(24, bits=bits, is_key=is_key) == made
            for array in (codes.scale, codes.mean, codes.offset):
                assert array is None or array.dtype == jnp.bfloat16


def test_basis_is_that_of_the_code():
    assert_close(nested.basis(24), rotation(24), EXACT)
    assert literal.basis(24) is None


# The literal code


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_literal_code_is_uniform_between_the_least_and_greatest(bits):
    x = normal(2, 16, 24) * 3 + 1
    codes = ENCODE["literal"](x, bits=bits, is_key=True)
    low, high = (oracle.wide(f(x, axis=-1, keepdims=True)) for f in (np.min, np.max))
    step = (high - low) / (2**bits - 1)
    wanted = np.round((oracle.wide(x) - low) / step)
    assert_close(oracle.unpacked(codes.words, bits=bits, size=24), wanted.astype(int), EXACT)
    # Half a step, and the rounding of step and offset to bfloat16.
    bound = step / 2 + BF16 * (np.abs(codes.offset)[..., None] + step * 2**bits / 2)
    assert_close(oracle.decoded(codes), x, QUANTISED, bound=bound)
    assert_close(codes.scale, step[..., 0], QUANTISED, bound=BF16 * step[..., 0] * 1.01)


def test_literal_sign_code():
    x = normal(2, 16, 24)
    codes = ENCODE["literal"](x, bits=1, is_key=False)
    wanted = np.where(x >= 0, 1, -1) * np.abs(x).mean(axis=-1, keepdims=True)
    assert_close(oracle.decoded(codes), wanted, QUANTISED, bound=BF16 * np.abs(wanted) * 1.01)


@pytest.mark.parametrize("bits", [2, 1])
def test_literal_demotion_quantises_anew(bits):
    long = ENCODE["literal"](normal(2, 16, 24), bits=4, is_key=True)
    short = DEMOTE["literal"](long, bits=bits, is_key=True)
    anew = ENCODE["literal"](np.float32(oracle.decoded(long)), bits=bits, is_key=True)
    assert_close(short, anew, EXACT)
    assert literal.demote(long, bits=4, is_key=True) is long


def test_literal_code_corrects_nothing():
    assert [literal.correction(bits, 64, 0.1) for bits in (1, 2, 4, 8)] == [0.0] * 4


# Hard vectors, for both


def one_hot():
    x = np.zeros((16, 24), np.float32)
    x[np.arange(16), np.arange(16)] = 3.0
    return x


HARD = {
    "zero": np.zeros((16, 24), np.float32),
    "constant": np.full((16, 24), 0.7, np.float32),
    "constant in each dim": np.tile(normal(24), (16, 1)),
    "constant in each token": np.tile(normal(16, 1), (1, 24)),
    "one hot": one_hot(),
    "one dim huge": normal(16, 24) * np.where(np.arange(24) == 5, 1e30, 1).astype(np.float32),
    "one token huge": normal(16, 24) * np.where(np.arange(16) == 5, 1e30, 1)[:, None],
    "huge": normal(16, 24) * 1e30,
    "tiny": normal(16, 24) * 1e-30,
    "one number": np.float32(np.eye(16, 24) * (np.arange(16) == 3)[:, None]),
}


@functools.cache
def hard_codes(name, is_key):
    """(hard blocks, their codes at 4, 2 and 1 bits and after each demotion)."""

    @jax.jit  # one compilation for all
    def codes(x):
        code = CODES[name]
        long = {bits: code.encode(x, bits=bits, is_key=is_key) for bits in (4, 2, 1)}
        short = {f"{a}{b}": code.demote(long[a], bits=b, is_key=is_key) for a, b in DEMOTIONS}
        return {str(bits): long[bits] for bits in long} | short

    x = np.stack(list(HARD.values())).astype(np.float32)
    return x, codes(x)


@pytest.mark.parametrize("is_key", [True, False])
@pytest.mark.parametrize("name", CODES)
def test_hard_vectors_stay_finite(name, is_key):
    _, codes = hard_codes(name, is_key)
    for kind, made in codes.items():
        vectors = oracle.decoded(made)
        for row, hard in enumerate(HARD):
            assert np.all(np.isfinite(vectors[row])), (kind, hard)
            assert np.abs(vectors[row]).max() < 1e32, (kind, hard)
            assert name == "literal" or np.all(oracle.wide(made.scale)[row] >= 0), (kind, hard)


@pytest.mark.parametrize("is_key", [True, False])
@pytest.mark.parametrize("name", CODES)
def test_zero_is_coded_as_zero(name, is_key):
    _, codes = hard_codes(name, is_key)
    for kind, made in codes.items():
        assert not np.any(oracle.decoded(made)[list(HARD).index("zero")]), kind


@pytest.mark.parametrize("hard", ["constant", "constant in each dim", "huge", "tiny", "one hot"])
def test_hard_vectors_are_coded_as_well_as_others(hard):
    x, codes = hard_codes("nested", True)
    row = list(HARD).index(hard)
    vectors = oracle.decoded(codes["4"])[row] @ oracle.wide(rotation(24))
    error = np.sqrt(np.mean((vectors - x[row]) ** 2) / np.mean(oracle.wide(x[row]) ** 2))
    assert error < 0.15


@pytest.mark.parametrize("size", [1, 3, 80])
def test_any_size_is_coded(size):
    x = normal(2, 16, size)
    codes = encode(x, bits=4, is_key=False)
    vectors = oracle.decoded(codes) @ oracle.wide(rotation(size))
    assert np.sqrt(np.mean((vectors - x) ** 2)) < 0.15
    assert np.all(np.isfinite(oracle.decoded(demote(codes, bits=1, is_key=False))))


# Independence


def codes_at(codes, *where):
    """Words and scales of some heads, blocks or tokens."""
    return [np.asarray(x)[where] for x in (codes.words, codes.scale)]


@pytest.mark.parametrize("is_key", [True, False])
def test_no_head_or_block_influences_another(is_key):
    x = normal(2, 3, 16, 24)
    changed = x.copy()
    changed[0, 1] = np.float32(1e30) * normal(16, 24, seed=9)
    one, other = (encode(a, bits=4, is_key=is_key) for a in (x, changed))
    for where in [(1,), (0, 0), (0, 2)]:
        assert_close(codes_at(one, *where), codes_at(other, *where), EXACT)
        if is_key:
            assert_close(one.mean[where], other.mean[where], EXACT)
    assert not np.array_equal(one.words[0, 1], other.words[0, 1])


def test_tokens_of_values_do_not_influence_one_another():
    x = normal(2, 3, 16, 24)
    changed = x.copy()
    changed[:, :, 7] = np.float32(1e30) * normal(2, 3, 24, seed=9)
    one, other = (encode(a, bits=4, is_key=False) for a in (x, changed))
    others = np.arange(16) != 7
    where = (slice(None), slice(None), others)
    assert_close(codes_at(one, *where), codes_at(other, *where), EXACT)


def test_tokens_of_keys_meet_in_the_mean_alone():
    x = normal(2, 3, 16, 24)
    changed = x.copy()  # the sum of two tokens stays, and with it the mean
    changed[:, :, 7] += 2.0
    changed[:, :, 8] -= 2.0
    one, other = (encode(a, bits=4, is_key=True) for a in (x, changed))
    assert_close(one.mean, other.mean, EXACT)
    where = (slice(None), slice(None), ~np.isin(np.arange(16), (7, 8)))
    assert_close(codes_at(one, *where), codes_at(other, *where), EXACT)
    shifted = encode(x + 40 * np.float32(changed != x), bits=4, is_key=True)
    assert not np.array_equal(shifted.words[:, :, 0], one.words[:, :, 0])


@pytest.mark.parametrize("is_key", [True, False])
@pytest.mark.parametrize("name", CODES)
def test_batch_of_two_is_two_batches_of_one(name, is_key):
    x = normal(2, 3, 16, 24)
    both = ENCODE[name](x, bits=4, is_key=is_key)
    short = DEMOTE[name](both, bits=1, is_key=is_key)
    for row in (0, 1):
        alone = ENCODE[name](x[row : row + 1], bits=4, is_key=is_key)
        assert_close(alone, jax.tree.map(lambda a, row=row: a[row : row + 1], both), EXACT)
        alone = DEMOTE[name](alone, bits=1, is_key=is_key)
        assert_close(alone, jax.tree.map(lambda a, row=row: a[row : row + 1], short), EXACT)


@pytest.mark.parametrize("name", CODES)
def test_bfloat16_input_is_coded_in_float32(name):
    x = jnp.asarray(normal(2, 16, 24), jnp.bfloat16)
    wide = ENCODE[name](x.astype(jnp.float32), bits=4, is_key=True)
    assert_close(ENCODE[name](x, bits=4, is_key=True), wide, EXACT)


def test_codes_of_a_code_module_are_complete():
    for code in CODES.values():
        for name in ("encode", "demote", "layout", "correction", "basis"):
            assert callable(getattr(code, name))
    assert [field.name for field in dataclasses.fields(Layout)] == ["mean", "offset"]
