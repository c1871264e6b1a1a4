"""`report.html`: one self-contained page about a run, from what lies in its folder, beside other runs if wanted.

Python reads the folders and writes the words and figures that need no script; `*.js` in this folder draw the rest from
the data inside the page. Nothing is loaded from elsewhere. Missing pieces are named.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mindspeed_asyncflow.observe.report.page import page
from mindspeed_asyncflow.observe.report.run import read_run
from mindspeed_asyncflow.observe.run_folder import RunFolder


def write_report(run_folder: Path | str, others: Sequence[Path | str] = (), out: Path | str | None = None) -> Path:
    """Write the page about `run_folder`, with `others` in the same pictures, and return its path.

    `out`: default `report.html` in `run_folder`. Raises OSError where that cannot be written.
    """
    paths = [Path(path).resolve() for path in (run_folder, *others)]
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [f"{path.parent.name}/{path.name}" for path in paths]
    runs = [read_run(RunFolder(path), name) for path, name in zip(paths, names)]
    path = RunFolder(Path(run_folder)).report if out is None else Path(out)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(page(runs), encoding="utf-8", errors="backslashreplace")
    os.replace(temporary, path)
    return path
