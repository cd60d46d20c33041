"""A file that a client sends: read as it comes, within bounds of time and number."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Final

from starlette.requests import Request

from headrace.batch import Files, Upload
from headrace.errors import RequestError
from headrace.gateway.multipart import Part, boundary_of, read_parts
from headrace.schemas.batches import MIN_TTL_S, FileRecord
from headrace.schemas.json_checks import invalid
from headrace.schemas.refusals import Refusal
from headrace.schemas.subjects import Tenant

__all__ = ["Uploads"]

_MAX_UPLOADS: Final = 16
_PIECE_S: Final = 60.0
_WHOLE_S: Final = 3600.0
_DISCARD_S: Final = 5.0
_MAX_DISCARDED_BYTES: Final = 32 * 1024 * 1024
_MAX_FIELD_BYTES: Final = 1_024
_MAX_FILENAME_CHARS: Final = 255
_DEFAULT_NAME: Final = "batch.jsonl"


class Uploads:
    """Takes files in, a few at once in one process; each costs a chunk and a line of memory.

    One of each tenant is taken in any case, so that nobody's slow uploads keep another's out.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._open: Counter[Tenant] = Counter()

    async def take(self, request: Request, tenant: Tenant) -> FileRecord:
        """The file of a form, stored and known. Raises RequestError for what is wrong with it, BrokerError.

        Nothing is left of a file that is refused, or whose client leaves.
        """
        boundary = boundary_of(request.headers.get("content-type", ""))
        if self._open[tenant] and self._open.total() >= _MAX_UPLOADS:
            message = f"This gateway takes {_MAX_UPLOADS} files at once, which is its limit; try again later."
            raise RequestError(Refusal(code="rate_limited", message=message, retry_after_s=2))
        self._open[tenant] += 1
        pieces = _pieces(request)
        try:
            return await self._take(pieces, boundary, tenant)
        except RequestError:
            await _discard(pieces)
            raise
        finally:
            self._open[tenant] -= 1
            self._open += Counter()  # keeps none of tenants without any

    async def _take(self, pieces: AsyncIterator[bytes], boundary: bytes, tenant: Tenant) -> FileRecord:
        form = _Form()
        upload = await self._files.upload(tenant)
        try:
            async for part in read_parts(pieces, boundary):
                if isinstance(part, Part):
                    form.begin(part)
                elif form.is_in_file:
                    await upload.write(part)
                else:
                    form.add(part)
            filename = form.checked()
            return await upload.commit(filename, ttl_s=form.ttl_s)
        except BaseException:
            await _abandon(upload)
            raise


class _Form:
    """The fields around the file, which may come before it or behind it."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._name = ""
        self._filename: str | None = None

    def begin(self, part: Part) -> None:
        if part.name == "file" and self._filename is not None:
            raise RequestError(invalid("file", "must be one file"))
        self._name = part.name
        if part.name == "file":
            self._filename = part.filename or _DEFAULT_NAME
        else:
            self._values[part.name] = b""

    @property
    def is_in_file(self) -> bool:
        return self._name == "file"

    def add(self, piece: bytes) -> None:
        value = self._values[self._name] + piece
        if len(value) > _MAX_FIELD_BYTES:
            raise RequestError(invalid(self._name, "is too long"))
        self._values[self._name] = value

    def checked(self) -> str:
        """The file's name, once all fields are there. Raises RequestError for what is missing or wrong."""
        if self._filename is None:
            raise RequestError(invalid("file", "is required"))
        if self._values.get("purpose") != b"batch":
            raise RequestError(invalid("purpose", "must be 'batch'; other files are not kept here"))
        name = "".join(char for char in self._filename if char.isprintable())[:_MAX_FILENAME_CHARS]
        return name or _DEFAULT_NAME

    @property
    def ttl_s(self) -> int | None:
        """How long the file is to be kept, where the form says. Raises RequestError."""
        if self._values.get("expires_after[anchor]", b"created_at") != b"created_at":
            raise RequestError(invalid("expires_after[anchor]", "must be 'created_at'"))
        text = self._values.get("expires_after[seconds]")
        if text is None:
            return None
        if not (text.isdigit() and len(text) < 10 and int(text) >= MIN_TTL_S):
            raise RequestError(invalid("expires_after[seconds]", f"must be a number of seconds from {MIN_TTL_S}"))
        return int(text)


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """The body as it comes; a client that sends nothing for long is refused."""
    until = asyncio.get_running_loop().time() + _WHOLE_S
    stream = aiter(request.stream())
    while True:
        wait_s = min(_PIECE_S, until - asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(wait_s):
                piece = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise RequestError(invalid("body", f"did not go on for {wait_s:.0f} s")) from None
        if piece:
            yield piece


async def _discard(pieces: AsyncIterator[bytes]) -> None:
    """Read what a refused client still sends, within limits: most read an answer only once they have sent all."""
    num_bytes = 0
    with contextlib.suppress(RequestError, TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            async for piece in pieces:
                num_bytes += len(piece)
                if num_bytes > _MAX_DISCARDED_BYTES:
                    return


async def _abandon(upload: Upload) -> None:
    await asyncio.shield(upload.abandon())
