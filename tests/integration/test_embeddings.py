"""Embeddings: one answer, no deltas."""

from headrace.client import Accepted, Done, Started
from tests.deployment import MODEL, deployment


async def test_an_embeddings_request_is_answered(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running:
        await running.worker()
        events = [event async for event in running.client.stream(model=MODEL, input=["a river", "a stone"])]
    assert [type(event) for event in events] == [Accepted, Started, Done]
    done = events[-1]
    assert isinstance(done, Done)
    assert [entry["index"] for entry in done.response["data"]] == [0, 1]
    assert done.response["model"] == MODEL
    assert done.usage is not None
    assert done.usage.prompt_tokens > 0
