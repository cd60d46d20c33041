"""JSON numbers such as `16.0` where OpenAI's API takes an integer: read as that integer, as OpenAI and vLLM read them.

JSON knows one kind of number, and some clients write every number with a point. What has a fraction stays as it is, and
is refused where the parameter is checked.
"""

from collections.abc import Collection
from typing import Any, Final

__all__ = ["with_whole_numbers"]

_BEYOND: Final = 2.0**63
"""From here on no integer that is taken fits."""


def with_whole_numbers(body: dict[str, Any], *, integers: Collection[str], tokens: Collection[str]) -> dict[str, Any]:
    """The body with whole numbers as integers in these parameters: `tokens` hold lists of them, or lists of lists."""
    changed = {name: _whole(value) for name, value in body.items() if name in integers and type(value) is float}
    for name in tokens:
        if isinstance(value := body.get(name), list):
            changed[name] = _whole_list(value)
    return {**body, **changed} if changed else body


def _whole(value: Any) -> Any:
    is_whole = type(value) is float and -_BEYOND <= value < _BEYOND and value.is_integer()
    return int(value) if is_whole else value


def _whole_list(values: list[Any]) -> list[Any]:
    kinds = set(map(type, values))
    if float in kinds:
        values = [_whole(value) for value in values]
    if list in kinds:
        values = [_whole_list_of_numbers(value) if isinstance(value, list) else value for value in values]
    return values


def _whole_list_of_numbers(values: list[Any]) -> list[Any]:
    return [_whole(value) for value in values] if float in set(map(type, values)) else values
