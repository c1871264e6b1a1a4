"""A profile file: what `asyncflow profile` measured, the costs fitted to it, where they hold. Pure but for the file.

The costs belong to the profiled sizes and are carried to others as the analytic costs change (`analytic.calibrated`).
They are those of each block with nothing beside it (`alone`); `slower` says what it costs that the other side is busy:
on a machine whose sides share cores or memory bandwidth, a schedule that overlaps them pays for that.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.planner.analytic import analytic_costs, calibrated
from mindspeed_asyncflow.planner.costs import Costs
from mindspeed_asyncflow.planner.estimate import estimate
from mindspeed_asyncflow.planner.fit import Point
from mindspeed_asyncflow.planner.work import Work
from mindspeed_asyncflow.planner.workload import Workload

FORMAT = 1
ROUNDS = 3


@dataclass(frozen=True)
class Profile:
    """`slower` is the factor on a side's times while the other side is busy, 1 on machines that do not share."""

    config: dict[str, Any]  # of the profiled run, as plain values
    alone: Costs
    slower: dict[str, float]  # "rollout", "train"
    errors: dict[str, float]  # block -> relative error of the fit
    points: list[Point]
    prompt_bins: list[tuple[int, float]] = field(default_factory=list)  # lengths that were seen
    answer_bins: list[tuple[int, float]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        values = asdict(self) | {"format": FORMAT, "alone": self.alone.to_dict()}
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Raises `ConfigError` for a file that is none of ours."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"{path}: no such profile; `asyncflow profile CONFIG --out {path}` measures one"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read as a profile: {error}") from None
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise ConfigError(f"{path}: no profile of format {FORMAT}; measure it again")
        try:
            values["alone"] = Costs.of(values["alone"])
            values["points"] = [Point(**point) for point in values["points"]]
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{path}: incomplete profile ({error}); measure it again") from None

    def costs(self, config: Config, work: Work) -> Costs:
        """The measured costs carried to `config`, slower as far as its schedule keeps the other side busy."""
        there = analytic_costs(Config.model_validate(self.config), work)
        alone = calibrated(analytic_costs(config, work), self.alone, there)
        if not config.workflow.overlap or config.workflow.schedule == "colocated":
            return alone
        costs, workload = alone, Workload.of(config)
        for _ in range(ROUNDS):  # how busy a side is depends on how slow the other one makes it
            found = estimate(config, costs, workload)
            together = found.together_s(config.workflow.max_lag)
            rollout = 1 + (self.slower["rollout"] - 1) * min(1.0, together / found.generate_s)
            train = 1 + (self.slower["train"] - 1) * min(1.0, together / found.train_s)
            costs = alone.scaled(rollout, train)
        return costs
