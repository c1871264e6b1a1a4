"""The command line answers mistakes at once, with one message and the documented exit status."""

import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_asyncflow import cli
from mindspeed_asyncflow.config import load_config
from mindspeed_asyncflow.config.keys import all_paths
from mindspeed_asyncflow.config.load import changed_paths
from mindspeed_asyncflow.errors import PlatformError, WeightSyncError

TINY = "configs/qwen_tiny_cpu.yaml"


@pytest.fixture(autouse=True)
def in_project(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])


@pytest.fixture
def service(monkeypatch):
    """Stands in for the service: records what it is asked to train and ends as it is told."""
    calls: list = []

    class Launch:
        ends: object = 0

        def train(self, config, base=None, warnings=(), resume="auto"):
            calls.append((config, base, resume))
            if isinstance(self.ends, BaseException):
                raise self.ends
            return self.ends

    launch = Launch()
    launch.calls = calls
    from mindspeed_asyncflow import service as package

    monkeypatch.setitem(sys.modules, "mindspeed_asyncflow.service.launch", launch)
    monkeypatch.setattr(package, "launch", launch, raising=False)
    return launch


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing.yaml"], "no such configuration file"),
        ([TINY, "--set", "learning_rate=1e-4"], "did you mean trainer.lr?"),
        ([TINY, "--set", "algorithm.group_size=1"], "algorithm.group_size"),
        ([TINY, "--set", "rollout.threads=6400"], "6400 CPUs wanted by each process"),
        ([TINY, "--set", "model.source=builtin:huge"], "there are builtin:tiny_qwen2"),
        ([TINY, "--set", "data.task=sorting"], "unknown"),
    ],
)
@pytest.mark.parametrize("command", ["train", "check"])
def test_wrong_settings_end_with_2_and_start_nothing(command, arguments, said, service, capsys):
    """B95, B93"""
    assert cli.main([command, *arguments]) == 2
    out, err = capsys.readouterr()
    assert said in out + err
    assert "Traceback" not in err
    assert service.calls == []


def test_train_hands_the_overridden_settings_to_the_service(service, tmp_path):
    assert cli.main(["train", TINY, "--set", "trainer.steps=7", "--run-folder", str(tmp_path)]) == 0
    assert cli.main(["train", TINY, "--resume", "runs/first/checkpoints/step_000005"]) == 0
    (config, base, resume), (_, none, checkpoint) = service.calls
    assert config.trainer.steps == 7
    assert (base, resume) == (tmp_path, "auto")
    assert (none, checkpoint) == (None, "runs/first/checkpoints/step_000005")


def test_own_errors_show_the_root_cause_first_without_a_traceback(service, capsys):
    failure = WeightSyncError("the run stopped in step 3")
    failure.__cause__ = PlatformError("port 5 is in use; set dock.port to 0")
    service.ends = failure
    assert cli.main(["train", TINY]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err == [
        "asyncflow: PlatformError: port 5 is in use; set dock.port to 0",
        "  therefore: WeightSyncError: the run stopped in step 3",
    ]


def test_words_of_a_cause_that_its_consequence_repeats_are_said_once(service, capsys):
    service.ends = PlatformError("cannot write: [Errno 28] No space left on device; set run.folder")
    service.ends.__cause__ = OSError(28, "No space left on device")
    assert cli.main(["train", TINY]) == 1
    said = "asyncflow: PlatformError: cannot write: [Errno 28] No space left on device; set run.folder\n"
    assert capsys.readouterr().err == said
    service.ends.__cause__ = KeyError("run")  # whose type is half of what it says
    assert cli.main(["train", TINY]) == 1
    assert capsys.readouterr().err.startswith("asyncflow: KeyError: 'run'\n  therefore: PlatformError")


def test_unforeseen_errors_show_the_traceback(service, capsys):
    service.ends = ZeroDivisionError("oh")
    assert cli.main(["train", TINY]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_interruption_ends_with_130(service):
    service.ends = KeyboardInterrupt()
    assert cli.main(["train", TINY]) == 130


@pytest.mark.parametrize("arguments", [[], ["trian", TINY], ["train"], ["train", TINY, "--step", "3"]])
def test_wrong_usage_ends_with_2(arguments, capsys):
    assert cli.main(arguments) == 2
    assert "usage: asyncflow" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian", TINY], "'trian' is no command; did you mean train?"),
        (["fly"], "'fly' is no command; there are train, serve, check"),
        (["train", TINY, "--steps", "3"], "--steps 3; a setting is given as --set trainer.steps=3"),
        (["train", TINY, "--learning-rate=1e-4"], "a setting is given as --set trainer.lr=1e-4"),
        (["check", TINY, "workflow.max_lag=0"], "a setting is given as --set workflow.max_lag=0"),
        (["train", TINY, "--lr", "--resume", "never"], "a setting is given as --set trainer.lr=VALUE"),
        (["train", TINY, "--run-foldr", "x"], "did you mean --run-folder?"),
        (["plan", TINY, "--devices", "0"], "argument --devices: '0': expected a whole number, 1 or more"),
        (["plan", TINY, "--max-lag", "-1"], "--max-lag"),
    ],
)
def test_a_word_that_is_unknown_or_wrong_is_answered_with_the_one_that_is_meant(arguments, said, capsys):
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert said in err and "usage: asyncflow" in err and "cluster.devices" not in err


