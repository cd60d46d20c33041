"""Frames of an event stream, as OpenAI's clients read them: pure functions from chunks to bytes.

Frames have `data` alone; between them stand comments, which every client skips.
"""

import math
from typing import Any, Final

import msgspec

from headrace.client import Delta, Done
from headrace.client.events import as_chunk
from headrace.gateway.errors import error_body
from headrace.schemas.refusals import Refusal

__all__ = ["DONE", "Frames", "comment", "error_frames", "waiting_comment"]

DONE: Final = b"data: [DONE]\n\n"
_TOKEN_IDS: Final = b'"token_ids"'


class Frames:
    """The frames of one stream, in order; knows which tokens went out, so that it can tell a hole.

    `after` are the tokens the reader has already. Each chunk says in `headrace.offset` how many it has with it.
    """

    def __init__(self, *, has_usage: bool, after: int = 0) -> None:
        self._after = after
        self._has_usage = has_usage
        self._reached = after
        self._has_text = False
        self._finished: set[int] = set()

    def delta(self, delta: Delta) -> bytes | None:
        """The next chunk; None where tokens before it are missing."""
        if delta.offset > self._reached:
            return None
        self._reached = delta.offset + delta.num_tokens
        for choice in delta.chunk.get("choices", ()):
            if choice.get("finish_reason") is not None:
                self._finished.add(choice.get("index", 0))
        self._has_text = True
        return self._chunk(_without_token_ids(delta), offset=self._reached)

    def end(self, done: Done) -> bytes | None:
        """What is left after the last delta: finish reasons, usage, `[DONE]`; None where tokens before it are missing.

        An answer that came without deltas comes as one chunk.
        """
        if self._after and self._reached < done.num_tokens:
            return None
        response = done.response
        if "choices" not in response:
            return _frame(done.data) + DONE
        frames = []
        if not self._has_text and not self._after:
            whole = as_chunk(response, skip_chars=0)
            frames.append(self._chunk(msgspec.json.encode(whole), offset=done.num_tokens))
        left = [choice for choice in response["choices"] if choice.get("index", 0) not in self._finished]
        if left:
            last = {**as_chunk(response, skip_chars=0), "choices": [_finish(choice) for choice in left]}
            frames.append(self._chunk(msgspec.json.encode(last), offset=done.num_tokens))
        if self._has_usage:
            usage = {**as_chunk(response, skip_chars=0), "choices": [], "usage": response.get("usage")}
            frames.append(_frame(msgspec.json.encode(usage)))
        return b"".join((*frames, DONE))

    def _chunk(self, data: bytes, *, offset: int) -> bytes:
        usage = b',"usage":null' if self._has_usage else b""
        return b'data: %b%b,"headrace":{"offset":%d}}\n\n' % (data[:-1], usage, offset)


def error_frames(refusal: Refusal) -> bytes:
    """The end of a stream that failed after it began; never a finish reason."""
    return _frame(error_body(refusal)) + DONE


def comment(text: str) -> bytes:
    """A line that says something to people and keeps the connection alive."""
    return b": %b\n\n" % text.encode()


def waiting_comment(position: int | None, eta_s: float | None, *, is_paused: bool = False) -> bytes:
    """Where a queued request stands: how many would start before it, and in about how many seconds it starts, or that
    its model is paused.
    """
    text = "queued"
    if position is not None:
        text += f", position {position}"
    if eta_s is not None and math.isfinite(eta_s):
        text += f", about {math.ceil(eta_s)} s"
    if is_paused:
        text += ", the model is paused"
    return comment(text)


def _frame(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


def _without_token_ids(delta: Delta) -> bytes:
    """The chunk as OpenAI has it: token ids are between engine and worker, and cost a reader more than the text."""
    if _TOKEN_IDS not in delta.data:
        return delta.data
    choices = [
        {name: value for name, value in choice.items() if name != "token_ids"}
        for choice in delta.chunk.get("choices", ())
    ]
    return msgspec.json.encode({**delta.chunk, "choices": choices})


def _finish(choice: dict[str, Any]) -> dict[str, Any]:
    gained: dict[str, Any] = {"delta": {}} if "message" in choice else {"text": ""}
    return {
        "index": choice.get("index", 0),
        **gained,
        "logprobs": None,
        "finish_reason": choice.get("finish_reason"),
    }
