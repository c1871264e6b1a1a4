"""A profile file: what `asyncflow profile` measured, the costs fitted to it, where they hold. Pure but for the file.

The costs belong to the profiled sizes and are carried to others as the analytic costs change (`analytic.calibrated`).
Two sets are kept: each block with nothing beside it (`alone`), and with the other side busy (`beside`): on a machine
whose sides share cores or memory bandwidth they differ, and a schedule that overlaps them pays for that.
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
from mindspeed_asyncflow.planner.fit import Point
from mindspeed_asyncflow.planner.work import Work

FORMAT = 1


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
        """The measured costs carried to `config`, slower where its schedule keeps both sides busy at a time."""
        there = analytic_costs(Config.model_validate(self.config), work)
        carried = calibrated(analytic_costs(config, work), self.alone, there)
        overlaps = config.workflow.overlap and config.workflow.schedule == "separated"
        return carried.scaled(**self.slower) if overlaps else carried
