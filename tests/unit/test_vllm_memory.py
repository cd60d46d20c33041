"""Whether a vLLM fits into its GPUs, before it is started: faked cards, and models that are files of zeros."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import EngineStartError
from headrace.hardware.gpu import find_gpu, visible_gpus
from headrace.worker import sharing
from headrace.worker.allotment import Allotment
from headrace.worker.checkpoint import weights_bytes
from headrace.worker.engines import vllm_gpus
from headrace.worker.engines.vllm import VllmEngine, VllmOptions
from headrace.worker.engines.vllm_args import number_of, value_of
from headrace.worker.engines.vllm_demand import Demand, demand_of, require_fit
from headrace.worker.engines.vllm_gpus import VllmGpus
from headrace.worker.memory import Memory
from headrace.worker.sharing import SharedMemory
from tests.fake_nvml import GIB, Card, FakeNvml

MIB = 1 << 20
LLAMA_3_8B = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    "torch_dtype": "bfloat16", "max_position_embeddings": 8192,
}  # fmt: skip
TOKEN_BYTES = 131_072


def sparse(path: Path, size_bytes: int) -> None:
    with path.open("wb") as file:
        file.truncate(size_bytes)


def model(folder: Path, config: dict[str, Any] | None = None, *, gib: float = 15.0) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(msgspec.json.encode(LLAMA_3_8B if config is None else config))
    sparse(folder / "model.safetensors", int(gib * GIB))
    return folder


def demand(folder: Path, *args: str) -> Demand:
    found = demand_of(["vllm", "serve", str(folder), *args], folder)
    assert found is not None
    return found


def memory(*, free: float, total: float = 80.0) -> Memory:
    return Memory(total_bytes=int(total * GIB), free_bytes=int(free * GIB), source="gpu", gpu="GPU-aa11")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("256M", 256 << 20), ("2G", 2 << 30),
        ("1t", 10**12), ("auto", None), ("-1", None), ("1.5", None), ("1.5K", None), ("", None),
        (None, None), ("8 K", None),
    ],
)  # fmt: skip
def test_numbers_as_vllm_reads_them(text: str | None, number: int | None) -> None:
    assert number_of(text) == number


@given(st.text())
def test_any_text_is_a_number_or_none(text: str) -> None:
    assert number_of(text) is None or number_of(text) >= 0  # type: ignore[operator]


def test_the_last_value_of_a_flag_counts_by_any_of_its_names() -> None:
    argv = ["-tp", "2", "--max_model_len", "5", "--tensor-parallel-size=4", "--flag"]
    assert value_of(("--tensor-parallel-size", "-tp"), argv) == "4"
    assert value_of("--max-model-len", argv) == "5"
    assert value_of("--flag", argv) == ""
    assert value_of("-tp", ["--tp=3"]) is None


def test_weights_are_counted_by_the_index_and_its_files(tmp_path: Path) -> None:
    assert weights_bytes(tmp_path) is None
    sparse(tmp_path / "model.safetensors", 100)
    sparse(tmp_path / "consolidated.safetensors", 100)
    assert weights_bytes(tmp_path) == 100
    index = {
        "metadata": {"total_size": 900},
        "weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors", "c": "x-1.safetensors"},
    }
    (tmp_path / "model.safetensors.index.json").write_bytes(msgspec.json.encode(index))
    assert weights_bytes(tmp_path) == 900, "no file is there yet"
    sparse(tmp_path / "x-1.safetensors", 300)
    assert weights_bytes(tmp_path) == 900, "one is missing"
    sparse(tmp_path / "x-2.safetensors", 200)
    assert weights_bytes(tmp_path) == 500, "the index says more than there is"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, '{"weight_map":5}', '{"metadata":{"total_size":true}}',
             '{"weight_map":{"a":"../../etc/passwd"}}']
)  # fmt: skip
def test_an_index_that_says_nothing_is_no_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert weights_bytes(tmp_path) is None


@pytest.mark.parametrize(
    ("args", "weights_gib", "num_tokens", "cache_gib"),
    [
        ("", 15, 8192, 1),
        ("--max-model-len 4K", 15, 4096, 0.5),
        ("--max-model-len auto", 15, 16, 16 / 8192),
        ("-tp 2", 7.5, 8192, 0.5),
        ("-tp 2 --pipeline_parallel_size=2", 3.75, 8192, 0.25),
        ("--data-parallel-size 2", 7.5, 8192, 1),
        ("--dtype float32", 30, 8192, 2),
        ("--kv-cache-dtype fp8_e5m2", 15, 8192, 0.5),
        ("--kv-cache-dtype of-tomorrow", 15, 8192, 0),
        ("--quantization bitsandbytes", 0, 8192, 1),
        ("--cpu-offload-gb 4", 0, 8192, 1),
        ("--load-format dummy", 0, 8192, 1),
    ],
)
def test_the_least_that_a_model_takes(
    tmp_path: Path, args: str, weights_gib: float, num_tokens: int, cache_gib: float
) -> None:
    found = demand(model(tmp_path), *args.split())
    assert (found.weights_bytes / GIB, found.num_tokens, found.cache_bytes / GIB) == (
        weights_gib,
        num_tokens,
        cache_gib,
    )


@pytest.mark.parametrize(
    ("config", "weights_gib", "num_tokens", "token_bytes"),
    [
        ({"torch_dtype": "float32"}, 7.5, 8192, TOKEN_BYTES),
        ({"torch_dtype": None}, 7.5, 8192, TOKEN_BYTES),
        ({"quantization_config": {"quant_method": "awq"}}, 15, 8192, TOKEN_BYTES // 2),
        ({"sliding_window": 4096}, 15, 16, TOKEN_BYTES),
        ({"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}, 15, 8192, TOKEN_BYTES),
        ({"attention_chunk_size": 8192}, 15, 16, TOKEN_BYTES),
        ({"mamba_d_state": 16}, 15, 16, TOKEN_BYTES),
        ({"num_hidden_layers": None}, 15, 8192, 0),
        ({"max_position_embeddings": None}, 15, 16, TOKEN_BYTES),
        ({"seq_length": 2048}, 15, 2048, TOKEN_BYTES),
    ],
)
def test_what_is_not_known_of_a_model_counts_as_little(
    tmp_path: Path, config: dict[str, Any], weights_gib: float, num_tokens: int, token_bytes: int
) -> None:
    found = demand(model(tmp_path, {**LLAMA_3_8B, **config}))
    assert (found.weights_bytes / GIB, found.num_tokens) == (weights_gib, num_tokens)
    assert found.cache_bytes == num_tokens * token_bytes


def test_the_text_part_of_a_model_with_images_counts(tmp_path: Path) -> None:
    whole = {"vision_config": {"num_hidden_layers": 27}, "text_config": LLAMA_3_8B}
    assert demand(model(tmp_path, whole)).cache_bytes == GIB


def test_a_model_that_is_no_folder_or_has_no_configuration_is_only_held_against_its_share(tmp_path: Path) -> None:
    assert demand(tmp_path / "org" / "name") == Demand(utilisation=0.9, num_gpus=1)
    assert demand(tmp_path) == Demand(utilisation=0.9, num_gpus=1)
    (tmp_path / "config.json").write_text("[]")
    assert demand(tmp_path, "--gpu-memory-utilization=.5") == Demand(utilisation=0.5, num_gpus=1)


@pytest.mark.parametrize(
    "args",
    [
        "--config vllm.yaml", "--distributed-executor-backend ray", "--gpu-memory-utilization x",
        "--gpu-memory-utilization 0", "--gpu-memory-utilization 1.1", "--gpu-memory-utilization nan", "-tp x", "-tp 0",
        "--data_parallel_rank 3", "-dpl 2", "--nnodes=2",
    ],
)  # fmt: skip
def test_arguments_that_do_not_tell_are_left_to_vllm(tmp_path: Path, args: str) -> None:
    assert demand_of(["serve", "m", *args.split()], tmp_path) is None


def test_a_share_that_is_not_free_is_refused_with_the_most_that_is() -> None:
    wanted = Demand(utilisation=0.9, num_gpus=1)
    require_fit(wanted, memory(free=72), "GPU x")
    with pytest.raises(EngineStartError) as refused:
        require_fit(wanted, memory(free=71.9), "GPU x")
    assert str(refused.value) == (
        "vLLM does not fit: --gpu-memory-utilization 0.9 of the 80.0 GiB of GPU x is 72.0 GiB, and 71.9 GiB are free; "
        "set it to at most 0.89, or end what has the rest (option memory_check=false starts it all the same)"
    )


def test_a_model_larger_than_its_share_is_refused_by_its_figures(tmp_path: Path) -> None:
    require_fit(demand(model(tmp_path)), memory(free=18, total=18), "GPU x")
    with pytest.raises(EngineStartError) as refused:
        require_fit(demand(model(tmp_path)), memory(free=17.5, total=17.5), "GPU x")
    assert str(refused.value) == (
        "the model does not fit: its weights take at least 15.0 GiB and 8192 tokens of KV cache 1.0 GiB, and "
        "--gpu-memory-utilization 0.9 of the 17.5 GiB of GPU x is 15.8 GiB; set --gpu-memory-utilization higher, "
        "--max-model-len lower or --tensor-parallel-size higher, or take a smaller or quantized model "
        "(option memory_check=false starts it all the same)"
    )
    with pytest.raises(EngineStartError, match=r"at least 20\.0 GiB .* 0\.5 GiB on each of 2 GPUs, and"):
        require_fit(demand(model(tmp_path, gib=40), "-tp", "2"), memory(free=20, total=20), "GPU x")


def test_a_cache_that_is_told_counts_whatever_the_share(tmp_path: Path) -> None:
    args = "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes"
    folder = model(tmp_path)
    require_fit(demand(folder, *args, "2G"), memory(free=17), "GPU x")
    assert demand(folder, *args, "2G").share_bytes(memory(free=17)) == 17 * GIB
    with pytest.raises(
        EngineStartError, match=r"--kv-cache-memory-bytes 2\.0 GiB, and of the 80\.0 GiB of GPU x 16\.9 GiB"
    ):
        require_fit(demand(folder, *args, "2G"), memory(free=16.9), "GPU x")
    with pytest.raises(
        EngineStartError, match=r"8192 tokens of KV cache 1\.0 GiB do not go into .* 0\.5 GiB; set that"
    ):
        require_fit(demand(folder, *args, "512M"), memory(free=70), "GPU x")


# GPUs, and several workers on one


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[Card]:
    """Two faked cards of 80 GiB, one half free, in place of this machine's GPUs."""
    there = [Card("GPU-aa11", free_gib=79), Card("GPU-bb22", free_gib=40)]
    nvml = FakeNvml(there)
    monkeypatch.setattr(vllm_gpus, "visible_gpus", lambda *, environ: visible_gpus(nvml=nvml, environ=environ))
    monkeypatch.setattr(vllm_gpus, "find_gpu", lambda uuid: find_gpu(uuid, nvml=nvml, environ={}))
    monkeypatch.setattr(sharing, "_NEW_FOR_S", 0.0)
    return there


