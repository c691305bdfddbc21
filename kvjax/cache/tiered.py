"""The tiered cache of layers of one kind: append (which demotes) and read.

Positions of a sequence are split after the sinks into blocks; block k holds the positions
sinks + k * block onwards. With n tokens after the sinks, F(n) = max(n - hot, 0) // block blocks are
coded. A query with n tokens up to itself sees

    sinks         positions [0, sinks)                             exact
    tiers[i]      blocks    [lo_i, hi_i)                           coded
    hot           positions [sinks + F * block, its own]           exact

where hi_0 = F, lo_i = hi_i - tiers[i].tokens / block, hi_{i+1} = lo_i. Every ring keeps one block
more than its tier, so that all queries of one append (at most `block` tokens, hence at most one
move) find the cache as it was for each of them.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from kvjax_kernels.codes import Codes, packed_bytes

from ..attention import Part
from ..cache_config import CacheConfig, Overflow, Tier
from ..quant import CODES
from ..streams import Streams
from . import ring


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TieredLayers:
    """Stored streams of L layers of one kind. Arrays are head-major: [L, B, G, slots, ...]."""

    sinks: Streams[jax.Array] | None
    hot: Streams[jax.Array]
    tiers: tuple[Streams[Codes], ...]
    config: CacheConfig = dataclasses.field(metadata={"static": True})

    @property
    def step(self) -> int | None:
        """Most tokens that one append takes; None: as many as fit."""
        return None if self.config.is_static else self.config.block

    @property
    def sink_tokens(self) -> int:
        return 0 if self.sinks is None else self.config.sinks

    def append(self, layer, new: Streams, lengths_B, counts_B, /) -> "TieredLayers":
        """Store the first `counts` of T new tokens of each row after `lengths` old ones.

        Args:
          layer: int32 scalar, which of the L layers.
          new: streams [B, T, G, C], T at most `step`; what follows `counts` is padding and is not
            stored.
          lengths_B, counts_B: int32.
        """
        T = jax.tree.leaves(new)[0].shape[1]
        steps_T = jnp.arange(T, dtype=jnp.int32)
        index_BT = lengths_B[:, None] + steps_T[None, :]
        real_BT = steps_T[None, :] < counts_B[:, None]
        after_BT = index_BT - self.sink_tokens
        later_BT = real_BT & (after_BT >= 0)
        hot_slots = _slots(self.hot)
        if self.config.is_static:
            # The last guard against overflow, which callers refuse beforehand.
            later_BT = later_BT & (after_BT < hot_slots)
        hot = _store(self.hot, layer, after_BT % hot_slots, later_BT, new)
        sinks = self.sinks
        if sinks is not None:
            sinks = _store(sinks, layer, index_BT, real_BT & (index_BT < self.sink_tokens), new)
        grown = dataclasses.replace(self, sinks=sinks, hot=hot)
        return grown._age(layer, lengths_B, lengths_B + counts_B) if self.tiers else grown

    def _age(self, layer, old_B, new_B) -> "TieredLayers":
        """Code the block that leaves the hot window and pass one block down each tier."""
        moves_B = self._coded_blocks(new_B) > self._coded_blocks(old_B)
        ends = self._tier_ends(self._coded_blocks(new_B))

        def arrivals() -> tuple[Streams, ...]:
            """The block [B, G, ...] that each tier receives: the last one before its end."""
            slots = self._hot_slots_of_block(ends[0] - 1)
            block = jax.tree.map(lambda buffer: _gather(buffer, layer, slots), self.hot)
            out = [_encode(self.config, block)]
            older = zip(self.tiers, self.config.tiers[1:], ends[1:], strict=False)
            for young, tier, end_B in older:
                out.append(_demote(self.config, tier, _read_block(young, layer, end_B - 1)))
            return tuple(out)

        # Nothing leaves in most decode steps: skip the arithmetic, keep the shapes.
        shapes = jax.eval_shape(arrivals)
        nothing = lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)  # noqa: E731
        blocks = jax.lax.cond(jnp.any(moves_B), arrivals, nothing)
        tiers = [
            _write_block(stored, layer, end_B - 1, moves_B & (end_B > 0), block)
            for stored, end_B, block in zip(self.tiers, ends, blocks, strict=True)
        ]
        return dataclasses.replace(self, tiers=tuple(tiers))

    def _coded_blocks(self, tokens):
        """F of the module's docstring, for tokens counted with the sinks."""
        return jnp.maximum(tokens - self.sink_tokens - self.config.hot, 0) // self.config.block

    def _tier_ends(self, coded_blocks):
        """hi_i of the module's docstring; also how many blocks each tier has ever received."""
        ends = [coded_blocks]
        for tier in self.config.tiers[:-1]:
            assert tier.tokens is not None  # only the last tier is unbounded
            ends.append(jnp.maximum(ends[-1] - tier.tokens // self.config.block, 0))
        return ends

    def _hot_slots_of_block(self, block_B):
        begin_B = block_B * self.config.block % _slots(self.hot)
        return begin_B[:, None] + jnp.arange(self.config.block, dtype=jnp.int32)[None, :]

    def _first_position(self, block):
        return self.sink_tokens + block * self.config.block

    def parts(self, lengths_B, positions_BT, start_BT, /) -> list[Part]:
        """What the queries see, after their tokens were appended.

        Args:
          lengths_B: tokens stored, new ones included.
          positions_BT: of the queries; each sees itself and what precedes it.
          start_BT: first position seen (0, or where a window begins).
        """
        stop_BT = positions_BT + 1
        parts = self._coded_parts(lengths_B, stop_BT, start_BT)
        parts.append(self._hot_part(lengths_B, stop_BT, start_BT))
        if self.sinks is not None:
            slots_S = jnp.arange(self.sink_tokens, dtype=jnp.int32)
            stored_BS = slots_S[None, :] < lengths_B[:, None]
            positions_BS = jnp.where(stored_BS, slots_S[None, :], -1)
            used = jnp.int32(slots_S.size)
            parts.append(_part(self.sinks, positions_BS, start_BT, stop_BT, used))
        return parts

    def _hot_part(self, lengths_B, stop_BT, start_BT) -> Part:
        size, after_B = _slots(self.hot), jnp.maximum(lengths_B - self.sink_tokens, 0)
        if self.tiers:
            start_BT = jnp.maximum(start_BT, self._first_position(self._coded_blocks(stop_BT)))
        elif not self.config.is_static:
            start_BT = jnp.maximum(start_BT, stop_BT - (size - self.config.block))
            start_BT = jnp.maximum(start_BT, self.sink_tokens)
        held_BS = ring.held(after_B, size)
        positions_BS = jnp.where(held_BS < 0, -1, held_BS + self.sink_tokens)
        used = jnp.minimum(jnp.max(after_B), size)
        return _part(self.hot, positions_BS, start_BT, stop_BT, used)

    def _coded_parts(self, lengths_B, stop_BT, start_BT) -> list[Part]:
        parts = []
        if not self.tiers:
            return parts
        received = self._tier_ends(self._coded_blocks(lengths_B))
        ends = self._tier_ends(self._coded_blocks(stop_BT))
        begins = [*ends[1:], jnp.zeros_like(ends[-1])]
        inside_S = jnp.arange(self.config.block, dtype=jnp.int32)
        for stored, received_B, begin_BT, end_BT in zip(
            self.tiers, received, begins, ends, strict=True
        ):
            size = _slots(stored)
            if self.config.overflow is Overflow.SLIDE:
                begin_BT = jnp.maximum(begin_BT, end_BT - (size - 1))
            held_BN = ring.held(received_B, size)
            held_BNS = self._first_position(held_BN)[:, :, None] + inside_S[None, None, :]
            positions_BNS = jnp.where(held_BN[:, :, None] < 0, -1, held_BNS)
            parts.append(
                _part(
                    stored,
                    positions_BNS.reshape(held_BN.shape[0], -1),
                    jnp.maximum(start_BT, self._first_position(begin_BT)),
                    self._first_position(end_BT),
                    jnp.minimum(jnp.max(received_B), size) * self.config.block,
                )
            )
        return parts


def init_layers(
    shapes: dict[str, tuple[int, int]],
    config: CacheConfig,
    *,
    num_layers: int,
    batch: int,
    capacity: int,
    dtype,
) -> TieredLayers:
    """Empty storage for layers whose streams have `shapes` (heads, size) per token.

    Raises:
      KvjaxError: a capacity too small for a cache that slides.
    """
    slots = config.slots(capacity)

    def exact(name, tokens):
        if name not in shapes:
            return None
        heads, size = shapes[name]
        return jnp.zeros((num_layers, batch, heads, tokens, size), dtype)

    def coded(name, tier, blocks):
        if name not in shapes:
            return None
        heads, size = shapes[name]
        bits = tier.value_bits if name == "value" else tier.key_bits
        layout = CODES[config.code].layout(size, bits=bits, is_key=name != "value")
        lead = (num_layers, batch, heads, blocks)
        return Codes(
            words=jnp.zeros((*lead, config.block, packed_bytes(size, bits)), jnp.uint8),
            scale=jnp.zeros((*lead, config.block), jnp.bfloat16),
            mean=jnp.zeros((*lead, size), jnp.bfloat16) if layout.mean else None,
            offset=jnp.zeros((*lead, config.block), jnp.bfloat16) if layout.offset else None,
            bits=bits,
            size=size,
        )

    names = [field.name for field in dataclasses.fields(Streams)]
    return TieredLayers(
        sinks=Streams(**{n: exact(n, slots.sinks) for n in names}) if slots.sinks else None,
        hot=Streams(**{n: exact(n, slots.hot) for n in names}),
        tiers=tuple(
            Streams(**{n: coded(n, tier, blocks) for n in names})
            for tier, blocks in zip(config.tiers, slots.tier_blocks, strict=True)
        ),
        config=config,
    )


def _slots(streams: Streams) -> int:
    """Slots of a ring: tokens of exact streams, blocks of coded ones."""
    return jax.tree.leaves(streams)[0].shape[3]


def _part(stored: Streams, positions_BS, start_BT, stop_BT, used) -> Part:
    return Part(stored.keys(), stored.value, positions_BS, start_BT, stop_BT, used)


def _store(stored: Streams, layer, slots_BT, wanted_BT, new: Streams) -> Streams:
    slots_BT = jnp.where(wanted_BT, slots_BT, _slots(stored))
    return jax.tree.map(lambda buffer, x: ring.write(buffer, layer, slots_BT, x), stored, new)


def _gather(buffer, layer, slots_BS):
    """Tokens [B, G, 1, S, C] of one layer as one block."""
    rows_B1 = jnp.arange(buffer.shape[1], dtype=jnp.int32)[:, None]
    block_BSGC = buffer.at[layer, rows_B1, :, slots_BS].get(mode="clip")
    return block_BSGC.transpose(0, 2, 1, 3)


def _read_block(stored: Streams, layer, block_B) -> Streams:
    return jax.tree.map(lambda b: ring.read(b, layer, block_B % b.shape[3]), stored)


def _write_block(stored: Streams, layer, block_B, wanted_B, block: Streams) -> Streams:
    def put(buffer, values):
        slots_B = jnp.where(wanted_B, block_B % buffer.shape[3], buffer.shape[3])
        return ring.write(buffer, layer, slots_B[:, None], values[:, None])

    return jax.tree.map(put, stored, block)


def _encode(config: CacheConfig, block: Streams) -> Streams:
    code, tier = CODES[config.code], config.tiers[0]
    return _map_streams(code.encode, tier, block)


def _demote(config: CacheConfig, tier: Tier, block: Streams) -> Streams:
    code = CODES[config.code]
    return _map_streams(code.demote, tier, block)


def _map_streams(fn: Callable, tier: Tier, streams: Streams) -> Streams:
    """fn(stream, bits=, is_key=) on the present streams; a value alone is not a key."""

    def apply(stream, bits, is_key):
        return None if stream is None else fn(stream, bits=bits, is_key=is_key)

    return Streams(
        content=apply(streams.content, tier.key_bits, True),
        rope_key=apply(streams.rope_key, tier.key_bits, True),
        value=apply(streams.value, tier.value_bits, False),
    )
