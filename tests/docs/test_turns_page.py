"""What docs/turns.md says is so."""

import re
import subprocess
import sys
from pathlib import Path

from mindspeed_asyncflow.config.keys import all_paths
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.environments.base import build_environment

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "turns.md").read_text(encoding="utf-8")


def test_the_own_environment_of_the_page_prints_what_is_printed_there(tmp_path, monkeypatch):
    (example, printed) = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL).groups()
    (tmp_path / "games.py").write_text(example, encoding="utf-8")
    done = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, printed), done.stderr
    monkeypatch.syspath_prepend(tmp_path)
    assert build_environment("python:games:Higher", {"give_up": 3}).give_up == 3


def test_all_settings_of_turns_are_on_the_page_with_their_defaults():
    rows = dict(re.findall(r"^\| `turns\.(\w+)` \| (\S+) \|", PAGE, re.MULTILINE))
    named = set(re.findall(r"`((?:turns|workflow|rollout|data)\.[a-z_]+)[`:]", PAGE))
    assert {p for p in all_paths() if p.startswith("turns.")} <= named <= set(all_paths())
    defaults = Config().turns.model_dump()
    shown = {k: "null" if v is None else f"{v:g}" if isinstance(v, float) else str(v) for k, v in defaults.items()}
    assert rows == {k: shown[k] for k in rows} and len(rows) == 6
