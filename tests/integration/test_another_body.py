"""Two requests under one job id, by a way around the router: the one the log knows is run, whatever comes first."""

import time

from headrace.bus.connection import Stored
from headrace.bus.joblog import JobLog
from headrace.bus.jobqueue import JobQueue
from headrace.schemas import events
from headrace.schemas.events import AcceptedBody, Event, Owner
from headrace.schemas.jobs import Job
from headrace.schemas.subjects import JobId, QueueName, Tenant
from tests.deployment import MODEL, deployment, sim, until

TTL_S = 600.0


def job(body_hash: str) -> Job:
    return Job(
        tenant=Tenant("default"),
        job=JobId("j"),
        op="completions",
        model=MODEL,
        body=b'{"model":"%s","prompt":"x","max_tokens":4,"stream":true}' % MODEL.encode(),
        body_hash=body_hash,
        accepted_at=time.time(),
        queue_timeout_s=60,
        deadline_s=600,
        need_tokens=10,
    )


async def test_another_request_is_not_run_in_place_of_the_one_that_lost_its_worker(
    broker_url: str, prefix: str
) -> None:
    """The log's last event does not say whose body ran; a worker that has claimed the job by it must look before it
    runs it.
    """
    async with deployment(broker_url, prefix, ack_wait_s=2.0) as running:
        engine = sim()
        await running.worker(engine)
        log, queue = JobLog(running.bus), JobQueue(running.bus, MODEL)
        lost = Owner(worker="dead", epoch="e", queue_sequence=99)
        sequence = 0
        for event in (
            events.accepted("j", AcceptedBody(job="j", sequence=99), body_hash="mine"),
            events.started("j", lost, attempt=1, offset=0, body_hash="mine"),
            events.requeued("j", attempt=2, offset=0, reason="worker_lost", lost=lost),
        ):
            result = await log.append("default", event, expected=sequence, ttl_s=TTL_S)
            assert isinstance(result, Stored)
            sequence = result.sequence
        assert isinstance(await queue.publish(job("another"), QueueName(), {}), Stored)

        async def is_given_back() -> bool:
            last = await log.last("default", "j")
            return last is not None and last.attempt == 3 and last.kind == "requeued"

        await until(is_given_back)
        told = await log.read("default", "j")
        assert [event.kind for event in told] == ["accepted", "started", "requeued", "started", "requeued"]
        assert engine.num_running == 0

        mine = job("mine")
        headers = mine.headers() | {"Nats-Msg-Id": "the first one, whose worker died"}
        await running.bus.store(running.bus.names.jobs(MODEL, QueueName()), mine.body, headers=headers)

        async def has_ended() -> bool:
            last = await log.last("default", "j")
            return last is not None and last.is_terminal

        await until(has_ended)
        ended: Event = (await log.read("default", "j"))[-1]
        assert (ended.kind, ended.body_hash, ended.attempt) == ("done", "mine", 3)
