"""Headers are read as nats-py reads them, whatever bytes a publisher puts there."""

import contextlib

from hypothesis import example, given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.aio.subscription import Subscription

from headrace.bus.steady import SteadyClient

_LINE = st.one_of(
    st.binary(max_size=12),
    st.builds(lambda name, value: name + b":" + value, st.binary(max_size=8), st.binary(max_size=8)),
    st.sampled_from([b"Headrace-Job: a", b" Nats-TTL :\t7 ", b"a b: c", b"\xff: c", b": nameless", b"Headrace-Job:b"]),
)


@given(st.lists(_LINE, max_size=8).map(b"\r\n".join))
@example(b"")
@example(b"a:b\nc:d\r\n\r\n")
@example(b"\x1cname: value")
@example(b"name: \xc2\xa0value\x1f")
@example("n\u00e4me: value\u2003".encode())
def test_headers_are_what_the_library_finds(raw: bytes) -> None:
    assert SteadyClient._parse_header_lines(raw) == Client._parse_header_lines(raw)


@given(
    st.sampled_from([b"", b" 404", b" 503", b" 404 No Messages", b" 100 Idle Heartbeat", b" ", b"x"]),
    st.lists(_LINE, max_size=4),
    st.binary(max_size=20),
    st.sampled_from([None, 1, 2]),
)
async def test_a_message_is_what_the_library_makes_of_it(
    status: bytes, lines: list[bytes], data: bytes, max_messages: int | None
) -> None:
    raw = b"NATS/1.0" + status + b"\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"
    for headers in (raw, None):
        results = []
        for client in (SteadyClient(), Client()):
            dropped: list[Exception] = []

            async def note(error: Exception, dropped: list[Exception] = dropped) -> None:
                dropped.append(error)

            client._error_cb = note
            subscription = Subscription(client, 7, "a.b", pending_msgs_limit=2, pending_bytes_limit=30)
            subscription._max_msgs = max_messages or 0
            client._subs[7] = subscription
            for _ in range(3):
                with contextlib.suppress(Exception):
                    await client._process_msg(7, b"a.b", b"r", data, headers)  # type: ignore[arg-type]
            queue = subscription._pending_queue
            got = [queue.get_nowait() for _ in range(queue.qsize())]
            results.append(
                (
                    [(each.subject, each.reply, each.data, each.headers, each._sid) for each in got],
                    [type(error) for error in dropped],
                    subscription._pending_size,
                    7 in client._subs,
                    client.stats["in_msgs"],
                )
            )
        assert results[0] == results[1]
