"""OpenAI's batches: made, looked at, cancelled; and the URLs of batches and files."""

from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.batch import BatchKeeper, Files
from headrace.bus.batches import BatchRecords, SeenBatch
from headrace.bus.connection import Bus
from headrace.errors import BrokerUnavailableError, RequestError
from headrace.gateway.files import FileRoutes
from headrace.gateway.limits import read_body
from headrace.gateway.paging import page
from headrace.gateway.repeats import (
    RepeatKey,
    batch_id,
    is_same_request,
    is_sent_again,
    made_before,
    repeat_key,
)
from headrace.gateway.routing import route
from headrace.gateway.tenants import tenant_of
from headrace.gateway.watching import OpenRequests
from headrace.schemas.batch_lines import OPERATION_OF_URL
from headrace.schemas.batches import (
    COMPLETION_WINDOWS_S,
    MAX_OUTPUT_TTL_S,
    MIN_TTL_S,
    BatchRecord,
    batch_object,
    moved,
)
from headrace.schemas.json_bounds import decode_object
from headrace.schemas.json_checks import integer, invalid, one_of, string
from headrace.schemas.refusals import Refusal
from headrace.schemas.subjects import Tenant

__all__ = ["batch_routes"]

_MAX_BODY_BYTES: Final = 65_536
_MAX_DEPTH: Final = 8
_MAX_LISTED: Final = 100
_LISTED: Final = 20
_MAX_METADATA: Final = 16
_MAX_ENDED: Final = 1_000
"""Batches of a tenant that are over and still shown; beyond it the oldest are forgotten, whose files stay."""

_check_key = string(min_chars=1, max_chars=64)
_check_value = string(max_chars=512)
_check_ttl = integer(MIN_TTL_S, MAX_OUTPUT_TTL_S)


def batch_routes(bus: Bus, keeper: BatchKeeper, open_requests: OpenRequests) -> list[Route]:
    """The URLs of files and batches."""
    files, batches = FileRoutes(bus, open_requests), _Batches(bus, keeper)
    return [
        route("/v1/files", GET=files.list, POST=files.create),
        route("/v1/files/{file}", GET=files.show, DELETE=files.remove),
        route("/v1/files/{file}/content", GET=files.content),
        route("/v1/batches", GET=batches.list, POST=batches.create),
        route("/v1/batches/{batch}", GET=batches.show),
        route("/v1/batches/{batch}/cancel", POST=batches.cancel),
    ]


