"""Answers that are lost: what is stored and not acknowledged, not stored at all, or stored later than given up."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from typing import Any, Literal
from unittest.mock import patch

import msgspec

from headrace.bus.connection import Bus, StoreResult, Unknown
from headrace.bus.jobqueue import Delivery, JobQueue

__all__ = ["Losses", "losing", "lossy_bus"]

Fate = Literal["unheard", "unsent", "late"]
Kind = Literal["jobs", "log", "workers", "dead"]

_LATE_S = 0.3


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """Which stores of a kind meet which fate, by their ordinal in the run; and which settling acks never leave."""

    stores: dict[str, Fate] = {}
    acks: tuple[int, ...] = ()

    @classmethod
    def draw(cls, rng: random.Random) -> "Losses":
        """A handful of losses, or none."""
        fates: list[Fate] = ["unheard", "unsent", "late"]
        ranges: dict[Kind, int] = {"jobs": 10, "log": 80, "workers": 60, "dead": 1}
        stores = {
            f"{kind} {rng.randrange(last)}": rng.choice(fates)
            for kind, last in ranges.items()
            for _ in range(rng.randint(0, max(1, last // 20)))
        }
        return cls(stores=stores, acks=tuple(sorted(rng.sample(range(10), rng.choice((0, 0, 1, 2))))))


@contextlib.asynccontextmanager
async def losing(losses: Losses, prefix: str) -> AsyncIterator[None]:
    """Lose answers of every connection of one deployment in this process, inside this context."""
    loser = _Loser(losses)
    _losers[prefix] = loser
    try:
        yield
        while loser.num_late:  # some wait in loops of other threads
            await asyncio.sleep(0.02)
    finally:
        del _losers[prefix]


class _Loser:
    def __init__(self, losses: Losses) -> None:
        self._losses = losses
        self._counts: Counter[str] = Counter()
        self._late: set[asyncio.Task[StoreResult]] = set()

    @property
    def num_late(self) -> int:
        """Stores that are still to come."""
        return len(self._late)

    def fate(self, kind: str) -> Fate | None:
        """What becomes of the next store of a kind."""
        number, self._counts[kind] = self._counts[kind], self._counts[kind] + 1
        return self._losses.stores.get(f"{kind} {number}")

    def loses_ack(self) -> bool:
        """Whether the next settling ack never leaves."""
        number, self._counts["ack"] = self._counts["ack"], self._counts["ack"] + 1
        return number in self._losses.acks

    def store_late(self, storing: Coroutine[Any, Any, StoreResult]) -> None:
        """Store it after everybody gave up on it."""
        task = asyncio.create_task(_later(storing))
        self._late.add(task)
        task.add_done_callback(self._late.discard)


_losers: dict[str, _Loser] = {}
"""By deployment prefix; several schedules may run at once."""


@contextlib.contextmanager
def lossy_bus() -> Iterator[None]:
    """Let `losing` take effect inside this context."""
    store, ack = Bus.store, JobQueue.ack

    async def lossy_store(
        self: Bus, subject: str, data: bytes, *, headers: Mapping[str, str], timeout_s: float | None = None
    ) -> StoreResult:
        loser = _losers.get(self.settings.prefix)
        fate = loser.fate(_kind(subject, self)) if loser is not None else None
        if loser is None or fate is None:
            return await store(self, subject, data, headers=headers, timeout_s=timeout_s)
        if fate == "unheard":
            await store(self, subject, data, headers=headers, timeout_s=timeout_s)
        elif fate == "late":
            loser.store_late(store(self, subject, data, headers=headers, timeout_s=timeout_s))
        return Unknown(f"the test lost its answer ({fate})")

    async def lossy_ack(self: JobQueue, delivery: Delivery) -> None:
        loser = _losers.get(self._bus.settings.prefix)
        if loser is None or not loser.loses_ack():
            await ack(self, delivery)

    with patch.object(Bus, "store", lossy_store), patch.object(JobQueue, "ack", lossy_ack):
        yield


async def _later(storing: Coroutine[Any, Any, StoreResult]) -> StoreResult:
    try:
        await asyncio.sleep(_LATE_S)
        return await storing
    finally:
        storing.close()


def _kind(subject: str, bus: Bus) -> str:
    return "workers" if subject.startswith("$KV.") else subject.removeprefix(f"{bus.names.prefix}.").partition(".")[0]
