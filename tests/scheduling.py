"""How the processes of `make test` share the tests: what measures time runs in one of them, one test after another."""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

__all__ = ["TimedApart"]

_TIMED = ("tests/e2e/", "tests/faults/")
"""Rooms whose tests start many processes and say how soon something must happen."""


class TimedApart(LoadFileScheduling):  # type: ignore[misc]  # the package has no types
    """Gives a process a file at a time, in the order of their names; all files of the timed rooms count as one."""

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "timed" if file.startswith(_TIMED) else file