def test_an_option_that_is_like_nothing_is_not_guessed_at(capsys):
    assert cli.main(["top", "--foo"]) == 2
    assert capsys.readouterr().err.endswith("error: unrecognized arguments: --foo\n")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train", "1 the run failed"),
        ("doctor", "1 a run would not start here"),
        ("audit", "1 something is lost"),
        ("report", "1 it failed"),
        ("completion", "1 it failed"),
    ],
)
def test_help_has_the_exit_status_of_this_command(command, said, capsys):
    assert cli.main([command, "--help"]) == 0
    assert f"exit status: 0 done, {said}" in capsys.readouterr().out


def test_check_shows_the_settings_that_are_not_the_defaults_and_all_where_asked(capsys):
    assert cli.main(["check", TINY, "--set", "trainer.steps=7", "--set", "trainer.mindspeed.fused_rmsnorm=false"]) == 0
    out = capsys.readouterr().out
    settings = out.partition("== batch")[0]
    assert "  steps: 7 " in settings and "    fused_rmsnorm: false" in settings and "grad_clip" not in settings
    changed = len(changed_paths(load_config(TINY, ["trainer.steps=7", "trainer.mindspeed.fused_rmsnorm=false"])))
    assert f"# {len(all_paths()) - changed} other settings have their defaults; --all shows them" in settings
    assert len(settings.splitlines()) < 20 and out.rstrip().splitlines()[-1].startswith(("none", "warning"))
    assert cli.main(["check", TINY, "--all"]) == 0
    every = capsys.readouterr().out.partition("== batch")[0]
    assert all(f"{path.rpartition('.')[2]}: " in every for path in all_paths()) and "--all" not in every


def test_check_shows_settings_batches_processes_and_memory(capsys):
    assert cli.main(["check", TINY, "--set", "trainer.lr=3e-4"]) == 0
    out = capsys.readouterr().out
    assert "lr: 0.0003" in out
    assert "32 prompt groups x 8 answers = 256 samples per step" in out
    assert "rollout: 1 x vllm" in out
    assert "dock arena" in out


@pytest.mark.parametrize("command", ["top", "audit", "report", "export", "replay", "dock"])
def test_a_folder_that_is_not_there_and_one_that_is_no_run_are_told_apart(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main([command, "runs/latest"]) == 2
    assert capsys.readouterr().err == "asyncflow: there is no runs/latest here: name a run folder\n"
    assert cli.main([command, str(tmp_path)]) == 2
    assert f"{tmp_path} is no run folder" in capsys.readouterr().err


def test_module_and_version_work_without_loading_heavy_libraries():
    code = (
        "import runpy, sys; sys.argv = ['asyncflow', '--version']\n"
        "try: runpy.run_module('mindspeed_asyncflow', run_name='__main__')\n"
        "except SystemExit as stop: assert stop.code == 0, stop.code\n"
        "heavy = {'torch', 'ray', 'vllm', 'transformers', 'megatron'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mindspeed_asyncflow ")


@pytest.mark.parametrize(
    ("engine", "said"),
    [("reference", "one process, no relay between them"), ("vllm", "in turn: the replicas load the newest version")],
)
def test_check_says_what_happens_in_turn_on_shared_devices(engine, said, capsys):
    colocated = ["workflow.schedule=colocated", "workflow.max_lag=0", f"rollout.engine={engine}"]
    assert cli.main(["check", TINY, *(part for setting in colocated for part in ("--set", setting))]) == 0
    out = capsys.readouterr().out
    assert said in out and "on the trainer's CPUs, in turn with it" in out and "replicas load as" not in out
