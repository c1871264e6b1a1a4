"""`asyncflow audit`: what became of every prompt of a run, proved from its ledger."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from mindspeed_asyncflow.config.load import load_config
from mindspeed_asyncflow.data.stream import prompts_in_order
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.observe.audit import MOST_NAMED, Audit, Rules, audit, fact, open_ledger
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.observe.story import story

NAME = "audit"
HELP = "prove from the ledger of a run that no prompt was lost and none trained twice"
FAILED = "something is lost, or a law is broken"  # what status 1 says
EXAMPLES = (
    "  asyncflow audit runs/latest\n"
    "  asyncflow audit runs/latest --prompt 0:17\n"
    "  asyncflow audit runs/latest --json | python -m json.tool"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_folder", metavar="RUN", type=Path, nargs="?", default=Path("runs/latest"),
        help="a run folder, of a run that goes on or is over (default: runs/latest)",
    )  # fmt: skip
    parser.add_argument(
        "--prompt", metavar="EPOCH:INDEX", type=_prompt, help="tell what happened to one prompt, from its issue on"
    )
    parser.add_argument("--json", action="store_true", help="print what was counted as one line of JSON")


def _prompt(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"\d+:\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not epoch:index, such as 0:17")
    epoch, _, index = text.partition(":")
    return int(epoch), int(index)


def run(arguments: argparse.Namespace) -> int:
    if arguments.prompt is None:
        found = audit_run(arguments.run_folder)
        print(json.dumps(found.facts()) if arguments.json else in_words(found))
        return 0 if found.holds else 1
    epoch, index = arguments.prompt
    told = story(open_ledger(RunFolder(arguments.run_folder).of_run().ledger), epoch, index)
    if not told:
        raise ConfigError(f"--prompt {epoch}:{index}: {arguments.run_folder} never issued this prompt")
    print("\n".join(told))
    return 0


def audit_run(path: Path) -> Audit:
    """The audit of the run in folder `path`. Raises `ConfigError` where it is none, `LedgerError` without a ledger."""
    folder = RunFolder(path).of_run()
    config = load_config(folder.config)
    w = config.workflow
    db = open_ledger(folder.ledger)
    rules = Rules(config.algorithm.group_size, w.max_lag, leaves_none=w.take == "issued" and w.oversample == 1)
    return audit(db, rules, prompts_in_order(fact(db, "data"), config.data.epochs))


def _prompt_of(words: str, found: Audit) -> str:
    """What --prompt wants, of the group or sample that `words` begin with."""
    named = re.match(r"(?:group|sample) (\d+)", words)
    if named is None or "prompt" in words or int(named[1]) not in found.prompts:
        return ""
    return " (prompt {}:{})".format(*found.prompts[int(named[1])])


def in_words(found: Audit) -> str:
    dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(found.dropped.items()))
    lines = [
        f"issued   {found.groups} groups ({found.samples} samples)",
        f"trained  {found.trained} samples in {found.steps} steps, worst lag {found.worst_lag}"
        + (f"; {found.in_step} of them in a step that has not ended" if found.in_step else ""),
        f"dropped  {sum(found.dropped.values())} samples" + (f" ({dropped})" if dropped else ""),
        f"open     {found.open} groups",
    ]
    if found.resumes:
        lines.append(f"resumed  {found.resumes} times; {found.undone} trained samples were undone")
    for law, wrong in found.wrong.items():
        lines += [f"WRONG ({law}): {words}{_prompt_of(words, found)}" for words in wrong[:MOST_NAMED]]
        if len(wrong) > MOST_NAMED:
            lines.append(f"WRONG ({law}): and {len(wrong) - MOST_NAMED} more")
    lines.append(
        "nothing is lost, nothing was trained twice, no law is broken"
        if found.holds
        else f"{sum(map(len, found.wrong.values()))} things are wrong"
    )
    return "\n".join(lines)
