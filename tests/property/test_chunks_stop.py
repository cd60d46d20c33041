"""How text is cut into pieces changes nothing: not the response, not where a stop string ends it."""

from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas.chunks import ChoiceDelta, ToolCallDelta, Usage, merge_choices
from headrace.schemas.openai_chunks import ChunkEncoder, decode_chunk
from headrace.schemas.responses import ResponseAssembler
from headrace.schemas.stop import StopMatcher

USAGE = Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2)

texts = st.text(max_size=4)
token_ids = st.lists(st.integers(0, 200_000), max_size=3).map(tuple)
logprobs = st.none() | st.fixed_dictionaries({"content": st.none() | st.lists(st.floats(-9, 0), max_size=2)})


@st.composite
def chat_deltas(draw: st.DrawFn, index: int = 0) -> ChoiceDelta:
    ids = draw(token_ids)
    return ChoiceDelta(
        index=index,
        role=draw(st.none() | st.just("assistant")),
        text=draw(texts),
        reasoning=draw(texts),
        tool_calls=tuple(
            ToolCallDelta(index=call, arguments=draw(texts)) for call in draw(st.lists(st.integers(0, 2), unique=True))
        ),
        logprobs=draw(logprobs),
        token_ids=ids,
        num_tokens=len(ids) or draw(st.integers(0, 3)),
        finish_reason=draw(st.none() | st.sampled_from(["stop", "length"])),
    )


streams = st.lists(st.tuples(chat_deltas()) | st.tuples(chat_deltas(index=1), chat_deltas(index=0)), max_size=8)


def response(stream: list[tuple[ChoiceDelta, ...]]) -> tuple[dict[str, Any], int]:
    assembler = ResponseAssembler("chat")
    for choices in stream:
        assembler.add(choices)
    return assembler.response(id="i", created=1, model="m", usage=USAGE), assembler.num_tokens


@settings(max_examples=60, deadline=None)
@given(stream=streams, cut=st.integers(0, 8))
def test_merging_any_part_of_a_stream_keeps_the_response(stream: list[tuple[ChoiceDelta, ...]], cut: int) -> None:
    merged = [merge_choices(stream[:cut]), merge_choices(stream[cut:])]
    assert response(merged) == response(stream)
    assert merge_choices(merged) == merge_choices(stream)


@settings(max_examples=60, deadline=None)
@given(choice=chat_deltas(), head=st.none() | st.tuples(st.text(min_size=1), st.text(min_size=1)))
def test_a_chat_chunk_reads_back_exactly(choice: ChoiceDelta, head: tuple[str, str] | None) -> None:
    call = () if head is None else (ToolCallDelta(index=9, id=head[0], type="function", name=head[1], arguments="{"),)
    choices = (ChoiceDelta(**{**as_fields(choice), "tool_calls": choice.tool_calls + call}),)
    data = ChunkEncoder("chat", id="i", created=1, model="m").encode(choices)
    assert decode_chunk(data, num_tokens=choice.num_tokens) == choices


@settings(max_examples=60, deadline=None)
@given(text=texts, ids=token_ids, finish_reason=st.none() | st.just("stop"), logprob=logprobs)
def test_a_completions_chunk_reads_back_exactly(
    text: str, ids: tuple[int, ...], finish_reason: str | None, logprob: dict[str, Any] | None
) -> None:
    choice = ChoiceDelta(
        text=text, token_ids=ids, num_tokens=len(ids) or 2, finish_reason=finish_reason, logprobs=logprob
    )
    data = ChunkEncoder("completions", id="i", created=1, model="m").encode((choice,))
    assert decode_chunk(data, num_tokens=choice.num_tokens) == (choice,)


def as_fields(choice: ChoiceDelta) -> dict[str, Any]:
    return {name: getattr(choice, name) for name in choice.__struct_fields__}


def expected_end(text: str, stops: tuple[str, ...]) -> int | None:
    """Where the first stop string to be complete begins, the longest of those complete together."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return min(found)[1] if found else None


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab ", max_size=30),
    stops=st.lists(st.text(alphabet="ab ", min_size=1, max_size=5), max_size=3).map(tuple),
    cuts=st.lists(st.integers(0, 30), max_size=10),
)
def test_stop_matcher_equals_a_search_in_the_whole_text(text: str, stops: tuple[str, ...], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    end = expected_end(text, stops)
    limit = len(text) if end is None else end
    out: list[ChoiceDelta] = []
    for begin, stop in pairwise([0, *sorted(cuts), len(text) if not cuts else max(len(text), *cuts)]):
        out += matcher.push(ChoiceDelta(text=text[begin:stop], num_tokens=1))
        sent = "".join(piece.text for piece in out)
        assert text.startswith(sent)
        assert len(sent) <= limit
        if matcher.is_stopped:
            break
    assert matcher.is_stopped == (end is not None)
    if end is None:
        out += matcher.flush()
    assert "".join(piece.text for piece in out) == text[:limit]
    assert [piece.finish_reason for piece in out if piece.finish_reason] == ([] if end is None else ["stop"])
