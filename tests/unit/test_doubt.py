"""After the engine failed somebody, nobody begins until it is known to live."""

import asyncio
from typing import Any

from headrace.discipline.company import NOBODY
from headrace.worker.gate import Gate
from headrace.worker.ledger import Ledger
from tests.property.test_gate import Request

WITHIN_S = 30.0


def gate() -> Gate:
    return Gate(Ledger(capacity_tokens=100, max_concurrency=2), ageing_s=1000.0, on_change=lambda: None)


def ask(gate: Gate) -> tuple[Any, bool]:
    request: Any = Request("normal", 10, NOBODY)
    return request, gate.enter(request, 10, is_interrupted=False)


def test_in_doubt_nobody_is_let_in_and_who_waits_is_once_all_doubts_are_settled() -> None:
    one = gate()
    one.doubt()
    one.doubt()
    request, is_in = ask(one)
    assert not is_in
    one.trust()
    assert request not in one
    one.trust()
    assert request in one


def test_who_was_let_in_begins_once_the_engine_is_trusted() -> None:
    async def play() -> None:
        one = gate()
        _, is_in = ask(one)
        assert is_in
        one.doubt()
        beginning = asyncio.create_task(one.may_begin())
        await asyncio.sleep(0)
        assert not beginning.done()
        one.trust()
        async with asyncio.timeout(WITHIN_S):
            assert await beginning

    asyncio.run(play())


def test_who_was_let_in_is_to_go_back_where_the_engine_was_dead() -> None:
    async def play() -> None:
        one = gate()
        ask(one)
        one.doubt()
        beginning = asyncio.create_task(one.may_begin())
        await asyncio.sleep(0)
        one.pause("engine")
        one.trust()
        async with asyncio.timeout(WITHIN_S):
            assert not await beginning

    asyncio.run(play())
