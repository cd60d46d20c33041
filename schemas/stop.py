"""Stop strings over a stream of pieces: none is ever emitted, not even in part."""

from collections import deque

import msgspec

from headrace.schemas.chunks import ChoiceDelta, merge_choices

__all__ = ["StopMatcher"]


class _Automaton:
    """Aho and Corasick's machine: one step per character finds every stop string at once.

    A state stands for the longest end of the text read so far that begins some stop string; `depths` is its length.
    `found` is the length of the longest stop string that ends here, 0 if none does. A character without a way
    on follows `fallbacks`, to the longest shorter beginning; each step deeper pays for one such step back.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.fallbacks = [0]
        self.depths = [0]
        self.found = [0]
        for stop in stops:
            state = 0
            for depth, char in enumerate(stop, start=1):
                if char not in self.children[state]:
                    self.children[state][char] = len(self.children)
                    self.children.append({})
                    self.fallbacks.append(0)
                    self.depths.append(depth)
                    self.found.append(0)
                state = self.children[state][char]
            self.found[state] = len(stop)
        todo = deque(self.children[0].values())
        while todo:
            state = todo.popleft()
            self.found[state] = self.found[state] or self.found[self.fallbacks[state]]
            for char, child in self.children[state].items():
                self.fallbacks[child] = self.step(self.fallbacks[state], char)
                todo.append(child)

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while state and char not in self.children[state]:
            state = self.fallbacks[state]
        return self.children[state].get(char, 0)


class StopMatcher:
    """Looks for stop strings in the text of one choice; matches may lie across any number of pieces.

    The stop string that is complete first ends the text, right before it begins; of two complete at the same
    character the longer one counts. How the text is cut into pieces changes nothing. Whole pieces are held back, from
    the first in which a stop string may have begun, and come out in order once it has not. Time is linear in
    the text, whatever the stop strings; no more is held back than the longest of them and the piece it begins in.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._automaton = _Automaton(stops)
        self._state = 0
        self._held: deque[ChoiceDelta] = deque()
        self._num_held_chars = 0
        self._is_stopped = False

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found: the answer is complete, and the caller aborts the engine's request."""
        return self._is_stopped

    def push(self, piece: ChoiceDelta) -> tuple[ChoiceDelta, ...]:
        """Pieces that can go out now that `piece` came.

        When a stop string is found the last of them has finish_reason `stop` and stands for all pieces from
        the one the stop string begins in: tokens that were computed are counted, though their text is cut. After that
        nothing comes out any more. A piece with a finish_reason releases everything held.
        """
        if self._is_stopped:
            return ()
        self._held.append(piece)
        end, length = self._advance(piece.text)
        if length:
            return self._stop(self._num_held_chars + end - length)
        self._num_held_chars += len(piece.text)
        if piece.finish_reason is not None:
            return self.flush()
        return self._release(self._automaton.depths[self._state])

    def flush(self) -> tuple[ChoiceDelta, ...]:
        """All pieces still held back: the text ended, no stop string can be completed any more."""
        self._state = 0
        return self._release(0)

    def _advance(self, text: str) -> tuple[int, int]:
        """Read on; (end in `text`, length) of the first stop string completed, (0, 0) if there is none."""
        automaton, state = self._automaton, self._state
        if automaton.children[0]:
            for position, char in enumerate(text, start=1):
                state = automaton.step(state, char)
                if automaton.found[state]:
                    return position, automaton.found[state]
        self._state = state
        return 0, 0

    def _stop(self, start: int) -> tuple[ChoiceDelta, ...]:
        self._is_stopped = True
        whole = []
        while len(self._held[0].text) <= start:
            piece = self._held.popleft()
            start -= len(piece.text)
            whole.append(piece)
        (last,) = merge_choices([self._held])
        self._held.clear()
        self._num_held_chars = 0
        return (*whole, msgspec.structs.replace(last, text=last.text[:start], finish_reason="stop"))

    def _release(self, num_chars_kept: int) -> tuple[ChoiceDelta, ...]:
        released = []
        while self._held and self._num_held_chars - len(self._held[0].text) >= num_chars_kept:
            piece = self._held.popleft()
            self._num_held_chars -= len(piece.text)
            released.append(piece)
        return tuple(released)
