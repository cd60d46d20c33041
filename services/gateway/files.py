"""OpenAI's files: the input and the results of batches."""

from collections.abc import AsyncIterator
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from headrace.batch import Files
from headrace.bus.connection import Bus
from headrace.errors import ObjectGoneError, RequestError
from headrace.gateway.paging import page
from headrace.gateway.tenants import tenant_of
from headrace.gateway.uploads import Uploads
from headrace.gateway.watching import OpenRequests
from headrace.schemas.batches import FileRecord, file_object
from headrace.schemas.json_checks import invalid
from headrace.schemas.refusals import Refusal

__all__ = ["FileRoutes"]

_MAX_LISTED: Final = 10_000
_BYTES: Final = "application/octet-stream"


class FileRoutes:
    """Answers requests about files of the caller's tenant; those of others it does not find."""

    def __init__(self, bus: Bus, open_requests: OpenRequests) -> None:
        self._open = open_requests
        self._files = Files(bus)
        self._uploads = Uploads(self._files)

    async def create(self, request: Request) -> Response:
        """Take a file in; each of its lines is checked as it comes. Raises RequestError, BrokerError."""
        taken = await self._open.unless_over(self._uploads.take(request, tenant_of(request)))
        return _as_json(file_object(taken))

    async def list(self, request: Request) -> Response:
        """The tenant's files, newest first unless `order` is `asc`. Raises RequestError, BrokerError."""
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError(invalid("order", "must be 'asc' or 'desc'"))
        purpose = request.query_params.get("purpose")
        files = await self._files.list(tenant_of(request))
        wanted = [file for file in files if purpose in (None, file.purpose)]
        ordered = sorted(wanted, key=lambda file: (file.created_at, file.id), reverse=order == "desc")
        return _as_json(
            page([file_object(file) for file in ordered], request, max_items=_MAX_LISTED, default=_MAX_LISTED)
        )

    async def show(self, request: Request) -> Response:
        """What is known of a file. Raises RequestError (`file_not_found`), BrokerError."""
        return _as_json(file_object(await self._file(request)))

    async def content(self, request: Request) -> Response:
        """The bytes of a file, as they are read. Raises RequestError (`file_not_found`), BrokerError.

        Asked for the head alone, it answers by how the file is described, and reads nothing of it.
        """
        file = await self._file(request)
        headers = {"content-length": str(file.size_bytes)}
        try:
            if request.method == "HEAD":
                await self._files.check_bytes(file.tenant, file.id)
                return Response(media_type=_BYTES, headers=headers)
            pieces = self._files.read(file.tenant, file.id)
            first = await anext(pieces, b"")
        except ObjectGoneError:
            raise RequestError(
                Refusal(code="file_not_found", message="There is no file of this id.", param="file_id")
            ) from None
        return StreamingResponse(_with_first(first, pieces), media_type=_BYTES, headers=headers)

    async def remove(self, request: Request) -> Response:
        """Remove a file. Raises RequestError (`file_not_found`), BrokerError."""
        file = request.path_params["file"]
        await self._files.remove(tenant_of(request), file)
        return _as_json({"id": file, "object": "file", "deleted": True})

    async def _file(self, request: Request) -> FileRecord:
        return await self._files.get(tenant_of(request), request.path_params["file"])


async def _with_first(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in pieces:
        yield piece


def _as_json(body: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
