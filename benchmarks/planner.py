"""Is the plan right? Pruning against exhaustive search, plans against an even split, predictions against real runs.

    python benchmarks/planner.py [--quick] [--out FOLDER]

Run it with the Python of .venv, on a machine that does nothing else. The last line printed is one JSON object.
README.md says what the keys mean. Everything but `predicted_over_measured_cpu` is simulated, not run on NPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also where the package is not installed

from our_side import PASSIVE, ROOT, empty_folder, run_command, run_ours

from mindspeed_asyncflow.cli.plan import make_plan, model_work, with_lengths
from mindspeed_asyncflow.config import Config, load_config, parse_config
from mindspeed_asyncflow.data.builtin_models import ensure_model
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.planner.analytic import analytic_costs
from mindspeed_asyncflow.planner.candidates import changed
from mindspeed_asyncflow.planner.costs import Costs
from mindspeed_asyncflow.planner.profile import Profile
from mindspeed_asyncflow.planner.search import Plan, search
from mindspeed_asyncflow.planner.work import Work
from mindspeed_asyncflow.simulation.result import SimulationResult
from mindspeed_asyncflow.simulation.run import simulate

SMALL = {
    "model_type": "qwen2", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
TIMEOUT_S = 240.0
EDGE = 2  # steps left out at both ends of a real run: first calls, and a pipeline that runs empty

# Real runs, none of which was used in the calibration (`asyncflow profile` runs no step of any of them): settings over
# the configuration that was profiled, and steps.
RUNS: dict[str, list[tuple[str, list[str], int]]] = {
    "configs/qwen_tiny_cpu.yaml": [
        ("tiny lag 1", ["workflow.max_lag=1"], 30),
        ("tiny streamed", ["workflow.max_lag=0"], 20),
        ("tiny one at a time", ["workflow.max_lag=0", "workflow.overlap=false"], 20),
        ("tiny 16 x 16, lag 2", ["workflow.groups_per_step=16", "algorithm.group_size=16", "workflow.max_lag=2"], 30),
        ("tiny 64 x 4, lag 1", ["workflow.groups_per_step=64", "algorithm.group_size=4"], 30),
    ],
    "configs/benchmark/long_tail.yaml": [
        ("tail lag 1", ["workflow.max_lag=1"], 10),
        ("tail streamed", ["workflow.max_lag=0"], 10),
        ("tail one at a time", ["workflow.max_lag=0", "workflow.overlap=false"], 10),
    ],
}
QUICK = {"configs/qwen_tiny_cpu.yaml": RUNS["configs/qwen_tiny_cpu.yaml"][:3]}
CLUSTER = """
model: {{source: configs/models/{model}, dtype: bfloat16}}
data: {{max_prompt_tokens: 1024}}
rollout: {{max_new_tokens: 4096}}
algorithm: {{group_size: 16}}
workflow: {{groups_per_step: {groups}, max_lag: 1}}
workload: {{prompt_mean: 150, prompt_p95: 400, answer_mean: {answer}, answer_p95: {p95}}}
cluster: {{devices: {devices}}}
"""
CASES = [  # model, devices, groups of a step, mean and 95 % quantile of answers
    ("qwen2.5-7b", 32, 64, 1500, 4000),
    ("qwen2.5-7b", 128, 128, 400, 900),
    ("qwen2.5-32b", 128, 128, 1500, 4000),
    ("qwen2.5-32b", 256, 256, 800, 2000),
]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- pruning against an exhaustive search ----------------------------------------------------------------------------


def small_grid(seed: int) -> Config:
    """A cluster of a few devices with random speeds, memory, lengths, lag and batch."""
    draw = random.Random(seed).choice
    lag, mean = draw([0, 1, 2]), draw([64, 256, 1024])
    return parse_config(
        f"""
model: {{dtype: bfloat16}}
data: {{max_prompt_tokens: 128}}
rollout: {{max_new_tokens: {mean * 4}}}
algorithm: {{group_size: {draw([8, 16])}}}
workflow: {{groups_per_step: {draw([8, 16])}, max_lag: {lag}, update: {draw(["delayed", "in_flight"])}}}
workload: {{answer_mean: {mean}, answer_p95: {mean * draw([1.5, 2.5, 3.5])}, prompt_mean: 60, prompt_p95: 100}}
cluster: {{devices: {draw([2, 3, 4])}, devices_per_node: {draw([2, 4])}, memory_gb: {draw([4, 6, 8])},
  tflops: {draw([5, 40, 300])}, memory_gbs: {draw([100, 1000])}, network_gbs: {draw([1, 10])}}}
