"""Bytes of a token in the KV cache, from configurations as models carry them (the keys that count)."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.worker.modelconfig import kv_bytes_per_token, read_model_config

LLAMA_3_8B = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip
SMOLLM2 = {
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576,
    "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN_3 = {
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 2560, "head_dim": 128,
    "dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT_2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "torch_dtype": "float32"}
FALCON_7B = {
    "num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True,
    "new_decoder_architecture": False, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA_3 = {"torch_dtype": "bfloat16", "vision_config": {"num_hidden_layers": 27}, "text_config": QWEN_3}
QWEN_3_NEXT = {**QWEN_3, "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA_3_8B, 131_072),
        (SMOLLM2, 23_040),
        (QWEN_3, 147_456),
        (DEEPSEEK_V3, 70_272),
        (GPT_2, 73_728),
        (FALCON_7B, 8_192),
        (GEMMA_3, 147_456),
        (QWEN_3_NEXT, 4_096),
        ({**QWEN_3, "layer_types": ["sliding_attention"] * 36}, 147_456),
    ],
)
def test_known_models(config: dict[str, Any], expected: int) -> None:
    assert kv_bytes_per_token(config) == expected
    assert kv_bytes_per_token(config, kv_dtype="fp8") == expected // (4 if config is GPT_2 else 2)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "no num_hidden_layers; give --kv-bytes-per-token"),
        ({"num_hidden_layers": 2, "torch_dtype": "float16"}, "no num_attention_heads"),
        ({"num_hidden_layers": 2, "num_attention_heads": 2, "torch_dtype": "float16"}, "no hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers = many"),
        ({"num_hidden_layers": 2}, "no dtype; tell the cache's by --kv-dtype"),
        ({"num_hidden_layers": 2, "torch_dtype": "q4"}, "dtype 'q4' is not known"),
        ({"layer_types": ["mamba"]}, "no layer with a KV cache"),
    ],
)
def test_what_is_missing_is_named(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        kv_bytes_per_token(config)


def test_it_is_read_from_the_file_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    assert read_model_config(tmp_path) == read_model_config(tmp_path / "config.json") == SMOLLM2
    with pytest.raises(ConfigError, match="No such file"):
        read_model_config(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="no model's configuration"):
        read_model_config(tmp_path)


values = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.text(max_size=3), max_size=3)


@given(st.dictionaries(st.sampled_from([*LLAMA_3_8B, *DEEPSEEK_V3, "layer_types", "text_config", "head_dim"]), values))
def test_whatever_stands_there_is_a_size_or_a_named_error(config: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        assert kv_bytes_per_token(config) > 0
