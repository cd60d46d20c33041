"""A model of the broker: what JetStream does with what this project sends it, and nothing more.

Sources: the notes on the real server's behaviour that the protocol was built on, and the server's own rules for
work-queue consumers (redelivery first and in order, any ack of a message removes it, a NAK counts only above the ack
floor and for what is pending, what is parked is served oldest first while somebody listens to its inbox). Every
message crosses a link with a random delay, in order for each connection.
"""

import asyncio
import base64
import random
from collections.abc import Callable
from contextvars import Context
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from tests.simulation.loop import SimulatedLoop

__all__ = ["Faults", "ModelBroker", "Stored", "Stream"]

Headers = dict[str, str]
Deliver = Callable[[str, str, bytes, Headers | None], None]

_EXPECTED: Final = "Nats-Expected-Last-Subject-Sequence"
_WRONG_LAST: Final = 10071
_FULL: Final = 10077
_NO_STREAM, _NO_CONSUMER, _NO_MESSAGE = 10059, 10014, 10037


class Faults(msgspec.Struct):
    """How badly the network behaves, as probabilities for each message; delays are mean seconds."""

    delay_s: float = 0.001
    lost_request: float = 0.0
    lost_answer: float = 0.0
    lost_publish: float = 0.0
    lost_hint: float = 0.0
    """Wakes and nudges of workers, which the broker stores nowhere."""
    stale_log: float = 0.0
    stale_beats: float = 0.0
    outage: str = ""
    """"" for none, else `silent` or `unserved`: what JetStream does with every request."""

    def end(self) -> None:
        """Behave from now on."""
        self.delay_s = 0.001
        self.lost_request = self.lost_answer = self.lost_publish = self.lost_hint = 0.0
        self.stale_log = self.stale_beats = 0.0
        self.outage = ""


class Stored:
    """A message in a stream; `is_gone` once removed."""

    __slots__ = ("at", "data", "headers", "is_gone", "seq", "subject")

    def __init__(self, seq: int, subject: str, headers: Headers, data: bytes, at: float) -> None:
        self.seq, self.subject, self.headers, self.data, self.at = seq, subject, headers, data, at
        self.is_gone = False


class _Parked:
    """A request that waits for a message until it expires."""

    def __init__(self, reply: str) -> None:
        self.reply = reply


class _Consumer:
    def __init__(self, config: dict[str, Any]) -> None:
        self.name: str = config["name"]
        self.filter = config["filter_subject"]
        self.ack_wait_s = config.get("ack_wait", 30_000_000_000) / 1e9
        self.dseq = self.sseq = self.floor_dseq = self.floor_sseq = 0
        self.pending: dict[int, list[float]] = {}  # stream sequence -> [first consumer sequence, due]
        self.deliveries: dict[int, int] = {}
        self.redeliver: list[int] = []
        self.parked: list[_Parked] = []


class Stream:
    """A stream with its consumers. `everything` keeps removed messages too, for readers of an older state."""

    def __init__(self, config: dict[str, Any], created: str) -> None:
        self.config, self.created = config, created
        self.name: str = config["name"]
        self.last_seq = 0
        self.live: dict[int, Stored] = {}
        self.by_subject: dict[str, list[Stored]] = {}
        self.everything: list[Stored] = []
        self.ids: dict[str, tuple[int, float]] = {}
        self.consumers: dict[str, _Consumer] = {}

    def last(self, subject: str) -> Stored | None:
        """The last live message of a subject."""
        messages = self.by_subject.get(subject)
        return messages[-1] if messages else None

    def remove(self, message: Stored) -> None:
        """Take a message out, from the consumers too."""
        message.is_gone = True
        self.live.pop(message.seq, None)
        messages = self.by_subject.get(message.subject, [])
        if message in messages:
            messages.remove(message)
        for consumer in self.consumers.values():
            _forget(consumer, message.seq)


