"""What a model is, as frozen dataclasses; no arrays. What a cache is: `kvjax.cache_config`.

Symbols in comments follow the dimension key of `kvjax/streams.py`.
"""

import dataclasses
import enum

from .errors import KvjaxError


class Pairing(enum.Enum):
    """Which two rotary dims form the pair that turns together."""

    HALF = "half"  # (i, i + R/2): Llama checkpoints of Hugging Face, NeoX
    INTERLEAVED = "interleaved"  # (2i, 2i + 1): GPT-J, RoFormer, llama.cpp files


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of the first `dim` dims of a head; the rest is not rotated."""

    dim: int  # R
    base: float = 10_000.0
    pairing: Pairing = Pairing.HALF

    def __post_init__(self):
        if self.dim <= 0 or self.dim % 2:
            raise KvjaxError(f"rotary dim is {self.dim}: expected a positive even number")
        if self.base <= 0:
            raise KvjaxError(f"rotary base is {self.base}: expected a positive number")


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Grouped attention: MHA (`num_kv_heads == num_heads`), GQA, MQA (`num_kv_heads == 1`)."""

    width: int  # D
    num_heads: int  # H
    num_kv_heads: int  # G
    head_dim: int
    rope: RopeConfig | None = None  # None: no position encoding (NoPE)
    window: int | None = None  # a query sees this many tokens, itself included; None: all
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm_eps: float | None = None  # RMS norm of each query and key head before rope

    def __post_init__(self):
        for name in ("width", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) <= 0:
                raise KvjaxError(f"{name} is {getattr(self, name)}: expected a positive number")
        if self.num_heads % self.num_kv_heads:
            raise KvjaxError(
                f"num_heads is {self.num_heads} and num_kv_heads is {self.num_kv_heads}: "
                "expected the first to be a multiple of the second"
            )
        if self.rope is not None and self.rope.dim > self.head_dim:
            raise KvjaxError(
                f"rotary dim is {self.rope.dim} and head_dim is {self.head_dim}: "
                "expected the first to be at most the second"
            )
        if self.window is not None and self.window <= 0:
            raise KvjaxError(f"window is {self.window}: expected a positive number or None")

    @property
    def rotary_dim(self) -> int:
        return 0 if self.rope is None else self.rope.dim

    @property
    def stream_shapes(self) -> dict[str, tuple[int, int]]:
        """(heads, size) of each stream that a token stores; absent streams are left out."""
        heads, content = self.num_kv_heads, self.head_dim - self.rotary_dim
        shapes = {
            "content": (heads, content),
            "rope_key": (heads, self.rotary_dim),
            "value": (heads, self.head_dim),
        }
        return {name: shape for name, shape in shapes.items() if shape[1]}

    @property
    def scale(self) -> float:
        """What scores are multiplied by: head_dim^-1/2."""
        return self.head_dim**-0.5


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """One pre-norm layer: x + attention(norm(x)), then x + ffn(norm(x))."""

    attention: AttentionConfig
    ffn_width: int  # F
    norm_eps: float = 1e-5
    ffn_bias: bool = False

    def __post_init__(self):
        if self.ffn_width <= 0:
            raise KvjaxError(f"ffn_width is {self.ffn_width}: expected a positive number")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder: embedding, layers from first to last, final norm, head."""

    vocab_size: int
    layers: tuple[BlockConfig, ...]
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    max_positions: int = 8192  # the trained context; a longer one is allowed and warned about

    def __post_init__(self):
        if not self.layers:
            raise KvjaxError("the model has no layers: expected at least one")
        widths = sorted({block.attention.width for block in self.layers})
        if len(widths) > 1:
            raise KvjaxError(f"layers have widths {widths}: expected one width for all")

    @property
    def width(self) -> int:
        return self.layers[0].attention.width

    @property
    def stacks(self) -> tuple[BlockConfig, ...]:
        """The distinct layers, in order of first appearance; equal ones share a stack."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def placement(self) -> tuple[tuple[int, int], ...]:
        """(stack, row in the stack) of each layer."""
        seen = dict.fromkeys(self.stacks, 0)
        out = []
        for block in self.layers:
            out.append((self.stacks.index(block), seen[block]))
            seen[block] += 1
        return tuple(out)

    @property
    def num_layers(self) -> int:
        return len(self.layers)
