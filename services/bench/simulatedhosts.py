"""The same hosts, models and kinds of requests in virtual time, at the size of real engines."""

from collections.abc import Mapping
from typing import Final

import msgspec

from headrace.bench.figures import Distribution, distribution
from headrace.bench.mixedload import CHAT_MODEL, KINDS, SUMMARY_MODEL, Kind, planned
from headrace.bench.promises import Promise
from headrace.discipline.scaling import GroupLoad
from headrace.host.planning import Claim, Holding, Sight, plan
from headrace.schemas.config import ModelConfig
from headrace.schemas.instances import Device, GroupName, HostBeat, Slot, SlotName
from headrace.schemas.replicas import ReplicaGroup
from headrace.simulator.fleet import FleetOutcome, simulate_fleet
from headrace.simulator.model import EngineModel
from headrace.simulator.requests import Request
from headrace.simulator.scalers import ExpectedWait, Scaler
from headrace.simulator.traces import Arrival

__all__ = ["SimulatedKind", "SimulatedRun", "place", "simulate_hosts"]

_START_S: Final = 5.0
_GIB: Final = 1 << 30
_BEAT_S: Final = 1.0
_MODEL: Final = EngineModel()

_LARGE: Final[Mapping[str, tuple[float, int]]] = {"chat": (60.0, 0), "summary": (2.0, 0), "batch": (0.0, 4000)}
"""Requests a second, and at the start, of each kind: what real engines take, where the real run has simulated ones."""


