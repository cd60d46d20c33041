"""What a scenario has configured before its parts start: tenants with queues of their own, pools that lend."""

import msgspec

from headrace.bus.connection import Bus, Stored
from headrace.bus.keyvalue import Bucket
from headrace.schemas.config import ModelConfig, PoolConfig, TenantConfig
from headrace.schemas.config_text import key_of
from headrace.schemas.subjects import DEFAULT_POOL
from tests.simulation.schedule import MODEL, TENANT, Scenario

__all__ = ["configure"]


async def configure(bus: Bus, scenario: Scenario) -> None:
    """Give each tenant its queue; the workers of every pool but the default one lend to that."""
    bucket = Bucket(bus, bus.names.config_bucket)
    entries: dict[str, TenantConfig | ModelConfig] = {
        key_of("tenants", tenant): TenantConfig() for tenant in {ask.tenant for ask in scenario.asks} - {TENANT}
    }
    lending = sorted(set(scenario.pools) - {DEFAULT_POOL})
    if lending:
        pools = tuple(PoolConfig(name=name, lends_to=(DEFAULT_POOL,)) for name in lending)
        entries[key_of("models", MODEL)] = ModelConfig(pools=pools)
    for key in sorted(entries):
        result = await bucket.put(key, msgspec.json.encode(entries[key]), expected_revision=0)
        assert isinstance(result, Stored)
