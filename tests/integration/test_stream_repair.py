"""A reader's stream with messages lost on the way: repaired from the log, or an error, never a hole."""

from collections.abc import Callable
from typing import Any

import pytest

from headrace.bus.joblog import JobLog
from headrace.client import Delta, Done, StreamEvent
from headrace.client.stream import JobStream
from headrace.errors import StreamGapError
from headrace.schemas.events import Event
from tests.deployment import MODEL, Deployment, deployment, sim, until

BODY: dict[str, Any] = {"prompt": "tell me of rivers", "max_tokens": 12, "ignore_eos": True}


def losing(monkeypatch: pytest.MonkeyPatch, is_lost: Callable[[Event], bool]) -> list[Event]:
    """Lose live events on their way to the reader; returns those lost so far."""
    lost: list[Event] = []
    receive = JobStream._next_live

    async def lossy(self: JobStream, subscription: object, silence_s: float) -> Event | None:
        while True:
            event = await receive(self, subscription, silence_s)  # type: ignore[arg-type]
            if event is None or not is_lost(event):
                return event
            lost.append(event)

    monkeypatch.setattr(JobStream, "_next_live", lossy)
    return lost


def check_whole(events: list[StreamEvent]) -> None:
    offset, text = 0, ""
    for event in events:
        if isinstance(event, Delta):
            assert event.offset == offset
            offset += event.num_tokens
            text += event.text
    last = events[-1]
    assert isinstance(last, Done)
    assert last.text == text
    assert offset == 12


@pytest.mark.parametrize("kind", ["started", "delta", "done"])
async def test_lost_messages_are_read_from_the_log(
    broker_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:  # STR-7; a lost last message shows no later gap
    lost = losing(monkeypatch, lambda event: event.kind == kind and event.offset != 11)
    async with deployment(broker_url, prefix) as running:
        await running.worker()
        events = [event async for event in running.client.stream(model=MODEL, **BODY)]
    assert lost
    check_whole(events)


async def test_a_reader_that_hears_nothing_live_still_reads_it_all(
    broker_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    losing(monkeypatch, lambda event: True)
    async with deployment(broker_url, prefix) as running:
        await running.worker()
        events = [event async for event in running.client.stream(model=MODEL, **BODY)]
    check_whole(events)


async def test_what_only_done_still_holds_comes_as_one_delta(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running:
        await running.worker()
        done = await running.client.complete(model=MODEL, job_id="old", **BODY)
        await JobLog(running.bus).purge_to_last("default", "old")
        events = [event async for event in running.client.attach("old")]
        assert [type(event) for event in events] == [Delta, Done]
        check_whole(events)
        assert events[-1] == done
        tail = [event async for event in running.client.attach("old", after=5)]
        assert [type(event) for event in tail] == [Done]


async def test_a_reader_in_the_middle_gets_the_rest_from_done(
    broker_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployment(broker_url, prefix) as running:
        await running.worker()
        lost = losing(monkeypatch, lambda event: event.offset >= 5)
        events: list[StreamEvent] = []
        async for event in running.client.stream(model=MODEL, job_id="cut", **BODY):
            events.append(event)
            if isinstance(event, Delta) and event.offset == 4:
                await ended_and_purged(running, "cut")
    assert lost
    check_whole(events)


async def test_a_hole_that_nothing_can_fill_is_an_error(
    broker_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # STR-7
    async with deployment(broker_url, prefix) as running:
        await running.worker(sim(tokens_per_second=100.0))
        losing(monkeypatch, lambda event: event.offset >= 5)
        body = {**BODY, "n": 2}

        async def read() -> None:
            async for event in running.client.stream(model=MODEL, job_id="holey", **body):
                if isinstance(event, Delta) and event.offset == 4:
                    await ended_and_purged(running, "holey")

        with pytest.raises(StreamGapError) as caught:
            await read()
    assert caught.value.code == "stream_gap"


async def ended_and_purged(running: Deployment, job: str) -> None:
    log = JobLog(running.bus)

    async def has_ended() -> bool:
        last = await log.last("default", job)
        return last is not None and last.is_terminal

    await until(has_ended)
    await log.purge_to_last("default", job)
