"""Ask a model with the SDK and print its tokens as they come.

In one terminal `headrace up`, in another `python examples/stream.py "What is a turbine?"`.
"""

import asyncio
import sys

import headrace.client
from headrace.client import Accepted, Delta, Done, Requeued, Started
from headrace.errors import HeadraceError

MODEL = "smollm2-135m"


async def main(question: str) -> None:
    """Stream one answer to stdout, and what happens to the job to stderr."""
    async with headrace.client.connect() as client:
        messages = [{"role": "user", "content": question}]
        async for event in client.stream(model=MODEL, messages=messages, max_tokens=100, temperature=0):
            match event:
                case Accepted():
                    print(f"job {event.job}, {event.position} before it", file=sys.stderr)
                case Started():
                    print(f"attempt {event.attempt} on worker {event.worker}", file=sys.stderr)
                case Requeued():
                    print(f"\ngoing on elsewhere: {event.reason}", file=sys.stderr)
                case Delta():
                    print(event.text, end="", flush=True)
                case Done():
                    print()
                    print(f"{event.finish_reason}, {event.usage}", file=sys.stderr)


if __name__ == "__main__":
    try:
        asyncio.run(main(" ".join(sys.argv[1:]) or "What is a turbine?"))
    except HeadraceError as error:
        sys.exit(f"{error.code}: {error}")
