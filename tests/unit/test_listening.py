"""What every HTTP port of ours does alike: listening, and telling which names are this machine's."""

import errno
import socket

import pytest

from headrace.listening import host_of, is_loopback, is_loopback_name, listen, url_of


def test_a_free_port_is_found_and_told() -> None:
    with listen("127.0.0.1", 0, backlog=4, send_buffer_bytes=4096) as bound:
        port = bound.getsockname()[1]
        assert url_of(bound) == f"http://127.0.0.1:{port}"
        assert is_loopback(bound)
        assert bound.proto == socket.IPPROTO_TCP
        assert bound.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < 65_536
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass


def test_a_port_that_is_taken_and_a_host_that_is_none_are_told_in_one_way() -> None:
    with listen("127.0.0.1", 0, backlog=4) as bound, pytest.raises(OSError, match="use") as taken:
        listen("127.0.0.1", bound.getsockname()[1], backlog=4)
    assert taken.value.errno == errno.EADDRINUSE
    for host in ("a..b", "x" * 64 + ".example", "\ud800"):
        with pytest.raises(OSError) as none:  # noqa: PT011  # whose text is the resolver's
            listen(host, 0, backlog=4)
        assert none.value.strerror


def test_an_address_of_version_six_has_brackets() -> None:
    try:
        bound = listen("::1", 0, backlog=4)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with bound:
        assert url_of(bound) == f"http://[::1]:{bound.getsockname()[1]}"
        assert is_loopback(bound)


def test_all_addresses_are_not_loopback() -> None:
    with listen("0.0.0.0", 0, backlog=4) as bound:
        assert not is_loopback(bound)


@pytest.mark.parametrize(
    ("header", "host"),
    [
        ("Localhost:80", "localhost"), ("127.0.0.1", "127.0.0.1"), ("[::1]:8080", "::1"), ("[::1]", "::1"),
        ("a.example:x", "a.example"), ("", None), (":80", None), ("[::ffff", None), ("[", None),
    ],
)  # fmt: skip
def test_the_host_of_a_header(header: str, host: str | None) -> None:
    assert host_of(header) == host


@pytest.mark.parametrize("name", ["localhost", "a.localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_names_of_loopback(name: str) -> None:
    assert is_loopback_name(name)


@pytest.mark.parametrize(
    "name", ["", "localhost.example", "notlocalhost", "127.0.0.1.example", "10.0.0.1", "0.0.0.0", "::", "127.1"]
)
def test_names_of_anybody(name: str) -> None:
    assert not is_loopback_name(name)
