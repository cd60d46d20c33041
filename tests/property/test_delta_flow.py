"""However appends and pieces interleave, the log gets every token once and in order, one append at a time."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas.chunks import ChoiceDelta
from headrace.schemas.events import Event, Owner
from headrace.schemas.openai_chunks import ChunkEncoder, decode_chunk
from headrace.worker.appending import Appended, Ended, Fenced, TooLarge
from headrace.worker.deltas import DeltaFlow

OWNER = Owner(worker="w", epoch="e")


class ScriptedWriter:
    """Takes as many turns of the loop for each append as it is told, and refuses at one of them."""

    def __init__(self, turns: list[int], refuse_at: int | None) -> None:
        self._turns = turns
        self._refuse_at = refuse_at
        self.events: list[Event] = []
        self.is_appending = False

    async def append(self, event: Event) -> Appended | Ended | Fenced | TooLarge:
        assert not self.is_appending
        self.is_appending = True
        for _ in range(self._turns[len(self.events) % len(self._turns)]):
            await asyncio.sleep(0)
        self.is_appending = False
        if self._refuse_at == len(self.events):
            return Fenced("scripted")
        self.events.append(event)
        return Appended(len(self.events))


@settings(max_examples=60)
@given(
    texts=st.lists(st.sampled_from(["a", " bc", "ü", ""]), max_size=30),
    turns=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    pauses=st.lists(st.booleans(), min_size=1, max_size=7),
    refuse_at=st.none() | st.integers(0, 5),
)
def test_every_token_once_and_in_order(
    texts: list[str], turns: list[int], pauses: list[bool], refuse_at: int | None
) -> None:
    writer = ScriptedWriter(turns, refuse_at)
    refused: list[Ended | Fenced | TooLarge] = []

    async def write() -> DeltaFlow:
        flow = DeltaFlow(
            writer,  # type: ignore[arg-type]
            ChunkEncoder("chat", id="i", created=0, model="m"),
            job="j",
            owner=OWNER,
            attempt=1,
            offset=0,
            on_refused=refused.append,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(flow.run())
            for number, text in enumerate(texts):
                await flow.add((ChoiceDelta(text=text, num_tokens=1 if text else 0),))
                if pauses[number % len(pauses)]:
                    await asyncio.sleep(0)
            flow.close()
        return flow

    flow = asyncio.run(asyncio.wait_for(write(), 5))
    offset, text = 0, ""
    for event in writer.events:
        assert event.offset == offset
        offset += event.count
        text += "".join(choice.text for choice in decode_chunk(event.data, num_tokens=event.count))
    assert flow.offset == offset
    if refused:
        assert len(refused) == 1
        assert "".join(texts).startswith(text)
    else:
        assert text == "".join(texts)
        assert offset == sum(1 for each in texts if each)
