"""The broker: its version, JetStream and its limits, what it permits, and its system account."""

from collections.abc import Iterator, Mapping
from typing import Final

from headrace.bus.connection import HEADER_ROOM_BYTES
from headrace.bus.provision import MINIMUM_SERVER, deployment_streams
from headrace.bus.server import MAX_PAYLOAD_BYTES
from headrace.bus.survey import Account
from headrace.doctor.facts import Facts, Known, Unread
from headrace.doctor.finding import Check, Finding, Severity, listed
from headrace.errors import BrokerDeniedError, BrokerError, BrokerTlsError

__all__ = ["judge_broker", "judge_unreachable"]

_SMALLEST_PAYLOAD: Final = 64 * 1024
"""Below it not even a heartbeat of a busy worker passes."""
_MIB: Final = 1024 * 1024
_SMALLEST_STORAGE: Final = 256 * _MIB
_NEARLY: Final = 0.9
_FULL: Final = 0.99


def judge_unreachable(error: BrokerError) -> Finding:
    """What keeps this machine from the broker, by the error of connecting."""
    found = str(error)
    if isinstance(error, BrokerDeniedError):
        return Finding(
            id=Check.CREDENTIAL,
            severity="error",
            found=found,
            remedy="HEADRACE_NATS_CREDENTIALS=…/credentials/operator.nk; new ones: `headrace provision --secure`, "
            "then let the broker reload",
        )
    if isinstance(error, BrokerTlsError):
        return Finding(
            id=Check.TLS,
            severity="error",
            found=found,
            remedy="HEADRACE_NATS_URL=tls://HOST:4222 HEADRACE_NATS_TLS_CA=ca.pem",
        )
    return Finding(
        id=Check.BROKER,
        severity="error",
        found=found,
        remedy="headrace up, or HEADRACE_NATS_URL=nats://HOST:4222",
    )


def judge_broker(facts: Facts) -> Iterator[Finding]:
    """Findings about the broker and the connection to it."""
    broker = facts.broker
    yield Finding(
        id=Check.BROKER,
        severity="ok",
        found=f"{broker.name or 'a NATS server'} answers at {broker.url} within {broker.round_trip_s * 1000:.1f} ms",
    )
    yield _version(facts)
    yield _max_payload(broker.max_payload_bytes)
    if not facts.has_jetstream:
        yield Finding(
            id=Check.JETSTREAM,
            severity="error",
            found="the server runs without JetStream, or this user's account has none",
            remedy="add `jetstream { store_dir: DIR }` to nats-server.conf (and `jetstream: enabled` to the account)",
        )
    elif isinstance(facts.account, Known):
        yield Finding(
            id=Check.JETSTREAM,
            severity="ok",
            found=f"JetStream holds {facts.account.value.streams} streams, {_size(facts.account.value.storage)}",
        )
        yield from _limits(facts, facts.account.value)
    yield from _unread(facts)
    yield from _system_account(facts)


def _version(facts: Facts) -> Finding:
    broker, (major, minor) = facts.broker, MINIMUM_SERVER
    if broker.numbers < MINIMUM_SERVER:
        return Finding(
            id=Check.BROKER_VERSION,
            severity="error",
            found=f"the NATS server is {broker.version}; Headrace needs {major}.{minor} or newer",
            remedy=f"upgrade nats-server to {major}.{minor} or newer",
        )
    return Finding(id=Check.BROKER_VERSION, severity="ok", found=f"the NATS server is {broker.version}")


def _max_payload(size_bytes: int) -> Finding:
    found = f"the broker takes messages of {size_bytes:,} bytes"
    if size_bytes >= MAX_PAYLOAD_BYTES:
        return Finding(id=Check.MAX_PAYLOAD, severity="ok", found=found)
    body_bytes = max(0, size_bytes - HEADER_ROOM_BYTES)
    return Finding(
        id=Check.MAX_PAYLOAD,
        severity="error" if size_bytes < _SMALLEST_PAYLOAD else "warning",
        found=f"{found}: requests and answers of more than {body_bytes:,} bytes are refused",
        remedy=f"max_payload: {MAX_PAYLOAD_BYTES} in nats-server.conf",
    )


def _limits(facts: Facts, account: Account) -> Iterator[Finding]:
    tier = account.tier(facts.settings.replicas)
    limits = tier.limits
    num_before = 0
    if limits.max_bytes_required:
        num_before += 1
        yield _limit("the account lets no stream be made without max_bytes, and Headrace makes them so", "error")
    num_missing = sum(stream.is_missing for stream in facts.streams)
    num_needed = len(deployment_streams(facts.names, facts.settings)) + 1
    if 0 <= limits.max_streams < tier.streams + num_missing or 0 <= limits.max_streams < num_needed:
        num_before += 1
        yield _limit(
            f"the account may have {limits.max_streams} streams; it has {tier.streams}, and {num_missing} of "
            f"Headrace's are missing ({num_needed - 1} and one for each model are needed)",
            "error",
        )
    if 0 <= limits.max_storage < _SMALLEST_STORAGE:
        num_before += 1
        yield _limit(f"the account may store {_size(limits.max_storage)} in files", "warning")
    for what, used, limit in (
        ("of storage", tier.storage, limits.max_storage),
        ("of memory", tier.memory, limits.max_memory),
        ("streams", tier.streams, limits.max_streams),
        ("consumers", tier.consumers, limits.max_consumers),
    ):
        if limit > 0 and used >= _NEARLY * limit:
            num_before += 1
            figures = f"{_size(used)} of {_size(limit)}" if what.startswith("of ") else f"{used} of {limit}"
            yield _limit(
                f"the account uses {figures} {what.removeprefix('of ')}",
                "error" if used >= _FULL * limit else "warning",
            )
    if not num_before:
        yield Finding(id=Check.JETSTREAM_LIMITS, severity="ok", found="no limit of the account is near")


