"""Request bodies: what is accepted, how it is read, and what each wrong body is told."""

import json
import time
from typing import Any

import msgspec
import pytest

from headrace.schemas.json_bounds import nesting_depth
from headrace.schemas.openai import (
    InferenceRequest,
    Operation,
    RequestLimits,
    num_kv_tokens_needed,
    parse_request,
    resolve_max_tokens,
)
from headrace.schemas.refusals import Refusal

LIMITS = RequestLimits()
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def parse(op: Operation, body: Any, limits: RequestLimits = LIMITS) -> InferenceRequest | Refusal:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_request(op, data, limits=limits)


def accepted(op: Operation, body: Any) -> InferenceRequest:
    request = parse(op, body)
    assert isinstance(request, InferenceRequest), request
    return request


def refused(op: Operation, body: Any) -> tuple[str, str | None]:
    refusal = parse(op, body)
    assert isinstance(refusal, Refusal), refusal
    assert len(refusal.message) <= 600
    return refusal.code, refusal.param


def chat(**parameters: Any) -> dict[str, Any]:
    return {"messages": HI, **parameters}


def with_message(**message: Any) -> dict[str, Any]:
    return {"messages": [message]}


def test_smallest_chat_gets_defaults() -> None:
    request = accepted("chat", chat())
    assert request.body == {"messages": HI}
    assert (request.stream, request.n, request.max_tokens, request.stop) == (True, 1, None, ())
    assert request.is_resumable
    assert not request.include_usage


def test_body_keeps_engine_parameters_and_drops_ours() -> None:
    request = accepted(
        "chat",
        chat(
            model="m",
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=5,
            top_k=3,
            min_p=0.1,
            ignore_eos=True,
            chat_template_kwargs={"enable_thinking": False},
            return_token_ids=True,
            temperature=None,
            echo_of_nothing=None,
        ),
    )
    assert request.body == {
        "messages": HI,
        "top_k": 3,
        "min_p": 0.1,
        "ignore_eos": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert request.include_usage
    assert request.max_tokens == 5


def test_null_max_tokens_is_absent() -> None:
    request = accepted("completions", {"prompt": "p", "max_tokens": None})
    assert request.max_tokens is None
    assert resolve(request, num_prompt_tokens=1, max_model_len=4096) == 16


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert accepted("chat", chat(max_tokens=16, max_completion_tokens=50)).max_tokens == 50
    assert accepted("chat", chat(max_tokens=16, max_completion_tokens=None)).max_tokens == 16


def test_completions_refuse_max_completion_tokens() -> None:
    code = refused("completions", {"prompt": "p", "max_completion_tokens": 50})
    assert code == ("unsupported_parameter", "max_completion_tokens")


def test_wrong_typed_messages_give_one_short_error_at_once() -> None:
    data = json.dumps({"messages": [17] * 12_000}).encode()
    begin = time.perf_counter()
    refusal = parse("chat", data)
    assert time.perf_counter() - begin < 1
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.param) == ("invalid_value", "messages[0]")
    assert len(msgspec.json.encode(refusal.body())) < 300


def test_too_large_comes_before_too_deep_before_invalid() -> None:
    small = RequestLimits(max_body_bytes=1_000)
    refusal = parse("chat", b"[" * 1_001, small)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "request_too_large"
    assert refused("chat", b'{"messages":' + b"[" * 500) == ("json_too_deep", None)
    assert refused("chat", b'{"x":' * 500 + b"1" + b"}" * 500) == ("json_too_deep", None)


def test_depth_counts_open_brackets_outside_strings() -> None:
    assert nesting_depth(rb'{"a[[[\"[[[":["]",{}],"b":[]}') == 3
    assert nesting_depth(b"[" * 64 + b"]" * 64) == 64
    assert nesting_depth(b'"never closed [[[[') == 0
    assert nesting_depth(b"[" * 64 + b'"\\') == 64
    deep_text = [{"role": "user", "content": "[" * 1_000}]
    assert accepted("chat", {"messages": deep_text}).body["messages"] == deep_text
    at_limit = b'{"messages":[{"role":"user","content":"x"}],"x":' + b"[" * 63 + b"]" * 63 + b"}"
    assert isinstance(parse("chat", at_limit), InferenceRequest)
    over = b'{"messages":[{"role":"user","content":"x"}],"x":' + b"[" * 64 + b"]" * 64 + b"}"
    assert refused("chat", over) == ("json_too_deep", None)


