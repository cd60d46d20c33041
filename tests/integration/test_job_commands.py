"""`headrace jobs list|dead|replay` against a real deployment."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from headrace.bus.deadletters import DeadLetters, write_dead_letter
from headrace.bus.joblist import list_jobs
from headrace.bus.jobqueue import JobQueue
from headrace.bus.provision import ensure_jobs_stream, ensure_provisioned
from headrace.client import Started
from headrace.errors import JobFailedError
from headrace.schemas.jobs import Job
from headrace.schemas.subjects import JobId, QueueName, Tenant
from tests.commands import Headrace
from tests.deployment import MODEL, Deployment, deployment, sim, until

SLOW = "<sim tokens=4000>"
POISON = "<sim die_after=3>"


@pytest_asyncio.fixture
async def running(broker_url: str, prefix: str) -> AsyncIterator[Deployment]:
    async with deployment(broker_url, prefix, max_attempts=1, grace_s=0.2) as started:
        yield started


@pytest.fixture
def headrace(broker_url: str, prefix: str) -> Headrace:
    return Headrace(broker_url, prefix)


def job(number: int, *, model: str = MODEL, body: bytes = b'{"prompt":"hi","max_tokens":3}') -> Job:
    return Job(
        tenant=Tenant("default"), job=JobId(f"j{number}"), op="completions", model=model, body=body, body_hash="h",
        accepted_at=0, queue_timeout_s=60, deadline_s=60, need_tokens=1,
    )  # fmt: skip


async def occupy(running: Deployment, *names: str) -> None:
    """Fill the only worker with one job that runs long, and queue the others behind it."""
    await running.worker(sim(tokens_per_second=20.0), max_concurrency=1)
    for number, name in enumerate(names):
        stream = running.client.stream(
            model=MODEL, prompt=SLOW, max_tokens=2000, job_id=name, priority="high" if name == "urgent" else None
        )
        async for event in stream:
            if number or isinstance(event, Started):
                break


# list


async def test_what_runs_and_what_waits_in_which_place(running: Deployment, headrace: Headrace) -> None:
    await occupy(running, "first", "second", "third", "urgent")

    async def is_listed() -> bool:
        shown = await headrace.json("jobs", "list", "--state", "running")
        return [each["job"] for each in shown["jobs"]] == ["first"]

    await until(is_listed)
    shown = await headrace.json("jobs", "list")
    assert shown["total"] == 4
    assert [(each["job"], each["state"], each["worker"], each["position"]) for each in shown["jobs"]] == [
        ("first", "running", "w1", None),
        ("second", "queued", None, 1),
        ("third", "queued", None, 2),
        ("urgent", "queued", None, 0),
    ]
    first = shown["jobs"][0]
    assert 0 <= first.pop("age_s") < 30
    assert first == {
        "job": "first", "tenant": "default", "model": MODEL, "op": "completions", "pool": "default", "lane": "normal",
        "queue": "default", "state": "running", "attempt": 1, "worker": "w1", "position": None,
    }  # fmt: skip
    queued = await headrace.json("jobs", "list", "--state", "queued", "--limit", "2", "--model", MODEL)
    assert (queued["total"], [each["job"] for each in queued["jobs"]]) == (4, ["second", "third"])
    text = (await headrace.run("jobs", "list", "--limit", "1")).stdout
    assert "first" in text
    assert "1 of 4 queued and running jobs" in text
    for name in ("first", "second", "third", "urgent"):
        await running.client.cancel(name)


async def test_nothing_to_list_says_so(running: Deployment, headrace: Headrace) -> None:
    assert await headrace.json("jobs", "list") == {"total": 0, "jobs": []}
    assert "No job is queued or running." in (await headrace.run("jobs", "list")).stdout
    assert "There is no dead letter." in (await headrace.run("jobs", "dead")).stdout
    assert "no model 'nonsense' is known" in (await headrace.run("jobs", "list", "--model", "nonsense", code=1)).stderr


async def test_a_listing_reads_a_long_queue_in_pages(running: Deployment) -> None:
    bus = running.bus
    await ensure_provisioned(bus)
    await ensure_jobs_stream(bus, "m")
    body = b"x" * 500_000
    async with JobQueue(bus, "m") as queue:
        for number in range(40):  # more than a subscription buffers, were it sent at once
            await queue.publish(job(number, model="m", body=body), QueueName(), {})
        for number in range(40, 300):
            await queue.publish(job(number, model="m"), QueueName(lane="low"), {})
    listing = await list_jobs(bus, ["m", "none"], limit=290)
    assert [each.job for each in listing.jobs] == [f"j{number}" for number in range(290)]
    assert listing.jobs[289].num_ahead == 249
    assert listing.num_messages == 300
    assert listing.waiting == {"m": {QueueName(): 40, QueueName(lane="low"): 260}}


# dead letters


async def test_a_poison_job_is_listed_and_runs_again_under_a_new_id(running: Deployment, headrace: Headrace) -> None:
    await running.worker(sim(fault_first=0))
    with pytest.raises(JobFailedError):
        await running.client.complete(
            model=MODEL, prompt=f"hello {POISON}", max_tokens=9, job_id="bad", priority="high", deadline_s=77
        )

    async def is_dead() -> bool:
        return bool((await headrace.json("jobs", "dead"))["total"])

    await until(is_dead)
    (letter,) = (await headrace.json("jobs", "dead", "--model", MODEL))["dead_letters"]
    assert (letter["job"], letter["tenant"], letter["model"], letter["op"]) == ("bad", "default", MODEL, "completions")
    assert (letter["reason"], letter["attempts"]) == ("faults_exhausted", 1)
    assert letter["faults"][0].startswith("w1/")
    assert 0 <= letter["age_s"] < 30
    assert (await headrace.json("jobs", "dead", "--model", "another"))["total"] == 0
    text = (await headrace.run("jobs", "dead")).stdout
    assert "faults_exhausted" in text
    assert " w1 " in text

    told = await headrace.json("jobs", "replay", "bad")
    assert (told["replay_of"], told["model"], told["is_removed"]) == ("bad", MODEL, False)
    assert told["job"] != "bad"
    with pytest.raises(JobFailedError):
        async for _ in running.client.attach(told["job"]):
            pass
    status = await running.client.status("bad")
    assert (status.state, status.error["error"]["code"]) == ("failed", "job_failed")

    async def are_two() -> bool:
        return {each["job"] for each in (await headrace.json("jobs", "dead"))["dead_letters"]} == {"bad", told["job"]}

    await until(are_two)
    followed = await headrace.run("jobs", "replay", "bad", "--follow", "--remove", code=1)
    assert "job bad runs again as job" in followed.stderr
    assert "given up" in followed.stderr
    assert "bad" not in {each["job"] for each in (await headrace.json("jobs", "dead"))["dead_letters"]}
    assert "no dead letter of job bad" in (await headrace.run("jobs", "replay", "bad", code=1)).stderr


async def test_a_replay_follows_the_answer_and_keeps_what_the_request_asked_for(
    running: Deployment, headrace: Headrace
) -> None:
    await running.worker()
    queue = QueueName(lane="low")
    dead = job(1, body=b'{"prompt":"hi","max_tokens":3,"seed":7}')
    await write_dead_letter(running.bus, dead, reason="test", attempts=3, faults=["w/e/0"], queue=queue)
    result = await headrace.run("jobs", "replay", "j1", "--follow", "--remove")
    assert len(result.stdout.split()) == 3
    new = result.stderr.split("as job ")[1].split()[0]
    assert (await running.client.status(new)).state == "done"
    assert (await headrace.json("jobs", "dead"))["total"] == 0


async def test_a_refused_replay_keeps_the_dead_letter(running: Deployment, headrace: Headrace) -> None:
    await write_dead_letter(running.bus, job(1, model="gone"), reason="test", attempts=3, faults=[])
    result = await headrace.run("jobs", "replay", "j1", "--remove", code=1)
    assert "the model 'gone' is not known here" in result.stderr
    assert (await headrace.json("jobs", "dead"))["total"] == 1


async def test_the_newest_dead_letters_are_found_among_gaps(running: Deployment, headrace: Headrace) -> None:
    for number in range(30):
        model = "rare" if number in (2, 5, 9) else "common"
        await write_dead_letter(running.bus, job(number, model=model), reason="r", attempts=3, faults=[])
    letters = DeadLetters(running.bus)
    assert [each.job.job for each in await letters.newest(limit=2, model="rare")] == ["j5", "j9"]
    assert [each.job.job for each in await letters.newest(limit=50, model="rare")] == ["j2", "j5", "j9"]
    newest = await letters.newest(limit=4)
    assert [each.job.job for each in newest] == ["j26", "j27", "j28", "j29"]
    assert await letters.remove(newest[-1])
    assert not await letters.remove(newest[-1])
    assert (await letters.newest(limit=1))[0].job.job == "j28"
    assert "the newest 4 of 29" in (await headrace.run("jobs", "dead", "--limit", "4")).stdout


async def test_a_dead_letter_of_two_models_must_be_chosen(running: Deployment, headrace: Headrace) -> None:
    for model in ("a", "b"):
        await write_dead_letter(running.bus, job(1, model=model), reason="r", attempts=3, faults=[])
    result = await headrace.run("jobs", "replay", "j1", code=2)
    assert "choose with --model: a, b" in result.stderr
    assert "not known" in (await headrace.run("jobs", "replay", "j1", "--model", "b", code=1)).stderr
    assert "no dead letter" in (await headrace.run("jobs", "replay", "j1", "--tenant", "other", code=1)).stderr


async def test_cancelling_as_json(running: Deployment, headrace: Headrace) -> None:
    await occupy(running, "first", "second")
    for name in ("second", "first"):
        cancelled = await headrace.json("jobs", "cancel", name)
        assert (cancelled["job"], cancelled["state"]) == (name, "cancelled")
