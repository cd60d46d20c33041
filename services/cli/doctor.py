"""`headrace doctor`: what is wrong and what to do."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.text import Text

from headrace.bus.connection import connect
from headrace.bus.members import NOTICES
from headrace.bus.securing import SecureDirectory
from headrace.bus.server import discover
from headrace.cli.options import located, with_flags
from headrace.cli.progress import Progress
from headrace.cli.render import console, is_terminal, safe, table
from headrace.cli.secure import SECURE_DIR
from headrace.doctor.finding import SEVERITIES, Check, Finding, Severity, counted, has_error, ordered
from headrace.doctor.gathering import gather
from headrace.doctor.judge_broker import judge_unreachable
from headrace.doctor.judge_machine import judge_machine
from headrace.doctor.judging import judge
from headrace.doctor.machine import look_at_machine
from headrace.errors import BrokerError, ConfigError
from headrace.logs import configure_logging
from headrace.schemas.subjects import service_inbox
from headrace.settings import Settings, load

__all__ = ["doctor"]

_CONNECT_WITHIN_S: Final = 3.0
_ANSWER_WITHIN_S: Final = 2.0
_STYLES: Final[Mapping[Severity, str]] = {"error": "red", "warning": "yellow", "ok": "green"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="A JSON array of {id, severity, found, remedy}.")
@with_flags
def doctor(flags: Mapping[str, Any], as_json: bool) -> None:
    """Say what is wrong with the deployment, and what to do about it.

    It looks at this machine, the broker, the streams, the parts, the workers, the queues and the configuration. It
    only reads, and is over within some 15 seconds whatever the broker does. On a secured broker it needs the
    operator's credential, and says what another does not permit it to see. Exit code 1 if an error was found, 0 if
    there are warnings at most.

    \b
    headrace doctor
    headrace doctor --json | jq '.[] | select(.severity != "ok")'
    """  # noqa: D301  # click reads the backspaces
    configure_logging("doctor", "error", json=False)
    with _progress() as say:
        findings = ordered(_examined(flags, say))
    if as_json:
        click.echo(msgspec.json.encode(findings).decode())
    else:
        _print(findings)
    if has_error(findings):
        click.get_current_context().exit(1)


def _examined(flags: Mapping[str, Any], say: Callable[[str], None]) -> list[Finding]:
    try:
        settings = load(flags)
    except ConfigError as error:
        return [
            Finding(
                id=Check.SETTINGS,
                severity="error",
                found=str(error),
                remedy="set it right in the file that HEADRACE_CONFIG names, in the environment or among the options",
            )
        ]
    source = os.environ.get("HEADRACE_CONFIG")
    findings = [
        Finding(id=Check.SETTINGS, severity="ok", found=f"settings can be read{f' ({source})' if source else ''}")
    ]
    findings += judge_machine(look_at_machine(settings, os.environ))
    return findings + asyncio.run(_examine(settings, say))


async def _examine(settings: Settings, say: Callable[[str], None]) -> list[Finding]:
    """Findings about what is reached over the broker; one that says why, where it is not reached."""
    say("connecting to the broker")
    hasty = msgspec.structs.replace(
        settings,
        retry_for_s=min(settings.retry_for_s, _CONNECT_WITHIN_S),
        request_timeout_s=min(settings.request_timeout_s, _ANSWER_WITHIN_S),
    )
    try:
        url, hasty = located(hasty)
        hasty, system_url = _with_system_account(hasty)
        async with connect(url, hasty, name="headrace-doctor", inbox_prefix=service_inbox("operator")) as bus:
            return judge(await gather(bus, system_url=system_url, say=say))
    except ConfigError as error:  # a file of a credential or certificate
        return [Finding(id=Check.CREDENTIAL, severity="error", found=str(error), remedy="name a file that can be read")]
    except BrokerError as error:
        return [judge_unreachable(error)]


def _with_system_account(settings: Settings) -> tuple[Settings, str | None]:
    """The settings, and where the system account is: as they say, or as the embedded broker's directory does."""
    if settings.system_url is not None or settings.nats_url is not None:
        return settings, settings.system_url
    info = discover(Path(settings.state_dir))
    if info is None:
        return settings, None
    if info.system_url:
        return settings, info.system_url
    file = SecureDirectory(Path(settings.state_dir) / SECURE_DIR).file_of(NOTICES)
    if not os.access(file, os.R_OK):
        return settings, None
    return msgspec.structs.replace(settings, nats_system_credentials=str(file)), info.url


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is going on, for whoever waits at a terminal."""
    if not is_terminal(sys.stderr):
        yield lambda _: None
        return
    with Progress() as progress:
        yield progress.say


def _print(findings: Iterable[Finding]) -> None:
    every = list(findings)
    rows = [(Text(each.severity, style=_STYLES[each.severity]), each.id.value, _told(each)) for each in every]
    out = console()
    out.print(table("", ("", "check", "what was found, and → what to do"), rows))
    counts = {severity: sum(each.severity == severity for each in every) for severity in SEVERITIES}
    told = f"{counted(counts['error'], 'error')}, {counted(counts['warning'], 'warning')}, {counts['ok']} ok"
    out.print(Text(f"\n{told}"))


def _told(finding: Finding) -> Text:
    told = Text(safe(finding.found))
    return told.append(f"\n→ {safe(finding.remedy)}", style="bold") if finding.remedy else told
