"""`asyncflow chaos`: a run whose processes are killed and frozen at random, and the proof that nothing was lost."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.cli import preflight, settings
from mindspeed_asyncflow.cli.audit import audit_run, in_words
from mindspeed_asyncflow.config import Config, checks
from mindspeed_asyncflow.errors import AsyncFlowError, ConfigError
from mindspeed_asyncflow.observe.audit import Audit
from mindspeed_asyncflow.observe.run_folder import RunFolder

NAME = "chaos"
HELP = "run a job under random kills and freezes, then prove that nothing was lost"
FAILED = "the run failed, or something was lost"  # what status 1 says
EXAMPLES = (
    "  asyncflow chaos configs/qwen_tiny_cpu.yaml --kills 10 --seed 1\n"
    "  asyncflow chaos my.yaml --kills 4 --only rollout,scorer --set faults.heartbeat_s=5"
)
SAVE_EVERY = 2
FAULTS = ("lost", "trained_twice", "law_violations", "leftover_processes", "leftover_files", "not_finished")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    settings.add_arguments(parser)
    parser.add_argument("--kills", metavar="N", type=int, default=10, help="so many kills and freezes (default: 10)")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="of whom, how and when (default: 0)")
    parser.add_argument(
        "--only", metavar="NAMES", default="", help="components, such as rollout,scorer,driver (default: all)"
    )
    parser.add_argument(
        "--run-folder", metavar="DIR", type=Path, help="a new folder for the run (default: a dated one in run.folder)"
    )
    parser.add_argument(
        "--patience", metavar="SECONDS", type=float, default=600.0, help="longest time without a step (default: 600)"
    )


def run(arguments: argparse.Namespace) -> int:
    config = settings.load(arguments)
    checks.refuse_errors(preflight.inspect(config))
    if arguments.kills < 1 or arguments.patience <= 0:
        raise ConfigError(f"--kills {arguments.kills}, --patience {arguments.patience:g}: both must be above 0")
    folder = _folder(arguments.run_folder, config)
    print(f"run folder: {folder.path}; the output of the run is in {folder.logs / 'chaos.txt'}", flush=True)
    # Only now: what it loads takes a moment, and a mistake is answered at once.
    from mindspeed_asyncflow.service.chaos import Chaos, train_command

    overrides = [*arguments.overrides, *_needed(config, arguments.kills)]
    only = [name for name in arguments.only.split(",") if name]
    chaos = Chaos(
        train_command(arguments.config, folder.path, overrides), folder, config.trainer.steps, arguments.seed,
        only=only, patience_s=arguments.patience, say=lambda words: print(words, flush=True),
    )  # fmt: skip
    failure = ""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the run must not go on alone
    try:
        chaos.run(arguments.kills)
    except AsyncFlowError as error:  # what was lost until then is told all the same
        failure = str(error)
        if not folder.ledger.is_file():
            raise
    audit = audit_run(folder.path)
    result = figures(chaos.blows, audit, chaos.left_processes, chaos.left_files, failure) | {"ends": chaos.ends}
    print(f"\n{in_words(audit)}\n\n{table(result)}")
    for words in (failure, *chaos.left_processes, *chaos.left_files):
        if words:
            print(f"WRONG: {words}")
    print(json.dumps(result), flush=True)
    return 1 if any(result[name] for name in FAULTS) else 0


def _folder(path: Path | None, config: Config) -> RunFolder:
    if path is None:
        return RunFolder.reserve(config.run.folder, f"{config.run.name}-chaos")
    if path.exists() and any(path.iterdir()):
        raise ConfigError(f"--run-folder {path} is not empty; give a new folder for this run")
    folder = RunFolder(path.absolute())
    folder.logs.mkdir(parents=True, exist_ok=True)
    return folder


def _needed(config: Config, kills: int) -> list[str]:
    """Settings without which the run could not go on so often."""
    needed = [f"faults.max_restarts={max(kills, config.faults.max_restarts)}"]
    if not config.trainer.save_every:
        print(f"trainer.save_every is not set, so a resume would begin anew: it is {SAVE_EVERY} here", flush=True)
        needed.append(f"trainer.save_every={SAVE_EVERY}")
    return needed


def figures(
    blows: Sequence[Any], audit: Audit, processes: Sequence[str], files: Sequence[str], failure: str
) -> dict[str, Any]:
    """The numbers of the last line; `components` by name, seconds until it was back."""
    components: dict[str, dict[str, Any]] = {}
    for name in sorted({blow.component for blow in blows}):
        mine = [blow for blow in blows if blow.component == name]
        ends = [blow.end_s for blow in mine if blow.end_s is not None]
        seconds = [blow.seconds for blow in mine if blow.seconds is not None]
        components[name] = {
            "kills": sum(blow.how == "kill" for blow in mine),
            "freezes": sum(blow.how == "freeze" for blow in mine),
            "ended_the_run": sum(blow.ended for blow in mine),
            "end_s_max": round(max(ends), 1) if ends else None,
            "recovery_s_median": round(statistics.median(seconds), 1) if seconds else None,
            "recovery_s_max": round(max(seconds), 1) if seconds else None,
        }
    wrong = {law: len(words) for law, words in audit.wrong.items()}
    return {
        "kills": len(blows),
        "components": components,
        "lost": wrong["lost"],
        "trained_twice": wrong["twice"],
        "law_violations": wrong["lag"] + wrong["order"] + wrong["steps"],
        "leftover_processes": len(processes),
        "leftover_files": len(files),
        "not_finished": int(bool(failure)),
        "steps": audit.steps,
        "resumes": audit.resumes,
        "undone": audit.undone,
    }


def table(result: dict[str, Any]) -> str:
    heads = ("kills", "freezes", "ended the run", "within s", "back after s", "at most")
    lines = [f"{'component':14}" + "".join(f" {head:>13}" for head in heads)]
    for name, found in result["components"].items():
        lines.append(f"{name:14}" + "".join(f" {'-' if n is None else n:>13}" for n in found.values()))
    return "\n".join(lines)
