"""What the weights' file says of memory, and a start that is refused because of it."""

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import EngineStartError
from headrace.worker.engines.gguf import kv_bytes_per_token, read_numbers, require_fit
from headrace.worker.engines.llama import LlamaEngine, LlamaOptions, find_weights
from headrace.worker.memory import Memory

MIB = 1 << 20
SMOLLM2 = {
    "llama.block_count": 30, "llama.attention.head_count": 9, "llama.attention.head_count_kv": 3,
    "llama.embedding_length": 576,
}  # fmt: skip


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(metadata: dict[str, Any]) -> bytes:
    body = b""
    for key, value in metadata.items():
        body += text(key)
        if isinstance(value, str):
            body += struct.pack("<I", 8) + text(value)
        elif isinstance(value, list) and value and isinstance(value[0], str):
            body += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(text(each) for each in value)
        elif isinstance(value, list):
            body += struct.pack(f"<IIQ{len(value)}I", 9, 4, len(value), *value)
        elif isinstance(value, float):
            body += struct.pack("<If", 6, value)
        else:
            body += struct.pack("<II", 4, value)
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, len(metadata)) + body


def written(folder: Path, data: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return path


def memory(free_mib: int) -> Memory:
    return Memory(total_bytes=1 << 40, free_bytes=free_mib * MIB, source="system")


def test_the_weights_of_the_demo() -> None:
    assert kv_bytes_per_token(read_numbers(find_weights("smollm2-135m", None))) == 23_040


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (SMOLLM2, 23_040),
        ({"general.name": "x", "tokenizer.ggml.tokens": ["a", "bc"], "llama.rope": 0.5, **SMOLLM2}, 23_040),
        ({**SMOLLM2, "llama.attention.head_count_kv": [0, 3, 0]}, 23_040),
        ({**SMOLLM2, "llama.attention.key_length": 128}, 46_080),
        ({key: value for key, value in SMOLLM2.items() if "kv" not in key}, 69_120),
        ({"general.name": "x"}, None),
    ],
)
def test_bytes_of_a_token(metadata: dict[str, Any], expected: int | None, tmp_path: Path) -> None:
    assert kv_bytes_per_token(read_numbers(written(tmp_path, gguf(metadata)))) == expected


def test_what_does_not_fit_is_refused_with_all_figures(tmp_path: Path) -> None:
    path = written(tmp_path, gguf(SMOLLM2) + bytes(2 * MIB))
    require_fit(path, num_tokens=1000, memory=memory(30))
    with pytest.raises(
        EngineStartError, match=r"weights take 2 MiB and 10000 tokens of KV cache .* 220 MiB, .* 30 MiB"
    ):
        require_fit(path, num_tokens=10_000, memory=memory(30))
    require_fit(path, num_tokens=10_000, memory=None)
    require_fit(written(tmp_path, b"something else"), num_tokens=10_000, memory=memory(0))


async def test_an_engine_whose_context_does_not_fit_is_not_started() -> None:
    engine = LlamaEngine("smollm2-135m", LlamaOptions(n_ctx=1 << 24))
    with pytest.raises(EngineStartError, match=r"SmolLM2.* does not fit: .*16777216 tokens"):
        await engine.start()
    assert engine.pid is None


@given(data=st.binary(max_size=200), cut=st.integers(0, 200))
def test_any_bytes_are_read_without_harm(data: bytes, cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("gguf")
    for each in (data, b"GGUF\x03\0\0\0" + data, gguf(SMOLLM2)[:cut] + data):
        kv_bytes_per_token(read_numbers(written(folder, each)))
