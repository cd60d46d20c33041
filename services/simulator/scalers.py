"""How many engines there shall be: our policy, and the two that are used most, all as pure as ours."""

import functools
import math
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

from headrace.discipline.scaling import GroupLoad, decide
from headrace.schemas.instances import Scale
from headrace.schemas.replicas import Autoscale

__all__ = ["SCALERS", "ExpectedWait", "QueueDepth", "Scaler", "Utilisation"]

_EPOCH_S: Final = 1e9
"""Decisions never made lie at 0, which must be long ago."""
_SYNC_S: Final = 15.0
_TOLERANCE: Final = 0.1
_DOWN_WINDOW_S: Final = 300.0
_POLL_S: Final = 30.0
_COOLDOWN_S: Final = 300.0


class Scaler(Protocol):
    """Is asked once a second, in order of time."""

    def wanted(self, load: GroupLoad, now_s: float) -> int:
        """Engines that there shall be; `load.wanted` is the last answer."""


class ExpectedWait:
    """Ours, with the defaults of a configuration unless told otherwise."""

    def __init__(self, max_replicas: int, *, down_cooldown_s: float = Autoscale().down_cooldown_s) -> None:
        self._bounds = Autoscale(min_replicas=0, max_replicas=max_replicas, down_cooldown_s=down_cooldown_s)
        self._scale = Scale(replicas=0)

    def wanted(self, load: GroupLoad, now_s: float) -> int:
        """As a monitor decides."""
        self._scale = decide(self._bounds, self._scale, load, _EPOCH_S + now_s) or self._scale
        return self._scale.replicas


class _Autoscaler:
    """Kubernetes' horizontal pod autoscaler, with its defaults.

    Each 15 s: ⌈current · measured / target⌉ unless that is within 10 % of the current number; up at most by four, or to
    twice as many, whichever is more; down to the highest of what the last 300 s asked for.
    """

    def __init__(self, max_replicas: int) -> None:
        self._max_replicas = max_replicas
        self._asked: deque[tuple[float, int]] = deque()
        self._next_s = 0.0

    def step(self, current: int, ratio: float, now_s: float) -> int:
        """The next number for a measured ÷ target of `ratio`; between two looks the current one."""
        if now_s < self._next_s:
            return current
        self._next_s = now_s + _SYNC_S
        asked = current if abs(ratio - 1) <= _TOLERANCE else math.ceil(current * ratio)
        asked = min(max(asked, 1), self._max_replicas)
        while self._asked and self._asked[0][0] <= now_s - _DOWN_WINDOW_S:
            self._asked.popleft()
        self._asked.append((now_s, asked))
        if asked >= current:
            return min(asked, max(2 * current, current + 4))
        return min(current, max(number for _, number in self._asked))


class Utilisation:
    """The autoscaler of Kubernetes on the part of its slots that is in use; it keeps one engine at least."""

    def __init__(self, max_replicas: int, *, target: float = 0.7) -> None:
        self._autoscaler = _Autoscaler(max_replicas)
        self._target = target

    def wanted(self, load: GroupLoad, now_s: float) -> int:
        """Engines that are not up yet count as idle, as they do there."""
        if not load.wanted:
            return 1
        num_slots = load.wanted * (load.slots or 1.0)
        return self._autoscaler.step(load.wanted, load.num_running / num_slots / self._target, now_s)


class QueueDepth:
    """Jobs per engine, as KEDA scales on the length of a queue: it looks each 30 s for the first job.

    From one engine on it is the autoscaler of Kubernetes, with jobs per engine as its measure, until 300 s after the
    last job.
    """

    def __init__(self, max_replicas: int, *, jobs_per_replica: float | None = None) -> None:
        self._autoscaler = _Autoscaler(max_replicas)
        self._jobs_per_replica = jobs_per_replica
        self._next_s = 0.0
        self._active_s = -math.inf

    def wanted(self, load: GroupLoad, now_s: float) -> int:
        """Jobs that run count, as those in flight do there; as many as an engine has slots are one engine's."""
        num_jobs = load.num_queued + load.num_running
        if num_jobs:
            self._active_s = now_s
        if not load.wanted:
            if now_s < self._next_s:
                return 0
            self._next_s = now_s + _POLL_S
            return 1 if num_jobs else 0
        if now_s - self._active_s >= _COOLDOWN_S:
            self._next_s = now_s + _POLL_S
            return 0
        per_replica = self._jobs_per_replica or load.slots or 1.0
        return self._autoscaler.step(load.wanted, num_jobs / per_replica / load.wanted, now_s)


SCALERS: Final[Mapping[str, Callable[[int], Scaler]]] = MappingProxyType(
    {
        "expected-wait": ExpectedWait,
        "expected-wait-15": functools.partial(ExpectedWait, down_cooldown_s=15.0),
        "queue-depth": QueueDepth,
        "utilisation": Utilisation,
    }
)
"""By the names that documents use; each is made with the most engines there may be."""
