"""What a monitor remembers of queued jobs while it reads their queue anew."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.monitor import deadlines
from headrace.monitor.deadlines import Deadlines
from headrace.schemas.jobs import Job
from headrace.schemas.subjects import HDR_SEQUENCE, JobId, Names, Tenant


def job(name: str) -> Job:
    return Job(
        tenant=Tenant("t"),
        job=JobId(name),
        op="chat",
        model="m",
        body=b"",
        body_hash="hash",
        accepted_at=1_000.0,
        queue_timeout_s=60.0,
        deadline_s=600.0,
        need_tokens=10,
    )


async def test_a_job_that_comes_while_its_queue_is_read_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    bus: Any = SimpleNamespace(names=Names(prefix="headrace.v1"))
    watching = Deadlines(bus)
    watching.note(job("gone"), 3)

    async def read(*_: object, **__: object) -> AsyncIterator[Any]:
        yield SimpleNamespace(headers={**job("there").headers(), HDR_SEQUENCE: "4"})
        watching.note(job("new"), 5)  # its wake comes after the broker has sent the last there was

    monkeypatch.setattr(deadlines, "batch_each", read)
    await watching._read_queue("m")
    assert {each.job for each in watching._jobs.values()} == {"there", "new"}
