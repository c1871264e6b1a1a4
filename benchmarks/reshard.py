"""How weights move between trainer and rollout: exactness, memory, bytes and time. README.md explains.

    python benchmarks/reshard.py [--quick] [--out FILE]

Run it with the Python of .venv, on a machine that does nothing else. A table for people is printed, then one JSON
object as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")  # before torch is loaded
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # pairs of layouts and ranks are those of the tests

AT_LEAST, AT_MOST = ">=", "<="
# In the order of the last line; None: reported, without a goal.
GOALS: dict[str, tuple[str, float] | None] = {
    "configs_checked": (AT_LEAST, 60),
    "redundant_bytes_while_generating": (AT_MOST, 0),
    "peak_over_identity": (AT_MOST, 1.02),
    "bytes_over_lower_bound_max": (AT_MOST, 1.05),
    "swap_over_memcpy": (AT_LEAST, 0.7),
    "relay_exposed_over_load": (AT_MOST, 1.2),
    "naive_gather_bytes_over_ours_moe": None,
    "plan_671b_seconds": (AT_MOST, 30),
    "plan_671b_modelled_transfer_s": (AT_MOST, 3),
}


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    pairs: int  # of layouts; 0: all
    turns: int  # from training to generation and back, per case
    turn_cases: int
    swap_mb: int
    swap_repeats: int
    relay_layers: int
    relay_repeats: int
    variants: int  # of the large plan


FULL = Size(pairs=0, turns=5, turn_cases=4, swap_mb=512, swap_repeats=7, relay_layers=8, relay_repeats=5, variants=3)
QUICK = Size(pairs=64, turns=2, turn_cases=2, swap_mb=128, swap_repeats=5, relay_layers=2, relay_repeats=3, variants=1)


def matrix(size: Size) -> dict[str, Any]:
    """Pairs of layouts on gloo ranks. Every rank raises at the first wrong bit."""
    from tests.reshard import matrix, matrix_ranks
    from tests.reshard.ranks import Ranks

    cases = matrix.representative(size.pairs) if size.pairs else matrix.all_cases()
    with Ranks(matrix.RANKS, matrix_ranks.MODULES) as ranks:
        found = ranks.run(matrix_ranks.check_cases, cases=cases, timeout_s=400)
    traits: dict[str, int] = {}
    worst = 1.0
    for number, case in enumerate(cases):
        for trait in case.traits:
            traits[trait] = traits.get(trait, 0) + 1
        seen = [rank[number] for rank in found if rank[number]]
        received, needed = sum(s["received"] for s in seen), sum(s["needed"] for s in seen)
        if received != needed:
            worst = max(worst, received / needed if needed else float("inf"))
    return {"configs": len(cases), "traits": dict(sorted(traits.items())), "over": worst}


def turns(size: Size) -> list[dict[str, Any]]:
    import reshard_memory

    return reshard_memory.turns(size.turns, size.turn_cases)


def swap(size: Size) -> dict[str, Any]:
    import reshard_memory

    return reshard_memory.swap(size.swap_mb, size.swap_repeats)


def relay(size: Size) -> dict[str, Any]:
    import reshard_relay

    return reshard_relay.measure(size.relay_layers, size.relay_repeats)


def plans(size: Size) -> list[dict[str, Any]]:
    import reshard_671b

    return [reshard_671b.measure(variant) for variant in reshard_671b.VARIANTS[: size.variants]]


SECTIONS: dict[str, Callable[[Size], Any]] = {
    "plans": plans, "swap": swap, "relay": relay, "turns": turns, "matrix": matrix,
}  # fmt: skip


def figures(raw: dict[str, Any]) -> dict[str, float | int]:
    """The last line out of what the sections measured."""
    in_place = [p for p in raw["plans"] if not p["apart"]]
    return {
        "configs_checked": raw["matrix"]["configs"],
        "redundant_bytes_while_generating": max(t["redundant"] for t in raw["turns"]),
        "peak_over_identity": round(max(t["peak_over_identity"] for t in raw["turns"]), 4),
        "bytes_over_lower_bound_max": round(max(raw["matrix"]["over"], *(p["over"] for p in raw["plans"])), 4),
        "swap_over_memcpy": round(raw["swap"]["over_memcpy"], 3),
        "relay_exposed_over_load": round(raw["relay"]["exposed_over_load"], 3),
        "naive_gather_bytes_over_ours_moe": round(in_place[0]["naive_over_ours"], 1),
        "plan_671b_seconds": round(max(p["seconds"] for p in raw["plans"]), 2),
        "plan_671b_modelled_transfer_s": round(max(p["modelled_s"] for p in in_place), 3),
    }


def reached(key: str, value: float) -> str:
    goal = GOALS[key]
    if goal is None:
        return ""
    relation, limit = goal
    met = value >= limit if relation == AT_LEAST else value <= limit
    return f"{relation} {limit:g}{'' if met else '  missed'}"


def table(raw: dict[str, Any], found: dict[str, float | int]) -> str:
    import reshard_671b

    said, swapped, relayed = raw["matrix"], raw["swap"], raw["relay"]
    lines = [f"{said['configs']} pairs of layouts, every bit of every rank; traits: "]
    lines += [f"  {count:4d} {trait}" for trait, count in said["traits"].items()]
    lines += ["", "turns on four gloo ranks (worst rank; seconds are medians)"]
    for t in raw["turns"]:
        lines.append(
            f"  {t['name']}: {t['redundant']} bytes redundant, peak {t['peak_over_identity']:.4f} of "
            f"{t['identity_mb']:.1f} MiB;\n    to generation {t['there_s']:.3f} s (swap waited for "
            f"{t['swap_exposed_s']:.3f}, fill {t['fill_s']:.3f}), back {t['back_s']:.3f} s"
        )
    lines += [
        "", f"swap out and in {swapped['gb_per_s']:.2f} GB/s, memcpy {swapped['memcpy_gb_per_s']:.2f} GB/s",
        f"relay: {relayed['mb']:.0f} MB over {relayed['slow_mb_per_s']:.0f} MB/s (a tenth of the link's speed here) "
        f"in {relayed['pull_s']:.2f} s; rollout idle {relayed['idle_s']:.3f} s, bare load {relayed['load_s']:.3f} s",
        "", "DeepSeek-R1-671B, 384 ranks; bytes per link in GB, links modelled:",
    ]  # fmt: skip
    for p in raw["plans"]:
        links = ", ".join(f"{link} {nbytes / 1e9:.0f}" for link, nbytes in p["links"].items())
        lines.append(
            f"  {p['name']}: planned in {p['seconds']:.1f} s ({p['moves']} moves, {p['buckets']} buckets), modelled "
            f"{p['modelled_s']:.2f} s, busiest rank {p['busiest_gb']:.1f} GB; {links}; {p['over']:.3f} of the lower "
            f"bound; plain allgather {p['naive_over_ours']:.1f} times as much"
        )
    lines += [f"  assumed: {text}" for text in reshard_671b.ASSUMPTIONS]
    lines += ["", *(f"{key:34s} {value:>10g}  {reached(key, value)}".rstrip() for key, value in found.items())]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure resharding; the last line printed is one JSON object.")
    parser.add_argument("--quick", action="store_true", help="fewer pairs and smaller tensors, under a minute")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "benchmarks" / "reshard.json", help="all that was measured"
    )
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ranks are ended on the way out
    size, began = (QUICK if arguments.quick else FULL), time.monotonic()
    raw: dict[str, Any] = {"quick": arguments.quick, "cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    for name, measure in SECTIONS.items():
        print(f"[{time.monotonic() - began:4.0f} s] {name}", file=sys.stderr, flush=True)
        raw[name] = measure(size)
    raw |= {"seconds": round(time.monotonic() - began, 1), "load_after": os.getloadavg()[0]}
    found = figures(raw)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"figures": found, **raw}, indent=1), encoding="utf-8")
    print(table(raw, found), flush=True)
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
