"""`asyncflow audit` over a run folder: exit status, words, numbers and the story of a prompt."""

import json
from types import SimpleNamespace

import pytest

from mindspeed_asyncflow.cli import main
from mindspeed_asyncflow.config.load import dump_resolved
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.data.stream import prompts_in_order
from mindspeed_asyncflow.observe.ledger import Ledger
from mindspeed_asyncflow.observe.run_folder import RunFolder

DATA = {"seed": 3, "batch": 2, "batches_per_epoch": 2, "sizes": [5], "quotas": []}
SETTINGS = {"algorithm": {"group_size": 2}, "workflow": {"groups_per_step": 2}, "data": {"epochs": 2}}


@pytest.fixture
def run(tmp_path):
    """A folder of a run whose steps train two groups each, which are as old as `write` says."""
    folder = RunFolder(tmp_path)
    folder.config.write_text(dump_resolved(Config.model_validate(SETTINGS)), encoding="utf-8")

    def write(steps, oldest=lambda step: step):
        ledger = Ledger(folder.ledger)
        ledger.note("data", group_size=2, **DATA)
        order = prompts_in_order(DATA, 2)
        for step in range(steps):
            groups = [2 * step, 2 * step + 1]
            ledger.note("issued", batch=step, groups=groups, prompts=[next(order), next(order)], replaces=[])
            of_rows = {10 * group + member: (group, member) for group in groups for member in (0, 1)}
            rows = list(of_rows.values())
            ledger.note("answering", replica=0, since=step, rows=rows)
            ledger.note("scored", rows=rows, scores=[1.0] * 4)
            ledger.note(
                "trained", step=step, plan=[[list(of_rows)]], groups=of_rows, rewards=dict.fromkeys(of_rows, 1.0),
                versions=dict.fromkeys(of_rows, (oldest(step), step)), rules=SimpleNamespace(oldest_allowed=None),
            )  # fmt: skip
            ledger.note("finished", version=step + 1, optim=SimpleNamespace(applied=True))
        ledger.close()
        return str(tmp_path)

    return write


def test_a_run_over_two_epochs_that_keeps_all_laws_is_proved(run, capsys):
    folder = run(4)
    assert main(["audit", folder]) == 0
    said = capsys.readouterr().out
    assert "8 groups (16 samples)" in said and "nothing is lost" in said
    assert main(["audit", folder, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["trained"], found["steps"], set(found["wrong"].values())) == (16, 4, {0})


def test_tokens_that_are_too_old_are_named_with_exit_status_1(run, capsys):
    assert main(["audit", run(4, oldest=lambda step: 0)]) == 1
    said = capsys.readouterr().out
    epoch, index = list(prompts_in_order(DATA, 2))[4]
    assert f"WRONG (lag): sample 4/0: lag 2 in step 2, workflow.max_lag is 1 (prompt {epoch}:{index})\n" in said
    assert said.count("WRONG") == 8


def test_the_story_of_one_prompt_is_told_and_one_that_was_never_issued_is_refused(run, capsys):
    folder = run(1)
    epoch, index = next(prompts_in_order(DATA, 1))
    assert main(["audit", folder, "--prompt", f"{epoch}:{index}"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 5 and "group 0 issued for step 0" in told[0] and "trained in step 0" in told[-1]
    assert main(["audit", folder, "--prompt", "7:0"]) == 2
    assert "never issued" in capsys.readouterr().err
    assert main(["audit", folder, "--prompt", "seven"]) == 2
    assert "is not epoch:index" in capsys.readouterr().err


def test_folders_without_a_run_or_a_ledger_are_told_apart(tmp_path, capsys):
    assert main(["audit", str(tmp_path)]) == 2
    assert "is no run folder" in capsys.readouterr().err
    RunFolder(tmp_path).config.touch()  # as a full disk leaves it: its settings would be the defaults
    assert main(["audit", str(tmp_path)]) == 2
    assert "or an empty one" in capsys.readouterr().err
    RunFolder(tmp_path).config.write_text(dump_resolved(Config()), encoding="utf-8")
    assert main(["audit", str(tmp_path)]) == 1
    assert "there is no ledger" in capsys.readouterr().err
