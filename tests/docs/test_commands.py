"""Commands of the pages: those for CPUs are run, those for NPUs are read and run up to where a device is needed."""

import argparse
import os
import re
import subprocess
import sys
from itertools import pairwise

import pytest
from doc_commands import PAGES, ROOT, blocks, lines_of, named_commands, printed_commands

from mindspeed_asyncflow import cli
from mindspeed_asyncflow.config import load_config
from mindspeed_asyncflow.service import superpod

# What a page for NPUs leaves to its reader, and what stands for it here.
READERS = {"DATA/Qwen2.5-7B": "configs/models/qwen2.5-7b"}
STUB = '#!/bin/sh\nfor word; do printf "%s\\n" "$word"; done\n'


def subcommands() -> dict[str, set[str]]:
    """Name of each subcommand -> its options."""
    (action,) = (a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {name: {o for a in sub._actions for o in a.option_strings} for name, sub in action.choices.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_that_a_page_names_exist(page):
    known = subcommands()
    for command, *words in [*named_commands(page), *printed_commands(page)]:
        assert command in known, f"{page.name}: asyncflow {command}"
        used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= known[command], f"{page.name}: asyncflow {command} {' '.join(words)}"


@pytest.mark.parametrize("page", [page for page in PAGES if printed_commands(page)], ids=lambda page: page.name)
def test_commands_that_a_page_prints_are_accepted_as_a_whole(page, capsys):
    for words in printed_commands(page):
        try:
            cli.build_parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"asyncflow {' '.join(words)}: {capsys.readouterr().err.strip().splitlines()[-1]}")


def test_the_start_pages_have_no_block_without_a_mark():
    start = [ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "docs/quickstart.md"]
    assert [block for block in blocks(*start) if not block.kind] == []


def test_what_ci_is_said_to_run_it_runs():
    ran = (ROOT / ".ci/run").read_text(encoding="utf-8").replace('"$root/', "").replace('"', "").splitlines()
    said = [line for block in blocks() if block.kind == "ci" for line in block.text.splitlines()]
    assert said and [line for line in said if line not in ran] == []


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_configurations_and_settings_of_short_commands_load(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    short = [c for c in re.findall(r"`([^`\n]+)`", text) if re.match(r"(…|bash scripts/launch_qwen_grpo.sh) --", c)]
    assert len(short) > 5
    for words in map(str.split, short):
        pairs = list(pairwise(words))
        (config,) = [after for word, after in pairs if word == "--config"] or ["configs/qwen_tiny_cpu.yaml"]
        load_config(ROOT / config, [after for word, after in pairs if word == "--set"])


def scripts(kind: str, long: bool) -> list:
    """The blocks of a kind of each page as one script; what another page has in whole is run once."""
    texts = {page: "".join(b.text for b in blocks(page) if b.kind == kind and b.long == long) for page in PAGES}
    kept = [page for page in PAGES if texts[page] and not any(texts[page] in texts[p] for p in PAGES if p != page)]
    return [pytest.param(texts[page], id=page.name) for page in kept]


@pytest.fixture
def project(tmp_path):
    """The project as links, in a folder where runs may be left."""
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "runs").mkdir()
    return tmp_path


def run_all(script: str, folder, seconds: int) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    environment["PATH"] = f"{os.path.dirname(sys.executable)}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("script", scripts("cpu", long=False))
def test_commands_for_cpus_run_as_printed(script, project):
    run_all(script, project, seconds=1200)


@pytest.mark.nightly
@pytest.mark.parametrize("script", scripts("cpu", long=True))
def test_long_commands_for_cpus_run_as_printed(script, project):
    run_all(script, project, seconds=1200)


NPU_LINES = [
    pytest.param(words, id=f"{b.page.name}: {' '.join(words)[:60]}")
    for b in blocks()
    if b.kind == "npu"
    for words in lines_of(b.text)
]


@pytest.mark.parametrize("block", [b for b in blocks() if b.kind], ids=lambda b: b.page.name)
def test_every_marked_block_is_a_shell_script(block):
    done = subprocess.run(["bash", "-n", "-c", block.text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize("words", NPU_LINES)
def test_files_and_extras_in_commands_for_npus_exist(words):
    named = [w for w in words if re.match(r"(configs|scripts|examples)/", w)]
    assert [name for name in named if not (ROOT / name).exists()] == []
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert all(f'"{extra}": [' in setup for w in words for extra in re.findall(r"^\.\[([\w-]+)\]$", w))


@pytest.mark.slow
@pytest.mark.parametrize("words", [p for p in NPU_LINES if p.values[0][1:2] == ["scripts/launch_qwen_grpo.sh"]])
def test_launches_on_npus_come_as_far_as_the_devices(words, tmp_path, monkeypatch, capsys):
    """The launch script itself runs, with a Python that only says what it was asked; then `asyncflow check` looks at
    what it would have trained, on as many devices as the configuration names."""
    monkeypatch.chdir(ROOT)
    python = tmp_path / "python"
    python.write_text(STUB)
    python.chmod(0o755)
    alone = "--hosts" not in words
    joining = ["--platform", "npu", "--ray-address", "10.0.0.1:6379"] if alone else ["--platform", "npu"]
    done = subprocess.run(
        [*words, *joining],
        env=os.environ | {"ASYNCFLOW_PYTHON": str(python)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    if alone:
        asked = cli.build_parser().parse_args(said[said.index("train") :])
    else:
        asked = superpod.build_parser().parse_args(said[said.index("mindspeed_asyncflow.service.superpod") + 1 :])
    given = asked.overrides if alone else asked.set
    overrides = [word for setting in given for word in ("--set", _here(setting))]
    devices = max(16, load_config(asked.config).cluster.devices)
    status = cli.main(["check", asked.config, *overrides, "--platform", "npu", "--assume-devices", str(devices)])
    assert status == 0, capsys.readouterr()


def _here(setting: str) -> str:
    for theirs, ours in READERS.items():
        setting = setting.replace(theirs, ours)
    return setting
