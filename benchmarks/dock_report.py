"""The figures that dock.py ends with, their goals, and the table for people. Pure functions of what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

AT_LEAST, AT_MOST = ">=", "<="
# In the order of the last line. A figure that is None was not measured, and its goal is neither reached nor missed.
GOALS: dict[str, tuple[str, float]] = {
    "put_get_over_peer_min": (AT_LEAST, 20.0),
    "put_get_over_peer_median": (AT_LEAST, 40.0),
    "put_get_view_over_memcpy_median": (AT_LEAST, 0.5),
    "tcp_put_get_over_peer_min": (AT_LEAST, 5.0),
    "row_p50_over_peer": (AT_MOST, 0.1),
    "row_p99_over_peer": (AT_MOST, 0.1),
    "grants_per_s_over_peer_8k": (AT_LEAST, 20.0),
    "grants_per_s_1m_over_1k": (AT_LEAST, 0.8),
    "grants_4_over_1_consumers": (AT_LEAST, 0.9),
    "cpu_s_per_gb": (AT_MOST, 0.6),
    "storage_peak_over_payload": (AT_MOST, 1.10),
    "freed_over_cleared": (AT_LEAST, 1.00),
    "busiest_of_4_pairs_share": (AT_MOST, 0.30),
    "dense_put_get_over_peer": (AT_LEAST, 10.0),
    "dense_tcp_over_peer": (AT_LEAST, 2.0),
}
DENSE_CELL = "dense"
_DIGITS = 4


def reached(key: str, value: float | None) -> bool | None:
    """Whether the goal is met; None without a value. Compared with what is printed."""
    if value is None:
        return None
    relation, goal = GOALS[key]
    return value >= goal if relation == AT_LEAST else value <= goal


def rate(cell: Mapping[str, Any], mode: str, with_done: bool = False) -> float | None:
    """Put and get, one after the other, in GB/s: the least disturbed repeat of each."""
    run = cell.get(mode)
    if run is None:
        return None
    seconds = min(run["put_s"]) + min(run["get_s"]) + (min(run["done_s"]) if with_done else 0.0)
    return cell["nbytes"] / seconds / 1e9


def figures(raw: Mapping[str, Any]) -> dict[str, float | None]:
    """All keys of GOALS, then further ones that have no goal."""
    cells: Mapping[str, Any] = raw.get("cells", {})
    jagged = [cell for name, cell in cells.items() if name != DENSE_CELL]
    dense = cells.get(DENSE_CELL, {})
    view, copy, tcp = ([_over_peer(cell, mode) for cell in jagged] for mode in ("view", "copy", "tcp"))
    done = [_divide(rate(cell, "view", with_done=True), rate(cell, "peer")) for cell in jagged]
    ours, peer = (lambda *path: _find(raw, "ours", *path)), (lambda *path: _find(raw, "peer", *path))
    cpu = [_find(cell, "view", "cpu_s_per_gb") for cell in jagged]
    found = {
        "put_get_over_peer_min": _of(min, view),
        "put_get_over_peer_median": _of(statistics.median, view),
        "put_get_view_over_memcpy_median": _of(statistics.median, [_over_memcpy(cell) for cell in jagged]),
        "tcp_put_get_over_peer_min": _of(min, tcp),
        "row_p50_over_peer": _divide(ours("latency", "p50_ms"), peer("latency", "p50_ms")),
        "row_p99_over_peer": _divide(ours("latency", "p99_ms"), peer("latency", "p99_ms")),
        "grants_per_s_over_peer_8k": _divide(ours("grants", "rows", "8192"), peer("grants", "rows", "8192")),
        "grants_per_s_1m_over_1k": _divide(ours("grants", "rows", "1048576"), ours("grants", "rows", "1024")),
        "grants_4_over_1_consumers": _divide(ours("grants", "consumers", "4"), ours("grants", "consumers", "1")),
        "cpu_s_per_gb": _of(statistics.median, cpu),
        "storage_peak_over_payload": ours("hold", "peak_over_payload"),
        "freed_over_cleared": _freed(ours("hold", "freed_over_cleared_all"), ours("hold", "freed_over_cleared_part")),
        "busiest_of_4_pairs_share": _of(max, [ours("pairs", "bytes"), ours("pairs", "messages")]),
        "dense_put_get_over_peer": _over_peer(dense, "view"),
        "dense_tcp_over_peer": _over_peer(dense, "tcp"),
        "put_get_copy_over_peer_min": _of(min, copy),
        "put_get_copy_over_peer_median": _of(statistics.median, copy),
        "put_get_done_over_peer_min": _of(min, done),
        "cpu_s_per_gb_max": _of(max, cpu),
        "cpu_s_per_gb_tcp": _of(statistics.median, [_find(cell, "tcp", "cpu_s_per_gb") for cell in jagged]),
        "cpu_s_per_gb_peer": _of(statistics.median, [_find(cell, "peer", "cpu_s_per_gb") for cell in jagged]),
        "dense_view_over_memcpy": _over_memcpy(dense),
    }
    return {key: None if value is None else round(value, _DIGITS) for key, value in found.items()}


def _freed(all_of_it: float | None, part: float | None) -> float | None:
    """The worse of the two, to the two digits of the goal: neighbours may share the last granule."""
    worse = _of(min, [all_of_it, part])
    return None if worse is None else round(worse, 2)


def _over_peer(cell: Mapping[str, Any], mode: str) -> float | None:
    return _divide(rate(cell, mode), rate(cell, "peer"))


def _over_memcpy(cell: Mapping[str, Any]) -> float | None:
    return _divide(rate(cell, "view"), max(cell.get("memcpy", [0.0])))


def _divide(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def _of(function: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return function(known) if known else None


def _find(tree: Mapping[str, Any], *path: str) -> Any:
    for name in path:
        tree = tree.get(name, {})
    return tree if tree != {} else None


# -- for people --------------------------------------------------------------------------------------------------------


def table(raw: Mapping[str, Any], found: Mapping[str, float | None]) -> str:
    parts = [_cells(raw), _latency(raw), _grants(raw), _goals(found)]
    failed = [f"not measured: {section}: {reason}" for section, reason in raw.get("failed", {}).items()]
    return "\n\n".join(part for part in [*parts, "\n".join(failed)] if part)


def _cells(raw: Mapping[str, Any]) -> str:
    head = ("MB / rows", "view", "copy", "tcp", "peer", "view:peer", "tcp:peer", "memcpy", "view:memcpy", "shm view",
            "shm copy", "zmq hop", "socket hop", "CPU s/GB", "tcp", "peer")  # fmt: skip
    lines = []
    for name, cell in raw.get("cells", {}).items():
        marks = cell.get("yardsticks", {})
        lines.append(
            [
                name,
                *(rate(cell, mode) for mode in ("view", "copy", "tcp", "peer")),
                _over_peer(cell, "view"), _over_peer(cell, "tcp"), max(cell["memcpy"]), _over_memcpy(cell),
                *(marks.get(mark) for mark in ("shm_view", "shm_copy", "zmq_tcp", "socket_tcp")),
                *(_find(cell, mode, "cpu_s_per_gb") for mode in ("view", "tcp", "peer")),
            ]
        )  # fmt: skip
    return "put + get, GB/s (producer and consumer in two processes)\n" + _align(head, lines) if lines else ""


def _latency(raw: Mapping[str, Any]) -> str:
    lines = [
        (side, _find(raw, side, "latency", "p50_ms"), _find(raw, side, "latency", "p99_ms"))
        for side in ("ours", "peer")
        if _find(raw, side, "latency")
    ]
    return "one row to a consumer that waits\n" + _align(("", "p50 ms", "p99 ms"), lines) if lines else ""


def _grants(raw: Mapping[str, Any]) -> str:
    sides = [side for side in ("ours", "peer") if _find(raw, side, "grants")]
    lines = []
    for how, word in (("rows", "rows"), ("consumers", "consumers, 8k rows")):
        counts = sorted({int(n) for side in sides for n in _find(raw, side, "grants", how) or {}})
        lines += [(f"{n} {word}", *(_find(raw, side, "grants", how, str(n)) for side in sides)) for n in counts]
    return "grants of 8 rows, per second\n" + _align(("", *sides), lines) if lines else ""


def _goals(found: Mapping[str, float | None]) -> str:
    words = {True: "reached", False: "missed", None: "not measured"}
    lines = [
        (key, value, f"{GOALS[key][0]} {GOALS[key][1]:g}", words[reached(key, value)])
        if key in GOALS
        else (key, value, "", "")
        for key, value in found.items()
    ]
    return _align(("figure", "value", "goal", ""), lines)


def _align(head: Iterable[str], lines: Iterable[Iterable[Any]]) -> str:
    rows = [list(head), *([_word(value) for value in line] for line in lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(word.ljust(w) if i == 0 else word.rjust(w) for i, (word, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    )


def _word(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
