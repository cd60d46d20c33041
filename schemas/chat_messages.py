"""What a chat is made of: messages, their content parts and tool calls, checked as OpenAI documents them.

Fields beyond these are left alone, since engines have their own (`reasoning_content`, `partial`).
"""

from typing import Any, Final

from headrace.schemas.json_checks import (
    Check,
    anything,
    described,
    each,
    fields,
    invalid,
    kind,
    mapping,
    one_of,
    schema_of,
    string,
)
from headrace.schemas.refusals import Refusal

__all__ = ["MEDIA_PARTS", "check_messages"]

ROLES: Final = ("developer", "system", "user", "assistant", "tool", "function")

TEXT_PARTS: Final = ("text", "refusal")
MEDIA_PARTS: Final = ("image_url", "input_audio", "file", "video_url", "audio_url")
"""Parts that are not text; each holds an object under its own name (OpenAI's, and vLLM's `*_url`)."""

_TEXT: Final = string()
_CHECK_ROLE: Final = one_of(*ROLES)
_CHECK_PART_TYPE: Final = one_of(*TEXT_PARTS, *MEDIA_PARTS)

_CHECK_CALLED: Final = fields({"name": string(min_chars=1), "arguments": _TEXT})

_CHECK_TOOL_CALLS: Final = each(
    fields({"id": string(min_chars=1), "type": one_of("function"), "function": _CHECK_CALLED})
)

_INSTEAD_OF_CONTENT: Final = ("tool_calls", "function_call", "refusal", "reasoning_content", "reasoning")
"""What an assistant's message may have in place of content."""

_EXTRAS: Final = {
    "name": _TEXT,
    "tool_calls": _CHECK_TOOL_CALLS,
    "tool_call_id": _TEXT,
    "function_call": _CHECK_CALLED,
    "refusal": _TEXT,
    "reasoning_content": _TEXT,
    "reasoning": anything,
}
_CHECK_EXTRAS: Final = fields({}, _EXTRAS)


def _part(name: str, check: Check) -> Check:
    return fields({"type": one_of(name), name: check})


@described(
    anyOf=[schema_of(_part(name, _TEXT)) for name in TEXT_PARTS]
    + [schema_of(_part(name, mapping)) for name in MEDIA_PARTS]
)
def _check_part(part: Any, path: str) -> Refusal | None:
    if not isinstance(part, dict):
        return invalid(path, f"must be an object, not {kind(part)}")
    part_type = part.get("type")
    if part_type is None:
        return invalid(f"{path}.type", "is required")
    if refusal := _CHECK_PART_TYPE(part_type, f"{path}.type"):
        return refusal
    held = part.get(part_type)
    if held is None:
        return invalid(f"{path}.{part_type}", "is required")
    check_held = mapping if part_type in MEDIA_PARTS else _TEXT
    return check_held(held, f"{path}.{part_type}")


_CHECK_PARTS: Final = each(_check_part, min_items=1)


def _may_lack_content(message: dict[str, Any]) -> bool:
    if message["role"] == "function":
        return True
    return message["role"] == "assistant" and any(message.get(name) for name in _INSTEAD_OF_CONTENT)


_MIN_OF: Final = {"string": "minLength", "array": "minItems"}


def _message_schema(*required: str, role: list[str], is_content_null: bool = False) -> dict[str, Any]:
    content = {"type": "null"} if is_content_null else {"anyOf": [schema_of(_TEXT), schema_of(_CHECK_PARTS)]}
    properties = {**schema_of(_CHECK_EXTRAS)["properties"], "role": {"enum": role}, "content": content}
    for name in set(required) & set(_EXTRAS):  # not null there; and in place of content it must say something
        extra = properties[name] = schema_of(_EXTRAS[name])
        if name in _INSTEAD_OF_CONTENT and (bound := _MIN_OF.get(extra.get("type", ""))):
            properties[name] = {**extra, bound: 1}
    return {"type": "object", "required": list(required), "properties": properties}


@described(
    anyOf=[
        _message_schema("role", "content", role=[role for role in ROLES if role != "tool"]),
        _message_schema("role", "content", "tool_call_id", role=["tool"]),
        _message_schema("role", role=["function"], is_content_null=True),
        *(_message_schema("role", name, role=["assistant"], is_content_null=True) for name in _INSTEAD_OF_CONTENT),
    ]
)
def _check_message(message: Any, path: str) -> Refusal | None:
    if not isinstance(message, dict):
        return invalid(path, f"must be an object, not {kind(message)}")
    role = message.get("role")
    if role is None:
        return invalid(f"{path}.role", "is required")
    if refusal := _CHECK_ROLE(role, f"{path}.role"):
        return refusal
    if (len(message) > 2 or "content" not in message) and (refusal := _CHECK_EXTRAS(message, path)):
        return refusal
    if role == "tool" and message.get("tool_call_id") is None:
        return invalid(f"{path}.tool_call_id", "is required in a message of role 'tool'")
    content = message.get("content")
    if isinstance(content, str):
        return None
    if content is None:
        return None if _may_lack_content(message) else invalid(f"{path}.content", "is required")
    if not isinstance(content, list):
        return invalid(f"{path}.content", f"must be a string or an array of parts, not {kind(content)}")
    return _CHECK_PARTS(content, f"{path}.content")


_CHECK_MESSAGES: Final = each(_check_message, min_items=1)


@described(**schema_of(_CHECK_MESSAGES))
def check_messages(value: Any, path: str) -> Refusal | None:
    """A non-empty array of messages; the first wrong one is named, the others are not looked at."""
    return _CHECK_MESSAGES(value, path)
