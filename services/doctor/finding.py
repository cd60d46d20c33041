"""A finding: what a check found, how bad it is, and what to do about it."""

import enum
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

__all__ = ["SEVERITIES", "Check", "Finding", "Severity", "counted", "has_error", "listed", "ordered"]

Severity = Literal["error", "warning", "ok"]
SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "ok")
"""Worst first."""

_MAX_LISTED: Final = 5


class Check(enum.StrEnum):
    """The stable id of each check; `docs/deployment.md` says what each means."""

    SETTINGS = "settings"
    SECRETS = "secrets"
    STATE_DIR = "state-dir"
    DISK = "disk"
    OPEN_FILES = "open-files"
    BROKER = "broker"
    CREDENTIAL = "credential"
    TLS = "tls"
    BROKER_VERSION = "broker-version"
    JETSTREAM = "jetstream"
    JETSTREAM_LIMITS = "jetstream-limits"
    MAX_PAYLOAD = "max-payload"
    PERMISSIONS = "permissions"
    UNANSWERED = "unanswered"
    SYSTEM_ACCOUNT = "system-account"
    CLOCK = "clock"
    NODE_CLOCKS = "node-clocks"
    ROUTER_CLOCKS = "router-clocks"
    PROVISIONED = "provisioned"
    STREAM_SETTINGS = "stream-settings"
    REPLICAS = "replicas"
    STREAM_LEADER = "stream-leader"
    FOREIGN_CONSUMER = "foreign-consumer"
    ROUTER = "router"
    MONITOR = "monitor"
    GATEWAY = "gateway"
    VERSIONS = "versions"
    WORKERS = "workers"
    WORKER_STATE = "worker-state"
    WORKER_CAPACITY = "worker-capacity"
    WORKER_CONCURRENCY = "worker-concurrency"
    WORKER_HEARTBEAT = "worker-heartbeat"
    WORKER_SILENT = "worker-silent"
    WORKER_LOST = "worker-lost"
    HOSTS = "hosts"
    GENERATION_FAILED = "generation-failed"
    WORKERS_MISSING = "workers-missing"
    QUEUE_UNSERVED = "queue-unserved"
    QUEUE_PAUSED = "queue-paused"
    QUEUE_FULL = "queue-full"
    EXPIRING = "expiring"
    DEAD_LETTERS = "dead-letters"
    CONFIG_KEY = "config-key"
    ALIAS_TARGET = "alias-target"
    FALLBACK = "fallback"
    POOL = "pool"
    TENANT_MODEL = "tenant-model"
    LIMITS = "limits"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. `found` has the figures, `remedy` a command or setting to type; empty where nothing is to do."""

    id: Check
    severity: Severity
    found: str
    remedy: str = ""


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Worst first, then in the order of the checks."""
    checks = list(Check)
    return sorted(findings, key=lambda each: (SEVERITIES.index(each.severity), checks.index(each.id)))


def has_error(findings: Iterable[Finding]) -> bool:
    """Whether any is worse than a warning."""
    return any(finding.severity == "error" for finding in findings)


def counted(number: int, noun: str) -> str:
    """A number and its noun: `1 worker`, `2,000 workers`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(names: Iterable[str]) -> str:
    """Names with commas; of many the first few, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - _MAX_LISTED} more" if len(every) > _MAX_LISTED else ""
    return ", ".join(every[:_MAX_LISTED]) + more
