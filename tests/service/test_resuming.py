"""Where a run begins, and what is refused before anything starts."""

import json

import pytest

from mindspeed_asyncflow.config.load import dump_resolved
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import CheckpointError, ConfigError
from mindspeed_asyncflow.observe import checkpoints
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.service import resuming
from mindspeed_asyncflow.service.resuming import choose


def config(**sections):
    return Config.model_validate(sections)


def checkpoint(folder, step, settings, position=None, groups=(), per_epoch=100, **more):
    """What a session leaves there, as far as `choose` looks at it."""
    partial = checkpoints.begin(folder.checkpoints, step)
    stream = {"position": step if position is None else position, "batches_per_epoch": per_epoch} | more
    state = {"version": step, "stream": stream, "run": {"book": {"groups": list(groups)}, "feeder": {"left": []}}}
    (partial / "state.json").write_text(json.dumps(state))
    (partial / "config.yaml").write_text(dump_resolved(settings))
    return checkpoints.complete(partial, checkpoints.sums(partial), step=step, version=step, config="")


def ends(folder, error=""):
    folder.summary.write_text(json.dumps({"error": error}))


@pytest.fixture
def run(tmp_path):
    """A run of 10 steps with checkpoints of 3 and 6."""
    settings = config(trainer={"steps": 10})
    folder = RunFolder.create_at(tmp_path / "run", dump_resolved(settings))
    for step in (3, 6):
        checkpoint(folder, step, settings)
    return folder, settings


def test_a_run_goes_on_from_its_newest_complete_checkpoint(run):
    folder, settings = run
    found = choose(settings, folder.path)
    assert (found.again, found.complete, found.checkpoint.name) == (True, "", "step_000006")
    (folder.checkpoints / "step_000006" / "state.json").write_text("torn")
    assert choose(settings, folder.path).checkpoint.name == "step_000003"
    (folder.checkpoints / "step_000003" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        choose(settings, folder.path)


def test_a_named_checkpoint_is_taken_also_into_a_new_folder(run, tmp_path):
    folder, settings = run
    named = str(folder.checkpoints / "step_000003")
    found = choose(settings, None, named)
    assert found.folder == folder and found.checkpoint.name == "step_000003"
    other = choose(settings, tmp_path / "other", named)
    assert other.folder.path == tmp_path / "other" and other.again and other.checkpoint == found.checkpoint
    for wrong, said in (
        (folder.checkpoints / "step_000004", "step_000004: --resume takes auto, never, or the folder of a checkpoint"),
        (tmp_path / "atuo", "atuo: --resume takes auto, never, or the folder of a checkpoint"),
        (folder.path, f"--run-folder {folder.path} goes on from its newest one"),
    ):
        with pytest.raises(ConfigError, match=said):
            choose(settings, None, str(wrong))


def test_a_run_begun_from_another_one_remembers_it_until_it_has_a_checkpoint_of_its_own(run, tmp_path):
    folder, settings = run
    named = folder.checkpoints / "step_000003"
    new = choose(settings, tmp_path / "new", str(named)).folder
    for resume in ("auto", str(named)):  # its driver was killed, and is started without and with the option
        found = choose(settings, new.path, resume)
        assert (found.again, found.checkpoint, found.undo, found.folder) == (True, named, False, new)
    with pytest.raises(ConfigError, match="is not empty"):
        choose(settings, new.path, str(folder.checkpoints / "step_000006"))
    own = checkpoint(new, 4, settings)
    for resume in ("auto", str(named)):
        assert choose(settings, new.path, resume).checkpoint == own
    (own / "state.json").write_text("torn")
    assert choose(settings, new.path).checkpoint == named, "the one before its own"
    (named / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"new began with a checkpoint of another run.*state\.json is missing"):
        choose(settings, new.path)


def test_a_checkpoint_may_be_named_by_way_of_links(run, tmp_path):
    folder, settings = run
    (tmp_path / "latest").symlink_to("run")
    for path in (folder.path, tmp_path / "latest", None):
        for name, step in (("step_000003", "step_000003"), ("latest", "step_000006")):
            found = choose(settings, path, str(tmp_path / "latest" / "checkpoints" / name))
            assert found.checkpoint == found.folder.checkpoints / step and found.undo
            assert found.folder.path.samefile(folder.path)


def test_a_new_folder_is_made_and_never_refuses_what_is_there(run, tmp_path):
    folder, settings = run
    new = choose(settings, tmp_path / "new")
    assert not new.again and new.checkpoint is None and new.folder.config.is_file()
    with pytest.raises(ConfigError, match="is not empty"):
        choose(settings, folder.path, "never")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("")
    with pytest.raises(ConfigError, match="is not empty"):
        choose(settings, tmp_path / "notes")


def test_a_run_that_died_before_its_first_checkpoint_begins_again(tmp_path):
    folder = RunFolder.create_at(tmp_path / "run", dump_resolved(config()))
    found = choose(config(), folder.path)
    assert found.again and found.checkpoint is None and "beginning again at version 0" in str(found)
    with pytest.raises(ConfigError, match=r"run\.seed: 0 -> 1"):
        choose(config(run={"seed": 1}), folder.path)


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("run", {"seed": 7}, "run.seed: 0 -> 7"),
        ("algorithm", {"group_size": 4}, "algorithm.group_size: 8 -> 4"),
        ("data", {"task": "sort5"}, "data.task"),
        ("model", {"dtype": "bfloat16"}, "model.dtype"),
        ("trainer", {"lr": 1e-3}, "trainer.lr"),
        ("workflow", {"max_lag": 3}, "workflow.max_lag: 1 -> 3"),
        ("rollout", {"max_new_tokens": 9}, "rollout.max_new_tokens"),
    ],
)
def test_settings_that_say_what_is_computed_are_refused_by_name(run, section, values, said):
    folder, _ = run
    with pytest.raises(ConfigError, match=said):
        choose(
            config(
                **{"trainer": {"steps": 10}} | {section: {"steps": 10} | values if section == "trainer" else values}
            ),
            folder.path,
        )


