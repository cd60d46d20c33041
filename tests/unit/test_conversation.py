"""Which text stands for the beginning of a request."""

import json
from typing import Any

from headrace.discipline.affinity import prefix_hashes
from headrace.schemas.conversation import conversation_texts
from headrace.schemas.openai import InferenceRequest, Operation, RequestLimits, parse_request

LONG = "a river runs through it. " * 100


def request(op: Operation, **body: Any) -> InferenceRequest:
    parsed = parse_request(op, json.dumps(body).encode(), limits=RequestLimits())
    assert isinstance(parsed, InferenceRequest)
    return parsed


def test_a_chat_is_its_tools_roles_and_contents_in_order() -> None:
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "data:,x"}}]
    chat = request("chat", messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}])
    assert conversation_texts(chat)[:4] == ["system", "be brief", "user", "look"]
    assert "data:,x" in conversation_texts(chat)[4]


def test_a_prompt_is_one_part_as_text_or_as_ids() -> None:
    assert conversation_texts(request("completions", prompt="once")) == ["once"]
    assert conversation_texts(request("completions", prompt=[1, 22, 3])) == ["1 22 3"]


def test_nothing_is_kept_of_embeddings() -> None:
    assert conversation_texts(request("embeddings", input="x" * 5000)) == []


def test_turns_of_one_conversation_begin_alike_and_others_do_not() -> None:
    first = [{"role": "system", "content": LONG}, {"role": "user", "content": "one"}]
    second = [*first, {"role": "assistant", "content": "two"}, {"role": "user", "content": LONG}]
    other = [{"role": "system", "content": "!" + LONG}, {"role": "user", "content": "one"}]
    begun, gone_on, elsewhere = (
        prefix_hashes(conversation_texts(request("chat", messages=messages))) for messages in (first, second, other)
    )
    assert len(begun) == 2
    assert gone_on[:2] == begun
    assert not set(elsewhere) & set(gone_on)
