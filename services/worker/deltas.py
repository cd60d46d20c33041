"""From engine pieces to `delta` events: one append in flight, what comes meanwhile goes out in the next."""

import asyncio
from collections.abc import Callable
from typing import Final

from headrace.schemas import events
from headrace.schemas.chunks import ChoiceDelta, merge_choices
from headrace.schemas.events import Owner
from headrace.schemas.openai_chunks import ChunkEncoder
from headrace.worker.appending import Appended, Ended, Fenced, LogWriter, TooLarge

__all__ = ["DeltaFlow"]

_MAX_PIECES_PER_APPEND: Final = 512
"""Bounds one event's size; pieces beyond it wait for the next append."""


class DeltaFlow:
    """Writes the pieces of one attempt to the log, in order.

    A lone stream gets each token at once; under load the appends grow instead of queueing. `add` waits while twice
    the bound is pending, so a slow broker slows the engine's reader and memory stays bounded. When the log refuses,
    `on_refused` is called once and everything after is dropped.
    """

    def __init__(
        self,
        writer: LogWriter,
        encoder: ChunkEncoder,
        *,
        job: str,
        owner: Owner,
        attempt: int,
        offset: int,
        on_refused: Callable[[Ended | Fenced | TooLarge], None],
    ) -> None:
        self._writer = writer
        self._encoder = encoder
        self._job = job
        self._owner = owner
        self._attempt = attempt
        self.offset = offset
        self._on_refused = on_refused
        self._pending: list[tuple[ChoiceDelta, ...]] = []
        self._has_work = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_closing = False
        self.is_refused = False

    async def add(self, choices: tuple[ChoiceDelta, ...]) -> None:
        """Hand over one piece."""
        await self._has_room.wait()
        self._pending.append(choices)
        if len(self._pending) >= 2 * _MAX_PIECES_PER_APPEND:
            self._has_room.clear()
        if any(_is_worth_an_append(choice) for choice in choices):
            self._has_work.set()

    def close(self) -> None:
        """No more pieces come: `run` returns when the rest is written."""
        self._is_closing = True
        self._has_work.set()

    async def run(self) -> None:
        """Write until closed. Not to be cancelled in the middle of an append, whose outcome would be unknown."""
        while not (self._is_closing and not self._pending):
            await self._has_work.wait()
            self._has_work.clear()
            while self._pending and not self.is_refused:
                batch, self._pending = self._pending[:_MAX_PIECES_PER_APPEND], self._pending[_MAX_PIECES_PER_APPEND:]
                self._has_room.set()
                await self._write(batch)
            if self.is_refused:
                self._pending.clear()
                self._has_room.set()

    async def _write(self, batch: list[tuple[ChoiceDelta, ...]]) -> None:
        choices = merge_choices(batch)
        if not any(_is_worth_an_append(choice) for choice in choices):
            return  # roles and finish reasons alone; `done` says them
        count = sum(choice.num_tokens for choice in choices)
        event = events.delta(
            self._job,
            self._owner,
            attempt=self._attempt,
            offset=self.offset,
            count=count,
            data=self._encoder.encode(choices),
        )
        result = await self._writer.append(event)
        if isinstance(result, Appended):
            self.offset += count
            return
        self.is_refused = True
        self._on_refused(result)


def _is_worth_an_append(choice: ChoiceDelta) -> bool:
    return bool(choice.text or choice.reasoning or choice.tool_calls or choice.num_tokens)