class _Subscription:
    __slots__ = ("deliver", "link", "queue", "sid", "subject")

    def __init__(self, link: "Link", sid: int, subject: str, queue: str, deliver: Deliver) -> None:
        self.link, self.sid, self.subject, self.queue, self.deliver = link, sid, subject, queue, deliver


class Link:
    """One client's connection: in order both ways. `closed` once its process is gone."""

    def __init__(self, name: str, context: Context) -> None:
        self.name, self.context = name, context
        self.is_closed = False
        self.up_at = self.down_at = 0.0
        self.deaf_until: dict[str, float] = {}
        """Until when it waits for answers that were lost, or believes old ones, by the stream that was asked."""
        self.in_flight: list[Any] = []


class ModelBroker:
    """Streams, consumers, subjects. Hooks: `on_store` and `on_remove` are called as a message is stored or removed.

    `trace` collects what happened to jobs, a line each; `num_served_parked` counts jobs that a parked pull got.
    """

    def __init__(self, loop: SimulatedLoop, rng: random.Random, faults: Faults, context: Context) -> None:
        self.loop, self._rng, self.faults, self._context = loop, rng, faults, context
        self.streams: dict[str, Stream] = {}
        self._stream_of: dict[str, Stream | None] = {}
        self._subscriptions: list[_Subscription] = []
        self._queued_until: dict[str, float] = {}
        self.on_store: Callable[[Stream, Stored, Link | None], None] = lambda *_: None
        self.on_remove: Callable[[Stream, Stored, str], None] = lambda *_: None
        self.trace: list[str] = []
        self.num_served_parked = 0
        self._awaited: tuple[int, asyncio.Future[None]] | None = None
        self.request_timeout_s, self.beat_timeout_s, self.stale_for_s = 1.0, 0.5, 0.1
        """What an answer costs whoever waits for it: one that is lost, one to a beat, one from an older state."""
        self._asked: dict[str, str] = {}
        self.hints_lost: dict[str, int] = {}
        """By the consumer of the queue that they were about."""

    # the network

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self.loop.time() - 1_000_000:8.3f} {text}")

        if self._awaited is not None and len(self.trace) >= self._awaited[0] and not self._awaited[1].done():
            self._awaited[1].set_result(None)

    async def until_noted(self, num_lines: int, *, within_s: float) -> None:
        """Wait until the trace has so many more lines, or for that long."""
        if num_lines > 0:
            self._awaited = (len(self.trace) + num_lines, self.loop.create_future())
            await asyncio.wait([self._awaited[1]], timeout=within_s)
            self._awaited = None

    def _delay(self) -> float:
        return 0.00005 + self._rng.expovariate(1 / self.faults.delay_s)

    def pause_s(self) -> float:
        """How long a client waits to write: hardly ever at all."""
        return self._delay() if self._rng.random() < 0.1 else 0.0

    def send(self, link: Link, act: Callable[[], None]) -> None:
        """Carry something from a client to the broker."""
        at = link.up_at = max(link.up_at + 1e-9, self.loop.time() + self._delay())
        link.in_flight = [
            timer for timer in link.in_flight if not timer.cancelled() and timer.when() > self.loop.time()
        ]
        link.in_flight.append(self.loop.call_at(at, act, context=self._context))

    def _carry(self, link: Link, act: Callable[..., object], *args: Any) -> None:
        if link.is_closed:
            return
        link.down_at = max(link.down_at + 1e-9, self.loop.time() + self._delay())
        self.loop.call_at(link.down_at, self._arrive, link, act, args, context=self._context)

    def _arrive(self, link: Link, act: Callable[..., object], args: tuple[Any, ...]) -> None:
        if not link.is_closed:
            self.loop.call_soon(act, *args, context=link.context)

    def pong(self, link: Link, act: Callable[[], object]) -> None:
        """Answer a ping."""
        self._carry(link, act)

    def disconnect(self, link: Link, *, loses_half: bool) -> None:
        """A client is gone; what it sent last may be lost with it."""
        link.is_closed = True
        self._subscriptions = [sub for sub in self._subscriptions if sub.link is not link]
        if loses_half:
            for timer in link.in_flight[len(link.in_flight) // 2 :]:
                timer.cancel()

    def subscribe(self, link: Link, sid: int, subject: str, queue: str, deliver: Deliver) -> None:
        """Begin to deliver."""
        self._subscriptions.append(_Subscription(link, sid, subject, queue, deliver))

    def unsubscribe(self, link: Link, sid: int) -> None:
        """Stop delivering."""
        self._subscriptions = [sub for sub in self._subscriptions if not (sub.link is link and sub.sid == sid)]

    def publish(self, subject: str, reply: str, data: bytes, headers: Headers | None, sender: Link) -> None:
        """A message arrived: deliver it, store it, or act on it."""
        if subject.startswith(("$JS.API.", "$JS.ACK.")) or self.stream_for(subject) is not None:
            if self.faults.outage == "unserved" and reply:
                self._answer(reply, b"", {"Status": "503"})
            if self.faults.outage:
                self._lose(subject, reply, sender)
                return
            is_request = subject.startswith("$JS.API.") or bool(reply)
            if self._happens(self.faults.lost_request if is_request else self.faults.lost_publish):
                self.note(f"LOST {_short(subject)} of {sender.name}")
                self._lose(subject, reply, sender)
                return
            self._asked[reply] = subject
        if subject.startswith("$JS.API."):
            self._later("" if "DIRECT" in subject else subject, lambda: self._api(subject[8:], reply, data))
            return
        if subject.startswith("$JS.ACK."):
            self._later("acks", lambda: self._ack(subject, data, sender))
            return
        served = self._deliver(subject, reply, data, headers)
        stream = self.stream_for(subject)
        if stream is not None:
            self._later(stream.name, lambda: self._store_for(stream, subject, reply, data, headers or {}, sender))
        elif not served and reply:
            self._answer(reply, b"", {"Status": "503"})

    def _deliver(self, subject: str, reply: str, data: bytes, headers: Headers | None) -> bool:
        if (".wake." in subject or ".ctl." in subject) and self._happens(self.faults.lost_hint):
            self.note(f"LOST the hint {subject}")
            self._count_lost_hint(subject, data)
            return True
        matching = [sub for sub in self._subscriptions if _matches(sub.subject, subject)]
        groups: dict[str, list[_Subscription]] = {}
        for sub in matching:
            if sub.queue:
                groups.setdefault(f"{sub.subject} {sub.queue}", []).append(sub)
            else:
                self._carry(sub.link, sub.deliver, subject, reply, data, headers)
        for members in groups.values():
            sub = self._rng.choice(members)
            self._carry(sub.link, sub.deliver, subject, reply, data, headers)
        return bool(matching)

    def _count_lost_hint(self, subject: str, data: bytes) -> None:
        consumer = msgspec.json.decode(data).get("consumer") if data else "_".join(subject.split(".")[-3:])
        if consumer is not None:
            self.hints_lost[consumer] = self.hints_lost.get(consumer, 0) + 1

    def _answer(self, reply: str, data: bytes, headers: Headers | None = None, *, subject: str = "") -> None:
        for sub in self._subscriptions:
            if _matches(sub.subject, reply):
                self._carry(sub.link, sub.deliver, subject or reply, "", data, headers)

    def _json(self, reply: str, body: object) -> None:
        if reply and self._happens(self.faults.lost_answer):
            self.note(f"LOST the answer to {_short(self._asked.get(reply, ''))}")
            self._lose_answer(reply)
        elif reply:
            self._answer(reply, msgspec.json.encode(body))

    def _lose_answer(self, reply: str, *, for_s: float | None = None) -> None:
        for sub in self._subscriptions:
            if _matches(sub.subject, reply):
                self._lose(self._asked.get(reply, ""), reply, sub.link, for_s=for_s)

    def _lose(self, subject: str, reply: str, link: Link, *, for_s: float | None = None) -> None:
        stored = self.stream_for(subject)
        stream = stored.name if stored is not None else next((name for name in self.streams if name in subject), None)
        if reply and stream is not None:
            timeout_s = self.beat_timeout_s if link.name.endswith(".heart") else self.request_timeout_s
            until = self.loop.time() + (timeout_s if for_s is None else for_s)
            link.deaf_until[stream] = max(until, link.deaf_until.get(stream, 0.0))

    def _later(self, key: str, act: Callable[[], None]) -> None:
        # The server works through each stream in order; reads go beside that.
        at = self.loop.time() + self._delay() / 2
        if key:
            at = self._queued_until[key] = max(self._queued_until.get(key, 0.0) + 1e-9, at)
        self.loop.call_at(at, act, context=self._context)

    def _happens(self, probability: float) -> bool:
        return probability > 0 and self._rng.random() < probability

    # streams

    def stream_for(self, subject: str) -> Stream | None:
        """The stream that stores a subject."""
        if subject not in self._stream_of:
            self._stream_of[subject] = next(
                (s for s in self.streams.values() if any(_matches(each, subject) for each in s.config["subjects"])),
                None,
            )
        return self._stream_of[subject]

    def _store_for(self, stream: Stream, subject: str, reply: str, data: bytes, headers: Headers, sender: Link) -> None:
        result = self._try_store(stream, subject, data, headers, sender)
        if reply and self._happens(self.faults.lost_answer):
            self.note(f"LOST the answer to {_short(subject)} of {sender.name}")
            self._lose_answer(reply)
        elif reply:
            self._answer(reply, msgspec.json.encode(result))

    def _try_store(self, stream: Stream, subject: str, data: bytes, headers: Headers, sender: Link) -> dict[str, Any]:
        message_id = headers.get("Nats-Msg-Id")
        known = stream.ids.get(message_id) if message_id else None
        window_s = stream.config.get("duplicate_window", 120_000_000_000) / 1e9
        if known is not None and self.loop.time() - known[1] < window_s:
            return {"stream": stream.name, "seq": known[0], "duplicate": True}
        expected = headers.get(_EXPECTED)
        last = stream.last(subject)
        if expected is not None and int(expected) != (last.seq if last is not None else 0):
            kind = headers.get("Headrace-Event")
            self.note(f"{sender.name}: {kind or 'write'} on {_short(subject)} REFUSED (expected {expected})")
            return _error(_WRONG_LAST, f"wrong last sequence: {last.seq if last else 0}")
        limit = stream.config.get("max_msgs", -1)
        if 0 <= limit <= len(stream.live):
            return _error(_FULL, "maximum messages exceeded")
        message = self.store(stream, subject, data, headers, sender)
        if message_id:
            stream.ids[message_id] = (message.seq, self.loop.time())
        return {"stream": stream.name, "seq": message.seq}

    def store(self, stream: Stream, subject: str, data: bytes, headers: Headers, sender: Link | None) -> Stored:
        """Put a message at the end of a stream."""
        stream.last_seq += 1
        message = Stored(stream.last_seq, subject, headers, data, self.loop.time())
        stream.live[message.seq] = message
        stream.everything.append(message)
        messages = stream.by_subject.setdefault(subject, [])
        messages.append(message)
        self.on_store(stream, message, sender)
        most = stream.config.get("max_msgs_per_subject", -1)
        while 0 < most < len(messages):
            stream.remove(messages[0])
        if "subject_delete_marker_ttl" in stream.config and "Nats-TTL" in headers:
            due = self.loop.time() + float(headers["Nats-TTL"]) + self._rng.uniform(0, 0.3)
            self.loop.call_at(due, self._expire, stream, message, context=self._context)
        republish = stream.config.get("republish")
        if republish is not None and republish.get("headers_only"):
            announced = {**headers, "Nats-Sequence": str(message.seq)}
            self._deliver(republish["dest"][:-1] + subject[len(republish["src"]) - 1 :], "", b"", announced)
        for consumer in stream.consumers.values():
            if consumer.filter == subject:
                self._serve_later(stream, consumer)
        return message

    def _expire(self, stream: Stream, message: Stored) -> None:
        if message.is_gone:
            return
        stream.remove(message)
        if "Nats-Marker-Reason" not in message.headers and message.headers.get("KV-Operation") != "PURGE":
            self.note(f"{_short(message.subject)} EXPIRED")
            self.store(stream, message.subject, b"", {"Nats-Marker-Reason": "MaxAge", "Nats-TTL": "60"}, None)

    def end_ttl(self, stream_name: str, subject: str) -> None:
        """Let a key's time be up now, as if its beats had been late."""
        message = self.streams[stream_name].last(subject)
        if message is not None and "Nats-Marker-Reason" not in message.headers and message.data:
            self._expire(self.streams[stream_name], message)

    def end_ack_wait(self, stream_name: str, which: int) -> None:
        """Let the ack wait of one message in flight be over now, as if its renewals had been lost."""
        stream = self.streams[stream_name]
        for consumer in stream.consumers.values():
            waiting = sorted(seq for seq in consumer.pending if seq not in consumer.redeliver)
            if waiting:
                seq = waiting[which % len(waiting)]
                self.note(f"message {seq}: ACK WAIT is over")
                consumer.redeliver.append(seq)
                self._serve_later(stream, consumer)

    def _view(self, stream: Stream) -> tuple[int, bool]:
        """Up to which sequence a direct read sees, and whether that is an older state."""
        is_beats = stream.name.startswith("KV_")
        if self._happens(self.faults.stale_beats if is_beats else self.faults.stale_log):
            return max(0, stream.last_seq - self._rng.randint(1, 6)), True
        return stream.last_seq, False

    def _seen(self, stream: Stream, pattern: str, cut: int, *, is_stale: bool) -> list[Stored]:
        if not is_stale:
            if "*" not in pattern and ">" not in pattern:
                return list(stream.by_subject.get(pattern, ()))
            return [message for message in stream.live.values() if _matches(pattern, message.subject)]
        keep = stream.config.get("max_msgs_per_subject", 0)
        found = [each for each in stream.everything if each.seq <= cut and _matches(pattern, each.subject)]
        if stream.config.get("retention") == "workqueue":
            return [each for each in found if not each.is_gone]
        if keep == 1:
            return sorted({each.subject: each for each in found}.values(), key=lambda each: each.seq)
        return found

    # the API

    def _api(self, subject: str, reply: str, data: bytes) -> None:
        payload = msgspec.json.decode(data) if data else {}
        words = subject.split(".")
        if subject.startswith("DIRECT.GET."):
            self._direct_get(words[2], ".".join(words[3:]), reply, payload)
        elif subject == "INFO":
            self._json(reply, {})
        elif subject == "STREAM.NAMES":
            self._json(reply, {"total": len(self.streams), "streams": sorted(self.streams)})
        elif subject.startswith("STREAM.CREATE."):
            if words[2] not in self.streams:
                self.streams[words[2]] = Stream(payload, self._stamp(self.loop.time()))
                self._stream_of.clear()
            self._json(reply, {"config": payload})
        elif subject.startswith("STREAM.MSG."):
            self._message_api(words[2], words[3], reply, payload)
        elif subject.startswith("CONSUMER.MSG.NEXT."):
            self._pull(words[3], words[4], reply, payload)
        elif words[2] not in self.streams:
            self._json(reply, _error(_NO_STREAM, "stream not found"))
        elif words[0] == "STREAM":
            self._stream_api(words[1:], self.streams[words[2]], reply, payload)
        else:
            self._consumer_api(words, self.streams[words[2]], reply, payload)

    def _stream_api(self, words: list[str], stream: Stream, reply: str, payload: dict[str, Any]) -> None:
        if words[0] == "INFO":
            counts = {subject: len(each) for subject, each in stream.by_subject.items() if each}
            named = {"subjects": counts} if "subjects_filter" in payload else {}
            state = {"messages": len(stream.live), "last_seq": stream.last_seq, **named}
            answer = {"config": stream.config, "created": stream.created, "state": state}
            self._json(reply, {**answer, "ts": self._stamp(self.loop.time())})
        elif words[0] == "PURGE":
            messages = list(stream.by_subject.get(payload["filter"], ()))
            for message in messages[: len(messages) - payload.get("keep", 0)]:
                stream.remove(message)
            self._json(reply, {"success": True})
        else:
            raise NotImplementedError(words)

    def _consumer_api(self, words: list[str], stream: Stream, reply: str, payload: dict[str, Any]) -> None:
        if words[1] == "LIST":  # the model keeps no consumers that deliver
            self._json(reply, {"total": 0, "consumers": []})
            return
        name = words[3]
        if words[1] == "CREATE":
            if "deliver_subject" not in payload["config"]:
                stream.consumers.setdefault(name, _Consumer(payload["config"]))
            self._json(reply, {"num_pending": 0})
        elif words[1] == "DELETE":
            self._json(reply, {"success": True})
        elif name not in stream.consumers:
            self._json(reply, _error(_NO_CONSUMER, "consumer not found"))
        elif words[1] == "INFO":
            consumer = stream.consumers[name]
            waiting = sum(1 for m in stream.by_subject.get(consumer.filter, ()) if m.seq > consumer.sseq)
            info = {
                "num_pending": waiting,
                "num_ack_pending": len(consumer.pending),
                "delivered": {"consumer_seq": consumer.dseq, "stream_seq": consumer.sseq},
                "ack_floor": {"consumer_seq": consumer.floor_dseq, "stream_seq": consumer.floor_sseq},
            }
            self._json(reply, info)

    def _message_api(self, action: str, name: str, reply: str, payload: dict[str, Any]) -> None:
        stream = self.streams.get(name)
        if stream is None:
            self._json(reply, _error(_NO_STREAM, "stream not found"))
            return
        by_subject = payload.get("last_by_subj")
        message = stream.last(by_subject) if by_subject is not None else stream.live.get(payload["seq"])
        if message is None:
            self._json(reply, _error(_NO_MESSAGE, "no message found"))
        elif action == "DELETE":
            self.on_remove(stream, message, "deleted")
            stream.remove(message)
            self._json(reply, {"success": True})
        else:
            raw = "NATS/1.0\r\n" + "".join(f"{name}: {value}\r\n" for name, value in message.headers.items()) + "\r\n"
            body = {
                "subject": message.subject,
                "seq": message.seq,
                "data": base64.b64encode(message.data).decode(),
                "hdrs": base64.b64encode(raw.encode()).decode(),
            }
            self._json(reply, {"message": body})

    def _direct_get(self, name: str, subject: str, reply: str, payload: dict[str, Any]) -> None:
        stream = self.streams.get(name)
        if stream is None:
            self._answer(reply, b"", {"Status": "503"})
            return
        if self._happens(self.faults.lost_answer):
            self.note(f"LOST the answer to a read of {name}")
            self._lose_answer(reply)
            return
        cut, is_stale = self._view(stream)
        if is_stale:
            self._lose_answer(reply, for_s=self.stale_for_s)
        if subject:
            found = self._seen(stream, subject, cut, is_stale=is_stale)[-1:]
        elif "multi_last" in payload:
            last: dict[str, Stored] = {}
            for wanted in payload["multi_last"]:
                for message in self._seen(stream, wanted, cut, is_stale=is_stale):
                    last[message.subject] = message
            found = sorted(last.values(), key=lambda each: each.seq)
        elif "next_by_subj" in payload:
            everything = self._seen(stream, payload["next_by_subj"], cut, is_stale=is_stale)
            found = [message for message in everything if message.seq >= payload["seq"]]
        else:
            found = [stream.live[payload["seq"]]] if payload["seq"] in stream.live else []
        is_many = "batch" in payload or "multi_last" in payload
        if not found:
            self._answer(reply, b"", {"Status": "404"})
            return
        if not is_many:
            found = found[:1]
        num_left = len(found)
        for message in found[: payload.get("batch", len(found))]:
            num_left -= 1
            headers = {
                **message.headers,
                "Nats-Stream": stream.name,
                "Nats-Subject": message.subject,
                "Nats-Sequence": str(message.seq),
                "Nats-Time-Stamp": self._stamp(message.at),
            }
            if is_many:
                headers |= {"Nats-Num-Pending": str(num_left), "Nats-Last-Sequence": "0"}
            self._answer(reply, message.data, headers)
        if is_many:
            self._answer(reply, b"", {"Status": "204", "Nats-Num-Pending": str(num_left)})

    # consumers

    def _pull(self, stream_name: str, consumer_name: str, reply: str, payload: dict[str, Any]) -> None:
        stream = self.streams.get(stream_name)
        consumer = stream.consumers.get(consumer_name) if stream is not None else None
        if stream is None or consumer is None:
            self._answer(reply, b"", {"Status": "503"})
            return
        if "idle_heartbeat" in payload:
            self._answer(reply, b"", {"Status": "400"})
            return
        message = self._next(stream, consumer)
        if message is not None:
            self._deliver_job(stream, consumer, message, reply)
        elif payload.get("no_wait"):
            self._answer(reply, b"", {"Status": "404"})
        else:
            parked = _Parked(reply)
            consumer.parked.append(parked)
            due = self.loop.time() + payload["expires"] / 1e9
            self.loop.call_at(due, self._expire_parked, consumer, parked, context=self._context)

    def _expire_parked(self, consumer: _Consumer, parked: _Parked) -> None:
        if parked in consumer.parked:
            consumer.parked.remove(parked)
            if not self._happens(self.faults.lost_answer):
                self._answer(parked.reply, b"", {"Status": "408"})

    def drop_parked(self, *, is_told: bool) -> None:
        """What a change of leaders does with what is parked: all is forgotten, told or not."""
        for stream in self.streams.values():
            for consumer in stream.consumers.values():
                parked, consumer.parked = consumer.parked, []
                for each in parked if is_told else ():
                    self._answer(each.reply, b"", {"Status": "409"})

    def _serve_parked(self, stream: Stream, consumer: _Consumer) -> None:
        """Give what waits to the oldest requests of those that still listen."""
        while consumer.parked:
            if not any(_matches(sub.subject, consumer.parked[0].reply) for sub in self._subscriptions):
                consumer.parked.pop(0)
                continue
            message = self._next(stream, consumer)
            if message is None:
                return
            self.num_served_parked += 1
            self._deliver_job(stream, consumer, message, consumer.parked.pop(0).reply)

    def _serve_later(self, stream: Stream, consumer: _Consumer) -> None:
        self._later(stream.name, lambda: self._serve_parked(stream, consumer))

    def _deliver_job(self, stream: Stream, consumer: _Consumer, message: Stored, reply: str) -> None:
        consumer.dseq += 1
        count = consumer.deliveries[message.seq] = consumer.deliveries.get(message.seq, 0) + 1
        due = self.loop.time() + consumer.ack_wait_s
        if message.seq in consumer.pending:
            consumer.pending[message.seq][1] = due
        else:
            consumer.pending[message.seq] = [consumer.dseq, due]
            self.loop.call_at(due, self._check_pending, stream, consumer, message.seq, context=self._context)
        subject = f"$JS.ACK.{stream.name}.{consumer.name}.{count}.{message.seq}.{consumer.dseq}.0.0"
        receivers = [sub for sub in self._subscriptions if _matches(sub.subject, reply)]
        self.note(
            f"message {message.seq} delivered to {receivers[0].link.name if receivers else 'nobody'} (no. {count})"
        )
        if self._happens(self.faults.lost_answer):
            self.note("  but it is LOST")
            self._lose_answer(reply)
            return
        for sub in receivers:
            self._carry(sub.link, sub.deliver, message.subject, subject, message.data, dict(message.headers))

    def _next(self, stream: Stream, consumer: _Consumer) -> Stored | None:
        while consumer.redeliver:
            seq = consumer.redeliver.pop(0)
            if seq in stream.live and seq in consumer.pending:
                return stream.live[seq]
        for message in stream.by_subject.get(consumer.filter, ()):
            if message.seq > consumer.sseq:
                consumer.sseq = message.seq
                return message
        return None

    def _check_pending(self, stream: Stream, consumer: _Consumer, seq: int) -> None:
        entry = consumer.pending.get(seq)
        if entry is None:
            return
        now = self.loop.time()
        if entry[1] <= now:
            if seq not in consumer.redeliver:
                self.note(f"message {seq}: ACK WAIT is over")
                consumer.redeliver.append(seq)
                self._serve_later(stream, consumer)
            entry[1] = now + consumer.ack_wait_s
        self.loop.call_at(entry[1] + 1e-6, self._check_pending, stream, consumer, seq, context=self._context)

    def _ack(self, subject: str, data: bytes, sender: Link) -> None:
        words = subject.split(".")
        stream = self.streams.get(words[2])
        consumer = stream.consumers.get(words[3]) if stream is not None else None
        if stream is None or consumer is None:
            return
        seq, dseq = int(words[5]), int(words[6])
        message = stream.live.get(seq)
        if data in (b"+ACK", b"+TERM") or not data:
            if message is not None and seq <= consumer.sseq:
                self.note(f"{sender.name}: ack of message {seq}")
                self.on_remove(stream, message, f"acked by {sender.name}")
                stream.remove(message)
        elif data == b"+WPI":
            if seq in consumer.pending:
                consumer.pending[seq][1] = self.loop.time() + consumer.ack_wait_s
        elif data.startswith(b"-NAK") and consumer.floor_dseq < dseq <= consumer.dseq and seq in consumer.pending:
            self.note(f"{sender.name}: NAK of message {seq}")
            if seq not in consumer.redeliver:
                consumer.redeliver.append(seq)
            self._serve_later(stream, consumer)

    def _stamp(self, at: float) -> str:
        return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


def _forget(consumer: _Consumer, seq: int) -> None:
    entry = consumer.pending.pop(seq, None)
    consumer.deliveries.pop(seq, None)
    if seq in consumer.redeliver:
        consumer.redeliver.remove(seq)
    if entry is None:
        return
    if not consumer.pending:
        consumer.floor_dseq, consumer.floor_sseq = consumer.dseq, consumer.sseq
    else:
        consumer.floor_dseq = int(min(first for first, _ in consumer.pending.values())) - 1
        consumer.floor_sseq = min(consumer.pending) - 1


def _error(err_code: int, description: str) -> dict[str, Any]:
    return {"error": {"code": 400, "err_code": err_code, "description": description}}


def _matches(pattern: str, subject: str) -> bool:
    if pattern == subject:
        return True
    if "*" not in pattern and ">" not in pattern:
        return False
    words, parts = pattern.split("."), subject.split(".")
    for position, word in enumerate(words):
        if word == ">":
            return len(parts) > position
        if position >= len(parts) or word not in ("*", parts[position]):
            return False
    return len(words) == len(parts)


def _short(subject: str) -> str:
    return ".".join(subject.split(".")[-2:])
