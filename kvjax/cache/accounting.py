"""Bytes of a cache, by formula from the configurations alone: no array is made."""

import jax
import jax.numpy as jnp
from kvjax_kernels.codes import packed_bytes

from ..cache_config import CacheConfig
from ..config import ModelConfig
from ..errors import KvjaxError
from ..quant import CODES
from .model_cache import Cache

EXACT = "exact layers"
SCALE_BYTES = 2  # bfloat16 scales, offsets and means


def cache_bytes(
    model: ModelConfig,
    config: CacheConfig,
    *,
    tokens: int,
    batch: int = 1,
    dtype: str | None = None,
) -> dict[str, int]:
    """Bytes that a cache of `tokens` tokens per sequence allocates, by kind of storage.

    Returns:
      "exact layers" (those without tiers), "sinks", "hot", one entry per tier, and "total".
      Without tiers all is "exact layers".

    Raises:
      KvjaxError: neither `dtype` nor the configuration names the dtype of exact tokens; sizes
        below 1.
    """
    dtype = dtype or config.dtype
    if dtype is None:
        raise KvjaxError("the dtype of exact tokens is unknown: pass dtype='bfloat16'")
    if tokens < 1 or batch < 1:
        raise KvjaxError(f"tokens is {tokens} and batch is {batch}: expected at least 1 of each")
    exact = jnp.dtype(dtype).itemsize
    out = dict.fromkeys(_names(config), 0)
    for index, block in enumerate(model.layers):
        shapes = block.attention.stream_shapes
        numbers = sum(heads * size for heads, size in shapes.values()) * batch
        if config.is_exempt(index, model.num_layers):
            slots = config.plain().slots(tokens)
            out[EXACT] += (slots.sinks + slots.hot) * numbers * exact
            continue
        slots = config.slots(tokens)
        out["sinks"] += slots.sinks * numbers * exact
        out["hot"] += slots.hot * numbers * exact
        for name, tier, blocks in zip(
            _tier_names(config), config.tiers, slots.tier_blocks, strict=True
        ):
            for stream, (heads, size) in shapes.items():
                bits = tier.value_bits if stream == "value" else tier.key_bits
                per_block = _coded_block_bytes(config, size, bits, is_key=stream != "value")
                out[name] += blocks * heads * per_block * batch
    out["total"] = sum(out.values())
    return out


def measured_bytes(cache: Cache) -> dict[str, int]:
    """The same table, from the arrays of a live cache."""
    out = dict.fromkeys(_names(cache.config), 0)
    for group in cache.groups:
        if not group.tiers:
            out[EXACT] += _nbytes(group)
            continue
        out["sinks"] += _nbytes(group.sinks)
        out["hot"] += _nbytes(group.hot)
        for name, tier in zip(_tier_names(cache.config), group.tiers, strict=True):
            out[name] += _nbytes(tier)
    out["total"] = sum(out.values())
    return out


def bits_per_element(model: ModelConfig, total_bytes: int, *, tokens: int, batch: int = 1) -> float:
    """Bits per stored number, everything counted, of a cache for `tokens` tokens."""
    numbers = sum(
        heads * size
        for block in model.layers
        for heads, size in block.attention.stream_shapes.values()
    )
    return 8 * total_bytes / (numbers * tokens * batch)


def _coded_block_bytes(config: CacheConfig, size: int, bits: int, *, is_key: bool) -> int:
    layout = CODES[config.code].layout(size, bits=bits, is_key=is_key)
    per_token = packed_bytes(size, bits) + SCALE_BYTES * (1 + layout.offset)
    return config.block * per_token + SCALE_BYTES * size * layout.mean


def _tier_names(config: CacheConfig) -> list[str]:
    return [f"{'cold' if i else 'warm'}, {tier.name}" for i, tier in enumerate(config.tiers)]


def _names(config: CacheConfig) -> list[str]:
    return [EXACT, *(["sinks", "hot", *_tier_names(config)] if config.tiers else [])]


def _nbytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
