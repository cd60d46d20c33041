"""Whom a router names for a request whose beginning somebody has: only workers of the request's own pool."""

from types import SimpleNamespace
from typing import Any

from headrace.router.models import Models
from headrace.schemas.config import Config, ModelConfig, PoolConfig
from headrace.schemas.workers import Heartbeat
from headrace.settings import Settings


def beat(worker: str, pool: str) -> Heartbeat:
    return Heartbeat(
        worker=worker, epoch="e", state="Ready", model="m", pool=pool, max_concurrency=4, prefixes=("hash",)
    )


def test_a_worker_that_is_lent_is_not_named() -> None:
    """It passes the pool's wakes on, so who fetched the request would hand it back to nobody."""
    lending = PoolConfig(name="lender", lends_to=("default",))
    view: Any = SimpleNamespace(config=Config(models={"m": ModelConfig(pools=(lending,))}))
    workers: Any = SimpleNamespace(beats={"lent": beat("lent", "lender")})
    bus: Any = SimpleNamespace(settings=Settings())
    models = Models(bus, workers, view)
    assert models.preferred("m", "lender", ["hash"], 1) == "lent"
    assert models.preferred("m", "default", ["hash"], 1) is None
    workers.beats["own"] = beat("own", "default")
    assert models.preferred("m", "default", ["hash"], 1) == "own"
