"""`asyncflow migrate` writes a file that loads, never over another one."""

import pytest

from mindspeed_asyncflow import cli
from mindspeed_asyncflow.config import load_config, parse_config

THEIRS = "actor_rollout_ref: {actor: {optim: {lr: 2e-6}}}\ntrainer: {total_training_steps: 12}\n"


@pytest.fixture
def theirs(tmp_path):
    path = tmp_path / "theirs.yaml"
    path.write_text(THEIRS)
    return path


def test_it_writes_a_file_that_loads_and_prints_the_lists(theirs, tmp_path, capsys):
    ours = tmp_path / "ours.yaml"
    assert cli.main(["migrate", str(theirs), "--out", str(ours)]) == 0
    config = load_config(ours)
    assert (config.trainer.lr, config.trainer.steps) == (2e-6, 48)
    said = capsys.readouterr().out
    assert "to decide by hand:" in said and f"asyncflow check {ours}" in said


def test_standard_output_is_a_settings_file(theirs, capsys):
    assert cli.main(["migrate", str(theirs)]) == 0
    assert parse_config(capsys.readouterr().out).trainer.lr == 2e-6


def test_a_part_of_a_file_needs_the_name_of_its_system(tmp_path, capsys):
    part = tmp_path / "part.yaml"
    part.write_text("data: {max_prompt_length: 99}\n")
    assert cli.main(["migrate", str(part)]) == 2
    assert "--from verl|mindspeed-rl|areal" in capsys.readouterr().err
    assert cli.main(["migrate", str(part), "--from", "verl"]) == 0
    assert parse_config(capsys.readouterr().out).data.max_prompt_tokens == 99


def test_an_existing_file_is_not_overwritten_and_a_missing_one_is_named(theirs, tmp_path, capsys):
    ours = tmp_path / "ours.yaml"
    ours.write_text("mine")
    assert cli.main(["migrate", str(theirs), "--out", str(ours)]) == 2
    assert ours.read_text() == "mine" and "exists already" in capsys.readouterr().err
    assert cli.main(["migrate", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err
