"""Deficit round robin: turns in proportion to weights, counted in tokens and paid after the service."""

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

__all__ = ["Rounds"]

K = TypeVar("K", bound=Hashable)


class Rounds(Generic[K]):
    """Whose turn it is among those that have something waiting ("backlogged").

    Each has a balance of tokens. A round adds quantum · weight to each; a turn lasts while the balance is above zero;
    a service is subtracted when its size is known, so a balance may fall below zero, by less than one service. That
    is the surplus variant (Adiseshu, Parulkar, Varghese, SIGCOMM 1996) of deficit round robin (Shreedhar, Varghese,
    SIGCOMM 1995). Rounds in which nobody gets above zero are skipped in one step, so a small quantum costs nothing.

    Bound: for i and j backlogged over any interval in which each service is of the first in `order`, with S tokens
    served to each and no service above M: |S_i/w_i - S_j/w_j| <= quantum + M/w_i + M/w_j. With equal weights of 1
    that is the 2·Max + Q of 1995.

    Who is idle saves nothing up: at the next round its credit is gone. Its debt stays until the rounds of the others
    have paid it; so the bound above holds one-sidedly too: who comes and goes gets no more than who stays. Who is
    passed over forfeits the turn, as in any round robin. A weight that is missing is 1; weights are above 0.
    Remembers whoever is backlogged, in debt, or had a turn this round.
    """

    def __init__(self, *, quantum_tokens: float = 1.0) -> None:
        if not quantum_tokens > 0:
            raise ValueError("quantum_tokens must be above 0")
        self._quantum_tokens = quantum_tokens
        self._balances: dict[K, float] = {}

    def order(self, backlogged: Iterable[K], weights: Mapping[K, float]) -> list[K]:
        """Whose turn it is, then who would follow if the ones before had nothing after all. Changes nothing.

        Newcomers take their first turn at the end of this round, in the order given.
        """
        waiting = dict.fromkeys(backlogged)
        balances = self._joined(waiting, weights)
        places = {key: place for place, key in enumerate(balances)}
        return sorted(waiting, key=lambda key: (self._num_rounds(balances[key], weights.get(key, 1.0)), places[key]))

    def charge(self, key: K, tokens: float, backlogged: Iterable[K], weights: Mapping[K, float]) -> None:
        """Pay for a service of `tokens`; negative: a refund, for one handed back or one that was shorter.

        `backlogged` is as at the choice; `key` counts as one of them for a service. A refund leaves one that is idle
        with no credit.
        """
        waiting = dict.fromkeys(backlogged)
        if tokens > 0:
            waiting[key] = None
        balances = self._joined(waiting, weights)
        if tokens > 0:
            balances = self._advanced(
                balances, self._num_rounds(balances[key], weights.get(key, 1.0)), waiting, weights
            )
            balances[key] -= tokens
        elif key in waiting:
            balances[key] -= tokens
        elif balances.get(key, 0.0) < 0:
            balances[key] = min(0.0, balances[key] - tokens)
        self._balances = balances

    def _joined(self, waiting: Mapping[K, None], weights: Mapping[K, float]) -> dict[K, float]:
        """The balances, with a newcomer's first quantum: its turn is the last of this round."""
        return self._balances | {
            key: self._quantum_tokens * weights.get(key, 1.0) for key in waiting if key not in self._balances
        }

    def _num_rounds(self, balance: float, weight: float) -> int:
        """Rounds until the balance is above zero."""
        if balance > 0:
            return 0
        gain = self._quantum_tokens * weight
        num_rounds = math.floor(-balance / gain) + 1
        return num_rounds if balance + num_rounds * gain > 0 else num_rounds + 1

    def _advanced(
        self, balances: Mapping[K, float], num_rounds: int, waiting: Mapping[K, None], weights: Mapping[K, float]
    ) -> dict[K, float]:
        """The balances after so many rounds; who is idle and out of debt is forgotten."""
        if num_rounds == 0:
            return dict(balances)
        after: dict[K, float] = {}
        for key, balance in balances.items():
            gain = self._quantum_tokens * weights.get(key, 1.0)
            paid = balance + num_rounds * gain
            if key in waiting:
                after[key] = max(balance, min(gain, paid))
            elif paid < 0:
                after[key] = paid
        return after
