"""GGUF files: ordinary metadata is read, whatever changes the maths is refused, damage is told."""

import struct

import gguf
import numpy as np
import pytest

from kvjax.importers import load_config
from tests.checkpoints import assert_says, refusal, write_gguf


# What converters add to the keys that `write_gguf` writes anyway.
@pytest.mark.parametrize(
    "name, metadata",
    [
        # llama.cpp of 2023, whose files often lack the base of the rotary angles
        ("llama_mha", {"rope.dimension_count": 16, "rope.freq_base": None}),
        ("llama_mha", {"tensor_data_layout": "Meta AI original pth"}),
        # llama.cpp since: the vocabulary, and the head dim only if config.json names it
        ("llama_gqa", {"vocab_size": 256, "rope.dimension_count": 16}),
        ("llama_gqa", {"attention.key_length": None, "attention.value_length": None}),
        # the first files of Llama 3.1, before its factors became a tensor
        ("llama_gqa", {"rope.scaling.attn_factor": 1.0}),
        # Mistral is written as llama
        ("mistral_swa", {"vocab_size": 256, "rope.dimension_count": 16}),
        ("qwen2", {"pooling_type": 0}),
        ("qwen3", {"rope.dimension_count": 24, "vocab_size": 256}),
        # tools that write every key they know
        ("llama_gqa", {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}),
        ("llama_gqa", {"attention.layer_norm_epsilon": 1e-5, "use_parallel_residual": False}),
        ("qwen2", {"attention.sliding_window": 0}),
        (
            "qwen2",
            {
                "rope.scale_linear": 1.0,
                "rope.scaling.type": "none",
                "rope.scaling.factor": 0.0,
                "rope.scaling.finetuned": False,
                "rope.scaling.original_context_length": 128,
            },
        ),
    ],
)
def test_ordinary_metadata_changes_nothing(name, metadata, tmp_path):
    plain = load_config(write_gguf(tmp_path / "plain.gguf", name))
    assert load_config(write_gguf(tmp_path / "more.gguf", name, metadata=metadata)) == plain


