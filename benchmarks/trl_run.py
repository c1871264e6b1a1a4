"""Sets up, asks and reads trl_side.py. Everything that TRL is told comes from our own settings."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from measured import Measured
from our_side import ROOT, foreign_cpu, run_command

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.data.builtin_models import ensure_model
from mindspeed_asyncflow.data.prompts import PromptSet
from mindspeed_asyncflow.data.sources import make_sources
from mindspeed_asyncflow.data.stream import PromptStream
from mindspeed_asyncflow.data.tokenizers import load_tokenizer
from mindspeed_asyncflow.engines.training import learning_rate

PYTHON = ROOT / ".venv-trl" / "bin" / "python"
PROBE_STEPS = 5
PROBE_TIMEOUT_S = 420.0


@dataclass(frozen=True, slots=True)
class Shape:
    """How TRL's one process uses the machine; the fastest of `shapes` is taken."""

    threads: int
    spin: bool  # idle OpenMP threads spin for a while (the library's default) or sleep
    device_batch: int  # samples of one forward pass

    def words(self) -> str:
        waiting = "spinning" if self.spin else "passive"
        return f"{self.threads} thread(s) ({waiting}), {self.device_batch} samples per forward pass, generate()"


def shapes(config: Config, cores: int) -> list[Shape]:
    """The ways worth trying on a machine of `cores`."""
    whole = config.samples_per_step
    found = [Shape(1, False, whole), Shape(cores, False, whole), Shape(cores, True, whole)]
    if config.rollout.max_new_tokens > 64:
        # Steps of most of a minute: only what can win. The activations of a whole batch leave the caches, and these
        # tensors are large enough for all cores.
        found = [Shape(cores, spin, whole // 4) for spin in (True, False)]
    return found


def set_up() -> str:
    """Make .venv-trl if it is not there; returns why that failed, or nothing."""
    done = subprocess.run(["bash", str(ROOT / "benchmarks" / "trl_setup.sh")], stdin=subprocess.DEVNULL)
    return "" if done.returncode == 0 else "TRL could not be installed (benchmarks/trl_setup.sh says why)"


def specification(config: Config, log=print) -> dict[str, Any]:
    """Model folder, prompts in our order, held-out prompts and every setting, as plain values."""
    seed, a, t = config.run.seed, config.algorithm, config.trainer
    same = (
        (a.advantage, "grpo"), (a.loss, "ppo_clip"), (a.aggregation, "token-mean"), (a.kl_coef, 0.0),
        (t.weight_decay, 0.0), (config.model.dtype, "float32"),
    )  # fmt: skip
    if any(mine != theirs for mine, theirs in same):
        raise ValueError("trl_side.py does not know these settings; compare with the defaults of algorithm and trainer")
    model = ensure_model(config.model, config.data, seed, log)
    prompts = PromptSet.build(make_sources(config.data), load_tokenizer(model), config.data, seed)
    stream = PromptStream(prompts, seed, config.data.epochs, config.data.drop_last, config.workflow.groups_per_step)
    heldout = prompts.heldout[: config.evaluation.prompts]
    return {
        "model": model,
        "task": config.data.task,
        "task_options": dict(config.data.options),
        "prompts": [{"prompt": p.text, "truth": p.truth} for batch in islice(stream, t.steps) for _, _, p in batch],
        "heldout": [{"prompt": p.text, "truth": p.truth} for p in heldout],
        "steps": t.steps,
        "seed": seed,
        "prompts_per_step": config.workflow.groups_per_step,
        "group_size": a.group_size,
        "max_new_tokens": config.rollout.max_new_tokens,
        "temperature": config.rollout.temperature,
        "rates": [learning_rate(step, t) for step in range(t.steps)],
        "betas": list(t.betas),
        "grad_clip": t.grad_clip,
        "clip_low": a.clip_low,
        "clip_high": a.clip_high,
    }


def run_trl(label: str, spec: dict[str, Any], shape: Shape, out: Path, timeout_s: float) -> Measured:
    """One run of trl_side.py."""
    stem = f"{label}_{spec['seed']}"
    spec_file, result_file = out / "trl" / f"{stem}_spec.json", out / "trl" / f"{stem}.json"
    spec_file.parent.mkdir(parents=True, exist_ok=True)
    spec = spec | {name: getattr(shape, name) for name in ("threads", "device_batch")}
    spec_file.write_text(json.dumps(spec), encoding="utf-8")
    threads = {"OMP_NUM_THREADS": str(shape.threads)} | ({} if shape.spin else {"OMP_WAIT_POLICY": "passive"})
    foreign = foreign_cpu()
    command = [str(PYTHON), str(ROOT / "benchmarks" / "trl_side.py"), str(spec_file), str(result_file)]
    wall_s = run_command(command, out / f"{stem}.log", threads, timeout_s)
    result = json.loads(result_file.read_text(encoding="utf-8"))
    generation = statistics.fmean(result["generate_s"])
    return Measured(
        label=label,
        seed=spec["seed"],
        samples_per_step=spec["prompts_per_step"] * spec["group_size"],
        step_s=result["step_s"],
        rewards=result["rewards"],
        heldout_greedy=result["heldout_greedy"],
        wall_s=wall_s,
        foreign_cpu=foreign,
        parts_s={"generation": generation, "everything else": statistics.fmean(result["step_s"]) - generation},
        settings=shape.words(),
    )


def fastest_shape(label: str, spec: dict[str, Any], candidates: list[Shape], out: Path) -> Shape:
    """A few steps with each; the one with the highest rate. One that fails or takes too long is out."""
    rows = PROBE_STEPS * spec["prompts_per_step"]
    short = spec | {"steps": PROBE_STEPS, "prompts": spec["prompts"][:rows], "heldout": []}
    rates: dict[Shape, float] = {}
    for number, shape in enumerate(candidates):
        try:
            rates[shape] = run_trl(f"{label}_probe{number}", short, shape, out, PROBE_TIMEOUT_S).samples_per_s
        except RuntimeError as error:
            print(f"  TRL probe: {shape.words()}: {str(error).splitlines()[0][-60:]}", file=sys.stderr, flush=True)
            continue
        print(f"  TRL probe: {shape.words()}: {rates[shape]:.0f} samples/s", file=sys.stderr, flush=True)
    if not rates:
        raise RuntimeError(f"TRL did not run in any of {len(candidates)} ways; see the logs in {out}")
    return max(rates, key=lambda shape: rates[shape])
