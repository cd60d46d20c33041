"""When a worker may start requests: as its model's configuration says, and not before that is known."""

import asyncio
from types import SimpleNamespace
from typing import Any

from headrace.schemas.config import Config, ModelConfig
from headrace.worker.gate import Gate
from headrace.worker.ledger import Ledger
from headrace.worker.pause import Pause

WITHIN_S = 30.0
PAUSED = Config(models={"m": ModelConfig(paused=True), "other": ModelConfig()})
RUNNING = Config(models={"m": ModelConfig(), "other": ModelConfig(paused=True)})


def paused_by(config: Config, *, is_read: bool = True) -> tuple[Pause, Gate, Any]:
    view: Any = SimpleNamespace(config=config, is_read=is_read, changed=asyncio.Event())
    gate = Gate(Ledger(capacity_tokens=100, max_concurrency=1), ageing_s=1.0, on_change=lambda: None)
    return Pause(view, "m", gate), gate, view


def test_only_its_own_model_counts() -> None:
    pause, gate, _ = paused_by(PAUSED)
    assert not pause.may_start
    assert pause.look() == "the model is paused"
    assert gate.is_paused
    pause, gate, _ = paused_by(RUNNING)
    assert pause.may_start
    assert pause.look() == ""
    assert not gate.is_paused


def test_before_the_configuration_was_read_nothing_starts() -> None:
    pause, gate, _ = paused_by(Config(), is_read=False)
    assert not pause.may_start
    assert "cannot be read" in pause.look()
    assert gate.is_paused


def test_the_engine_that_comes_back_does_not_resume_what_somebody_paused() -> None:
    pause, gate, view = paused_by(PAUSED)
    pause.look()
    gate.pause("engine")
    gate.resume("engine")
    assert gate.is_paused
    gate.pause("engine")
    view.config = RUNNING
    pause.look()
    assert gate.is_paused
    gate.resume("engine")
    assert not gate.is_paused


def test_changes_are_followed_and_only_those_that_matter_are_told() -> None:
    async def play() -> list[str]:
        pause, _, view = paused_by(Config(), is_read=False)
        told: list[str] = []
        has_told = asyncio.Event()

        def note() -> None:
            told.append(pause.reason)
            has_told.set()

        following = asyncio.create_task(pause.follow(changed=note))
        async with asyncio.timeout(WITHIN_S):
            await asyncio.sleep(0)
            view.is_read = True  # a bucket without keys changes nothing else
            await has_told.wait()
            for config in (PAUSED, otherwise_changed(PAUSED), RUNNING):
                has_told.clear()
                was = pause.reason
                view.config = config
                view.changed.set()
                if pause.reason != was:
                    await has_told.wait()
                else:
                    await until_cleared(view.changed)
        following.cancel()
        return told

    assert asyncio.run(play()) == ["", "the model is paused", ""]


def otherwise_changed(config: Config) -> Config:
    """The same with another tenant's limits, as it were."""
    return Config(models=dict(config.models))


async def until_cleared(event: asyncio.Event) -> None:
    while event.is_set():
        await asyncio.sleep(0)
