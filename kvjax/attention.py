"""The one softmax over all that a query sees, whatever its precision. Knows no cache."""

import dataclasses
from types import ModuleType

import jax
import jax.numpy as jnp
from kvjax_kernels.codes import Codes
from kvjax_kernels.decode_attention import Partial, decode_attention, merge

from .streams import Queries, Streams, scored


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Part:
    """One part of the stored tokens, and what each query sees of it."""

    keys: tuple[jax.Array | Codes, ...]  # [B, G, S, C], or with a leading layer axis
    value: jax.Array | Codes | None  # None: the first key is also the value
    positions: jax.Array  # int32 [B, S], -1 for an empty slot
    start: jax.Array  # int32 [B, T], first position seen
    stop: jax.Array  # int32 [B, T], one past the last
    used: jax.Array | None  # int32 scalar, slots that hold anything; None: all


def attend(
    queries: Queries,
    parts: list[Part],
    /,
    *,
    scale: float,
    code: ModuleType | None = None,
    layer: jax.Array | None = None,
) -> jax.Array:
    """softmax(scale * q . k) v over the visible tokens of all parts.

    Args:
      queries: [B, T, H, C] per stream.
      parts: as many as there are places and precisions; their softmax is merged exactly.
      scale: factor of the scores.
      code: module of `kvjax.quant` that coded parts were made with.
      layer: which row of the parts' leading layer axis; None if they have none.

    Returns:
      float32 [B, T, H, V]; zero for a query that sees nothing.
    """
    return merge([_partial(queries, part, scale, code, layer) for part in parts])


def attend_new(queries: Queries, new: Streams, /, *, scale: float, window: int | None) -> jax.Array:
    """Causal attention among new tokens alone, as in training: the whole sequence, no cache.

    Args:
      new: streams [B, T, G, C] of the same T tokens.
      window: how many tokens a query sees, itself included; None: all before it.
    """
    B, T = jax.tree.leaves(new)[0].shape[:2]
    positions_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    stored = jax.tree.map(lambda x_BTGC: x_BTGC.transpose(0, 2, 1, 3), new)
    start_BT = window_start(positions_BT, window)
    part = Part(stored.keys(), stored.value, positions_BT, start_BT, positions_BT + 1, used=None)
    return attend(queries, [part], scale=scale)


def window_start(positions_BT: jax.Array, window: int | None, /) -> jax.Array:
    """First position that each query sees."""
    if window is None:
        return jnp.zeros_like(positions_BT)
    return jnp.maximum(positions_BT - (window - 1), 0)


def _partial(queries: Queries, part: Part, scale, code, layer) -> Partial:
    asked, value = scored(queries), part.keys[0] if part.value is None else part.value
    coded = [isinstance(key, Codes) for key in part.keys]
    corrections = None
    if any(coded):
        assert code is not None  # whoever stored codes knows which
        corrections = tuple(
            code.correction(key.bits, key.size, scale) if isinstance(key, Codes) else 0.0
            for key in part.keys
        )
        asked = tuple(
            _turn(q, code) if is_coded else q for q, is_coded in zip(asked, coded, strict=True)
        )
    partial = decode_attention(
        asked, part.keys, part.value, part.positions, part.start, part.stop,
        scale=scale, corrections=corrections, used=part.used, layer=layer,
    )  # fmt: skip
    if isinstance(value, Codes):
        assert code is not None
        partial = dataclasses.replace(partial, o=_turn(partial.o, code))
    return partial


def _turn(x_BTHC: jax.Array, code: ModuleType) -> jax.Array:
    """Into the basis of the code, or back: the matrix is its own inverse."""
    matrix = code.basis(x_BTHC.shape[-1])
    if matrix is None:
        return x_BTHC
    return jnp.einsum("BTHC,CK->BTHK", x_BTHC.astype(jnp.float32), matrix, precision="highest")
