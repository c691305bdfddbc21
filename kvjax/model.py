"""The decoder as a function of its parameters: embedding, scanned layers, head."""

from typing import overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from .block import Block
from .cache import Cache, cache_groups
from .config import ModelConfig
from .layers import RMSNorm, param
from .plan import Segment, segments


class Model(nnx.Module):
    """A decoder, used functionally: parameters and static configuration, no state.

    `model(tokens)` and `model(tokens, cache)` return (logits, cache) and change nothing. The model
    is a pytree: `jax.jit`, `jax.grad` and `jax.tree.map` take it as it is. Layers with equal
    configuration share one stack of parameters [L, ...], scanned.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        width, vocab = config.width, config.vocab_size
        self.config = config
        self.embedding = param(rngs, ("vocab", "model"), (vocab, width), dtype, fan_in=width)
        self.stacks = nnx.List([_stack(config, i, rngs, dtype) for i in range(len(config.stacks))])
        self.final_norm = RMSNorm(width, "model", eps=config.norm_eps, dtype=dtype)
        tied = config.tie_embeddings
        self.head = (
            None if tied else param(rngs, ("model", "vocab"), (width, vocab), dtype, fan_in=width)
        )

    @property
    def dtype(self):
        """Of the parameters and the arithmetic."""
        return self.embedding[...].dtype

    @overload
    def __call__(
        self,
        tokens_BT: jax.Array,
        cache: None = None,
        /,
        *,
        counts: jax.Array | None = None,
        last_only: bool = False,
    ) -> tuple[jax.Array, None]: ...

    @overload
    def __call__(
        self,
        tokens_BT: jax.Array,
        cache: Cache,
        /,
        *,
        counts: jax.Array | None = None,
        last_only: bool = False,
    ) -> tuple[jax.Array, Cache]: ...

    def __call__(
        self,
        tokens_BT: jax.Array,
        cache: Cache | None = None,
        /,
        *,
        counts: jax.Array | None = None,
        last_only: bool = False,
    ) -> tuple[jax.Array, Cache | None]:
        """Logits of the next token after each of T new tokens.

        Args:
          tokens_BT: int32 token ids.
          cache: what came before; the new tokens are appended to the cache that is returned. None:
            the tokens are a whole sequence.
          counts: int32 [B], how many tokens of each row are real; the others are padding at the
            end, which is not stored and whose logits mean nothing. None: all.
          last_only: logits after the last real token alone, [B, vocab].

        Returns:
          (float32 logits [B, T, vocab], cache or None). NaN for a row with a token id outside the
          vocabulary and, inside a jit where it cannot be refused, for one that no longer fits.

        Raises:
          KvjaxError: tokens that do not fit the cache (outside a jit).
          ValueError: shapes that do not fit together.
        """
        if tokens_BT.ndim != 2:
            raise ValueError(f"tokens have shape {tokens_BT.shape}: expected [batch, tokens]")
        B, T = tokens_BT.shape
        if cache is not None and cache.batch != B:
            raise ValueError(f"tokens have batch {B} and the cache has {cache.batch}")
        if B == 0 or T == 0:
            raise ValueError(f"tokens have shape {tokens_BT.shape}: expected at least one token")
        counts = jnp.full((B,), T, jnp.int32) if counts is None else counts
        if not isinstance(counts, Tracer) and np.any(np.asarray(counts) > T):
            raise ValueError(f"counts are {counts}: expected at most {T}, the width of tokens")
        x_BTD = self.embedding[...].at[tokens_BT].get(mode="clip")
        if cache is None:
            x_BTD = self._layers(x_BTD)
        else:
            cache.require_room(counts)
            x_BTD, cache = self._cached_layers(x_BTD, cache, counts)
        if last_only:
            last_B = jnp.maximum(counts - 1, 0)
            x_BTD = jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)
        logits = self._head(self.final_norm(x_BTD))
        bad_B = self._foreign(tokens_BT, counts)
        if cache is not None:
            bad_B = bad_B | cache.overflowed()
        logits = jnp.where(bad_B[:, None, None], jnp.nan, logits)
        return (logits[:, 0] if last_only else logits), cache

    def _foreign(self, tokens_BT, counts):
        """Rows with an id outside the vocabulary, which was read as another; padding may be so."""
        foreign_BT = (tokens_BT < 0) | (tokens_BT >= self.config.vocab_size)
        real_BT = jnp.arange(tokens_BT.shape[1])[None, :] < counts[:, None]
        return jnp.any(foreign_BT & real_BT, axis=1)

    def _head(self, x_BTD):
        if self.head is None:
            logits = jnp.einsum("BTD,VD->BTV", x_BTD, self.embedding[...])
        else:
            logits = x_BTD @ self.head[...]
        return logits.astype(jnp.float32)

    def _layers(self, x_BTD):
        """All layers without a cache. Parameters are the scan's inputs, which their gradients want:
        a parameter indexed inside the scan would get its whole stack's gradient at every layer."""
        for segment in segments([stack for stack, _ in self.config.placement]):
            rows = self._segment_rows(segment)

            def body(x_BTD, blocks):
                for block in blocks:
                    x_BTD, _ = block(x_BTD)
                return x_BTD, None

            inputs = tuple(
                jax.tree.map(lambda p, r=row: p[r.start : r.stop : r.step], self.stacks[stack])
                for stack, row in rows
            )
            x_BTD, _ = jax.lax.scan(body, x_BTD, inputs)
        return x_BTD

    def _segment_rows(self, segment: Segment) -> list[tuple[int, range]]:
        """(stack, its rows) for each layer of the pattern."""
        placement, out = self.config.placement, []
        for offset in range(segment.pattern):
            layers = [segment.first + offset + r * segment.pattern for r in range(segment.repeats)]
            rows = [placement[layer][1] for layer in layers]
            step = rows[1] - rows[0] if len(rows) > 1 else 1
            out.append((placement[layers[0]][0], range(rows[0], rows[-1] + 1, step)))
        return out

    def _cached_layers(self, x_BTD, cache: Cache, counts):
        """All layers with a cache, which is the scan's carry: updated in place, never copied.

        Parameters are read by index from where they lie: as inputs of the scan, the slices that
        exempt layers cut off would be copied at every call.
        """
        placement = self.config.placement
        _, group_of = cache_groups(self.config, cache.config)
        row_of = [group_of[:layer].count(group_of[layer]) for layer in range(len(group_of))]
        kinds = [(placement[layer][0], group_of[layer]) for layer in range(len(group_of))]
        carry = (x_BTD, cache.groups)

        for segment in segments(kinds):
            layers = range(segment.first, segment.first + segment.pattern)

            def body(carry, repeat, segment=segment, layers=layers):
                x_BTD, groups = carry
                for layer in layers:
                    (stack, param_row), group = placement[layer], group_of[layer]
                    param_step = sum(placement[other][0] == stack for other in layers)
                    group_step = sum(group_of[other] == group for other in layers)
                    block = _row(self.stacks[stack], param_row + repeat * param_step)
                    x_BTD, stored = block(
                        x_BTD,
                        groups[group],
                        layer=row_of[layer] + repeat * group_step,
                        lengths=cache.lengths,
                        counts=counts,
                    )
                    assert stored is not None  # it was given
                    groups = (*groups[:group], stored, *groups[group + 1 :])
                return (x_BTD, groups), None

            if segment.repeats == 1:
                carry, _ = body(carry, jnp.int32(0))
            else:
                carry, _ = jax.lax.scan(body, carry, jnp.arange(segment.repeats, dtype=jnp.int32))
        x_BTD, groups = carry
        return x_BTD, cache.advanced(groups, counts)


def _stack(config: ModelConfig, stack: int, rngs: nnx.Rngs, dtype) -> Block:
    """The blocks of one kind, as one block whose parameters have a leading layer axis."""
    rows = sum(owner == stack for owner, _ in config.placement)

    def build(key):
        return Block(config.stacks[stack], rngs=nnx.Rngs(params=key), dtype=dtype)

    block = jax.vmap(build)(jax.random.split(rngs.params(), rows))
    for _, variable in nnx.iter_graph(block):
        if isinstance(variable, nnx.Param):
            names = variable.get_metadata()["out_sharding"]
            variable.set_metadata(out_sharding=("layers", *names))
    return block


def _row(stack: Block, row: jax.Array) -> Block:
    return jax.tree.map(lambda p: jax.lax.dynamic_index_in_dim(p, row, 0, keepdims=False), stack)
