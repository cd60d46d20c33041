"""Ask a model with nothing but nats-py: a JSON body, a subject, an inbox.

In one terminal `headrace up`, in another `python examples/bare_nats.py "What is a turbine?"`.
"""

import asyncio
import json
import os
import sys

import nats

URL = os.environ.get("HEADRACE_NATS_URL", "nats://127.0.0.1:4222")
PREFIX = os.environ.get("HEADRACE_PREFIX", "headrace.v1")
MODEL = "smollm2-135m"  # in a subject, bytes outside A-Z a-z 0-9 _ - are written =HH


async def main(question: str) -> str | None:
    """Print the answer as it comes; returns why there is none, if there is none."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 100, "temperature": 0}
    nc = await nats.connect(URL)
    try:
        inbox = nc.new_inbox()
        events = await nc.subscribe(inbox)
        await nc.publish(f"{PREFIX}.infer.default.chat.{MODEL}", json.dumps(body).encode(), reply=inbox)
        while True:
            message = await events.next_msg(timeout=60)
            headers = message.headers or {}
            match headers.get("Headrace-Event"):
                case "accepted":  # from the router, and once more from the job's log
                    print(message.data.decode(), file=sys.stderr)
                case "delta":
                    print(json.loads(message.data)["choices"][0]["delta"].get("content", ""), end="", flush=True)
                case "done":
                    print()
                    print(json.loads(message.data)["usage"], file=sys.stderr)
                    return None
                case "error" | "failed" | "expired" | "cancelled":
                    return message.data.decode()
                case None:
                    return "no router answers; start one with `headrace up`"
    finally:
        await nc.close()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(" ".join(sys.argv[1:]) or "What is a turbine?")))
