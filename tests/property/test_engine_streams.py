"""What an engine sends means the same however it is cut: by the network, inside characters, inside stop strings."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.chunks import ChoiceDelta, EngineChunk
from headrace.worker.engines.answer import Answer
from headrace.worker.engines.frames import BadFrameError, ErrorFrame, FrameDecoder
from headrace.worker.engines.sse import SseParser, SseTooLongError

LINE = st.binary(max_size=12).filter(lambda line: b"\n" not in line and b"\r" not in line)
NEWLINE = st.sampled_from([b"\n", b"\r\n", b"\r"])
FIELD = st.sampled_from([b"data: ", b"data:", b": ", b"event: ", b"id:", b"retry: ", b"", b"datum: "])


@st.composite
def cut_bytes(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """The bytes in any number of pieces."""
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@st.composite
def wire(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """An event stream with all kinds of fields and line ends, and the events it holds."""
    data = draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))
    events: list[bytes] = []
    for _ in range(draw(st.integers(0, 5))):
        newline = draw(NEWLINE)
        values: list[bytes] = []
        for _ in range(draw(st.integers(0, 3))):
            field, line = draw(FIELD), draw(LINE)
            if not field + line:
                continue
            if field.startswith(b"data:"):
                values.append(line[1:] if field == b"data:" and line.startswith(b" ") else line)
            elif field == b"" and (line.startswith(b"data:") or line == b"data"):
                continue
            data += field + line + newline
        data += newline
        if values:
            events.append(b"\n".join(values))
    return data, events


def feed(pieces: list[bytes]) -> list[bytes]:
    parser = SseParser()
    return [event for piece in pieces for event in parser.feed(piece)]


@given(st.data())
def test_events_do_not_depend_on_how_the_bytes_come(data: st.DataObject) -> None:
    stream, events = data.draw(wire())
    assert feed([stream]) == events
    assert feed(data.draw(cut_bytes(stream))) == events
    assert feed([stream[at : at + 1] for at in range(len(stream))]) == events


def test_events_are_bounded() -> None:
    for endless in (b"data: xxxxxxxx", b"data: xxxxxxxx\n"):
        parser = SseParser(max_event_bytes=64)
        parser.feed(endless * 4)
        with pytest.raises(SseTooLongError):
            parser.feed(endless * 5)


def test_what_is_not_closed_by_an_empty_line_is_no_event() -> None:
    assert feed([b"data: a\n\ndata: b\n"]) == [b"a"]


def chat_frame(text: bytes, finish: str = "null") -> bytes:
    return b'{"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":%s}]}' % (text, finish.encode())


def texts_of(decoder: FrameDecoder, frames: list[bytes]) -> list[str]:
    texts = []
    for frame in frames:
        chunk = decoder.decode(frame)
        assert isinstance(chunk, EngineChunk)
        texts.append("".join(choice.text for choice in chunk.choices))
    return texts


PLAIN = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters='"\\\ufffd'), max_size=12)


@given(st.data())
def test_text_does_not_depend_on_where_its_bytes_are_cut(data: st.DataObject) -> None:
    text = data.draw(PLAIN)
    frames = [chat_frame(piece) for piece in data.draw(cut_bytes(text.encode()))]
    texts = texts_of(FrameDecoder(), [*frames, chat_frame(b"", '"stop"')])
    assert "".join(texts) == text
    assert not any("\ufffd" in piece for piece in texts)


@given(PLAIN)
def test_text_does_not_depend_on_where_its_surrogate_pairs_are_cut(text: str) -> None:
    units = text.encode("utf-16-be")
    frames = [chat_frame(b"\\u%s" % units[at : at + 2].hex().encode()) for at in range(0, len(units), 2)]
    assert "".join(texts_of(FrameDecoder(), [*frames, chat_frame(b"", '"stop"')])) == text


@given(st.binary(max_size=20).filter(lambda raw: not set(raw) & {0x22, 0x5C} and min(raw, default=32) >= 32))
def test_broken_bytes_are_replaced_as_if_they_came_at_once(raw: bytes) -> None:
    frames = [chat_frame(raw[at : at + 1]) for at in range(len(raw))]
    texts = texts_of(FrameDecoder(), [*frames, chat_frame(b"", '"length"')])
    assert "".join(texts) == raw.decode(errors="replace")


@given(st.binary(max_size=40))
def test_any_bytes_are_a_chunk_or_a_bad_frame(data: bytes) -> None:
    for frame in (data, b'{"choices":' + data + b"}", chat_frame(data)):
        with contextlib.suppress(BadFrameError):
            assert isinstance(FrameDecoder().decode(frame), EngineChunk | ErrorFrame)


@pytest.mark.parametrize(
    ("frame", "message", "status"),
    [
        (b'{"error":{"message":"m","code":400}}', "m", 400),
        (b'{"error":{"message":"m","code":"x","status":503}}', "m", 503),
        (b'{"error":"m"}', "m", None),
        (b'{"error":{}}', "no message", None),
    ],
)
def test_error_frames(frame: bytes, message: str, status: int | None) -> None:
    assert FrameDecoder().decode(frame) == ErrorFrame(message=message, status=status)


PIECE: Any = st.tuples(st.text("abc", max_size=4), st.integers(0, 2))


@given(st.lists(PIECE, max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_ids_stand_for_the_text_shown_and_no_stop_string_is_begun(pieces: list[Any], stops: list[str]) -> None:
    """Text and ids of whatever was yielded are those of a whole number of the engine's pieces."""
    answer = Answer(num_choices=1, num_prompt_tokens=1, stops=tuple(stops))
    given_text, shown_text, finish = "", "", None
    given_ids: tuple[int, ...] = ()
    shown_ids: tuple[int, ...] = ()
    ends = {(given_text, given_ids)}
    deltas = [
        ChoiceDelta(text=text, token_ids=(n,) * count, num_tokens=count) for n, (text, count) in enumerate(pieces)
    ]
    for delta in [*deltas, ChoiceDelta(finish_reason="length")]:
        given_text, given_ids = given_text + delta.text, given_ids + delta.token_ids
        ends.add((given_text, given_ids))
        shown = answer.push(EngineChunk(choices=(delta,)))
        for choice in shown.choices if shown is not None else ():
            shown_text, shown_ids, finish = shown_text + choice.text, shown_ids + choice.token_ids, choice.finish_reason
        if finish is None:
            assert (shown_text, shown_ids) in ends
            begun = [size for stop in stops for size in range(1, len(stop) + 1) if given_text.endswith(stop[:size])]
            assert len(shown_text) <= len(given_text) - max(begun, default=0)
        if answer.is_finished:
            break
    assert answer.is_finished
    assert not any(stop in shown_text for stop in stops)
    assert finish == ("stop" if any(stop in "".join(text for text, _ in pieces) for stop in stops) else "length")
    if finish == "length":
        assert shown_text == "".join(text for text, _ in pieces)
