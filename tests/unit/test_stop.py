"""Stop strings across pieces."""

from headrace.schemas.chunks import ChoiceDelta, ToolCallDelta
from headrace.schemas.stop import StopMatcher


def piece(text: str, **fields: object) -> ChoiceDelta:
    return ChoiceDelta(text=text, num_tokens=1, **fields)  # type: ignore[arg-type]


def test_stop_string_across_pieces_cuts_before_it() -> None:
    matcher = StopMatcher(("own fox",))
    assert matcher.push(piece("The quick br")) == (piece("The quick br"),)
    assert matcher.push(piece("own")) == ()
    (last,) = matcher.push(piece(" fox"))
    assert last == ChoiceDelta(text="", num_tokens=2, finish_reason="stop")
    assert matcher.is_stopped
    assert matcher.push(piece(" jumps")) == ()
    assert matcher.flush() == ()


def test_pieces_come_out_whole_when_the_match_fails() -> None:
    matcher = StopMatcher(("own fox",))
    first, second, third = piece("The quick brown"), piece(" f"), piece("lea")
    assert matcher.push(first) == ()
    assert matcher.push(second) == ()
    assert matcher.push(third) == (first, second, third)
    assert not matcher.is_stopped


def test_flush_releases_what_is_held() -> None:
    matcher = StopMatcher(("fox",))
    assert matcher.push(piece("a fo")) == ()
    assert matcher.flush() == (piece("a fo"),)


def test_finish_reason_releases_what_is_held() -> None:
    matcher = StopMatcher(("fox",))
    end = ChoiceDelta(finish_reason="length")
    assert matcher.push(piece("a fo")) == ()
    assert matcher.push(end) == (piece("a fo"), end)


def test_match_in_the_finishing_piece_wins() -> None:
    matcher = StopMatcher(("fox",))
    (last,) = matcher.push(piece("a fox!", finish_reason="length"))
    assert (last.text, last.finish_reason) == ("a ", "stop")


def test_pieces_without_text_keep_their_order() -> None:
    matcher = StopMatcher(("fox",))
    role = ChoiceDelta(role="assistant")
    call = ChoiceDelta(tool_calls=(ToolCallDelta(index=0, name="f"),))
    assert matcher.push(role) == (role,)
    assert matcher.push(piece("fo")) == ()
    assert matcher.push(call) == ()
    assert matcher.push(piece("g")) == (piece("fo"), call, piece("g"))


def test_cut_tokens_are_still_counted() -> None:
    matcher = StopMatcher(("cd",))
    assert matcher.push(ChoiceDelta(text="abc", token_ids=(1, 2), num_tokens=2)) == ()
    (last,) = matcher.push(ChoiceDelta(text="de", token_ids=(3,), num_tokens=1))
    assert last == ChoiceDelta(text="ab", token_ids=(1, 2, 3), num_tokens=3, finish_reason="stop")


def test_of_two_stops_the_one_complete_first_wins() -> None:
    matcher = StopMatcher(("abcX", "bc"))
    (last,) = matcher.push(piece("-abcX"))
    assert last.text == "-a"


def test_of_two_stops_complete_together_the_longer_wins() -> None:
    matcher = StopMatcher(("bc", "abc"))
    (last,) = matcher.push(piece("-abc"))
    assert last.text == "-"


def test_without_stops_all_passes() -> None:
    matcher = StopMatcher(())
    assert matcher.push(piece("x")) == (piece("x"),)