@pytest.mark.parametrize("data", [b'"' * 800_000, b'"\\"' * 260_000, b'{"' * 400_000, b"[]" * 400_000])
def test_hostile_bytes_take_linear_time(data: bytes) -> None:
    begin = time.perf_counter()
    assert isinstance(parse("chat", data), Refusal)
    assert time.perf_counter() - begin < 2


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"{} {}",
        b"\xef\xbb\xbf{}",
        b'{"messages": NaN}',
        b'{"messages": -Infinity}',
        b'{"messages": "\xff"}',
        b'{"messages": "\\ud800"}',
        b'{"messages": "\\ud800\\u0041"}',
        b'{"messages": "\\udc00"}',
        b'{"messages": "\xed\xa0\x80"}',
    ],
)
def test_what_is_no_json_object(data: bytes) -> None:
    assert refused("chat", data)[0] == "invalid_json"


def test_duplicate_keys_take_the_last() -> None:
    assert accepted("completions", b'{"prompt":"a","prompt":"b"}').body == {"prompt": "b"}


@pytest.mark.parametrize("value", ["1e999", "1" * 5_000])
def test_numbers_no_decoder_holds(value: str) -> None:
    assert refused("chat", f'{{"messages":{json.dumps(HI)},"seed":{value}}}'.encode()) == ("invalid_value", None)


def test_wide_integers_are_refused_wherever_they_stand() -> None:
    assert refused("chat", chat(seed=2**63)) == ("invalid_value", "seed")
    assert refused("chat", chat(top_k=2**64)) == ("invalid_value", "top_k")
    assert refused("chat", chat(tools=[{"x": {"y": [1, -(2**63) - 1]}}])) == ("invalid_value", "tools")
    assert accepted("chat", chat(seed=-(2**63), note="9" * 40)).body["seed"] == -(2**63)
    assert accepted("chat", chat(top_p=0.1234567890123456789012)).body["top_p"] == pytest.approx(0.123456789)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": [*HI, None]}, "messages[1]"),
        (with_message(content="x"), "messages[0].role"),
        (with_message(role="robot", content="x"), "messages[0].role"),
        (with_message(role=["user"], content="x"), "messages[0].role"),
        (with_message(role="user"), "messages[0].content"),
        (with_message(role="user", content=5), "messages[0].content"),
        (with_message(role="user", content=[]), "messages[0].content"),
        (with_message(role="user", content=["x"]), "messages[0].content[0]"),
        (with_message(role="user", content=[{"text": "x"}]), "messages[0].content[0].type"),
        (with_message(role="user", content=[{"type": "hologram"}]), "messages[0].content[0].type"),
        (with_message(role="user", content=[{"type": "text"}]), "messages[0].content[0].text"),
        (with_message(role="user", content=[{"type": "text", "text": 1}]), "messages[0].content[0].text"),
        (
            with_message(role="user", content=[{"type": "image_url", "image_url": "u"}]),
            "messages[0].content[0].image_url",
        ),
        (with_message(role="tool", content="x"), "messages[0].tool_call_id"),
        (with_message(role="assistant", content=None), "messages[0].content"),
        (with_message(role="assistant", content=None, tool_calls=[]), "messages[0].content"),
        (with_message(role="assistant", tool_calls=[{"id": "1"}]), "messages[0].tool_calls[0].type"),
        (
            with_message(
                role="assistant",
                tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}],
            ),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (with_message(role="user", content="x", name=3), "messages[0].name"),
    ],
)
def test_wrong_messages_are_named(body: Any, param: str) -> None:
    assert refused("chat", body) == ("invalid_value", param)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "developer", "content": "x"},
        {"role": "system", "content": ""},
        {"role": "user", "content": "x", "name": "ann"},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "u"}}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "assistant", "content": "x", "tool_calls": None, "refusal": None},
        {"role": "assistant", "content": "x", "reasoning_content": "because"},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
        {"role": "function", "name": "f", "content": None},
    ],
)
def test_messages_openai_documents(message: dict[str, Any]) -> None:
    assert accepted("chat", {"messages": [message, *HI]}).body["messages"][0] == message


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 0.0}, "max_tokens"),
        ({"max_tokens": 1e300}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"seed": 1.5}, "seed"),
        ({"stream": 1}, "stream"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
        ({"stream_options": True}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x", ""]}, "stop[1]"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": {}}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"7": 101}}, "logit_bias.7"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice.function.name",
        ),
        ({"user": 5}, "user"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"model": 5}, "model"),
        ({"modalities": ["text", "audio"]}, "modalities[1]"),
    ],
)
def test_wrong_parameters_are_named(parameters: dict[str, Any], param: str) -> None:
    assert refused("chat", chat(**parameters)) == ("invalid_value", param)


