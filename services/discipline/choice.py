"""Which queue a worker takes from next: lanes in strict order, ageing so that none starves, fair shares in a lane."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from headrace.discipline.shares import STRICT, Shares, Turn
from headrace.schemas.subjects import LANES, Lane, QueueName

__all__ = ["STRICT_WEIGHT", "QueueView", "charge", "order"]

STRICT_WEIGHT: Final = 3.0
"""Tokens the highest lane gets for each token of a lower lane whose requests are aged, where both have enough."""
_TURN_WEIGHTS: Final[dict[Turn, float]] = {STRICT: STRICT_WEIGHT}


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """A queue as a worker sees it. `oldest_wait_s` is its head's wait, None where that is not known.

    `num_interrupted` of those that wait were running before; they stand at the head.
    """

    name: QueueName
    num_waiting: int
    oldest_wait_s: float | None = None
    weight: float = 1.0
    num_interrupted: int = 0


class _Snapshot:
    """What waits: by lane, and which queues below the highest waiting lane are aged."""

    def __init__(self, views: Iterable[QueueView], ageing_s: float) -> None:
        self.views = [view for view in views if view.num_waiting > 0]
        self.names = [view.name for view in self.views]
        self.weights = {view.name: view.weight for view in self.views}
        self.interrupted = [view.name for view in self.views if view.num_interrupted > 0]
        lanes = {view.name.lane for view in self.views}
        self.top = next((lane for lane in LANES if lane in lanes), None)
        self.aged: dict[Lane, list[QueueName]] = {}
        for lane in LANES:
            queues = [view.name for view in self.views if view.name.lane == lane and _is_aged(view, ageing_s)]
            if queues and lane != self.top:
                self.aged[lane] = queues

    @property
    def turns(self) -> Sequence[Turn]:
        """The highest lane, then each lower one that is aged."""
        return [STRICT, *self.aged]


def order(views: Iterable[QueueView], shares: Shares, *, ageing_s: float) -> list[QueueName]:
    """Queues with something waiting, each once, in the order to try them. Changes nothing.

    1. Queues with interrupted requests, by lane.
    2. The highest waiting lane and each lower lane with a head that has waited `ageing_s` take turns, 3 tokens to 1
       (`STRICT_WEIGHT`). An aged lane's turn is for its aged queues alone.
    3. The other queues, by lane.
    Within a lane always whose turn it is by `shares`. So one aged request starts after at most one other, and aged
    requests of one lane get a quarter of the tokens and one request more, whatever their number.
    """
    seen = _Snapshot(views, ageing_s)
    if seen.top is None:
        return []
    ordered = shares.order(seen.interrupted, seen.weights)
    for turn in shares.lanes.order(seen.turns, _TURN_WEIGHTS):
        queues = seen.aged[turn] if turn != STRICT else [name for name in seen.names if name.lane == seen.top]
        ordered += shares.order(queues, seen.weights)
    ordered += shares.order(seen.names, seen.weights)
    return list(dict.fromkeys(ordered))


def charge(
    views: Iterable[QueueView],
    shares: Shares,
    queue: QueueName,
    tokens: float,
    *,
    ageing_s: float,
    is_undone: bool = False,
) -> None:
    """Pay for a request taken from `queue`, with the views of the choice; negative: a refund.

    The lanes' turns are paid too, by the highest lane or by one served because it was aged; never for interrupted
    requests, and paid back only where the choice `is_undone`: the request stands at the head of its queue again.
    """
    seen = _Snapshot(views, ageing_s)
    shares.charge(queue, tokens, seen.names, seen.weights)
    if (tokens <= 0 and not is_undone) or queue in seen.interrupted:
        return
    if seen.top is None or LANES.index(queue.lane) <= LANES.index(seen.top):
        shares.lanes.charge(STRICT, tokens, seen.turns, _TURN_WEIGHTS)
    elif queue in seen.aged.get(queue.lane, ()):
        shares.lanes.charge(queue.lane, tokens, seen.turns, _TURN_WEIGHTS)


def _is_aged(view: QueueView, ageing_s: float) -> bool:
    return view.oldest_wait_s is not None and view.oldest_wait_s >= ageing_s
