"""The beginning of a request as text, by which equal beginnings are known without a tokenizer."""

from collections.abc import Iterator
from typing import Any

import msgspec

from headrace.schemas.openai import InferenceRequest

__all__ = ["conversation_texts"]


def conversation_texts(request: InferenceRequest) -> list[str]:
    """Its parts in the order in which a chat template renders them: tools, then role and content of each message.

    A prompt is one part, as text or as its token ids. Media count by their JSON. Empty for embeddings, which no engine
    keeps a cache of.
    """
    body = request.body
    if request.op == "embeddings":
        return []
    if request.op == "completions":
        prompt = body["prompt"]
        return [prompt if isinstance(prompt, str) else " ".join(map(str, prompt))]
    texts = [_as_json(body[name]) for name in ("tools", "functions") if name in body]
    for message in body["messages"]:
        texts += [message["role"], *_contents(message.get("content"))]
    return texts


def _contents(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif content is not None:
        for part in content:
            yield part["text"] if part.get("type") == "text" else _as_json(part)


def _as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
