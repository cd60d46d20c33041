"""Two requests under one job id, by a way around the router: the one the log knows is run, whatever comes first."""

import time

import pytest

from headrace.bus.connection import Stored
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.joblog import JobLog
from headrace.bus.jobqueue import JobQueue
from headrace.schemas import events
from headrace.schemas.events import AcceptedBody, Owner
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


@pytest.mark.parametrize("is_another_model", [False, True], ids=["body", "model"])
async def test_another_request_is_not_run_in_place_of_the_one_that_lost_its_worker(
    broker_url: str, prefix: str, is_another_model: bool
) -> None:
    """The log's last event names the message that ran, and no body: who has another message must not go by it alone."""
    async with deployment(broker_url, prefix) as running:
        engine = sim()
        await running.worker(engine)
        log, queue = JobLog(running.bus), JobQueue(running.bus, MODEL)
        model, body = ("other-model", "another") if is_another_model else (MODEL, "mine")
        lost = Owner(worker="dead", epoch="e", queue_sequence=99)
        sequence = 0
        for event in (
            events.accepted("j", AcceptedBody(job="j", sequence=99, model=model), body_hash=body),
            events.started("j", lost, attempt=1, offset=0, body_hash=body, model=model),
            events.requeued("j", attempt=2, offset=0, reason="worker_lost", lost=lost, model=model, queue_sequence=99),
        ):
            result = await log.append("default", event, expected=sequence, ttl_s=TTL_S)
            assert isinstance(result, Stored)
            sequence = result.sequence
        assert isinstance(await queue.publish(job("another"), QueueName(), {}), Stored)

        async def is_judged() -> bool:
            if is_another_model:  # another of the job's messages is its own; this one is done with
                return not sum((await queue.counts()).values())
            progress = await queue.progress(QueueName())
            seen = await WorkersBucket(running.bus).get("w1")
            beat = seen.beat if seen is not None else None
            return progress is not None and progress.delivered > 0 and beat is not None and not beat.held

        await until(is_judged)
        assert (await log.last("default", "j")) == (await log.read("default", "j"))[2]
        if is_another_model:
            return

        mine = job("mine")
        headers = mine.headers() | {"Nats-Msg-Id": "the first one, whose worker died"}
        await running.bus.store(running.bus.names.jobs(MODEL, QueueName()), mine.body, headers=headers)

        async def has_ended() -> bool:
            last = await log.last("default", "j")
            return last is not None and last.is_terminal

        await until(has_ended)
        ended = (await log.read("default", "j"))[-1]
        assert (ended.kind, ended.body_hash, ended.attempt) == ("done", "mine", 2)
