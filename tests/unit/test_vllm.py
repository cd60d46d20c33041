"""What the `vllm` engine makes of options, versions and figures, without any vLLM."""

import sys

import pytest

from headrace.errors import ConfigError, EngineStartError
from headrace.schemas.openai import InferenceRequest
from headrace.worker.engines.bodies import as_completion
from headrace.worker.engines.factory import make_engine
from headrace.worker.engines.gauges import KvFacts, kv_facts_of, steps_of, usage_of_metrics
from headrace.worker.engines.silence import Silence
from headrace.worker.engines.vllm import VllmOptions, serve_argv
from headrace.worker.engines.vllm_versions import check_version
from headrace.worker.watermarks import SILENT_S, Watermarks


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"args": "--port 8000"}, "--port is set by the worker"),
        ({"args": "--served_model_name=x"}, "--served-model-name is set by the worker"),
        ({"args": "--ssl-keyfile x"}, "--ssl-keyfile is set by the worker"),
        ({"args": "--disable-log-stats"}, "takes away the capacity"),
        ({"args": "--dtype 'float32"}, "option args="),
        ({"args": "--max-num-seqs 4", "max_concurrency": "4"}, "one of them, not both"),
        ({"command": " "}, "option command is empty"),
        ({"arg": "x"}, "has no option 'arg'"),
    ],
)
def test_options_that_cannot_be(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        make_engine("vllm", "m", options)


def test_the_command_line_is_what_is_needed_and_then_the_users_own() -> None:
    told = VllmOptions(command=f"{sys.executable} -x", args="--seed 3 --scheduling-policy=fcfs", max_concurrency=9)
    assert serve_argv("m", told, port=5) == [
        sys.executable, "-x", "serve", "m", "--served-model-name", "m", "--host", "127.0.0.1", "--port", "5",
        "--max-num-seqs", "9", "--seed", "3", "--scheduling-policy=fcfs",
    ]  # fmt: skip


def test_versions(caplog: pytest.LogCaptureFixture) -> None:
    for fine in ("0.13.0", "0.32.0", "0.32.1.dev3+gabc", "v0.20.0"):
        check_version(fine)
    assert not caplog.records
    for unsure in ("0.33.0", "1.0", "", "dev"):
        check_version(unsure)
    assert len(caplog.records) == 4
    for old in ("0.12.0", "0.9.2"):
        with pytest.raises(EngineStartError, match=f"vLLM {old} is too old"):
            check_version(old)


def test_figures_by_the_names_of_several_versions() -> None:
    text = (
        'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 1.0\n'
        'vllm:gpu_cache_usage_perc{engine="0"} 0.5\nvllm:num_preemptions_total{engine="0"} 4.0\n'
        'vllm:num_preemptions_total{engine="1"} 2.0\nvllm:num_preemptions_created{engine="0"} 1.7e+09\n'
    )
    found = usage_of_metrics(text)
    assert found is not None
    assert (found.num_running, found.num_waiting, found.kv_usage_ratio, found.num_preemptions) == (2, 1, 0.5, 6)
    assert usage_of_metrics(text.replace("gpu_cache", "kv_cache")) == found
    assert usage_of_metrics("python_gc_objects_collected_total 3\n") is None
    assert steps_of(text) != steps_of(text.replace("} 4.0", "} 5.0"))
    assert steps_of(text) == steps_of(text + "process_cpu_seconds_total 9.0\n")


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        ('_block_size_resolved="True",block_size="32",num_gpu_blocks="41"', KvFacts(1280, 32)),
        ('block_size="32",kv_cache_size_tokens="1312",num_gpu_blocks="41"', KvFacts(1280, 32)),
        ('block_size="16",kv_cache_size_tokens="320",num_gpu_blocks="41"', KvFacts(304, 16)),
        ('block_size="16",kv_cache_size_tokens="None",num_gpu_blocks="41"', KvFacts(640, 16)),
        ('block_size="16",num_gpu_blocks="None"', None),
    ],
)
def test_the_capacity(labels: str, found: KvFacts | None) -> None:
    assert kv_facts_of(f"vllm:cache_config_info{{{labels}}} 1.0\n") == found


def test_only_an_engine_with_work_is_silent() -> None:
    silence = Silence()
    for now, figures, has_work, seconds in (
        (0.0, 1, False, 0.0), (5.0, 1, True, 0.0), (7.0, 1, True, 2.0), (8.0, 2, True, 0.0), (9.0, 2, True, 1.0),
        (10.0, 2, False, 0.0), (30.0, 2, True, 0.0),
    ):  # fmt: skip
        silence.note(figures, has_work=has_work, now=now)
        assert silence.seconds == seconds


def test_a_silent_engine_gets_nothing_more() -> None:
    marks = Watermarks()
    assert not marks.note_silence(SILENT_S - 0.1)
    assert marks.reason == ""
    assert marks.note_silence(SILENT_S)
    assert "has work" in marks.reason
    assert not marks.note_silence(SILENT_S + 1)
    assert marks.note_silence(0.0)
    assert marks.reason == ""


def test_preemptions_are_told_as_they_rise() -> None:
    marks = Watermarks()
    assert [marks.note_preemptions(number) for number in (4, 4, 6, None, 2, 3, 0)] == [0, 0, 2, 0, 0, 1, 0]


def test_a_chat_goes_on_as_a_completion_of_its_tokens() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "seed": 3, "logprobs": False, "min_p": 0.1, "tools": []}
    chat = InferenceRequest(op="chat", body=body, stop=("!",))
    found = as_completion(chat, (1, 2))
    assert (found.op, found.stop, found.body) == ("completions", ("!",), {"seed": 3, "min_p": 0.1, "prompt": [1, 2]})
