"""What answers look like, for the document that describes them: OpenAI's objects, as far as we make them.

Engines may add fields to a message, a choice or a chunk; those are passed on.
"""

from typing import Any, Literal

import msgspec

from headrace.schemas.chunks import Usage

__all__ = ["ChatCompletion", "ChatCompletionChunk", "Completion", "Embeddings", "Health", "Model", "Models"]


class Offset(msgspec.Struct):
    """Ours: how many tokens of the job a reader has once it has read this chunk; what `after` takes."""

    offset: int


class CalledFunction(msgspec.Struct):
    """A function and its arguments, which are JSON in a string; over a stream they come in pieces."""

    arguments: str
    name: str | None = None


class ToolCall(msgspec.Struct):
    """One call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ToolCallPiece(msgspec.Struct):
    """A piece of a call of a tool; id, type and name come with the first piece of an index."""

    index: int
    function: CalledFunction
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct):
    """What the model said."""

    role: str
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(msgspec.Struct):
    """One answer of a chat."""

    index: int
    message: ChatMessage
    finish_reason: str | None
    logprobs: dict[str, Any] | None = None


class ChatDelta(msgspec.Struct):
    """What a message gained."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPiece] | None = None


class ChatChunkChoice(msgspec.Struct):
    """What one answer of a chat gained."""

    index: int
    delta: ChatDelta
    finish_reason: str | None
    logprobs: dict[str, Any] | None = None


class TextChoice(msgspec.Struct):
    """One answer of a completion, or what it gained."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: dict[str, Any] | None = None


class ChatCompletion(msgspec.Struct):
    """The whole answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatCompletionChunk(msgspec.Struct):
    """`data` of an event in the stream of a chat; the last one is `[DONE]`, after an error that is `{"error": …}`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    headrace: Offset | None = None


class Completion(msgspec.Struct):
    """The whole answer to a completion, and `data` of an event in its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    headrace: Offset | None = None


class Embedding(msgspec.Struct):
    """One vector: numbers, or base64 of 32-bit floats."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"]


class EmbeddingUsage(msgspec.Struct):
    """Token counts of embeddings."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct):
    """The vectors of all inputs, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Model(msgspec.Struct):
    """A model that can be named. `created` is 0: nothing knows it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(msgspec.Struct):
    """All models that can be named."""

    object: Literal["list"]
    data: list[Model]


class Health(msgspec.Struct):
    """`ok`, or what is wrong."""

    status: str
