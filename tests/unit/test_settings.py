"""Settings: defaults, sources and their order, and refusals that name key, value and allowed range."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.settings import ENV_PREFIX, Settings, default_state_dir, describe, load


def config(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "headrace.toml"
    path.write_text(text, encoding="utf-8")
    return {"HEADRACE_CONFIG": str(path)}


def test_nothing_set_gives_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert load(environ={}) == Settings()
    assert load(environ={"PATH": "/bin", "HEADRACEX": "1"}).state_dir == "/state/headrace"


def test_state_dir_without_xdg_is_under_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_state_dir() == "/home/someone/.local/state/headrace"


def test_reads_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PREFIX", "mine.v1")
    assert load().prefix == "mine.v1"


def test_flags_go_before_variables_and_those_before_the_file(tmp_path: Path) -> None:
    environ = config(tmp_path, 'prefix = "file.v1"\nqueue_limit = 1\nstall_s = 11\ngrace_s = 1.5\n')
    environ |= {"HEADRACE_PREFIX": "variable.v1", "HEADRACE_QUEUE_LIMIT": "2"}
    settings = load({"prefix": "flag.v1", "queue_limit": None}, environ=environ)
    assert (settings.prefix, settings.queue_limit, settings.stall_s, settings.grace_s) == ("flag.v1", 2, 11, 1.5)


def test_numbers_have_the_type_of_their_key(tmp_path: Path) -> None:
    settings = load({"deadline_s": 5}, environ=config(tmp_path, "stall_s = 11\n") | {"HEADRACE_AGEING_S": "3"})
    assert [type(value) for value in (settings.deadline_s, settings.stall_s, settings.ageing_s)] == [float] * 3


@pytest.mark.parametrize("variable", ["HEADRACE_NONSENSE", "HEADRACE_"])
def test_unknown_variable_stops_the_start(variable: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown variable {variable}; known: .*HEADRACE_QUEUE_LIMIT"):
        load(environ={variable: "1"})


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("HEADRACE_QUEUE_LIMTI", "HEADRACE_QUEUE_LIMIT"),
        ("HEADRACE_HEARTBEAT", "HEADRACE_HEARTBEAT_S"),
        ("HEADRACE_NATS_UR", "HEADRACE_NATS_URL"),
        ("HEADRACE_STATEDIR", "HEADRACE_STATE_DIR"),
    ],
)
def test_a_slip_is_told_what_was_meant(variable: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown variable {variable}; did you mean {meant}\?$"):
        load(environ={variable: "1"})


def test_unknown_key_of_the_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"headrace\.toml: unknown key 'queue_limti'; did you mean queue_limit\?$"):
        load(environ=config(tmp_path, "queue_limti = 3\n"))


def test_unknown_flag_stops_the_start() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'nope'; known: .*queue_limit"):
        load({"nope": 1}, environ={})


BAD = [
    ("heartbeat_s", "fast", "a number from 0.05 to 60"),
    ("heartbeat_s", "0.01", "a number from 0.05 to 60"),
    ("heartbeat_s", "61", "a number from 0.05 to 60"),
    ("worker_ttl_s", "0.5", "a number from 1 to 600"),
    ("ack_wait_s", "0", "a number from 0.5 to 3600"),
    ("max_attempts", "0", "a whole number from 1 to 100"),
    ("max_attempts", "2.5", "a whole number from 1 to 100"),
    ("max_attempts", "", "a whole number from 1 to 100"),
    ("max_attempts", "true", "a whole number from 1 to 100"),
    ("deadline_s", "0", "a number above 0 to 86400"),
    ("deadline_s", "nan", "a number above 0 to 86400"),
    ("deadline_s", "inf", "a number above 0 to 86400"),
    ("deadline_s", "-1", "a number above 0 to 86400"),
    ("log_retention_s", "1", "a number from 60 to 604800"),
    ("queue_limit", "0", "a whole number from 1 to 10000000"),
    ("http_port", "65536", "a whole number from 0 to 65535"),
    ("replicas", "4.5", "a whole number from 1 to 5"),
]


@pytest.mark.parametrize(("key", "text", "allowed"), BAD)
def test_a_bad_variable_is_named_with_value_and_range(key: str, text: str, allowed: str) -> None:
    variable = ENV_PREFIX + key.upper()
    with pytest.raises(ConfigError) as caught:
        load(environ={variable: text})
    assert str(caught.value) == f"{variable} is {text!r}; allowed: {allowed}"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('queue_limit = "9"', "queue_limit is '9'; allowed: a whole number from 1 to 10000000"),
        ("heartbeat_s = true", "heartbeat_s is True; allowed: a number from 0.05 to 60"),
        ("deadline_s = nan", "deadline_s is nan; allowed: a number above 0 to 86400"),
        ("prefix = 7", "prefix is 7; allowed: text"),
        ("stall_s = [1]", "stall_s is [1]; allowed: a number above 0 to 86400"),
    ],
)
def test_a_bad_key_of_the_file_is_named_with_value_and_range(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ=config(tmp_path, line))
    assert str(caught.value) == says


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"prefix": "a b"}, "prefix is 'a b'; allowed: letters, digits, _ and -"),
        ({"prefix": "a..b"}, "prefix is 'a..b'"),
        ({"prefix": "x" * 65}, "64 in all"),
        ({"worker_id": "w.1"}, "worker_id is 'w.1'; allowed: 1 to 64 of A-Z a-z 0-9 _ -"),
        ({"worker_id": ""}, "worker_id is ''"),
        ({"replicas": 2}, "replicas is 2; allowed: 1, 3 or 5"),
        ({"heartbeat_s": 1.5}, r"worker_ttl_s is 2.0; allowed: at least twice heartbeat_s \(1.5\)"),
        ({"queue_timeout_s": 601}, r"queue_timeout_s is 601.0; allowed: at most max_queue_timeout_s \(600.0\)"),
        ({"max_deadline_s": 60}, r"deadline_s is 600.0; allowed: at most max_deadline_s \(60.0\)"),
        ({"log_level": "loud"}, "log_level is 'loud'; allowed: debug, info, warning, error"),
    ],
)
def test_rules_between_keys(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(flags, environ={})


def test_a_file_that_cannot_be_read_or_parsed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="HEADRACE_CONFIG: cannot read /nowhere: No such file"):
        load(environ={"HEADRACE_CONFIG": "/nowhere"})
    with pytest.raises(ConfigError, match=r"HEADRACE_CONFIG: cannot read .*: Is a directory"):
        load(environ={"HEADRACE_CONFIG": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"headrace\.toml: .*line 1"):
        load(environ=config(tmp_path, "prefix = = 1\n"))
    (tmp_path / "latin.toml").write_bytes(b'prefix = "\xff"')
    with pytest.raises(ConfigError, match=r"latin\.toml: "):
        load(environ={"HEADRACE_CONFIG": str(tmp_path / "latin.toml")})


def test_a_long_value_is_not_echoed_at_length() -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ={"HEADRACE_QUEUE_LIMIT": "9" * 10_000})
    assert len(str(caught.value)) < 300


def test_describe_names_every_variable() -> None:
    rows = {variable: (default, allowed) for variable, default, allowed in describe()}
    assert set(rows) == {ENV_PREFIX + name.upper() for name in Settings.__struct_fields__}
    assert rows["HEADRACE_QUEUE_LIMIT"] == ("10000", "a whole number from 1 to 10000000")
    assert rows["HEADRACE_WORKER_ID"] == ("", "text")
    assert rows["HEADRACE_STATE_DIR"][0] == "user state dir"


@given(st.sampled_from(sorted(Settings.__struct_fields__)), st.text(max_size=20))
def test_any_text_is_taken_or_refused_by_name(key: str, text: str) -> None:
    refusal = ""
    try:
        assert isinstance(load(environ={ENV_PREFIX + key.upper(): text}), Settings)
    except ConfigError as error:
        refusal = str(error)
    assert not refusal or (key in refusal.lower() and "allowed:" in refusal)
