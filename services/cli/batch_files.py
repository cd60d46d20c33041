"""The two files that a run of a batch on this machine writes, line by line."""

import contextlib
import fcntl
import hashlib
import os
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from headrace.errors import HeadraceError
from headrace.schemas.batch_lines import LineResult

__all__ = ["ResultFiles"]


class _Line(msgspec.Struct, frozen=True):
    id: str
    custom_id: str


class ResultFiles:
    """Answers are appended to the output file and survive the process; the error file is that of the last run alone.

    One process at a time has them. `done` are the keys of the custom ids that have an answer. A last line that was cut
    off in the writing is dropped.
    """

    def __init__(self, output: Path, errors: Path, *, run: str) -> None:
        self.output = output
        self.errors = errors
        self.done: set[bytes] = set()
        self._head = f"batch_req_{run}_"
        self._output_file: BinaryIO | None = None
        self._errors_file: BinaryIO | None = None

    @staticmethod
    def key(custom_id: str) -> bytes:
        """A custom id as it is kept in `done`."""
        return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()

    def __enter__(self) -> Self:
        """Raises HeadraceError where a file cannot be had, or holds results of something else."""
        try:
            self._output_file = self.output.open("a+b", buffering=0)
            fcntl.flock(self._output_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
            self._errors_file = self.errors.open("wb", buffering=0)
        except BlockingIOError:
            self._close()
            raise HeadraceError(f"{self.output} is being written by another run") from None
        except OSError as error:
            self._close()
            raise HeadraceError(f"cannot write {error.filename or self.output}: {error.strerror}") from None
        except HeadraceError:
            self._close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._output_file is not None:
            with contextlib.suppress(OSError):  # some places cannot be synced
                os.fsync(self._output_file.fileno())
        self._close()
        if self.errors.exists() and not self.errors.stat().st_size:
            self.errors.unlink()

    def add(self, result: LineResult) -> None:
        """Write a result down. Raises HeadraceError where the disk does not take it."""
        opened = self._errors_file if result.is_failed else self._output_file
        assert opened is not None
        line = memoryview(result.data + b"\n")
        try:
            while line:
                line = line[opened.write(line) :]
        except OSError as error:
            raise HeadraceError(f"cannot write results: {error.strerror}") from None

    def _read(self) -> None:
        opened = self._output_file
        assert opened is not None
        end = 0
        with self.output.open("rb") as reading:
            for line in reading:
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                if line.strip():
                    self.done.add(self.key(self._custom_id(line)))
        opened.truncate(end)

    def _custom_id(self, line: bytes) -> str:
        try:
            read = msgspec.json.decode(line, type=_Line)
        except msgspec.DecodeError:
            raise HeadraceError(f"{self.output} holds something else than results; choose another --output") from None
        if not read.id.startswith(self._head):
            raise HeadraceError(
                f"{self.output} holds results of another file, or of one that has changed since; "
                "remove it or choose another --output"
            )
        return read.custom_id

    def _close(self) -> None:
        for opened in (self._output_file, self._errors_file):
            if opened is not None:
                opened.close()
