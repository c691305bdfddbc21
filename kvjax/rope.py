"""Rotary position embedding. Not for scalings of the frequencies."""

import jax
import jax.numpy as jnp

from .config import Pairing, RopeConfig


def angles(positions_BT: jax.Array, config: RopeConfig, /) -> jax.Array:
    """Angles position * base^(-2i/R) in radians, float32 [B, T, R/2].

    Always float32: bfloat16 cannot tell positions above 256 apart.

    Su et al., RoFormer (arXiv:2104.09864).
    """
    exponent = jnp.arange(0, config.dim, 2, dtype=jnp.float32) / config.dim
    frequencies_A = 1.0 / (jnp.float32(config.base) ** exponent)
    return positions_BT.astype(jnp.float32)[..., None] * frequencies_A[None, None, :]


def rotate(x_BTHR: jax.Array, angles_BTA: jax.Array, /, *, pairing: Pairing) -> jax.Array:
    """Turn each pair of rotary dims by its token's angle.

    Rotating q by m and k by n makes their dot product depend on m - n alone; lengths are kept.

    Args:
      x_BTHR: queries or keys; rotary dims only.
      angles_BTA: radians, float32, from `angles`.
      pairing: which dims form a pair.

    Returns:
      Same shape and dtype as `x`; computed in float32.

    Raises:
      ValueError: the angles are not R/2 per token.

    Example:
      >>> rotate(jnp.ones((1, 1, 1, 2)), jnp.zeros((1, 1, 1)), pairing=Pairing.HALF).tolist()
      [[[[1.0, 1.0]]]]
    """
    B, T, _, R = x_BTHR.shape
    if angles_BTA.shape != (B, T, R // 2):
        raise ValueError(f"angles have shape {angles_BTA.shape}: expected {(B, T, R // 2)}")
    cos, sin = jnp.cos(angles_BTA)[:, :, None, :], jnp.sin(angles_BTA)[:, :, None, :]
    x = x_BTHR.astype(jnp.float32)
    if pairing is Pairing.HALF:
        first, second = x[..., : R // 2], x[..., R // 2 :]
    else:
        first, second = x[..., 0::2], x[..., 1::2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    if pairing is Pairing.HALF:
        out = jnp.concatenate(turned, axis=-1)
    else:
        out = jnp.stack(turned, axis=-1).reshape(x.shape)
    return out.astype(x_BTHR.dtype)


def half_from_interleaved(size: int) -> list[int]:
    """Row order that turns interleaved rotary rows into half-split ones: out[i] = in[order[i]].

    A checkpoint with adjacent pairs, its q and k rows taken in this order, gives the same scores
    when rotated half-split.
    """
    return [*range(0, size, 2), *range(1, size, 2)]
