"""One slot of this host: its lease, its worker process, and what is known of how that does."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from headrace.host.launching import Child, Launch, Order
from headrace.host.lease import Lease
from headrace.host.planning import MAX_FAILURES, Claim, Holding
from headrace.metrics import REPLICA_FAILURES, model_label
from headrace.schemas.instances import Slot, SlotName, SlotState
from headrace.schemas.workers import Heartbeat

__all__ = ["Replica"]

log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.5
_MAX_PAUSE_S: Final = 10.0
_HEALTHY_AFTER_S: Final = 10.0
"""A worker that was ready for so long fails for a new reason: failures are counted anew."""
_UNWELL_S: Final = 30.0
"""How long a worker that was ready may be without a heartbeat before it is started anew.

One whose engine failed, and is started again by the worker itself, has this and as long as its first start took.
"""
_SILENT_S: Final = 60.0
"""How long one that is coming up may say nothing: it registers before it starts its engine, and beats all along."""
_MAX_REASON_CHARS: Final = 500


class Replica:
    """A slot from the claim to the release. `changed` is called at each change that a plan or its lease depends on.

    While not `is_online`, the broker is away: an end is not the worker's fault, and not counted.
    """

    def __init__(
        self,
        claim: Claim,
        lease: Lease,
        *,
        host: str,
        epoch: str,
        launch: Launch,
        changed: Callable[[], None],
        is_online: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name: SlotName = claim.slot
        self.lease = lease
        self.worker = ""
        self.state: SlotState = "Claimed"
        self.reason = ""
        self.failures = 0
        self.ended = asyncio.Event()
        self.ended.set()
        self._claim = claim
        self._host = host
        self._epoch = epoch
        self._launch = launch
        self._changed = changed
        self._is_online = is_online
        self._clock = clock
        self._stopping = asyncio.Event()
        self._pause_until = 0.0
        self._ready_at: float | None = None
        self._started_at = 0.0
        self._start_s = 0.0
        self._unwell_since: float | None = None
        self._heard_at = 0.0

    @property
    def device(self) -> str:
        """Whose memory it was promised."""
        return self._claim.device

    @property
    def need_bytes(self) -> int:
        """How much of it."""
        return self._claim.need_bytes

    def as_slot(self) -> Slot:
        """As its lease says it."""
        return Slot(
            host=self._host,
            epoch=self._epoch,
            device=self.device,
            worker=self.worker,
            state=self.state,
            reason=self.reason,
            failures=self.failures,
        )

    def as_holding(self) -> Holding:
        """As a plan sees it."""
        return Holding(
            group=self._claim.group,
            device=self.device,
            need_bytes=self.need_bytes,
            state=self.state,
            reason=self.reason,
            failures=self.failures,
            is_leased=self.lease.is_held,
            has_child=not self.ended.is_set(),
            may_start=self._clock() >= self._pause_until,
        )

    def start(self, worker: str, group: asyncio.TaskGroup) -> None:
        """Start a worker under this id; its end is waited for in the group."""
        self.worker = worker
        self._stopping.clear()
        self.ended.clear()
        self._ready_at = self._unwell_since = None
        self._started_at = self._heard_at = self._clock()
        self._start_s = 0.0
        self._set("Starting", self.reason)
        group.create_task(self._run(), name=f"worker {worker}")

    def drain(self) -> None:
        """Let the worker finish what fits in its grace period, and start no more."""
        self._set("Draining", self.reason)
        self._stopping.set()

    def look(self, beat: Heartbeat | None, *, is_fresh: bool) -> None:
        """Take in what the worker says of itself; `is_fresh`: had it said anything of late, we would know."""
        if self.ended.is_set() or self._stopping.is_set():
            return
        now = self._clock()
        if beat is not None or not is_fresh:
            self._heard_at = now
        if beat is not None and beat.state in ("Ready", "Busy"):
            self._unwell_since = None
            if self._ready_at is None:
                self._ready_at, self._start_s = now, now - self._started_at
            if now - self._ready_at >= _HEALTHY_AFTER_S:
                self.failures = 0
            self._set("Ready", "")
        elif beat is not None and beat.state == "Failed":
            self._set("Failed", beat.reason or "its engine failed")
            if beat.health is not None and beat.health.is_left_out:  # restarts here did not help
                self.failures = MAX_FAILURES - 1
                self._stopping.set()
            else:
                self._note_unwell(now, for_s=_UNWELL_S + self._start_s)
        elif beat is not None and beat.state == "Draining":
            self._set("Starting", beat.reason or "it was told to drain")
        elif beat is None and is_fresh and self._ready_at is not None:
            self._note_unwell(now, for_s=_UNWELL_S)
        elif now - self._heard_at > _SILENT_S:
            self._set("Failed", f"it said nothing for {_SILENT_S:g} s")
            self._note_unwell(now, for_s=0.0)

    def _note_unwell(self, now: float, *, for_s: float) -> None:
        """Start it anew where it never was ready, or was unwell for too long."""
        self._unwell_since = self._unwell_since if self._unwell_since is not None else now
        if self._ready_at is None or now - self._unwell_since > for_s:
            self._set("Failed", self.reason or "its heartbeat is gone")
            self._stopping.set()

    async def _run(self) -> None:
        order = Order(
            worker=self.worker, model=self.name.group.model, group=self._claim.group, device=self._claim.device
        )
        try:
            child = self._launch(order)
            code = await self._until_ended(child)
        except (OSError, ValueError) as error:  # no memory, too many words, a word that no program can be given
            self._note_failure(f"it cannot be started: {error}")
        else:
            self._note_end(code, child.tail())
        finally:
            self.ended.set()
            self._changed()

    async def _until_ended(self, child: Child) -> int | None:
        """Its exit code; None where it was told to stop."""
        async with child:
            ended = asyncio.ensure_future(child.wait())
            stopping = asyncio.ensure_future(self._stopping.wait())
            try:
                await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
                return ended.result() if ended.done() else None
            finally:
                ended.cancel()
                stopping.cancel()
                await asyncio.gather(ended, stopping, return_exceptions=True)

    def _note_end(self, code: int | None, words: str) -> None:
        if self.state == "Draining":
            return
        if code is None:
            self._note_failure(self.reason)
        elif code == 0 and self._ready_at is not None:  # somebody told it to drain
            self._set("Claimed", "")
        else:
            last = next((line for line in reversed(words.splitlines()) if line.strip()), "")
            self._note_failure(last.removeprefix("headrace: ") or f"it ended with exit code {code}")

    def _note_failure(self, reason: str) -> None:
        if self.state == "Draining":
            return
        self.failures += self._is_online()
        pause_s = min(_FIRST_PAUSE_S * 2 ** max(0, self.failures - 1), _MAX_PAUSE_S)
        self._pause_until = self._clock() + pause_s
        REPLICA_FAILURES.add(model_label(self.name.group.model))
        log.warning("worker %s of %s failed (%d in a row): %s", self.worker, self.name, self.failures, reason)
        self._set("Failed", reason)

    def _set(self, state: SlotState, reason: str) -> None:
        reason = reason[:_MAX_REASON_CHARS]
        if self.state == "Draining":
            state = "Draining"
        if (state, reason) != (self.state, self.reason):
            if state == "Ready" != self.state:
                log.info("%s is ready: worker %s", self.name, self.worker)
            self.state, self.reason = state, reason
            self._changed()
