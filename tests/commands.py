"""The command line, run in this process beside a deployment."""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Iterator
from typing import Any

from click.testing import CliRunner, Result

from headrace.cli.app import command

__all__ = ["Headrace", "logging_kept"]


@contextlib.contextmanager
def logging_kept() -> Iterator[None]:
    """At the end the log is as it was, whatever a command that ran in this process made of it."""
    loggers = [logging.getLogger(), logging.getLogger("headrace")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    try:
        yield
    finally:
        for logger, level, handlers in before:
            logger.setLevel(level)
            logger.handlers[:] = handlers


class Headrace:
    """Runs `headrace …` against one deployment, with no other setting from outside than `variables`."""

    def __init__(self, url: str, prefix: str, **variables: str) -> None:
        self._env: dict[str, str | None] = {name: None for name in os.environ if name.startswith("HEADRACE_")}
        self._env |= {"HEADRACE_NATS_URL": url, "HEADRACE_PREFIX": prefix, "HEADRACE_GRACE_S": "5"}
        self._env |= variables

    async def run(self, *argv: str, code: int | None = 0) -> Result:
        """Run a command, which must end with `code` (None: 0 or 1); its loop is one of a thread of its own."""
        with logging_kept():
            result = await asyncio.to_thread(CliRunner().invoke, command, argv, env=self._env)
        assert result.exit_code in ((0, 1) if code is None else (code,)), (result.output, result.exception)
        assert "Traceback" not in result.output
        return result

    async def json(self, *argv: str) -> Any:
        """What a command prints as JSON."""
        return json.loads((await self.run(*argv, "--json")).stdout)
