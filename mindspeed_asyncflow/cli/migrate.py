"""`asyncflow migrate`: settings of verl, MindSpeed-RL or AReaL become ours."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mindspeed_asyncflow.errors import AsyncFlowError, ConfigError
from mindspeed_asyncflow.migration import SYSTEMS, migrate

NAME = "migrate"
HELP = "turn a settings file of verl, MindSpeed-RL or AReaL into ours, and list what has no equivalent"
EXAMPLES = """  asyncflow migrate grpo_qwen25_7b.yaml --out ours.yaml
  asyncflow migrate overrides.yaml --from verl"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="their YAML file; - reads standard input")
    parser.add_argument("--out", metavar="FILE", help="where to write ours, must not exist (default: standard output)")
    parser.add_argument(
        "--from", choices=tuple(SYSTEMS), dest="system", help="whose file it is (default: found from its keys)"
    )


def run(arguments: argparse.Namespace) -> int:
    name = "standard input" if arguments.file == "-" else arguments.file
    try:
        text = sys.stdin.read() if arguments.file == "-" else Path(arguments.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot be read as a UTF-8 text file: {error}") from None
    made = migrate(text, name, arguments.system)
    if arguments.out is None:
        print(made.text, end="")
        return 0
    try:
        with open(arguments.out, "x", encoding="utf-8") as out:
            out.write(made.text)
    except FileExistsError:
        raise ConfigError(f"--out {arguments.out} exists already; remove it or name another file") from None
    except OSError as error:
        raise AsyncFlowError(f"--out {arguments.out} cannot be written: {error}") from None
    print(f"{arguments.out}: {made.settings} settings from {made.system}")
    print("\n".join(made.notes()))
    print(f"next: asyncflow check {arguments.out}")
    return 0
