"""Line charts as SVG: a pure function of the figures, so that the same figures are the same bytes."""

import math
from collections.abc import Sequence
from typing import Final
from xml.sax.saxutils import escape

import msgspec

__all__ = ["Chart", "Line", "svg"]

_WIDTH: Final = 640
_HEIGHT: Final = 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 176, 40, 48
_COLOURS: Final = ("#0b6e4f", "#7fb800", "#c8102e", "#f18f01", "#5b5f97", "#8c6d46", "#222222")
_DASHES: Final = ("", "", "6 3", "2 3", "8 3 2 3", "4 2", "1 2")


class Line(msgspec.Struct, frozen=True):
    """One line through its points (x, y) in order of x."""

    name: str
    points: tuple[tuple[float, float], ...]


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """Lines over a common x; a logarithmic y needs values above 0. At most seven lines.

    Each x is marked, or with `has_round_x` round ones are, as for a course over time.
    """

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    is_log: bool = False
    y_range: tuple[float, float] | None = None
    has_round_x: bool = False


def svg(chart: Chart) -> str:
    """The chart as an SVG document with a legend beside it."""
    xs = [x for line in chart.lines for x, _ in line.points]
    ys = [y for line in chart.lines for _, y in line.points]
    low_x, high_x = min(xs), max(xs)
    ticks = _log_ticks(min(ys), max(ys)) if chart.is_log else _ticks(*(chart.y_range or (0.0, max(ys))))
    low_y, high_y = ticks[0], ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - low_x) / ((high_x - low_x) or 1.0)
        part = math.log(y / low_y) / math.log(high_y / low_y) if chart.is_log else (y - low_y) / (high_y - low_y)
        up = min(1.0, max(0.0, part))
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(chart.title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        _text(_LEFT, 22, chart.title, size=14),
    ]
    for tick in ticks:
        _, y = place(low_x, tick)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#dddddd"/>')
        parts.append(_text(_LEFT - 8, y + 4, _shown(tick), anchor="end"))
    for x in _ticks(low_x, high_x) if chart.has_round_x else sorted(set(xs)):
        if not low_x <= x <= high_x:
            continue
        at, _ = place(x, high_y)
        parts.append(_text(at, _HEIGHT - _BOTTOM + 18, _shown(x), anchor="middle"))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(_text(middle, _HEIGHT - 10, chart.x_label, anchor="middle"))
    across, down = 16, (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(_text(across, down, chart.y_label, anchor="middle", turn=f"rotate(-90 {across} {down:.1f})"))
    for number, line in enumerate(chart.lines):
        stroke = f'stroke="{_COLOURS[number]}" stroke-width="2"'
        stroke += f' stroke-dasharray="{_DASHES[number]}"' if _DASHES[number] else ""
        path = "L".join("{:.1f} {:.1f}".format(*place(x, y)) for x, y in line.points)
        parts.append(f'<path d="M{path}" fill="none" {stroke}/>')
        y = _TOP + 8 + 20 * number
        parts.append(f'<path d="M{_WIDTH - _RIGHT + 14} {y}h24" fill="none" {stroke}/>')
        parts.append(_text(_WIDTH - _RIGHT + 44, y + 4, line.name))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, turn: str = "") -> str:
    more = f' font-size="{size}"' if size != 12 else ""
    more += f' text-anchor="{anchor}"' if anchor != "start" else ""
    more += f' transform="{turn}"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="#222222"{more}>{escape(text)}</text>'


def _ticks(low: float, high: float) -> Sequence[float]:
    """Round numbers from at or below `low` to at or above `high`, some five of them."""
    span = (high - low) or 1.0
    rough = span / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.floor(low / step)
    last = max(first + 1, math.ceil(high / step))
    return [number * step for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> Sequence[float]:
    """Powers of ten from at or below `low` to at or above `high`, two at least."""
    first = math.floor(math.log10(low))
    last = max(first + 1, math.ceil(math.log10(high)))
    return [10.0**power for power in range(first, last + 1)]


def _shown(value: float) -> str:
    return f"{value:.3g}"