def of(utilisation: float, num_gpus: int = 1) -> Demand:
    return Demand(utilisation=utilisation, num_gpus=num_gpus)


async def test_each_gpu_it_will_use_must_have_its_share_free(cards: list[Card], tmp_path: Path) -> None:
    gpus = VllmGpus(name="one", shared_folder=tmp_path)
    await gpus.take(of(0.9), {})
    gpus.release()
    with pytest.raises(
        EngineStartError, match=r"GPU-bb22 is 72\.0 GiB, and 40\.0 GiB are free; set it to at most 0\.5,"
    ):
        await gpus.take(of(0.9, 2), {})
    gpus.release()
    with pytest.raises(EngineStartError, match="GPU-bb22"):
        await gpus.take(of(0.9), {"CUDA_VISIBLE_DEVICES": "1"})
    gpus.release()
    assert list(tmp_path.glob("*/*.alive")) == []


async def test_a_second_vllm_whose_share_is_not_left_is_refused_by_the_name_of_the_first(
    cards: list[Card], tmp_path: Path
) -> None:
    one, other = (VllmGpus(name=name, shared_folder=tmp_path) for name in ("one", "other"))
    await one.take(of(0.6), {})
    with pytest.raises(EngineStartError) as refused:  # nothing of it is allocated yet
        await other.take(of(0.5), {})
    assert str(refused.value) == (
        "GPU GPU-aa11 is shared: worker one has 48.0 GiB of its 80.0 GiB, and 40.0 GiB more are wanted; set "
        "--gpu-memory-utilization so that all fit (option memory_check=false starts it all the same)"
    )
    other.release()
    await other.take(of(0.4), {})
    other.release()
    one.settle()
    cards[0].free_gib = 31
    with pytest.raises(EngineStartError, match="worker one has"):
        await other.take(of(0.5), {})
    other.release()
    one.release()
    cards[0].free_gib = 79
    await other.take(of(0.9), {})
    other.release()


