"""Configurations of Hugging Face as their makers publish them, one for each family."""

import json
import math

import jax
import pytest
from flax import nnx

from kvjax.errors import KvjaxError
from kvjax.importers import load_config
from kvjax.model import Model

LLAMA_2_7B = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_3_2_1B = LLAMA_3_8B | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_hidden_layers": 16,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
    "transformers_version": "4.45.0.dev0",
}
MISTRAL_7B_V01 = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
MISTRAL_7B_V02 = MISTRAL_7B_V01 | {
    "attention_dropout": 0.0,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "transformers_version": "4.36.0",
}
MISTRAL_7B_V03 = MISTRAL_7B_V02 | {
    "head_dim": None,  # not in the file itself, but in what newer releases save
    "transformers_version": "4.42.0.dev0",
    "vocab_size": 32768,
}
QWEN_2_5_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_2_7B = QWEN_2_5_05B | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "transformers_version": "4.37.2",
    "vocab_size": 152064,
}
QWEN_3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def num_parameters(config):
    model = jax.eval_shape(lambda: Model(config, rngs=nnx.Rngs(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model))


@pytest.mark.parametrize(
    "published, parameters, base, window",
    [
        pytest.param(LLAMA_2_7B, 6_738_415_616, 1e4, None, id="llama_2_7b"),
        pytest.param(LLAMA_3_8B, 8_030_261_248, 5e5, None, id="llama_3_8b"),
        pytest.param(MISTRAL_7B_V01, 7_241_732_096, 1e4, 4096, id="mistral_7b_v01"),
        pytest.param(MISTRAL_7B_V02, 7_241_732_096, 1e6, None, id="mistral_7b_v02"),
        pytest.param(MISTRAL_7B_V03, 7_248_023_552, 1e6, None, id="mistral_7b_v03"),
        pytest.param(QWEN_2_5_05B, 494_032_768, 1e6, None, id="qwen_2_5_05b"),
        pytest.param(QWEN_2_7B, 7_615_616_512, 1e6, None, id="qwen_2_7b"),
        pytest.param(QWEN_3_06B, 596_049_920, 1e6, None, id="qwen_3_06b"),
    ],
)
def test_published_configuration(published, parameters, base, window, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = load_config(tmp_path)
    assert num_parameters(config) == parameters  # as counted on the model's card
    (block,) = config.stacks
    assert (block.attention.rope.base, block.attention.window) == (base, window)
    assert block.attention.rope.dim == block.attention.head_dim
    assert block.norm_eps == published["rms_norm_eps"]
    assert config.max_positions == published["max_position_embeddings"]


def test_scaling_of_llama_3_1_and_later_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_2_1B))
    with pytest.raises(KvjaxError, match="unsupported rope scaling 'llama3'"):
        load_config(tmp_path)
