"""A mixed load: short chats, long summaries and a batch at two models; who sends what, and what became of it."""

import asyncio
import time
from collections.abc import Iterator
from random import Random
from typing import Any, Final

import msgspec

from headrace.cli.takeover import Watched
from headrace.client import Accepted, Client, StreamEvent
from headrace.errors import HeadraceError, JobCancelledError, JobExpiredError, JobFailedError, RequestError
from headrace.schemas.subjects import Lane

__all__ = ["CHAT_MODEL", "KINDS", "SUMMARY_MODEL", "Kind", "Sent", "planned", "send"]

CHAT_MODEL: Final = "small"
SUMMARY_MODEL: Final = "large"


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of request. `per_second` come by chance (a Poisson process), `at_start` all at once.

    `prompt_words` are about as many tokens; `tokens` are asked for, least and most.
    """

    name: str
    model: str
    lane: Lane
    prompt_words: int
    tokens: tuple[int, int]
    per_second: float = 0.0
    at_start: int = 0
    deadline_s: float = 120.0


KINDS: Final = (
    Kind(name="chat", model=CHAT_MODEL, lane="normal", prompt_words=40, tokens=(16, 64), per_second=2.5),
    Kind(name="summary", model=SUMMARY_MODEL, lane="normal", prompt_words=2500, tokens=(64, 192), per_second=0.3),
    Kind(name="batch", model=CHAT_MODEL, lane="low", prompt_words=200, tokens=(32, 96), at_start=100, deadline_s=600),
)


class Sent(msgspec.Struct, kw_only=True):
    """One request and what became of it. Times are seconds on this process's monotonic clock.

    `end` is `done`, or the code it was refused with or ended with; `damage` says what was wrong with its stream.
    """

    kind: Kind
    tokens: int
    watched: Watched
    sent_at: float = 0.0
    job: str = ""
    answered_at: float | None = None
    position: int | None = None
    eta_s: float | None = None
    end: str = ""
    ended_at: float | None = None
    damage: str = ""
    is_refused: bool = False
    retry_after_s: int | None = None

    @property
    def wait_s(self) -> float | None:
        """From its sending to its first start; None if it never started."""
        return self.watched.starts[0].at - self.sent_at if self.watched.starts else None

    @property
    def first_token_s(self) -> float | None:
        """From its sending to its first token; None if there was none."""
        first = next((start.first_token_at for start in self.watched.starts if start.first_token_at is not None), None)
        return first - self.sent_at if first is not None else None


def planned(duration_s: float, *, seed: int, kinds: tuple[Kind, ...] = KINDS) -> list[tuple[float, Sent]]:
    """Requests with the seconds after the start at which each is sent, in that order; the same for the same seed."""
    found: list[tuple[float, Sent]] = []
    for kind in kinds:
        random = Random(f"{seed} {kind.name}")
        for at_s in _times(kind, duration_s, random):
            tokens = random.randint(*kind.tokens)
            found.append((at_s, Sent(kind=kind, tokens=tokens, watched=Watched(threshold=1))))
    return sorted(found, key=lambda each: each[0])


def _times(kind: Kind, duration_s: float, random: Random) -> Iterator[float]:
    yield from (0.0 for _ in range(kind.at_start))
    at_s = 0.0
    while kind.per_second and (at_s := at_s + random.expovariate(kind.per_second)) < duration_s:
        yield at_s


async def send(client: Client, sent: Sent, *, after_s: float, number: int, **options: Any) -> None:
    """Send one request then, and read it to its end, whatever that is."""
    await asyncio.sleep(after_s)
    kind = sent.kind
    prompt = f"{kind.name} {number} " + "word " * kind.prompt_words

    def note(event: StreamEvent) -> None:
        if isinstance(event, Accepted):
            sent.answered_at = time.monotonic()
            sent.position, sent.eta_s = event.position, event.eta_s

    sent.sent_at = time.monotonic()
    stream = client.stream(
        model=kind.model, prompt=prompt, max_tokens=sent.tokens, ignore_eos=True, priority=kind.lane,
        deadline_s=kind.deadline_s, queue_timeout_s=min(kind.deadline_s, 600.0), **options,
    )  # fmt: skip
    sent.job = stream.job
    try:
        async with stream:
            await sent.watched.read(aiter(stream), on_event=note)
        sent.end = "done"
        if sent.watched.done is None or sent.watched.num_tokens != sent.tokens:
            sent.damage = f"{sent.watched.num_tokens} of {sent.tokens} tokens"
    except RequestError as error:
        sent.end = error.refusal.code
        sent.is_refused = not isinstance(error, JobFailedError | JobExpiredError | JobCancelledError)
        sent.retry_after_s = error.refusal.retry_after_s
        if sent.answered_at is None:
            sent.answered_at = time.monotonic()
    except HeadraceError as error:  # what `Watched` finds wrong with a stream
        sent.end, sent.damage = "damaged", str(error)
    sent.ended_at = time.monotonic()
