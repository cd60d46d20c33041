"""Lists in OpenAI's form: a page of them, and whether there is more."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from headrace.errors import RequestError
from headrace.schemas.json_checks import invalid

__all__ = ["page"]


def page(items: Sequence[dict[str, Any]], request: Request, *, max_items: int, default: int) -> dict[str, Any]:
    """The items behind the id `after`, `limit` of them at most. Raises RequestError for a bad `limit` or `after`."""
    text = request.query_params.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 6 and 1 <= int(text) <= max_items):
        raise RequestError(invalid("limit", f"must be a number from 1 to {max_items}"))
    after = request.query_params.get("after")
    if after is not None:
        place = next((number for number, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise RequestError(invalid("after", "must be the id of something in the list"))
        items = items[place + 1 :]
    shown = list(items[: int(text)])
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > len(shown),
    }
