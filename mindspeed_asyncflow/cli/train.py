"""`asyncflow train`: check everything that can be checked, then run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mindspeed_asyncflow.cli import preflight, settings
from mindspeed_asyncflow.config import checks

NAME = "train"
HELP = "check a configuration, then train with it"
FAILED = "the run failed"  # what status 1 says
EXAMPLES = """  asyncflow train configs/qwen_tiny_cpu.yaml
  asyncflow train configs/qwen_tiny_cpu.yaml --set trainer.steps=5 --set workflow.max_lag=0
  asyncflow train my.yaml --run-folder results/first
  asyncflow train my.yaml --run-folder results/first    # again: goes on where it ended, or says that it is complete
  asyncflow train my.yaml --resume results/first/checkpoints/step_000010"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    settings.add_arguments(parser)
    parser.add_argument(
        "--run-folder",
        metavar="DIR",
        type=Path,
        help="a folder for the results, or that of an earlier run, which goes on (default: a dated one in run.folder, "
        "with `latest` pointing to it)",
    )
    parser.add_argument(
        "--resume",
        metavar="auto|never|CHECKPOINT",
        default="auto",
        help="auto: go on from the newest complete checkpoint in --run-folder; never: refuse a folder that holds a "
        "run; else the folder of a checkpoint to go on from",
    )


def run(arguments: argparse.Namespace) -> int:
    config = settings.load(arguments)
    warnings = [f"asyncflow: {warning}" for warning in checks.refuse_errors(preflight.inspect(config))]
    for warning in warnings:
        print(warning, file=sys.stderr)
    # Only now: Ray and what it loads take seconds, and a mistake is answered at once.
    from mindspeed_asyncflow.service import launch

    return launch.train(config, arguments.run_folder, warnings, arguments.resume)
