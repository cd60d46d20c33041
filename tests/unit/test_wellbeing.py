"""What a worker counts of its own requests, and what monitors make of it over time."""

from headrace.discipline.health import Finding
from headrace.monitor.health import Lasting
from headrace.schemas.workers import Heartbeat
from headrace.worker.wellbeing import Wellbeing


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_answers_count_once_a_job_and_grow_old() -> None:
    clock = Clock()
    wellbeing = Wellbeing(clock)
    for _ in range(3):
        wellbeing.note_answer("t.poison", is_failure=True)
    wellbeing.note_answer("t.well", is_failure=False)
    assert (wellbeing.report().finished, wellbeing.report().failed) == (1, 1)
    clock.now += 200
    for number in range(40):
        wellbeing.note_answer(f"t.{number}", is_failure=False)
    assert (wellbeing.report().finished, wellbeing.report().failed) == (32, 0)
    clock.now += 301
    assert (wellbeing.report().finished, wellbeing.report().failed) == (0, 0)
    assert wellbeing.num_served == 44


def test_only_waiting_for_the_engine_counts() -> None:
    wellbeing = Wellbeing(Clock())
    course = wellbeing.begin()
    course.take(0, waited_s=0.25)  # a sign of life
    course.take(1, waited_s=0.5)
    for _ in range(5):
        course.take(2, waited_s=0.5)
    course.end()  # two tokens are left over, too few to say anything
    health = wellbeing.report()
    assert (health.ttft_s, health.num_firsts) == (0.75, 1)
    assert (health.seconds_per_token, health.num_paces) == (0.25, 2)


def test_a_short_answer_has_a_pace_too_and_one_of_one_token_has_none() -> None:
    wellbeing = Wellbeing(Clock())
    for num_tokens in (9, 1):
        course = wellbeing.begin()
        for _ in range(num_tokens):
            course.take(1, waited_s=0.01)
        course.end()
    health = wellbeing.report()
    assert (health.seconds_per_token, health.num_paces, health.num_firsts) == (0.01, 1, 2)
    assert (health.load, wellbeing.num_running) == (1, 0)


def test_measurements_grow_old_and_the_median_is_of_the_rest() -> None:
    clock = Clock()
    wellbeing = Wellbeing(clock)
    wellbeing.paces.add(9.0)
    clock.now += 50
    for pace in (0.1, 0.4, 0.2):
        wellbeing.paces.add(pace)
    assert (wellbeing.report().seconds_per_token, wellbeing.report().num_paces) == (0.3, 4)
    clock.now += 11
    assert (wellbeing.report().seconds_per_token, wellbeing.report().num_paces) == (0.2, 3)


def test_what_began_with_an_engine_says_nothing_of_the_next() -> None:
    wellbeing = Wellbeing(Clock())
    course = wellbeing.begin()
    course.take(1, waited_s=1.0)
    wellbeing.note_answer("t.j", is_failure=True)
    wellbeing.start_anew(1)
    for _ in range(9):
        course.take(1, waited_s=2.0)
    course.end()
    course.answer("t.k", is_failure=True)
    assert wellbeing.report(restarts=1, last_restart="slow") == type(wellbeing.report())(
        engine_run=1, restarts=1, last_restart="slow"
    )


def finding(worker: str, *, engine_run: int = 0, ailment: str = "slow") -> Finding:
    return Finding(
        worker=worker,
        epoch="e",
        engine_run=engine_run,
        ailment=ailment,  # type: ignore[arg-type]
        reason="",
        severity=1.0,
    )


def test_slowness_must_last_and_is_said_again_if_nothing_happens() -> None:
    beats = {name: Heartbeat(worker=name, epoch="e", state="Ready", model="m") for name in ("a", "b", "slow")}
    lasting, slow = Lasting(), finding("slow")
    assert [bool(lasting.take([slow], beats, now=now)) for now in (0.0, 2.0, 4.9)] == [False] * 3
    assert not lasting.take([], beats, now=5.0)  # for a moment it was not
    assert [bool(lasting.take([slow], beats, now=now)) for now in (6.0, 10.0, 11.0)] == [False, False, True]
    assert [bool(lasting.take([slow], beats, now=now)) for now in (12.0, 15.0, 16.0)] == [False, False, True]
    assert lasting.take([finding("slow", engine_run=1, ailment="errs")], beats, now=16.1)  # another run, and no doubt
