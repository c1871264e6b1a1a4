"""`asyncflow dock`: what the transfer dock of a running job holds, who waits for what, and how fast it moves."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from mindspeed_asyncflow.errors import AsyncFlowError, ConfigError, DockError, WorkerLost

NAME = "dock"
HELP = "show the transfer dock of a running job"
EXAMPLES = (
    "  asyncflow dock runs/latest\n"
    "  asyncflow dock runs/latest --watch 2\n"
    "  asyncflow dock runs/latest --json | python -m json.tool"
)
WAIT_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_folder", metavar="RUN", type=Path, nargs="?", default=Path("runs/latest"),
        help="the folder of a job that is running (default: runs/latest)",
    )  # fmt: skip
    parser.add_argument(
        "--watch", metavar="SECONDS", type=float, default=0.0,
        help="show it again this often, with rates, until the job ends",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the statistics of each pair as one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    from mindspeed_asyncflow.dock.client import DockClient
    from mindspeed_asyncflow.dock.describe import as_text

    if arguments.watch < 0:
        raise ConfigError(f"--watch needs a number of seconds, 0 or more, got {arguments.watch:g}")
    addresses, secret = where(arguments.run_folder)
    shown = False
    try:
        with DockClient(addresses, secret, wait_s=WAIT_S, map_arena=False, restart_s=0.0, home=0) as dock:
            earlier: dict[str, dict] = {}
            looked = time.monotonic()
            while True:
                found = {pair.address: pair.stats() for pair in dock.pairs()}
                now = time.monotonic()
                if arguments.json:
                    print(json.dumps(found, default=str), flush=True)
                else:
                    clear = "\033[H\033[2J" if arguments.watch and sys.stdout.isatty() else ""
                    views = [as_text(a, stats, earlier.get(a), now - looked) for a, stats in found.items()]
                    print(clear + "\n".join(views), flush=True)
                if not arguments.watch:
                    return 0
                shown, earlier, looked = True, found, now
                time.sleep(arguments.watch)
    except WorkerLost as gone:
        if shown:
            print("the job has ended")
            return 0
        raise DockError(f"the dock of {arguments.run_folder} does not answer: has the job ended?") from gone


def where(folder: Path) -> tuple[list[str], bytes]:
    """Addresses and secret that a running job has left in its folder."""
    from mindspeed_asyncflow.observe.run_folder import RunFolder

    place = RunFolder(folder).of_run()
    try:
        told = json.loads(place.dock.read_text(encoding="utf-8"))
        return list(told["addresses"]), bytes.fromhex(told["secret"])
    except FileNotFoundError:
        raise ConfigError(f"no dock is running for {folder}: the job has ended or has not started its dock") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AsyncFlowError(f"{place.dock} cannot be read: {error}") from error
