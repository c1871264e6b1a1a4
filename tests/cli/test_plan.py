"""`asyncflow plan` writes settings that `check` accepts, and answers mistakes at once."""

from __future__ import annotations

import json

import pytest

from mindspeed_asyncflow import cli
from mindspeed_asyncflow.config import load_config
from tests.planner.models import QWEN_7B

TINY = [
    "--set=cluster.preset=cpu",
    "--set=workload.prompt_bins=[[7, 1]]",
    "--set=workload.answer_bins=[[5, 1]]",
    "--devices=2",
]
CONFIG = "configs/qwen_tiny_cpu.yaml"


@pytest.mark.slow
def test_a_plan_for_this_machine_passes_check(tmp_path, capsys):
    out = tmp_path / "planned.yaml"
    assert cli.main(["plan", CONFIG, *TINY, "--max-lag", "2", "--simulations", "2", f"--out={out}"]) == 0
    said = capsys.readouterr().out
    for heading in ("== plan", "== memory of the fullest device", "== next best", "== not chosen, by reason"):
        assert heading in said
    assert load_config(out).workflow.max_lag == 2
    assert cli.main(["check", str(out), f"--set=run.folder={tmp_path}"]) == 0


def test_all_figures_come_as_one_object(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    settings = [f"--set=model.source={tmp_path}", "--set=model.dtype=bfloat16", "--set=rollout.max_new_tokens=512"]
    settings += ["--set=workflow.groups_per_step=8", "--devices=8", "--simulations=2", "--json"]
    assert cli.main(["plan", CONFIG, *settings]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["label"] == "simulated, not run on NPUs"
    assert figures["devices_used"] <= 8 and figures["simulated"] == 2
    assert "trainer:" in figures["yaml"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--profile", "none.json"], "none.json: no such profile"),
        (["--set", "model.source=nowhere"], "a plan needs its config.json"),
        (["--devices", "1"], "nothing fits 1 devices"),
        (["--devices", "0"], "--devices: '0'"),
    ],
)
def test_mistakes_are_answered_with_what_to_do(arguments, said, capsys):
    assert cli.main(["plan", CONFIG, *TINY[:3], *arguments]) == 2
    assert said in capsys.readouterr().err
