"""`asyncflow export`: the policy of a checkpoint as a Hugging Face folder, without devices and without the trainer."""

from __future__ import annotations

import argparse
from pathlib import Path

from mindspeed_asyncflow.errors import ConfigError

NAME = "export"
HELP = "write the policy of a run's newest checkpoint as a Hugging Face folder and print its path"
EXAMPLES = "  asyncflow export runs/latest\n  asyncflow export runs/latest --step 40 --out my-policy"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="a run folder, such as runs/latest")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of step N, not the newest one")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="a new folder; default: RUN/export/step_N")


def run(arguments: argparse.Namespace) -> int:
    from mindspeed_asyncflow.observe.checkpoints import newest_complete, step_folder, verify
    from mindspeed_asyncflow.observe.run_folder import RunFolder
    from mindspeed_asyncflow.reshard.hf_folder import export_hf

    folder = RunFolder(arguments.run_folder).of_run()
    if arguments.step is not None:
        found: Path | None = step_folder(folder.checkpoints, arguments.step)
    else:
        found = newest_complete(folder.checkpoints, check=False)
    if found is None:
        raise ConfigError(f"{folder.path} has no complete checkpoint; trainer.save_every makes some while it runs")
    step = verify(found).step
    out = arguments.out or folder.path / "export" / f"step_{step:06d}"
    if out.exists():
        raise ConfigError(f"{out} exists already; name a new folder with --out")
    export_hf(found / "trainer", out)
    print(out)
    return 0
