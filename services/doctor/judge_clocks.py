"""Clocks: timeouts go by the broker's, so it matters how far others are from it."""

from collections.abc import Iterator, Mapping
from typing import Final

from headrace.doctor.facts import Facts, value_of
from headrace.doctor.finding import Check, Finding, listed

__all__ = ["judge_clocks"]

_CLOCK_OFF_S: Final = 2.0
_NODES_APART_S: Final = 1.0
_ROUTER_AHEAD_S: Final = 1.0
_ROUTER_BEHIND_S: Final = 30.0
"""A request is stored a moment after it was taken in; a router repeats that for some 15 s while the broker is away."""


def judge_clocks(facts: Facts) -> Iterator[Finding]:
    """Findings about the clocks of this machine, of the broker's nodes, and of routers as far as requests tell."""
    infos = [stream.info for stream in facts.streams if stream.info is not None and stream.info.ahead_s is not None]
    if infos:
        best = min(infos, key=lambda info: info.round_trip_s)
        ahead_s = best.ahead_s or 0.0
        yield _own_clock(ahead_s, best.round_trip_s / 2)
        by_node = {info.leader: info.ahead_s or 0.0 for info in sorted(infos, key=lambda each: -each.round_trip_s)}
        if len(by_node) > 1:
            yield _node_clocks(by_node, max(info.round_trip_s for info in infos))
    skews = [job.router_ahead_s for job in value_of(facts.waiting, []) if job.router_ahead_s is not None]
    off = [skew for skew in skews if skew > _ROUTER_AHEAD_S or skew < -_ROUTER_BEHIND_S]
    if off:
        worst = max(off, key=abs)
        yield Finding(
            id=Check.ROUTER_CLOCKS,
            severity="warning",
            found=f"{len(off)} of {len(skews)} waiting requests were taken in by a clock that is {_apart(worst)} "
            "the broker's: their timeouts are off by that",
            remedy="restart the routers, which learn the broker's time as they start",
        )


def _own_clock(ahead_s: float, error_s: float) -> Finding:
    found = f"the broker's clock is {_apart(ahead_s)} this machine's (to {error_s:.3f} s)"
    if abs(ahead_s) <= _CLOCK_OFF_S + error_s:
        return Finding(id=Check.CLOCK, severity="ok", found=found)
    return Finding(
        id=Check.CLOCK,
        severity="warning",
        found=f"{found}; timeouts go by the broker's, but certificates, logs and traces do not",
        remedy="keep the time on both machines: timedatectl set-ntp true",
    )


def _node_clocks(by_node: Mapping[str, float], error_s: float) -> Finding:
    apart_s = max(by_node.values()) - min(by_node.values())
    found = f"the clocks of the broker's nodes {listed(sorted(by_node))} are {apart_s:.3f} s apart (to {error_s:.3f} s)"
    if apart_s <= _NODES_APART_S + error_s:
        return Finding(id=Check.NODE_CLOCKS, severity="ok", found=found)
    return Finding(
        id=Check.NODE_CLOCKS,
        severity="warning",
        found=f"{found}: timeouts jump by that when a stream's leader changes",
        remedy="keep the time on the nodes: timedatectl set-ntp true",
    )


def _apart(ahead_s: float) -> str:
    return f"{abs(ahead_s):.3f} s {'ahead of' if ahead_s > 0 else 'behind'}"
