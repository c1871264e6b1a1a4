"""`asyncflow report`: the page about a run that ended, broke off or goes on, made from its folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from mindspeed_asyncflow.errors import ConfigError

NAME = "report"
HELP = "write report.html, one page that opens offline, into a run folder and print its path"
EXAMPLES = (
    "  asyncflow report runs/latest\n"
    "  asyncflow report runs/a --compare runs/b --out a_and_b.html\n"
    "  asyncflow report runs/seed0 --compare runs/seed1 runs/seed2"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="a run folder, such as runs/latest")
    parser.add_argument(
        "--compare",
        nargs="+",
        default=[],
        type=Path,
        metavar="RUN",
        help="further runs for the same pictures and tables",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the page is written (default: RUN/report.html)")


def run(arguments: argparse.Namespace) -> int:
    from mindspeed_asyncflow.observe.report import write_report
    from mindspeed_asyncflow.observe.run_folder import RunFolder

    folders: list[Path] = [arguments.run_folder, *arguments.compare]
    for folder in folders:
        RunFolder(folder).of_run()
    try:
        print(write_report(folders[0], folders[1:], arguments.out))
    except OSError as error:
        raise ConfigError(f"cannot write the report: {error}; name another file with --out") from error
    return 0
