import json

import pytest

from mindspeed_asyncflow import cli

SMALL = [
    "--set=workload.answer_mean=20", "--set=workload.answer_p95=40", "--set=rollout.max_new_tokens=64",
    "--set=rollout.engine=simulated", "--set=workflow.groups_per_step=4", "--steps=3",
]  # fmt: skip
CONFIG = "configs/qwen_tiny_cpu.yaml"


@pytest.mark.slow
def test_a_run_leaves_result_trace_and_picture(tmp_path, capsys):
    assert cli.main(["simulate", CONFIG, *SMALL, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "simulated, not run on NPUs" in said
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["steps"], result["violations"], result["label"]) == (3, {}, "simulated, not run on NPUs")
    names = {e["name"] for e in json.loads((tmp_path / "run/trace/trace.json").read_text())["traceEvents"]}
    assert {"rollout/generate", "train/forward_backward", "reward/score"} <= names
    assert (tmp_path / "run/gantt.png").read_bytes()[1:4] == b"PNG"


def test_schedules_are_compared_in_one_table(tmp_path, capsys):
    arguments = ["simulate", CONFIG, *SMALL, "--compare", "sequential,delayed", "--out", str(tmp_path / "run")]
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said if line.startswith(("sequential", "delayed"))] == ["sequential", "delayed"]
    result = json.loads((tmp_path / "run/result.json").read_text())["schedules"]
    assert result["delayed"]["trained"] == result["sequential"]["trained"]


def test_the_folder_of_a_simulation_is_not_taken_for_that_of_a_lost_run(tmp_path, capsys):
    run, several = tmp_path / "run", tmp_path / "several"
    quick = ["simulate", CONFIG, *SMALL, "--set=observe.trace=false", "--out"]
    assert cli.main([*quick, str(run)]) == 0
    assert cli.main([*quick, str(several), "--compare", "sequential"]) == 0
    capsys.readouterr()
    assert cli.main(["top", str(run), "--once"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("run: simulated, step 3/3\n") and "by `asyncflow simulate`, no run" in said
    assert "lost" not in said and "--run-folder" not in said and "tokens/s" in said
    assert cli.main(["top", str(several), "--once"]) == 0
    assert capsys.readouterr().out.startswith("several: simulated\n")


def test_a_simulation_that_broke_off_has_left_a_folder_of_a_simulation(tmp_path, capsys):
    assert cli.main(["simulate", CONFIG, *SMALL, "--sensitivity", "--out", str(tmp_path / "run")]) == 2
    capsys.readouterr()
    assert cli.main(["top", str(tmp_path / "run"), "--once"]) == 0
    assert "run: simulated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--compare", "delayd"], "unknown schedule 'delayd'; there are colocated, sequential"),
        (["--devices", "7"], "simulation.sizes has nothing for 7 devices"),
        (["--sensitivity"], "simulation.assumed names no setting"),
        (["--set", "simulation.faults=[die:99:1]"], "simulation.faults: 'die:99:1'"),
    ],
)
def test_a_mistake_names_value_and_knob(arguments, said, tmp_path, capsys):
    assert cli.main(["simulate", CONFIG, *SMALL, "--out", str(tmp_path / "run"), *arguments]) == 2
    assert said in capsys.readouterr().err
