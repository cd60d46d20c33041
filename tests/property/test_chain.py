"""Whatever is lost, repeated or reordered on the way, a reader takes each event once and in order, or none."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.client.chain import Chain, Link
from headrace.schemas.events import Event


def a_log(counts: list[int]) -> list[Event]:
    """accepted, started, deltas of these counts, done; other jobs' events lie between, so sequences have gaps."""
    kinds = ["accepted", "started", *("delta" for _ in counts), "done"]
    events: list[Event] = []
    offset, sequence = 0, 0
    for place, kind in enumerate(kinds):
        count = counts[place - 2] if kind == "delta" else 0
        previous, sequence = sequence, sequence + 1 + place % 3
        events.append(
            Event(
                kind=kind,  # type: ignore[arg-type]
                job="j",
                offset=offset,
                count=count,
                sequence=sequence,
                last_sequence=previous,
            )
        )
        offset += count
    return events


@given(st.lists(st.integers(1, 5), max_size=8), st.data())
def test_a_reader_that_repairs_takes_every_event_once_and_in_order(counts: list[int], data: st.DataObject) -> None:
    log = a_log(counts)
    live = data.draw(st.lists(st.sampled_from(log), max_size=20))
    chain = Chain()
    taken: list[Event] = []
    for event in live:
        link = chain.link(event, is_from_log=False)
        if link is Link.NEXT:
            chain.take(event)
            taken.append(event)
        elif link is Link.GAP:
            stored_so_far = [each for each in log if each.sequence <= event.sequence]
            for missing in stored_so_far:
                if chain.link(missing, is_from_log=True) is Link.NEXT:
                    chain.take(missing)
                    taken.append(missing)
        assert taken == log[: len(taken)]
    for event in log:  # the look after a silence
        if chain.link(event, is_from_log=True) is Link.NEXT:
            chain.take(event)
            taken.append(event)
    assert taken == log


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.data())
def test_a_log_that_lost_tokens_is_never_read_as_whole(counts: list[int], data: st.DataObject) -> None:
    log = a_log(counts)
    gone = data.draw(st.integers(0, len(counts) - 1))
    chain = Chain()
    links = []
    for event in log:
        if event is log[2 + gone]:
            continue
        link = chain.link(event, is_from_log=True)
        links.append(link)
        if link is Link.NEXT:
            chain.take(event)
    assert Link.LOST in links
    assert chain.num_tokens == sum(counts[:gone])
