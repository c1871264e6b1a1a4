"""`asyncflow replay`: a recorded run once more, without rollout, compared bit for bit."""

from __future__ import annotations

import argparse
from pathlib import Path

from mindspeed_asyncflow.cli import settings
from mindspeed_asyncflow.errors import ConfigError, RecordError
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.workflow.record import open_run

NAME = "replay"
HELP = "train the record of a run again and compare every version bit for bit"
FAILED = "a version differs, or the run failed"  # what status 1 says
EXAMPLES = """  asyncflow replay runs/latest
  asyncflow replay runs/latest --steps 5 --out results/again"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="a run folder, such as runs/latest")
    parser.add_argument(
        "--steps", metavar="N", type=settings.at_least(1), help="only the first N steps (default: all recorded ones)"
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="a new folder for log and result (default: a dated one in RUN/replays)"
    )


def run(arguments: argparse.Namespace) -> int:
    config, record, there = open_run(RunFolder(arguments.run_folder).of_run().path)
    steps = arguments.steps or there
    if record.damage and (arguments.steps is None or not there):
        before = f"; --steps {there} repeats what is before that" if there else ""
        raise RecordError(f"the record of {arguments.run_folder} is not whole: {record.damage}{before}")
    if steps > there:
        raise ConfigError(f"--steps {steps}: {arguments.run_folder} has {there} recorded steps (observe.events_mb)")
    # Only now: Ray and what it loads take seconds, and a mistake is answered at once.
    from mindspeed_asyncflow.service.replaying import replay

    return replay(arguments.run_folder, config, record, steps, arguments.out)
