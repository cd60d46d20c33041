"""One answer as it grows: which choices are done, what may be shown, and the usage at its end."""

import msgspec

from headrace.errors import EngineError
from headrace.schemas.chunks import ChoiceDelta, EngineChunk, Usage, merge_choices
from headrace.schemas.stop import StopMatcher

__all__ = ["Answer"]


class Answer:
    """Turns an engine's raw chunks into what `Engine.generate` promises.

    Each choice has its role once (not at all when resumed), pieces only until its finish_reason, and no part of a
    stop string, whether or not the engine honours them. Tokens without text of their own (half a character) wait
    for the text they belong to. Usage is kept for `last_chunk`; an engine that sent none is counted:
    `num_prompt_tokens` as given, completion tokens as seen.
    """

    def __init__(
        self, *, num_choices: int, num_prompt_tokens: int, stops: tuple[str, ...] = (), is_resumed: bool = False
    ) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._matchers = [StopMatcher(stops) for _ in range(num_choices)]
        self._silent: list[list[ChoiceDelta]] = [[] for _ in range(num_choices)]
        self._with_role = set(range(num_choices)) if is_resumed else set()
        self._finished: set[int] = set()
        self._num_tokens = 0
        self._usage: Usage | None = None

    @property
    def is_finished(self) -> bool:
        """Every choice has its finish_reason."""
        return len(self._finished) == len(self._matchers)

    @property
    def is_cut(self) -> bool:
        """A stop string ended a choice here, and the engine does not know."""
        return any(matcher.is_stopped for matcher in self._matchers)

    @property
    def has_tokens(self) -> bool:
        """The engine has produced something."""
        return self._num_tokens > 0

    def push(self, chunk: EngineChunk) -> EngineChunk | None:
        """What of this chunk, and of what waited for it, is to be yielded now. Raises `EngineError`."""
        if chunk.usage is not None:
            self._usage = chunk.usage
        pieces = tuple(piece for choice in chunk.choices for piece in self._push_choice(choice))
        if not pieces and not chunk.prompt_token_ids:
            return None
        return EngineChunk(choices=pieces, prompt_token_ids=chunk.prompt_token_ids)

    def last_chunk(self) -> EngineChunk:
        """The usage, after every choice has finished."""
        usage = self._usage
        if usage is None or self.is_cut:
            num_prompt_tokens = self._num_prompt_tokens if usage is None else usage.prompt_tokens
            usage = Usage(
                prompt_tokens=num_prompt_tokens,
                completion_tokens=self._num_tokens,
                total_tokens=num_prompt_tokens + self._num_tokens,
            )
        return EngineChunk(usage=usage)

    def _push_choice(self, choice: ChoiceDelta) -> tuple[ChoiceDelta, ...]:
        index = choice.index
        if not 0 <= index < len(self._matchers):
            raise EngineError(f"the engine sent choice {index} of {len(self._matchers)}")
        if index in self._finished:
            return ()
        if choice.finish_reason == "abort":
            raise EngineError("the engine aborted the request")
        self._num_tokens += choice.num_tokens
        if choice.role is not None:
            if index in self._with_role:
                choice = msgspec.structs.replace(choice, role=None)
            self._with_role.add(index)
        if choice == ChoiceDelta(index=index):
            return ()
        silent = self._silent[index]
        if choice.num_tokens and not (choice.text or choice.reasoning or choice.tool_calls or choice.finish_reason):
            silent.append(choice)
            return ()
        if silent:
            (choice,) = merge_choices([[*silent, choice]])
            silent.clear()
        pieces = merge_choices([self._matchers[index].push(choice)])
        if pieces and pieces[-1].finish_reason is not None:
            self._finished.add(index)
        return pieces