class _Batches:
    """Answers requests about batches of the caller's tenant; those of others it does not find."""

    def __init__(self, bus: Bus, keeper: BatchKeeper) -> None:
        self._bus = bus
        self._keeper = keeper
        self._records = BatchRecords(bus)
        self._files = Files(bus)

    async def create(self, request: Request) -> Response:
        """Begin a batch, or show the one that it began when it was sent before. Raises RequestError, BrokerError.

        See `repeats` for what tells one that is sent again.
        """
        data = await read_body(request, max_bytes=_MAX_BODY_BYTES)
        body = decode_object(data, max_bytes=_MAX_BODY_BYTES, max_depth=_MAX_DEPTH)
        if isinstance(body, Refusal):
            raise RequestError(body)
        if refusal := _check(body):
            raise RequestError(refusal)
        tenant, key = tenant_of(request), repeat_key(request.headers)
        now = int(self._bus.clock.now())
        wanted = BatchRecord(
            id=batch_id(tenant, key),
            tenant=tenant,
            endpoint=body["endpoint"],
            input_file_id=body["input_file_id"],
            completion_window=body["completion_window"],
            created_at=now,
            expires_at=now + COMPLETION_WINDOWS_S[body["completion_window"]],
            metadata=body.get("metadata"),
            output_ttl_s=(body.get("output_expires_after") or {}).get("seconds"),
        )
        record = await self._known(wanted, key)
        if record is None and key is None and is_sent_again(request.headers):
            record = made_before(wanted, await self._records.batches(tenant))
        return _as_json(batch_object(record if record is not None else await self._begin(wanted, key)))

    async def _begin(self, wanted: BatchRecord, key: RepeatKey | None) -> BatchRecord:
        file = await self._files.get(wanted.tenant, wanted.input_file_id)
        if file.purpose != "batch":
            raise RequestError(invalid("input_file_id", "must be a file with the purpose 'batch'"))
        record = msgspec.structs.replace(wanted, total=file.num_lines)
        await self._make_room(record.tenant)
        limit = self._bus.settings.batch_limit
        if await self._records.add_batch(record, check=lambda others: _check_room(others, limit)):
            self._keeper.nudge()
            return record
        known = await self._known(wanted, key)
        if known is None:
            raise BrokerUnavailableError(f"batch {wanted.id} cannot be made now")
        return known

    async def _known(self, wanted: BatchRecord, key: RepeatKey | None) -> BatchRecord | None:
        seen = await self._records.batch(wanted.tenant, wanted.id)
        if seen is None:
            return None
        if key is not None and not is_same_request(seen.record, wanted):
            raise RequestError(invalid(key.header, "was used for another batch"))
        return seen.record

    async def list(self, request: Request) -> Response:
        """The tenant's batches, newest first. Raises RequestError, BrokerError."""
        records = await self._records.batches(tenant_of(request))
        ordered = sorted(records, key=lambda record: (record.created_at, record.id), reverse=True)
        shown = page([batch_object(record) for record in ordered], request, max_items=_MAX_LISTED, default=_LISTED)
        return _as_json(shown)

    async def show(self, request: Request) -> Response:
        """What a batch is now. Raises RequestError (`batch_not_found`), BrokerError."""
        return _as_json(batch_object((await self._batch(request)).record))

    async def cancel(self, request: Request) -> Response:
        """Begin to cancel a batch; what it has is kept. Raises RequestError, BrokerError."""
        while True:
            seen = await self._batch(request)
            record = seen.record
            if record.status in ("cancelling", "cancelled"):
                return _as_json(batch_object(record))
            if record.status not in ("validating", "in_progress"):
                message = f"A batch that is {record.status} cannot be cancelled."
                raise RequestError(Refusal(code="invalid_value", message=message, param="batch_id"))
            cancelling = moved(record, "cancelling", now=self._bus.clock.now())
            if await self._records.replace_batch(seen, cancelling):
                self._keeper.nudge()
                return _as_json(batch_object(cancelling))

    async def _batch(self, request: Request) -> SeenBatch:
        seen = await self._records.batch(tenant_of(request), request.path_params["batch"])
        if seen is None:
            raise RequestError(
                Refusal(code="batch_not_found", message="There is no batch of this id.", param="batch_id")
            )
        return seen

    async def _make_room(self, tenant: Tenant) -> None:
        """Refuse what would be one too many; what a tenant keeps is bounded, however many it makes and cancels."""
        settings = self._bus.settings
        records = await self._records.batches(tenant)
        _check_room(records, settings.batch_limit)
        if len(await self._files.list(tenant)) > (limit := settings.file_limit):
            raise RequestError(invalid("input_file_id", f"has no room for results beside {limit} files; delete some"))
        for record in [record for record in records if record.is_over][:-_MAX_ENDED]:
            await self._records.forget_batch(tenant, record.id)


def _check_room(records: list[BatchRecord], limit: int) -> None:
    if sum(not record.is_over for record in records) >= limit:
        message = f"There are {limit} batches under way, which is the limit; try again when one has ended."
        raise RequestError(Refusal(code="rate_limited", message=message, retry_after_s=60))


def _check(body: dict[str, Any]) -> Refusal | None:
    required = (
        ("input_file_id", string(min_chars=1, max_chars=100)),
        ("endpoint", one_of(*OPERATION_OF_URL)),
        ("completion_window", one_of(*COMPLETION_WINDOWS_S)),
    )
    for name, check in required:
        if body.get(name) is None:
            return invalid(name, "is required")
        if refusal := check(body[name], name):
            return refusal
    after = body.get("output_expires_after")
    if after is not None:
        if not isinstance(after, dict) or after.get("anchor") != "created_at":
            return invalid("output_expires_after", "must be an object with the anchor 'created_at'")
        if refusal := _check_ttl(after.get("seconds"), "output_expires_after.seconds"):
            return refusal
    return _check_metadata(body.get("metadata"))


def _check_metadata(metadata: Any) -> Refusal | None:
    if metadata is None:
        return None
    if not isinstance(metadata, dict) or len(metadata) > _MAX_METADATA:
        return invalid("metadata", f"must be an object of at most {_MAX_METADATA} strings")
    for key, value in metadata.items():
        if refusal := _check_key(key, "metadata") or _check_value(value, "metadata"):
            return refusal
    return None


def _as_json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
