"""What a command is doing, for whoever waits for it."""

import sys
from typing import Self

from rich.status import Status
from rich.text import Text

from headrace.cli.render import console, is_terminal, safe

__all__ = ["Progress"]


class Progress:
    """What is going on, on stderr: a spinner on a terminal, else a line for each change."""

    def __init__(self) -> None:
        self._err = console(stderr=True)
        self._status: Status | None = self._err.status("") if is_terminal(sys.stderr) else None
        self._said = ""

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        """Something new, unless it is what was said last."""
        if text == self._said:
            return
        self._said = text
        if self._status is not None:
            self._status.update(Text(safe(text)))
        else:
            self._err.print(Text(safe(text)), soft_wrap=True)
