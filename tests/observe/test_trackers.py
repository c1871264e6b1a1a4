"""Any combination of trackers: one that fails is named once, and the others and metrics.jsonl get every step."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.observe.log import close_logging, setup_logging
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.observe.trackers import Trackers, child, open_trackers, remote
from mindspeed_asyncflow.observe.trackers.base import Tracker
from mindspeed_asyncflow.observe.trackers.remote import Helper, Introduction, read_ids
from mindspeed_asyncflow.observe.writers import MetricsWriter

# Stands for a Python with a library: says that it is there, and writes what it is sent into the run folder.
FAKE = """
import json, sys, time
told = json.loads(sys.stdin.readline())
print(json.dumps({"id": told["id"] or "made-here", "place": "somewhere", "warning": told["project"][1:]}), flush=True)
with open(told["folder"] + "/got.jsonl", "a") as file:
    for line in sys.stdin:
        file.write(line)
"""


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path, "t", "")


@pytest.fixture
def warnings():
    lines = []
    setup_logging("driver", None, write=lines.append, level="WARNING")
    yield lines
    close_logging()


def python(folder, text):
    """A program that takes what Python is given, and runs `text` instead."""
    code = folder.path / "fake.py"
    code.write_text(text)
    program = folder.path / "fake-python"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -S {code}\n")
    program.chmod(0o755)
    return str(program)


def helper(folder, text=FAKE):
    told = Introduction("wandb", str(folder.path), "p", folder.path.name, {"run": {"seed": 3}}, online=False)
    return Helper(told, folder.trackers, python(folder, text))


def soon():
    return time.monotonic() + 30


class Broken(Tracker):
    def __init__(self, at):
        self.at = at

    def write(self, step, at, metrics):
        if self.at == "write":
            raise RuntimeError("the server said no")

    def pause(self):
        if self.at == "pause":
            raise RuntimeError("the server said no")

    def finish(self):
        if self.at == "finish":
            raise RuntimeError("the server said no")

    def close(self, deadline):
        if self.at == "close":
            raise RuntimeError("the server said no")


class Good(Tracker):
    def __init__(self):
        self.steps, self.closed = [], 0

    def write(self, step, at, metrics):
        self.steps.append((step, dict(metrics)))

    def close(self, deadline):
        self.closed += 1


@pytest.mark.parametrize("at", ["open", "write", "pause", "finish", "close"])
def test_a_tracker_that_fails_is_named_once_and_the_others_go_on(folder, warnings, at):
    def broken():
        if at == "open":
            raise RuntimeError("the server said no")
        return Broken(at)

    good = Good()
    writer = MetricsWriter(folder, Trackers({"broken": broken, "good": lambda: good}))
    for step in range(3):
        writer.write(step, {"reward/mean": step / 2})
        with writer.closed():
            pass
    writer.close()
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == [step for step, _ in good.steps] == [0, 1, 2]
    assert good.closed == 1
    (warning,) = warnings
    assert warning.startswith("warning: broken gets no metrics any more") and "the server said no" in warning


@pytest.mark.parametrize(
    ("settings", "beside"),
    [
        ({}, ("tensorboard",)),
        ({"tensorboard": False}, ()),
        ({"trackers": []}, ()),
        ({"trackers": ["jsonl"], "tensorboard": True}, ("tensorboard",)),
        ({"trackers": ["wandb", "mlflow", "wandb"]}, ("wandb", "mlflow")),
        ({"trackers": ["swanlab", "tensorboard"], "tensorboard": False}, ("swanlab",)),
    ],
)
def test_settings_choose_any_combination(settings, beside):
    assert parse_config(json.dumps({"observe": settings})).observe.beside == beside


def test_an_unknown_tracker_is_refused_by_name():
    with pytest.raises(ConfigError, match="comet"):
        parse_config('{"observe": {"trackers": ["comet"]}}')


def test_a_library_that_is_not_there_costs_its_own_curves_only(folder, warnings):
    config = parse_config(json.dumps({"observe": {"trackers": ["tensorboard", "wandb"], "trackers_wait_s": 60}}))
    nothing = python(folder, "import sys; sys.exit(3)")
    config = config.model_copy(update={"observe": config.observe.model_copy(update={"trackers_python": nothing})})
    writer = MetricsWriter(folder, open_trackers(config, folder))
    writer.write(0, {"reward/mean": 0.5})
    writer.close()
    assert list(folder.tensorboard.iterdir())
    (warning,) = warnings
    assert "wandb" in warning and "code 3" in warning and "wandb.log" in warning


def test_a_helper_gets_every_step_without_what_is_not_finite(folder):
    tracker = helper(folder)
    for step in range(50):
        tracker.write(step, 1000.5, {"reward/mean": step / 10, "actor/grad_norm": float("nan")})
    tracker.finish()
    tracker.close(soon())
    got = [json.loads(line) for line in (folder.path / "got.jsonl").read_text().splitlines()]
    assert got == [{"step": s, "at": 1000.5, "metrics": {"reward/mean": s / 10}} for s in range(50)]


def test_a_service_may_say_something_at_its_start(folder, warnings):
    told = Introduction("wandb", str(folder.path), "pwritten offline, since nobody is logged in", "t", {}, online=True)
    tracker = Helper(told, folder.trackers, python(folder, FAKE))
    tracker.finish()
    tracker.close(soon())
    assert warnings == ["warning: wandb: written offline, since nobody is logged in"]


def test_a_library_that_asks_for_a_login_gets_none_of_the_lines(tmp_path):
    code = (
        "import sys\n"
        "from mindspeed_asyncflow.observe.trackers import child\n"
        "class Asks:\n"
        "    id = place = warning = ''\n"
        "    def __init__(self, told):\n"
        "        try: print('who are you?', input())\n"
        "        except EOFError: pass\n"
        "    def write(self, step, at, metrics): open('got', 'a').write(f'{step} ')\n"
        "    def close(self): pass\n"
        "child.SERVICES['wandb'] = Asks\n"
        "child.main()\n"
    )
    sent = json.dumps({"service": "wandb"}) + "\n" + step(0) + step(1)
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        command, input=sent, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "got").read_text() == "0 1 " and "who are you" not in done.stdout


def test_a_run_that_goes_on_is_continued_under_its_id(folder):
    for _ in range(2):
        tracker = helper(folder)
        tracker.finish()
        tracker.close(soon())
        assert read_ids(folder.trackers) == {"wandb": "made-here"}
        folder.trackers.write_text(json.dumps({"wandb": "made-here", "mlflow": "other"}))
        tracker = helper(folder, FAKE.replace('told["id"] or "made-here"', 'told["id"] + "!"'))
        tracker.finish()
        tracker.close(soon())
        assert read_ids(folder.trackers) == {"wandb": "made-here!", "mlflow": "other"}
        folder.trackers.write_text("torn")  # is begun anew


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys; sys.exit(7)", "code 7"),
        ("import os; os.kill(os.getpid(), 9)", "code -9"),
        ('print(\'{"failed": "no login"}\', flush=True)', "no login"),
    ],
)
def test_a_helper_that_ends_says_why_and_the_next_step_finds_out(folder, text, said):
    tracker = helper(folder, text)
    with pytest.raises(remote.Failed, match=said):
        for step in range(100_000):
            tracker.write(step, 0.0, {"reward/mean": 0.5})
            time.sleep(0.001)


def test_a_helper_that_hangs_delays_no_step_and_is_ended(folder, monkeypatch):
    monkeypatch.setattr(remote, "MOST_WAITING", 20)
    hanging = helper(folder, "import time; time.sleep(600)")
    with pytest.raises(remote.Failed, match="20 steps behind"):
        for step in range(1000):
            hanging.write(step, 0.0, {f"scorer/{n}": 0.5 for n in range(500)})
    with pytest.raises(remote.Failed):
        hanging.close(soon())
    assert hanging._process.returncode == -9


def test_a_helper_that_does_not_finish_in_time_is_ended(folder):
    slow = helper(folder, "import time; time.sleep(600)")
    slow.finish()
    with pytest.raises(remote.Failed, match="trackers_wait_s"):
        slow.close(time.monotonic())
    assert slow._process.returncode == -9


def test_a_helper_ends_by_itself_when_its_driver_is_killed(folder):
    program = python(folder, FAKE + "open(told['folder'] + '/ended', 'w').close()\n")
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from mindspeed_asyncflow.observe.trackers.remote import Helper, Introduction\n"
        "folder = Path(sys.argv[1])\n"
        "told = Introduction('wandb', str(folder), 'p', 'r', {}, False)\n"
        "helper = Helper(told, folder / 'trackers.json', sys.argv[2])\n"
        "while not (folder / 'trackers.json').exists(): pass\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code, str(folder.path), program], env=environment, timeout=60)
    assert done.returncode == -9
    deadline = soon()
    while not (folder.path / "ended").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Recorded:
    """A service that keeps what it gets."""

    made: list = []

    def __init__(self, told):
        self.told, self.id, self.place, self.warning, self.steps, self.closed = (
            told,
            told["id"] or "new",
            "here",
            "",
            [],
            False,
        )
        Recorded.made.append(self)

    def write(self, step, at, metrics):
        if metrics.get("reward/mean") == -1:
            raise ValueError("two\nlines")
        self.steps.append((step, at, metrics))

    def close(self):
        self.closed = True


def serve(monkeypatch, lines, service=Recorded):
    monkeypatch.setitem(child.SERVICES, "wandb", service)
    answers = io.StringIO()
    first = json.dumps({"service": "wandb", "id": ""}) + "\n"
    try:
        code = child.serve(io.StringIO(first + lines), answers)
    except BaseException as error:
        code = error
    return code, [json.loads(line) for line in answers.getvalue().splitlines()]


def step(number, value=0.5):
    return json.dumps({"step": number, "at": 1.0, "metrics": {"reward/mean": value}}) + "\n"


def test_inside_a_helper_steps_reach_the_library_until_the_pipe_ends(monkeypatch):
    code, answers = serve(monkeypatch, step(0) + step(1) + step(2)[:-5])  # the driver died in the middle of a line
    assert (code, answers) == (0, [{"id": "new", "place": "here", "warning": ""}])
    assert Recorded.made[-1].steps == [(0, 1.0, {"reward/mean": 0.5}), (1, 1.0, {"reward/mean": 0.5})]
    assert Recorded.made[-1].closed


def test_inside_a_helper_whatever_a_library_raises_becomes_one_sentence(monkeypatch):
    code, answers = serve(monkeypatch, step(0) + step(1, -1))
    assert isinstance(code, ValueError) and answers[-1] == {"failed": "ValueError: two lines"}

    def leaves(told):
        raise SystemExit("please log in")

    code, answers = serve(monkeypatch, "", leaves)
    assert isinstance(code, SystemExit) and answers == [{"failed": "SystemExit: please log in"}]

    def missing(told):
        import no_such_library_of_anyone  # noqa: F401

    code, answers = serve(monkeypatch, "", missing)
    assert code == 1 and "trackers_python" in answers[0]["failed"]
