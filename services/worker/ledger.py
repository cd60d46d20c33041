"""What a worker has promised its engine's memory to."""

from collections.abc import Hashable

from headrace.discipline.room import Room

__all__ = ["Ledger"]


class Ledger:
    """KV tokens and slots reserved by the requests a worker runs.

    Reserved at claim, released at the end whatever the end is. Concurrency and memory are checked together; a capacity
    of None means the engine does not tell, and only concurrency counts.
    """

    def __init__(self, *, capacity_tokens: int | None, max_concurrency: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.max_concurrency = max_concurrency
        self._needs: dict[Hashable, int] = {}

    def __contains__(self, holder: Hashable) -> bool:
        return holder in self._needs

    def room(self, *, is_above_high_water: bool = False) -> Room:
        """The same figures for the discipline, which says what fits."""
        return Room(
            capacity_tokens=self.capacity_tokens,
            reserved_tokens=self.reserved_tokens,
            max_concurrency=self.max_concurrency,
            num_running=self.num_running,
            is_above_high_water=is_above_high_water,
        )

    @property
    def reserved_tokens(self) -> int:
        """KV tokens reserved now."""
        return sum(self._needs.values())

    @property
    def num_running(self) -> int:
        """Requests holding a reservation."""
        return len(self._needs)

    def reserve(self, holder: Hashable, need_tokens: int) -> None:
        """Reserve for whoever holds a message; a later holder of the same one is another.

        Raises ValueError if it does not fit or is reserved already.
        """
        if holder in self._needs or not self.room().fits(need_tokens):
            raise ValueError(f"cannot reserve {need_tokens} tokens for {holder}")
        self._needs[holder] = need_tokens

    def release(self, holder: Hashable) -> None:
        """Give a reservation back; nothing if there is none."""
        self._needs.pop(holder, None)
