"""Leave a running job, come back to it by its id, read it from the start, then cancel it.

In one terminal `headrace up`, in another `python examples/attach_and_cancel.py`.
"""

import asyncio
import sys
import uuid

import headrace.client
from headrace.client import Delta, JobStream
from headrace.errors import HeadraceError, JobCancelledError

MODEL = "smollm2-135m"


async def read(stream: JobStream, num_tokens: int) -> None:
    """Print a stream until `num_tokens` tokens are there; leaving it then does not end the job."""
    async with stream:
        async for event in stream:
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)
                if event.offset + event.num_tokens >= num_tokens:
                    print()
                    return


async def main() -> None:
    """The life of one job; its id is chosen here and would be kept where a restart cannot lose it."""
    job = f"story-{uuid.uuid4().hex[:8]}"
    async with headrace.client.connect() as client:
        await read(client.stream(model=MODEL, prompt="Once upon a time", max_tokens=1000, job_id=job), 10)
        print(f"left job {job} running", file=sys.stderr)
        await read(client.attach(job), 20)
        print(f"it is {(await client.cancel(job)).state}", file=sys.stderr)
        try:
            await read(client.attach(job), 1001)
        except JobCancelledError:
            print()
            print("who attaches now reads the tokens it had, and then that it was cancelled", file=sys.stderr)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except HeadraceError as error:
        sys.exit(f"{error.code}: {error}")
