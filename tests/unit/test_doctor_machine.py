"""What `headrace doctor` sees and says of the machine it runs on, and how findings are told."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.doctor.facts import MachineFacts, OpenSecret
from headrace.doctor.finding import Check, Finding, counted, has_error, listed, ordered
from headrace.doctor.judge_machine import judge_machine
from headrace.doctor.machine import look_at_machine
from headrace.settings import Settings
from tests.doctored import severity_of

ROOT = Path(__file__).resolve().parents[2]


def machine(**changes: Any) -> MachineFacts:
    well = {"state_dir": "d", "has_own_broker": True, "free_bytes": 9 << 30, "total_bytes": 10 << 30}
    return MachineFacts(**{**well, "max_open_files": 65536, **changes})


@pytest.mark.parametrize(
    ("changes", "check", "severity"),
    [
        ({"state_dir_trouble": "d cannot be written"}, Check.STATE_DIR, "error"),
        ({"state_dir_trouble": "d cannot be written", "has_own_broker": False}, Check.STATE_DIR, "warning"),
        ({"free_bytes": 1 << 20}, Check.DISK, "error"),
        ({"free_bytes": 1 << 20, "has_own_broker": False}, Check.DISK, "warning"),
        ({"free_bytes": 600 << 20}, Check.DISK, "warning"),
        ({"free_bytes": 600 << 20, "has_own_broker": False}, Check.DISK, "ok"),
        ({"max_open_files": 1024}, Check.OPEN_FILES, "warning"),
        ({"max_open_files": None}, Check.OPEN_FILES, "ok"),
        ({"open_secrets": (OpenSecret("HEADRACE_NATS_CREDENTIALS", "f", 0o644),)}, Check.SECRETS, "warning"),
        ({}, Check.SECRETS, None),
        ({"free_bytes": None}, Check.DISK, None),
    ],
)
def test_troubles_of_this_machine(changes: dict[str, Any], check: Check, severity: str | None) -> None:
    findings = judge_machine(machine(**changes))
    assert severity_of(findings, check) == severity
    assert all(each.remedy for each in findings if each.severity != "ok")


def test_looking_at_a_machine_makes_nothing(tmp_path: Path) -> None:
    seen = look_at_machine(Settings(state_dir=str(tmp_path / "not" / "there")), {})
    assert (seen.state_dir_trouble, list(tmp_path.iterdir())) == ("", [])
    assert seen.free_bytes is not None
    (tmp_path / "file").write_text("")
    assert "no directory" in look_at_machine(Settings(state_dir=str(tmp_path / "file" / "x")), {}).state_dir_trouble


def test_files_with_secrets_that_others_may_read_are_seen(tmp_path: Path) -> None:
    key, config = tmp_path / "operator.nk", tmp_path / "headrace.toml"
    key.write_text("S")
    config.write_text('nats_url = "nats://u:p@h:4222"\n')
    settings = Settings(nats_credentials=str(key), state_dir=str(tmp_path))
    for mode, number in ((0o644, 2), (0o640, 0)):
        os.chmod(key, mode)
        os.chmod(config, mode)
        assert len(look_at_machine(settings, {"HEADRACE_CONFIG": str(config)}).open_secrets) == number
    config.write_text("grace_s = 5\n")
    os.chmod(config, 0o644)
    assert look_at_machine(settings, {"HEADRACE_CONFIG": str(config)}).open_secrets == ()


# findings


def test_findings_are_told_worst_first() -> None:
    found = [
        Finding(id=Check.CLOCK, severity="ok", found=""),
        Finding(id=Check.WORKERS, severity="error", found=""),
        Finding(id=Check.DISK, severity="warning", found=""),
        Finding(id=Check.BROKER, severity="error", found=""),
    ]
    assert [each.id for each in ordered(found)] == [Check.BROKER, Check.WORKERS, Check.DISK, Check.CLOCK]
    assert has_error(found)
    assert not has_error(found[2:3])


def test_names_and_numbers_are_told_in_bounds() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed(str(number) for number in range(9)) == "0, 1, 2, 3, 4 and 4 more"
    assert (counted(1, "worker"), counted(2000, "worker")) == ("1 worker", "2,000 workers")


def test_the_document_lists_every_check_and_no_other() -> None:
    text = (ROOT / "docs/deployment.md").read_text()
    section = text.partition("## What is wrong")[2].partition("\n## ")[0]
    listed_there = re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE)
    assert listed_there == [check.value for check in Check]
