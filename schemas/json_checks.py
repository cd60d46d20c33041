"""Small checks of decoded JSON values, made to be combined into tables of parameters.

A check takes a value and where it stands (`messages[0].content`) and returns the refusal, or None when the value
is fine. Messages name the kind of what was sent, or a number, and never repeat text of the client. Each check carries
the JSON Schema of what it lets pass, so that what is documented is what is checked.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from headrace.schemas.refusals import Refusal

__all__ = [
    "Check",
    "anything",
    "boolean",
    "described",
    "each",
    "fields",
    "integer",
    "invalid",
    "kind",
    "mapping",
    "number",
    "one_of",
    "or_null",
    "schema_of",
    "string",
    "unsupported",
]

Check = Callable[[Any, str], Refusal | None]

MAX_PARAM_CHARS: Final = 100


def described(**schema: Any) -> Callable[[Check], Check]:
    """Gives a check the JSON Schema (2020-12) of what it lets pass, as far as a schema can say it."""

    def describe(check: Check) -> Check:
        vars(check)["schema"] = schema
        return check

    return describe


def schema_of(check: Check) -> dict[str, Any]:
    """The JSON Schema a check carries; the empty one, which everything fits, where it has none."""
    schema: dict[str, Any] = vars(check).get("schema", {})
    return schema


def invalid(param: str, problem: str) -> Refusal:
    """`invalid_value` at `param`; `problem` continues the sentence that begins with the parameter's name."""
    param = param[:MAX_PARAM_CHARS]
    return Refusal(code="invalid_value", message=f"'{param}' {problem}.", param=param)


def unsupported(param: str, advice: str) -> Refusal:
    """`unsupported_parameter` at `param`, with what to do instead."""
    param = param[:MAX_PARAM_CHARS]
    return Refusal(code="unsupported_parameter", message=f"'{param}' is not supported: {advice}.", param=param)


def kind(value: Any) -> str:
    """What a value is, in JSON's words; a number is given itself (bounded: it fits 64 bits)."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def anything(value: Any, path: str) -> Refusal | None:
    """Accepts every value."""
    return None


@described(type="boolean")
def boolean(value: Any, path: str) -> Refusal | None:
    """True or false."""
    return None if isinstance(value, bool) else invalid(path, f"must be true or false, not {kind(value)}")


@described(type="object")
def mapping(value: Any, path: str) -> Refusal | None:
    """Any object."""
    return None if isinstance(value, dict) else invalid(path, f"must be an object, not {kind(value)}")


def integer(minimum: int, maximum: int) -> Check:
    """An integer in the closed range; true, false and 1.0 are none (`whole_numbers` makes that one before)."""

    @described(type="integer", minimum=minimum, maximum=maximum)
    def check(value: Any, path: str) -> Refusal | None:
        if type(value) is int and minimum <= value <= maximum:
            return None
        return invalid(path, f"must be an integer from {minimum} to {maximum}, not {kind(value)}")

    return check


def number(minimum: float, maximum: float) -> Check:
    """A number in the closed range; true and false are none."""

    @described(type="number", minimum=minimum, maximum=maximum)
    def check(value: Any, path: str) -> Refusal | None:
        if type(value) in (int, float) and minimum <= value <= maximum:
            return None
        return invalid(path, f"must be a number from {minimum:g} to {maximum:g}, not {kind(value)}")

    return check


def string(*, min_chars: int = 0, max_chars: int | None = None) -> Check:
    """A string of bounded length in characters."""

    @described(type="string", minLength=min_chars, **({} if max_chars is None else {"maxLength": max_chars}))
    def check(value: Any, path: str) -> Refusal | None:
        if not isinstance(value, str):
            return invalid(path, f"must be a string, not {kind(value)}")
        if len(value) < min_chars:
            return invalid(path, "must not be empty")
        if max_chars is not None and len(value) > max_chars:
            return invalid(path, f"must have at most {max_chars} characters, not {len(value)}")
        return None

    return check


def one_of(*allowed: str) -> Check:
    """One of a few strings."""
    words = ", ".join(f"'{word}'" for word in allowed)

    @described(enum=list(allowed))
    def check(value: Any, path: str) -> Refusal | None:
        if isinstance(value, str) and value in allowed:
            return None
        other = "another string" if isinstance(value, str) else kind(value)
        return invalid(path, f"must be one of {words}, not {other}")

    return check


def each(check_item: Check, *, min_items: int = 0, max_items: int | None = None) -> Check:
    """An array whose items all pass; the first that does not is named by its index."""

    @described(
        type="array",
        items=schema_of(check_item),
        minItems=min_items,
        **({} if max_items is None else {"maxItems": max_items}),
    )
    def check(value: Any, path: str) -> Refusal | None:
        if not isinstance(value, list):
            return invalid(path, f"must be an array, not {kind(value)}")
        if len(value) < min_items:
            return invalid(path, "must not be empty")
        if max_items is not None and len(value) > max_items:
            return invalid(path, f"must have at most {max_items} items, not {len(value)}")
        for index, item in enumerate(value):
            if refusal := check_item(item, f"{path}[{index}]"):
                return refusal
        return None

    return check


def fields(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """An object with these fields; null counts as absent, other fields are left alone."""
    optional = optional or {}

    @described(**_object_schema(required, optional))
    def check(value: Any, path: str) -> Refusal | None:
        if not isinstance(value, dict):
            return invalid(path, f"must be an object, not {kind(value)}")
        for name, check_field in required.items():
            if value.get(name) is None:
                return invalid(f"{path}.{name}", "is required")
            if refusal := check_field(value[name], f"{path}.{name}"):
                return refusal
        for name, check_field in optional.items():
            if value.get(name) is not None and (refusal := check_field(value[name], f"{path}.{name}")):
                return refusal
        return None

    return check


def _object_schema(required: Mapping[str, Check], optional: Mapping[str, Check]) -> dict[str, Any]:
    properties = {name: schema_of(check) for name, check in required.items()}
    properties |= {name: or_null(schema_of(check)) for name, check in optional.items()}
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of what may be null too, which counts as absent."""
    return {"anyOf": [schema, {"type": "null"}]} if schema else {}
