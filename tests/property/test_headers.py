"""Headers are read as nats-py reads them, whatever bytes a publisher puts there."""

from hypothesis import example, given
from hypothesis import strategies as st
from nats.aio.client import Client

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
def test_headers_are_what_the_library_finds(raw: bytes) -> None:
    assert SteadyClient._parse_header_lines(raw) == Client._parse_header_lines(raw)
