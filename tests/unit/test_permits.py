"""What a request paid of its tenant's limits is given back once where it is refused or taken in before, else never."""

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import BrokerUnavailableError
from headrace.router.attempt import Try
from headrace.router.ingress import Ingress
from headrace.router.limits import Permit
from headrace.router.settlement import Paid
from headrace.schemas.states import JobState
from headrace.schemas.subjects import JobId, Names
from headrace.schemas.usage import Used
from headrace.settings import Settings

PAID = Paid("j", Permit("a", 1, Used(1, 10)), 5, True)


def ingress_of(given_back: list[Paid], taken_in: list[Paid] | None = None) -> Any:
    def give_back(paid: Paid | None) -> None:
        if paid is not None:
            given_back.append(paid)

    def take_in(paid: Paid | None) -> None:
        if paid is not None and taken_in is not None:
            taken_in.append(paid)

    bus: Any = SimpleNamespace(settings=Settings(retry_for_s=0.5), names=Names(prefix="headrace.v1"))
    settlement: Any = SimpleNamespace(give_back=give_back, take_in=take_in)
    unused: Any = SimpleNamespace()
    return Ingress(bus, unused, unused, settlement, unused)


async def fails(*_: object) -> None:
    raise BrokerUnavailableError("away")


@pytest.mark.parametrize(("is_unclear", "expected"), [(False, [PAID]), (True, [])])
async def test_a_request_that_no_try_took_in_pays_nothing(is_unclear: bool, expected: list[Paid]) -> None:
    given_back: list[Paid] = []
    ingress = ingress_of(given_back)

    async def paid_and_failed(_: object, attempt: Try, __: object) -> None:
        attempt.paid, attempt.is_unclear = PAID, is_unclear
        raise BrokerUnavailableError("away")

    ingress._handle = paid_and_failed
    refusal = await ingress._handle_until_clear(None, None)
    assert refusal.code == "internal"
    assert given_back == expected


@pytest.mark.parametrize(("is_unclear", "back", "taken"), [(False, [PAID], []), (True, [], [PAID, PAID])])
async def test_a_request_that_attaches_gets_its_permit_back_once_however_often_it_is_tried(
    is_unclear: bool, back: list[Paid], taken: list[Paid]
) -> None:
    given_back: list[Paid] = []
    taken_in: list[Paid] = []
    ingress = ingress_of(given_back, taken_in)

    async def state(*_: str) -> JobState:
        return JobState()

    ingress._log = SimpleNamespace(state=state)
    ingress._accepted_body = fails
    attempt = Try(JobId("j"), paid=PAID, is_unclear=is_unclear)
    span, wish = SimpleNamespace(set=lambda _: None), SimpleNamespace(tenant="a")
    for _ in range(2):
        with pytest.raises(BrokerUnavailableError):
            await ingress._attach(None, wish, "j", "hash", span, attempt)
    assert given_back == back
    assert taken_in == taken  # one that may have stored the message itself is settled at its end


async def test_a_request_is_answered_once_however_the_broker_fails_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[str] = []

    async def reply_with(_: object, __: object, body: str, ___: object) -> None:
        answers.append(body)

    async def answered_and_failed(_: object, attempt: Try, __: object) -> None:
        await ingress._answer(None, SimpleNamespace(job="j"), attempt)
        raise BrokerUnavailableError("away")

    monkeypatch.setattr("headrace.router.ingress.reply_with", reply_with)
    ingress = ingress_of([])
    ingress._handle = answered_and_failed
    assert await ingress._handle_until_clear(None, None) is None
    assert len(answers) == 1
