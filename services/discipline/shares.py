"""Fair shares: what each queue and each lane has had, as one worker has served them."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from headrace.discipline.rounds import Rounds
from headrace.schemas.subjects import LANES, Lane, QueueName

__all__ = ["STRICT", "Shares", "Turn"]

STRICT: Final = "strict"
Turn = Literal["strict", "high", "normal", "low"]
"""A turn above the queues: the highest lane's by right, or that of a lower lane whose requests are aged."""


class Shares:
    """Deficit round robin by tokens over the queues of each lane, and over the lanes' turns.

    Deterministic: the same calls give the same answers. One worker's memory, lost with it at no harm. `lanes` is the
    business of `choice`. A quantum below the smallest request makes each turn one request, so a queue that comes late
    waits for one and not for a burst.
    """

    def __init__(self, *, quantum_tokens: float = 1.0) -> None:
        self._queues: dict[Lane, Rounds[QueueName]] = {lane: Rounds(quantum_tokens=quantum_tokens) for lane in LANES}
        self.lanes: Rounds[Turn] = Rounds(quantum_tokens=quantum_tokens)

    def order(self, backlogged: Sequence[QueueName], weights: Mapping[QueueName, float]) -> list[QueueName]:
        """The queues by lane, in each lane whose turn it is, then who would follow. Changes nothing.

        Queues not seen before line up by name. A weight that is missing is 1.
        """
        ordered = []
        for lane in LANES:
            of_lane = sorted(queue for queue in backlogged if queue.lane == lane)
            ordered += self._queues[lane].order(of_lane, weights)
        return ordered

    def charge(
        self, queue: QueueName, tokens: float, backlogged: Sequence[QueueName], weights: Mapping[QueueName, float]
    ) -> None:
        """Pay for a request taken from the queue; negative: a refund, after a hand-back or a shorter answer.

        `backlogged` as at the choice; queues of other lanes in it do not matter.
        """
        of_lane = sorted(each for each in backlogged if each.lane == queue.lane)
        self._queues[queue.lane].charge(queue, tokens, of_lane, weights)
