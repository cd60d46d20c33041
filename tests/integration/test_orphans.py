"""Deliveries left by a dead router are removed once their job has ended, and not before."""

import pytest

from headrace.bus.connection import Bus
from headrace.bus.joblog import JobLog
from headrace.bus.provision import ensure_provisioned
from headrace.monitor import orphans
from headrace.schemas import events
from headrace.schemas.refusals import Refusal
from tests.deployment import until


async def test_only_deliveries_of_ended_jobs_go(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    await ensure_provisioned(bus)
    log = JobLog(bus)
    inbox = bus.new_inbox()
    for job in ("ended", "queued"):
        body = events.AcceptedBody(job=job, sequence=1)
        await bus.subscribe(f"{inbox}.{job}")
        await log.append("default", events.accepted(job, body, body_hash="h"), expected=0, ttl_s=60)
        await log.deliver("default", job, f"{inbox}.{job}")
    end = events.ended("failed", "ended", attempt=1, offset=0, error=Refusal(code="internal", message="x"))
    last = await log.last("default", "ended")
    assert last is not None
    await log.append("default", end, expected=last.sequence, ttl_s=60)
    monkeypatch.setattr(orphans, "_OLD_ENOUGH_S", 0.0)

    async def is_gone() -> bool:  # once the broker has sent it all
        await orphans._remove_orphans(bus, log, bus.names.log_stream(0))
        data = await bus.api(f"CONSUMER.LIST.{bus.names.log_stream(0)}")
        assert b".queued" in data
        return b".ended" not in data

    await until(is_gone)
