"""What docs/workflow.md names exists."""

import re
from pathlib import Path

from mindspeed_asyncflow.config.keys import all_paths

ROOT = Path(__file__).parents[2]


def test_every_setting_on_the_workflow_page_exists():
    page = (ROOT / "docs" / "workflow.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b((?:workflow|rollout|trainer|algorithm|data)\.[a-z_]+)", page))
    assert len(named) > 15 and named <= set(all_paths())