@pytest.mark.parametrize("kept", [4, 10, 24, 200, 1_000, 300_000])
def test_truncated_gguf(kept, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", "qwen2")
    file.write_bytes(file.read_bytes()[:kept])
    assert_says(refusal(file), "model.gguf", f"ends at byte {kept}", "truncated")


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 and much more"])
def test_file_that_is_no_gguf(content, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    assert_says(refusal(file), "model.gguf", "not a GGUF file")


def test_gguf_of_an_old_version_or_the_other_byte_order(tmp_path):
    file = tmp_path / "model.gguf"
    for version in (1, 3 << 24):
        file.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
        assert_says(refusal(file), f"GGUF version {version}", "expected 2 or 3")


def test_gguf_with_text_that_is_not_unicode(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", "qwen2", metadata={"rope.scaling.type": "none"})
    file.write_bytes(file.read_bytes().replace(b"none", b"n\xffne"))
    assert_says(refusal(file), "model.gguf", "utf-8", "damaged")


def test_one_part_of_a_gguf_model(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen2")
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert_says(refusal(tmp_path / "model.gguf"), "one of 2 parts", "llama-gguf-split --merge")


@pytest.mark.parametrize(
    "name, metadata, parts",
    [
        ("llama_gqa", {"rope.scaling.type": "linear"}, ["unsupported rope scaling", "linear"]),
        ("llama_gqa", {"rope.scaling.factor": 2.0}, ["unsupported rope scaling", "2.0"]),
        ("llama_gqa", {"rope.scale_linear": 2.0}, ["unsupported rope scaling"]),
        ("llama_gqa", {"rope.dimension_count": 8}, ["rope.dimension_count is 8", "16"]),
        ("llama_gqa", {"attention.value_length": 8}, ["attention.value_length is 8", "16"]),
        ("llama_gqa", {"expert_count": 8}, ["expert_count = 8"]),
        ("llama_gqa", {"logit_scale": 0.5}, ["logit_scale = 0.5"]),
        ("llama_gqa", {"attention.causal": False}, ["attention.causal = False"]),
        ("llama_gqa", {"block_count": None}, ["block_count is None", "positive"]),
        ("llama_gqa", {"block_count": 5}, ["no tensor blk.4."]),
        ("llama_gqa", {"block_count": 3}, ["unexpected tensor blk.3."]),
        ("llama_gqa", {"vocab_size": 128}, ["token_embd.weight", "[256, 64]", "[128, 64]"]),
        ("qwen2", {"attention.sliding_window": 8}, ["attention.sliding_window"]),
        ("llama_gqa", {"attention.clamp_kqv": 8.0}, ["attention.clamp_kqv = 8.0"]),
        ("llama_gqa", {"attention.key_length_mla": 16}, ["attention.key_length_mla = 16"]),
        ("llama_gqa", {"attention.scale": 0.5}, ["attention.scale = 0.5"]),
        ("llama_gqa", {"attention.sliding_window_pattern": 6}, ["sliding_window_pattern = 6"]),
        ("llama_gqa", {"embedding_scale": 12.0}, ["embedding_scale = 12.0"]),
        ("llama_gqa", {"expert_used_count": 2}, ["expert_used_count = 2", "expected 0"]),
        ("llama_gqa", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping = 30.0"]),
        ("llama_gqa", {"residual_scale": 0.5}, ["residual_scale = 0.5"]),
        ("llama_gqa", {"rope.freq_base_swa": 1e4}, ["rope.freq_base_swa = 10000.0"]),
        ("llama_gqa", {"rope.scaling.attn_factor": 1.5}, ["rope scaling", "attn_factor = 1.5"]),
        ("qwen2", {"rope.scaling.type": "yarn"}, ["rope scaling", "'yarn'", "expected 'none'"]),
        ("qwen2", {"rope.scaling.yarn_beta_fast": 32.0}, ["rope scaling", "yarn_beta_fast"]),
        ("llama_gqa", {"tensor_data_layout": "reference"}, ["'reference'", "Meta AI"]),
        ("llama_gqa", {"use_parallel_residual": True}, ["use_parallel_residual = True"]),
        ("qwen3", {"pooling_type": 3}, ["pooling_type = 3"]),
    ],
)
def test_gguf_metadata_that_is_not_supported(name, metadata, parts, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", name, metadata=metadata)
    assert_says(refusal(file), "model.gguf: ", *parts)


@pytest.mark.parametrize(
    "tensor, shape, parts",
    [
        ("rope_freqs.weight", (8,), ["unsupported rope scaling", "rope_freqs.weight"]),
        ("blk.2.attn_k.bias", (32,), ["unexpected tensor blk.2.attn_k.bias"]),
        ("blk.0.attn_q.bias", (64,), ["no tensor blk.0.attn_k.bias"]),
        ("blk.0.attn_q_norm.weight", (16,), ["unexpected tensor blk.0.attn_q_norm.weight"]),
    ],
)
def test_gguf_tensors_that_do_not_fit(tensor, shape, parts, tmp_path):
    extra = {tensor: np.ones(shape, np.float32)}
    file = write_gguf(tmp_path / "model.gguf", "llama_gqa", tensors=extra)
    assert_says(refusal(file), "model.gguf: ", *parts)


def test_gguf_of_another_architecture(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", "llama_gqa")
    # Of equal length, so that the file stays whole.
    file.write_bytes(file.read_bytes().replace(b"llama", b"gemma"))
    assert_says(refusal(file), "'gemma'", "llama, qwen2, qwen3")


def test_gguf_tensor_that_cannot_be_dequantised(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", "llama_gqa")
    content = file.read_bytes()
    start = content.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    # 26 is I32, of the size of F32.
    file.write_bytes(content[:start] + struct.pack("<I", 26) + content[start + 4 :])
    assert_says(refusal(file), "output_norm.weight", "I32", "cannot dequantise")
    file.write_bytes(content[:start] + struct.pack("<I", 999) + content[start + 4 :])
    assert_says(refusal(file), "unknown type", "999", "update the gguf package")
