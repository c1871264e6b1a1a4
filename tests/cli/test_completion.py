"""What a shell offers after the completion script was read: asked of a real bash."""

import shutil
import subprocess

import pytest

from mindspeed_asyncflow.cli import build_parser
from mindspeed_asyncflow.cli.completion import script


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    """Asks bash what it would offer for a line; its last word is the one that is being typed."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "asyncflow.bash").write_text(script(build_parser(), "bash"))
    (folder / "settings.yaml").write_text("")

    def offers(*words):
        asked = " ".join(f"'{word}'" for word in ("asyncflow", *words))
        code = (
            f"source asyncflow.bash; COMP_WORDS=({asked}); COMP_CWORD={len(words)}; _asyncflow; echo ${{COMPREPLY[@]}}"
        )
        done = subprocess.run(
            ["bash", "--norc", "-c", code], cwd=folder, capture_output=True, text=True, timeout=20, check=True
        )
        assert done.stderr == ""
        return done.stdout.split()

    return offers


def test_subcommands_are_offered_by_their_beginning(bash):
    assert sorted(bash("ch")) == ["chaos", "check"]
    assert "train" in bash("")


def test_options_of_a_subcommand_are_offered_and_no_others(bash):
    assert bash("check", "c.yaml", "--pl") == ["--platform"]
    assert bash("train", "c.yaml", "--pl") == []


def test_choices_files_and_settings_are_offered(bash):
    assert bash("check", "c.yaml", "--platform", "n") == ["npu"]
    assert bash("train", "sett") == ["settings.yaml"]
    assert bash("train", "c.yaml", "--set", "workflow.max_l") == ["workflow.max_lag="]
    assert bash("completion", "z") == ["zsh"]


def test_words_that_stand_in_place_of_a_file_are_offered_beside_files(bash):
    offered = bash("train", "c.yaml", "--resume", "")
    assert offered[:2] == ["auto", "never"] and sorted(offered[2:]) == ["asyncflow.bash", "settings.yaml"]
    assert bash("serve", "c.yaml", "--resume", "n") == ["never"]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["algorithm.advantage", "=", "grpo_l"], ["grpo_loo"]),  # as bash parts words at =
        (["workflow.schedule", "="], ["separated", "colocated"]),
        (["trainer.recompute", "=", "t"], ["true"]),
        (["algorithm.advantage=grpo_l"], ["algorithm.advantage=grpo_loo"]),  # as zsh leaves them whole
        (["trainer.mindspeed.moe_overlap="], ["trainer.mindspeed.moe_overlap=off"]),
    ],
)
def test_after_the_name_of_a_setting_its_values_are_offered(bash, typed, offered):
    found = bash("train", "c.yaml", "--set", *typed)
    assert found[: len(offered)] == offered
    assert all(word.startswith(offered[0].partition("=")[0]) for word in found if "=" in offered[0])


def test_a_setting_that_takes_any_number_has_no_values_to_offer(bash):
    assert bash("train", "c.yaml", "--set", "trainer.steps", "=", "tr") == []


def test_every_subcommand_is_in_the_script_of_both_shells():
    for shell in ("bash", "zsh"):
        text = script(build_parser(), shell)
        for name in ("train", "migrate", "doctor", "completion"):
            assert f"        {name}) words=" in text


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh on this machine")
def test_zsh_reads_its_script(tmp_path):
    (tmp_path / "asyncflow.zsh").write_text(script(build_parser(), "zsh"))
    code = "autoload -Uz compinit && compinit -u -D; source ./asyncflow.zsh; echo ${_comps[asyncflow]}"
    done = subprocess.run(["zsh", "-f", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert "_asyncflow" in done.stdout, done.stderr
