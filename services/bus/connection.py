"""One connection to the broker, kept for as long as the process runs, and the two calls everything is built from."""

import asyncio
import contextlib
import logging
import math
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError, SlowConsumerError
from nats.errors import TimeoutError as NatsTimeoutError

from headrace.bus.clock import BrokerClock
from headrace.bus.credentials import connect_options
from headrace.bus.inbox import Inbox, give_inbox
from headrace.bus.steady import SteadyClient, honouring_cancel
from headrace.errors import (
    BrokerDeniedError,
    BrokerTlsError,
    BrokerUnavailableError,
    BrokerUnsuitableError,
    NotProvisionedError,
)
from headrace.schemas.subjects import SERVICE_INBOX_PREFIX, Names
from headrace.settings import Settings

__all__ = [
    "DEFAULT_PENDING",
    "HEADER_ROOM_BYTES",
    "ApiRefused",
    "Bus",
    "Message",
    "Pending",
    "Refused",
    "StoreResult",
    "Stored",
    "Subscription",
    "Unknown",
    "connect",
    "keep_clock",
]

log = logging.getLogger(__name__)

Message = Msg
"""A message as received, for callers of `subscribe`."""

# JetStream error codes, from the server's errors.json.
ERR_STREAM_NOT_FOUND: Final = 10059
ERR_CONSUMER_NOT_FOUND: Final = 10014
ERR_CONSUMER_NOT_UNIQUE: Final = frozenset({10099, 10100})
"""Another consumer of the work queue has an overlapping filter, or one of the two has none."""
ERR_MESSAGE_NOT_FOUND: Final = 10037
ERR_WRONG_LAST_SEQUENCE: Final = 10071
ERR_WRONG_LAST_SEQUENCE_CONSTANT: Final = 10164
ERR_STREAM_FULL: Final = 10077
ERR_SEQUENCE_NOT_FOUND: Final = 10043

ERR_TOO_LARGE: Final = 10054
HEADER_ROOM_BYTES: Final = 16_384
"""What headers of ours may take of a message; the rest is for its body."""

_LOST_RACE: Final = frozenset({ERR_WRONG_LAST_SEQUENCE, ERR_WRONG_LAST_SEQUENCE_CONSTANT})
_RECONNECT_WAIT_S: Final = 0.2
_SILENT_S: Final = 0.8
"""How long to wait for a broker without a word; one that is there answers much sooner."""
_PING_INTERVAL_S: Final = 5
_CLOCK_EVERY_S: Final = 60.0
_MAX_DENIALS: Final = 32
_UNAUTHORIZED: Final = "authorization violation"
_DENIAL: Final = "permissions violation"
_TLS_TROUBLE: Final = re.compile(r"\b(?:ssl|tls|certificate)\b", re.IGNORECASE)
_DROPPED: Final = ("reset by peer", "broken pipe", "unexpected eof")
_MAX_PENDING_MESSAGES: Final = 65_536
_MAX_PENDING_BYTES: Final = 32 * 1024 * 1024


class Stored(msgspec.Struct, frozen=True):
    """The broker stored the message, or had it already (`is_duplicate`)."""

    sequence: int
    is_duplicate: bool = False


class Refused(msgspec.Struct, frozen=True):
    """The broker refused the message; it is not stored."""

    err_code: int
    description: str

    @property
    def is_lost_race(self) -> bool:
        """Whether somebody else wrote first (compare-and-set)."""
        return self.err_code in _LOST_RACE

    @property
    def is_too_large(self) -> bool:
        """Whether the message is larger than the broker takes; it never will be stored."""
        return self.err_code == ERR_TOO_LARGE

    @property
    def is_full(self) -> bool:
        """Whether the stream's bound was reached."""
        return self.err_code == ERR_STREAM_FULL


class Unknown(msgspec.Struct, frozen=True):
    """No answer came: the message may be stored or not.

    `is_unserved`: nobody listens there now; the stream is missing, or has no leader.
    """

    reason: str
    is_unserved: bool = False


