"""Any bytes give a request or a short refusal."""

import json
from typing import Any

import jsonschema_rs
import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas.openai import OPERATIONS, InferenceRequest, Operation, RequestLimits, parse_request
from headrace.schemas.openai_params import INTEGERS, body_schema
from headrace.schemas.refusals import CODES, Refusal

LIMITS = RequestLimits(max_body_bytes=20_000)

VALID: dict[str, dict[str, Any]] = {
    "chat": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "t"}, {"type": "image_url", "image_url": {"url": "u"}}],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "content": "r", "tool_call_id": "c"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "functions": [{"name": "f"}],
        "function_call": {"name": "f"},
        "max_tokens": 5,
        "max_completion_tokens": 6,
        "stop": ["x"],
        "n": 2,
        "best_of": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"5": 1.5},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x"}},
        "chat_template_kwargs": {},
        "documents": [{"text": "d"}],
        "top_k": 5,
    },
    "completions": {"prompt": ["p"], "logprobs": 3, "stop": "x", "echo": False, "suffix": "", "tools": [], "n": 1},
    "embeddings": {"input": [[1, 2], [3]], "encoding_format": "float", "dimensions": 8, "stream": False, "stop": ["x"]},
}

DESCRIBED = {op: jsonschema_rs.Draft202012Validator(body_schema(op, max_n=LIMITS.max_n)) for op in OPERATIONS}

NEED_OTHERS = {"stream_options", "best_of", "tool_choice", "function_call", "top_logprobs"}

operations: st.SearchStrategy[Any] = st.sampled_from(OPERATIONS)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def check_total(op: Operation, data: bytes) -> InferenceRequest | Refusal:
    result = parse_request(op, data, limits=LIMITS)
    if isinstance(result, Refusal):
        assert result.code in CODES
        assert len(result.message) <= 600
        assert len(msgspec.json.encode(result.body())) <= 4_096
        return result
    assert result.num_prompt_tokens_estimate >= 1
    assert result.num_prompt_tokens_bound >= 1
    assert isinstance(result.max_tokens, int | None)
    json.dumps(result.body, allow_nan=False)
    assert DESCRIBED[op].is_valid({**json.loads(data), "model": "m"})
    again = parse_request(op, msgspec.json.encode(result.body), limits=LIMITS)
    assert isinstance(again, InferenceRequest)
    assert again.body == result.body
    return result


def test_the_valid_bodies_are_valid() -> None:
    for op in OPERATIONS:
        assert isinstance(check_total(op, json.dumps(VALID[op]).encode()), InferenceRequest)


@settings(max_examples=150, deadline=None)
@given(op=operations, data=st.binary(max_size=60) | st.text(alphabet='{}[]",:\\u0d8e1-. ', max_size=60).map(str.encode))
def test_any_bytes(op: Operation, data: bytes) -> None:
    check_total(op, data)


@settings(max_examples=150, deadline=None)
@given(op=operations, data=st.data())
def test_any_value_in_any_place(op: Operation, data: st.DataObject) -> None:
    body = VALID[op]
    place = data.draw(st.sampled_from(places(body)))
    check_total(op, json.dumps(replaced(body, place, data.draw(json_values))).encode())


@settings(max_examples=150, deadline=None)
@given(op=st.sampled_from(["chat", "completions"]), data=st.data())
def test_one_parameter_that_does_not_fit_its_schema_is_refused_and_one_that_fits_is_not(
    op: Operation, data: st.DataObject
) -> None:
    body = {name: value for name, value in VALID[op].items() if name in ("messages", "prompt")}
    name = data.draw(st.sampled_from(sorted(set(body_schema(op, max_n=16)["properties"]) - NEED_OTHERS - {"model"})))
    value = data.draw(json_values)
    changed = {**body, name: value}
    result = check_total(op, json.dumps(changed).encode())
    assert isinstance(result, InferenceRequest) == DESCRIBED[op].is_valid({**changed, "model": "m"})


@settings(max_examples=100, deadline=None)
@given(op=operations, data=st.data())
def test_a_whole_number_with_a_point_is_that_integer(op: Operation, data: st.DataObject) -> None:
    required = {name: value for name, value in VALID[op].items() if name in ("messages", "prompt", "input")}
    name = data.draw(st.sampled_from(sorted(INTEGERS[op] - NEED_OTHERS)))
    number = data.draw(st.integers(-(2**53), 2**53) | st.integers(-2, 20))
    plain, pointed = ({**required, name: value} for value in (number, float(number)))
    results = [parse_request(op, json.dumps(body).encode(), limits=LIMITS) for body in (plain, pointed)]
    assert results[0] == results[1]
    fraction = parse_request(op, json.dumps({**required, name: number % 10 + 0.5}).encode(), limits=LIMITS)
    assert isinstance(fraction, Refusal)


@settings(max_examples=100, deadline=None)
@given(op=operations, position=st.integers(0, 2_000), junk=st.binary(max_size=6), num_removed=st.integers(0, 6))
def test_any_damage_to_the_bytes(op: Operation, position: int, junk: bytes, num_removed: int) -> None:
    data = json.dumps(VALID[op]).encode()
    position %= len(data) + 1
    check_total(op, data[:position] + junk + data[position + num_removed :])


@settings(max_examples=50, deadline=None)
@given(op=operations, extras=st.dictionaries(st.text(max_size=200), json_values, max_size=4))
def test_any_unknown_parameters(op: Operation, extras: dict[str, Any]) -> None:
    check_total(op, json.dumps({**extras, **VALID[op]}).encode())
