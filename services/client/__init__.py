"""The client SDK: publish a request, read its tokens, once and in order, whatever happens in between.

async with headrace.client.connect() as client:
    async for event in client.stream(model="smollm2-135m", messages=[{"role": "user", "content": "hi"}]):
        ...
"""

from headrace.client.client import Client, connect
from headrace.client.events import Accepted, Delta, Done, Requeued, Started, StreamEvent
from headrace.client.stream import JobStream

__all__ = [
    "Accepted",
    "Client",
    "Delta",
    "Done",
    "JobStream",
    "Requeued",
    "Started",
    "StreamEvent",
    "connect",
]
