"""Inline SVG charts for the report: lines, bars, and lanes over time. Colours are the page's classes `c0`..`c7`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

W, H = 520, 230
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 10, 38
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


def line_chart(
    series: Sequence[Series], *, x_label: str = "step", percent: bool = False, ceiling: float | None = None
) -> str:
    """Lines over whole-numbered x. The y axis includes 0 and, where given, `ceiling`."""
    points = [(x, y) for s in series for x, y in s.points if math.isfinite(y)]
    x0, x1 = min(x for x, _ in points), max(x for x, _ in points)
    y0, y1 = min(0.0, min(y for _, y in points)), max(ceiling or 0.0, max(y for _, y in points))
    if x1 == x0:
        x0, x1 = x0 - 0.5, x1 + 0.5
    if y1 == y0:
        y1 = y0 + 1.0
    pad = 0.06 * (y1 - y0)
    y0, y1 = y0 - (pad if y0 < 0 else 0), y1 + (pad if y1 != ceiling else 0)

    def sx(x: float) -> float:
        return LEFT + (x - x0) / (x1 - x0) * (W - LEFT - RIGHT)

    def sy(y: float) -> float:
        return H - BOTTOM - (y - y0) / (y1 - y0) * (H - TOP - BOTTOM)

    x_ticks = [(sx(x), _number(x)) for x in ticks(x0, x1, 8) if x == int(x)]
    y_ticks = [(sy(y), f"{y:.0%}" if percent else _number(y)) for y in ticks(y0, y1)]
    parts = [_axes(x_ticks, y_ticks, x_label)]
    for s in series:
        finite = [(x, y) for x, y in s.points if math.isfinite(y)]
        if s.style == "dots" or len(finite) == 1:
            for x, y in finite:
                tip = f"{s.label}, {x_label} {_number(x)}: {y:.4g}"
                parts.append(_tag("circle", tip, cls=f"dot c{s.color}", cx=sx(x), cy=sy(y), r=4))
        else:
            parts.append(_tag("path", cls=f"ln c{s.color} {s.style}", d=_path(s.points, sx, sy)))
    label = ", ".join(s.label for s in series)
    return _svg(W, H, parts, label) + _legend([(s.label, f"c{s.color} {s.style}") for s in series])


def bar_chart(labels: Sequence[str], values: Sequence[float], *, x_label: str, color: int = 0) -> str:
    """One bar per label, its share of the total above it."""
    total, top = sum(values) or 1.0, (max(values) or 1.0) * 1.12
    slot = (W - LEFT - RIGHT) / len(labels)
    width = min(70.0, slot * 0.7)

    def sy(y: float) -> float:
        return H - BOTTOM - y / top * (H - TOP - BOTTOM)

    centers = [LEFT + slot * (i + 0.5) for i in range(len(labels))]
    parts = [_axes(list(zip(centers, labels)), [(sy(y), _number(y)) for y in ticks(0, top)], x_label)]
    for x, label, value in zip(centers, labels, values):
        y, tip = sy(value), f"{label}: {_number(value)}"
        parts.append(_bar(tip, color, x - width / 2, y, width, H - BOTTOM - y))
        parts.append(_text(x, y - 4, f"{value / total:.0%}", "middle"))
    return _svg(W, H, parts, x_label)


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
    right, bottom = width - 10, top + row * len(lanes)

    def sx(s: float) -> float:
        return left + s / length_s * (right - left)

    parts: list[str] = []
    for value in ticks(0, length_s, 8):
        parts.append(_line("grid", sx(value), top, sx(value), bottom))
        parts.append(_text(sx(value), bottom + 16, f"{value:.4g}", "middle"))
    parts.append(_text(right, bottom + 32, "seconds", "end"))
    for index, (label, bars) in enumerate(lanes):
        y = top + row * index
        parts.append(_text(left - 8, y + 17, label if len(label) <= 22 else label[:21] + "…", "end", "lane"))
        parts.append(_line("grid", left, y + row, right, y + row))
        for bar in bars:
            x, inset = sx(max(0.0, bar.start_s)), 3 + 3 * min(bar.depth, 3)
            tip = f"{bar.name} {(bar.end_s - bar.start_s) * 1e3:.3g} ms {bar.detail}"
            length = max(0.6, sx(min(length_s, bar.end_s)) - x)
            parts.append(_bar(tip, color[bar.name], x, y + inset, length, row - 2 * inset))
    for at, text in marks:
        parts.append(_line("mark", sx(at), top - 6, sx(at), bottom))
        parts.append(_text(sx(at) + 3, top - 7, text, "start"))
    shown = names if len(names) <= COLORS else [*names[: COLORS - 1], "others"]
    legend = [(name, f"c{i}") for i, name in enumerate(shown)]
    return _svg(width, bottom + 36, parts, "lanes over time") + _legend(legend)


def _axes(xs: Sequence[tuple[float, str]], ys: Sequence[tuple[float, str]], x_label: str) -> str:
    parts = [_line("grid", LEFT, y, W - RIGHT, y) + _text(LEFT - 6, y + 4, text, "end") for y, text in ys]
    parts += [_text(x, H - BOTTOM + 16, text, "middle") for x, text in xs]
    return "".join(parts) + _text((LEFT + W - RIGHT) / 2, H - 4, x_label, "middle")


def _tag(name: str, tip: str = "", **attributes: float | str) -> str:
    """`<name ...>` with `tip` shown under the pointer; `cls` is the class, numbers are rounded to 1/100."""
    pairs = " ".join(
        f'{"class" if key == "cls" else key.replace("_", "-")}="{value if isinstance(value, str) else round(value, 2)}"'
        for key, value in attributes.items()
    )
    return f"<{name} {pairs}><title>{escape(tip)}</title></{name}>" if tip else f"<{name} {pairs}/>"


def _bar(tip: str, color: int, x: float, y: float, width: float, height: float) -> str:
    return _tag("rect", tip, cls=f"bar c{color}", x=x, y=y, width=width, height=height, rx=1)


def _line(cls: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return _tag("line", cls=cls, x1=x1, y1=y1, x2=x2, y2=y2)


def _text(x: float, y: float, text: str, anchor: str, cls: str = "tick") -> str:
    return _tag("text", cls=cls, text_anchor=anchor, x=x, y=y)[:-2] + f">{escape(text)}</text>"


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


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<span><i class="key {cls}"></i>{escape(label)}</span>' for label, cls in entries)
    return f'<div class="legend">{items}</div>'


def _number(value: float) -> str:
    if value and abs(value) >= 1e6:
        return f"{value / 1e6:.4g}M"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
