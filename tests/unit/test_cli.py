"""The command line without a broker: its help, its errors, its exit codes, and what it prints."""

import asyncio
import contextlib
import io
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import headrace.cli
from headrace.bus.timeline import TimedEvent
from headrace.cli import render, status
from headrace.cli.answer import Answer, follow
from headrace.cli.app import command
from headrace.cli.jobs import shorten
from headrace.cli.options import group_options, parse_assignments, with_settings
from headrace.cli.screen import Screen
from headrace.cli.stack import Plan
from headrace.cli.up import curl_lines
from headrace.client import Accepted, Delta, Done, Started, StreamEvent
from headrace.errors import BrokerUnavailableError, ConfigError, HeadraceError
from headrace.schemas.events import AcceptedBody, Owner, accepted, delta, started
from headrace.schemas.overview import GoneWorker, Overview, QueueOverview, WorkerOverview
from headrace.settings import Settings
from tests.commands import logging_kept


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        yield (*path, name)
        if isinstance(found, click.Group):
            yield from commands(found, (*path, name))


ATTACH = ("serve", "worker", "--engine", "openai", "--model", "m", "--engine-url", "http://localhost:1")


def run(*argv: str, **env: str) -> Result:
    """Run `headrace argv` with no setting from outside."""
    cleared: dict[str, str | None] = {name: None for name in os.environ if name.startswith("HEADRACE_")}
    return CliRunner().invoke(command, argv, env=cleared | env)


@pytest.fixture
def no_broker(tmp_path: Path) -> str:
    return str(tmp_path / "state")


# help


def test_help_teaches_the_first_steps_and_names_every_command() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "First steps" in result.output
    for name in ("up", "demo", "ask", "status", "jobs", "drain", "evict", "serve", "provision", "doctor", "bench"):
        assert f"\n  {name} " in result.output
    assert "headrace ask" in result.output


@pytest.mark.parametrize("path", sorted(commands(command)), ids=" ".join)
def test_every_command_explains_itself_and_takes_the_common_options(path: tuple[str, ...]) -> None:
    result = run(*path, "--help")
    assert result.exit_code == 0
    assert f"Usage: headrace {' '.join(path)}" in result.output.replace("Usage: command", "Usage: headrace")
    if path not in (
        ("batch",),
        ("jobs",),
        ("serve",),
        ("bench",),
        ("bench", "simulate"),
        ("bench", "scaling"),
        ("config",),
        ("models",),
        ("tenant",),
        ("tenant", "key"),
    ):
        for option in ("--nats-url", "--prefix", "--state-dir", "--log-level"):
            assert option in result.output


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, headrace.__version__ in result.output) == (0, True)


# exit codes


def test_an_interrupt_while_it_is_loaded_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headrace.cli.app.main", interrupted)
    with pytest.raises(SystemExit) as ended:
        headrace.cli.main()
    assert ended.value.code == 130


