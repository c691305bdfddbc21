"""One layer: attention and feed-forward with their norms and residuals."""

import jax
import jax.numpy as jnp
from flax import nnx

from .cache import TieredLayers
from .config import BlockConfig
from .layers import GatedFeedForward, RMSNorm
from .variants import GroupedAttention


class Block(nnx.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        width, eps = config.attention.width, config.norm_eps
        self.config = config
        self.attention_norm = RMSNorm(width, "model", eps=eps, dtype=dtype)
        self.attention = GroupedAttention(config.attention, rngs=rngs, dtype=dtype)
        self.ffn_norm = RMSNorm(width, "model", eps=eps, dtype=dtype)
        self.ffn = GatedFeedForward(config, rngs=rngs, dtype=dtype)

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
        """One layer for T new tokens; arguments as of the attention module."""
        mixed, layers = self.attention(
            self.attention_norm(x_BTD), layers, layer=layer, lengths=lengths, counts=counts
        )
        x_BTD = x_BTD + mixed
        with jax.named_scope("ffn"):
            return x_BTD + self.ffn(self.ffn_norm(x_BTD)), layers
