"""Distributions as a table."""

from collections.abc import Sequence

from rich.table import Table

from headrace.bench.figures import Distribution
from headrace.cli.render import table

__all__ = ["distributions", "figure"]

_FIGURES = ("n", "min", "p50", "p90", "p99", "max")


def figure(value: float) -> str:
    """Three significant digits where they are few, no decimals where they are many: `0.412`, `4.12`, `412`, `4,123`."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 10 else f"{value:.1f}"


def distributions(title: str, rows: Sequence[tuple[str, Distribution | None]], *, beside: float | None = None) -> Table:
    """One line for each; with `beside`, how many times that figure each p50 is."""
    columns = ("", *_FIGURES, *(("p50 ÷ round trip",) if beside else ()))
    cells = []
    for name, found in rows:
        if found is None:
            cells.append((name, "0", *("" for _ in columns[2:])))
            continue
        values = [str(found.n), *(figure(getattr(found, each)) for each in _FIGURES[1:])]
        cells.append((name, *values, *((f"{found.p50 / beside:.1f}",) if beside else ())))
    return table(title, columns, cells, right=columns[1:])
