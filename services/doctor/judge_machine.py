"""This machine: state directory, disk, open files, and who may read its secrets."""

from typing import Final

from headrace.doctor.facts import MachineFacts
from headrace.doctor.finding import Check, Finding, Severity, listed

__all__ = ["judge_machine"]

_MIB: Final = 1024 * 1024
_LITTLE_BYTES: Final = 256 * _MIB
_AMPLE_BYTES: Final = 1024 * _MIB
_GATEWAY_FILES: Final = 5000
"""A gateway holds up to 4,096 requests open, each by a socket, beside its other files."""


def judge_machine(machine: MachineFacts) -> list[Finding]:
    """Findings about this machine; where the broker is elsewhere its own directory matters less."""
    return [_state_dir(machine), *_disk(machine), _open_files(machine), *_secrets(machine)]


def _state_dir(machine: MachineFacts) -> Finding:
    if machine.state_dir_trouble:
        return Finding(
            id=Check.STATE_DIR,
            severity="error" if machine.has_own_broker else "warning",
            found=f"the state directory {machine.state_dir} cannot be used: {machine.state_dir_trouble}",
            remedy="HEADRACE_STATE_DIR=DIR, a directory that this user may write",
        )
    return Finding(id=Check.STATE_DIR, severity="ok", found=f"{machine.state_dir} can be written")


def _disk(machine: MachineFacts) -> list[Finding]:
    free, total = machine.free_bytes, machine.total_bytes
    if free is None or total is None:
        return []
    found = f"{free // _MIB:,} of {total // _MIB:,} MiB are free below {machine.state_dir}"
    remedy = "make room, or set HEADRACE_STATE_DIR to a directory on another disk"
    if free < _LITTLE_BYTES:
        severity: Severity = "error" if machine.has_own_broker else "warning"
        return [Finding(id=Check.DISK, severity=severity, found=found, remedy=remedy)]
    if free < _AMPLE_BYTES and machine.has_own_broker:
        return [Finding(id=Check.DISK, severity="warning", found=found, remedy=remedy)]
    return [Finding(id=Check.DISK, severity="ok", found=found)]


def _open_files(machine: MachineFacts) -> Finding:
    limit = machine.max_open_files
    if limit is not None and limit < _GATEWAY_FILES:
        return Finding(
            id=Check.OPEN_FILES,
            severity="warning",
            found=f"a process may open {limit} files here; a gateway takes up to {_GATEWAY_FILES}",
            remedy="LimitNOFILE=65536 in the gateway's unit, or ulimit -Hn 65536 before it starts",
        )
    return Finding(
        id=Check.OPEN_FILES,
        severity="ok",
        found="a process may open any number of files" if limit is None else f"a process may open {limit:,} files",
    )


def _secrets(machine: MachineFacts) -> list[Finding]:
    if not machine.open_secrets:
        return []
    files = listed(f"{each.path} ({each.setting}, mode {each.mode:03o})" for each in machine.open_secrets)
    paths = " ".join(each.path for each in machine.open_secrets)
    return [
        Finding(
            id=Check.SECRETS,
            severity="warning",
            found=f"every user of this machine may use secrets in {files}",
            remedy=f"chmod o= {paths}",
        )
    ]
