r"""The JSON of one streamed OpenAI chunk, turned into an `EngineChunk`.

Some engines cut a character between two chunks: half of its UTF-8 bytes raw in one JSON string and half in the
next, or one half of a `\uD83E\uDD99` pair in each. Neither is valid JSON text. `FrameDecoder` keeps the open
half back and joins it to what follows, so that no piece has a replacement character the model did not produce;
what is still open when a choice finishes becomes one U+FFFD.
"""

import codecs
import json
import re
from typing import Any, Final

import msgspec

from headrace.schemas.chunks import ChoiceDelta, EngineChunk, ToolCallDelta, Usage

__all__ = ["BadFrameError", "ErrorFrame", "FrameDecoder", "usage_of"]

_LONE_SURROGATE: Final = re.compile("[\ud800-\udc7f\udd00-\udfff]")


class BadFrameError(Exception):
    """A frame is not JSON of the expected form."""


class ErrorFrame(msgspec.Struct, frozen=True, kw_only=True):
    """`{"error": …}` in the stream: the engine gave the request up."""

    message: str
    status: int | None = None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int = 0
    id: str | None = None
    type: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: dict[str, Any] | None = None


class _Frame(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    prompt_token_ids: list[int] | None = None


_DECODER: Final = msgspec.json.Decoder(_Frame)
_EMPTY_DELTA: Final = _Delta()


def _usage(raw: _Usage) -> Usage:
    completion = raw.completion_tokens or 0
    return Usage(
        prompt_tokens=raw.prompt_tokens,
        completion_tokens=completion,
        total_tokens=raw.prompt_tokens + completion if raw.total_tokens is None else raw.total_tokens,
        prompt_tokens_details=raw.prompt_tokens_details,
    )


def usage_of(response: dict[str, Any]) -> Usage | None:
    """The usage of a whole, unstreamed response; None where it has none that can be read."""
    try:
        raw = msgspec.convert(response.get("usage"), _Usage | None)
    except msgspec.ValidationError:
        return None
    return None if raw is None else _usage(raw)


class _TextJoiner:
    """One text's pieces made whole: bytes smuggled in as lone surrogates, and surrogate halves, wait for the rest."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._high = ""

    def push(self, text: str, *, is_last: bool) -> str:
        text = self._high + text
        self._high = ""
        if text and "\ud800" <= text[-1] <= "\udbff" and not is_last:
            text, self._high = text[:-1], text[-1]
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        text = _LONE_SURROGATE.sub("\ufffd", text)
        return self._decoder.decode(text.encode("utf-8", "surrogateescape"), is_last)


class FrameDecoder:
    """Decodes the frames of one stream, in order."""

    def __init__(self) -> None:
        self._joiners: dict[tuple[int, str], _TextJoiner] = {}

    def decode(self, data: bytes) -> EngineChunk | ErrorFrame:
        """One frame. Raises `BadFrameError`."""
        is_whole = True
        try:
            try:
                frame = _DECODER.decode(data)
            except msgspec.ValidationError:
                raise
            except msgspec.DecodeError:
                is_whole = False
                frame = msgspec.convert(json.loads(data.decode("utf-8", "surrogateescape")), _Frame)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            raise BadFrameError(f"{type(error).__name__} in a frame of {len(data)} bytes") from None
        if frame.error is not None:
            return _error_frame(frame.error)
        prompt_token_ids = frame.prompt_token_ids
        choices: list[ChoiceDelta] = []
        for choice in frame.choices or ():
            prompt_token_ids = prompt_token_ids or choice.prompt_token_ids
            choices.append(self._choice(choice, is_whole=is_whole))
        return EngineChunk(
            choices=tuple(choices),
            usage=None if frame.usage is None else _usage(frame.usage),
            prompt_token_ids=tuple(prompt_token_ids or ()),
        )

    def _choice(self, choice: _Choice, *, is_whole: bool) -> ChoiceDelta:
        delta = choice.delta or _EMPTY_DELTA
        text = delta.content or choice.text or ""
        reasoning = delta.reasoning_content or delta.reasoning or ""
        token_ids = tuple(choice.token_ids or ())
        tool_calls = tuple(
            ToolCallDelta(
                index=call.index,
                id=call.id,
                type=call.type,
                name=call.function.name if call.function else None,
                arguments=(call.function.arguments or "") if call.function else "",
            )
            for call in delta.tool_calls or ()
        )
        num_tokens = len(token_ids) or int(bool(text or reasoning or tool_calls))
        is_last = choice.finish_reason is not None
        if self._joiners or not is_whole:
            text = self._join((choice.index, "text"), text, is_last=is_last)
            reasoning = self._join((choice.index, "reasoning"), reasoning, is_last=is_last)
        return ChoiceDelta(
            index=choice.index,
            role=delta.role,
            text=text,
            reasoning=reasoning,
            tool_calls=tool_calls,
            logprobs=choice.logprobs,
            token_ids=token_ids,
            num_tokens=num_tokens,
            finish_reason=choice.finish_reason,
        )

    def _join(self, key: tuple[int, str], text: str, *, is_last: bool) -> str:
        joiner = self._joiners.get(key)
        if joiner is None:
            joiner = self._joiners[key] = _TextJoiner()
        return joiner.push(text, is_last=is_last)


def _error_frame(error: Any) -> ErrorFrame:
    if not isinstance(error, dict):
        return ErrorFrame(message=str(error))
    code = error.get("code")
    if not isinstance(code, int):
        code = error.get("status") if isinstance(error.get("status"), int) else None
    return ErrorFrame(message=str(error.get("message") or "no message"), status=code)
