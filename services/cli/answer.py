"""An answer as it arrives: its tokens written at once, and the figures that go with it."""

import time
from collections.abc import AsyncIterator, Callable

import msgspec

from headrace.client import Accepted, Delta, Done, Requeued, Started, StreamEvent

__all__ = ["Answer", "follow"]


class Answer(msgspec.Struct, kw_only=True):
    """What is known of an answer so far. Times are seconds on the monotonic clock."""

    sent_at: float
    job: str = ""
    worker: str = ""
    attempt: int = 1
    text: str = ""
    num_tokens: int = 0
    num_first_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: float | None = None
    done: Done | None = None

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first token."""
        return None if self.first_token_at is None else self.first_token_at - self.sent_at

    @property
    def tokens_per_second(self) -> float | None:
        """Speed after the first token arrived; None for an answer too short to have one."""
        if self.first_token_at is None or self.last_token_at is None or self.last_token_at <= self.first_token_at:
            return None
        return (self.num_tokens - self.num_first_tokens) / (self.last_token_at - self.first_token_at)

    def figures(self) -> str:
        """`first token 52 ms · 40 tokens · 151 tokens/s`, and what else is worth saying."""
        parts = []
        if self.ttft_s is not None:
            parts.append(f"first token {self.ttft_s * 1000:.0f} ms")
        parts.append(f"{self.num_tokens} tokens")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.0f} tokens/s")
        if self.attempt > 1:
            parts.append(f"attempt {self.attempt}")
        if self.done is not None and self.done.finish_reason not in (None, "stop"):
            parts.append(f"ended by {self.done.finish_reason}")
        return " · ".join(parts)

    def summary(self) -> str:
        """The figures, and where they come from."""
        return f"{self.figures()} · worker {self.worker} · job {self.job}"


async def follow(
    events: AsyncIterator[StreamEvent],
    answer: Answer,
    *,
    on_text: Callable[[str], None],
    on_event: Callable[[StreamEvent], None] = lambda event: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Read a stream to its end into `answer`; each new piece of text goes to `on_text`, each event to `on_event`."""
    async for event in events:
        answer.job = event.job
        if isinstance(event, Started):
            answer.worker, answer.attempt = event.worker, event.attempt
        elif isinstance(event, Delta):
            answer.last_token_at = clock()
            answer.num_tokens += event.num_tokens
            if answer.first_token_at is None and event.num_tokens:
                answer.first_token_at, answer.num_first_tokens = answer.last_token_at, event.num_tokens
            answer.text += event.text
            if event.text:
                on_text(event.text)
        elif isinstance(event, Done):
            answer.done = event
        else:
            assert isinstance(event, Accepted | Requeued)
        on_event(event)
