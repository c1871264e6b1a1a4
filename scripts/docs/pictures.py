"""Draws docs/pictures/: who does what when under each schedule, from simulated runs of the real loops.

    .venv/bin/python scripts/docs/pictures.py

All pictures have the same work and the same scale. One file serves light and dark pages, which each viewer chooses.
"""

import asyncio
import tempfile
from html import escape
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.observe import trace
from mindspeed_asyncflow.planner.costs import Costs
from mindspeed_asyncflow.simulation.run import simulate

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
WORK = """
algorithm: {group_size: 2}
rollout: {replicas: 2, max_new_tokens: 100}
data: {max_prompt_tokens: 28}
workload: {prompt_bins: [[28, 1]], answer_bins: [[30, 2], [60, 1], [100, 1]]}
trainer: {micro_batch_tokens: 100000}
workflow: {groups_per_step: 8, keep_versions: 4}
simulation: {steps: 4, skip_steps: 1}
"""
ROWS = 16  # answers of a step
COSTS = Costs(
    prefill_token_s=0.0, decode_weights_s=0.01, decode_context_s=0.0, train_token_s=0.9 / (ROWS * 83),
    optimizer_s=0.06, publish_s=0.06, load_s=0.06, give_s=0.06, take_s=0.06,
)  # fmt: skip
PICTURES = {
    "one-at-a-time": ("One task at a time", "max_lag=0 overlap=false"),
    "colocated": ("Colocated: both sides take turns on the same devices", "schedule=colocated max_lag=0"),
    "streamed": ("Streamed: on-policy, training begins with the first answers", "max_lag=0"),
    "lag-1": ("Asynchronous, max_lag 1", "max_lag=1"),
    "lag-2-ready": ("Asynchronous, max_lag 2, a step takes what is ready", "max_lag=2 take=ready"),
    "in-flight": (
        "In flight, max_lag 1: running answers go on with new weights",
        "max_lag=1 update=in_flight lanes=2",
    ),
}
COLORS = ("#3b6fb6", "#a8560f", "#2f7d4f", "#7a4fa3", "#b23a48")  # of versions 0, 1, ...
LEFT, SECOND, LANE, TOP, BOTTOM = 78, 84, 30, 34, 30  # pixels
SECONDS = 8.0
STYLE = """
.back{fill:#fff}.text{fill:#222}.faint{fill:#666}.grid{stroke:#ddd}.load{fill:#222}
@media(prefers-color-scheme:dark){.back{fill:#1b1e24}.text{fill:#e6e6e6}.faint{fill:#a0a0a0}.grid{stroke:#3a3f47}.load{fill:#fff}}
text{font:12px system-ui,sans-serif}.in{fill:#fff;font-size:11px}.title{font-weight:600}
"""


def virtual_ns() -> int:
    try:
        return int(asyncio.get_running_loop().time() * 1e9)
    except RuntimeError:  # before and after the run
        return 0


def events_of(workflow: str) -> tuple[list[dict[str, Any]], list[int]]:
    """Spans of a simulated run in virtual microseconds, and the oldest version that each step trained."""
    settings = [f"workflow.{setting}" for setting in workflow.split()]
    if "colocated" in workflow:
        settings.append("trainer.data_parallel=2")  # all devices are both sides'
    with tempfile.TemporaryDirectory() as folder:
        tracer = trace.configure(Path(folder), "simulation", True, clock_ns=virtual_ns, flush_s=600.0)
        oldest = simulate(parse_config(WORK, settings), COSTS).oldest_by_step
        tracer.close()
        return [e for e in trace.read_events(Path(folder)) if e["kind"] == "X"], oldest


def answers(events: list[dict[str, Any]]) -> list[tuple[str, int, int, int]]:
    """(replica, start, end, version) of what is sampled: spans of one batch, cut where new weights are loaded."""
    loads = [e for e in events if e["name"] == "rollout/load_weights" and e["dur_us"]]
    pieces = []
    for span in (e for e in events if e["name"] == "rollout/generate"):
        start, end, version = span["start_us"], span["start_us"] + span["dur_us"], span["args"]["version"]
        for load in (e for e in loads if e["lane"] == span["lane"] and start < e["start_us"] < end):
            pieces.append((span["lane"], start, load["start_us"], version))
            start, version = load["start_us"] + load["dur_us"], load["args"]["version"]
        pieces.append((span["lane"], start, end, version))
    return pieces


