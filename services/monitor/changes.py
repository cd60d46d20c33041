"""What happened between two views of the workers; pure."""

from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from headrace.schemas.workers import Heartbeat, SeenBeat

__all__ = ["Change", "changes_between", "live_beats"]

ChangeKind = Literal["appeared", "changed", "left", "expired"]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's change. `before` is None where it appeared, `now` where it is gone.

    A worker that registered anew (another epoch) between the two views is gone and has appeared.
    """

    kind: ChangeKind
    worker: str
    before: Heartbeat | None = None
    now: Heartbeat | None = None


def live_beats(view: Mapping[str, SeenBeat]) -> dict[str, Heartbeat]:
    """The last beats of the workers that live: neither expired nor removed nor tombstoned."""
    return {worker: seen.beat for worker, seen in view.items() if seen.beat is not None and not seen.beat.is_tombstone}


def changes_between(
    before: Mapping[str, Heartbeat], now: Mapping[str, Heartbeat], *, left: Collection[str] = ()
) -> list[Change]:
    """The changes from one set of live workers to the next, by worker id.

    `left` are the workers known to have taken their own key away; whoever else is gone has expired. A changed state
    is a change; changed figures are not.
    """
    changes: list[Change] = []
    for worker in sorted(before.keys() | now.keys()):
        old, new = before.get(worker), now.get(worker)
        if old is not None and (new is None or new.epoch != old.epoch):
            kind: ChangeKind = "left" if worker in left else "expired"
            changes.append(Change(kind=kind, worker=worker, before=old))
        if new is not None and (old is None or new.epoch != old.epoch):
            changes.append(Change(kind="appeared", worker=worker, now=new))
        elif new is not None and old is not None and new.state != old.state:
            changes.append(Change(kind="changed", worker=worker, before=old, now=new))
    return changes
