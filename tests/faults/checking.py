"""Whether a finished run kept its promises: pure rules over what the log says and what readers saw."""

from collections.abc import Sequence

import msgspec

from headrace.client import Delta, Done, Requeued, Started
from headrace.client.events import from_event
from headrace.schemas.events import Event
from headrace.schemas.states import State, next_state
from headrace.worker.engines.sim_text import SimText
from tests.deployment import MODEL

__all__ = ["Seen", "Wanted", "problems_of_log", "problems_of_reader", "sim_answer"]


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A request, and how it may end. `max_faults` is what the deployment gives a job up after.

    `num_tokens` are those of each of its `n` choices. `is_cancelled`: somebody tried to cancel it.
    """

    job: str
    prompt: str
    num_tokens: int
    max_faults: int
    n: int = 1
    is_streaming: bool = True
    is_cancelled: bool = False

    @property
    def text(self) -> str:
        """The whole answer of an undisturbed run, choice 0."""
        return sim_answer(self.prompt, self.num_tokens)


class Seen(msgspec.Struct, kw_only=True):
    """What one reader of a stream saw; `after` is the offset it asked to begin at.

    `end` is the kind of the terminal event, or what went wrong where there was none.
    """

    job: str
    after: int = 0
    starts: list[Started] = []
    requeues: list[Requeued] = []
    deltas: list[Delta] = []
    end: str = ""
    done: Done | None = None


def sim_answer(prompt: str, num_tokens: int) -> str:
    """What the `sim` engine answers to a prompt; a pure function, whoever runs it and however often it is resumed."""
    text = SimText(seed=0, model=MODEL, prompt=prompt, index=0)
    return "".join(text.piece(place) for place in range(num_tokens))


def problems_of_log(wanted: Wanted, events: Sequence[Event]) -> list[str]:
    """What is wrong with a job's log; nothing for one that ended once, whole, with the right text."""
    if not events:
        return [f"{wanted.job}: the log is empty"]
    problems = _problems_of_chain(events) + _problems_of_attempts(events) + _problems_of_end(wanted, events)
    return [f"{wanted.job}: {problem}" for problem in problems]


def problems_of_reader(wanted: Wanted, events: Sequence[Event], seen: Seen) -> list[str]:
    """What is wrong with what a reader saw of a job that ended as its log says."""
    problems = []
    last = events[-1] if events else None
    if last is None or seen.end != last.kind:
        problems.append(f"it ended with {seen.end!r}, the log with {last.kind if last else 'nothing'}")
    # An event is read as a whole or not at all: one that `after` falls into counts as read before.
    begins = [event.offset for event in events if event.kind == "delta" and event.offset >= seen.after]
    first = begins[0] if begins else last.offset if last is not None else 0
    offset = first
    for delta in seen.deltas:
        if delta.offset != offset:
            problems.append(f"token {delta.offset} where {offset} was next")
        offset = delta.offset + delta.num_tokens
    if last is not None and wanted.is_streaming and offset != last.offset:
        problems.append(f"it saw tokens up to {offset}, the log has {last.offset}")
    if not seen.after:
        problems += _problems_of_text(wanted, "".join(delta.text for delta in seen.deltas), seen.done)
    attempts = [start.attempt for start in seen.starts]
    if attempts != sorted(set(attempts)):
        problems.append(f"attempts out of order: {attempts}")
    return [f"{wanted.job}: reader after {seen.after}: {problem}" for problem in problems]


def _problems_of_chain(events: Sequence[Event]) -> list[str]:
    problems = []
    state: State = "queued"
    previous = 0
    for event in events:
        if event.last_sequence != previous:
            problems.append(f"{event.kind} at {event.sequence} expected {event.last_sequence}, before it is {previous}")
        previous = event.sequence
        after = next_state(state, event.kind)
        if after is None:
            problems.append(f"{event.kind} at {event.sequence} follows state {state}")
            break
        if event.kind == "accepted" and event is not events[0]:
            problems.append(f"accepted at {event.sequence} is not the first event")
        state = after
    num_ends = sum(event.is_terminal for event in events)
    if num_ends != 1:
        problems.append(f"{num_ends} terminal events")
    return problems


def _problems_of_attempts(events: Sequence[Event]) -> list[str]:
    problems = []
    offset, attempt = 0, 1
    runner: Event | None = None
    for event in events:
        where = f"{event.kind} at {event.sequence}"
        if event.kind == "requeued":
            attempt += 1
        if event.attempt != attempt and event.kind != "accepted":
            problems.append(f"{where} is of attempt {event.attempt}, which is {attempt}")
        if event.offset != offset and event.kind != "accepted":
            problems.append(f"{where} has offset {event.offset}, {offset} tokens are before it")
        if event.kind == "started":
            runner = event
        if event.kind in ("delta", "done"):
            is_runner = runner is not None and runner.owner is not None and runner.owner.is_same(event.owner)
            if not is_runner:
                problems.append(f"{where} is by {event.owner}, not by who started the attempt")
        offset += event.count
    return problems


def _problems_of_end(wanted: Wanted, events: Sequence[Event]) -> list[str]:
    last = events[-1]
    shown = [from_event(event) for event in events if event.kind in ("delta", "done")]
    text = "".join(event.text for event in shown if isinstance(event, Delta))
    done = next((event for event in shown if isinstance(event, Done)), None)
    problems = _problems_of_text(wanted, text, done)
    if last.kind == "cancelled" and not wanted.is_cancelled:
        problems.append("cancelled, and nobody asked for it")
    elif last.kind == "failed":
        problems += _problems_of_failure(wanted, events)
    elif last.kind == "expired":
        problems.append("expired")
    return problems


def _problems_of_failure(wanted: Wanted, events: Sequence[Event]) -> list[str]:
    refusal = events[-1].error()
    code = refusal.code if refusal is not None else ""
    faults = {event.lost for event in events if event.lost is not None}
    if code == "job_failed":
        return [] if len(faults) >= wanted.max_faults else [f"given up after {len(faults)} faults: {sorted(faults)}"]
    if code == "not_resumable":
        was_interrupted = events[-1].offset > 0 and any(event.kind == "requeued" for event in events)
        return [] if wanted.n > 1 and was_interrupted else ["not_resumable, though it is or was not interrupted"]
    return [f"failed with {code}: {refusal.message if refusal is not None else ''}"]


def _problems_of_text(wanted: Wanted, text: str, done: Done | None) -> list[str]:
    problems = []
    if not wanted.text.startswith(text):
        problems.append(f"the deltas say {text!r}, an undisturbed run {wanted.text!r}")
    if done is None:
        return problems
    if done.text != wanted.text:
        problems.append(f"done says {done.text!r}, an undisturbed run {wanted.text!r}")
    if wanted.is_streaming and text != done.text:
        problems.append(f"the deltas say {text!r}, done {done.text!r}")
    if done.usage is None or done.usage.completion_tokens != wanted.n * wanted.num_tokens:
        problems.append(f"usage is {done.usage}, {wanted.n * wanted.num_tokens} tokens were wanted")
    return problems
