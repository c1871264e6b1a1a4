"""How fast the dock is: against what the machine can do, and against the published peer. README.md explains.

    python benchmarks/dock.py [--quick] [--with-peer] [--out FILE]

Run it with the Python of .venv, on a machine that does nothing else. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dock_yardsticks as yardsticks
import numpy as np
from dock_load import DENSE, JAGGED, MB, make_plan, put_rows
from dock_process import Child, ChildFailed
from dock_report import DENSE_CELL, figures, rate, table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PEER_PYTHON = ROOT / ".venv-peer" / "bin" / "python"
LARGE_MB = 512  # from here on with fewer repeats
LIMIT_S = 1800.0  # of one section of one side


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured; both sides get the same."""

    payloads_mb: tuple[int, ...]
    repeats: int
    large_repeats: int
    streams: int
    latency_rows: int
    grant_sizes: tuple[int, ...]
    peer_grant_sizes: tuple[int, ...]  # the peer's cost grows with the rows
    grant_repeats: int
    grants_together: int
    hold_mb: int
    peer_consumers: tuple[int, ...]
    pairs: tuple[int, int]  # MiB, rows of a put

    def cells(self) -> list[tuple[str, str, int, int]]:
        """(name, kind, MiB, rows of a put)"""
        found = []
        for mb in self.payloads_mb:
            for rows in (64, 256, 1024):
                found.append((f"{mb}/{put_rows(mb, rows)}", JAGGED, mb, rows))
        return [*found, (DENSE_CELL, DENSE, 0, 0)]

    def repeats_of(self, mb: int) -> int:
        return self.large_repeats if mb >= LARGE_MB else self.repeats


FULL = Size(
    payloads_mb=(16, 128, 1024), repeats=5, large_repeats=3, streams=2, latency_rows=300,
    grant_sizes=(1024, 8192, 65536, 1 << 20), peer_grant_sizes=(1024, 8192, 65536), grant_repeats=3,
    grants_together=600, hold_mb=1024, peer_consumers=(1, 2, 4), pairs=(128, 64),
)  # fmt: skip
QUICK = Size(
    payloads_mb=(16,), repeats=3, large_repeats=3, streams=1, latency_rows=60,
    grant_sizes=(1024, 8192, 1 << 20), peer_grant_sizes=(8192,), grant_repeats=2,
    grants_together=200, hold_mb=32, peer_consumers=(), pairs=(32, 32),
)  # fmt: skip
REQUESTS = 100  # of one window of metadata requests
GAP_S = 0.02  # between single rows


class Run:
    """Everything that is measured, with the reasons for what is not."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.began = time.monotonic()
        self.memcpy = yardsticks.Memcpy()
        self.raw: dict[str, Any] = {"cells": {}, "ours": {}, "peer": {}, "failed": {}}

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:4.0f} s] {text}", file=sys.stderr, flush=True)

    def section(self, name: str, measure: Callable[[], Any]) -> Any:
        """None when it failed: one part that cannot be measured must not cost the others."""
        self.say(name)
        try:
            return measure()
        except ChildFailed as error:
            self.say(f"  failed: {error}")
            self.raw["failed"][name] = str(error)
            return None

    def ours(self) -> None:
        size = self.size
        with Child("our side", [sys.executable, str(HERE / "dock_ours.py")]) as side:
            for name, kind, mb, rows in size.cells():
                plan = make_plan(kind, mb, rows)
                cell = self.raw["cells"][name] = {"memcpy": [], "nbytes": plan.nbytes, "yardsticks": {}}
                found, cell["memcpy"] = self._cell(side, name, kind, mb, rows, modes=["view", "copy", "tcp"])
                cell |= found
                cell["yardsticks"] = self.section(f"yardsticks {name}", partial(yardsticks.measure, plan, 3)) or {}
            self._sections(side, "ours", ("hold", "latency", "grants", "pairs"), size.grant_sizes, (1, 2, 4))

    def peer(self) -> None:
        size = self.size
        command = [str(PEER_PYTHON), str(HERE / "dock_peer.py")]
        with (
            tempfile.TemporaryDirectory(prefix="dock-", ignore_cleanup_errors=True) as folder,
            Child("the peer's side", command, _peer_environment()) as side,
        ):
            versions = self.section("the peer's start", partial(side.ask, "start", LIMIT_S, folder=folder))
            if versions is None:
                return
            self.raw["peer"]["versions"] = versions
            self._sections(side, "peer", ("hold",))
            for name, kind, mb, rows in size.cells():
                found, memcpy = self._cell(side, name, kind, mb, rows)
                if found:
                    self.raw["cells"][name] |= {"peer": found, "memcpy_peer": memcpy}
            self._sections(side, "peer", ("latency", "grants"), size.peer_grant_sizes, size.peer_consumers)
            self.section("the peer's end", partial(side.ask, "stop", 60.0))

    def _cell(
        self, side: Child, name: str, kind: str, mb: int, rows: int, **how: Any
    ) -> tuple[dict[str, Any], list[float]]:
        """The side's answer, and memcpy before and after it: the machine may get faster or slower during a run."""
        nbytes = self.raw["cells"][name]["nbytes"]
        ask = {"repeats": self.size.repeats_of(mb), "streams": self.size.streams, **how}
        before = self.memcpy(nbytes)
        measure = partial(side.ask, "cell", LIMIT_S, kind=kind, mb=mb, batch=rows, **ask)
        found = self.section(f"{side.name}: cell {name}", measure) or {}
        return found, [before, self.memcpy(nbytes)]

    def _sections(
        self, side: Child, key: str, names: tuple[str, ...], sizes: tuple[int, ...] = (), together: tuple[int, ...] = ()
    ) -> None:
        size = self.size
        arguments: dict[str, dict[str, Any]] = {
            "hold": {"mb": size.hold_mb, "batch": 256},
            "latency": {"count": size.latency_rows, "gap_s": GAP_S},
            "grants": {
                "sizes": sizes, "requests": REQUESTS, "repeats": size.grant_repeats, "consumers": together,
                "many": size.grants_together,
            },
            "pairs": {"mb": size.pairs[0], "batch": size.pairs[1]},
        }  # fmt: skip
        for name in names:
            found = self.section(f"{side.name}: {name}", partial(side.ask, name, LIMIT_S, **arguments[name]))
            if found is not None:
                self.raw[key][name] = found


