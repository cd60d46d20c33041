"""Limits of tenants a minute, kept together with all other routers through the usage bucket."""

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from typing import Final

import msgspec

from headrace.bus.configuration import ConfigView
from headrace.bus.connection import Bus, Stored, Unknown
from headrace.bus.usage import SeenUsage, UsageBucket
from headrace.errors import BrokerError, BrokerUnavailableError
from headrace.lifecycle import Backoff
from headrace.router.purse import Purse, plan_bite
from headrace.schemas.refusals import Refusal
from headrace.schemas.usage import WINDOW_S, Rates, Usage, Used, slot_of

__all__ = ["Permit", "TenantLimits"]

log = logging.getLogger(__name__)

_RETRY_FIRST_S: Final = 0.001
_RETRY_MAX_S: Final = 0.02
_BELIEVED_FOR_S: Final = 0.25
"""How long a record without room is taken for the truth: a flood of refused requests asks the broker no more often."""
_GIVE_BACK_EVERY_S: Final = 1.0
_FORGOTTEN_AFTER_S: Final = 120.0


class Permit(msgspec.Struct, frozen=True):
    """One request that was paid for, in half second `at`: give it back if it is refused after all."""

    tenant: str
    at: int
    amount: Used


class _Account:
    """One tenant's record as last seen, what this router holds of it, and what its requests wait for."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.seen = SeenUsage()
        self.read_at = -math.inf
        self.used_at = 0.0
        self.purse = Purse()
        self.waiting = Used()


class TenantLimits:
    """Admits what a tenant's limits a minute allow, over all routers together; a refusal consumes nothing.

    A tenant without such limits costs nothing. Another one costs a write of its record for each bite (see `purse`);
    while it is refused, at most four reads a second. Holds one small account for each limited tenant of late.
    """

    def __init__(self, bus: Bus, view: ConfigView, *, now: Callable[[], float] | None = None) -> None:
        self._settings = bus.settings
        self._bucket = UsageBucket(bus)
        self._view = view
        self._now = now or bus.clock.now
        self._accounts: dict[str, _Account] = {}

    async def admit(self, tenant: str, num_tokens: int) -> Permit | Refusal | None:
        """Pay for one request that may come to need `num_tokens`; None for a tenant without limits.

        Raises BrokerUnavailableError where the record cannot be had.
        """
        config = self._view.config.tenant(tenant)
        rates = Rates(config.requests_per_minute, config.tokens_per_minute)
        if not rates.is_limited:
            return None
        if rates.tokens is not None and num_tokens > rates.tokens:
            return Refusal(
                code="invalid_value",
                message=f"the request may need {num_tokens} tokens; the tenant may use {rates.tokens} a minute",
                param="max_tokens",
            )
        wanted = Used(1, num_tokens)
        account = self._accounts.setdefault(tenant, _Account())
        account.used_at = time.monotonic()
        account.waiting += wanted
        try:
            async with account.lock:
                return await self._pay(tenant, account, rates, wanted)
        finally:
            account.waiting = Used(account.waiting.requests - 1, account.waiting.tokens - num_tokens)

    def give_back(self, permit: Permit | None) -> None:
        """What was paid and not used, by a request that was refused or a job that ended: others may have it."""
        account = self._accounts.get(permit.tenant) if permit is not None else None
        if permit is not None and account is not None:
            account.purse = account.purse.refunded(permit.at, permit.amount)

    async def run(self) -> None:
        """Give back what was taken and not spent, until cancelled, so that other routers have it within a second."""
        while True:
            await asyncio.sleep(_GIVE_BACK_EVERY_S)
            for tenant, account in list(self._accounts.items()):
                try:
                    await self.settle(tenant)
                except BrokerError as error:
                    log.info("unspent permits of tenant %s are not given back yet: %s", tenant, error)
                is_idle = time.monotonic() > account.used_at + _FORGOTTEN_AFTER_S
                if is_idle and not account.lock.locked() and account.purse.owed == ():
                    del self._accounts[tenant]

    async def settle(self, tenant: str) -> None:
        """Write what earlier half seconds left over back to the record."""
        account = self._accounts[tenant]
        async with account.lock:
            retries = self._retries()
            while True:
                now = self._now()
                purse = account.purse = account.purse.moved_to(slot_of(now))
                if not purse.owed:
                    return
                usage = account.seen.usage
                for at, amount in purse.owed:
                    usage = usage.changed(at, -amount.requests, -amount.tokens, now=now)
                settled = len(purse.owed)
                if await self._write(tenant, account, usage):
                    account.purse = Purse(account.purse.at, account.purse.left, account.purse.owed[settled:])
                    return
                await self._look_again(tenant, account, retries)

    async def _pay(self, tenant: str, account: _Account, rates: Rates, wanted: Used) -> Permit | Refusal:
        retries = self._retries()
        while True:
            now = self._now()
            at = slot_of(now)
            purse = account.purse = account.purse.moved_to(at)
            spent = purse.spent(wanted, rates)
            if spent is not None:
                account.purse = spent
                return Permit(tenant, at, wanted)
            others = Used(account.waiting.requests - wanted.requests, account.waiting.tokens - wanted.tokens)
            bite = plan_bite(account.seen.usage, purse, rates, wanted, waiting=others, now=now)
            if isinstance(bite, float):
                if time.monotonic() < account.read_at + _BELIEVED_FOR_S:
                    return _refused(tenant, rates, bite)
                await self._read(tenant, account)
                continue
            if await self._write(tenant, account, bite.usage):
                # What was given back meanwhile by requests that need no lock is kept.
                meanwhile = account.purse
                gained = Used(
                    bite.purse.left.requests - purse.left.requests, bite.purse.left.tokens - purse.left.tokens
                )
                taken = Purse(at, meanwhile.left + gained, meanwhile.owed[len(purse.owed) :])
                spent = taken.spent(wanted, rates)
                assert spent is not None, "a bite covers what it was taken for"
                account.purse = spent
                return Permit(tenant, at, wanted)
            await self._look_again(tenant, account, retries)

    async def _write(self, tenant: str, account: _Account, usage: Usage) -> bool:
        num_owed = len(account.purse.owed)
        result = await self._bucket.put(tenant, usage, expected_revision=account.seen.revision)
        if isinstance(result, Unknown):  # it may be stored, and nothing is given back twice
            purse = account.purse
            account.purse = Purse(purse.at, purse.left, purse.owed[num_owed:])
        if not isinstance(result, Stored):
            return False
        account.seen = SeenUsage(usage, result.sequence)
        account.read_at = time.monotonic()
        return True

    async def _read(self, tenant: str, account: _Account) -> None:
        account.seen = await self._bucket.get(tenant)
        account.read_at = time.monotonic()

    async def _look_again(self, tenant: str, account: _Account, retries: Backoff) -> None:
        """After a write that another router was faster with, or that got no answer."""
        if retries.is_over:
            raise BrokerUnavailableError(f"the usage record of tenant {tenant} cannot be written")
        await asyncio.sleep(random.uniform(0, _RETRY_FIRST_S))
        await retries.pause()
        await self._read(tenant, account)

    def _retries(self) -> Backoff:
        return Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S, for_s=self._settings.request_timeout_s)


def _refused(tenant: str, rates: Rates, wait_s: float) -> Refusal:
    limits = [(rates.requests, "requests"), (rates.tokens, "tokens")]
    told = " and ".join(f"{number} {what}" for number, what in limits if number is not None)
    return Refusal(
        code="rate_limited",
        message=f"tenant {tenant} may send {told} a minute and has for now; try again later",
        retry_after_s=max(1, math.ceil(min(wait_s, WINDOW_S + 1))),
    )
