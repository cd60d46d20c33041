"""In a backlog a freed worker takes what is warm in its cache, and leaves what is warm in another's for that one."""

from headrace.client import Started
from tests.deployment import MODEL, Deployment, deployment, sim, until
from tests.integration.test_queue_discipline import Jobs, beat_of, sending

NUM_JOBS = 20
BEGINNINGS = ("it was the best of times " * 700, "it was the worst of times " * 700)


async def worker_that_read(running: Deployment, beginning: str) -> str:
    """The worker that has it in its cache from now on."""
    async with running.client.stream(model=MODEL, prompt=beginning, max_tokens=1) as stream:
        worker = ""
        async for event in stream:
            worker = event.worker if isinstance(event, Started) else worker
        return worker


async def read_by_each(running: Deployment) -> dict[str, str]:
    """A beginning for each of two workers, which has told of it."""
    beginning_of: dict[str, str] = {}
    number = 0
    while len(beginning_of) < 2:
        number += 1
        beginning = f"{number} {BEGINNINGS[number % 2]}"
        beginning_of.setdefault(await worker_that_read(running, beginning), beginning)

    async def are_told() -> bool:
        return all([(await beat_of(running, worker)).prefixes for worker in beginning_of])

    await until(are_told)
    return beginning_of


async def occupy(jobs: Jobs, num_workers: int) -> None:
    """Both workers have enough to do until all others are queued."""
    names = [f"first{number}" for number in range(num_workers)]
    for name in names:
        await jobs.send(name, max_tokens=150)
    await jobs.until_started(*names)


async def test_in_a_backlog_each_worker_runs_what_is_warm_there(broker_url: str, prefix: str) -> None:
    """A busy machine may be too slow to look further in time now and then, but not each time."""
    nums_warm: list[int] = []
    while not nums_warm or (nums_warm[-1] < 0.8 * NUM_JOBS and len(nums_warm) < 4):
        nums_warm.append(await num_warm_in_a_backlog(broker_url, f"{prefix}-{len(nums_warm)}"))
    assert max(nums_warm) >= 0.8 * NUM_JOBS, nums_warm


async def num_warm_in_a_backlog(broker_url: str, prefix: str) -> int:
    """Two jobs of one beginning, two of the other: in plain order every second one meets a cold worker."""
    async with deployment(broker_url, prefix) as running:
        for number in range(2):
            await running.worker(sim(tokens_per_second=100.0), worker=f"w{number}", max_concurrency=1)
        beginning_of = await read_by_each(running)
        names = {f"{number}": sorted(beginning_of)[number // 2 % 2] for number in range(NUM_JOBS)}
        async with sending(running) as jobs:
            await occupy(jobs, 2)
            for name, worker in names.items():
                await jobs.send(name, max_tokens=10, prompt=f"{beginning_of[worker]} {name}")
            await jobs.until_started(*names, timeout_s=60)
        return sum(jobs.worker_of[name] == worker for name, worker in names.items())


async def test_what_is_warm_only_at_a_worker_that_stays_busy_starts_beside_room(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running:
        for number in range(2):
            await running.worker(sim(tokens_per_second=100.0), worker=f"w{number}", max_concurrency=1)
        beginning = BEGINNINGS[0]
        warm = await worker_that_read(running, beginning)
        async with sending(running) as jobs:
            await occupy_warm(running, jobs, warm, beginning)
            await jobs.send("next", max_tokens=1, prompt=f"{beginning} next")
            await jobs.until_started("next")
            assert jobs.worker_of["next"] != jobs.worker_of["long"]
            assert "long" not in jobs.done


async def occupy_warm(running: Deployment, jobs: Jobs, warm: str, beginning: str) -> None:
    """The worker that has the beginning runs something long that has it too."""

    async def is_told() -> bool:
        return bool((await beat_of(running, warm)).prefixes)

    await until(is_told)
    await jobs.send("long", max_tokens=500, prompt=f"{beginning} long")
    await jobs.until_started("long")