@pytest.mark.parametrize(
    ("op", "parameters"),
    [
        ("chat", {"request_id": "r"}),
        ("chat", {"priority": -5}),
        ("chat", {"prompt_logprobs": 1}),
        ("chat", {"use_beam_search": True}),
        ("chat", {"n_predict": 100_000}),
        ("chat", {"chat_template": "{{ x }}"}),
        ("chat", {"audio": {"voice": "x"}}),
        ("chat", {"prompt": "p"}),
        ("chat", {"best_of": 2}),
        ("completions", {"best_of": 2}),
        ("completions", {"n": 2, "best_of": 1}),
        ("completions", {"echo": True}),
        ("completions", {"suffix": "end"}),
        ("completions", {"prompt_embeds": "x"}),
        ("completions", {"messages": HI}),
        ("completions", {"prompt": ["a", "b"]}),
        ("completions", {"prompt": [[1], [2]]}),
        ("embeddings", {"priority": 1}),
    ],
)
def test_parameters_that_would_escape_the_queue_are_refused(op: Operation, parameters: dict[str, Any]) -> None:
    required: dict[str, Any] = {"chat": {"messages": HI}, "completions": {"prompt": "p"}, "embeddings": {"input": "i"}}
    assert refused(op, {**required[op], **parameters})[0] == "unsupported_parameter"


def test_their_harmless_values_are_dropped() -> None:
    body = {"prompt": "p", "echo": False, "suffix": "", "best_of": 2, "n": 2, "use_beam_search": False}
    assert accepted("completions", body).body == {"prompt": "p", "n": 2}


def test_unknown_parameters_are_bounded() -> None:
    assert refused("chat", chat(**{f"x{i}": i for i in range(65)}))[0] == "unsupported_parameter"
    assert refused("chat", chat(blob="x" * 262_145)) == ("unsupported_parameter", "blob")
    code, param = refused("chat", chat(**{"k" * 10_000: 1}))
    assert code == "unsupported_parameter"
    assert param is not None
    assert len(param) <= 100


def test_parameters_of_another_operation_cannot_harm() -> None:
    wrong = {"tools": 5, "tool_choice": 5, "functions": "x", "top_logprobs": 3, "max_completion_tokens": None}
    assert accepted("completions", {"prompt": "p", **wrong}).body["tools"] == 5
    wrong |= {"n": 2, "stop": 5, "best_of": "x", "stream_options": 5, "stream": False, "response_format": 5}
    request = accepted("embeddings", {"input": "i", **wrong})
    assert (request.n, request.stop, request.stream, request.is_resumable) == (1, (), False, False)


@pytest.mark.parametrize(
    ("sent", "prompt"),
    [
        ("p", "p"),
        ("", ""),
        (["p"], "p"),
        ([5, 6], [5, 6]),
        ([[5, 6]], [5, 6]),
        ([5.0, 6], [5, 6]),
        ([[5, 6.0]], [5, 6]),
    ],
)
def test_one_prompt_in_any_of_its_forms(sent: Any, prompt: Any) -> None:
    assert accepted("completions", {"prompt": sent}).body["prompt"] == prompt


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], [True], [1.5], [-1], [2**31], 5, {}, [{}], [[1, True]], [None]])
def test_wrong_prompts(prompt: Any) -> None:
    code, param = refused("completions", {"prompt": prompt})
    assert code == "invalid_value"
    assert param in ("prompt", "prompt[0]")


def test_a_whole_number_with_a_point_is_an_integer() -> None:
    request = accepted("completions", {"prompt": [5.0], "max_tokens": 16.0, "n": 2.0, "seed": -7.0, "temperature": 1.0})
    assert (request.max_tokens, request.n) == (16, 2)
    sent = {"prompt": [5], "n": 2, "seed": -7, "temperature": 1.0}
    assert {name: (type(value), value) for name, value in request.body.items()} == {
        name: (type(value), value) for name, value in sent.items()
    }
    assert accepted("embeddings", {"input": [[1.0, 2], [3]], "dimensions": 8.0}).body == {
        "input": [[1, 2], [3]],
        "dimensions": 8,
    }


def test_completions_logprobs_are_a_number() -> None:
    assert accepted("completions", {"prompt": "p", "logprobs": 5}).body["logprobs"] == 5
    assert refused("completions", {"prompt": "p", "logprobs": 6}) == ("invalid_value", "logprobs")
    assert refused("completions", {"prompt": "p", "logprobs": True}) == ("invalid_value", "logprobs")


@pytest.mark.parametrize("value", ["", [], [""], [[]], [1, "a"], 5, ["a", 5], [[1], [True]], ["x"] * 2_049])
def test_wrong_embedding_inputs(value: Any) -> None:
    assert refused("embeddings", {"input": value})[0] == "invalid_value"


@pytest.mark.parametrize(
    ("value", "estimate", "bound"),
    [("four", 1, 12), (["four", "eight bytes"], 4, 31), ([1, 2, 3], 3, 3), ([[1, 2], [3]], 3, 3)],
)
def test_embedding_inputs_are_summed(value: Any, estimate: int, bound: int) -> None:
    request = accepted("embeddings", {"input": value})
    assert (request.num_prompt_tokens_estimate, request.num_prompt_tokens_bound) == (estimate, bound)