async def test_a_share_of_the_dead_and_files_that_are_lost(cards: list[Card], tmp_path: Path) -> None:
    dead, one, other = (VllmGpus(name=name, shared_folder=tmp_path) for name in ("dead", "one", "other"))
    await dead.take(of(0.6), {})
    for descriptor in (dead._shares[0]._table._lock, dead._shares[0]._table._alive):
        assert descriptor is not None
        os.close(descriptor)  # as the kernel does
    await one.take(of(0.6), {})
    for path in (tmp_path / "GPU-aa11").iterdir():
        path.unlink()
    one.keep()
    with pytest.raises(EngineStartError, match="worker one has"):
        await other.take(of(0.6), {})
    for each in (other, one):
        each.release()


def test_what_a_vllm_is_about_to_take_is_promised_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_NEW_FOR_S", 0.0)
    measuring, starting = SharedMemory(tmp_path, name="measuring"), Allotment(tmp_path, name="starting")
    measuring.open()

    def publish(free_bytes: int) -> None:
        assert measuring.publish(measuring.look(), free_bytes=free_bytes, promised_bytes=0, allocated_bytes=0)

    publish(100)
    seen = measuring.look()
    starting.take(60, Memory(total_bytes=100, free_bytes=100, source="gpu"), device="GPU x", advice="do")
    assert not measuring.claim(41, reserved_bytes=41, reserve_bytes=0)
    assert not measuring.publish(seen, free_bytes=100, promised_bytes=0, allocated_bytes=0), "of before"
    publish(70)
    assert not measuring.claim(11, reserved_bytes=11, reserve_bytes=0), "it counts twice while it loads"
    starting.settle()
    publish(40)
    assert measuring.look().allocated_bytes == 0, "it gives nothing back when requests end"
    assert measuring.claim(40, reserved_bytes=40, reserve_bytes=0)
    late = Allotment(tmp_path, name="late")
    with pytest.raises(
        EngineStartError, match=r"^GPU x is shared: worker measuring has promised its requests 0\.0 GiB of"
    ):
        late.take(20, Memory(total_bytes=100, free_bytes=40, source="gpu"), device="GPU x", advice="do")
    starting.release()
    measuring.close()


