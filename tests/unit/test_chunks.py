"""Merging pieces, OpenAI's chunks and the final response."""

import json
from typing import Any

import msgspec
import pytest

from headrace.schemas.chunks import ChoiceDelta, ToolCallDelta, Usage, merge_choices, merge_logprobs
from headrace.schemas.openai_chunks import ChunkEncoder, decode_chunk
from headrace.schemas.responses import ResponseAssembler

USAGE = Usage(prompt_tokens=3, completion_tokens=2, total_tokens=5)


def chat_encoder() -> ChunkEncoder:
    return ChunkEncoder("chat", id="chatcmpl-1", created=7, model="m")


def call(arguments: str, **head: str) -> ChoiceDelta:
    return ChoiceDelta(tool_calls=(ToolCallDelta(index=0, arguments=arguments, **head),), num_tokens=1)


def respond(assembler: ResponseAssembler) -> dict[str, Any]:
    return assembler.response(id="chatcmpl-1", created=7, model="m", usage=USAGE)


def test_merge_joins_each_choice_in_order_of_appearance() -> None:
    merged = merge_choices(
        [
            (ChoiceDelta(index=1, role="assistant"), ChoiceDelta(index=0, text="a", token_ids=(1,), num_tokens=1)),
            (ChoiceDelta(index=0, text="b", reasoning="r", token_ids=(2, 3), num_tokens=2),),
            (ChoiceDelta(index=1, text="x", num_tokens=1, finish_reason="stop"), ChoiceDelta(index=0)),
        ]
    )
    assert merged == (
        ChoiceDelta(index=1, role="assistant", text="x", num_tokens=1, finish_reason="stop"),
        ChoiceDelta(index=0, text="ab", reasoning="r", token_ids=(1, 2, 3), num_tokens=3),
    )
    assert merge_choices([]) == ()


def test_merge_joins_tool_calls_by_index() -> None:
    (merged,) = merge_choices(
        [
            (call("", id="c1", type="function", name="f"),),
            (call('{"a"', id="c1", name="f"),),
            (
                ChoiceDelta(
                    tool_calls=(ToolCallDelta(index=1, id="c2", name="g"), ToolCallDelta(index=0, arguments=":1}"))
                ),
            ),
        ]
    )
    assert merged.tool_calls == (
        ToolCallDelta(index=0, id="c1", type="function", name="f", arguments='{"a":1}'),
        ToolCallDelta(index=1, id="c2", name="g"),
    )


@pytest.mark.parametrize(
    ("parts", "merged"),
    [
        (
            [{"content": [1], "refusal": None}, {"content": [2, 3], "refusal": None}],
            {"content": [1, 2, 3], "refusal": None},
        ),
        ([{"content": None}, {"content": [2]}], {"content": [2]}),
        (
            [{"tokens": ["a"], "top_logprobs": None}, {"tokens": ["b"], "top_logprobs": [{"b": -1.0}]}],
            {"tokens": ["a", "b"], "top_logprobs": [{"b": -1.0}]},
        ),
        ([], None),
    ],
)
def test_merge_logprobs(parts: list[dict[str, Any]], merged: dict[str, Any] | None) -> None:
    before = json.dumps(parts)
    assert merge_logprobs(parts) == merged
    assert json.dumps(parts) == before


def test_chat_chunk_golden_bytes() -> None:
    encoder = chat_encoder()
    assert encoder.encode((ChoiceDelta(role="assistant"),)) == (
        b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,'
        b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}'
    )
    assert encoder.encode((ChoiceDelta(text="hi", token_ids=(5,), num_tokens=1, finish_reason="stop"),)) == (
        b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,'
        b'"delta":{"content":"hi"},"logprobs":null,"finish_reason":"stop","token_ids":[5]}]}'
    )


def test_completions_chunk_golden_bytes() -> None:
    encoder = ChunkEncoder("completions", id="cmpl-1", created=7, model="m")
    assert encoder.encode((ChoiceDelta(text="hi", num_tokens=1),)) == (
        b'{"id":"cmpl-1","object":"text_completion","created":7,"model":"m","choices":[{"index":0,"text":"hi",'
        b'"logprobs":null,"finish_reason":null}]}'
    )


def test_tool_call_is_named_once_however_often_the_engine_does() -> None:
    encoder, head = chat_encoder(), {"id": "c1", "type": "function", "name": "f"}
    chunks = [json.loads(encoder.encode((call(part, **head),))) for part in ("", '{"a"', ":1}")]
    calls = [chunk["choices"][0]["delta"]["tool_calls"] for chunk in chunks]
    assert calls == [
        [{"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"a"'}}],
        [{"index": 0, "function": {"arguments": ":1}"}}],
    ]


def test_decode_gives_what_was_encoded() -> None:
    choices = (
        ChoiceDelta(role="assistant", text="ä\u2028", reasoning="r", token_ids=(1, 2), num_tokens=2),
        ChoiceDelta(index=1, tool_calls=(ToolCallDelta(index=0, id="c", type="function", name="f"),), num_tokens=1),
    )
    assert decode_chunk(chat_encoder().encode(choices), num_tokens=3) == choices


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"choices":[{}]}', b'{"choices":[{"index":0,"text":5}]}'])
def test_decode_refuses_other_bytes(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_chunk(data, num_tokens=0)


def test_chat_response() -> None:
    assembler = ResponseAssembler("chat")
    assembler.add((ChoiceDelta(role="assistant"),))
    assembler.add((ChoiceDelta(text="Hel", num_tokens=1),))
    assert not assembler.is_complete(1)
    assembler.add((ChoiceDelta(text="lo", reasoning="hm", num_tokens=1, finish_reason="stop"),))
    assert assembler.is_complete(1)
    assert not assembler.is_complete(2)
    assert (assembler.text(), assembler.num_tokens, assembler.finish_reasons) == ("Hello", 2, {0: "stop"})
    assert respond(assembler) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 7,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "reasoning_content": "hm"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def test_tool_call_cut_by_the_limit() -> None:
    assembler = ResponseAssembler("chat")
    for piece in (call("", id="c1", type="function", name="f"), call('{"city":"'), ChoiceDelta(finish_reason="length")):
        assembler.add((piece,))
    (choice,) = respond(assembler)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city":"'}}],
    }


def test_completions_response_sorts_choices() -> None:
    assembler = ResponseAssembler("completions")
    assembler.add((ChoiceDelta(index=1, text="b", finish_reason="length"), ChoiceDelta(index=0, text="a")))
    assert [(choice["index"], choice["text"]) for choice in respond(assembler)["choices"]] == [(0, "a"), (1, "b")]


def test_aborted_choice_is_not_complete() -> None:
    assembler = ResponseAssembler("chat")
    assembler.add((ChoiceDelta(finish_reason="abort"),))
    assert not assembler.is_complete(1)