def _limit(found: str, severity: Severity) -> Finding:
    return Finding(
        id=Check.JETSTREAM_LIMITS,
        severity=severity,
        found=found,
        remedy="raise the account's limits in nats-server.conf: accounts { NAME { jetstream { max_file, max_mem, "
        "max_streams, max_consumers } } }",
    )


def _unread(facts: Facts) -> Iterator[Finding]:
    """What could not be asked, in one finding for what is not permitted and one for what got no answer."""
    if not facts.has_jetstream:
        return
    asked: dict[str, object] = {
        "limits of the account": facts.account,
        "names of streams": facts.stream_names,
        "parts": facts.parts,
        "workers": facts.beats,
        "dead letters": facts.num_dead,
        **{f"stream {stream.name}": stream.found for stream in facts.streams},
        **{f"consumers of {model}": found for model, found in facts.consumers.items()},
    }
    if facts.is_provisioned:
        asked |= {"queues": facts.overview, "configuration": facts.entries, "waiting requests": facts.waiting}
        asked |= {"replicas": facts.instances}
    unread = {what: found for what, found in asked.items() if isinstance(found, Unread)}
    denied = [what for what, found in unread.items() if found.is_denied]
    if denied:
        yield Finding(
            id=Check.PERMISSIONS,
            severity="warning",
            found=f"this credential may not ask about: {listed(denied)}; that is not checked",
            remedy="HEADRACE_NATS_CREDENTIALS=…/credentials/operator.nk",
        )
    elif not unread:
        yield Finding(id=Check.PERMISSIONS, severity="ok", found="this credential may ask all that is checked")
    lost = _without_missing(facts, {what: found.reason for what, found in unread.items() if not found.is_denied})
    if lost:
        what, reason = next(iter(lost.items()))
        yield Finding(
            id=Check.UNANSWERED,
            severity="error",
            found=f"not checked, since no answer came: {listed(lost)} ({what}: {reason})",
            remedy="look at the broker's own health (its log, `nats server report jetstream`), then run this again",
        )


def _without_missing(facts: Facts, lost: Mapping[str, str]) -> dict[str, str]:
    """What is told by another finding already is left out: a bucket that is missing, a stream without a leader."""
    missing = {stream.name for stream in facts.streams if stream.is_missing}
    explained = {
        "workers": f"KV_{facts.names.workers_bucket}",
        "queues": f"KV_{facts.names.workers_bucket}",
        "configuration": f"KV_{facts.names.config_bucket}",
        "replicas": f"KV_{facts.names.instances_bucket}",
        "dead letters": facts.names.dead_stream,
        "waiting requests": facts.names.log_stream(0),
    }
    return {
        what: reason
        for what, reason in lost.items()
        if explained.get(what) not in missing and not what.startswith("stream ")
    }


def _system_account(facts: Facts) -> Iterator[Finding]:
    without = "dead workers are noticed after HEADRACE_WORKER_TTL_S (2 s) instead of milliseconds"
    monitors = [part for part in facts.own_parts if part.name == "headrace-monitor" and "notices" in part.told]
    deaf = [part for part in monitors if part.told["notices"] == "no"]
    remedy = (
        "HEADRACE_NATS_SYSTEM_URL=nats://USER:PASSWORD@HOST:4222 with a user of the system account, for each monitor"
    )
    if facts.settings.is_secured:
        remedy = "HEADRACE_NATS_SYSTEM_CREDENTIALS=…/credentials/monitor-system.nk for each monitor"
    if deaf:
        found = f"{len(deaf)} of {len(monitors)} monitors have no system account: {without}"
    elif facts.system.trouble:
        found = f"the system account that is set here does not work ({facts.system.trouble}); with it so, {without}"
    elif not monitors and not facts.system.is_set:
        if not isinstance(facts.parts, Known):
            return  # a monitor that may be there may have one
        found = f"no system account is set: {without}"
    else:
        tested = "notices of disconnects come" if facts.system.is_set else f"{len(monitors)} monitors have one"
        yield Finding(id=Check.SYSTEM_ACCOUNT, severity="ok", found=tested)
        return
    yield Finding(id=Check.SYSTEM_ACCOUNT, severity="warning", found=found, remedy=remedy)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.1f} MiB"
