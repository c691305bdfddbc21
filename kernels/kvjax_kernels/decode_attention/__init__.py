"""Attention of a few queries over stored tokens: one part of a softmax, to be merged with others.

    s = sum_i (scale * q_i . key_i - correction_i * |q_i|^2 * key_i.scale^2)    visible tokens only
    m = max(s)      l = sum(exp(s - m))      o = sum(exp(s - m) * value)

A part without visible tokens is m = -inf, l = 0, o = 0. Keys and value are arrays or `Codes`. Bytes
moved: the stored tokens once, for all query heads of a stored head and all queries.
"""

from typing import Literal

import jax

from ..codes import Codes
from .reference import Partial, merge, reference

__all__ = ["Partial", "decode_attention", "merge"]

Stored = jax.Array | Codes


def decode_attention(
    queries: tuple[jax.Array, ...],
    keys: tuple[Stored, ...],
    value: Stored | None,
    positions_BS: jax.Array,
    start_BT: jax.Array,
    stop_BT: jax.Array,
    /,
    *,
    scale: float,
    corrections: tuple[float, ...] | None = None,
    used: jax.Array | None = None,
    layer: jax.Array | None = None,
    impl: Literal["auto", "reference"] = "auto",
) -> "Partial":
    """One part (m, l, o) of attention over S stored tokens.

    A token is seen by query t if start[t] <= position < stop[t]. Slots with another position may
    hold anything, NaN included: causality, windows, ring buffers, tiers and padding are all this
    one rule.

    Args:
      queries: one [B, T, H, C] per scored stream.
      keys: as many, each an array [B, G, S, C] or `Codes` with leading axes [B, G]; one head
        (G = 1) serves all query heads. Codes are scored in their own basis: rotate q before.
      value: like a key, [B, G, S, V]; None: the first key is also the value.
      positions_BS: int32, the position that each slot holds; -1 for an empty slot.
      start_BT, stop_BT: int32, the range of positions that each query sees.
      scale: factor of the scores; no default, since latents need that of the unabsorbed head.
      corrections: factor of the log-normal term per key, nonzero for coded keys only: noise in a
        score raises its expected exponential. See `kvjax.quant.nested`. None: no correction.
      used: int32 scalar; slots from this one on are known to be invisible and are not read. Not
        differentiable in reverse mode. None: all slots.
      layer: int32 scalar; keys and value then carry a leading layer axis and this row is read. A
        slice outside would copy the layer.
      impl: "reference" (jnp, float32 inside), or "auto".

    Raises:
      NotImplementedError: an implementation that does not exist.
      ValueError: shapes that do not fit together.
    """
    if impl not in ("auto", "reference"):
        raise NotImplementedError(f"decode_attention has no implementation {impl!r}: reference")
    if len(queries) != len(keys):
        raise ValueError(f"{len(queries)} queries for {len(keys)} keys: expected one per key")
    _check_shapes(
        queries, keys, value, positions_BS, start_BT, stop_BT, has_layers=layer is not None
    )
    corrections = (0.0,) * len(keys) if corrections is None else corrections
    return reference(
        queries, keys, value, positions_BS, start_BT, stop_BT,
        scale=scale, corrections=corrections, used=used, layer=layer,
    )  # fmt: skip


def _check_shapes(queries, keys, value, positions_BS, start_BT, stop_BT, *, has_layers) -> None:
    """A wrong number of tokens or heads would otherwise be read without a complaint."""
    (B, T, H, _), S = queries[0].shape, positions_BS.shape[-1]
    exact = [("positions", positions_BS, (B, S)), ("start", start_BT, (B, T))]
    exact += [("stop", stop_BT, (B, T))]
    exact += [(f"query {i}", q, (B, T, H, q.shape[-1])) for i, q in enumerate(queries)]
    for name, array, shape in exact:
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}: expected {shape}")
    stored = [(f"key {i}", key, queries[i].shape[-1]) for i, key in enumerate(keys)]
    if value is not None:
        stored.append(("value", value, "V"))
    for name, array, size in stored:
        shape = _stored_shape(array)
        rows = shape[1:] if has_layers else shape
        fits = len(rows) == 4 and (rows[0], rows[2]) == (B, S) and H % rows[1] == 0
        if not fits or size not in ("V", rows[3]):
            form = f"[{'layers, ' if has_layers else ''}{B}, G, {S}, {size}]"
            raise ValueError(f"{name} has shape {shape}: expected {form}, where G divides {H}")


def _stored_shape(stored: Stored) -> tuple[int, ...]:
    if not isinstance(stored, Codes):
        return stored.shape
    *lead, blocks, tokens = stored.scale.shape
    return (*lead, blocks * tokens, stored.size)