@pytest.mark.parametrize(
    "argv",
    [
        ("nonsense",),
        ("ask",),
        ("ask", "hi", "--tenant", "UPPER"),
        ("ask", "hi", "--pool", "No!"),
        ("ask", "hi", "--job-id", "bad id"),
        ("status", "--nonsense"),
        ("status", "--prefix", "no spaces"),
        ("jobs", "show", "bad id"),
        ("jobs", "cancel", "x", "--tenant", "UPPER"),
        ("jobs", "list", "--model", ""),
        ("jobs", "list", "--limit", "0"),
        ("jobs", "list", "--state", "done"),
        ("jobs", "dead", "--tenant", "UPPER"),
        ("jobs", "replay", "bad id"),
        ("jobs", "replay", "j", "--follow", "--json"),
        ("jobs", "replay", "j", "--pool", "No!"),
        ("drain", "no spaces"),
        ("drain", "w", "--timeout", "0"),
        ("evict", "no spaces"),
        ("evict", "w", "--reason", "x" * 201),
        ("bench", "failover", "--kills", "0"),
        ("bench", "failover", "--kind", "nonsense"),
        ("bench", "relay", "--rounds", "0"),
        ("serve", "worker"),
        ("serve", "worker", "--engine", "nonsense"),
        ("serve", "worker", "--engine", "openai", "--engine-url", "http://localhost:1"),
        ("serve", "worker", "--engine", "openai", "--model", "m"),
        ("serve", "worker", "--engine", "sim", "--model", "m", "-o", "nonsense"),
        ("serve", "worker", "--engine", "sim", "--model", "m", "-o", "nonsense=1"),
        ("serve", "worker", "--engine", "sim", "--model", "m", "--pool", "No!"),
        ("serve", "worker", "--engine", "sim", "--model", "m", "--worker-id", "no spaces"),
        ("serve", "worker", "--engine", "sim", "--model", "a\nb"),
        (*ATTACH, "--kv-tokens", "9", "--kv-bytes-per-token", "9", "--memory-device", "host"),
        (*ATTACH, "--kv-bytes-per-token", "9"),
        (*ATTACH, "--kv-bytes-per-token", "0", "--memory-device", "host"),
        (*ATTACH, "--kv-bytes-per-token", "9", "--memory-device", "engine"),
        (*ATTACH, "--kv-bytes-per-token", "9", "--kv-layout", "1,1,1,1", "--memory-device", "host"),
        (*ATTACH, "--kv-layout", "1,1,1,1", "--model-config", "config.json", "--memory-device", "host"),
        (*ATTACH, "--model-config", "nothing", "--memory-device", "host"),
        (*ATTACH, "--model-config", "nothing", "--kv-dtype", "q4", "--memory-device", "host"),
        (*ATTACH, "--kv-dtype", "fp8"),
        (*ATTACH, "--kv-layout", "30,3,64", "--memory-device", "host"),
        (*ATTACH, "--kv-layout", "0,3,64,2", "--memory-device", "host"),
        (*ATTACH, "--memory-reserve", "1GiB"),
        (*ATTACH, "--memory-device", "host"),
        (*ATTACH, "--keeps-memory"),
        (*ATTACH, "--kv-bytes-per-token", "9", "--memory-device", "host", "--memory-reserve", "1 GB"),
        ("serve", "worker", "--engine", "llama", "--kv-bytes-per-token", "9"),
        ("up", "--engine", "openai"),
        ("up", "--engine", "openai", "--model", "m", "-o", "url=http://localhost:1", "-o", "kv_bytes_per_token=9"),
        ("up", "--engine", "sim", "-o", "nonsense=1"),
        ("up", "--engine", "sim", "-o", "pool_bytes=1000"),
        ("up", "--engine", "sim", "-o", "keeps_memory=true"),
        ("up", "--workers", "0"),
        ("provision", "--model", ""),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2_and_no_traceback(argv: tuple[str, ...], no_broker: str) -> None:
    result = run(*argv, HEADRACE_STATE_DIR=no_broker)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output


def test_an_unknown_variable_stops_the_start(no_broker: str) -> None:
    result = run("status", HEADRACE_STATE_DIR=no_broker, HEADRACE_NONSENSE="1")
    assert result.exit_code == 2
    assert "HEADRACE_NONSENSE" in result.stderr


@pytest.mark.parametrize(
    "argv",
    [
        ("status",),
        ("status", "--json"),
        ("ask", "hi"),
        ("jobs", "show", "j"),
        ("jobs", "cancel", "j"),
        ("jobs", "list"),
        ("jobs", "dead"),
        ("jobs", "replay", "j"),
        ("drain", "w"),
        ("evict", "w"),
        ("models", "list"),
        ("models", "add", "m", "--engine", "sim"),
        ("models", "set", "m", "--replicas", "2"),
        ("models", "restart", "m"),
        ("models", "pause", "m"),
        ("models", "retry", "m"),
        ("models", "remove", "m", "--yes"),
        ("models", "alias", "a", "m"),
        ("provision",),
        ("serve", "router"),
        ("serve", "monitor"),
        ("serve", "worker", "--engine", "sim", "--model", "m"),
    ],
    ids=" ".join,
)
def test_without_a_broker_one_line_says_what_to_do(argv: tuple[str, ...], no_broker: str) -> None:
    result = run(*argv, HEADRACE_STATE_DIR=no_broker)
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("headrace: no broker")
    assert "headrace up" in line
    assert "HEADRACE_NATS_URL" in line


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (HeadraceError("one\n  two \x1b[31m\n\n"), 1, "headrace: one | two ?[31m"),
        (ConfigError("bad"), 2, "headrace: bad"),
        (ExceptionGroup("g", [ExceptionGroup("h", [BrokerUnavailableError("gone")])]), 1, "headrace: gone"),
        (ExceptionGroup("g", [ConfigError("bad")]), 2, "headrace: bad"),
        (KeyboardInterrupt(), 130, ""),
        (HeadraceError("x" * 5000), 1, f"headrace: {'x' * 1999}…"),
    ],
    ids=["text", "setting", "group", "setting in a group", "interrupt", "long"],
)
def test_expected_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, shown: str
) -> None:
    def fails(settings: Settings, **options: Any) -> None:
        raise error

    monkeypatch.setattr(status.status, "callback", with_settings(fails))
    result = run("status")
    assert (result.exit_code, result.stderr.strip()) == (code, shown)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ValueError("a\nbug"), "headrace: unexpected ValueError: a | bug"),
        (KeyError(), "headrace: unexpected KeyError"),
        (ExceptionGroup("g", [ValueError("bug")]), "headrace: unexpected ValueError: bug"),
        (
            ExceptionGroup("g", [ExceptionGroup("h", [ValueError("bug")]), ConfigError("bad")]),
            "headrace: bad; unexpected ValueError: bug",
        ),
    ],
    ids=["one", "without words", "group", "beside what was expected"],
)
def test_a_bug_is_not_dressed_up_and_its_reason_is_the_last_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, shown: str
) -> None:
    def fails(settings: Settings, **options: Any) -> None:
        raise error

    monkeypatch.setattr(status.status, "callback", with_settings(fails))
    result = run("status")
    assert result.exit_code == 1
    *trace, last = result.stderr.splitlines()
    assert last == shown
    assert any("Traceback" in line for line in trace)
    assert any("fails" in line for line in trace)


