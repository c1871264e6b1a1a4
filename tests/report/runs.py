"""Run folders made by the writers of real runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.config.load import dump_resolved
from mindspeed_asyncflow.observe import trace
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.observe.summary import write_summary
from mindspeed_asyncflow.observe.writers import EvaluationsWriter, MetricsWriter, SamplesWriter, SampleText

STEPS = 12
SUMMARY = {
    "reward_first": 0.2,
    "reward_last": 0.9,
    "heldout_greedy": 0.97,
    "steps": STEPS,
    "wall_s": 12.5,
    "max_lag": 1,
    "samples_issued": 96,
    "samples_trained": 96,
    "samples_dropped": 0,
    "samples_open": 0,
    "rollout_train_logprob_gap_max": 1e-6,
    "lag_histogram": {"0": 8, "1": 88},
}


def make_run(base: Path, name: str = "t", overrides: tuple[str, ...] = (), gain: float = 1.0) -> RunFolder:
    """A run of `STEPS` steps whose processes worked in turns on a clock that begins when the run is made."""
    run = RunFolder.create(base, name, dump_resolved(parse_config("{}", overrides)))
    writer, samples = MetricsWriter(run), SamplesWriter(run)
    now = [0]
    tracers = [trace.Tracer(run.trace, who, clock_ns=lambda: now[0]) for who in ("rollout0", "trainer0")]
    for step in range(STEPS):
        for tracer in tracers:
            with tracer.span(f"{tracer.process[:-1]}/step", lane=tracer.process, step=step):
                now[0] += 500_000_000
        values = {"reward/mean": gain * step / STEPS, "idle/trainer": 0.1, "staleness/worst_max": 1}
        writer.write(step, values | {"actor/grad_norm": float("nan") if step == 5 else 0.5})
        samples.write(step, SampleText(step, f"prompt {step}", f"answer of step {step} </pre><b>x", 1.0, "t\nu", 0))
    writer.close()
    for tracer in tracers:
        tracer.close()
    run.events.mkdir()
    for step in range(STEPS):
        np.savez(run.events / f"step_{step:06d}_replica_0.npz", **{"length.response_ids": np.arange(step, step + 8)})
    evaluations = EvaluationsWriter(run)
    for version, mean in ((0, 0.3), (6, None), (STEPS, 0.97)):  # no answer of the second one had a score
        sample = {"source": "s", "prompt": "held-out prompt", "truth": "9", "answers": ["nine"], "scores": [mean]}
        record = {"version": version, "temperature": 0.0, "k": 1, "mean_at_k": mean, "samples": [sample]}
        evaluations.write(record)
    run.log.write_text(
        "2026-01-02 03:04:05.678 rollout0[12] WARNING asyncflow.x: waited 3 s <long>\n"
        "2026-01-02 03:04:06.678 rollout0[12] INFO asyncflow.x: all is well\n"
        "2026-01-02 03:04:07.678 rollout0[12] WARNING asyncflow.x: waited 4.5 s <long>\n"
    )
    write_summary(run, SUMMARY)
    return run
