"""Finding out, once at start, what an OpenAI-compatible server is and what it can hold."""

from typing import Any, Final

import msgspec

from headrace.errors import EngineError, EngineStartError
from headrace.worker.engines.bodies import Dialect
from headrace.worker.engines.gauges import KV_USAGE, kv_facts_of, usage_of_metrics
from headrace.worker.engines.http import HttpAdapter

__all__ = ["Findings", "detect"]

_PROBE_S: Final = 10.0
_OWNERS: Final = {"vllm": Dialect.VLLM, "llamacpp": Dialect.LLAMA}


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself; None where it does not."""

    served_model: str
    dialect: Dialect
    health_path: str
    has_metrics: bool
    has_kv_usage: bool = False
    version: str = ""
    kv_capacity_tokens: int | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None


async def detect(http: HttpAdapter, *, model: str, served_model: str | None) -> Findings:
    """Ask the server for its models, limits and metrics; endpoints it lacks are no error.

    The name sent to the server is `served_model`, else `model` if the server lists it, else the only one it lists,
    else `model`. Raises `EngineError` while it does not answer or still loads, `EngineStartError` if waiting cannot
    help.
    """
    health = await http.get("/health", timeout_s=_PROBE_S)
    if health.status == 503:
        raise EngineError("the engine is still loading (HTTP 503)")
    listed = await http.get("/v1/models", timeout_s=_PROBE_S)
    if listed.status in (401, 403):
        raise EngineStartError(f"the engine refuses the API key (HTTP {listed.status}); set the option api_key")
    if listed.status >= 500 and listed.status != 501:
        raise EngineError(f"the engine answers HTTP {listed.status} to /v1/models")
    entries = _entries(listed.json()) if listed.status == 200 else []
    name, entry = _choose(entries, model=model, served_model=served_model)
    dialect = _OWNERS.get(str(entry.get("owned_by")), Dialect.OTHER)
    metrics = await _text(http, "/metrics")
    kv = kv_facts_of(metrics)
    facts: dict[str, Any] = {"max_model_len": _positive(entry.get("max_model_len"))}
    if kv is not None:
        facts |= {"kv_capacity_tokens": kv.capacity_tokens, "block_size": kv.block_size}
    if dialect is Dialect.VLLM:
        facts["version"] = str((await _json(http, "/version")).get("version", ""))[:40]
    if dialect is Dialect.LLAMA:
        facts |= await _llama_facts(http)
    return Findings(
        served_model=name,
        dialect=dialect,
        health_path="/health" if health.status == 200 else "/v1/models",
        has_metrics=usage_of_metrics(metrics) is not None,
        has_kv_usage=any(name in metrics for name in KV_USAGE),
        **facts,
    )


async def _llama_facts(http: HttpAdapter) -> dict[str, Any]:
    """Slots and context of llama.cpp. It does not say whether its slots share one KV pool: count on one slot's."""
    props = await _json(http, "/props")
    settings = props.get("default_generation_settings")
    n_ctx = _positive(settings.get("n_ctx")) if isinstance(settings, dict) else None
    return {"max_model_len": n_ctx, "kv_capacity_tokens": n_ctx, "max_num_seqs": _positive(props.get("total_slots"))}


def _choose(entries: list[dict[str, Any]], *, model: str, served_model: str | None) -> tuple[str, dict[str, Any]]:
    by_id = {str(entry["id"]): entry for entry in entries}
    for name in (served_model, model):
        if name is not None and name in by_id:
            return name, by_id[name]
    if served_model is not None:
        return served_model, entries[0] if len(entries) == 1 else {}
    if len(by_id) == 1:
        return next(iter(by_id.items()))
    if by_id:
        names = ", ".join(sorted(by_id))[:300]
        raise EngineStartError(f"the engine does not serve {model!r} but {names}; choose with the option served_model")
    return model, {}


def _entries(listed: Any) -> list[dict[str, Any]]:
    data = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(data, list):
        return []
    return [entry for entry in data if isinstance(entry, dict) and isinstance(entry.get("id"), str)]


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


async def _text(http: HttpAdapter, path: str) -> str:
    try:
        reply = await http.get(path, timeout_s=_PROBE_S)
    except EngineError:
        return ""
    return reply.body.decode(errors="replace") if reply.status == 200 else ""


async def _json(http: HttpAdapter, path: str) -> dict[str, Any]:
    try:
        reply = await http.get(path, timeout_s=_PROBE_S)
        found = reply.json() if reply.status == 200 else {}
    except EngineError:
        return {}
    return found if isinstance(found, dict) else {}
