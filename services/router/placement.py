"""Which model and queue take a request now: the one asked for, or its fallback where that one could not in time."""

import math

import msgspec

from headrace.bus.configuration import ConfigView
from headrace.bus.connection import Bus
from headrace.discipline.position import position, waiting_of
from headrace.router.admission import Wish
from headrace.router.models import Models
from headrace.router.routing import choose_queue
from headrace.router.sizing import Sizing
from headrace.schemas.refusals import Refusal

__all__ = ["Placed", "Placement"]


class Placed(msgspec.Struct, frozen=True):
    """A request with its model and queue, and the KV tokens it may come to need and to generate there.

    `fallback` is the same request as routed to its fallback, `is_fallback` says that this is it.
    """

    wish: Wish
    need_tokens: int
    new_tokens: int
    fallback: Wish | None = None
    is_fallback: bool = False


class Placement:
    """Asks the broker for nothing more than `Models` and `Sizing` do, and for counts only where a fallback is named."""

    def __init__(self, bus: Bus, models: Models, view: ConfigView) -> None:
        self._settings = bus.settings
        self._models = models
        self._view = view
        self._sizing = Sizing(bus, models)

    async def route(self, wish: Wish, name: str, job: str) -> Wish | Refusal:
        """The request with the model that `name` stands for, and its queue there.

        A name that its tenant may not use is refused in the same words as one that nobody knows.
        """
        config = self._view.config
        model = config.resolve(name, job)
        if not config.tenant(wish.tenant).may_name(name):
            return Refusal(code="model_not_found", message=f"the model {name!r} is not known here", param="model")
        if not await self._models.is_known(model):
            return Refusal(code="model_not_found", message=f"the model {model!r} is not known here", param="model")
        queue = choose_queue(
            config,
            model,
            wish.request,
            tenant=wish.tenant,
            header=wish.pool,
            lane=wish.queue.lane,
            served=self._models.pools(model),
        )
        if isinstance(queue, Refusal):
            return queue
        fallback = wish.fallback if wish.fallback is not None else config.model(model).fallback
        return msgspec.structs.replace(wish, model=model, queue=queue, fallback=fallback)

    async def place(self, wish: Wish, job: str, data: bytes) -> Placed | Refusal:
        """Where a routed request goes; refused where its model could never hold it, or nobody may wait for a worker.

        The fallback is used only if it can start the request in time and the first model cannot. A model whose replicas
        come when something waits is not known to be late, and refuses nothing: refused or sent elsewhere, no request
        would ever bring one.
        """
        own = await self.own(wish, job, data)
        if isinstance(own, Placed) and own.fallback is not None and not await self._starts_in_time(wish):
            other = await self.fallback(own, data)
            if other is not None:
                return other
        config = self._view.config.model(wish.model)
        is_refusing = config.on_no_worker == "refuse" and not config.comes_up_for(wish.queue.pool)
        if isinstance(own, Placed) and is_refusing and not self._models.workers_of(wish.model, wish.queue.pool):
            return Refusal(
                code="no_worker",
                message="no worker of the model is ready; try again later",
                retry_after_s=max(1, math.ceil(self._settings.worker_ttl_s)),
            )
        return own

    async def own(self, wish: Wish, job: str, data: bytes) -> Placed | Refusal:
        """The request at the model it was routed to, whatever that has to do now."""
        placed = await self._sized(wish, data)
        if isinstance(placed, Refusal) or wish.fallback is None:
            return placed
        return msgspec.structs.replace(placed, fallback=await self._fallback_of(wish, wish.fallback, job))

    async def fallback(self, own: Placed, data: bytes) -> Placed | None:
        """The request at its fallback model; None where there is none that can start it in time."""
        if own.fallback is None:
            return None
        placed = await self._sized(own.fallback, data)
        if isinstance(placed, Refusal) or not await self._starts_in_time(placed.wish):
            return None
        return msgspec.structs.replace(placed, is_fallback=True)

    async def _fallback_of(self, wish: Wish, name: str, job: str) -> Wish | None:
        """A pool asked for by header is used there if it exists, and is no reason to refuse."""
        routed = await self.route(wish, name, job)
        if isinstance(routed, Refusal) and wish.pool is not None:
            routed = await self.route(msgspec.structs.replace(wish, pool=None), name, job)
        if isinstance(routed, Refusal) or routed.model == wish.model:
            return None
        return msgspec.structs.replace(routed, fallback=None)

    async def _sized(self, wish: Wish, data: bytes) -> Placed | Refusal:
        size = await self._sizing.size(wish, data)
        return size if isinstance(size, Refusal) else Placed(wish, size.need_tokens, size.new_tokens)

    async def _starts_in_time(self, wish: Wish) -> bool:
        """Whether a worker is ready and the measured rate says that the turn comes before the queue timeout.

        Not while the model is paused. Without a worker that is not known where one comes when something waits.
        """
        if self._models.is_paused(wish.model):
            return False
        workers = self._models.workers_of(wish.model, wish.queue.pool)
        if not workers:
            return self._view.config.model(wish.model).comes_up_for(wish.queue.pool)
        waiting = waiting_of(await self._models.counts(wish.model), workers)
        num_ahead = waiting.get(wish.queue, 0)
        before = position(waiting, wish.queue, num_ahead=num_ahead, weights=self._models.weights(waiting))
        eta = self._models.eta_s(before, wish.model, wish.queue.pool)
        return eta is None or eta <= wish.queue_timeout_s
