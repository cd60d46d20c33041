"""Workers: whether there are any, what they say is wrong, what they can hold, and whether their beats come in time."""

from collections.abc import Iterator
from typing import Final

from headrace.bus.survey import Beat
from headrace.doctor.facts import Facts, Known
from headrace.doctor.finding import Check, Finding, counted, listed
from headrace.schemas.workers import Heartbeat

__all__ = ["judge_workers"]

_MAX_TOLD: Final = 20
"""Workers with a trouble of their own that are told one by one; more are named together."""
_FAR: Final = 4
_BEATS_IN_TTL: Final = 4
_MISSED_BEATS: Final = 3.5
"""As monitors judge silence."""
_SERVING: Final = ("Ready", "Busy")


def judge_workers(facts: Facts) -> Iterator[Finding]:
    """Findings about the heartbeats; none where they are not known."""
    if not isinstance(facts.beats, Known):
        return
    live = facts.live
    if not live:
        yield Finding(
            id=Check.WORKERS,
            severity="warning",
            found="no worker lives: requests wait for one until their queue timeout",
            remedy="headrace models list shows what keeps those that are declared from coming up"
            if any(config.instances for config in facts.config.models.values())
            else "headrace serve worker --engine ENGINE --model NAME, or headrace models add and headrace serve host",
        )
    else:
        states = [each.beat.state for each in live]
        shown = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        yield Finding(id=Check.WORKERS, severity="ok", found=f"{counted(len(live), 'worker')}: {shown}")
    yield from _states([each for each in live if not _is_paused(facts, each)])
    yield from _capacity(live)
    yield from _concurrency(live)
    yield from _heartbeats(live)
    yield from _silent(live)
    yield from _lost(facts)


def _is_paused(facts: Facts, beat: Beat) -> bool:
    """Whether all that it says is that its model is paused, of which another finding tells."""
    return beat.beat.state in _SERVING and facts.config.model(beat.beat.model).paused


def _states(live: list[Beat]) -> Iterator[Finding]:
    troubled = [each.beat for each in live if each.beat.state == "Failed" or each.beat.reason]
    for beat in troubled[:_MAX_TOLD]:
        has_failed = beat.state == "Failed"
        yield Finding(
            id=Check.WORKER_STATE,
            severity="error" if has_failed else "warning",
            found=f"worker {beat.worker} of model {beat.model} on {beat.host or 'an unknown host'} is {beat.state}: "
            f"{beat.reason or 'it says nothing more'}",
            remedy=_what_to_do(beat),
        )
    if rest := troubled[_MAX_TOLD:]:
        yield Finding(
            id=Check.WORKER_STATE,
            severity="error" if any(beat.state == "Failed" for beat in rest) else "warning",
            found=f"{counted(len(rest), 'more worker')} failed or complaining: {listed(beat.worker for beat in rest)}",
            remedy="headrace status",
        )
    if live and not troubled:
        yield Finding(id=Check.WORKER_STATE, severity="ok", found="none has failed or complains")


def _what_to_do(beat: Heartbeat) -> str:
    if beat.health is not None and beat.health.is_left_out:
        return f"look at its log and its device, then headrace drain {beat.worker} and start it again"
    if beat.state == "Failed":
        return "look at its log; it starts its engine again by itself"
    return f"headrace status; headrace drain {beat.worker} if it stays so"


def _capacity(live: list[Beat]) -> Iterator[Finding]:
    serving = [each.beat for each in live if each.beat.state in _SERVING]
    none = [beat.worker for beat in serving if beat.capacity_tokens == 0]
    unknown = [beat.worker for beat in serving if beat.capacity_tokens is None]
    if none:
        yield Finding(
            id=Check.WORKER_CAPACITY,
            severity="error",
            found=f"{counted(len(none), 'worker')} with memory for no KV token, taking nothing: {listed(none)}",
            remedy="free memory on their device, or start them with a smaller --memory-reserve or another --kv-tokens",
        )
    if unknown:
        yield Finding(
            id=Check.WORKER_CAPACITY,
            severity="warning",
            found=f"{counted(len(unknown), 'worker')} of unknown KV capacity, bounded by --max-concurrency alone: "
            f"{listed(unknown)}",
            remedy="start them with --kv-tokens N, or --kv-layout and --memory-device",
        )
    if serving and not none and not unknown:
        total = sum(beat.kv_capacity_tokens for beat in serving)
        yield Finding(id=Check.WORKER_CAPACITY, severity="ok", found=f"they carry {total:,} KV tokens together")


def _concurrency(live: list[Beat]) -> Iterator[Finding]:
    far = [
        f"{beat.worker} ({beat.effective_concurrency} of {beat.max_concurrency})"
        for each in live
        if (beat := each.beat).state in _SERVING
        and beat.effective_concurrency is not None
        and beat.effective_concurrency * _FAR < beat.max_concurrency
    ]
    if far:
        yield Finding(
            id=Check.WORKER_CONCURRENCY,
            severity="warning",
            found=f"{counted(len(far), 'worker')} with memory for few of the requests to run at once: {listed(far)}",
            remedy="give them more KV memory, a smaller HEADRACE_DEFAULT_MAX_TOKENS, or a --max-concurrency that fits",
        )


def _heartbeats(live: list[Beat]) -> Iterator[Finding]:
    rare = [
        f"{each.beat.worker} (every {each.beat.interval_s:g} s, lives {each.ttl_s:g} s)"
        for each in live
        if each.ttl_s is not None and each.beat.interval_s * _BEATS_IN_TTL > each.ttl_s
    ]
    if rare:
        yield Finding(
            id=Check.WORKER_HEARTBEAT,
            severity="warning",
            found=f"{counted(len(rare), 'worker')} with fewer than {_BEATS_IN_TTL} beats in the life of one, so that a "
            f"few late ones end it: {listed(rare)}",
            remedy="HEADRACE_HEARTBEAT_S at most a quarter of HEADRACE_WORKER_TTL_S, on workers and monitors",
        )


def _silent(live: list[Beat]) -> Iterator[Finding]:
    silent = [
        f"{each.beat.worker} ({each.age_s:.1f} s)"
        for each in live
        if each.age_s > min(_MISSED_BEATS * each.beat.interval_s, each.ttl_s or float("inf"))
    ]
    if silent:
        yield Finding(
            id=Check.WORKER_SILENT,
            severity="warning",
            found=f"{counted(len(silent), 'worker')} without a beat for longer than may be: {listed(silent)}",
            remedy="run this again; if they are still there, no monitor works: headrace serve monitor",
        )


def _lost(facts: Facts) -> Iterator[Finding]:
    gone = facts.overview.value.gone if isinstance(facts.overview, Known) else ()
    lost = [f"{each.id} ({each.age_s:.0f} s ago)" for each in gone if each.ending != "left"]
    if lost:
        yield Finding(
            id=Check.WORKER_LOST,
            severity="warning",
            found=f"{counted(len(lost), 'worker')} died or hung within the last minute: {listed(lost)}",
            remedy="look at their logs, and the kernel's for out of memory: journalctl -k",
        )
