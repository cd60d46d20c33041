"""What a worker has promised its engine's memory to."""

from collections.abc import Callable, Hashable

from headrace.discipline.capacity import MeasuredCapacity
from headrace.discipline.room import Room

__all__ = ["Ledger"]


class Ledger:
    """KV tokens and slots reserved by the requests a worker runs.

    Reserved at claim, released at the end whatever the end is. Concurrency and memory are checked together; a capacity
    of None means the engine does not tell, and only concurrency counts. Where it is `measured`, that is the capacity;
    it may fall below what is reserved, and what is released counts as reserved until a measurement. `on_release` is
    called when one would show more. `claim` asks whoever shares the memory with others for so many more tokens.
    """

    def __init__(self, *, capacity_tokens: int | None, max_concurrency: int) -> None:
        self._capacity_tokens = capacity_tokens
        self.measured: MeasuredCapacity | None = None
        self.on_release: Callable[[], None] = lambda: None
        self.claim: Callable[[int], bool] = lambda need_tokens: True
        self.max_concurrency = max_concurrency
        self._needs: dict[Hashable, int] = {}

    def __contains__(self, holder: Hashable) -> bool:
        return holder in self._needs

    @property
    def capacity_tokens(self) -> int | None:
        """KV tokens that requests may hold together."""
        return self._capacity_tokens if self.measured is None else self.measured.tokens

    @capacity_tokens.setter
    def capacity_tokens(self, tokens: int | None) -> None:
        self._capacity_tokens = tokens

    def need_of(self, holder: Hashable) -> int | None:
        """KV tokens that it reserved; None if it did not."""
        return self._needs.get(holder)

    def room(self, *, is_above_high_water: bool = False) -> Room:
        """The same figures for the discipline, which says what fits."""
        return Room(
            capacity_tokens=self.capacity_tokens,
            peak_tokens=self.measured.peak_tokens if self.measured is not None else None,
            reserved_tokens=self.reserved_tokens,
            max_concurrency=self.max_concurrency,
            num_running=self.num_running,
            is_above_high_water=is_above_high_water,
        )

    @property
    def reserved_tokens(self) -> int:
        """KV tokens reserved now."""
        return sum(self._needs.values()) + (self.measured.unseen_tokens if self.measured is not None else 0)

    @property
    def num_running(self) -> int:
        """Requests holding a reservation."""
        return len(self._needs)

    def reserve(self, holder: Hashable, need_tokens: int) -> bool:
        """Reserve for whoever holds a message, unless others had the memory first; a later holder of it is another.

        Raises ValueError if it does not fit or is reserved already.
        """
        if holder in self._needs or not self.room().fits(need_tokens):
            raise ValueError(f"cannot reserve {need_tokens} tokens for {holder}")
        if not self.claim(need_tokens):
            return False
        self._needs[holder] = need_tokens
        return True

    def release(self, holder: Hashable) -> None:
        """Give a reservation back; nothing if there is none."""
        need_tokens = self._needs.pop(holder, None)
        if need_tokens is not None and self.measured is not None:
            self.measured.release(need_tokens)
            self.on_release()
