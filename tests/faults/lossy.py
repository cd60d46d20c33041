"""Answers that are lost: what is stored and not acknowledged, not stored at all, or stored later than given up."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, Literal
from unittest.mock import patch

import msgspec

from headrace.bus.connection import Bus, StoreResult, Unknown
from headrace.bus.jobqueue import Delivery, JobQueue

__all__ = ["Losses", "losing"]

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
    late: set[asyncio.Task[StoreResult]] = set()
    counts: Counter[str] = Counter()
    store, ack = Bus.store, JobQueue.ack

    async def lossy_store(
        self: Bus, subject: str, data: bytes, *, headers: Mapping[str, str], timeout_s: float | None = None
    ) -> StoreResult:
        kind = _kind(subject, self)
        fate = losses.stores.get(f"{kind} {counts[kind]}") if self.settings.prefix == prefix else None
        counts[kind] += 1
        if fate == "unheard":
            await store(self, subject, data, headers=headers, timeout_s=timeout_s)
        elif fate == "late":
            task = asyncio.create_task(_later(store(self, subject, data, headers=headers, timeout_s=timeout_s)))
            late.add(task)
            task.add_done_callback(late.discard)
        if fate is not None:
            return Unknown(f"the test lost its answer ({fate})")
        return await store(self, subject, data, headers=headers, timeout_s=timeout_s)

    async def lossy_ack(self: JobQueue, delivery: Delivery) -> None:
        number, counts["ack"] = counts["ack"], counts["ack"] + 1
        if number not in losses.acks:
            await ack(self, delivery)

    with patch.object(Bus, "store", lossy_store), patch.object(JobQueue, "ack", lossy_ack):
        yield
        while late:
            await asyncio.wait(late)


async def _later(storing: Coroutine[Any, Any, StoreResult]) -> StoreResult:
    await asyncio.sleep(_LATE_S)
    return await storing


def _kind(subject: str, bus: Bus) -> str:
    return "workers" if subject.startswith("$KV.") else subject.removeprefix(f"{bus.names.prefix}.").partition(".")[0]