StoreResult = Stored | Refused | Unknown


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """What a subscription keeps for a reader that is slow; beyond either bound the newest messages are dropped."""

    messages: int = _MAX_PENDING_MESSAGES
    size_bytes: int = _MAX_PENDING_BYTES


DEFAULT_PENDING: Final = Pending()


class ApiRefused(Exception):  # an answer, not a fault; callers in `bus` turn it into one or into a value
    """The JetStream API answered with an error."""

    def __init__(self, err_code: int, description: str) -> None:
        super().__init__(f"{description} ({err_code})")
        self.err_code = err_code


class _PubAck(msgspec.Struct, frozen=True):
    seq: int = 0
    duplicate: bool = False
    error: "_ApiError | None" = None


class _ApiError(msgspec.Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _ApiReply(msgspec.Struct, frozen=True):
    error: _ApiError | None = None


class Bus:
    """A connection with the names and settings of its deployment. Made by `connect`.

    `url` is where it was connected to, credentials included, `inbox_prefix` where its inboxes are. It reconnects for
    ever. `closed` is set when the client library gave up for good (it does on some protocol errors): whoever runs the
    process must end it then, never live on silently.
    """

    def __init__(
        self, nc: Client, settings: Settings, url: str = "", *, inbox_prefix: str = SERVICE_INBOX_PREFIX
    ) -> None:
        self.nc = nc
        self.url = url
        self.inbox_prefix = inbox_prefix
        self.settings = settings
        self.names = Names(prefix=settings.prefix)
        self.clock = BrokerClock()
        self.closed = asyncio.Event()
        self._is_leaving = False
        self.on_reconnect: list[Callable[[], Awaitable[None]]] = []
        self.denials: deque[str] = deque(maxlen=_MAX_DENIALS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._is_leaving = True
        if self.is_connected:  # nobody answers otherwise, and we do not wait for a broker that may never come back
            with contextlib.suppress(BrokerUnavailableError):
                await self.flush()
        with contextlib.suppress(NatsError, OSError):  # the other end may be gone
            await self.nc.close()

    @property
    def is_connected(self) -> bool:
        """Whether the broker is reachable right now, as far as the client knows."""
        return bool(self.nc.is_connected)

    async def flush(self) -> None:
        """Return once the broker has had what was sent before. Raises BrokerUnavailableError where no answer comes."""
        try:
            async with asyncio.timeout(self.settings.request_timeout_s):
                await self.nc.flush()
        except (NatsError, TimeoutError, OSError) as error:
            raise BrokerUnavailableError(f"the broker does not answer: {error or type(error).__name__}") from None

    async def sync_clock(self) -> None:
        """Learn the broker's time; keeps what it knew where the broker does not tell."""
        asked_at = time.monotonic()
        try:
            answer = await self.api(f"STREAM.INFO.{self.names.log_stream(0)}")
        except (ApiRefused, BrokerUnavailableError, NotProvisionedError) as error:
            log.debug("the broker's time is not known: %s", error)
            return
        self.clock.learn(answer, asked_at=asked_at, answered_at=time.monotonic())

    @property
    def shown_url(self) -> str:
        """Where it was connected to, without what is secret."""
        return _without_secrets(self.url)

    @property
    def connection_id(self) -> str:
        """Server id and client id of the current connection, as the server's own notices name it; "" without one."""
        if not self.nc.is_connected or self.nc.client_id is None:
            return ""
        return f"{self.nc._server_info.get('server_id', '')}/{self.nc.client_id}"

    async def api(
        self, subject: str, payload: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> bytes:
        """One call of the JetStream API; returns the raw JSON answer.

        Raises ApiRefused for an error answer, NotProvisionedError where nobody serves the subject (stream missing or
        JetStream away), BrokerUnavailableError where no answer came in time.
        """
        data = msgspec.json.encode(payload) if payload is not None else b""
        message = await self.request(f"$JS.API.{subject}", data, timeout_s=timeout_s)
        error = msgspec.json.decode(message.data, type=_ApiReply).error
        if error is not None:
            raise ApiRefused(error.err_code, error.description)
        return message.data

    async def request(
        self, subject: str, data: bytes = b"", *, headers: dict[str, str] | None = None, timeout_s: float | None = None
    ) -> Msg:
        """One request and its first reply.

        Raises NotProvisionedError (no responders), BrokerUnavailableError (no answer; BrokerDeniedError where the
        broker said that it does not permit it).
        """
        timeout_s = timeout_s or self.settings.request_timeout_s
        try:
            return await honouring_cancel(self.nc.request(subject, data, timeout=timeout_s, headers=headers))
        except NoRespondersError:
            raise NotProvisionedError(f"nobody answers on {subject}") from None
        except (NatsTimeoutError, TimeoutError):
            if (denial := self.denial_of(subject)) is not None:
                raise denial from None
            raise BrokerUnavailableError(f"no answer on {subject} within {timeout_s:g} s") from None
        except (NatsError, OSError) as error:
            raise BrokerUnavailableError(f"{subject}: {error or type(error).__name__}") from None

    def denial_of(self, subject: str) -> BrokerDeniedError | None:
        """Why the broker lets no answer to a request come, as it said of late; None where it said nothing of it."""
        if self.is_denied(subject):
            return BrokerDeniedError(f"the broker does not permit {subject} to this credential")
        if any(f'"{self.inbox_prefix.lower()}.' in words for words in self.denials):
            return BrokerDeniedError(
                f"the broker does not permit inboxes below {self.inbox_prefix} to this credential: "
                "it is another part's, worker's or tenant's"
            )
        return None

    def is_denied(self, subject: str) -> bool:
        """Whether the broker said of late that this credential may not use the subject."""
        return any(f'"{subject.lower()}"' in words for words in self.denials)

    @property
    def max_data_bytes(self) -> int:
        """Largest message body that is sure to pass with headers of ours beside it."""
        return int(self.nc.max_payload) - HEADER_ROOM_BYTES

    async def store(
        self, subject: str, data: bytes, *, headers: Mapping[str, str], timeout_s: float | None = None
    ) -> StoreResult:
        """Publish to a stream and say what became of it. Never raises for what the broker or the network did."""
        if too_large := self._too_large(data, headers):
            return Refused(ERR_TOO_LARGE, too_large)
        try:
            reply = await self.request(subject, data, headers=dict(headers), timeout_s=timeout_s)
        except NotProvisionedError as error:
            return Unknown(str(error), is_unserved=True)
        except BrokerUnavailableError as error:
            return Unknown(str(error))
        try:
            ack = msgspec.json.decode(reply.data, type=_PubAck)
        except msgspec.DecodeError:
            return Unknown("the acknowledgement is not JSON")
        if ack.error is not None:
            return Refused(ack.error.err_code, ack.error.description)
        return Stored(ack.seq, ack.duplicate)

    async def publish(
        self, subject: str, data: bytes = b"", *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Publish without storing; at most once. While disconnected it waits in a bounded buffer."""
        if too_large := self._too_large(data, headers or {}):
            raise BrokerUnavailableError(f"cannot publish on {subject}: {too_large}")
        try:
            await self.nc.publish(subject, data, reply=reply, headers=dict(headers) if headers else None)
        except (NatsError, OSError) as error:
            raise BrokerUnavailableError(f"cannot publish on {subject}: {error or type(error).__name__}") from None

    async def subscribe(
        self,
        subject: str,
        *,
        queue: str = "",
        cb: Callable[[Msg], Awaitable[None]] | None = None,
        max_pending: Pending = DEFAULT_PENDING,
    ) -> Subscription:
        """Subscribe; what `cb` raises is logged and ends nothing.

        Raises BrokerUnavailableError on a closed connection.
        """
        try:
            subscription = await self.nc.subscribe(
                subject,
                queue=queue,
                cb=cb,
                pending_msgs_limit=max_pending.messages,
                pending_bytes_limit=max_pending.size_bytes,
            )
        except (NatsError, OSError) as error:
            raise BrokerUnavailableError(f"cannot subscribe to {subject}: {error or type(error).__name__}") from None
        if cb is None:
            give_inbox(subscription)
        return subscription

    async def leave(self, subscription: Subscription) -> None:
        """End a subscription with a callback once that has had what was sent to it before.

        Where the broker does not answer, it is ended all the same.
        """
        try:
            async with asyncio.timeout(self.settings.request_timeout_s):
                await subscription.drain()  # type: ignore[no-untyped-call]
        except (NatsError, TimeoutError, OSError):
            with contextlib.suppress(NatsError):
                await subscription.unsubscribe()

    async def next_message(self, subscription: Subscription, timeout_s: float) -> Msg | None:
        """The next message of a subscription without a callback, for one reader at a time; None if none came in time.

        One that is there already is taken without a turn of the loop: many messages that came together would each
        wait behind all other work of the process.
        """
        inbox = subscription._pending_queue
        assert isinstance(inbox, Inbox)
        if self.nc.is_closed or (inbox.empty() and not await inbox.wait(timeout_s) and inbox.is_closed):
            raise BrokerUnavailableError(f"{subscription.subject}: the connection is closed")
        if inbox.empty():
            return None
        message = inbox.get_nowait()
        subscription._pending_size -= len(message.data)
        inbox.task_done()
        return message

    def has_message(self, subscription: Subscription) -> bool:
        """Whether `next_message` would return one at once."""
        return not subscription._pending_queue.empty()

    def _too_large(self, data: bytes, headers: Mapping[str, str]) -> str:
        # The server answers a message beyond its limit with an error that ends the connection for good.
        size_bytes = len(data) + sum(len(name) + len(value) + 4 for name, value in headers.items()) + 16
        limit_bytes = int(self.nc.max_payload)
        return f"{size_bytes} bytes, the broker takes {limit_bytes}" if size_bytes > limit_bytes else ""

    def new_inbox(self) -> str:
        """A fresh inbox under this connection's prefix."""
        return str(self.nc.new_inbox())


async def keep_clock(bus: Bus) -> None:
    """Learn the broker's time again each minute, until cancelled."""
    while True:
        await asyncio.sleep(_CLOCK_EVERY_S)
        await bus.sync_clock()


@contextlib.asynccontextmanager
async def connect(
    url: str, settings: Settings, *, name: str, inbox_prefix: str = SERVICE_INBOX_PREFIX
) -> AsyncIterator[Bus]:
    """A connected `Bus`. Tries for `retry_for_s`, then raises BrokerUnavailableError with the last reason.

    That is BrokerDeniedError or BrokerTlsError where a server answered.

    Shows the credential and the certificate that the settings name; raises ConfigError where one cannot be used.
    """
    options = connect_options(settings)
    problems: list[str] = []
    bus_holder: list[Bus] = []

    async def on_error(error: Exception) -> None:
        words = str(error) or type(error).__name__
        if bus_holder or not _is_refusal(problems):  # after which the next try may only find the connection reset
            problems[:] = [words]
        # One comes with each message dropped, and with each try while the broker is away, which is said once.
        is_repeated = isinstance(error, SlowConsumerError) or not nc.is_connected
        for bus in bus_holder:
            if _DENIAL in words.lower():
                bus.denials.append(words.lower())
        level = logging.WARNING if bus_holder and not is_repeated else logging.DEBUG
        log.log(level, "broker connection: %s", words)

    async def on_closed() -> None:
        for bus in bus_holder:
            bus.closed.set()

    async def on_reconnected() -> None:
        log.info("connected to the broker again")
        for bus in bus_holder:
            for callback in bus.on_reconnect:
                try:
                    await callback()
                except Exception:  # it would end the client library's reconnecting, or start it anew
                    log.exception("a callback failed after the reconnect")

    async def on_disconnected() -> None:
        if any(not bus._is_leaving for bus in bus_holder):
            log.warning("lost the connection to the broker; reconnecting")

    def on_long_wait() -> None:
        shown, reason = _without_secrets(url), problems[0] if problems else "no answer"
        log.warning("no NATS server answers at %s yet: %s; trying for %g s", shown, reason, settings.retry_for_s)

    nc = SteadyClient()
    waiting = asyncio.get_running_loop().call_later(_SILENT_S, on_long_wait)
    try:
        async with asyncio.timeout(settings.retry_for_s):
            await nc.connect(
                url,
                name=name,
                inbox_prefix=inbox_prefix.encode(),
                max_reconnect_attempts=-1,
                reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]  # seconds; a float works and is wanted
                ping_interval=_PING_INTERVAL_S,
                connect_timeout=math.ceil(settings.request_timeout_s),
                error_cb=on_error,
                closed_cb=on_closed,
                reconnected_cb=on_reconnected,
                disconnected_cb=on_disconnected,
                **options,
            )
    except (TimeoutError, NatsError, OSError, ValueError) as error:
        reason = problems[0] if problems else str(error) or type(error).__name__
        is_dropped = any(words in reason.lower() for words in _DROPPED)
        if is_dropped and nc._server_info.get("auth_required"):  # its words are lost where it had not read all of ours
            reason = f"{_UNAUTHORIZED}, as it seems: {reason}"
        if nc._server_info.get("tls_verify") and settings.nats_tls_cert is None:  # which it may have no time to say
            reason = f"it asks for a certificate: {reason}"
        with contextlib.suppress(NatsError, OSError, AssertionError):  # it asserts that it has a server to close
            await nc.close()
        raise _why_not(url, settings, reason) from None
    except asyncio.CancelledError:
        with contextlib.suppress(NatsError, OSError, AssertionError):
            await nc.close()
        raise
    finally:
        waiting.cancel()
    bus = Bus(nc, settings, url, inbox_prefix=inbox_prefix)
    bus_holder.append(bus)
    async with bus:
        yield bus


def _is_refusal(problems: list[str]) -> bool:
    return bool(problems) and (_UNAUTHORIZED in problems[0].lower() or _TLS_TROUBLE.search(problems[0]) is not None)


def _why_not(url: str, settings: Settings, reason: str) -> BrokerUnavailableError:
    """Why there is no connection, and what to do about it."""
    shown = _without_secrets(url)
    if _TLS_TROUBLE.search(reason) is not None:
        return BrokerTlsError(
            f"the NATS server at {shown} and this machine do not agree on TLS: {reason}. Name who signed its "
            "certificate with HEADRACE_NATS_TLS_CA, and where it asks for one of ours, that with HEADRACE_NATS_TLS_CERT"
        )
    if _UNAUTHORIZED not in reason.lower():
        return BrokerUnavailableError(
            f"no NATS server answers at {shown}: {reason}. Start one with `headrace up`, or set HEADRACE_NATS_URL"
        )
    if settings.nats_credentials is not None:
        return BrokerDeniedError(
            f"the NATS server at {shown} does not know the credential {settings.nats_credentials} ({reason})"
        )
    return BrokerDeniedError(
        f"the NATS server at {shown} lets nobody in without a credential: name its file with "
        "HEADRACE_NATS_CREDENTIALS, or a user and password in the URL"
    )


def _without_secrets(url: str) -> str:
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


async def require_jetstream(bus: Bus, *, minimum: tuple[int, int]) -> str:
    """The server's version, once it is known to have JetStream and be new enough. Raises BrokerUnsuitableError."""
    version = str(bus.nc.connected_server_version)
    numbers = bus.nc.connected_server_version
    if (numbers.major, numbers.minor) < minimum:
        raise BrokerUnsuitableError(f"the NATS server is {version}; Headrace needs {minimum[0]}.{minimum[1]} or newer")
    try:
        await bus.api("INFO")
    except NotProvisionedError:
        raise BrokerUnsuitableError(
            "the NATS server runs without JetStream (or this user has none); start it with a `jetstream {}` block"
        ) from None
    except ApiRefused as refused:
        raise BrokerUnsuitableError(f"JetStream is not usable: {refused}") from None
    return version
