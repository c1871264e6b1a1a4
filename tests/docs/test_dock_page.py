"""The example of docs/dock.md does what the page says."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_of_the_dock_page_runs_as_printed():
    page = (ROOT / "docs" / "dock.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[0 1 2 3 4 5 6 7 8 9]\n"), done.stderr
