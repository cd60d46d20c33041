"""What a part counted, as it tells monitors: the families of Prometheus's data model, without a place of their own."""

import re
from typing import Final

import msgspec

__all__ = ["Family", "Measured", "Sample"]

_NAME: Final = re.compile(r"headrace_[a-z0-9_]{1,80}")
_LABEL: Final = re.compile(r"[a-z]{1,20}")
_MAX_VALUE_CHARS: Final = 120
_MAX_LABELS: Final = 8


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One number, under its name in the exposition (`…_total`, `…_bucket`)."""

    name: str
    labels: dict[str, str]
    value: float

    @property
    def is_well_formed(self) -> bool:
        """Whether it can be shown as it is."""
        are_labels = all(_LABEL.fullmatch(key) and len(text) <= _MAX_VALUE_CHARS for key, text in self.labels.items())
        return _NAME.fullmatch(self.name) is not None and are_labels and len(self.labels) <= _MAX_LABELS


class Family(msgspec.Struct, frozen=True, array_like=True):
    """One metric: its name without a suffix, its type (`counter`, `gauge`, `histogram`), what it means."""

    name: str
    kind: str
    meaning: str
    samples: tuple[Sample, ...]

    @property
    def is_well_formed(self) -> bool:
        """Whether it can be shown as it is."""
        return _NAME.fullmatch(self.name) is not None and self.kind in ("counter", "gauge", "histogram")


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """All that one process counted since it started.

    Answered by every part on `<p>.metrics` to a monitor that asks all of them; read-only. `process` is a worker's id,
    else host and process id, and `origin` tells two parts in one process from two processes.
    """

    service: str
    process: str
    origin: str
    families: tuple[Family, ...] = ()
