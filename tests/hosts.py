"""What tests of host agents share: groups written to the configuration, and what the bucket says of them."""

import contextlib
from collections.abc import Callable

import msgspec

from headrace.bus.connection import Bus, Stored
from headrace.bus.instances import InstancesBucket, InstancesView
from headrace.bus.keyvalue import Bucket
from headrace.errors import BrokerError
from headrace.schemas.config import ModelConfig
from headrace.schemas.config_text import key_of
from headrace.schemas.instances import Slot
from headrace.schemas.replicas import ReplicaGroup
from tests.deployment import until

__all__ = ["GRACE", "configure", "ready", "sim_group", "until_renewed", "until_slots"]

GRACE = {"HEADRACE_GRACE_S": "3"}


def sim_group(replicas: int, *options: str, restarts: int = 0, memory_mib: int = 1024) -> ReplicaGroup:
    """Workers of the sim engine in the memory of a host."""
    args = tuple(word for option in options for word in ("-o", option))
    return ReplicaGroup(
        engine="sim", replicas=replicas, args=args, memory_mib=memory_mib, uses="host", restarts=restarts
    )


async def configure(bus: Bus, model: str, *groups: ReplicaGroup) -> None:
    """Write a model's groups."""
    bucket = Bucket(bus, bus.names.config_bucket)
    key = key_of("models", model)
    known = await bucket.get(key)
    result = await bucket.put(
        key,
        msgspec.json.encode(ModelConfig(instances=groups)),
        expected_revision=known.revision if known is not None else 0,
    )
    assert isinstance(result, Stored)


def ready(view: InstancesView) -> list[Slot]:
    """Slots whose worker is ready."""
    return [slot for slot in view.slots.values() if slot.state == "Ready"]


async def until_slots(view: InstancesView, holds: Callable[[InstancesView], bool], *, timeout_s: float = 60.0) -> None:
    """Wait until the bucket says so."""

    async def check() -> bool:
        return holds(view)

    try:
        await until(check, timeout_s=timeout_s)
    except TimeoutError:
        raise AssertionError(f"slots: {view.slots}, hosts: {view.hosts}, failed: {view.failed}") from None


async def until_renewed(bus: Bus, host: str, times: int) -> None:
    """Wait until an agent beat so often from now on: it has had time to do what it would do."""
    revisions: set[int] = set()

    async def has_beaten() -> bool:
        with contextlib.suppress(BrokerError):
            revision, beat = await InstancesBucket(bus).host(host)
            revisions.update({revision} if beat is not None else ())
        return len(revisions) > times

    await until(has_beaten)
