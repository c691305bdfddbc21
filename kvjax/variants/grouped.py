"""MHA, GQA and MQA: one key and value head serves H/G query heads. Not for latent or tied heads."""

import jax
import jax.numpy as jnp
from flax import nnx

from ..cache import TieredLayers
from ..cached_attention import attention_layer
from ..config import AttentionConfig
from ..layers import RMSNorm, add_bias, param
from ..rope import angles, rotate
from ..streams import Queries, Streams


class GroupedAttention(nnx.Module):
    """softmax(scale * q k^T) v with H query heads over G key and value heads."""

    def __init__(self, config: AttentionConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        D, H, G, K = config.width, config.num_heads, config.num_kv_heads, config.head_dim
        self.config = config
        self.q_kernel = param(rngs, ("model", "heads", "head_dim"), (D, H, K), dtype, fan_in=D)
        self.k_kernel = param(rngs, ("model", "kv_heads", "head_dim"), (D, G, K), dtype, fan_in=D)
        self.v_kernel = param(rngs, ("model", "kv_heads", "head_dim"), (D, G, K), dtype, fan_in=D)
        self.o_kernel = param(rngs, ("heads", "head_dim", "model"), (H, K, D), dtype, fan_in=H * K)
        biased = config.qkv_bias
        self.q_bias = param(rngs, ("heads", "head_dim"), (H, K), dtype) if biased else None
        self.k_bias = param(rngs, ("kv_heads", "head_dim"), (G, K), dtype) if biased else None
        self.v_bias = param(rngs, ("kv_heads", "head_dim"), (G, K), dtype) if biased else None
        self.o_bias = param(rngs, ("model",), (D,), dtype) if config.out_bias else None
        eps = config.qk_norm_eps
        self.q_norm = None if eps is None else RMSNorm(K, "head_dim", eps=eps, dtype=dtype)
        self.k_norm = None if eps is None else RMSNorm(K, "head_dim", eps=eps, dtype=dtype)

    def __call__(
        self,
        x_BTD: jax.Array,
        layers: TieredLayers | None = None,
        /,
        *,
        layer: jax.Array | int = 0,
        lengths: jax.Array | None = None,
        counts: jax.Array | None = None,
    ) -> tuple[jax.Array, TieredLayers | None]:
        """Attention of T new tokens; see `kvjax.cached_attention.attention_layer`."""
        return attention_layer(self, x_BTD, layers, layer=layer, lengths=lengths, counts=counts)

    def project(self, x_BTD: jax.Array, positions_BT: jax.Array, /) -> tuple[Queries, Streams]:
        """Queries and the streams of the new tokens, rotated to their positions."""
        q_BTHK = add_bias(jnp.einsum("BTD,DHK->BTHK", x_BTD, self.q_kernel[...]), self.q_bias)
        k_BTGK = add_bias(jnp.einsum("BTD,DGK->BTGK", x_BTD, self.k_kernel[...]), self.k_bias)
        v_BTGV = add_bias(jnp.einsum("BTD,DGV->BTGV", x_BTD, self.v_kernel[...]), self.v_bias)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHK, k_BTGK = self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        q_content, q_rope = self._split_and_rotate(q_BTHK, positions_BT)
        k_content, k_rope = self._split_and_rotate(k_BTGK, positions_BT)
        return (
            Queries(content=q_content, rope=q_rope),
            Streams(content=k_content, rope_key=k_rope, value=v_BTGV),
        )

    def _split_and_rotate(self, x_BTHK, positions_BT):
        """(unrotated dims, rotated dims) of a head; an absent part is None."""
        rope = self.config.rope
        if rope is None:
            return x_BTHK, None
        rotated = rotate(x_BTHK[..., : rope.dim], angles(positions_BT, rope), pairing=rope.pairing)
        return (x_BTHK[..., rope.dim :] if rope.dim < x_BTHK.shape[-1] else None), rotated

    def output(self, o_BTHV: jax.Array, /) -> jax.Array:
        """Mix the heads back to the model width."""
        y_BTD = jnp.einsum("BTHV,HVD->BTD", o_BTHV, self.o_kernel[...])
        return add_bias(y_BTD, self.o_bias)
