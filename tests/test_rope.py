"""Rotary embedding against complex numbers in float64, at positions where float32 is strained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.config import Pairing, RopeConfig
from kvjax.rope import angles, half_from_interleaved, rotate
from tests import oracle
from tests.tolerances import EXACT, QUANTISED, ROUNDING, assert_close

EPS = np.finfo(np.float32).eps
PAIRINGS = list(Pairing)


@jax.jit
def both_rotated(x_BTHR, positions_BT):
    """x rotated to its positions, under each pairing."""
    angles_BTA = angles(positions_BT, RopeConfig(dim=x_BTHR.shape[-1]))
    return {pairing.name: rotate(x_BTHR, angles_BTA, pairing=pairing) for pairing in Pairing}


def rotated(x, positions, pairing):
    return both_rotated(x, np.int32(positions))[pairing.name]


def expected(x, positions, pairing, base=1e4):
    return oracle.rotated(x, positions, base=base, interleaved=pairing is Pairing.INTERLEAVED)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def angle_error(positions, size, base=1e4):
    """What an angle is off in float32: the power's rounded exponent, and some roundings."""
    frequency = base ** (-np.arange(0, size, 2) / size)
    return (np.log(base) / 2 + 3) * EPS * oracle.wide(positions)[..., None] * frequency


FAR = np.array([[0, 1, 999, 1000, 4097, 131_071]] * 2)


@pytest.mark.parametrize("base", [10_000.0, 500_000.0, 1.0])
def test_angles_are_position_times_power_of_the_base(base):
    found = angles(jnp.asarray(FAR, jnp.int32), RopeConfig(dim=12, base=base))
    assert (found.shape, found.dtype) == ((2, 6, 6), jnp.float32)
    wanted = FAR[..., None] * base ** (-np.arange(0, 12, 2) / 12)
    assert_close(found, wanted, QUANTISED, bound=angle_error(FAR, 12, base))
    assert_close(found[..., 0], FAR.astype(np.float32), EXACT)


def test_angle_literals():
    found = angles(jnp.asarray([[1000]]), RopeConfig(dim=4, base=10_000.0))
    assert_close(found, [[[1000.0, 10.0]]], ROUNDING)
    found = angles(jnp.asarray([[1000]]), RopeConfig(dim=2, base=500_000.0))
    assert found.tolist() == [[[1000.0]]]


def test_bases_do_not_share_tables():
    one, other = (angles(FAR, RopeConfig(dim=4, base=base)) for base in (1e4, 1e6))
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rotation_by_a_literal_angle(pairing):
    # (1, 0) and (0, 1) by 1000 and by 10 radians: cos 1000 = 0.562379, sin 1000 = 0.826880.
    cos, sin = [0.5623790763, -0.8390715291], [0.8268795405, -0.5440211109]
    x = np.zeros((1, 1, 2, 4), np.float32)
    first, second = ([0, 1], [2, 3]) if pairing is Pairing.HALF else ([0, 2], [1, 3])
    x[0, 0, 0, first] = 1.0
    x[0, 0, 1, second] = 1.0
    wanted = np.zeros((1, 1, 2, 4))
    wanted[0, 0, 0, first], wanted[0, 0, 0, second] = cos, sin
    wanted[0, 0, 1, first], wanted[0, 0, 1, second] = np.negative(sin), cos
    bound = angle_error([[1000]], 4).max()
    assert_close(rotated(x, [[1000]], pairing), wanted, QUANTISED, bound=bound)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rotation_is_complex_multiplication(pairing):
    x = normal(2, 6, 3, 12)
    found = rotated(x, FAR, pairing)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    bound = 4 * (angle_error(FAR, 12).max(-1) + EPS)[:, :, None, None] * np.abs(x).max()
    assert_close(found, expected(x, FAR, pairing), QUANTISED, bound=bound)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_wrong_pairing_is_caught(pairing):
    other = PAIRINGS[1 - PAIRINGS.index(pairing)]
    x, positions = normal(1, 1, 1, 12), np.array([[1000]])
    wrong = expected(x, positions, other)
    bound = 4 * (angle_error(positions, 12).max() + EPS) * np.abs(x).max()
    with pytest.raises(AssertionError, match="not quantised"):
        assert_close(rotated(x, positions, pairing), wrong, QUANTISED, bound=bound)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_position_zero_changes_no_bit(pairing):
    x = normal(2, 6, 3, 12)
    assert_close(rotated(x, FAR * 0, pairing), x, EXACT)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_lengths_are_kept(pairing):
    x = normal(2, 6, 3, 12)
    found = np.linalg.norm(rotated(x, FAR, pairing), axis=-1)
    assert_close(found, np.linalg.norm(oracle.wide(x), axis=-1), ROUNDING)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("shift", [1, 1000, 131_000])
def test_products_depend_on_the_distance_alone(pairing, shift):
    q, k = normal(2, 6, 3, 12), normal(2, 6, 3, 12, seed=1)
    near_q, near_k = np.array([[5, 9, 17, 40, 64, 72]] * 2), np.array([[0, 9, 1, 33, 7, 71]] * 2)

    def product(shift):
        turned = (rotated(q, near_q + shift, pairing), rotated(k, near_k + shift, pairing))
        return np.sum(oracle.wide(turned[0]) * oracle.wide(turned[1]), axis=-1)

    # Each angle is rounded to float32 once; the frequencies are the same on both sides.
    rounding = EPS / 2 * (near_q + near_k + 2 * shift).max() + 8 * EPS
    bound = 2 * rounding * np.linalg.norm(q, axis=-1) * np.linalg.norm(k, axis=-1)
    assert_close(product(shift), product(0), QUANTISED, bound=bound)
    # And on the distance they do depend.
    moved = np.sum(oracle.wide(rotated(q, near_q + 3, pairing) * rotated(k, near_k, pairing)), -1)
    assert np.all(np.abs(moved - product(0)).max(axis=-1) > 0.01)


@pytest.mark.parametrize("size", [2, 4, 12, 64])
def test_permutation_maps_interleaved_to_half_exactly(size):
    order = half_from_interleaved(size)
    assert sorted(order) == list(range(size))
    x = normal(1, 6, 2, size)
    interleaved = rotated(x, FAR[:1], Pairing.INTERLEAVED)
    half = rotated(x[..., order], FAR[:1], Pairing.HALF)
    assert_close(half, interleaved[..., np.array(order)], EXACT)


def test_permutation_literal():
    assert half_from_interleaved(6) == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_bfloat16_is_rotated_in_float32(pairing):
    x = jnp.asarray(normal(2, 6, 3, 12), jnp.bfloat16)
    found = rotated(x, FAR, pairing)
    assert found.dtype == jnp.bfloat16
    wide = rotated(x.astype(jnp.float32), FAR, pairing)
    assert_close(found, wide.astype(jnp.bfloat16), EXACT)


@pytest.mark.parametrize("shape", [(1, 6, 6), (2, 6, 12), (2, 5, 6)])
def test_angles_must_fit(shape):
    with pytest.raises(ValueError, match=r"angles have shape .*: expected \(2, 6, 6\)"):
        rotate(jnp.ones((2, 6, 3, 12)), jnp.ones(shape), pairing=Pairing.HALF)
