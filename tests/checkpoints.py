"""Tiny checkpoints for the tests of importers: fixtures, changed copies of them, GGUF forms.

Each fixture is a checkpoint of Hugging Face transformers with what it computes there:
`input_ids` and their `logits`, a `prompt` and its `greedy` continuation.
"""

import json
import pathlib

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax.errors import KvjaxError
from kvjax.importers import load

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
NAMES = (
    "llama_mha",
    "llama_gqa",
    "llama_mqa_tied",
    "llama_hd32_bias",
    "mistral_swa",
    "qwen2",
    "qwen3",
)


def reference(name):
    with np.load(FIXTURES / name / "reference.npz") as arrays:
        return dict(arrays)


def config_of(name):
    return json.loads((FIXTURES / name / "config.json").read_text())


def tensors_of(name):
    return load_file(FIXTURES / name / "model.safetensors")


def write_directory(directory, name, *, fields=None, drop=(), tensors=None):
    """A fixture with other configuration fields, without some, or with other tensors."""
    config = {key: value for key, value in config_of(name).items() if key not in drop}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config | (fields or {})))
    save_file(tensors_of(name) if tensors is None else tensors, directory / "model.safetensors")
    return directory


def write_gguf(path, name, kind="F32", *, metadata=None, tensors=None):
    """A fixture as a GGUF file, as the converter of llama.cpp writes it.

    Matrices have type `kind`, the rest float32. `metadata` replaces or adds keys, without the
    architecture; a value of None leaves the key out. `tensors` adds tensors under their GGUF names.
    """
    config = config_of(name)
    architecture = "llama" if config["model_type"] == "mistral" else config["model_type"]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (_metadata(config) | (metadata or {})).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        if value is not None:
            add.get(type(value), writer.add_string)(f"{architecture}.{key}", value)
    model = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(model, config["num_hidden_layers"])
    for hf_name, array in tensors_of(name).items():
        if architecture == "llama":
            array = permuted(array, hf_name, config)
        _add(writer, names.get_name(hf_name, try_suffixes=(".weight", ".bias")), array, kind)
    for gguf_name, array in (tensors or {}).items():
        _add(writer, gguf_name, array, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permuted(array, name, config):
    """Rows of q and k with the two of a rotary pair side by side."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    part = name.split(".")[-2]
    if part not in heads:
        return array
    return array.reshape(heads[part], 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _metadata(config):
    return {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.sliding_window": config.get("sliding_window"),
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
    }


def _add(writer, name, array, kind):
    kind = gguf.GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
    writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)


def quantized(tensors, kind):
    """The values that remain of tensors after writing them as a GGUF type."""
    kind = gguf.GGMLQuantizationType[kind]
    return {
        name: gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
        if array.ndim > 1
        else array
        for name, array in tensors.items()
    }


def refusal(source, **options):
    """The message that loading ends with, which must be one line."""
    with pytest.raises(KvjaxError) as caught:
        load(source, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


def assert_says(message, *parts):
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"
