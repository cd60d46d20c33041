"""How much memory a request will need, and whether any worker could ever carry it."""

import logging
from collections.abc import Iterable
from typing import Final

import msgspec

from headrace.bus.connection import Bus
from headrace.errors import BrokerError
from headrace.router.admission import Wish
from headrace.router.models import Models
from headrace.schemas.openai import num_kv_tokens_needed, resolve_max_tokens
from headrace.schemas.refusals import ErrorBody, Refusal
from headrace.schemas.workers import Heartbeat, TokenCount

__all__ = ["Size", "Sizing"]

log = logging.getLogger(__name__)

_EXACT_TIMEOUT_S: Final = 2.0
_HDR_OP: Final = "Headrace-Op"


class Size(msgspec.Struct, frozen=True):
    """KV tokens of a request to its last token, and how many of them it may generate."""

    need_tokens: int
    new_tokens: int


class Sizing:
    """Estimates from text length; where that leaves a doubt about a limit, a ready worker counts exactly.

    Where no worker answers, the request is taken in: the worker that fetches it counts again before it runs.
    """

    def __init__(self, bus: Bus, models: Models) -> None:
        self._bus = bus
        self._models = models

    async def size(self, wish: Wish, data: bytes) -> Size | Refusal:
        """What it may come to need, or why no worker of the model could ever run it."""
        workers = self._models.workers_of(wish.model, wish.queue.pool, with_starting=True)
        ready = [beat for beat in workers if beat.state != "Starting"]  # one that starts may hold more, not longer ones
        if not ready or wish.op == "embeddings":
            return self._need(wish, wish.request.num_prompt_tokens_estimate, None, workers)
        max_model_len = _largest(beat.max_model_len for beat in ready)
        bound = self._need(wish, wish.request.num_prompt_tokens_bound, max_model_len, workers)
        if isinstance(bound, Refusal):  # perhaps too large: the bound is never below the truth, so count
            exact = await self._count(wish, data)
            if isinstance(exact, Refusal):
                return exact
            if exact is not None:
                return self._need(wish, exact, max_model_len, workers)
        return self._need(wish, wish.request.num_prompt_tokens_estimate, None, [])

    def _need(
        self, wish: Wish, num_prompt_tokens: int, max_model_len: int | None, workers: list[Heartbeat]
    ) -> Size | Refusal:
        max_tokens = resolve_max_tokens(
            wish.request,
            num_prompt_tokens=num_prompt_tokens,
            max_model_len=max_model_len,
            default_max_tokens=self._bus.settings.default_max_tokens,
        )
        if isinstance(max_tokens, Refusal):
            return max_tokens
        block_size = min((beat.block_size for beat in workers), default=1)
        need = num_kv_tokens_needed(num_prompt_tokens, max_tokens, wish.request.n, block_size)
        capacity = _largest(beat.peak_tokens for beat in workers)
        if capacity is not None and need > capacity:
            return Refusal(
                code="exceeds_capacity",
                message=f"the request needs {need} KV tokens; the largest worker of the model has {capacity}",
            )
        return Size(need, 0 if wish.op == "embeddings" else wish.request.n * max_tokens)

    async def _count(self, wish: Wish, data: bytes) -> int | Refusal | None:
        try:
            reply = await self._bus.request(
                self._bus.names.tokenize(wish.model), data, headers={_HDR_OP: wish.op}, timeout_s=_EXACT_TIMEOUT_S
            )
        except BrokerError as error:
            log.info("no worker of %s counts tokens now: %s", wish.model, error)
            return None
        try:
            return msgspec.json.decode(reply.data, type=TokenCount).num_prompt_tokens
        except msgspec.DecodeError:
            pass
        try:
            detail = msgspec.json.decode(reply.data, type=ErrorBody).error
        except msgspec.DecodeError:
            return None
        if detail.code in ("engine_error", "internal"):
            return None
        return Refusal(code=detail.code, message=detail.message, param=detail.param)


def _largest(values: Iterable[int | None]) -> int | None:
    known = list(values)
    if not known or any(value is None for value in known):
        return None  # one that does not tell could hold anything
    return max(value for value in known if value is not None)
