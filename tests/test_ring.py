"""Rings hold the last elements of an endless sequence, and are written without side effects."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import ring
from tests.tiny import normal
from tests.tolerances import EXACT, assert_close

L, B, G, S, C, T = 2, 3, 2, 5, 4, 3

held = jax.jit(ring.held, static_argnums=1)
write = jax.jit(ring.write)
read = jax.jit(ring.read)


def test_docstring_examples():
    assert doctest.testmod(ring).failed == 0


@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_held_is_what_writing_one_by_one_leaves(size):
    counts = np.arange(4 * size + 2, dtype=np.int32)
    slots, wanted = np.full(size, -1), []
    for count in counts:
        wanted.append(slots.copy())
        slots[count % size] = count
    found = np.asarray(held(counts, size))
    assert_close(np.maximum(found, -1), np.stack(wanted).astype(np.int32), EXACT)


def test_held_after_thousands_of_steps():
    count = 2_000_000_011
    found = np.asarray(held(np.int32([count]), 64))[0]
    assert sorted(found) == list(range(count - 64, count))
    assert (found % 64 == np.arange(64)).all()


def buffer():
    return normal(L, B, G, S, C)


def test_write_puts_each_value_into_its_slot_and_no_other():
    values, slots = normal(B, T, G, C, seed=1), np.int32([[0, 4, 2], [S, 3, S], [S, S, S]])
    wanted = buffer()
    for row, time in np.argwhere(slots < S):
        wanted[1, row, :, slots[row, time]] = values[row, time]
    assert_close(write(buffer(), jnp.int32(1), slots, values), wanted, EXACT)


def test_write_stores_in_the_dtype_of_the_buffer():
    narrow = write(jnp.bfloat16(buffer()), 0, np.zeros((B, 1), np.int32), normal(B, 1, G, C))
    assert_close(narrow[0, :, :, 0], jnp.bfloat16(normal(B, 1, G, C))[:, 0], EXACT)


def test_dropped_values_may_be_poison():
    values = np.full((B, T, G, C), np.nan, np.float32)
    slots = np.full((B, T), S, np.int32)
    assert_close(write(buffer(), 0, slots, values), buffer(), EXACT)


def test_read_is_one_slot_per_row_of_one_layer():
    slots = np.int32([4, 0, 2])
    wanted = np.stack([buffer()[1, row, :, slot] for row, slot in enumerate(slots)])
    assert_close(read(buffer(), 1, slots), wanted, EXACT)


def test_axes_after_the_slots_are_free():
    scale = normal(L, B, G, S)
    slots, values = np.int32([[1], [2], [S]]), normal(B, 1, G, seed=1)
    wanted = scale.copy()
    for row in range(2):
        wanted[0, row, :, slots[row, 0]] = values[row, 0]
    assert_close(write(scale, 0, slots, values), wanted, EXACT)
    assert_close(read(scale, 0, np.int32([1, 2, 3])), scale[0, np.arange(B), :, [1, 2, 3]], EXACT)
