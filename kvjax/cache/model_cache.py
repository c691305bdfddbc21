"""The cache of all layers: groups of layers that store alike, and the lengths of the rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..cache_config import DTYPES, CacheConfig, Overflow
from ..config import ModelConfig
from ..errors import KvjaxError, choose
from .tiered import TieredLayers, init_layers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """What a model remembers of B sequences. Never changed: a call returns a new one."""

    lengths: jax.Array  # int32 [B], tokens stored
    groups: tuple[TieredLayers, ...]
    config: CacheConfig = dataclasses.field(metadata={"static": True})
    capacity: int = dataclasses.field(metadata={"static": True})  # tokens per sequence

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    @property
    def nbytes(self) -> int:
        """Allocated bytes, from the arrays themselves."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.groups))

    def advanced(self, groups: tuple[TieredLayers, ...], counts: jax.Array) -> "Cache":
        """The cache after `counts` tokens were stored in its groups."""
        return dataclasses.replace(self, groups=groups, lengths=self.lengths + counts)

    def overflowed(self) -> jax.Array:
        """Rows that were given more tokens than fit, bool [B]; never so for a sliding cache."""
        if self.config.overflow is Overflow.SLIDE:
            return jnp.zeros(self.lengths.shape, bool)
        return self.lengths > self.capacity

    def require_room(self, counts) -> None:
        """Refuse tokens that do not fit, before anything is written.

        Inside a jit nothing is known yet; there the logits of a row that is too long become NaN.

        Raises:
          KvjaxError: a sequence would exceed the capacity, unless it slides; not one count per
            sequence.
        """
        if isinstance(self.lengths, Tracer) or isinstance(counts, Tracer):
            return
        counts = np.asarray(counts)
        if np.any(counts < 0):
            raise KvjaxError(f"a count of new tokens is {counts.min()}: expected 0 or more")
        if counts.shape not in ((), self.lengths.shape):
            raise KvjaxError(
                f"there are {len(counts)} sequences: expected {self.batch}, the batch of the cache"
            )
        if self.config.overflow is Overflow.SLIDE:
            return
        longest = int(np.max(np.asarray(self.lengths) + counts, initial=0))
        if longest > self.capacity:
            raise KvjaxError(
                f"{longest} tokens do not fit the cache's capacity of {self.capacity}: use "
                "CacheConfig(capacity=...) or CacheConfig(overflow=Overflow.SLIDE)"
            )


def cache_groups(model: ModelConfig, config: CacheConfig) -> tuple[list[tuple], list[int]]:
    """Which layers store alike: ([(stream shapes, exempt)], group of each layer)."""
    kinds, groups = [], []
    for index, block in enumerate(model.layers):
        exempt = config.is_exempt(index, model.num_layers)
        kind = (tuple(block.attention.stream_shapes.items()), exempt)
        if kind not in kinds:
            kinds.append(kind)
        groups.append(kinds.index(kind))
    return kinds, groups


def init_cache(
    model: ModelConfig,
    config: CacheConfig,
    *,
    batch: int,
    capacity: int | None = None,
    dtype=None,
) -> Cache:
    """An empty cache for `batch` sequences.

    Args:
      capacity: tokens per sequence; default that of `config`.
      dtype: of exact tokens; default that of `config`.

    Raises:
      KvjaxError: neither names a capacity or dtype, or one is out of range.
    """
    capacity = config.capacity if capacity is None else capacity
    dtype = config.dtype if dtype is None else dtype
    if capacity is None or dtype is None:
        missing = "capacity" if capacity is None else "dtype"
        raise KvjaxError(f"the cache has no {missing}: pass {missing}=... or set it in CacheConfig")
    if capacity < 1 or batch < 1:
        raise KvjaxError(
            f"the cache has capacity {capacity} and batch {batch}: expected at least 1 of each"
        )
    dtype = jnp.dtype(choose("cache dtype", jnp.dtype(dtype).name, DTYPES))
    kinds, groups = cache_groups(model, config)
    layers = [
        init_layers(
            dict(shapes),
            config.plain() if exempt else config,
            num_layers=groups.count(index),
            batch=batch,
            capacity=capacity,
            dtype=dtype,
        )
        for index, (shapes, exempt) in enumerate(kinds)
    ]
    return Cache(
        lengths=jnp.zeros((batch,), jnp.int32),
        groups=tuple(layers),
        config=config,
        capacity=capacity,
    )
