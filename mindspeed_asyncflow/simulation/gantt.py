"""A picture of who did what when, from the trace of a simulated run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.observe.trace import read_events

# Name of a span -> (words, colour). Other spans are not drawn.
KINDS = {
    "rollout/generate": ("generate", "#4878a8"),
    "rollout/load_weights": ("load weights", "#d1495b"),
    "rollout/fetch_weights": ("fetch weights", "#e8b4bc"),
    "reward/score": ("score", "#7d5ba6"),
    "reference/logprobs": ("reference", "#66a182"),
    "train/forward_backward": ("train", "#edae49"),
    "train/optimizer": ("optimizer", "#a0522d"),
    "train/wait_published": ("wait for publish", "#bbbbbb"),
    "train/give": ("give devices", "#999999"),
    "train/take_back": ("take devices back", "#666666"),
}
ORDER = ("rollout", "reference", "scorer", "trainer")
MOST_LANES = {"rollout": 32, "rollout fetches": 2}  # of one kind; others 8


def draw(trace: Path, picture: Path, title: str) -> bool:
    """Write `picture` (PNG) from the events under `trace`. False, and no picture, where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    events = [e for e in read_events(trace) if e["kind"] == "X" and e["name"] in KINDS]
    lanes = shown([e["lane"] for e in events])
    figure, axes = pyplot.subplots(figsize=(14, 1.5 + 0.16 * len(lanes)))
    used = set()
    for row, lane in enumerate(reversed(lanes)):
        for name, (_, color) in KINDS.items():
            bars = [(e["start_us"] / 1e6, e["dur_us"] / 1e6) for e in events if e["lane"] == lane and e["name"] == name]
            if bars:
                used.add(name)
                # An edge of the same colour shows what is shorter than a pixel; a white one tells calls apart.
                edge = "white" if name == "rollout/generate" else color
                axes.broken_barh(bars, (row + 0.1, 0.8), facecolors=color, edgecolors=edge, linewidth=0.6)
    ends = [(e["start_us"] + e["dur_us"]) / 1e6 for e in events if e["name"] == "train/optimizer"]
    for step, at in enumerate(ends):
        axes.axvline(at, color="black", linewidth=0.6, linestyle=":")
        axes.text(at, len(lanes), f"step {step}", fontsize=6, ha="right", va="bottom")
    axes.set_ylim(0, len(lanes))
    axes.set_yticks([row + 0.5 for row in range(len(lanes))], reversed(lanes), fontsize=6)
    axes.set_xlabel("virtual seconds")
    axes.set_title(title, pad=14)
    axes.legend(
        handles=[Patch(color=KINDS[n][1], label=KINDS[n][0]) for n in KINDS if n in used],
        loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7,
    )  # fmt: skip
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)
    return True


def shown(lanes: Sequence[str]) -> list[str]:
    """The lanes to draw, rollout first; of many of one kind some, at equal distances."""
    kinds: dict[str, list[str]] = {}
    for lane in sorted(set(lanes), key=_place):
        kinds.setdefault(re.sub(r"\d+", "", lane), []).append(lane)
    found = []
    for kind, members in kinds.items():
        most = MOST_LANES.get(kind, 8)
        step = max(1.0, len(members) / most)
        found += [members[int(i * step)] for i in range(min(most, len(members)))]
    return found


def _place(lane: str) -> tuple[Any, ...]:
    kind = next((i for i, name in enumerate(ORDER) if lane.startswith(name)), len(ORDER))
    number = re.search(r"\d+", lane)
    return kind, int(number.group()) if number else 0, lane