def test_settings_that_say_where_and_how_long_may_change(run):
    folder, _ = run
    other = config(
        trainer={"steps": 20, "tensor_parallel": 2, "save_every": 1},
        rollout={"replicas": 3},
        dock={"pairs": 2},
        data={"epochs": 9},
        checkpoint={"keep": 7},
    )
    assert choose(other, folder.path).checkpoint.name == "step_000006"


def test_a_run_that_has_its_steps_is_complete_and_more_steps_go_on(run):
    folder, settings = run
    checkpoint(folder, 10, settings)
    ends(folder)
    assert choose(settings, folder.path).complete == "10 steps are trained, and trainer.steps is 10"
    assert choose(config(trainer={"steps": 11}), folder.path).complete == ""


@pytest.mark.parametrize("summary", [None, "Interrupted: stopped by a signal"])
def test_a_run_that_has_its_steps_but_no_last_evaluation_goes_on_to_it(run, summary):
    folder, settings = run
    last = checkpoint(folder, 10, settings)
    if summary is not None:
        ends(folder, summary)
    found = choose(settings, folder.path)
    assert (found.again, found.checkpoint, found.complete) == (True, last, "")


def test_nothing_is_made_for_a_run_that_has_no_steps_to_do(run, tmp_path):
    folder, settings = run
    last = checkpoint(folder, 10, settings)
    assert choose(settings, tmp_path / "new", str(last)).complete and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("position", "groups", "over"), [(12, (), True), (11, (), False), (12, ([5, 11, 1, 3, 8],), False)]
)
def test_a_run_whose_data_is_used_up_is_complete_once_nothing_is_open(run, position, groups, over):
    """B59: 2 epochs of 6 steps; more epochs go on."""
    folder, _ = run
    settings = config(trainer={"steps": 10}, data={"epochs": 2})
    checkpoint(folder, 9, settings, position, groups, per_epoch=6)
    ends(folder)
    assert bool(choose(settings, folder.path).complete) is over
    assert choose(config(trainer={"steps": 10}, data={"epochs": 3}), folder.path).complete == ""


def test_a_run_whose_client_gives_no_more_prompts_is_complete_for_that_reason(run):
    folder, settings = run
    checkpoint(folder, 9, settings, client=True, exhausted=True)
    ends(folder)
    assert choose(settings, folder.path).complete == "the client's prompts ended after 9 steps"


def test_one_driver_at_a_time_has_a_folder(run):
    folder, _ = run
    with folder.locked(), pytest.raises(ConfigError, match="in use: another driver trains there"), folder.locked():
        pass
    with folder.locked():
        pass


@pytest.mark.parametrize("new", [False, True])
def test_a_driver_has_the_folder_before_it_chooses_a_checkpoint(run, tmp_path, monkeypatch, new):
    """The driver before may still complete one."""
    folder, settings = run
    looked = []

    def looking(*args):
        if not new:
            with pytest.raises(ConfigError, match="in use"), folder.locked():
                pass
        looked.append(choose(*args))
        return looked[0]

    monkeypatch.setattr(resuming, "choose", looking)
    with resuming.begin(settings, tmp_path / "new" if new else folder.path) as start:
        assert [start] == looked
        with pytest.raises(ConfigError, match="in use"), start.folder.locked():
            pass
    with start.folder.locked(), pytest.raises(ConfigError, match="in use"), resuming.begin(settings, start.folder.path):
        pass


def test_latest_names_the_run_that_began_or_went_on_last_among_those_of_the_folder(tmp_path):
    runs = Config.model_validate({"run": {"folder": str(tmp_path / "runs")}})
    latest = tmp_path / "runs" / "latest"
    for name in ("one", "two", "one", "latest"):
        with resuming.begin(runs, tmp_path / "runs" / name) as start:
            assert latest.resolve().name == (name if name != "latest" else "one") == start.folder.path.resolve().name
    with resuming.begin(runs, tmp_path / "elsewhere"):
        pass
    assert latest.resolve().name == "one" and not (tmp_path / "latest").exists()
