"""GGUF files of llama.cpp: architectures llama (Mistral too), qwen2 and qwen3.

Files of Mistral v0.1 leave out its window of 4096 tokens: each token sees all, as in llama.cpp.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..config import AttentionConfig, BlockConfig, ModelConfig, RopeConfig
from ..errors import KvjaxError
from ..tokenizer import Tokenizer
from .fields import count, number
from .gguf_file import GGUFFile
from .weights import Checkpoint, TensorNames, Tensors

ARCHITECTURES = ("llama", "qwen2", "qwen3")

NAMES = TensorNames(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    head="output.weight",
    block={
        "attention_norm.scale": "blk.{}.attn_norm.weight",
        "attention.q_kernel": "blk.{}.attn_q.weight",
        "attention.k_kernel": "blk.{}.attn_k.weight",
        "attention.v_kernel": "blk.{}.attn_v.weight",
        "attention.o_kernel": "blk.{}.attn_output.weight",
        "attention.q_bias": "blk.{}.attn_q.bias",
        "attention.k_bias": "blk.{}.attn_k.bias",
        "attention.v_bias": "blk.{}.attn_v.bias",
        "attention.o_bias": "blk.{}.attn_output.bias",
        "attention.q_norm.scale": "blk.{}.attn_q_norm.weight",
        "attention.k_norm.scale": "blk.{}.attn_k_norm.weight",
        "ffn_norm.scale": "blk.{}.ffn_norm.weight",
        "ffn.gate": "blk.{}.ffn_gate.weight",
        "ffn.up": "blk.{}.ffn_up.weight",
        "ffn.down": "blk.{}.ffn_down.weight",
        "ffn.gate_bias": "blk.{}.ffn_gate.bias",
        "ffn.up_bias": "blk.{}.ffn_up.bias",
        "ffn.down_bias": "blk.{}.ffn_down.bias",
    },
    ignored=r"blk\.\d+\.attn_rot_embd\.weight",
)

# Metadata of the architecture. A key that is in none of these three may change the maths, and is
# refused by its name.
_READ = {
    "context_length",
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
}
_HARMLESS = {
    "attention.layer_norm_epsilon",  # of a LayerNorm, which these architectures do not have
    "rope.scaling.finetuned",  # about a scaling; whether there is one, others tell
    "rope.scaling.original_context_length",
}
_NEUTRAL: dict[str, tuple] = {  # harmless with these values
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "pooling_type": (0,),  # others: the model embeds texts or ranks them
    "rope.scale_linear": (1.0, 0.0),  # 0 is none, as in llama.cpp
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.factor": (1.0, 0.0),
    "rope.scaling.type": ("none",),
    "tensor_data_layout": ("Meta AI original pth",),  # pairs side by side, as always in llama
    "use_parallel_residual": (False,),
}


def read_config(path: Path) -> ModelConfig:
    """The configuration alone; no tensor is read."""
    return _config(GGUFFile(path))


def open_file(path: Path) -> Checkpoint:
    file = GGUFFile(path)
    config = _config(file)
    tensors = Tensors(str(path), file.shapes, _reader(file, config))
    return Checkpoint(config, NAMES, tensors, _tokenizer(file))


def _tokenizer(file: GGUFFile) -> Tokenizer | None:
    if file.fields.get("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
        return None
    try:
        return Tokenizer.from_gguf(file.fields)
    except KvjaxError as error:
        raise KvjaxError(f"{file.path}: {error}") from None


def _reader(file: GGUFFile, config: ModelConfig) -> Callable[[str], np.ndarray]:
    """Read a tensor with the rotary pairs of q and k as (i, i + R/2)."""
    if file.fields["general.architecture"] != "llama":
        return file.dequantize
    attention = config.layers[0].attention
    heads = {"attn_q": attention.num_heads, "attn_k": attention.num_kv_heads}

    def read(name: str) -> np.ndarray:
        """Files of this architecture, and no other, have the rows of a pair side by side."""
        rows = file.dequantize(name)
        part = name.split(".")[-2]
        if part not in heads:
            return rows
        pairs = rows.reshape(heads[part], -1, 2, *rows.shape[1:])
        return pairs.swapaxes(1, 2).reshape(rows.shape)

    return read


def _config(file: GGUFFile) -> ModelConfig:
    architecture = file.fields.get("general.architecture")
    try:
        if architecture not in ARCHITECTURES:
            raise KvjaxError(
                f"unknown architecture {architecture!r}: expected one of {', '.join(ARCHITECTURES)}"
            )
        start = f"{architecture}."
        fields = {
            key.removeprefix(start): _plain(value)
            for key, value in file.fields.items()
            if key.startswith(start)
        }
        _refuse_unsupported(file, fields)
        return _model_config(file.shapes, architecture, fields)
    except KvjaxError as error:
        raise KvjaxError(f"{file.path}: {error}") from None


def _plain(value: Any) -> Any:
    """Some files give one value for each layer, all equal."""
    return value[0] if isinstance(value, list) and len(set(value)) == 1 else value


def _refuse_unsupported(file: GGUFFile, fields: dict[str, Any]):
    parts = file.fields.get("split.count", 1)
    if parts not in (0, 1):
        raise KvjaxError(f"one of {parts} parts: merge them with llama-gguf-split --merge")
    if "rope_freqs.weight" in file.shapes:
        raise KvjaxError("unsupported rope scaling by rope_freqs.weight (Llama 3.1): expected none")
    for key, value in fields.items():
        if key in _READ or key in _HARMLESS or value in _NEUTRAL.get(key, ()):
            continue
        what = "unsupported rope scaling" if key.startswith("rope.scal") else "unsupported"
        expected = repr(_NEUTRAL[key][0]) if key in _NEUTRAL else "it to be absent"
        raise KvjaxError(f"{what}: metadata {key} = {value!r:.60}: expected {expected}")


def _model_config(
    shapes: Mapping[str, tuple[int, ...]], architecture: str, fields: dict[str, Any]
) -> ModelConfig:
    width, heads = count(fields, "embedding_length"), count(fields, "attention.head_count")
    head_dim = count(fields, "attention.key_length", default=width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if count(fields, key, default=head_dim) != head_dim:
            raise KvjaxError(f"{key} is {fields[key]}: expected the head dim, {head_dim}")
    window = fields.get("attention.sliding_window") or None
    if window is not None and architecture != "llama":
        raise KvjaxError("unsupported attention.sliding_window: the file omits which layers slide")
    eps = number(fields, "attention.layer_norm_rms_epsilon")
    attention = AttentionConfig(
        width=width,
        num_heads=heads,
        num_kv_heads=count(fields, "attention.head_count_kv", default=heads),
        head_dim=head_dim,
        rope=RopeConfig(dim=head_dim, base=number(fields, "rope.freq_base", default=10_000.0)),
        window=window,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        out_bias="blk.0.attn_output.bias" in shapes,
        qk_norm_eps=eps if architecture == "qwen3" else None,
    )
    block = BlockConfig(
        attention=attention,
        ffn_width=count(fields, "feed_forward_length"),
        norm_eps=eps,
        ffn_bias="blk.0.ffn_gate.bias" in shapes,
    )
    rows, *_ = shapes.get(NAMES.embedding) or (None,)
    return ModelConfig(
        vocab_size=count(fields, "vocab_size", default=rows),
        layers=(block,) * count(fields, "block_count"),
        norm_eps=eps,
        tie_embeddings=NAMES.head not in shapes,
        max_positions=count(fields, "context_length"),
    )
