"""What a request paid of its tenant's limits a minute and, as its end shows, did not use: it is given back."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from headrace.bus.connection import Bus, Message, Subscription
from headrace.bus.joblog import JobLog
from headrace.errors import BrokerError
from headrace.router.limits import Permit, TenantLimits
from headrace.schemas.events import Event
from headrace.schemas.refusals import ErrorBody, Refusal
from headrace.schemas.states import JobState
from headrace.schemas.usage import SLOT_S, WINDOW_S, Used, slot_of

__all__ = ["Paid", "Settlement", "unused"]

log = logging.getLogger(__name__)

_MAX_KNOWN: Final = 100_000
_MAX_READ: Final = 1_024
_AGAIN_S: Final = 0.1
_WINDOW_SLOTS: Final = int(WINDOW_S / SLOT_S) + 1


class Paid(msgspec.Struct, frozen=True):
    """What a request paid for its job. Of its tokens `num_new` were for those it might generate; `is_streaming`: the
    log has those that it did.
    """

    job: str
    permit: Permit
    num_new: int
    is_streaming: bool


class _Known(msgspec.Struct):
    """A job that a request was admitted for in slot `at`; what it paid, once it was taken in."""

    at: int
    paid: Paid | None = None


class Settlement:
    """Admits requests within their tenants' limits, and settles each when its job ends.

    A request sent twice may be admitted twice, here or by two routers; each gives back what it paid itself, once.

    Nothing is kept of tenants without limits a minute, nor of anybody after a minute, when it no longer counts. What a
    router forgets stays paid for that minute, so no limit is exceeded: where it dies, where a notice is lost, and of
    more than `_MAX_KNOWN` jobs the oldest.
    """

    def __init__(self, bus: Bus, limits: TenantLimits, *, now: Callable[[], float] | None = None) -> None:
        self._bus = bus
        self._log = JobLog(bus)
        self._limits = limits
        self._now = now or bus.clock.now
        self._known: dict[tuple[str, str], _Known] = {}
        self._ended: dict[tuple[str, str], None] = {}
        self._noticed = asyncio.Event()
        self._heard: dict[str, Subscription] = {}

    async def admit(
        self, tenant: str, job: str, *, num_tokens: int, num_new: int, is_streaming: bool
    ) -> Paid | Refusal | None:
        """Pay for one request; None for a tenant without limits. Raises BrokerError.

        What comes of it is told by `take_in` or `give_back`, by neither where it is not clear: then it stays paid.
        """
        permit = await self._limits.admit(tenant, num_tokens)
        if not isinstance(permit, Permit):
            return permit
        try:
            await self._hear(tenant)  # before the job can end
        except BrokerError:
            self._limits.give_back(permit)
            raise
        self._forget_old()
        self._known.setdefault((tenant, job), _Known(permit.at))
        return Paid(job, permit, min(num_new, num_tokens), is_streaming)

    def take_in(self, paid: Paid | None) -> None:
        """The request is a job now, which is settled when it ends; it may have ended already."""
        if paid is None:
            return
        key = (paid.permit.tenant, paid.job)
        known = self._known.get(key)
        if known is not None and known.paid is None:
            known.paid = paid
            if key in self._ended:
                self._noticed.set()

    def give_back(self, paid: Paid | None) -> None:
        """The request was not taken in: all that it paid goes back."""
        if paid is not None:
            self._limits.give_back(paid.permit)

    async def run(self) -> None:
        """Settle jobs as they end, until cancelled."""
        try:
            while True:
                await self._noticed.wait()
                self._noticed.clear()
                try:
                    is_all = await self._settle(self._settleable())
                except BrokerError as error:
                    log.info("jobs that ended are not settled yet: %s", error)
                    is_all = False
                if self._settleable():
                    self._noticed.set()
                if not is_all:
                    await asyncio.sleep(_AGAIN_S)
        finally:
            if not self._bus.nc.is_closed:
                for subscription in self._heard.values():
                    await subscription.unsubscribe()

    def _settleable(self) -> dict[tuple[str, str], Paid]:
        """Jobs taken in and said to have ended, as many as are read at once."""
        found = ((key, known.paid) for key in self._ended if (known := self._known.get(key)) is not None)
        return dict(itertools.islice(((key, paid) for key, paid in found if paid is not None), _MAX_READ))

    async def _settle(self, jobs: dict[tuple[str, str], Paid]) -> bool:
        """Give back what these did not use; False where the log does not know yet that some have ended."""
        self._forget_old()
        last = await self._log.last_of(list(jobs))
        back: dict[tuple[str, int], Used] = {}
        is_all = True
        try:
            for key, paid in jobs.items():
                end = last.get(key)
                if end is None or not end.is_terminal:
                    is_all = False  # a moment old; or somebody else sent that notice, then its minute passes
                    self._ended[key] = self._ended.pop(key, None)  # behind the others
                    continue
                state = JobState() if end.kind == "done" else await self._log.state(*key)
                at = (paid.permit.tenant, paid.permit.at)
                back[at] = back.get(at, Used()) + unused(paid, end, state)
                self._forget(key)
        finally:
            for (tenant, slot), amount in back.items():
                self._limits.give_back(Permit(tenant, slot, amount))
        return is_all

    async def _hear(self, tenant: str) -> None:
        if tenant not in self._heard:
            ended = self._bus.names.ended(tenant, "*")
            self._heard[tenant] = await self._bus.subscribe(ended, cb=self._on_ended)

    async def _on_ended(self, message: Message) -> None:
        tenant, job = message.subject.split(".")[-2:]
        if (tenant, job) in self._known:
            self._ended[tenant, job] = None
            self._noticed.set()

    def _forget_old(self) -> None:
        oldest = slot_of(self._now()) - _WINDOW_SLOTS
        while self._known:
            key, known = next(iter(self._known.items()))
            if known.at >= oldest and len(self._known) < _MAX_KNOWN:
                return
            self._forget(key)

    def _forget(self, key: tuple[str, str]) -> None:
        self._known.pop(key, None)
        self._ended.pop(key, None)


def unused(paid: Paid, end: Event, state: JobState) -> Used:
    """What a job did not use of what it paid, by the event that ended it and, but for `done`, by what its log says.

    All of it where no worker started the job, or where it failed before its first token and not by its deadline. Of any
    other the request counts if there was a token, and its prompt does; the tokens that it might have generated and did
    not go back. Where a job that does not stream was cut off nobody knows how many it had generated, so nothing does.
    """
    everything = paid.permit.amount
    if end.kind == "done":
        generated = _completion_tokens(end.data)
        return Used(0, 0 if generated is None else max(0, paid.num_new - generated))
    if not state.was_started:
        return everything
    if end.kind == "failed" and state.num_tokens == 0 and _code(end.data) != "deadline_exceeded":
        return everything
    if not paid.is_streaming:
        return Used()
    return Used(0 if state.num_tokens else everything.requests, max(0, paid.num_new - state.num_tokens))


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int | None = None


class _Answer(msgspec.Struct, frozen=True):
    usage: _Usage | None = None


def _completion_tokens(data: bytes) -> int | None:
    try:
        usage = msgspec.json.decode(data, type=_Answer).usage
    except (msgspec.DecodeError, RecursionError):
        return None
    return usage.completion_tokens if usage is not None else None


def _code(data: bytes) -> str:
    try:
        return msgspec.json.decode(data, type=ErrorBody).error.code
    except (msgspec.DecodeError, RecursionError):
        return ""
