"""`headrace batch`: many requests from a file, each answered once, however often the command is begun again."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import click
import msgspec

from headrace import __version__, telemetry
from headrace.batch import BatchRunner, Window, read_requests
from headrace.cli.batch_files import ResultFiles
from headrace.cli.batch_progress import BatchProgress
from headrace.cli.options import with_settings
from headrace.client import connect
from headrace.errors import BrokerUnavailableError, ConfigError, HeadraceError
from headrace.lifecycle import stop_event, wait_first
from headrace.logs import configure_logging
from headrace.schemas.batch_lines import BatchRequest, LineCheck, LineResult, LineSplitter
from headrace.schemas.refusals import Refusal
from headrace.settings import Settings

__all__ = ["batch"]

_PIECE_BYTES: Final = 1024 * 1024
_SHOW_EVERY_S: Final = 0.2
_LOG_LEVELS: Final[dict[str, str]] = {"debug": "debug"}


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What `batch run --json` prints. `resumed` of the completed lines were answered by runs before."""

    total: int
    completed: int
    failed: int
    resumed: int
    output: str
    errors: str | None
    duration_s: float
    is_interrupted: bool


class _Input(msgspec.Struct, frozen=True, kw_only=True):
    """A checked file: the name its jobs begin with, and the hash of each line's `custom_id`, by line."""

    name: str
    custom_ids: dict[int, bytes]


@click.group()
def batch() -> None:
    """Many requests from a file, through the low lane."""


@batch.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: FILE.output.jsonl.")
@click.option("--errors", type=click.Path(dir_okay=False, path_type=Path), help="Default: FILE.errors.jsonl.")
@click.option(
    "--window", type=click.IntRange(1, 4096), metavar="N", help="Lines at once; default HEADRACE_BATCH_WINDOW."
)
@click.option(
    "--name", default="", metavar="NAME", help="Tells runs of one file apart that are to be asked separately."
)
@click.option("--tenant", default="default", show_default=True, metavar="NAME", help="Whose requests they are.")
@click.option("--json", "as_json", is_flag=True, help="No progress: one JSON object at the end.")
@with_settings
def run(
    settings: Settings,
    file: Path,
    output: Path | None,
    errors: Path | None,
    window: int | None,
    name: str,
    tenant: str,
    as_json: bool,
) -> None:
    """Answer each line of FILE, requests in OpenAI's batch format; needs no gateway.

    Answers are appended to the output file as they come. Begun again, after Ctrl-C or a crash, it goes on: lines that
    have an answer there are not asked again, those under way are picked up, those that failed are tried again. Exit
    code 0 only if all lines are answered.

    \b
    headrace batch run requests.jsonl
    headrace batch run requests.jsonl --output answers.jsonl --json
    """  # noqa: D301  # click reads the backspaces
    output = output or file.with_name(f"{file.name}.output.jsonl")
    errors = errors or file.with_name(f"{file.name}.errors.jsonl")
    if len({file.resolve(), output.resolve(), errors.resolve()}) < 3:
        raise ConfigError("FILE, --output and --errors must be three different files")
    if window is not None:
        settings = msgspec.structs.replace(settings, batch_window=window)
    configure_logging("batch", _LOG_LEVELS.get(settings.log_level, "error"), json=False)
    checked = _check(file, name, max_lines=settings.batch_max_lines)
    with (
        telemetry.configure("headrace-batch", instance_id="", version=__version__),
        ResultFiles(output, errors, run=checked.name) as results,
        BatchProgress(len(checked.custom_ids), is_quiet=as_json) as progress,
    ):
        summary = asyncio.run(_run(settings, tenant, file, checked, results, progress))
    if as_json:
        click.echo(msgspec.json.encode(summary).decode())
    else:
        progress.end(summary.completed, summary.failed, output, errors if summary.failed else None)
    if summary.is_interrupted:
        raise KeyboardInterrupt
    if summary.completed < summary.total:
        raise SystemExit(1)


def _check(file: Path, name: str, *, max_lines: int) -> _Input:
    """Check all lines before any is sent. Raises HeadraceError naming the line."""
    check, splitter = LineCheck(max_lines=max_lines), LineSplitter()
    digest = hashlib.blake2b(name.encode(), digest_size=12)
    custom_ids: dict[int, bytes] = {}

    def take(number: int, line: bytes) -> None:
        request = check.take(number, line)
        if isinstance(request, Refusal):
            raise HeadraceError(f"{file}: {request.message}")
        custom_ids[number] = ResultFiles.key(request.custom_id)

    try:
        with file.open("rb") as opened:
            while piece := opened.read(_PIECE_BYTES):
                digest.update(piece)
                for number, line in splitter.feed(piece):
                    take(number, line)
            for number, line in splitter.end():
                take(number, line)
    except OSError as error:
        raise HeadraceError(f"cannot read {file}: {error.strerror}") from None
    if refusal := check.end():
        raise HeadraceError(f"{file}: {refusal.message}")
    return _Input(name=f"run_{digest.hexdigest()}", custom_ids=custom_ids)


async def _run(
    settings: Settings, tenant: str, file: Path, checked: _Input, results: ResultFiles, progress: BatchProgress
) -> Summary:
    began_at = time.monotonic()
    done = {number for number, key in checked.custom_ids.items() if key in results.done}
    num_failed = 0

    async def record(request: BatchRequest, result: LineResult) -> None:
        nonlocal num_failed
        results.add(result)
        if result.is_failed:
            num_failed += 1
        else:
            done.add(request.number)

    resumed = frozenset(done)
    async with stop_event() as stop, connect(tenant=tenant, settings=settings, name="headrace-batch") as client:
        window = Window(settings.batch_window)
        runner = BatchRunner(client, checked.name, window=window, record=record)
        running = asyncio.create_task(runner.run(lambda after: _requests(file, after, resumed)), name="lines")
        ended = asyncio.Event()
        running.add_done_callback(lambda _: ended.set())
        try:
            while not await wait_first(stop, ended, client.bus.closed, timeout_s=_SHOW_EVERY_S):
                progress.show(len(done), num_failed, runner.trouble)
        finally:
            running.cancel()
            await asyncio.wait((running,))
        if not running.cancelled():
            running.result()
        elif client.bus.closed.is_set():
            raise BrokerUnavailableError("the connection to the broker was closed for good; begin again to go on")
        progress.show(len(done), num_failed, None)
    return Summary(
        total=len(checked.custom_ids),
        completed=len(done),
        failed=num_failed,
        resumed=len(resumed),
        output=str(results.output),
        errors=str(results.errors) if num_failed else None,
        duration_s=round(time.monotonic() - began_at, 3),
        is_interrupted=running.cancelled(),
    )


async def _requests(file: Path, after: int, skip: frozenset[int]) -> AsyncIterator[BatchRequest]:
    async for request in read_requests(_pieces(file), after=after, skip=skip):
        yield request


async def _pieces(file: Path) -> AsyncIterator[bytes]:
    with file.open("rb") as opened:
        while piece := await asyncio.to_thread(opened.read, _PIECE_BYTES):
            yield piece
