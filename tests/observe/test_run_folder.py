"""Where a run leaves what."""

import pytest

from mindspeed_asyncflow.errors import ConfigError, PlatformError
from mindspeed_asyncflow.observe.run_folder import RunFolder


def test_two_runs_in_one_second_get_two_folders_and_latest_is_the_second(tmp_path):
    first = RunFolder.create(tmp_path / "runs", "grpo", "a: 1\n")
    second = RunFolder.create(tmp_path / "runs", "grpo", "a: 2\n")
    assert first.path != second.path
    assert (tmp_path / "runs" / "latest").resolve() == second.path.resolve()
    assert first.config.read_text() == "a: 1\n"


def test_latest_survives_moving_the_runs_folder(tmp_path):
    made = RunFolder.create(tmp_path / "runs", "grpo", "a: 1\n")
    (tmp_path / "runs").rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "latest" / "config.yaml").read_text() == "a: 1\n"
    assert made.path.name == (tmp_path / "moved" / "latest").resolve().name


def test_no_temporary_link_stays_behind(tmp_path):
    made = RunFolder.create(tmp_path, "grpo", "")
    assert {p.name for p in tmp_path.iterdir()} == {"latest", made.path.name}


def test_a_folder_that_cannot_be_written_names_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlatformError, match=r"run\.folder"):
        RunFolder.create(tmp_path / "file" / "runs", "grpo", "")


def test_a_real_folder_named_latest_is_not_replaced(tmp_path):
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "keep").write_text("mine")
    with pytest.raises(PlatformError, match=r"run\.folder"):
        RunFolder.create(tmp_path, "grpo", "")
    assert (tmp_path / "latest" / "keep").read_text() == "mine"
    assert not list(tmp_path.glob(".latest-*"))


def test_a_named_folder_must_be_new_or_empty(tmp_path):
    made = RunFolder.create_at(tmp_path / "a" / "b", "x: 1\n")
    assert made.path == tmp_path / "a" / "b" and made.config.read_text() == "x: 1\n"
    assert not (tmp_path / "a" / "latest").exists()
    with pytest.raises(ConfigError, match="not empty"):
        RunFolder.create_at(made.path, "x: 2\n")
    assert made.config.read_text() == "x: 1\n"
    with pytest.raises(ConfigError, match="cannot make"):
        RunFolder.create_at(made.config / "under a file", "")


def test_a_reserved_folder_is_the_latest_and_takes_the_run_beside_its_logs(tmp_path):
    reserved = RunFolder.reserve(tmp_path, "grpo")
    (reserved.logs / "node0.log").write_text("of the launch")
    run = RunFolder.create_at(reserved.path, "a: 1\n")
    assert (tmp_path / "latest").resolve() == run.path.resolve()
    assert run.config.read_text() == "a: 1\n" and (run.logs / "node0.log").exists()
    with pytest.raises(ConfigError, match="not empty"):
        RunFolder.create_at(reserved.path, "a: 2\n")


def test_a_run_that_goes_on_is_cut_back_to_its_marks(tmp_path):
    """Lines go by bytes, files of single steps by their number, what says that the run ended goes whole."""
    run = RunFolder.create_at(tmp_path / "run", "a: 1\n")
    for folder in (run.events, run.tensorboard):
        folder.mkdir()
    run.metrics.write_text("one\n")
    (run.events / "events.jsonl").write_text("begun\n")
    (run.tensorboard / "first").write_text("1")
    marks = run.marks()
    for file in (run.metrics, run.events / "events.jsonl", run.tensorboard / "first"):
        file.write_text(file.read_text() + "more\n")
    (run.tensorboard / "second").write_text("2")
    run.evaluations.write_text("later\n")
    run.summary.write_text("{}")
    for step in range(3):
        (run.samples / f"step_{step:06d}.txt").write_text("")
        (run.events / f"step_{step:06d}_replica_0.npz").write_text("")
    run.cut_back(marks, step=1)
    assert run.metrics.read_text() == "one\n" and (run.events / "events.jsonl").read_text() == "begun\n"
    assert {p.name: p.read_text() for p in run.tensorboard.iterdir()} == {"first": "1"}
    assert run.evaluations.read_text() == "" and not run.summary.exists()
    assert [p.name for p in run.samples.iterdir()] == ["step_000000.txt"]
    assert {p.name for p in run.events.iterdir()} == {"events.jsonl", "step_000000_replica_0.npz"}
    assert run.config.read_text() == "a: 1\n"


def test_hf_names_the_newest_policy_and_goes_with_the_checkpoint_that_holds_it(tmp_path):
    run = RunFolder.create_at(tmp_path / "run", "a: 1\n")
    first, second = (run.checkpoints / f"step_{step:06d}" / "hf" for step in (1, 2))
    first.mkdir(parents=True)
    run.point_hf(first)
    run.point_hf(second)  # a checkpoint without a policy
    assert run.hf.resolve() == first.resolve()
    first.rmdir()  # retention
    run.point_hf(second)
    assert not run.hf.is_symlink()
    second.mkdir(parents=True)
    run.point_hf(second)
    assert run.hf.resolve() == second.resolve()
