"""Inline SVG charts for the report: lines, bars, and lanes over time. Colours are CSS classes `c0`..`c7` of the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

W, H = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 40
COLORS = 8


@dataclass(frozen=True, slots=True)
class Series:
    """`points`: (x, y) in drawing order; not-finite ones leave a gap. `style`: line | faint | dots."""

    label: str
    points: Sequence[tuple[float, float]]
    color: int = 0
    style: str = "line"


@dataclass(frozen=True, slots=True)
class Bar:
    """A span in a lane of `gantt`: seconds from the start of the window, row of its lane, nesting depth."""

    name: str
    start_s: float
    end_s: float
    depth: int = 0
    detail: str = ""


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(base * m for m in (1, 2, 2.5, 5, 10) if base * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(series: Sequence[Series], *, unit: str, x_label: str = "step", zero: bool = True, percent: bool = False,
               ceiling: float | None = None) -> str:  # fmt: skip
    """`zero`: the y axis includes 0. `ceiling`: it reaches at least this value."""
    points = [(x, y) for s in series for x, y in s.points if math.isfinite(y)]
    xs = [x for x, _ in points]
    ys = [y for _, y in points] + ([0.0] if zero else []) + ([ceiling] if ceiling is not None else [])
    x0, x1 = min(xs), max(xs)
    y0, y1 = min(ys), max(ys)
    if x1 == x0:
        x0, x1 = x0 - 0.5, x1 + 0.5
    if y1 == y0:
        y0, y1 = y0 - (0 if zero and y0 == 0 else 0.5), y1 + 0.5
    pad = 0.06 * (y1 - y0)
    y1 += pad if ceiling is None or y1 > ceiling else 0
    y0 -= pad if y0 != 0 else 0

    def sx(x: float) -> float:
        return LEFT + (x - x0) / (x1 - x0) * (W - LEFT - RIGHT)

    def sy(y: float) -> float:
        return H - BOTTOM - (y - y0) / (y1 - y0) * (H - TOP - BOTTOM)

    parts = [_axes([(sx(x), _number(x)) for x in ticks(x0, x1, 8) if x == int(x) or x_label != "step"],
                   [(sy(y), f"{y:.0%}" if percent else _number(y)) for y in ticks(y0, y1)], x_label, unit)]  # fmt: skip
    for s in series:
        finite = [(x, y) for x, y in s.points if math.isfinite(y)]
        if s.style != "dots" and len(finite) > 1:
            parts.append(f'<path class="ln c{s.color} {s.style}" d="{_path(s.points, sx, sy)}"/>')
        if s.style == "dots" or len(finite) == 1:
            parts += [f'<circle class="dot c{s.color}" cx="{sx(x):.1f}" cy="{sy(y):.1f}" r="4"><title>{escape(s.label)}, '
                      f"{escape(x_label)} {_number(x)}: {y:.4g}</title></circle>" for x, y in finite]  # fmt: skip
    return _svg(W, H, parts, ", ".join(s.label for s in series)) + _legend([(s.label, s.color) for s in series])


def bar_chart(labels: Sequence[str], values: Sequence[float], *, unit: str, x_label: str, color: int = 0) -> str:
    """One bar per label, its share of the total above it."""
    total, top = sum(values) or 1.0, (max(values) or 1.0) * 1.12
    slot = (W - LEFT - RIGHT) / len(labels)
    width = min(70.0, slot * 0.7)

    def sy(y: float) -> float:
        return H - BOTTOM - y / top * (H - TOP - BOTTOM)

    centers = [LEFT + slot * (i + 0.5) for i in range(len(labels))]
    parts = [_axes(list(zip(centers, labels)), [(sy(y), _number(y)) for y in ticks(0, top)], x_label, unit)]
    for x, label, value in zip(centers, labels, values):
        parts.append(f'<rect class="bar c{color}" x="{x - width / 2:.1f}" y="{sy(value):.1f}" width="{width:.1f}" '
                     f'height="{H - BOTTOM - sy(value):.1f}" rx="2"><title>{escape(label)}: {_number(value)}</title></rect>'
                     f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{sy(value) - 4:.1f}">{value / total:.0%}</text>')  # fmt: skip
    return _svg(W, H, parts, unit)


def gantt(lanes: Sequence[tuple[str, Sequence[Bar]]], length_s: float, marks: Sequence[tuple[float, str]] = ()) -> str:
    """Lanes from top to bottom over `length_s` seconds; `marks`: vertical lines (second, text).

    Each span name has one colour, the largest totals first; names beyond the palette share the last colour.
    """
    total: dict[str, float] = {}
    for _, bars in lanes:
        for bar in bars:
            total[bar.name] = total.get(bar.name, 0.0) + bar.end_s - bar.start_s
    names = sorted(total, key=lambda name: -total[name])
    color = {name: min(i, COLORS - 1) for i, name in enumerate(names)}
    width, left, row, top = 1000, 150, 26, 20
    height = top + row * len(lanes) + 34

    def sx(s: float) -> float:
        return left + s / length_s * (width - left - 10)

    parts: list[str] = []
    for value in ticks(0, length_s, 8):
        parts.append(f'<line class="grid" x1="{sx(value):.1f}" x2="{sx(value):.1f}" y1="{top}" y2="{height - 34}"/>'
                     f'<text class="tick" text-anchor="middle" x="{sx(value):.1f}" y="{height - 18}">{value:.4g}</text>')  # fmt: skip
    parts.append(f'<text class="tick" text-anchor="end" x="{width - 10}" y="{height - 3}">seconds</text>')
    for index, (label, bars) in enumerate(lanes):
        y = top + row * index
        parts.append(f'<text class="lane" text-anchor="end" x="{left - 8}" y="{y + 17}">{escape(_clip(label, 22))}</text>'
                     f'<line class="grid" x1="{left}" x2="{width - 10}" y1="{y + row}" y2="{y + row}"/>')  # fmt: skip
        for bar in bars:
            x, inset = sx(max(0.0, bar.start_s)), 3 + 3 * min(bar.depth, 3)
            w = max(0.6, sx(min(length_s, bar.end_s)) - x)
            parts.append(f'<rect class="bar c{color[bar.name]}" x="{x:.2f}" y="{y + inset}" width="{w:.2f}" '
                         f'height="{row - 2 * inset}" rx="1"><title>{escape(bar.name)} '
                         f'{(bar.end_s - bar.start_s) * 1e3:.3g} ms {escape(bar.detail)}</title></rect>')  # fmt: skip
    for at, text in marks:
        parts.append(f'<line class="mark" x1="{sx(at):.1f}" x2="{sx(at):.1f}" y1="{top - 6}" y2="{height - 34}"/>'
                     f'<text class="tick" x="{sx(at) + 3:.1f}" y="{top - 7}">{escape(text)}</text>')  # fmt: skip
    shown = names[: COLORS - 1] if len(names) > COLORS else names
    legend = [(name, color[name]) for name in shown] + ([("others", COLORS - 1)] if len(names) > COLORS else [])
    return _svg(width, height, parts, "lanes over time") + _legend(legend)


def _axes(xs: Sequence[tuple[float, str]], ys: Sequence[tuple[float, str]], x_label: str, unit: str) -> str:
    parts = [f'<line class="grid" x1="{LEFT}" x2="{W - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
             f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{y + 4:.1f}">{escape(text)}</text>' for y, text in ys]  # fmt: skip
    parts += [f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{H - BOTTOM + 16}">{escape(text)}</text>'
              for x, text in xs]  # fmt: skip
    parts.append(f'<text class="tick" text-anchor="middle" x="{(LEFT + W - RIGHT) / 2}" y="{H - 5}">{escape(x_label)}</text>'
                 f'<text class="tick" text-anchor="middle" transform="rotate(-90)" x="{-(TOP + H - BOTTOM) / 2}" y="12">'
                 f"{escape(unit)}</text>")  # fmt: skip
    return "".join(parts)


def _path(points: Sequence[tuple[float, float]], sx, sy) -> str:
    commands, pen_up = [], True
    for x, y in points:
        if math.isfinite(y):
            commands.append(f"{'M' if pen_up else 'L'}{sx(x):.1f},{sy(y):.1f}")
        pen_up = not math.isfinite(y)
    return "".join(commands)


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label, quote=True)}">'
        + "".join(parts)
        + "</svg>"
    )


def _legend(entries: Sequence[tuple[str, int]]) -> str:
    items = "".join(f'<span><i class="key c{color}"></i>{escape(label)}</span>' for label, color in entries)
    return f'<div class="legend">{items}</div>'


def _number(value: float) -> str:
    if value and abs(value) >= 1e6:
        return f"{value / 1e6:.4g}M"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _clip(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 1] + "…"
