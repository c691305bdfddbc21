"""Ring arithmetic and writes: element i of an endless sequence lives in slot i mod size."""

import jax
import jax.numpy as jnp


def held(count_B: jax.Array, size: int, /) -> jax.Array:
    """Index of the element in each slot after `count` elements were written; int32 [B, size].

    Negative in slots that nothing was written to.

    Example:
      >>> held(jnp.array([6]), 4).tolist()
      [[4, 5, 2, 3]]
    """
    last_B1 = count_B[:, None] - 1
    return last_B1 - (last_B1 - jnp.arange(size, dtype=jnp.int32)[None, :]) % size


def write(buffer: jax.Array, layer, slots_BT: jax.Array, values_BTG: jax.Array, /) -> jax.Array:
    """Put values [B, T, G, ...] into slots of one layer of a buffer [L, B, G, S, ...].

    A slot equal to S is out of range: that value is dropped, which is how padding is not written.
    One scatter, so a donated buffer is updated in place.
    """
    rows_B1 = jnp.arange(buffer.shape[1], dtype=jnp.int32)[:, None]
    values = values_BTG.astype(buffer.dtype)
    return buffer.at[layer, rows_B1, :, slots_BT].set(values, mode="drop")


def read(buffer: jax.Array, layer, slot_B: jax.Array, /) -> jax.Array:
    """One slot per row, [B, G, ...], of one layer of a buffer [L, B, G, S, ...]."""
    rows_B = jnp.arange(buffer.shape[1], dtype=jnp.int32)
    return buffer.at[layer, rows_B, :, slot_B].get(mode="clip")
