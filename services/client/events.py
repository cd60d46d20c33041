"""What a stream yields."""

from typing import Any

import msgspec

from headrace.schemas.chunks import Usage
from headrace.schemas.events import AcceptedBody, Event, RequeuedBody, StartedBody

__all__ = ["Accepted", "Delta", "Done", "Requeued", "Started", "StreamEvent", "as_chunk", "chunk_text", "from_event"]


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """The job is in its queue. `position`: jobs that would start first; `eta_s`: about how long that takes."""

    job: str
    sequence: int | None
    position: int | None
    eta_s: float | None


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A worker runs the job; again with the next attempt after `Requeued`."""

    job: str
    worker: str
    attempt: int


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """The next tokens. `text` is that of choice 0, `chunk` the OpenAI chunk, `offset` the number of tokens before.

    `data` is the chunk as it came, in JSON.
    """

    job: str
    text: str
    offset: int
    num_tokens: int
    chunk: dict[str, Any]
    data: bytes = b""


class Requeued(msgspec.Struct, frozen=True, kw_only=True):
    """The job went back to its queue; it goes on after the last delta with attempt `attempt`."""

    job: str
    attempt: int
    reason: str


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The answer is complete. `response` is the OpenAI response object; `text` and `finish_reason` are choice 0's.

    `data` is the response as it came, in JSON. `num_tokens` counts the tokens of all its deltas, none where the request
    asked for none.
    """

    job: str
    response: dict[str, Any]
    text: str
    finish_reason: str | None
    usage: Usage | None
    data: bytes = b""
    num_tokens: int = 0


StreamEvent = Accepted | Started | Delta | Requeued | Done


def from_event(event: Event) -> StreamEvent | None:
    """A log event as the stream yields it; None for ends that are raised instead. Raises msgspec.DecodeError."""
    if event.kind == "accepted":
        body = msgspec.json.decode(event.data, type=AcceptedBody)
        return Accepted(job=event.job, sequence=body.sequence, position=body.position, eta_s=body.eta_s)
    if event.kind == "started":
        start = msgspec.json.decode(event.data, type=StartedBody)
        return Started(job=event.job, worker=start.worker, attempt=start.attempt)
    if event.kind == "delta":
        chunk = event.json()
        return Delta(
            job=event.job,
            text=chunk_text(chunk),
            offset=event.offset,
            num_tokens=event.count,
            chunk=chunk,
            data=event.data,
        )
    if event.kind == "requeued":
        back = msgspec.json.decode(event.data, type=RequeuedBody)
        return Requeued(job=event.job, attempt=back.attempt, reason=back.reason)
    if event.kind == "done":
        return _done(event)
    return None


def chunk_text(chunk: dict[str, Any]) -> str:
    """Text of choice 0 in an OpenAI chunk."""
    for choice in chunk.get("choices", ()):
        if choice.get("index", 0) == 0:
            return (choice.get("delta") or {}).get("content") or choice.get("text") or ""
    return ""


def _done(event: Event) -> Done:
    response: dict[str, Any] = event.json()
    first: dict[str, Any] = next((c for c in response.get("choices", ()) if c.get("index", 0) == 0), {})
    text = (first.get("message") or {}).get("content") or first.get("text") or ""
    usage = response.get("usage")
    counts = None
    if usage:
        counts = Usage(
            prompt_tokens=usage.get("prompt_tokens", 0),
            completion_tokens=usage.get("completion_tokens", 0),
            total_tokens=usage.get("total_tokens", 0),
            prompt_tokens_details=usage.get("prompt_tokens_details"),
        )
    return Done(
        job=event.job,
        response=response,
        text=text,
        finish_reason=first.get("finish_reason"),
        usage=counts,
        data=event.data,
        num_tokens=event.offset,
    )


def as_chunk(response: dict[str, Any], *, skip_chars: int) -> dict[str, Any]:
    """A response as one last chunk: what a reader still lacks when only the whole answer is left in the log.

    `skip_chars` characters of choice 0 were read already.
    """
    choices = []
    for choice in response.get("choices", ()):
        index, skip = choice.get("index", 0), skip_chars if choice.get("index", 0) == 0 else 0
        shared = {"index": index, "logprobs": None, "finish_reason": None}
        if "message" in choice:
            message = choice["message"]
            content = message.get("content")
            delta = {key: value for key, value in message.items() if value is not None}
            if content is not None:
                delta["content"] = content[skip:]
            choices.append({**shared, "delta": delta})
        else:
            choices.append({**shared, "text": choice.get("text", "")[skip:]})
    kind = "chat.completion.chunk" if response.get("object") == "chat.completion" else "text_completion"
    return {**{key: response.get(key) for key in ("id", "created", "model")}, "object": kind, "choices": choices}