@pytest.mark.parametrize(
    "parameters",
    [
        {"n": 2},
        {"tools": [TOOL]},
        {"functions": [{"name": "f"}]},
        {"response_format": {"type": "json_object"}},
        {"guided_json": {}},
        {"guided_anything_new": "x"},
        {"structured_outputs": {"regex": "x"}},
        {"grammar": "root ::= x"},
        {"json_schema": {}},
        {"logprobs": True},
        {"continue_final_message": True},
        {"add_generation_prompt": False},
        {"messages": [*HI, {"role": "assistant", "content": "So"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
    ],
)
def test_what_cannot_be_continued(parameters: dict[str, Any]) -> None:
    assert not accepted("chat", chat(**parameters)).is_resumable


def test_what_can_be_continued() -> None:
    plain = chat(tools=[], logprobs=False, response_format={"type": "text"}, stop="x", ignore_eos=True, n=1)
    assert accepted("chat", plain).is_resumable
    assert accepted("completions", {"prompt": [1, 2]}).is_resumable
    assert not accepted("completions", {"prompt": "p", "logprobs": 0}).is_resumable


def test_prompt_size_of_text() -> None:
    request = accepted("completions", {"prompt": "äöü" * 100})
    assert (request.num_prompt_tokens_estimate, request.num_prompt_tokens_bound) == (150, 664)
    assert accepted("completions", {"prompt": ""}).num_prompt_tokens_estimate == 1
    tokens = accepted("completions", {"prompt": [7] * 9})
    assert (tokens.num_prompt_tokens_estimate, tokens.num_prompt_tokens_bound) == (9, 9)


def test_prompt_size_of_a_chat() -> None:
    plain = accepted("chat", chat())
    assert (plain.num_prompt_tokens_estimate, plain.num_prompt_tokens_bound) == (1 + 4 + 3, 2 + 4 + 32 + 64)
    image = {"type": "image_url", "image_url": {"url": "data:" + "A" * 100_000}}
    pictured = accepted("chat", with_message(role="user", content=[{"type": "text", "text": "hi"}, image]))
    assert pictured.num_prompt_tokens_estimate == plain.num_prompt_tokens_estimate + 1_024
    assert pictured.num_prompt_tokens_bound == plain.num_prompt_tokens_bound + 16_384
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "x" * 400}}
    called = accepted("chat", with_message(role="assistant", tool_calls=[call]))
    assert called.num_prompt_tokens_estimate > 100
    assert called.num_prompt_tokens_bound > 500
    tooled = accepted("chat", chat(tools=[TOOL]))
    assert tooled.num_prompt_tokens_bound > plain.num_prompt_tokens_bound + len(msgspec.json.encode([TOOL]))


def resolve(request: InferenceRequest, *, num_prompt_tokens: int, max_model_len: int | None) -> int | Refusal:
    return resolve_max_tokens(
        request, num_prompt_tokens=num_prompt_tokens, max_model_len=max_model_len, default_max_tokens=1024
    )


@pytest.mark.parametrize("op", ["chat", "completions"])
@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "result"),
    [(32, 1, None), (31, 1, 1), (20, 13, None), (20, 12, 12), (20, None, 12), (32, None, None), (33, None, None)],
)
def test_new_tokens_fit_the_model(
    op: Operation, num_prompt_tokens: int, max_tokens: int | None, result: int | None
) -> None:
    request = InferenceRequest(op=op, body={}, max_tokens=max_tokens)
    resolved = resolve(request, num_prompt_tokens=num_prompt_tokens, max_model_len=32)
    if result is not None:
        assert resolved == result
        return
    assert isinstance(resolved, Refusal)
    assert resolved.code == "context_length_exceeded"
    for named in (32, num_prompt_tokens, max_tokens or 1):
        assert str(named) in resolved.message


def test_default_new_tokens() -> None:
    defaults = [
        resolve(InferenceRequest(op=op, body={}), num_prompt_tokens=10, max_model_len=max_model_len)
        for op in ("chat", "completions", "embeddings")
        for max_model_len in (8_192, None)
    ]
    assert defaults == [1024, 1024, 16, 16, 1, 1]
    unlimited = InferenceRequest(op="chat", body={}, max_tokens=10**6)
    assert resolve(unlimited, num_prompt_tokens=10, max_model_len=None) == 10**6


@pytest.mark.parametrize(
    ("arguments", "need"),
    [((1, 1, 1, 16), 16), ((16, 1, 1, 16), 16), ((16, 2, 1, 16), 32), ((20, 12, 3, 16), 96), ((5, 3, 1, 1), 7)],
)
def test_need_in_whole_blocks(arguments: tuple[int, int, int, int], need: int) -> None:
    assert num_kv_tokens_needed(*arguments) == need