def _peer_environment() -> dict[str, str]:
    """Ours without what could slow the peer down: its threads are its own choice."""
    return {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}


def set_up_peer() -> str:
    """Makes .venv-peer if it is not there; returns why that failed, or nothing."""
    done = subprocess.run(["bash", str(HERE / "dock_peer_setup.sh")], stdin=subprocess.DEVNULL)
    return "" if done.returncode == 0 else "the peer could not be installed (benchmarks/dock_peer_setup.sh says why)"


def conditions(quick: bool) -> dict[str, Any]:
    return {
        "quick": quick,
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "kernel": platform.release(),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the dock; the last line printed is one JSON object.")
    parser.add_argument("--quick", action="store_true", help="16 MB cells and fewer repeats, under a minute")
    parser.add_argument("--with-peer", action="store_true", help="the peer too, which is installed if missing")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "benchmarks" / "dock.json", help="every repeat of every cell"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the children are ended on the way out
    missing = set_up_peer() if arguments.with_peer else "not asked for: --with-peer"
    run = Run(QUICK if arguments.quick else FULL)
    run.raw["conditions"] = conditions(arguments.quick)
    run.raw["memcpy_fresh"] = yardsticks.memcpy_fresh(128 * MB)
    run.ours()
    if missing:
        run.raw["failed"]["peer"] = missing
    else:
        run.peer()
    run.raw["conditions"] |= {"load_after": os.getloadavg()[0], "seconds": round(time.monotonic() - run.began, 1)}
    found = figures(run.raw)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"figures": found, **run.raw}, indent=1), encoding="utf-8")
    print(table(run.raw, found), flush=True)
    run.say(f"every repeat of every cell: {arguments.out}")
    print(json.dumps({**found, **summary(run.raw)}), flush=True)
    return 0


def summary(raw: dict[str, Any]) -> dict[str, Any]:
    """Raw figures and conditions of the last line, without the single repeats."""
    cells = {
        name: {
            **{mode: rate(cell, mode) for mode in ("view", "copy", "tcp", "peer") if mode in cell},
            "memcpy": max(cell["memcpy"]), **cell.get("yardsticks", {}),
        }
        for name, cell in raw["cells"].items()
    }  # fmt: skip
    sides = {side: {k: v for k, v in raw[side].items() if k != "versions"} for side in ("ours", "peer")}
    return {
        "gb_per_s": _rounded(cells), **_rounded(sides), "memcpy_fresh": round(raw["memcpy_fresh"], 3),
        "versions": raw["peer"].get("versions"), "not_measured": raw["failed"], **raw["conditions"],
    }  # fmt: skip


def _rounded(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _rounded(value) for name, value in tree.items()}
    return round(tree, 4) if isinstance(tree, float) else tree


if __name__ == "__main__":
    raise SystemExit(main())