class SimulatedKind(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from the arrival of its requests to their first computing, and how many there were."""

    kind: str
    num_done: int
    wait_s: Distribution | None


class SimulatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Where the replicas stand at most, by host; what became of the requests; the promises that virtual time shows."""

    placed: dict[str, dict[str, int]]
    most: dict[str, int]
    kinds: list[SimulatedKind]
    promises: list[Promise]


class _Fixed:
    """As many as were configured."""

    def __init__(self, number: int) -> None:
        self._number = number

    def wanted(self, load: GroupLoad, now_s: float) -> int:
        """Always the same."""
        return self._number


def simulate_hosts(
    hosts_gib: Mapping[str, int], models: Mapping[str, ModelConfig], *, duration_s: float, seed: int
) -> SimulatedRun:
    """Place the most replicas that may be wanted, and play each model's requests on as many as have room."""
    placed = place(hosts_gib, models)
    outcomes: dict[str, FleetOutcome] = {}
    kinds: dict[str, list[Kind]] = {CHAT_MODEL: [], SUMMARY_MODEL: []}
    for kind in KINDS:
        per_second, at_start = _LARGE[kind.name]
        kinds[kind.model].append(msgspec.structs.replace(kind, per_second=per_second, at_start=at_start))
    found: list[SimulatedKind] = []
    for model, of_model in kinds.items():
        has_bounds = models[model].instances[0].autoscale is not None
        scaler: Scaler = ExpectedWait(placed[model].total()) if has_bounds else _Fixed(placed[model].total())
        arrivals, names = _arrivals(of_model, duration_s, seed)
        outcomes[model] = simulate_fleet(
            arrivals, scaler, model=_MODEL, start_s=_START_S, until_s=duration_s, seed=seed
        )
        for kind in of_model:
            mine = [each for each in outcomes[model].requests if names[each.index] == kind.name]
            found.append(_summed(kind.name, mine))
    return SimulatedRun(
        placed={host: {model: placed[model].on(host) for model in placed} for host in hosts_gib},
        most={model: max(sample.ready for sample in outcome.samples) for model, outcome in outcomes.items()},
        kinds=found,
        promises=_judge(outcomes, found),
    )


class _Placed(msgspec.Struct, frozen=True):
    hosts: tuple[str, ...]

    def total(self) -> int:
        return len(self.hosts)

    def on(self, host: str) -> int:
        return self.hosts.count(host)


def place(hosts_gib: Mapping[str, int], models: Mapping[str, ModelConfig]) -> dict[str, _Placed]:
    """Where the agents put the most replicas that each model may come to want: their own plan, in turns, to its end.

    Raises RuntimeError where they never come to rest.
    """
    groups = {
        GroupName(model, group.pool): _at_most(group) for model, entry in models.items() for group in entry.instances
    }
    slots: dict[SlotName, Slot] = {}
    holdings: dict[str, dict[SlotName, Holding]] = {host: {} for host in hosts_gib}
    waiting: dict[str, Mapping[SlotName, float]] = {host: {} for host in hosts_gib}
    quiet = 0
    for turn in range(1000):
        if quiet > 10 * len(hosts_gib):
            return {
                name.model: _Placed(tuple(slots[slot].host for slot in slots if slot.group == name)) for name in groups
            }
        host = list(hosts_gib)[turn % len(hosts_gib)]
        beats = {
            each: HostBeat(host=each, epoch="e", devices=(_device(each, hosts_gib[each], holdings[each]),))
            for each in hosts_gib
        }
        sight = Sight(
            host=host, now=turn * _BEAT_S / len(hosts_gib), beat_s=_BEAT_S, groups=groups, slots=slots, hosts=beats,
            devices=beats[host].devices, holdings=holdings[host], waiting=waiting[host],
        )  # fmt: skip
        decided = plan(sight)
        waiting[host] = decided.waiting
        claims = [action for action in decided.actions if isinstance(action, Claim)]
        quiet = 0 if claims else quiet + 1
        for claim in claims:
            slots[claim.slot] = Slot(host=host, epoch="e", state="Ready")
            holdings[host][claim.slot] = Holding(
                group=claim.group, device=claim.device, need_bytes=claim.need_bytes, state="Ready", has_child=True
            )
    raise RuntimeError("the hosts never came to rest")


def _at_most(group: ReplicaGroup) -> ReplicaGroup:
    number = group.autoscale.max_replicas if group.autoscale is not None else group.replicas
    return msgspec.structs.replace(group, replicas=number, autoscale=None)


def _device(host: str, gib: int, held: Mapping[SlotName, Holding]) -> Device:
    promised = sum(holding.need_bytes for holding in held.values())
    return Device(name=host, kind="host", total_bytes=gib * _GIB, promised_bytes=promised)


def _arrivals(kinds: list[Kind], duration_s: float, seed: int) -> tuple[list[Arrival], list[str]]:
    arrivals, names = [], []
    for at_s, sent in planned(duration_s, seed=seed, kinds=tuple(kinds)):
        names.append(sent.kind.name)
        arrivals.append(
            Arrival(
                time_s=at_s,
                prompt_tokens=sent.kind.prompt_words,
                output_tokens=sent.tokens,
                max_tokens=sent.tokens,
                lane=sent.kind.lane,
            )
        )
    return arrivals, names


def _summed(kind: str, requests: list[Request]) -> SimulatedKind:
    done = [request for request in requests if request.finished_s is not None]
    waits = [request.started_s - request.arrival.time_s for request in done if request.started_s is not None]
    return SimulatedKind(kind=kind, num_done=len(done), wait_s=distribution(waits))


def _judge(outcomes: Mapping[str, FleetOutcome], kinds: list[SimulatedKind]) -> list[Promise]:
    requests = [request for outcome in outcomes.values() for request in outcome.requests]
    num_open = sum(request.finished_s is None for request in requests)
    num_preempted = sum(request.num_preemptions for request in requests)
    wait_s = {each.kind: each.wait_s.max for each in kinds if each.wait_s is not None}
    late = [each for each in kinds if each.wait_s is not None and each.wait_s.max > _deadline_s(each.kind)]
    return [
        Promise(
            number=1,
            text="An accepted request ends in exactly one terminal event.",
            holds=not num_open and bool(requests),
            figures=f"{len(requests)} requests, {num_open} without an end",
        ),
        Promise(
            number=3,
            text="A worker never holds more than its KV-cache memory can carry to the last token.",
            holds=not num_preempted,
            figures=f"{num_preempted} preemptions",
        ),
        Promise(
            number=5,
            text="Nobody waits for ever.",
            holds=not late,
            figures="longest wait " + ", ".join(f"{kind} {seconds:.2f} s" for kind, seconds in sorted(wait_s.items())),
        ),
    ]


def _deadline_s(kind: str) -> float:
    return next(each.deadline_s for each in KINDS if each.name == kind)
