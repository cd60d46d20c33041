"""Parts of Headrace as processes of their own, for tests that kill them."""

import os
import sys
from pathlib import Path

from headrace.client import Client
from headrace.errors import RequestError
from headrace.lifecycle import ChildProcess
from tests.deployment import until

__all__ = ["part", "serving"]


def part(
    *arguments: str, url: str, prefix: str, state_dir: Path, program: str | None = None, **variables: str
) -> ChildProcess:
    """A child running `headrace <arguments>` against a broker; `variables` go to its environment.

    `program` is Python that is run with those arguments instead of the command.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "OTEL_"))}
    environment = {
        **inherited,
        "HEADRACE_NATS_URL": url,
        "HEADRACE_PREFIX": prefix,
        "HEADRACE_STATE_DIR": str(state_dir),
        "HEADRACE_GRACE_S": "5",
        "HEADRACE_MONITOR_PORT": "0",
        **variables,
    }
    run = ["-m", "headrace.cli"] if program is None else ["-c", program]
    return ChildProcess([sys.executable, *run, *arguments], name=" ".join(arguments[:2]), env=environment)


async def serving(client: Client, model: str) -> None:
    """Wait until a request for the model is answered."""

    async def answers() -> bool:
        try:
            await client.complete(model=model, prompt="ready?", max_tokens=1, deadline_s=20)
        except RequestError as error:
            if error.code not in ("model_not_found", "internal"):
                raise
            return False
        return True

    await until(answers)
