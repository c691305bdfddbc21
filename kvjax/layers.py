"""Parameters with logical axis names, and the layers without state: norm and feed-forward."""

import jax
import jax.numpy as jnp
from flax import nnx

from .config import BlockConfig


def param(rngs: nnx.Rngs, axes: tuple[str, ...], shape: tuple[int, ...], dtype, *, fan_in=None):
    """A parameter whose dims carry logical names; `fan_in` None gives zeros.

    The names are NNX partitioning metadata. Eager sharding is off, so that a module can be built
    with no mesh.
    """
    if fan_in is None:
        value = jnp.zeros(shape, dtype)
    else:
        value = jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(fan_in**-0.5, dtype)
    return nnx.Param(value, out_sharding=axes, eager_sharding=False)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in float32; returned in x's dtype."""

    def __init__(self, size: int, axis: str, *, eps: float, dtype=jnp.float32):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((size,), dtype), out_sharding=(axis,), eager_sharding=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32)
        return (wide * inverse * scale.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)


class GatedFeedForward(nnx.Module):
    """down(silu(gate(x)) * up(x)); Shazeer, GLU variants (arXiv:2002.05202)."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        width, hidden = config.attention.width, config.ffn_width
        self.gate = param(rngs, ("model", "ffn"), (width, hidden), dtype, fan_in=width)
        self.up = param(rngs, ("model", "ffn"), (width, hidden), dtype, fan_in=width)
        self.down = param(rngs, ("ffn", "model"), (hidden, width), dtype, fan_in=hidden)
        biased = config.ffn_bias
        self.gate_bias = param(rngs, ("ffn",), (hidden,), dtype) if biased else None
        self.up_bias = param(rngs, ("ffn",), (hidden,), dtype) if biased else None
        self.down_bias = param(rngs, ("model",), (width,), dtype) if biased else None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        gate_BTF = add_bias(x_BTD @ self.gate[...], self.gate_bias)
        up_BTF = add_bias(x_BTD @ self.up[...], self.up_bias)
        return add_bias((jax.nn.silu(gate_BTF) * up_BTF) @ self.down[...], self.down_bias)


def add_bias(x: jax.Array, bias: nnx.Param | None) -> jax.Array:
    """x + bias over the trailing axes that the bias has; x itself without one."""
    if bias is None:
        return x
    value = bias[...]
    return x + value.reshape((1,) * (x.ndim - value.ndim) + value.shape)
