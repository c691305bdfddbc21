"""One attention layer over its new tokens and its cache: the only file that knows both."""

from typing import Protocol

import jax
import jax.numpy as jnp

from .attention import attend, attend_new, window_start
from .cache import TieredLayers
from .config import AttentionConfig
from .quant import CODES
from .streams import Queries, Streams


class Variant(Protocol):
    """What an attention module offers: projections; the softmax is the same for all."""

    config: AttentionConfig

    def project(self, x_BTD: jax.Array, positions_BT: jax.Array, /) -> tuple[Queries, Streams]: ...

    def output(self, o_BTHV: jax.Array, /) -> jax.Array: ...


def attention_layer(
    variant: Variant,
    x_BTD: jax.Array,
    layers: TieredLayers | None,
    /,
    *,
    layer: jax.Array | int,
    lengths: jax.Array | None,
    counts: jax.Array | None,
) -> tuple[jax.Array, TieredLayers | None]:
    """Project, rotate, append, attend, project out.

    Args:
      x_BTD: T new tokens.
      layers: storage of the layers of this kind; None: the tokens see one another only.
      layer: which of `layers` this is.
      lengths: int32 [B], tokens stored so far; None: none.
      counts: int32 [B], how many of the T tokens are real, the others padding at the end; None:
        all.

    Returns:
      ([B, T, D] in the dtype of x, the layers with the new tokens stored).
    """
    B, T, _ = x_BTD.shape
    lengths = jnp.zeros((B,), jnp.int32) if lengths is None else lengths
    counts = jnp.full((B,), T, jnp.int32) if counts is None else counts
    positions_BT = lengths[:, None] + jnp.arange(T, dtype=jnp.int32)[None, :]
    with jax.named_scope("project"):
        queries, new = variant.project(x_BTD, positions_BT)
    scale, window = variant.config.scale, variant.config.window
    with jax.named_scope("attention"):
        if layers is None:
            o_BTHV = attend_new(queries, new, scale=scale, window=window)
        else:
            o_BTHV, layers = _attend_cached(
                queries, new, layers, layer, lengths, counts, scale=scale, window=window
            )
    return variant.output(o_BTHV.astype(x_BTD.dtype)), layers


def _attend_cached(
    queries: Queries, new: Streams, layers: TieredLayers, layer, lengths, counts, *, scale, window
) -> tuple[jax.Array, TieredLayers]:
    """Append, then attend; long appends in steps that the cache can take.

    Each step finds the cache as a prefill in any other chunks would have left it.
    """
    code = CODES[layers.config.code]

    def step(layers, queries, new, lengths, counts):
        layers = layers.append(layer, new, lengths, counts)
        steps_T = jnp.arange(queries.num_tokens, dtype=jnp.int32)
        positions_BT = lengths[:, None] + steps_T[None, :]
        start_BT = window_start(positions_BT, window)
        parts = layers.parts(lengths + counts, positions_BT, start_BT)
        return layers, attend(queries, parts, scale=scale, code=code, layer=layer)

    T, size = queries.num_tokens, layers.step
    if size is None or T <= size:
        layers, o_BTHV = step(layers, queries, new, lengths, counts)
        return o_BTHV, layers

    steps = -(-T // size)

    def split(x_BT):
        padded = jnp.pad(x_BT, [(0, 0), (0, steps * size - T)] + [(0, 0)] * (x_BT.ndim - 2))
        return jnp.moveaxis(padded.reshape(x_BT.shape[0], steps, size, *x_BT.shape[2:]), 1, 0)

    def body(layers, inputs):
        index, queries, new = inputs
        done = jnp.minimum(counts, index * size)
        return step(layers, queries, new, lengths + done, jnp.minimum(counts - done, size))

    inputs = (jnp.arange(steps, dtype=jnp.int32), *jax.tree.map(split, (queries, new)))
    layers, o_NBTHV = jax.lax.scan(body, layers, inputs)
    joined = jnp.moveaxis(o_NBTHV, 0, 1)
    return joined.reshape(joined.shape[0], steps * size, *joined.shape[3:])[:, :T], layers
