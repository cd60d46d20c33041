"""Status and cancelling of jobs, asked of any router."""

import msgspec

from headrace.bus.connection import Bus, Message
from headrace.errors import BrokerUnavailableError, NotProvisionedError, RequestError
from headrace.lifecycle import Backoff
from headrace.schemas import subjects
from headrace.schemas.jobs import CancelRequest, JobStatus
from headrace.schemas.refusals import ErrorBody, Refusal
from headrace.schemas.subjects import is_job_id

__all__ = ["JobControl"]

_RETRY_FIRST_S = 0.1
_RETRY_MAX_S = 1.0


class JobControl:
    """Requests about a tenant's jobs. Both are safe to repeat, and are repeated while no router answers."""

    def __init__(self, bus: Bus, tenant: str) -> None:
        self._bus = bus
        self._tenant = tenant

    async def status(self, job: str) -> JobStatus:
        """What a job is now. Raises RequestError (`job_not_found`), BrokerUnavailableError."""
        return await self._ask(self._bus.names.status(self._tenant, _checked(job)), b"", job)

    async def cancel(self, job: str, *, sequence: int | None = None, model: str | None = None) -> JobStatus:
        """Cancel a job; returns what it is now. Raises like `status`."""
        body = msgspec.json.encode(CancelRequest(sequence=sequence, model=model))
        return await self._ask(self._bus.names.cancel(self._tenant, _checked(job)), body, job)

    async def _ask(self, subject: str, body: bytes, job: str) -> JobStatus:
        reply = await self._reply(subject, body)
        if (reply.headers or {}).get(subjects.HDR_EVENT) == "error":
            detail = msgspec.json.decode(reply.data, type=ErrorBody).error
            raise RequestError(Refusal(code=detail.code, message=detail.message, param=detail.param), job=job)
        return msgspec.json.decode(reply.data, type=JobStatus)

    async def _reply(self, subject: str, body: bytes) -> Message:
        retries = Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S, for_s=self._bus.settings.retry_for_s)
        while True:
            try:
                return await self._bus.request(subject, body)
            except (BrokerUnavailableError, NotProvisionedError):
                if retries.is_over:
                    raise BrokerUnavailableError("no router answered; is one running? (`headrace up`)") from None
                await retries.pause()


def _checked(job: str) -> str:
    if not is_job_id(job):
        raise RequestError(
            Refusal(code="invalid_value", message="a job id is 1 to 64 of A-Z a-z 0-9 _ -", param="job"), job=None
        )
    return job
