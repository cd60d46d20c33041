"""How many replicas of a group there shall be."""

from headrace.schemas.instances import Scale
from headrace.schemas.replicas import ReplicaGroup

__all__ = ["wanted_replicas"]


def wanted_replicas(group: ReplicaGroup, scale: Scale | None) -> int:
    """What the autoscaler decided last, within the bounds that hold now; without one, what is configured.

    Before it decided anything the configured number counts, within the bounds.
    """
    bounds = group.autoscale
    if bounds is None:
        return group.replicas
    wanted = scale.replicas if scale is not None else group.replicas
    return min(max(wanted, bounds.min_replicas), bounds.max_replicas)
