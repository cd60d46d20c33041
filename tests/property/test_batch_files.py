"""Files and forms that come in any pieces are what they would be in one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import RequestError
from headrace.gateway.multipart import Part, boundary_of, read_parts
from headrace.schemas.batch_lines import LineSplitter

BOUNDARY = b"x-frontier"


@st.composite
def cut(draw: st.DrawFn, data: st.SearchStrategy[bytes]) -> tuple[bytes, list[bytes]]:
    """Some bytes, and the same in pieces."""
    whole = draw(data)
    places = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    starts = [0, *places]
    ends = [*places, len(whole)]
    return whole, [whole[start:end] for start, end in zip(starts, ends, strict=True)]


tokens = st.sampled_from([b"\n", b"\r\n", b" ", b"{}", b'"a"', b"\xef\xbb\xbf", b"x"])


@given(cut(st.lists(tokens, max_size=40).map(b"".join)))
def test_lines_have_their_numbers_however_they_come(cutting: tuple[bytes, list[bytes]]) -> None:
    whole, pieces = cutting
    splitter = LineSplitter()
    found = [line for piece in pieces for line in splitter.feed(piece)] + list(splitter.end())
    expected = []
    for number, line in enumerate(whole.split(b"\n"), start=1):
        text = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
        if text:
            expected.append((number, text))
    assert found == expected


async def each(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def read(pieces: list[bytes], boundary: bytes = BOUNDARY) -> list[tuple[Part, bytes]]:
    found: list[tuple[Part, bytes]] = []
    async for part in read_parts(each(pieces), boundary):
        if isinstance(part, Part):
            found.append((part, b""))
        else:
            head, value = found[-1]
            found[-1] = (head, value + part)
    return found


def form(values: list[bytes]) -> bytes:
    parts = [
        b'--%b\r\nContent-Disposition: form-data; name="f%d"; filename="n"\r\nContent-Type: a/b\r\n\r\n%b\r\n'
        % (BOUNDARY, number, value)
        for number, value in enumerate(values)
    ]
    return b"".join(parts) + b"--%b--\r\n" % BOUNDARY


near_boundaries = st.lists(
    st.sampled_from([b"\r\n", b"--", b"x-", b"frontier", b"\r\n--x-frontie", b"\r", b"\n", b"text"]), max_size=12
).map(b"".join)
values = st.lists(near_boundaries.filter(lambda value: b"\r\n--" + BOUNDARY not in b"\r\n" + value), max_size=4)


@given(st.data(), values)
def test_a_form_has_its_values_however_it_comes(data: st.DataObject, told: list[bytes]) -> None:
    _, pieces = data.draw(cut(st.just(form(told))))
    found = asyncio.run(read(pieces))
    assert found == [(Part(f"f{number}", "n"), value) for number, value in enumerate(told)]


@given(st.data())
def test_a_form_that_is_cut_off_is_refused(data: st.DataObject) -> None:
    whole = form([b"one", b"two"])
    end = data.draw(st.integers(0, len(whole) - len(b"--\r\n") - 1))
    with pytest.raises(RequestError):
        asyncio.run(read([whole[:end]]))


@given(cut(st.binary(max_size=200)))
def test_any_bytes_are_a_form_or_are_refused(cutting: tuple[bytes, list[bytes]]) -> None:
    with contextlib.suppress(RequestError):
        asyncio.run(read(cutting[1], b"b"))


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ("multipart/form-data; boundary=abc", b"abc"),
        ('multipart/form-data; charset=utf-8; boundary="a b"', b"a b"),
        ("Multipart/Form-Data;boundary=abc; x=y", b"abc"),
    ],
)
def test_the_boundary_is_named(content_type: str, boundary: bytes) -> None:
    assert boundary_of(content_type) == boundary


@pytest.mark.parametrize("content_type", ["", "application/json", "multipart/form-data", "multipart/form-data; x=y"])
def test_what_is_no_form_is_refused(content_type: str) -> None:
    with pytest.raises(RequestError, match="Content-Type"):
        boundary_of(content_type)
