"""Norm, feed-forward and parameters. (`test_layers.py` is about the layers of imports.)"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.config import AttentionConfig, BlockConfig, RopeConfig
from kvjax.layers import GatedFeedForward, RMSNorm, add_bias, param
from kvjax.variants import GroupedAttention
from tests import oracle
from tests.tolerances import EXACT, QUANTISED, ROUNDING, assert_close

ATTENTION = AttentionConfig(
    width=24, num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig(dim=8),
    qkv_bias=True, out_bias=True, qk_norm_eps=1e-6,
)  # fmt: skip
BLOCK = BlockConfig(ATTENTION, ffn_width=40, ffn_bias=True)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def randomised(make, seed=0):
    """What `make` builds, with every parameter random; its own initialisers are not compiled."""
    rng, shapes = np.random.default_rng(seed), jax.eval_shape(make)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), shapes)


def random_norm(eps, dtype=jnp.float32):
    return randomised(lambda: RMSNorm(24, "model", eps=eps, dtype=dtype))


def random_feed_forward(config, dtype=jnp.float32):
    return randomised(lambda: GatedFeedForward(config, rngs=nnx.Rngs(0), dtype=dtype))


apply = jax.jit(lambda module, x: module(x))


# RMSNorm


@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_norm_is_the_formula(eps):
    norm, x = random_norm(eps), 3 * normal(2, 5, 24, seed=1)
    wanted = oracle.rms_norm(x, norm.scale[...], eps=eps)
    assert_close(apply(norm, x), wanted, ROUNDING)


def test_fresh_norm_gives_rows_of_unit_rms():
    y = apply(RMSNorm(24, "model", eps=1e-12), 3 * normal(2, 5, 24))
    rms = np.sqrt(np.mean(oracle.wide(y) ** 2, axis=-1))
    assert_close(rms.astype(np.float32), np.ones((2, 5)), ROUNDING)


@pytest.mark.parametrize("shape", [(24,), (5, 24), (2, 3, 4, 24)])
def test_norm_takes_any_leading_axes(shape):
    norm, x = random_norm(1e-5), normal(*shape)
    assert_close(apply(norm, x), oracle.rms_norm(x, norm.scale[...], eps=1e-5), ROUNDING)


def test_norm_of_zero_is_zero_and_of_huge_rows_finite():
    norm = RMSNorm(24, "model", eps=1e-5)
    assert not np.any(apply(norm, np.zeros((2, 24), np.float32)))
    assert np.all(np.isfinite(apply(norm, 1e18 * normal(2, 24))))


@pytest.mark.parametrize("scale_dtype", [jnp.float32, jnp.bfloat16])
def test_norm_of_bfloat16_is_computed_in_float32(scale_dtype):
    norm = random_norm(1e-5, scale_dtype)
    assert norm.scale[...].dtype == scale_dtype
    x = jnp.asarray(100 * normal(2, 24), jnp.bfloat16)
    y = apply(norm, x)
    assert y.dtype == jnp.bfloat16
    wanted = oracle.rms_norm(x, norm.scale[...], eps=1e-5)
    # Rounded once, at the end.
    assert_close(y, wanted, QUANTISED, bound=1.01 * 2.0**-8 * np.abs(wanted))


# Feed-forward


def feed_forward(module, x):
    gate, up, down = (oracle.wide(getattr(module, name)[...]) for name in ("gate", "up", "down"))
    biases = (module.gate_bias, module.up_bias, module.down_bias)
    gate_bias, up_bias, down_bias = (0 if b is None else oracle.wide(b[...]) for b in biases)
    opened = oracle.wide(x) @ gate + gate_bias
    return opened / (1 + np.exp(-opened)) * (oracle.wide(x) @ up + up_bias) @ down + down_bias


@pytest.mark.parametrize("biased", [True, False])
def test_feed_forward_is_the_formula(biased):
    config = dataclasses.replace(BLOCK, ffn_bias=biased)
    module, x = random_feed_forward(config), normal(2, 5, 24, seed=1)
    assert (module.gate_bias is not None) is biased
    y = apply(module, x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    wanted = feed_forward(module, x)
    assert_close(y, wanted, ROUNDING, scale=np.abs(wanted).max())


def test_feed_forward_keeps_bfloat16():
    module = random_feed_forward(BLOCK, jnp.bfloat16)
    x = jnp.asarray(normal(2, 5, 24), jnp.bfloat16)
    y = apply(module, x)
    assert y.dtype == jnp.bfloat16
    wanted = feed_forward(module, x)
    assert_close(y, wanted, ROUNDING, scale=np.abs(wanted).max())


def test_calls_change_no_parameter():
    module = random_feed_forward(BLOCK)
    before = jax.tree.map(np.array, module)
    jax.eval_shape(lambda x: module(x), normal(2, 5, 24))  # runs the Python of the call
    assert_close(jax.tree.leaves(module), jax.tree.leaves(before), EXACT)
    assert jax.tree.structure(module) == jax.tree.structure(before)


# Parameters


def test_param_is_normal_with_the_variance_of_its_fan_in():
    made = param(nnx.Rngs(0), ("model", "heads"), (100, 200), jnp.float32, fan_in=100)
    # Of 20,000 numbers: the deviation is known to 0.5 %.
    assert_close(float(jnp.std(made[...])), 0.1, QUANTISED, bound=0.003)
    assert_close(float(jnp.mean(made[...])), 0.0, QUANTISED, bound=0.003)
    other = param(nnx.Rngs(1), ("model", "heads"), (100, 200), jnp.float32, fan_in=100)
    assert not np.array_equal(made[...], other[...])


def test_param_without_fan_in_is_zero():
    made = param(nnx.Rngs(0), ("heads",), (3,), jnp.bfloat16)
    assert_close(made[...], jnp.zeros(3, jnp.bfloat16), EXACT)


def test_params_of_one_module_differ():
    module = GatedFeedForward(BLOCK, rngs=nnx.Rngs(0))
    assert not np.array_equal(module.gate[...], module.up[...])


MAKERS = {
    "feed_forward": lambda dtype: GatedFeedForward(BLOCK, rngs=nnx.Rngs(0), dtype=dtype),
    "attention": lambda dtype: GroupedAttention(ATTENTION, rngs=nnx.Rngs(0), dtype=dtype),
    "norm": lambda dtype: RMSNorm(24, "model", eps=1e-5, dtype=dtype),
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_parameter_names_its_axes(name):
    sizes = {"model": 24, "ffn": 40, "heads": 4, "kv_heads": 2, "head_dim": 8}
    found = params_of(jax.eval_shape(lambda: MAKERS[name](jnp.float32)))
    assert found
    for variable in found:
        (shape,) = jax.tree.leaves(variable)
        axes = variable.get_metadata()["out_sharding"]
        assert shape.shape == tuple(sizes[axis] for axis in axes)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", MAKERS)
def test_every_parameter_has_the_dtype_asked_for(name, dtype):
    shapes = jax.tree.leaves(jax.eval_shape(lambda: MAKERS[name](dtype)))
    assert {shape.dtype for shape in shapes} == {jnp.dtype(dtype)}


def params_of(module):
    return [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Param)]


def test_axes_literals():
    module = jax.eval_shape(lambda: MAKERS["attention"](jnp.float32))
    axes = {
        name: getattr(module, name).get_metadata()["out_sharding"]
        for name in ("q_kernel", "k_kernel", "v_kernel", "o_kernel", "k_bias", "o_bias")
    }
    assert axes == {
        "q_kernel": ("model", "heads", "head_dim"),
        "k_kernel": ("model", "kv_heads", "head_dim"),
        "v_kernel": ("model", "kv_heads", "head_dim"),
        "o_kernel": ("heads", "head_dim", "model"),
        "k_bias": ("kv_heads", "head_dim"),
        "o_bias": ("model",),
    }
    feed_forward = jax.eval_shape(lambda: MAKERS["feed_forward"](jnp.float32))
    assert feed_forward.down.get_metadata()["out_sharding"] == ("ffn", "model")


def test_absent_parts_are_none():
    plain = dataclasses.replace(ATTENTION, qkv_bias=False, out_bias=False, qk_norm_eps=None)
    module = jax.eval_shape(lambda: GroupedAttention(plain, rngs=nnx.Rngs(0)))
    assert len(params_of(module)) == 4
    for name in ("q_bias", "k_bias", "v_bias", "o_bias", "q_norm", "k_norm"):
        assert getattr(module, name) is None


@pytest.mark.parametrize("shape", [(8,), (4, 8)])
def test_bias_is_added_over_its_axes(shape):
    x, bias = normal(2, 3, 4, 8), nnx.Param(jnp.asarray(normal(*shape, seed=1)))
    assert_close(add_bias(x, bias), x + normal(*shape, seed=1), EXACT)
    assert add_bias(x, None) is x
