"""Arguments that name a configuration, shared by the subcommands that take one."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from mindspeed_asyncflow.config import Config, load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file with the settings; examples are in configs/")
    parser.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="put one setting over the file's, value in YAML; may be given several times, the last wins",
    )


def at_least(least: int) -> Callable[[str], int]:
    """What reads an option that counts: a mistake is told under the option's own name."""

    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, {least} or more")
        return int(text)

    return read


def load(arguments: argparse.Namespace) -> Config:
    return load_config(arguments.config, arguments.overrides)
