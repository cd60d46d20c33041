"""What lost its worker goes on before anything that waits, in another queue of its lane too."""

import asyncio

import pytest

from headrace.bus.connection import Stored
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.joblog import JobLog
from headrace.client import Requeued
from headrace.monitor.eviction import Evictor
from headrace.schemas import events
from headrace.schemas.events import AcceptedBody, Owner
from headrace.schemas.subjects import QueueName
from headrace.schemas.workers import Heartbeat, HeldRequest
from tests.deployment import MODEL, deployment, sim, until
from tests.integration.test_queue_discipline import Jobs, configure, tenants


async def test_an_interrupted_request_goes_on_before_other_queues_have_their_turn(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, worker_ttl_s=1.0, heartbeat_s=0.2) as running:
        await configure(running, "[tenants.a]\n[tenants.b]\n")
        async with (
            tenants(running) as (a, b),
            asyncio.timeout(120),
            asyncio.TaskGroup() as group,
        ):
            await running.monitor()
            dying = await running.worker(sim(tokens_per_second=20.0), worker="dying", max_concurrency=1)
            requeued = asyncio.Event()

            async def read() -> None:
                async with b.stream(model=MODEL, prompt="x", max_tokens=60, ignore_eos=True) as stream:
                    async for event in stream:
                        if isinstance(event, Requeued):
                            requeued.set()
                        order.append(type(event).__name__) if type(event).__name__ == "Started" else None

            order: list[str] = []
            interrupted = group.create_task(read())

            async def has_started() -> bool:
                return order == ["Started"]

            await until(has_started)
            survivor = sim(tokens_per_second=20.0)
            await running.worker(survivor, worker="survivor", max_concurrency=1)
            of_a, of_b = Jobs(a, group), Jobs(b, group)
            of_a.started = of_b.started = order
            await of_b.send("busy", max_tokens=100)  # 5 s, the survivor is full all the while, and b had its turn
            await of_b.until_started("busy")
            for number in range(5):
                await of_a.send(f"a{number}", max_tokens=2)
                await of_b.send(f"b{number}", max_tokens=2)
            await dying.kill()
            await requeued.wait()
            assert order == ["Started", "busy"]
            seen = await WorkersBucket(running.bus).get("survivor")
            assert seen is not None
            assert seen.beat is not None
            assert seen.beat.running == 1, "it is full, so no wake reached it"
            await interrupted
            assert order[2] == "Started", "by turns it would be the first of a"


@pytest.mark.parametrize(("claimed_in", "is_named"), [(1, True), (2, False), (None, False)])
async def test_a_loss_names_the_message_that_ran(
    broker_url: str, prefix: str, claimed_in: int | None, is_named: bool
) -> None:
    """Whoever fetches that message claims the job by this event alone. One that was only listed may be another's."""
    async with deployment(broker_url, prefix) as running:
        log = JobLog(running.bus)
        owner = Owner(worker="dead", epoch="e", queue_sequence=5)
        sequence = 0
        for event in (
            events.accepted("j", AcceptedBody(job="j", sequence=5, model=MODEL), body_hash="h"),
            events.started("j", owner, attempt=1, offset=0, body_hash="h", model=MODEL),
            events.delta("j", owner, attempt=1, offset=0, count=3, data=b"{}"),
        ):
            result = await log.append("default", event, expected=sequence, ttl_s=600.0)
            assert isinstance(result, Stored)
            sequence = result.sequence
        held = HeldRequest(
            consumer=QueueName().consumer,
            sequence=5,
            tenant="default",
            job="j",
            attempt=claimed_in or 1,
            has_claimed=claimed_in is not None,
        )
        beat = Heartbeat(
            worker="dead", epoch="e", state="Ready", model=MODEL, engine="sim", pool="default", held=(held,)
        )
        await Evictor(running.bus).hand_over(beat)
        lost = await log.last("default", "j")
        assert lost is not None
        assert (lost.kind, lost.offset, lost.attempt) == ("requeued", 3, 2)
        assert (lost.model, lost.queue_sequence) == ((MODEL, 5) if is_named else ("", None))