# options


@click.group()
@group_options
def outer() -> None:
    """Stand in for `headrace`."""


@outer.command()
@with_settings
def inner(settings: Settings) -> None:
    """Print what a command is given."""
    click.echo(f"{settings.nats_url} {settings.prefix} {settings.log_level}")


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["inner"], "nats://env headrace.v1 info"),
        (["--nats-url", "nats://a", "inner"], "nats://a headrace.v1 info"),
        (["--nats-url", "nats://a", "inner", "--nats-url", "nats://b"], "nats://b headrace.v1 info"),
        (["--prefix", "p", "inner", "--log-level", "error"], "nats://env p error"),
    ],
)
def test_common_options_stand_on_both_sides_and_beat_the_environment(argv: list[str], shown: str) -> None:
    cleared: dict[str, str | None] = {name: None for name in os.environ if name.startswith("HEADRACE_")}
    result = CliRunner().invoke(outer, argv, env=cleared | {"HEADRACE_NATS_URL": "nats://env"})
    assert result.output.strip() == shown


def test_assignments_keep_what_is_after_the_first_equals_sign() -> None:
    context, param = click.Context(outer), click.Option(["-o"])
    assert parse_assignments(context, param, ("url=http://h/?a=b", "n-ctx=1", "n_ctx=2")) == {
        "url": "http://h/?a=b",
        "n_ctx": "2",
    }
    for wrong in ("nothing", "=value", ""):
        with pytest.raises(click.BadParameter):
            parse_assignments(context, param, (wrong,))


def test_a_plan_is_started_by_the_arguments_of_serve_worker() -> None:
    plan = Plan(model="m", engine="sim", num_workers=2, max_concurrency=3, options={"seed": "1"})
    assert plan.worker_argv("w-1") == [
        "serve", "worker", "--engine", "sim", "--model", "m", "--max-concurrency", "3", "--worker-id", "w-1",
        "-o", "seed=1",
    ]  # fmt: skip


# answers


async def the(*events: StreamEvent) -> AsyncIterator[StreamEvent]:
    for event in events:
        yield event


def test_the_hint_for_curl_has_a_key_where_one_is_wanted() -> None:
    plan = Plan(model="m", engine="sim", http_port=8080)
    (line,) = curl_lines(Settings(), plan, has_keys=False)
    assert "http://127.0.0.1:8080/v1/chat/completions" in line
    assert "Authorization" not in line
    with_key, told = curl_lines(Settings(), plan, has_keys=True)
    assert "-H 'Authorization: Bearer KEY'" in with_key
    assert "headrace tenant key add" in told
    assert curl_lines(Settings(), Plan(model="m", engine="sim"), has_keys=True) == []


def test_an_answer_counts_tokens_and_times() -> None:
    clock = iter([1.0, 2.0, 3.0])
    pieces: list[str] = []
    answer = Answer(sent_at=0.5)
    events = the(
        Accepted(job="j", sequence=1, position=0, eta_s=0.1),
        Started(job="j", worker="w", attempt=1),
        Delta(job="j", text="", offset=0, num_tokens=0, chunk={}),
        Delta(job="j", text="a", offset=0, num_tokens=2, chunk={}),
        Started(job="j", worker="v", attempt=2),
        Delta(job="j", text="bc", offset=2, num_tokens=10, chunk={}),
        Done(job="j", response={}, text="abc", finish_reason="length", usage=None),
    )
    asyncio.run(follow(events, answer, on_text=pieces.append, clock=lambda: next(clock)))
    assert pieces == ["a", "bc"]
    assert (answer.text, answer.worker, answer.attempt, answer.num_tokens) == ("abc", "v", 2, 12)
    assert answer.ttft_s == 1.5
    assert answer.tokens_per_second == 10.0
    assert answer.summary() == (
        "first token 1500 ms · 12 tokens · 10 tokens/s · attempt 2 · ended by length · worker v · job j"
    )


