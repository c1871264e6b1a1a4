"""Arguments that name a configuration, shared by the subcommands that take one."""

from __future__ import annotations

import argparse

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


def load(arguments: argparse.Namespace) -> Config:
    return load_config(arguments.config, arguments.overrides)
