"""What parts counted, as Prometheus's metrics: within bounds, whatever a part answers."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from prometheus_client.metrics_core import Metric

from headrace.schemas.metrics import Family, Measured

__all__ = ["counted"]

_MAX_FAMILIES_OF_PART: Final = 64
_MAX_FAMILIES: Final = 256
_MAX_SERIES_OF_PART: Final = 4_000
"""A router that knows 200 models in a few pools has half of it."""
_MAX_SERIES: Final = 500_000
"""Of all parts, each of which has an equal share where they are many."""
_PLACE: Final = ("service", "process")


def counted(parts: Sequence[Measured]) -> tuple[list[Metric], Counter[str]]:
    """Each part's series with its place as labels; and how many of which `kind`, family or series, were left out.

    What is not well formed is left out, and so are families whole that would bring a part over its share, or all parts
    over what is shown at most.
    """
    metrics: dict[str, Metric] = {}
    dropped: Counter[str] = Counter()
    share = min(_MAX_SERIES_OF_PART, _MAX_SERIES // max(1, len(parts)))
    for part in sorted(parts, key=lambda each: (each.service, each.process)):
        place = dict(zip(_PLACE, (part.service[:40], part.process[:120]), strict=True))
        num_left = share
        for number, family in enumerate(part.families):
            metric = _metric_for(family, metrics) if number < _MAX_FAMILIES_OF_PART else None
            if metric is None or len(family.samples) > num_left:
                dropped["family"] += 1
                dropped["series"] += len(family.samples)
                continue
            num_left -= len(family.samples)
            dropped["series"] += len(family.samples) - _add(metric, family, place)
    return list(metrics.values()), +dropped


def _metric_for(family: Family, metrics: dict[str, Metric]) -> Metric | None:
    """The metric that the family's samples go to; None where it cannot be shown, or not beside others of its name."""
    if not family.is_well_formed:
        return None
    if family.name not in metrics:
        if len(metrics) >= _MAX_FAMILIES:
            return None
        metrics[family.name] = Metric(family.name, family.meaning[:200], family.kind)
    metric = metrics[family.name]
    return metric if metric.type == family.kind else None


def _add(metric: Metric, family: Family, place: dict[str, str]) -> int:
    """How many of its samples could be shown."""
    num_added = 0
    for sample in family.samples:
        if sample.is_well_formed and sample.name.startswith(family.name):
            metric.add_sample(sample.name, {**sample.labels, **place}, sample.value)
            num_added += 1
    return num_added
