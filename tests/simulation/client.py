"""Clients: they send requests, cancel them, ask for them, and note what they are told."""

import json
from typing import TYPE_CHECKING

import msgspec
from nats.aio.msg import Msg

from headrace.bus.connection import Bus
from headrace.schemas import subjects
from tests.simulation.schedule import FALLBACK, MODEL, TENANT

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["Client", "Request"]


class Request(msgspec.Struct):
    """One job as its client sees it; `answers` are `accepted`, `attached` or codes of refusals."""

    job: str
    is_streaming: bool
    queue_timeout_s: float
    deadline_s: float
    answers: list[str]
    num_submits: int = 0
    was_cancelled: bool = False
    accepted_at: float = 0.0
    first_sent_at: float = 0.0


class Client:
    """Sends requests and notes the answers."""

    def __init__(self, world: "World", bus: Bus) -> None:
        self._world, self._bus = world, bus
        self._names = bus.names
        self._jobs: dict[str, str] = {}

    async def start(self) -> None:
        """Listen for answers."""
        for tenant in sorted({TENANT, *(ask.tenant for ask in self._world.scenario.asks)}):
            await self._bus.subscribe(f"_INBOX.{tenant}.>", cb=self._on_answer)

    async def submit(self, job: str, *, hurry: float) -> None:
        """Send a request, or send it again."""
        world = self._world
        request = world.requests.get(job)
        if request is None:
            deadline_s = 4.0 if 0.2 < hurry < 0.3 else 600.0
            queue_timeout_s = 2.0 if 0.1 < hurry < 0.2 else 300.0
            request = world.requests[job] = Request(job, hurry < 0.8, queue_timeout_s, deadline_s, [], accepted_at=1e12)
        request.accepted_at = max(world.now() + 10, request.accepted_at if request.num_submits else 0)
        request.first_sent_at = request.first_sent_at or world.now()
        request.num_submits += 1
        ask = world.scenario.ask(job)
        inbox = f"_INBOX.{ask.tenant}.answers-{len(self._jobs)}"
        self._jobs[inbox] = job
        world.broker.note(f"=== submit {job}")
        prompt = [ask.token] * ask.size if world.scenario.asks else job
        body = {"prompt": prompt, "max_tokens": world.scenario.num_tokens, "stream": request.is_streaming}
        headers = {
            subjects.HDR_ID: job,
            subjects.HDR_DEADLINE: str(request.deadline_s),
            subjects.HDR_QUEUE_TIMEOUT: str(request.queue_timeout_s),
        }
        if world.scenario.asks:
            headers |= {subjects.HDR_PRIORITY: ask.lane, subjects.HDR_POOL: ask.pool}
        if world.scenario.num_fallback_workers:
            headers[subjects.HDR_FALLBACK] = FALLBACK
        await self._bus.publish(
            self._names.infer(ask.tenant, "completions", MODEL), json.dumps(body).encode(), reply=inbox, headers=headers
        )

    async def ask(self, what: str, job: str) -> None:
        """Cancel a job or ask for its status."""
        self._world.broker.note(f"=== {what} {job}")
        tenant = self._world.scenario.ask(job).tenant
        subject = self._names.cancel(tenant, job) if what == "cancel" else self._names.status(tenant, job)
        await self._bus.publish(subject, b"", reply=f"_INBOX.{tenant}.control")

    async def _on_answer(self, message: Msg) -> None:
        job = self._jobs.get(message.subject)
        headers = message.headers or {}
        if job is None:
            return
        if headers.get(subjects.HDR_EVENT) == "accepted":
            answer = "attached" if subjects.HDR_ATTACHED in headers else "accepted"
        elif headers.get(subjects.HDR_EVENT) == "error":
            answer = json.loads(message.data)["error"]["code"]
        else:
            return
        self._world.broker.note(f"answer to {job}: {answer}")
        self._world.requests[job].answers.append(answer)