async def test_without_a_driver_or_where_the_order_of_cards_is_not_certain_nothing_is_refused(
    cards: list[Card], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = VllmGpus(name="one", shared_folder=tmp_path)
    await gpus.take(of(0.9), {"CUDA_VISIBLE_DEVICES": ""})
    cards[0].name = "another"
    await gpus.take(of(0.9), {"CUDA_VISIBLE_DEVICES": "1"})
    cards[1].failure = 15  # NVML_ERROR_GPU_IS_LOST
    await gpus.take(of(0.9), {"CUDA_VISIBLE_DEVICES": "GPU-bb22"})
    monkeypatch.setattr(
        vllm_gpus, "visible_gpus", lambda *, environ: visible_gpus(nvml=FakeNvml(failure=12), environ=environ)
    )
    await gpus.take(of(0.9), {})
    assert list(tmp_path.iterdir()) == []


async def test_an_engine_that_does_not_fit_runs_nothing(cards: list[Card], tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    told = VllmOptions(command=f"env CUDA_VISIBLE_DEVICES=1 sh -c 'touch {ran}; exit 3'", start_timeout_s=10)
    engine = VllmEngine("m", told, worker="w1", shared_folder=tmp_path / "memory")
    with pytest.raises(EngineStartError, match=r"GPU-bb22 is 72\.0 GiB, and 40\.0 GiB are free"):
        await engine.start()
    assert not ran.exists()
    unchecked = VllmEngine("m", msgspec.structs.replace(told, memory_check=False))
    with pytest.raises(EngineStartError, match="exited with code 3"):
        await unchecked.start()
    assert ran.exists()
    for each in (engine, unchecked):
        await each.stop()
    assert list(tmp_path.glob("memory/*/*.alive")) == []
