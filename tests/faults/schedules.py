"""Random fault schedules: drawn from a seed, and described so that a person can follow one."""

import random
from typing import Literal

import msgspec

from tests.faults.checking import Wanted
from tests.faults.lossy import Losses

__all__ = ["Action", "PlannedJob", "Schedule", "draw"]

ActionKind = Literal["kill", "restart", "freeze", "thaw", "drop", "drain", "engine dies", "stranger naks"]

_SPAN_S = 2.5
"""Jobs come and faults strike within that time."""
MAX_FAULTS = 4


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """What is done to a part at a moment."""

    at_s: float
    kind: ActionKind
    target: str


class PlannedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A request, when it comes, and who reads it: the submitter, and more who send it again or attach.

    `also_at_s`: the same request again under the same id; `attach_at_s`: a reader from offset `attach_after` on.
    """

    wanted: Wanted
    at_s: float
    op: Literal["chat", "completions"]
    priority: str | None
    cancel_at_s: float | None
    also_at_s: float | None
    attach_at_s: float | None
    attach_after: int
    is_slow: bool


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run does to a deployment."""

    seed: int
    num_workers: int
    num_monitors: int
    has_processes: bool
    has_notices: bool
    max_concurrency: int
    tokens_per_second: float
    losses: Losses
    jobs: tuple[PlannedJob, ...]
    actions: tuple[Action, ...]

    def describe(self) -> str:
        """For a person who looks for what went wrong."""
        head = {
            name: getattr(self, name)
            for name in self.__struct_fields__
            if name not in ("jobs", "actions", "losses", "seed")
        }
        lines = [f"schedule of seed {self.seed}: " + ", ".join(f"{name}={value}" for name, value in head.items())]
        lines += [f"  losses: stores {self.losses.stores}, acks {list(self.losses.acks)}"]
        lines += [f"  {_job_line(job)}" for job in self.jobs]
        lines += [f"  {action.at_s:.2f} s: {action.kind} {action.target}" for action in self.actions]
        return "\n".join(lines)


def draw(seed: int, *, has_processes: bool | None = None) -> Schedule:
    """The schedule of a seed; the same seed always gives the same one. One in six has processes if not told."""
    rng = random.Random(seed)
    drawn = rng.random() < 1 / 6
    is_with_processes = drawn if has_processes is None else has_processes
    num_workers, num_monitors = rng.choice((2, 3)), rng.choice((0, 1, 2, 2, 2))
    workers = [f"w{number}" for number in range(1, num_workers + 1)]
    jobs = tuple(_draw_job(rng, f"j{seed}-{number}") for number in range(rng.randint(6, 12)))
    actions = _draw_actions(rng, workers, num_monitors)
    return Schedule(
        seed=seed,
        num_workers=num_workers,
        num_monitors=num_monitors,
        has_processes=is_with_processes,
        has_notices=rng.random() < 0.5,
        max_concurrency=rng.choice((1, 2, 8)),
        tokens_per_second=rng.choice((40.0, 100.0, 0.0)),
        losses=Losses.draw(rng) if rng.random() < 0.7 else Losses(),
        jobs=jobs,
        actions=tuple(sorted(actions, key=lambda action: action.at_s)),
    )


def _draw_job(rng: random.Random, job: str) -> PlannedJob:
    num_tokens = rng.randint(1, 25)
    prompt = f"tell of {job}"
    is_streaming = rng.random() < 0.9
    fault = rng.choice(("", "", "", "", "", "", "die_after", "hang_after", "error_after", "cut_after"))
    if fault:  # it strikes again in each attempt; one that sends nothing meanwhile is given up in the end
        prompt += f" <sim {fault}={rng.randint(max(1, num_tokens // 2), num_tokens)}>"
    at_s = rng.uniform(0, _SPAN_S / 2)
    is_cancelled = rng.random() < 0.15
    n = 2 if rng.random() < 0.1 and not fault else 1
    return PlannedJob(
        wanted=Wanted(
            job=job,
            prompt=prompt,
            num_tokens=num_tokens,
            max_faults=MAX_FAULTS,
            n=n,
            is_streaming=is_streaming,
            is_cancelled=is_cancelled,
        ),
        at_s=at_s,
        op=rng.choice(("chat", "completions")),
        priority=rng.choice((None, "high", "low")),
        cancel_at_s=at_s + rng.uniform(0.01, 1) if is_cancelled else None,
        also_at_s=at_s + rng.uniform(0, 1) if rng.random() < 0.3 else None,
        attach_at_s=at_s + rng.uniform(0.3, 2) if rng.random() < 0.3 else None,
        attach_after=rng.randint(0, num_tokens) if n == 1 else 0,
        is_slow=rng.random() < 0.15,
    )


def _draw_actions(rng: random.Random, workers: list[str], num_monitors: int) -> list[Action]:
    others = ["r1", "r2", *(f"m{number}" for number in range(1, num_monitors + 1))]
    actions: list[Action] = []
    for _ in range(rng.randint(2, 7)):
        at_s = rng.uniform(0.05, _SPAN_S)
        worker = rng.choice(workers)
        what = rng.choice(("kill", "kill", "freeze", "freeze", "drop", "drain", "other", "engine", "nak", "nak"))
        target = rng.choice(others) if what == "other" else worker
        later_s = at_s + rng.uniform(0.1, 2.5)
        if what in ("kill", "other", "drain"):
            actions.append(Action(at_s=at_s, kind="drain" if what == "drain" else "kill", target=target))
            if rng.random() < 0.7:
                actions.append(Action(at_s=later_s, kind="restart", target=target))
        elif what == "freeze":
            actions.append(Action(at_s=at_s, kind="freeze", target=worker))
            actions.append(Action(at_s=later_s, kind="thaw", target=worker))
        elif what == "drop":
            actions.append(Action(at_s=at_s, kind="drop", target=rng.choice((worker, *others))))
        else:
            actions.append(
                Action(at_s=at_s, kind="engine dies" if what == "engine" else "stranger naks", target=worker)
            )
    return actions


def _job_line(job: PlannedJob) -> str:
    wanted = job.wanted
    told = [f"{job.at_s:.2f} s: {job.op} {wanted.job} {wanted.prompt!r}, {wanted.num_tokens} tokens"]
    told += [f"n={wanted.n}"] if wanted.n > 1 else []
    told += [job.priority] if job.priority else []
    told += ["stream=false"] if not wanted.is_streaming else []
    told += ["slow reader"] if job.is_slow else []
    for name in ("cancel_at_s", "also_at_s", "attach_at_s"):
        if (at_s := getattr(job, name)) is not None:
            told.append(f"{name[:-5]} at {at_s:.2f} s")
    return ", ".join(told) + (f" after {job.attach_after}" if job.attach_at_s is not None else "")
