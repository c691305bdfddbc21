"""A step costs what it reads: no copy of the cache, no decoded tier, no layer compiled twice."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from kvjax import Model, decode_step
from kvjax.cache import cache_bytes, init_cache
from kvjax.cache_config import CacheConfig, Tier
from kvjax.config import RopeConfig
from tests.tiny import block, model_config

HEADS, SIZE, CAPACITY = 8, 64, 500_000
WIDE = block(num_heads=HEADS, num_kv_heads=HEADS, head_dim=SIZE, rope=RopeConfig(dim=SIZE))
TIERED = CacheConfig(
    tiers=(Tier(4, 4, 1024), Tier(1, 1)), exempt_first=1, exempt_last=1, dtype="float32"
)
ALL_TIERED = dataclasses.replace(TIERED, exempt_first=0, exempt_last=0)
DECODED_TIER = CAPACITY * HEADS * SIZE  # numbers, in one layer


def layers(number):
    return model_config(*[WIDE] * number)


def shapes(number, config, *, num_tokens=1, capacity=CAPACITY):
    """(model, tokens, cache), without their arrays."""
    model = jax.eval_shape(lambda: Model(layers(number), rngs=nnx.Rngs(0)))
    cache = jax.eval_shape(lambda: init_cache(layers(number), config, batch=1, capacity=capacity))
    return model, jax.ShapeDtypeStruct((1, num_tokens), jnp.int32), cache


def step(model, tokens, cache):
    return decode_step(model, tokens[:, 0], cache)


def chunk(model, tokens, cache):
    return model(tokens, cache, last_only=True)


def equations(jaxpr):
    """All of a computation, the bodies of its loops and branches too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(value, "eqns"):
                yield from equations(value)


def traced(function, *arguments):
    return list(equations(jax.make_jaxpr(function)(*arguments).jaxpr))


def test_a_donated_cache_is_updated_in_place_by_a_step_of_little_memory():
    compiled = jax.jit(step, donate_argnums=2).lower(*shapes(4, TIERED)).compile()
    memory = compiled.memory_analysis()
    table = cache_bytes(layers(4), TIERED, tokens=CAPACITY)
    assert memory.alias_size_in_bytes >= table["total"]
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1_000_000
    assert memory.temp_size_in_bytes < table["cold, 1 bit"] / 4 < table["total"] / 50


@pytest.mark.parametrize("function, num_tokens", [(step, 1), (chunk, 256)])
def test_no_tier_is_decoded_and_none_is_copied(function, num_tokens):
    found = traced(function, *shapes(3, ALL_TIERED, num_tokens=num_tokens))
    assert len(found) > 300  # the bodies are among them
    for equation in found:
        for out in equation.outvars:
            size = math.prod(out.aval.shape)
            if jnp.issubdtype(out.aval.dtype, jnp.floating):
                assert size < DECODED_TIER / 8, equation
            if out.aval.dtype == jnp.uint8 and size > DECODED_TIER / 8:
                # Written to where it lies, or handed on.
                kinds = {"scatter", "scan", "while", "cond", "jit"}
                assert equation.primitive.name in kinds, equation


@pytest.mark.parametrize("function, num_tokens", [(step, 1), (chunk, 256)])
def test_forty_layers_compile_like_four(function, num_tokens):
    few, many = (
        traced(function, *shapes(number, TIERED, num_tokens=num_tokens)) for number in (5, 41)
    )
    assert len(few) == len(many)


def test_a_large_cache_compiles_like_a_small_one():
    small, large = (
        traced(step, *shapes(3, TIERED, capacity=capacity)) for capacity in (20_000, CAPACITY)
    )
    assert len(small) == len(large)
