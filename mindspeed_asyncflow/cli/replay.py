"""`asyncflow replay`: a recorded run once more, without rollout, compared bit for bit."""

from __future__ import annotations

import argparse
from pathlib import Path

NAME = "replay"
HELP = "train the record of a run again and compare every version bit for bit"
EXAMPLES = """  asyncflow replay runs/latest
  asyncflow replay runs/latest --steps 5 --out results/again"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="a run folder, such as runs/latest")
    parser.add_argument("--steps", metavar="N", type=_count, help="only the first N steps (default: all recorded ones)")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="a new folder for log and result (default: a dated one in RUN/replays)"
    )


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def run(arguments: argparse.Namespace) -> int:
    from mindspeed_asyncflow.service.replaying import replay

    return replay(arguments.run_folder, arguments.steps, arguments.out)
