"""What faults cost: kills and freezes, resumes bit for bit, tokens in flight, the pause of a checkpoint, the ledger.

The last line printed is one JSON object; README.md says what its keys mean.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")  # before torch is loaded

import resilience_parts as parts
from our_side import ROOT, empty_folder

ON_POLICY = {"workflow.max_lag": 0, "evaluation.prompts": 0}
REFERENCE = ON_POLICY | {"rollout.engine": "reference", "rollout.replicas": 2}
VLLM_TP2 = ON_POLICY | {"rollout.engine": "vllm", "trainer.tensor_parallel": 2}
STREAM_S = 2.0  # the default of faults.stream_out_s
RUN_S = 1800.0  # longest time of one run


def cuts(count: int, steps: int, seed: int) -> list[int]:
    """Steps after which a run is cut, at random; each once before any comes again."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        found += rng.sample(range(1, steps), min(count - len(found), steps - 1))
    return sorted(found)


def resumes(out: Path, plans: list[tuple[str, dict[str, Any], int]], steps: int, seed: int) -> dict[str, Any]:
    """Plans are name, settings and number of cuts; `share` of them, after which all is bit for bit the same."""
    same, told = [], {}
    for name, settings, count in plans:
        if not count:
            continue
        base = parts.uninterrupted(out, name, settings, steps, RUN_S)
        for cut in cuts(count, steps, seed):
            found = parts.resumed(out, base, cut, settings, steps, RUN_S)
            told[f"{name} from {cut}"] = found
            same.append(all(found.values()))
            print(f"{name} from step {cut}: {found}", flush=True)
    return {"share": sum(same) / len(same), "cuts": len(same), "detail": told}


def figures(
    chaos: dict[str, Any], resumed: dict[str, Any], kept: list[tuple[int, int]], pause: float, ledger: float
) -> dict[str, Any]:
    """The last line."""
    zero = ("lost", "trained_twice", "law_violations", "leftover_processes")
    return {
        "kills": chaos["kills"],
        **{name: chaos[name] for name in zero},
        "not_finished": chaos["not_finished"],
        "recovery_s_median": {name: found["recovery_s_median"] for name, found in chaos["components"].items()},
        "resume_bit_exact": resumed["share"],
        "resume_cuts": resumed["cuts"],
        "in_flight_tokens_kept": round(parts.shares(kept), 4),
        "checkpoint_pause_over_copy": round(pause, 3),
        "ledger_cost_share": round(ledger, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few kills and cuts, without vLLM")
    parser.add_argument("--kills", type=int, help="default: 20, quick 3")
    parser.add_argument("--cuts", type=int, help="cut points with the reference engine (default: 16, quick 2)")
    parser.add_argument("--vllm-cuts", type=int, help="cut points with vLLM and TP 2 (default: 4, quick 0)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks" / "resilience")
    arguments = parser.parse_args()
    quick, seed = arguments.quick, arguments.seed

    def count(given: int | None, usual: int, few: int) -> int:
        return given if given is not None else few if quick else usual

    out = empty_folder(arguments.out.resolve(), "resilience")
    os.chdir(ROOT)
    steps = 4 if quick else 24  # so that no cut comes twice
    plans = [
        ("reference", REFERENCE, count(arguments.cuts, 16, 2)),
        ("vllm_tp2", VLLM_TP2, count(arguments.vllm_cuts, 4, 0)),
    ]
    resumed = resumes(out, plans, steps, seed)
    ledger = parts.ledger_share(out / "reference")
    print(f"the ledger takes {ledger:.2%} of a step", flush=True)
    pause = parts.pause_over_copy(out, 3 if quick else 9)
    print(f"a checkpoint's pause is {pause:.2f} x a copy", flush=True)
    kept = parts.tokens_kept(2 if quick else 10, seed, 0.5 if quick else STREAM_S)
    print(f"(sampled, kept) tokens of killed replicas: {kept}", flush=True)
    faults = {"faults.heartbeat_s": 8, "rollout.replicas": 2, "rollout.engine": "reference", "evaluation.prompts": 0}
    chaos = parts.chaos(out, count(arguments.kills, 20, 3), seed, faults | {"trainer.steps": 20}, 4 * RUN_S)
    found = figures(chaos, resumed, kept, pause, ledger)
    detail = {"chaos": chaos, "resumed": resumed["detail"], "kept": kept}
    (out / "result.json").write_text(json.dumps({"figures": found, **detail}, indent=1), encoding="utf-8")
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
