"""Streams and buckets: there, with the settings that provisioning gives them, replicated, led, and Headrace's alone."""

import json
from collections.abc import Iterator
from typing import Final

from headrace.bus.consumers import is_own
from headrace.bus.provision import Difference, differences
from headrace.doctor.facts import Facts, Known, StreamFacts, Unread, value_of
from headrace.doctor.finding import Check, Finding, counted, listed

__all__ = ["judge_streams"]

_NODES_FOR_REPLICAS: Final = 3
_TUNED: Final = frozenset({"num_replicas", "duplicate_window", "max_consumers"})
"""Settings that bound or copy; a stream with others of them works."""
_MAX_SHOWN_CHARS: Final = 60


def judge_streams(facts: Facts) -> Iterator[Finding]:
    """Findings about what the broker stores."""
    if not facts.streams:
        return
    yield from _provisioned(facts)
    yield from _settings(facts)
    yield from _replicas(facts)
    yield from _leaders(facts)
    yield from _foreign(facts)


def _provisioned(facts: Facts) -> Iterator[Finding]:
    missing = [stream.name for stream in facts.streams if stream.is_missing]
    num_there = sum(stream.info is not None for stream in facts.streams)
    if not missing:
        if num_there:
            found = f"{counted(num_there, 'stream')} and buckets of the prefix {facts.settings.prefix} are there"
            yield Finding(id=Check.PROVISIONED, severity="ok", found=found)
        return
    others = _other_prefixes(facts)
    also = f"; there are those of {listed(others)}: is HEADRACE_PREFIX right?" if others else ""
    yield Finding(
        id=Check.PROVISIONED,
        severity="error",
        found=f"{len(missing)} of {len(facts.streams)} streams and buckets of the prefix {facts.settings.prefix} are "
        f"missing: {listed(missing)}{'' if facts.is_provisioned else also}",
        remedy="headrace provision",
    )


def _other_prefixes(facts: Facts) -> list[str]:
    """Prefixes, as streams carry them, of other deployments on the broker."""
    tail = "_LOG_0"
    return sorted(name.removesuffix(tail) for name in value_of(facts.stream_names, []) if name.endswith(tail))


def _settings(facts: Facts) -> Iterator[Finding]:
    num_wrong = 0
    for stream in facts.streams:
        if stream.info is None:
            continue
        wrong = differences(stream.info.config, stream.wanted)
        if not wrong:
            continue
        num_wrong += 1
        if any(each.key == "subjects" for each in wrong):
            yield Finding(
                id=Check.STREAM_SETTINGS,
                severity="error",
                found=f"stream {stream.name} is another deployment's: {_shown(wrong)}",
                remedy="HEADRACE_PREFIX=PREFIX, one whose upper case with _ for dots nobody else has",
            )
            continue
        is_grave = any(not _is_tuned(stream, each.key) for each in wrong)
        yield Finding(
            id=Check.STREAM_SETTINGS,
            severity="error" if is_grave else "warning",
            found=f"stream {stream.name}: {_shown(wrong)}, by the settings here",
            remedy="headrace provision (with the settings that the parts have)",
        )
    if not num_wrong and any(stream.info is not None for stream in facts.streams):
        yield Finding(id=Check.STREAM_SETTINGS, severity="ok", found="their settings are those that provisioning makes")


def _is_tuned(stream: StreamFacts, key: str) -> bool:
    return key in _TUNED or (stream.model is not None and key == "max_msgs")


def _shown(wrong: list[Difference]) -> str:
    return "; ".join(f"{each.key} is {_short(each.has)}, should be {_short(each.wanted)}" for each in wrong)


def _short(value: object) -> str:
    text = json.dumps(value) if value is not None else "not set"
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"


def _replicas(facts: Facts) -> Iterator[Finding]:
    infos = [stream.info for stream in facts.streams if stream.info is not None]
    if not facts.broker.cluster or not infos:
        return
    nodes = {info.leader for info in infos} | {each.name for info in infos for each in info.replicas}
    nodes = (nodes | {facts.broker.name}) - {""}
    single = [
        stream.name
        for stream in facts.streams
        if stream.info is not None and stream.info.config.get("num_replicas") == 1
    ]
    num_nodes = max(len(nodes), facts.broker.num_addresses)
    if single and num_nodes >= _NODES_FOR_REPLICAS:
        yield Finding(
            id=Check.REPLICAS,
            severity="warning",
            found=f"{len(single)} of {len(infos)} streams are on one node only of the cluster {facts.broker.cluster} "
            f"with {num_nodes} addresses, and are lost with it: {listed(single)}",
            remedy="HEADRACE_REPLICAS=3 headrace provision, and HEADRACE_REPLICAS=3 for all parts",
        )
    else:
        held = f"{counted(len(nodes), 'node')} of the cluster {facts.broker.cluster}"
        yield Finding(id=Check.REPLICAS, severity="ok", found=f"the streams are on {held}")


def _leaders(facts: Facts) -> Iterator[Finding]:
    unserved = {
        stream.name: stream.found.reason
        for stream in facts.streams
        if isinstance(stream.found, Unread) and not stream.found.is_denied
    }
    for stream in facts.streams:
        if stream.info is not None and facts.broker.cluster and not stream.info.leader:
            unserved[stream.name] = "it has no leader"
    if unserved:
        name, reason = next(iter(unserved.items()))
        yield Finding(
            id=Check.STREAM_LEADER,
            severity="error",
            found=f"{len(unserved)} of {len(facts.streams)} streams are not served: {listed(unserved)} "
            f"({name}: {reason})",
            remedy=f"start the nodes that are down; nats stream info {name}; nats server report jetstream",
        )
    behind = {
        f"{stream.name} on {replica.name} ({'offline' if replica.offline else f'{replica.lag} behind'})": stream.name
        for stream in facts.streams
        if stream.info is not None
        for replica in stream.info.replicas
        if replica.offline or not replica.current
    }
    if behind:
        yield Finding(
            id=Check.STREAM_LEADER,
            severity="warning",
            found=f"{counted(len(behind), 'replica')} not current: {listed(behind)}",
            remedy=f"start the nodes that are down; nats stream info {next(iter(behind.values()))}",
        )
    if not unserved and not behind and any(stream.info is not None for stream in facts.streams):
        yield Finding(id=Check.STREAM_LEADER, severity="ok", found="all streams are served, their replicas current")


def _foreign(facts: Facts) -> Iterator[Finding]:
    num_found = num_foreign = 0
    for model, found in facts.consumers.items():
        stream = facts.names.jobs_stream(model)
        for consumer in found.value if isinstance(found, Known) else ():
            num_found += 1
            if is_own(facts.names, model, consumer):
                continue
            num_foreign += 1
            yield Finding(
                id=Check.FOREIGN_CONSUMER,
                severity="error",
                found=f"consumer {consumer.name} of stream {stream} is none of Headrace's and takes jobs "
                f"({listed(consumer.filters)})",
                remedy=f"nats consumer rm {stream} {consumer.name}",
            )
    if num_found and not num_foreign:
        yield Finding(
            id=Check.FOREIGN_CONSUMER, severity="ok", found=f"{counted(num_found, 'consumer')}, all Headrace's own"
        )
