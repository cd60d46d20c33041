"""What a monitor makes of two views of the workers."""

from headrace.monitor.changes import changes_between, live_beats
from headrace.monitor.lost import LostWorkers
from headrace.schemas.overview import GoneWorker, WorkerOverview
from headrace.schemas.workers import Heartbeat, SeenBeat, WorkerState


def beat(
    worker: str, *, epoch: str = "e1", state: WorkerState = "Ready", running: int = 0, is_tombstone: bool = False
) -> Heartbeat:
    return Heartbeat(
        worker=worker, epoch=epoch, state=state, model="m", engine="sim", running=running, is_tombstone=is_tombstone
    )


def by_id(*beats: Heartbeat) -> dict[str, Heartbeat]:
    return {each.worker: each for each in beats}


def told(before: dict[str, Heartbeat], now: dict[str, Heartbeat], **left: set[str]) -> list[tuple[str, str]]:
    return [(change.kind, change.worker) for change in changes_between(before, now, **left)]


def test_only_beats_of_living_workers_count() -> None:
    view = {
        "a": SeenBeat(revision=1, beat=beat("a")),
        "expired": SeenBeat(revision=2, beat=None),
        "evicted": SeenBeat(revision=3, beat=beat("evicted", is_tombstone=True)),
    }
    assert live_beats(view).keys() == {"a"}


def test_appearing_leaving_and_expiring_are_told_apart() -> None:
    before, now = by_id(beat("gone"), beat("left"), beat("stays")), by_id(beat("stays"), beat("new"))
    assert told(before, now, left={"left"}) == [("expired", "gone"), ("left", "left"), ("appeared", "new")]


def test_a_changed_state_is_a_change_and_changed_figures_are_none() -> None:
    before, now = by_id(beat("a"), beat("b")), by_id(beat("a", running=3), beat("b", state="Draining"))
    (change,) = changes_between(before, now)
    assert (change.kind, change.worker) == ("changed", "b")
    assert change.before is not None
    assert change.now is not None
    assert (change.before.state, change.now.state) == ("Ready", "Draining")


def test_a_new_registration_is_a_loss_and_an_arrival() -> None:
    before, now = by_id(beat("a", epoch="e1")), by_id(beat("a", epoch="e2", state="Starting"))
    assert told(before, now) == [("expired", "a"), ("appeared", "a")]


def test_nothing_is_told_of_equal_views() -> None:
    assert changes_between(by_id(beat("a")), by_id(beat("a"))) == []


def test_who_is_gone_is_kept_with_its_model_and_forgotten_when_back_or_old() -> None:
    now = [100.0]
    lost = LostWorkers(clock=lambda: now[0])
    for change in changes_between(by_id(beat("a"), beat("b")), {}, left={"b"}):
        lost.take(change)
    now[0] += 5
    (a, b) = lost.merged_with([GoneWorker(id="a", ending="expired", age_s=4.5)])
    assert a == GoneWorker(id="a", ending="expired", age_s=4.5, model="m")
    assert b == GoneWorker(id="b", ending="left", age_s=5.0, model="m")
    for change in changes_between({}, by_id(beat("a"))):
        lost.take(change)
    assert [each.id for each in lost.merged_with([])] == ["b"]
    now[0] += 1000
    assert lost.merged_with([]) == ()


def test_memory_of_the_gone_is_bounded() -> None:
    lost = LostWorkers()
    for change in changes_between(by_id(*(beat(f"w{number}") for number in range(1000))), {}):
        lost.take(change)
    assert len(lost.merged_with([])) == 256


def test_a_live_worker_is_shown_under_the_names_of_the_contract() -> None:
    shown = WorkerOverview.from_heartbeat(beat("a", running=2), age_s=0.25)
    assert (shown.id, shown.model, shown.engine, shown.state, shown.running) == ("a", "m", "sim", "Ready", 2)
    assert shown.age_s == 0.25
