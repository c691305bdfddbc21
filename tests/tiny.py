"""Tiny models and caches with every feature in few numbers, and caches full of poison."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.cache import Cache, init_cache
from kvjax.cache_config import CacheConfig, Tier
from kvjax.config import AttentionConfig, BlockConfig, ModelConfig, RopeConfig
from kvjax.model import Model

VOCAB = 61
ATTENTION = AttentionConfig(
    width=32, num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig(dim=8)
)
BLOCK = BlockConfig(ATTENTION, ffn_width=48)

# After 3 sinks and 16 exact tokens: 3 blocks of 4 bits, 14 of 1 bit.
TIERED = CacheConfig(
    tiers=(Tier(4, 4, 24), Tier(1, 1)),
    sinks=3,
    hot=16,
    block=8,
    exempt_first=1,
    exempt_last=0,
    capacity=160,
    dtype="float32",
)
THREE_TIERS = dataclasses.replace(TIERED, tiers=(Tier(4, 4, 24), Tier(2, 2, 16), Tier(1, 1)))
PLAIN = TIERED.plain()


def block(**changes) -> BlockConfig:
    """A layer with changes to its attention."""
    return dataclasses.replace(BLOCK, attention=dataclasses.replace(ATTENTION, **changes))


def model_config(*layers: BlockConfig, **changes) -> ModelConfig:
    return ModelConfig(vocab_size=VOCAB, layers=layers, **changes)


# The first layer is exempt from tiers, the others are scanned.
CONFIG = model_config(BLOCK, BLOCK, BLOCK)


def model_of(config: ModelConfig, *, seed: int = 0, dtype=jnp.float32) -> Model:
    """A model in which every parameter is random, norms too; its initialisers are not compiled."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: Model(config, rngs=nnx.Rngs(0), dtype=dtype))

    def fill(path, p):
        noise = 0.3 * rng.normal(size=p.shape)
        return jnp.asarray(1.0 + noise if "scale" in jax.tree_util.keystr(path) else noise, dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, shape).astype(np.int32)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def empty_cache(
    config: ModelConfig, cache: CacheConfig = TIERED, *, batch: int, **options
) -> Cache:
    """Poisoned: an empty cache must not care what its arrays hold."""
    shapes = jax.eval_shape(lambda: init_cache(config, cache, batch=batch, **options))
    lengths = jnp.asarray(np.zeros(batch, np.int32))
    return dataclasses.replace(shapes, lengths=lengths, groups=poison(shapes.groups))


def poison(tree):
    """NaN in every float, 0xFF in every byte; arrays or their shapes."""

    def fill(leaf):
        value = np.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else 0xFF
        return jnp.asarray(np.full(leaf.shape, value, leaf.dtype))  # numpy: compiles nothing

    return jax.tree.map(fill, tree)


def rows(tree, batch_rows, *, axis: int = 1):
    """Some rows of the batch of stored arrays [L, B, ...], as numpy."""
    return jax.tree.map(lambda leaf: np.take(np.asarray(leaf), batch_rows, axis), tree)
