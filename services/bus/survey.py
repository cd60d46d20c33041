"""What the broker says of itself, the deployment's streams and its parts. Reads only, each with a timeout."""

import asyncio
import contextlib
import time
from collections.abc import Collection
from typing import Any, Final

import msgspec
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from headrace.bus.batchget import multi_last
from headrace.bus.clock import parse_time
from headrace.bus.connection import ERR_STREAM_NOT_FOUND, ApiRefused, Bus
from headrace.errors import BrokerError, BrokerUnavailableError
from headrace.schemas import subjects
from headrace.schemas.workers import Heartbeat, decode_heartbeat

__all__ = [
    "Account",
    "Beat",
    "Limits",
    "Part",
    "Replica",
    "Server",
    "StreamInfo",
    "ask_parts",
    "list_streams",
    "read_account",
    "read_beats",
    "read_stream",
    "server_of",
]

_PARTS_WITHIN_S: Final = 2.0
_QUIET_S: Final = 0.3
"""Parts on one network answer together; after so long without one more, those that are there have answered."""
_PING: Final = "$SRV.PING"
_NOBODY: Final = "503"
_MAX_PARTS: Final = 10_000
_MAX_PAGES: Final = 1000


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """The server that is connected to, as it introduced itself. `cluster` is empty where it is in none.

    `num_addresses` are those that it tells clients: one for each node, or more where a node has several.
    """

    version: str
    numbers: tuple[int, int]
    max_payload_bytes: int
    name: str = ""
    cluster: str = ""
    num_addresses: int = 0


class Limits(msgspec.Struct, frozen=True):
    """Limits of a JetStream account; -1 is none, sizes are bytes."""

    max_memory: int = -1
    max_storage: int = -1
    max_streams: int = -1
    max_consumers: int = -1
    max_bytes_required: bool = False


class _Tier(msgspec.Struct, frozen=True):
    memory: int = 0
    storage: int = 0
    streams: int = 0
    consumers: int = 0
    limits: Limits = Limits()


class Account(_Tier, frozen=True):
    """What a JetStream account uses, and may. `tiers` are by replicas (`R1`, `R3`), where the account has any."""

    tiers: dict[str, _Tier] = {}

    def tier(self, replicas: int) -> _Tier:
        """The figures that hold for streams with so many replicas."""
        return self.tiers.get(f"R{replicas}", self)


class Replica(msgspec.Struct, frozen=True):
    """A follower of a stream's leader; `lag` is in entries of its log."""

    name: str
    current: bool = False
    offline: bool = False
    lag: int = 0


class _Cluster(msgspec.Struct, frozen=True):
    leader: str = ""
    replicas: tuple[Replica, ...] = ()


class _State(msgspec.Struct, frozen=True):
    messages: int = 0


class _InfoReply(msgspec.Struct, frozen=True):
    config: dict[str, Any]
    state: _State = _State()
    cluster: _Cluster = _Cluster()
    ts: str = ""


class StreamInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A stream as its leader describes it.

    `ahead_s` is how far the leader's clock is ahead of ours, right to half of `round_trip_s`; None where it does not
    say.
    """

    config: dict[str, Any]
    num_messages: int = 0
    leader: str = ""
    replicas: tuple[Replica, ...] = ()
    ahead_s: float | None = None
    round_trip_s: float = 0.0


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's last heartbeat: its age by the broker's clock, and how long its key lives after it."""

    beat: Heartbeat
    age_s: float = 0.0
    ttl_s: float | None = None


class Part(msgspec.Struct, frozen=True):
    """A part as it answers the NATS services protocol."""

    name: str
    id: str
    version: str = ""
    metadata: dict[str, str] | None = None

    @property
    def told(self) -> dict[str, str]:
        """What it says about itself."""
        return self.metadata or {}


class _NamesPage(msgspec.Struct, frozen=True):
    total: int = 0
    streams: tuple[str, ...] | None = None


def server_of(bus: Bus) -> Server:
    """What is known without asking."""
    version = bus.nc.connected_server_version
    told = bus.nc._server_info
    return Server(
        version=str(told.get("version", version)),
        numbers=(version.major, version.minor),
        max_payload_bytes=int(bus.nc.max_payload),
        name=str(told.get("server_name", "")),
        cluster=str(told.get("cluster", "")),
        num_addresses=len(set(told.get("connect_urls") or ())),
    )


