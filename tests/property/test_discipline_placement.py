"""What does not fit finds its place: no ping-pong, and no idle worker beside a request that fits it."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.discipline.placement import (
    MAX_HAND_BACKS,
    MAX_HAND_BACKS_TO_IDLE,
    Placement,
    WorkerView,
    patience_s,
    place,
    view_of,
)
from headrace.discipline.room import Room, Waiter, fetchable_tokens, startable
from headrace.schemas.workers import Heartbeat, WorkerState

AGEING_S = 10.0
MAX_WAITERS = 4
REST_S = 0.1

rooms = st.builds(
    Room,
    capacity_tokens=st.none() | st.integers(100, 1500),
    reserved_tokens=st.integers(0, 1500),
    max_concurrency=st.integers(1, 4),
    num_running=st.integers(0, 4),
)
STATES: list[WorkerState] = ["Starting", "Ready", "Busy", "Draining", "Failed"]
others_of = st.lists(
    st.builds(
        WorkerView,
        worker=st.sampled_from(["a", "b", "c", "d"]),
        room=rooms,
        num_waiting=st.integers(0, 2),
        state=st.sampled_from(STATES),
    ),
    max_size=4,
    unique_by=lambda other: other.worker,
)
needs = st.integers(1, 1500)


held_times = st.sampled_from([0.0, 0.05, 0.1, 0.25, 1.0, 2.0])


@given(needs, rooms, others_of, st.integers(1, 12), held_times)
def test_it_goes_where_it_starts_and_stays_only_where_it_can(
    need: int, room: Room, others: list[WorkerView], num_delivered: int, held_s: float
) -> None:
    by_name = {other.worker: other for other in others}
    placement, named = place(need, room, others, num_delivered=num_delivered, held_s=held_s)
    would_start = [other for other in others if other.would_start(need)]
    could_run = [other for other in others if other.could_ever_run(need)]
    match placement:
        case Placement.HAND_BACK:
            assert named is not None
            assert by_name[named] in (would_start or could_run)
            assert would_start or (not room.could_ever_fit(need) and held_s >= patience_s(num_delivered))
        case Placement.NEVER:
            assert not room.could_ever_fit(need)
            assert not could_run
        case Placement.HOLD if room.could_ever_fit(need):
            is_quick = num_delivered <= MAX_HAND_BACKS_TO_IDLE
            assert not is_quick or not any(other.is_idle for other in would_start)
            assert not would_start or (num_delivered > MAX_HAND_BACKS and held_s < REST_S)
        case Placement.HOLD:
            assert could_run
            assert held_s < (REST_S if would_start else patience_s(num_delivered))
            assert num_delivered > MAX_HAND_BACKS or not would_start


@given(needs, rooms, st.lists(others_of, min_size=12, max_size=12))
def test_it_cannot_go_round_for_ever_whatever_heartbeats_say(
    need: int, room: Room, seen: list[list[WorkerView]]
) -> None:
    """Whoever gets it cannot start it now, and believes what stale heartbeats say of others."""
    at_once = [place(need, room, others, num_delivered=1 + number)[0] for number, others in enumerate(seen)]
    assert at_once.count(Placement.HAND_BACK) <= MAX_HAND_BACKS_TO_IDLE
    if not room.could_ever_fit(need):
        assert Placement.HAND_BACK not in at_once[MAX_HAND_BACKS:]


def test_one_too_large_for_a_worker_is_held_there_ever_longer() -> None:
    assert [patience_s(num_delivered) for num_delivered in range(1, 7)] == [0.25, 0.5, 1.0, 2.0, 2.0, 2.0]
    assert patience_s(10**6) == 2.0


def test_a_heartbeat_as_a_view() -> None:
    beat = Heartbeat(worker="w", epoch="e", state="Ready", model="m", max_concurrency=4, running=1, waiting=1)
    view = view_of(beat, prefixes=["p"])
    assert view.room == Room(capacity_tokens=None, max_concurrency=4, num_running=1)
    assert (view.num_waiting, view.prefixes, view.load_ratio) == (1, frozenset("p"), 0.5)
    assert not view.would_start(1)  # it holds one already
    full = view_of(Heartbeat(worker="w", epoch="e", state="Busy", model="m", kv_capacity_tokens=100))
    assert full.could_ever_run(100)
    assert not full.would_start(1)


def test_a_large_worker_that_restarts_its_engine_is_waited_for() -> None:
    small = Room(capacity_tokens=100)
    large = view_of(Heartbeat(worker="w", epoch="e", state="Failed", model="m", kv_capacity_tokens=1000))
    assert place(500, small, [large], num_delivered=1) == (Placement.HOLD, None)
    assert place(500, small, [large], num_delivered=1, held_s=2.0) == (Placement.HAND_BACK, "w")
    leaving = view_of(Heartbeat(worker="w", epoch="e", state="Draining", model="m", kv_capacity_tokens=1000))
    assert place(500, small, [leaving], num_delivered=1) == (Placement.NEVER, None)


class Job:
    """A request on its way: how often it was delivered and handed back, and the step of its start."""

    def __init__(self, need_tokens: int, run: int) -> None:
        self.need_tokens = need_tokens
        self.run = run
        self.num_delivered = 0
        self.num_handed_back = 0
        self.started = 0


class Station:
    """One worker of the model. Time goes in steps; what it runs is (job, step of its end)."""

    def __init__(self, name: str, capacity: int, max_concurrency: int) -> None:
        self.name, self.capacity, self.max_concurrency = name, capacity, max_concurrency
        self.running: list[tuple[Job, int]] = []
        self.held: list[tuple[Job, int]] = []

    @property
    def room(self) -> Room:
        return Room(
            capacity_tokens=self.capacity,
            reserved_tokens=sum(job.need_tokens for job, _ in self.running),
            max_concurrency=self.max_concurrency,
            num_running=len(self.running),
        )

    @property
    def view(self) -> WorkerView:
        return WorkerView(worker=self.name, room=self.room, num_waiting=len(self.held))

    def waiters(self, now: int) -> list[Waiter]:
        return [Waiter(need_tokens=job.need_tokens, waited_s=now - since) for job, since in self.held]

    def start(self, now: int) -> None:
        started = startable(self.room, self.waiters(now), ageing_s=AGEING_S)
        for index in started:
            self.held[index][0].started = now
        self.running += [(self.held[index][0], now + self.held[index][0].run) for index in started]
        assert self.room.num_running <= self.max_concurrency
        assert self.room.reserved_tokens <= self.capacity
        self.held = [each for index, each in enumerate(self.held) if index not in started]

    def can_fetch(self, now: int) -> bool:
        return fetchable_tokens(self.room, self.waiters(now), ageing_s=AGEING_S, max_waiters=MAX_WAITERS) > 0


class Pool:
    """Stations that share one queue. What is handed back goes to its head; the one named is woken for it first."""

    def __init__(self, stations: list[Station], jobs: list[Job]) -> None:
        self.stations = stations
        self.jobs = jobs
        self.queue = list(jobs)
        self.now = 0
        self.num_ended = 0

    def step(self) -> None:
        """One second: what ended leaves, all fetch, and ask again for what they hold, until nothing moves."""
        for station in self.stations:
            self.num_ended += sum(end <= self.now for _, end in station.running)
            station.running = [(job, end) for job, end in station.running if end > self.now]
        while self.ask_all():
            pass
        self.now += 1

    def ask_all(self) -> bool:
        """Whether anything moved."""
        moves = sum(job.num_delivered for job in self.jobs)
        for station in self.stations:
            station.start(self.now)
            for job, since in list(station.held):
                if (job, since) in station.held:
                    self.ask(station, job, since)
        for station in self.stations:
            self.fetch(station)
        return moves < sum(job.num_delivered for job in self.jobs)

    def fetch(self, station: Station) -> None:
        if not self.queue or not station.can_fetch(self.now):
            return
        job = self.queue.pop(0)
        job.num_delivered += 1
        station.held.append((job, self.now))
        station.start(self.now)
        if (job, self.now) in station.held:
            self.ask(station, job, self.now)

    def ask(self, station: Station, job: Job, since: int) -> None:
        others = [other.view for other in self.stations if other is not station]
        placement, named = place(
            job.need_tokens, station.room, others, num_delivered=job.num_delivered, held_s=self.now - since
        )
        assert placement != Placement.NEVER
        if placement == Placement.HAND_BACK:
            station.held.remove((job, since))
            job.num_handed_back += 1
            self.queue.insert(0, job)
            self.fetch(next(other for other in self.stations if other.name == named))


def is_patient(station: Station, job: Job, *, held_s: float) -> bool:
    """Whether the station still holds it because it was handed back often: for 0.1 s, which is less than a step."""
    limit = MAX_HAND_BACKS_TO_IDLE if station.room.could_ever_fit(job.need_tokens) else MAX_HAND_BACKS
    return job.num_delivered > limit and held_s < REST_S


@given(
    st.lists(st.tuples(st.integers(300, 1000), st.integers(1, 3)), min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(10, 1000), st.integers(1, 8)), min_size=1, max_size=25),
)
def test_in_a_pool_everything_runs_and_nobody_idles_beside_what_fits(
    sizes: list[tuple[int, int]], jobs: list[tuple[int, int]]
) -> None:
    """With true heartbeats one hand-back is enough for what could run where it was fetched."""
    stations = [Station(f"w{number}", capacity, slots) for number, (capacity, slots) in enumerate(sizes)]
    largest = max(capacity for capacity, _ in sizes)
    pool = Pool(stations, [Job(min(need, largest), run) for need, run in jobs])
    while pool.num_ended < len(pool.jobs):
        pool.step()
        assert pool.now < 2000
        waiting = pool.queue + [
            job
            for station in stations
            for job, since in station.held
            if not is_patient(station, job, held_s=pool.now - 1 - since)
        ]
        for station in stations:
            if station.view.is_idle:
                assert not any(station.view.would_start(job.need_tokens) for job in waiting)
    for job in pool.jobs:
        if job.need_tokens <= min(capacity for capacity, _ in sizes):
            assert job.num_handed_back <= 1
        else:  # one that is too small for it gives it back each second at most
            assert job.num_handed_back <= 1 + job.started


def test_after_some_deliveries_only_an_idle_worker_is_worth_a_hand_back_at_once() -> None:
    full = Room(capacity_tokens=1000, reserved_tokens=900, max_concurrency=4, num_running=1)
    busy = WorkerView(
        worker="busy", room=Room(capacity_tokens=1000, reserved_tokens=1, max_concurrency=4, num_running=1)
    )
    idle = WorkerView(worker="idle", room=Room(capacity_tokens=1000, max_concurrency=4))
    hand_back, hold = Placement.HAND_BACK, Placement.HOLD
    for others, told in [([busy], [hand_back] * 3 + [hold] * 7), ([busy, idle], [hand_back] * 8 + [hold] * 2)]:
        assert [place(500, full, others, num_delivered=number)[0] for number in range(1, 11)] == told
        rested = [place(500, full, others, num_delivered=number, held_s=REST_S)[0] for number in range(1, 11)]
        assert rested == [hand_back] * 10


def test_each_hand_back_names_another_of_those_with_room() -> None:
    full = Room(capacity_tokens=1000, reserved_tokens=900, max_concurrency=4, num_running=1)
    others = [WorkerView(worker=name, room=Room(capacity_tokens=1000, max_concurrency=4)) for name in ("b", "a")]
    assert [place(500, full, others, num_delivered=number)[1] for number in (1, 2, 3)] == ["a", "b", "a"]


def test_a_worker_that_holds_something_may_say_that_it_starts_smaller_ones() -> None:
    beat = Heartbeat(worker="w", epoch="e", state="Busy", model="m", waiting=1, fetchable_tokens=100)
    assert view_of(beat).would_start(100)
    assert not view_of(beat).would_start(101)


def test_a_worker_that_is_starting_may_yet_run_what_is_too_large_here() -> None:
    small = Room(capacity_tokens=100, max_concurrency=1)
    starting = WorkerView(worker="s", room=Room(capacity_tokens=None), state="Starting")
    leaving = WorkerView(worker="d", room=Room(capacity_tokens=None), state="Draining")
    assert place(500, small, [starting], num_delivered=1) == (Placement.HOLD, None)
    assert place(500, small, [starting], num_delivered=1, held_s=0.25) == (Placement.HAND_BACK, "s")
    assert place(500, small, [leaving], num_delivered=1) == (Placement.NEVER, None)
