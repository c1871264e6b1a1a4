"""The `asyncflow` command: one file per subcommand, one boundary where errors become messages and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from mindspeed_asyncflow import __version__
from mindspeed_asyncflow.cli import (
    audit,
    chaos,
    check,
    completion,
    dock,
    doctor,
    export,
    migrate,
    plan,
    profile,
    replay,
    report,
    serve,
    simulate,
    top,
    train,
    usage,
)
from mindspeed_asyncflow.errors import AsyncFlowError, ConfigError

EXIT_CODES = "exit status: 0 done, 1 {failed}, 2 wrong settings or usage, 130 interrupted"
COMMANDS = (
    train,
    serve,
    check,
    top,
    plan,
    profile,
    simulate,
    report,
    export,
    audit,
    chaos,
    replay,
    dock,
    migrate,
    doctor,
    completion,
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncflow",
        description="Asynchronous streaming RL post-training of language models.",
        epilog="examples:\n  asyncflow train configs/qwen_tiny_cpu.yaml\n"
        "  asyncflow check configs/qwen_tiny_cpu.yaml --set rollout.replicas=2\n\n"
        + EXIT_CODES.format(failed="it failed"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mindspeed_asyncflow {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS:
        sub = commands.add_parser(
            module.NAME,
            help=module.HELP,
            description=module.HELP,
            epilog=f"examples:\n{module.EXAMPLES}\n\n"
            + EXIT_CODES.format(failed=getattr(module, "FAILED", "it failed")),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run, parser=sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status; nothing is raised."""
    if not {"", os.getcwd()} & set(sys.path):  # the installed command: the user's own modules lie where it is run
        sys.path.append(os.getcwd())
    try:
        arguments = _parsed(sys.argv[1:] if argv is None else argv)
    except SystemExit as stop:  # argparse has printed its help or message
        return stop.code if isinstance(stop.code, int) else 2
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        print("asyncflow: interrupted", file=sys.stderr)
        return 130
    except AsyncFlowError as error:
        print(explain(error), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:  # the outermost boundary: a fault of ours or of a library, shown whole
        traceback.print_exc()
        return 1


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Raises `SystemExit` once help or message is printed."""
    parser, commands = build_parser(), [module.NAME for module in COMMANDS]
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        parser.error(usage.unknown_command(argv[0], commands))
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        arguments.parser.error(usage.unknown_words(unknown, arguments.parser))
    return arguments


def explain(error: BaseException) -> str:
    """The root cause first, then what failed because of it, outermost last."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    # What failed may repeat the words of its cause: said twice, they read like two mistakes.
    kept = [e for e, above in zip(chain[1:], chain) if not _repeated(e, str(above))]
    root, *consequences = reversed([error, *kept])
    lines = [f"asyncflow: {_words(root)}", *(f"  therefore: {_words(item)}" for item in consequences)]
    return "\n".join(lines)


def _repeated(cause: BaseException, words: str) -> bool:
    """Of the errors whose own text says all: the type of others, such as KeyError, is part of what they say."""
    return isinstance(cause, (OSError, AsyncFlowError)) and bool(str(cause)) and str(cause) in words


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