async def read_account(bus: Bus) -> Account:
    """Raises NotProvisionedError where there is no JetStream, BrokerUnavailableError."""
    try:
        return msgspec.json.decode(await bus.api("INFO"), type=Account)
    except ApiRefused as refused:
        raise BrokerUnavailableError(f"JetStream is not usable: {refused}") from None


async def list_streams(bus: Bus) -> list[str]:
    """Names of all streams of the account. Raises BrokerError."""
    names: list[str] = []
    for _ in range(_MAX_PAGES):
        try:
            data = await bus.api("STREAM.NAMES", {"offset": len(names)})
        except ApiRefused as refused:
            raise BrokerUnavailableError(f"cannot list the streams: {refused}") from None
        page = msgspec.json.decode(data, type=_NamesPage)
        names += page.streams or ()
        if not page.streams or len(names) >= page.total:
            break
    return names


async def read_stream(bus: Bus, name: str) -> StreamInfo | None:
    """None where there is no such stream. Raises BrokerError, also where nobody leads it."""
    asked_at, asked_by = time.monotonic(), time.time()
    try:
        data = await bus.api(f"STREAM.INFO.{name}")
    except ApiRefused as refused:
        if refused.err_code == ERR_STREAM_NOT_FOUND:
            return None
        raise BrokerUnavailableError(f"stream {name}: {refused}") from None
    round_trip_s = time.monotonic() - asked_at
    bus.clock.learn(data, asked_at=asked_at, answered_at=asked_at + round_trip_s)
    info = msgspec.json.decode(data, type=_InfoReply)
    server_time = parse_time(info.ts)
    return StreamInfo(
        config=info.config,
        num_messages=info.state.messages,
        leader=info.cluster.leader,
        replicas=info.cluster.replicas,
        ahead_s=server_time - asked_by - round_trip_s / 2 if server_time is not None else None,
        round_trip_s=round_trip_s,
    )


async def read_beats(bus: Bus) -> list[Beat]:
    """The last beats of live workers, by id. Raises BrokerUnavailableError."""
    live: list[Beat] = []
    bucket = bus.names.workers_bucket
    for message in await multi_last(bus, f"KV_{bucket}", f"$KV.{bucket}.>"):
        headers = message.headers or {}
        beat = decode_heartbeat(message.data) if message.data else None
        if beat is not None and not beat.is_tombstone:
            stored_at = parse_time(headers.get(subjects.HDR_TIMESTAMP, ""))
            age_s = max(0.0, bus.clock.now() - stored_at) if stored_at is not None else 0.0
            live.append(Beat(beat=beat, age_s=age_s, ttl_s=_ttl_s(headers.get(subjects.HDR_TTL, ""))))
    return sorted(live, key=lambda each: each.beat.worker)


async def ask_parts(bus: Bus, *, wanted: Collection[str]) -> list[Part]:
    """Every part that answers; waits longer while one of the names in `wanted` is missing.

    Of several deployments in one account all are among them: routers, monitors and gateways tell their `prefix`. Raises
    BrokerUnavailableError where the broker is mute or does not permit it.
    """
    inbox = bus.new_inbox()
    subscription = await bus.subscribe(inbox)
    found: list[Part] = []
    try:
        await bus.publish(_PING, reply=inbox)
        until = asyncio.get_running_loop().time() + _PARTS_WITHIN_S
        while len(found) < _MAX_PARTS:
            left_s = until - asyncio.get_running_loop().time()
            is_complete = {part.name for part in found} >= set(wanted)
            message = await bus.next_message(subscription, min(left_s, _QUIET_S) if is_complete else left_s)
            if message is None and not is_complete:
                await bus.flush()  # whether nobody answers, or the broker does not
                if not found and (denial := bus.denial_of(_PING)) is not None:
                    raise denial
            if message is None or (message.headers or {}).get("Status") == _NOBODY:
                return found
            if (part := _part(message)) is not None:
                found.append(part)
        return found
    finally:
        with contextlib.suppress(NatsError, BrokerError):  # the connection may be closed by now
            await subscription.unsubscribe()


def _part(message: Msg) -> Part | None:
    """None for an answer that is none, as from a broker that says that nobody listens."""
    try:
        return msgspec.json.decode(message.data, type=Part)
    except (msgspec.DecodeError, RecursionError):
        return None


def _ttl_s(text: str) -> float | None:
    text = text.removesuffix("s")
    return float(text) if text.isascii() and text.isdigit() else None
