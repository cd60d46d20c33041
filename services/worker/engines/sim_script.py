"""What the `sim` engine is told to do: its options, and the course of one request under them."""

import re
from random import Random
from typing import Annotated, Final

import msgspec

from headrace.errors import ConfigError
from headrace.schemas.openai import InferenceRequest
from headrace.worker.engines.base import Resume
from headrace.worker.engines.options import PositiveInt, Seconds
from headrace.worker.engines.sim_text import num_prompt_tokens_of, prompt_text

__all__ = ["Script", "SimOptions", "make_script"]

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Delay = Annotated[float, msgspec.Meta(ge=0, le=86_400)]

_FAULTS: Final = ("die_after", "hang_after", "error_after", "cut_after")
_MARKER: Final = re.compile(r"<sim (tokens|die_after|hang_after|error_after|cut_after)=(\d{1,9})>")


class SimOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the `sim` engine.

    `tokens_per_second` is each stream's speed, 0 is unlimited. An answer has `default_tokens` tokens by nature
    (finish_reason `stop`) unless max_tokens is less or the body has `ignore_eos`.

    Faults: `busy_first` and `refuse_first` turn down that many calls; `die_after`, `hang_after`, `error_after` and
    `cut_after` (the stream ends without a finish_reason) strike after that many tokens of a request, of the first
    `fault_first` requests if that is given. A hang ends as one does over HTTP, with an error after `stall_s`. A prompt
    that has `<sim die_after=5>` (or another of the four) brings its own fault, `<sim tokens=50>` its natural length.

    Sickness, of the first `sick_runs` starts if that is given: `slow_factor` times as long for everything, an error in
    `error_rate` of its requests (drawn with the seed), a process that grows by `leak_bytes_per_s`. Probes are spared
    all faults but those of `fail_probes`, so many from the first on.

    It reserves `kv_tokens` at its start, or with `pool_bytes` and `kv_bytes_per_token` allocates as it goes: no
    `kv_tokens`, and it dies of a token that the pool does not hold. With `keeps_memory` it gives none back when a
    request ends, but uses it for others.
    """

    seed: Count = 0
    tokens_per_second: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 50.0
    ttft_s: Delay = 0.0
    start_s: Delay = 0.0
    stall_s: Seconds = 30.0
    default_tokens: Count = 32
    tokens_per_chunk: PositiveInt = 1
    token_ids: bool = False
    kv_tokens: PositiveInt = 65_536
    block_size: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 16
    max_concurrency: PositiveInt = 64
    max_model_len: PositiveInt = 8192
    pool_bytes: PositiveInt | None = None
    kv_bytes_per_token: PositiveInt | None = None
    memory_reserve_bytes: Count | None = None
    keeps_memory: bool = False
    busy_first: Count = 0
    refuse_first: Count = 0
    fault_first: Count | None = None
    die_after: Count | None = None
    hang_after: Count | None = None
    error_after: Count | None = None
    cut_after: Count | None = None
    slow_factor: Annotated[float, msgspec.Meta(ge=1, le=1e6)] = 1.0
    error_rate: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    leak_bytes_per_s: Count = 0
    sick_runs: PositiveInt | None = None
    fail_probes: Count = 0

    def __post_init__(self) -> None:
        """Rules between options. Raises ConfigError."""
        if (self.pool_bytes is None) != (self.kv_bytes_per_token is None):
            raise ConfigError("engine sim: options pool_bytes and kv_bytes_per_token: only both together")
        if self.pool_bytes is None and (self.memory_reserve_bytes is not None or self.keeps_memory):
            raise ConfigError("engine sim: options memory_reserve_bytes and keeps_memory: only with pool_bytes")

    def in_run(self, number: int) -> "SimOptions":
        """What holds of the `number`-th start, from 1: without sickness once that is over."""
        if self.sick_runs is None or number <= self.sick_runs:
            return self
        return msgspec.structs.replace(self, slow_factor=1.0, error_rate=0.0, leak_bytes_per_s=0)


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it will go: the places of its first token and of the end, its finish_reason, and its faults."""

    first: int
    end: int
    finish_reason: str
    faults: dict[str, int]


def make_script(
    options: SimOptions, request: InferenceRequest, *, max_tokens: int, resume: Resume | None, ordinal: int
) -> Script:
    """The course of the request that is the `ordinal`-th (from 0) to run; resumed, its places go on where they were."""
    marked = {key: int(count) for key, count in _MARKER.findall(prompt_text(request))}
    first = len(resume.text.split()) if resume is not None else 0
    natural_end = max(first, marked.pop("tokens", options.default_tokens))
    limit = max(first, min(first + max_tokens, options.max_model_len - num_prompt_tokens_of(request)))
    is_natural = natural_end <= limit and request.body.get("ignore_eos") is not True
    faults: dict[str, int] = {}
    if options.fault_first is None or ordinal < options.fault_first:
        faults = {key: count for key in _FAULTS if (count := getattr(options, key)) is not None}
    if options.error_rate and Random(f"{options.seed}-{ordinal}").random() < options.error_rate:
        faults["error_after"] = 0
    return Script(
        first=first,
        end=natural_end if is_natural else limit,
        finish_reason="stop" if is_natural else "length",
        faults=faults | marked,
    )