def test_an_answer_of_one_piece_has_no_speed() -> None:
    answer = Answer(sent_at=0.0)
    asyncio.run(follow(the(Delta(job="j", text="a", offset=0, num_tokens=1, chunk={})), answer, on_text=lambda _: None))
    assert answer.tokens_per_second is None
    assert "tokens/s" not in answer.summary()


def test_a_run_of_deltas_is_one_line_of_the_history() -> None:
    owner = Owner(worker="w", epoch="e")
    events = [
        accepted("j", AcceptedBody(job="j", sequence=1), body_hash="h"),
        started("j", owner, attempt=1, offset=0, body_hash="h"),
        *(delta("j", owner, attempt=1, offset=number * 2, count=2, data=b"{}") for number in range(5)),
        delta("j", owner, attempt=2, offset=10, count=1, data=b"{}"),
    ]
    lines = shorten(TimedEvent(time=f"t{number}", event=event) for number, event in enumerate(events))
    assert [(line.event, line.time, line.num_events, line.num_tokens) for line in lines] == [
        ("accepted", "t0", 1, 0),
        ("started", "t1", 1, 0),
        ("delta", "t2", 5, 10),
        ("delta", "t7", 1, 1),
    ]


# looks


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "-"), (0.04, "0.0 s"), (9.96, "10.0 s"), (61, "61 s"), (600, "10 min"), (9000, "2 h")],
)
def test_durations(seconds: float | None, shown: str) -> None:
    assert render.duration(seconds) == shown


def test_text_from_elsewhere_cannot_command_the_terminal() -> None:
    assert render.safe("a\x1b[2Jb\r\nc\x9b", keep="\n") == "a\ufffd[2Jb\ufffd\nc\ufffd"
    assert render.safe("é 漢 ☃") == "é 漢 ☃"


def test_a_deployment_is_shown_plainly_where_nobody_watches() -> None:
    worker = WorkerOverview(
        id="w1", model="[red]m", engine="sim", state="Failed", kv_capacity_tokens=10_000, kv_reserved_tokens=5,
        running=1, max_concurrency=4, reason="no \x1b[31mmemory", host="h", pid=7,
    )  # fmt: skip
    queue = QueueOverview(
        model="[red]m", pool="default", lane="high", queue="q" * 40, queued=12, running=1, oldest_age_s=3.25
    )
    now = Overview(workers=(worker,), queues=(queue,), gone=(GoneWorker(id="w0", ending="expired", age_s=2),))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for part in render.deployment(now):
            render.console().print(part)
    text = out.getvalue()
    assert "\x1b" not in text
    for shown in (
        "w1",
        "[red]m",
        "Failed",
        "1/4",
        "5/10,000",
        "no \ufffd[31mmemory",
        "h:7",
        "q" * 40,
        "12",
        "3.2 s",
        "w0",
        "expired",
    ):
        assert shown in text


def test_an_empty_deployment_says_so() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for part in render.deployment(Overview(workers=(), queues=())):
            render.console().print(part)
    assert "No worker lives" in out.getvalue()
    assert "No model is known" in out.getvalue()


@pytest.mark.parametrize(("text", "shown"), [("half an", "half an\n"), ("a line\n", "a line\n"), ("", "")])
async def test_an_answer_that_fails_ends_its_line(text: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(None, None, is_quiet=False)  # type: ignore[arg-type]  # asked only on a terminal

    async def answer() -> None:
        async with screen.waiting():
            if text:
                screen.text(text)
            raise HeadraceError("the job was cancelled")

    with pytest.raises(HeadraceError):
        await answer()
    assert capsys.readouterr().out == shown


# doctor


def test_doctor_tells_of_settings_that_cannot_be_used_as_a_finding() -> None:
    with logging_kept():
        result = run("doctor", "--json", HEADRACE_QUEUE_LIMTI="5")
    (finding,) = json.loads(result.stdout)
    assert (result.exit_code, finding["id"], finding["severity"]) == (1, "settings", "error")
    assert "did you mean HEADRACE_QUEUE_LIMIT?" in finding["found"]
    assert set(finding) == {"id", "severity", "found", "remedy"}


def test_doctor_without_a_broker_says_so_and_goes_on(no_broker: str) -> None:
    with logging_kept():
        result = run("doctor", "--json", "--state-dir", no_broker)
    found = {finding["id"]: finding["severity"] for finding in json.loads(result.stdout)}
    assert result.exit_code == 1
    assert found["broker"] == "error"
    assert {"settings", "state-dir"} <= found.keys()
    assert not Path(no_broker).exists()
