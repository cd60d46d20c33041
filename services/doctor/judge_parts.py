"""Parts that answer: a router, a monitor, a gateway, and whether all are of one version."""

from collections.abc import Iterator

from headrace import __version__
from headrace.doctor.facts import Facts, Known
from headrace.doctor.finding import Check, Finding, Severity, counted, listed

__all__ = ["judge_parts"]

_NEEDED: tuple[tuple[str, Check, Severity, str], ...] = (
    ("router", Check.ROUTER, "error", "no request is taken in"),
    ("monitor", Check.MONITOR, "error", "what a dead worker held waits for the ack wait, and nothing expires on time"),
    ("gateway", Check.GATEWAY, "warning", "nobody is served over HTTP, and no batch is run"),
)


def judge_parts(facts: Facts) -> Iterator[Finding]:
    """Findings about processes that answer `$SRV.PING`; none where that could not be asked."""
    if not isinstance(facts.parts, Known):
        return
    parts = facts.own_parts
    for kind, check, severity, otherwise in _NEEDED:
        number = sum(part.name == f"headrace-{kind}" for part in parts)
        if number:
            yield Finding(
                id=check, severity="ok", found=f"{counted(number, kind)} {'answers' if number == 1 else 'answer'}"
            )
        else:
            yield Finding(
                id=check,
                severity=severity,
                found=f"no {kind} answers: {otherwise}",
                remedy=f"headrace serve {kind}",
            )
    by_version: dict[str, list[str]] = {__version__: ["this command"]}
    for part in parts:
        who = part.told.get("worker") or part.name.removeprefix("headrace-")
        by_version.setdefault(part.version, []).append(who)
    if len(by_version) > 1:
        shown = "; ".join(f"{version or 'unknown'}: {listed(who)}" for version, who in sorted(by_version.items()))
        yield Finding(
            id=Check.VERSIONS,
            severity="warning",
            found=f"parts of {len(by_version)} versions of Headrace: {shown}",
            remedy="upgrade the broker's accounts and routers first, then all other parts, to one version",
        )
    elif parts:
        yield Finding(
            id=Check.VERSIONS, severity="ok", found=f"{counted(len(parts), 'part')} of Headrace {__version__}"
        )