simulation: {{steps: {6 + 2 * lag}, seed: {seed}}}
"""
    )


def optimum_kept(grids: int) -> dict[str, float]:
    """Share of grids whose simulated optimum the pruned search finds, and the share of candidates that it simulates."""
    work = Work.of(SMALL)
    kept = done = simulated = candidates = 0
    seed = 0
    while done < grids:
        config, known = small_grid(seed), {}
        seed += 1

        def once(candidate: Config, costs: Costs, known: dict = known) -> SimulationResult:
            key = candidate.model_dump_json()
            if key not in known:
                known[key] = simulate(candidate, costs)
            return known[key]

        def planned(prune: bool, config: Config = config, once: Any = once) -> Plan:
            devices = config.cluster.devices
            return search(config, work, lambda c: analytic_costs(c, work), once, devices=devices, prune=prune)

        try:
            whole, pruned = planned(False), planned(True)
        except ConfigError:  # nothing fits: no grid
            continue
        done += 1
        kept += fastest(whole) == fastest(pruned)
        simulated, candidates = simulated + pruned.simulated, candidates + whole.simulated
    say(f"optimum kept on {kept} of {done} grids; {simulated} of {candidates} candidates simulated")
    return {"optimum_kept": kept / done, "grids": done, "simulated_share": round(simulated / candidates, 3)}


def fastest(plan: Plan) -> float:
    return min(ranked.step_s for ranked in (plan.best, *plan.others))


# ---- plans for clusters ----------------------------------------------------------------------------------------------


def over_even_split(cases: list[tuple]) -> dict[str, Any]:
    """Simulated tokens/s of the plan over those of an even split: half of the devices for each side. Two of them: with
    the sizes that one takes without a planner (`plain`), and with the best sizes that there are for this split."""
    plain, best = {}, {}
    for model, devices, groups, answer, p95 in cases:
        config = parse_config(CLUSTER.format(model=model, devices=devices, groups=groups, answer=answer, p95=p95))
        work = model_work(config)
        plan, _ = make_plan(config, work)
        half = devices // 2
        even, _ = make_plan(config, work, accept=lambda c, half=half: c.trainer.world_size == half)
        usual = plain_half(config, work, half)
        name = f"{model} on {devices}"
        plain[name], best[name] = (round(fastest(other) / fastest(plan), 3) for other in (usual, even))
        say(f"{name}: {plan.best.split}; over {usual.best.split}: {plain[name]}, over {even.best.split}: {best[name]}")
    return {
        "plan_over_even_split": round(statistics.geometric_mean(plain.values()), 3),
        "plan_over_even_split_best_sizes": round(statistics.geometric_mean(best.values()), 3),
        "even_split_cases": plain,
        "even_split_best_sizes_cases": best,
    }


def plain_half(config: Config, work: Work, half: int) -> Plan:
    """Half of the devices for each side, the least tensor parallelism that fits, no pipeline and no context
    parallelism, as many replicas as there is room for."""
    sizes = [(trainer, rollout) for trainer in (1, 2, 4, 8, 16) for rollout in (1, 2, 4, 8, 16)]
    for trainer, rollout in sizes:

        def usual(c: Config, trainer: int = trainer, rollout: int = rollout) -> bool:
            t, r = c.trainer, c.rollout
            alone = t.pipeline_parallel == t.context_parallel == 1 and t.world_size == half
            return alone and (t.tensor_parallel, r.tensor_parallel) == (trainer, rollout)

        try:
            return make_plan(config, work, accept=usual)[0]
        except ConfigError:  # does not fit
            continue
    raise SystemExit(f"no plain even split of {2 * half} devices fits {config.model.source}")


def plan_seconds(model: str = "qwen2.5-32b") -> float:
    """Seconds of a whole plan for 1024 devices."""
    config = parse_config(CLUSTER.format(model=model, devices=1024, groups=512, answer=1500, p95=4000))
    began = time.perf_counter()
    make_plan(config, model_work(config))
    return time.perf_counter() - began


# ---- predictions against real runs -----------------------------------------------------------------------------------


def predicted_over_measured(runs: dict[str, list[tuple[str, list[str], int]]], out: Path) -> dict[str, Any]:
    """Ratio of simulated to measured seconds of a step, by run."""
    ratios: dict[str, float] = {}
    for file, variants in runs.items():
        base = load_config(ROOT / file)
        model = os.path.abspath(ensure_model(base.model, base.data, base.run.seed, lambda text: say(f"  {text}")))
        source = f"model.source={model}"
        kept = out / f"{Path(file).stem}.json"
        command = [sys.executable, "-m", "mindspeed_asyncflow", "profile", file, "--set", source, "--out", str(kept)]
        run_command(command, out / f"{Path(file).stem}.profile.log", PASSIVE, TIMEOUT_S)
        profile = Profile.load(kept)
        say(f"{file}: profiled, slower together {profile.slower}, errors {profile.errors}")
        for name, settings, steps in variants:
            config = load_config(ROOT / file, [*settings, source, f"trainer.steps={steps}", "evaluation.prompts=0"])
            expected = predict(config, profile)
            label = name.replace(" ", "_").replace(",", "")
            overrides = [*settings, source, f"trainer.steps={steps}", "evaluation.prompts=0"]
            run = run_ours(label, ROOT / file, overrides, 0, config.samples_per_step, out, TIMEOUT_S)
            measured = statistics.fmean(run.step_s[EDGE:-EDGE])
            ratios[name] = round(expected.step_s / measured, 3)
            say(
                f"{name}: predicted {expected.step_s:.3f} s, measured {measured:.3f} s, ratio {ratios[name]}; idle "
                f"{expected.idle['trainer']:.2f} / {run.trainer_idle:.2f} trainer, {expected.idle['rollout']:.2f} / "
                f"{run.rollout_idle:.2f} rollout; others used {run.foreign_cpu:.0%}"
            )
    return {
        "predicted_over_measured_cpu": ratios,
        "predicted_over_measured_min": min(ratios.values()),
        "predicted_over_measured_max": max(ratios.values()),
        "predicted_runs": len(ratios),
    }


def predict(config: Config, profile: Profile) -> SimulationResult:
    config = with_lengths(changed(config, "simulation", steps=min(config.trainer.steps, 16), skip_steps=2), profile)
    return simulate(config, profile.costs(config, model_work(config)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer grids, clusters and real runs: about two minutes")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks" / "planner", help="for logs and runs")
    arguments = parser.parse_args()
    out = empty_folder(arguments.out, "planner")
    result: dict[str, Any] = predicted_over_measured(QUICK if arguments.quick else RUNS, out)
    result |= optimum_kept(6 if arguments.quick else 24)
    result |= over_even_split(CASES[:1] if arguments.quick else CASES)
    result["plan_seconds_1024"] = round(plan_seconds(), 1)
    (out / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