def rows_of(pieces: list[tuple[str, int, int, int]]) -> tuple[dict[int, int], dict[str, int]]:
    """Piece -> row of its replica, and rows of each replica: batches that overlap lie below each other."""
    ends: dict[str, list[int]] = {}
    row = {}
    for index, (lane, start, end, _) in sorted(enumerate(pieces), key=lambda item: item[1][1]):
        mine = ends.setdefault(lane, [])
        free = next((i for i, last in enumerate(mine) if last <= start), len(mine))
        mine[free : free + 1] = [end]
        row[index] = free
    return row, {lane: len(mine) for lane, mine in ends.items()}


class Picture:
    """One SVG, put together from top to bottom."""

    def __init__(self, title: str) -> None:
        self.title, self.parts = title, [f'<text x="12" y="21" class="text title">{escape(title)}</text>']
        self.bottom = TOP

    def text(self, x: float, y: float, words: str, kind: str, anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>')

    def bar(self, start: float, end: float, y: float, height: float, look: str, words: str = "") -> None:
        """From `start` to `end` in microseconds; `look`: an attribute; `words` where they have room."""
        x, width = LEFT + start / 1e6 * SECOND, (end - start) / 1e6 * SECOND
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width - 1, 1):.1f}" height="{height:.1f}" rx="2" {look}/>'
        )
        if words and width > 7 * len(words):
            self.text(x + width / 2, y + height / 2 + 4, words, "in", "middle")

    def saved(self, file: Path) -> None:
        width, height = LEFT + SECONDS * SECOND + 12, self.bottom + BOTTOM
        for second in range(int(SECONDS) + 1):
            x = LEFT + second * SECOND
            self.parts.insert(0, f'<path d="M{x:.1f} {TOP}V{self.bottom}" class="grid"/>')
            self.text(x, self.bottom + 16, f"{second} s", "faint", "middle")
        file.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">'
            f"<title>{escape(self.title)}</title><style>{STYLE}</style>"
            f'<rect class="back" width="100%" height="100%" rx="6"/>\n' + "\n".join(self.parts) + "\n</svg>\n",
            encoding="utf-8",
        )


def draw(title: str, workflow: str, file: Path) -> None:
    """Replicas above, the trainer below, the lag of each step under it."""
    events, oldest = events_of(workflow)
    picture, pieces = Picture(title), answers(events)
    row, rows = rows_of(pieces)
    for lane in sorted(rows):
        height = LANE / rows[lane] - 2
        picture.text(12, picture.bottom + LANE / 2 + 4, lane.replace("rollout", "replica "), "text")
        for index, (replica, start, end, version) in enumerate(pieces):
            if replica == lane:
                y = picture.bottom + row[index] * (height + 2)
                picture.bar(start, end, y, height, f'fill="{COLORS[version]}"', f"v{version}" if height > 12 else "")
        for load in (e for e in events if e["lane"] == lane and e["name"] == "rollout/load_weights" and e["dur_us"]):
            picture.bar(load["start_us"], load["start_us"] + load["dur_us"], picture.bottom, LANE - 2, 'class="load"')
        picture.bottom += LANE + 6
    picture.text(12, picture.bottom + LANE / 2 + 4, "trainer", "text")
    for event in (e for e in events if e["name"] in ("train/forward_backward", "train/optimizer")):
        optimizer = event["name"] == "train/optimizer"
        step = event["args"]["version"] - optimizer
        end = event["start_us"] + event["dur_us"]
        look = 'class="load"' if optimizer else f'fill="{COLORS[step]}"'
        picture.bar(event["start_us"], end, picture.bottom, LANE - 2, look, "" if optimizer else f"v{step}")
        if optimizer:
            words = f"lag {step - oldest[step]}"
            picture.text(LEFT + end / 1e6 * SECOND, picture.bottom + LANE + 11, words, "text", "end")
    picture.bottom += LANE + 20
    picture.saved(file)


def main(folder: Path = FOLDER) -> None:
    for name, (title, workflow) in PICTURES.items():
        draw(title, workflow, folder / f"schedule-{name}.svg")


if __name__ == "__main__":
    main()
