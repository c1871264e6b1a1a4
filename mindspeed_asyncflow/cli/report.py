"""`asyncflow report`: the page about a finished or interrupted run, made again from its folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from mindspeed_asyncflow.errors import ConfigError

NAME = "report"
HELP = "write report.html into a run folder and print its path"
EXAMPLES = "  asyncflow report runs/latest"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="a run folder, such as runs/latest")


def run(arguments: argparse.Namespace) -> int:
    from mindspeed_asyncflow.observe.report import write_report

    folder: Path = arguments.run_folder
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder} is no run folder: it has no config.yaml")
    print(write_report(folder))
    return 0
