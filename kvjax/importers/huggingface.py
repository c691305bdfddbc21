"""Hugging Face directories: config.json and safetensors of llama, mistral, qwen2 and qwen3."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from ..config import AttentionConfig, BlockConfig, ModelConfig, RopeConfig
from ..errors import KvjaxError
from ..tokenizer import Tokenizer, read_json
from .fields import count, number, section
from .weights import Checkpoint, TensorNames, Tensors

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # values of model_type

NAMES = TensorNames(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    block={
        "attention_norm.scale": "model.layers.{}.input_layernorm.weight",
        "attention.q_kernel": "model.layers.{}.self_attn.q_proj.weight",
        "attention.k_kernel": "model.layers.{}.self_attn.k_proj.weight",
        "attention.v_kernel": "model.layers.{}.self_attn.v_proj.weight",
        "attention.o_kernel": "model.layers.{}.self_attn.o_proj.weight",
        "attention.q_bias": "model.layers.{}.self_attn.q_proj.bias",
        "attention.k_bias": "model.layers.{}.self_attn.k_proj.bias",
        "attention.v_bias": "model.layers.{}.self_attn.v_proj.bias",
        "attention.o_bias": "model.layers.{}.self_attn.o_proj.bias",
        "attention.q_norm.scale": "model.layers.{}.self_attn.q_norm.weight",
        "attention.k_norm.scale": "model.layers.{}.self_attn.k_norm.weight",
        "ffn_norm.scale": "model.layers.{}.post_attention_layernorm.weight",
        "ffn.gate": "model.layers.{}.mlp.gate_proj.weight",
        "ffn.up": "model.layers.{}.mlp.up_proj.weight",
        "ffn.down": "model.layers.{}.mlp.down_proj.weight",
        "ffn.gate_bias": "model.layers.{}.mlp.gate_proj.bias",
        "ffn.up_bias": "model.layers.{}.mlp.up_proj.bias",
        "ffn.down_bias": "model.layers.{}.mlp.down_proj.bias",
    },
    ignored=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)

# Fields that change the maths wherever they are honoured, and the values that do not.
_NEUTRAL: dict[str, tuple] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1,),
    "quantization_config": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "no_rope_layers": (),
    "attention_chunk_size": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}

_FLOATS = ("F64", "F32", "F16", "BF16")


def read_config(directory: Path) -> ModelConfig:
    """The configuration alone; no weights are needed."""
    file = directory / "config.json"
    if not file.is_file():
        found = sorted(directory.glob("*.gguf"))
        hint = f"to load the GGUF file, name it: {found[0]}" if found else "check the path"
        raise KvjaxError(
            f"{directory}: no config.json: expected a Hugging Face model directory; {hint}"
        )
    raw = read_json(file)
    try:
        return _model_config(raw)
    except KvjaxError as error:
        raise KvjaxError(f"{file}: {error}") from None


def open_directory(directory: Path) -> Checkpoint:
    config = read_config(directory)
    tokenizer = None
    if (directory / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_directory(directory)
    return Checkpoint(config, NAMES, _tensors(directory), tokenizer)


def _model_config(raw: dict[str, Any]) -> ModelConfig:
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise KvjaxError(f"unknown model_type {family!r}: expected one of {', '.join(FAMILIES)}")
    for field, allowed in _NEUTRAL.items():
        if raw.get(field) not in (None, *allowed):
            expected = f"expected {allowed[0]}" if allowed else "expected it to be absent"
            raise KvjaxError(f"{field} = {raw[field]!r} is not supported: {expected}")
    width, heads = count(raw, "hidden_size"), count(raw, "num_attention_heads")
    eps = number(raw, "rms_norm_eps", default=1e-6)
    head_dim = _head_dim(raw, family, width, heads)
    attention = AttentionConfig(
        width=width,
        num_heads=heads,
        # Only the oldest Llama files leave it out; the other classes have defaults of their own.
        num_kv_heads=count(
            raw, "num_key_value_heads", default=heads if family == "llama" else None
        ),
        head_dim=head_dim,
        rope=_rope(raw, head_dim),
        qkv_bias=family == "qwen2" or _attention_bias(raw, family),
        out_bias=_attention_bias(raw, family),
        qk_norm_eps=eps if family == "qwen3" else None,
    )
    block = BlockConfig(
        attention=attention,
        ffn_width=count(raw, "intermediate_size"),
        norm_eps=eps,
        ffn_bias=family == "llama" and bool(raw.get("mlp_bias", False)),
    )
    return ModelConfig(
        vocab_size=count(raw, "vocab_size"),
        layers=tuple(
            dataclasses.replace(block, attention=dataclasses.replace(attention, window=window))
            for window in _windows(raw, family, count(raw, "num_hidden_layers"))
        ),
        norm_eps=eps,
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        max_positions=count(raw, "max_position_embeddings"),
    )


def _head_dim(raw: dict[str, Any], family: str, width: int, heads: int) -> int:
    if raw.get("head_dim") is None and family == "qwen3":
        return 128  # the default of its class, whatever the width
    if raw.get("head_dim") is None and width % heads:
        raise KvjaxError(
            f"no head_dim, and hidden_size {width} is no multiple of num_attention_heads {heads}"
        )
    return count(raw, "head_dim", default=width // heads)


def _attention_bias(raw: dict[str, Any], family: str) -> bool:
    """The classes of mistral and qwen2 do not read the field."""
    return family in ("llama", "qwen3") and bool(raw.get("attention_bias", False))


def _rope(raw: dict[str, Any], head_dim: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    given = {}
    for name in ("rope_scaling", "rope_parameters"):
        part = section(raw, name)
        kind = part.get("rope_type", part.get("type", "default"))
        if any(isinstance(value, dict) for value in part.values()):
            kind = "different for each kind of layer"
        if kind != "default":
            raise KvjaxError(f"unsupported rope scaling {kind!r}: expected 'default' or none")
        if part.get("factor", 1) not in (None, 1):
            raise KvjaxError(f"{name} has factor {part['factor']!r} but scales by none: expected 1")
        given |= part
    factor = given.get("partial_rotary_factor", 1)
    if factor != 1:
        raise KvjaxError(f"partial_rotary_factor = {factor!r} is not supported: expected 1")
    base = {"rope_theta": raw.get("rope_theta"), **given}
    return RopeConfig(dim=head_dim, base=number(base, "rope_theta", default=10_000.0))


def _windows(raw: dict[str, Any], family: str, num_layers: int) -> list[int | None]:
    """The window of each layer, by the rules of each class."""
    window, first = _window(raw, family)
    slides = [window is not None and layer >= first for layer in range(num_layers)]
    kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
    given = raw.get("layer_types") or kinds
    if not isinstance(given, list) or len(given) != num_layers:
        found = len(given) if isinstance(given, list) else "no"
        raise KvjaxError(f"layer_types has {found} entries: expected {num_layers}")
    free = family.startswith("qwen")  # the other classes do not read the field
    for kind, default in zip(given, kinds, strict=True):
        known = kind == "full_attention" or (kind == "sliding_attention" and window is not None)
        if not known or (kind != default and not free):
            raise KvjaxError(f"layer_types has {kind!r}, with a window of {window}: unsupported")
    return [window if kind == "sliding_attention" else None for kind in given]


def _window(raw: dict[str, Any], family: str) -> tuple[int | None, int]:
    """The window, and the first layer that has it."""
    if family == "llama" and raw.get("sliding_window") is not None:
        raise KvjaxError("sliding_window is not supported for model_type llama: expected null")
    used = family == "mistral" or (family != "llama" and raw.get("use_sliding_window", False))
    if not used or raw.get("sliding_window", 4096) is None:
        return None, 0
    window = count(raw, "sliding_window", default=4096)  # the default of these classes
    first = 0 if family == "mistral" else raw.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise KvjaxError(f"max_window_layers is {first!r:.60}: expected a whole number")
    return window, first


def _tensors(directory: Path) -> Tensors:
    opened: dict[str, tuple[Any, Path]] = {}
    for file in _weight_files(directory):
        try:
            handle = safe_open(file, framework="np")
        except FileNotFoundError:
            raise KvjaxError(f"{file}: no such file: expected all that the index names") from None
        except (OSError, SafetensorError) as error:
            raise KvjaxError(
                f"{file}: cannot be read ({error}): "
                "it is truncated or damaged; copy or download it again"
            ) from None
        opened.update({name: (handle, file) for name in handle.keys()})
    shapes = {}
    for name, (handle, file) in opened.items():
        part = handle.get_slice(name)
        if part.get_dtype() not in _FLOATS and not NAMES.ignores(name):
            raise KvjaxError(
                f"{file}: tensor {name} has type {part.get_dtype()}: "
                f"expected one of {', '.join(_FLOATS)}"
            )
        shapes[name] = tuple(part.get_shape())

    def read(name: str) -> np.ndarray:
        return opened[name][0].get_tensor(name)

    return Tensors(str(directory), shapes, read)


def _weight_files(directory: Path) -> list[Path]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(f, str) for f in names.values()):
            raise KvjaxError(f"{index}: expected a weight_map: tensor name to file name")
        return [directory / name for name in sorted(set(names.values()))]
    raise KvjaxError(
        f"{directory}: no model.safetensors and no model.safetensors.index.json: "
        "expected weights in safetensors; convert other formats first"
    )
