"""Both learning curves in one picture: reward over seconds and over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from measured import Measured

COLOURS = {"asyncflow": "#1f6fb4", "trl": "#d95f02"}


def draw_curves(rows: Mapping[str, Mapping[str, Sequence[Measured]]], file: Path) -> None:
    """`rows`: title of a task -> side -> its runs, one line each. Writes a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(rows), 2, figsize=(10, 3.6 * len(rows)), squeeze=False)
    for (over_time, over_steps), (title, sides) in zip(axes, rows.items()):
        for side, runs in sides.items():
            for number, run in enumerate(runs):
                look = {"color": COLOURS[side], "alpha": 0.8, "linewidth": 1.2}
                label = f"{side}, {run.samples_per_s:.0f} samples/s" if number == 0 else None
                seconds, rewards = run.curve()
                over_time.plot(seconds, rewards, label=label, **look)
                over_steps.plot(range(1, len(rewards) + 1), rewards, **look)
        over_time.set(title=title, xlabel="seconds of training", ylabel="mean sampled reward")
        over_steps.set(title="the same over optimizer steps", xlabel="step")
        over_time.legend(loc="lower right", fontsize=8)
        for axis in (over_time, over_steps):
            axis.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
