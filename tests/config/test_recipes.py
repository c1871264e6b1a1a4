"""Shipped configurations load; those of NPUs fit their clusters by arithmetic; docs/recipes.md says what they say."""

import re
from pathlib import Path

import pytest
import yaml

from mindspeed_asyncflow import cli
from mindspeed_asyncflow.cli import devices, preflight
from mindspeed_asyncflow.config import Config, load_config
from mindspeed_asyncflow.config.machine import assume, probe

ROOT = Path(__file__).parents[2]
ALL = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml"))
ON_NPU = [name for name in ALL if "platform: npu" in (ROOT / name).read_text() and "/simulate/" not in name]
RECIPES = [name for name in ON_NPU if "/ascend/" in name]
MODELS = ("qwen2.5-7b", "qwen2.5-32b", "qwen3-8b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-r1")
DOC = (ROOT / "docs/recipes.md").read_text()
NODE_DOES_NOT_HOLD = ("deepseek-r1", "qwen3-235b-a22b-colocated")  # as docs/recipes.md says

FITS = "none: this configuration can run there"


@pytest.fixture(autouse=True)
def _from_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", ALL)
def test_every_configuration_loads(name):
    load_config(name, [])


def test_each_model_has_a_colocated_and_a_separated_recipe():
    wanted = {f"configs/ascend/{model}-{form}.yaml" for model in MODELS for form in ("colocated", "separated")}
    assert set(RECIPES) == wanted
    for name in RECIPES:
        workflow = load_config(name, []).workflow
        assert (workflow.schedule, workflow.max_lag > 0) == (Path(name).stem.rpartition("-")[2], "separated" in name)


def test_npu_configurations_beside_the_recipes_are_known():
    assert set(ON_NPU) - set(RECIPES) == {"configs/qwen_tiny_npu.yaml"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_NPU)
def test_npu_configurations_name_their_cluster_and_fit_it(name, capsys):
    given = yaml.safe_load((ROOT / name).read_text())
    assert given["run"]["platform"] == "npu"
    config = load_config(name, [])
    assert config.cluster.devices == given["cluster"]["devices"]
    assert cli.main(["check", name, "--platform", "npu", "--assume-devices", str(config.cluster.devices)]) == 0
    out = capsys.readouterr().out
    assert "== device memory, GB" in out and "simulated, not run on NPUs" in out
    said = [line for line in out.rpartition("== findings\n")[2].splitlines() if "is not complete here" not in line]
    assert not any(line.startswith("error") for line in said)
    short = any(part in name for part in NODE_DOES_NOT_HOLD)
    assert (said not in ([], [FITS])) == short, said


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_explains_every_line_in_a_few_dozen(name):
    text = (ROOT / name).read_text()
    assert "Not run on NPUs" in text and 40 <= len(text.splitlines()) <= 75
    lines = [line for line in text.splitlines() if re.match(r"  \w+:", line) and "_p95" not in line]
    bare = [line for line in lines if "#" not in line and "answer_mean" not in line]
    assert bare == []


def sections() -> dict[str, str]:
    """Model -> its part of the page, by the recipes that the part names."""
    parts = re.split(r"^## ", DOC, flags=re.M)
    named = {
        re.search(r"configs/ascend/(\S+)-colocated\.yaml", part): part
        for part in parts
        if part.startswith(("Qwen", "Deep"))
    }
    return {match.group(1): part for match, part in named.items() if match}


def shown(config: Config, key: str) -> str:
    """A setting as the page writes it."""
    section, name = key.split(".")
    value = config.model_dump(mode="json")[section][name]
    if key == "reward.scorers":
        return "`" + ", ".join(scorer["name"] for scorer in value) + "`"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


@pytest.mark.parametrize("model", MODELS)
def test_the_tables_say_what_the_files_say(model):
    configs = [load_config(f"configs/ascend/{model}-{form}.yaml", []) for form in ("colocated", "separated")]
    rows = [line.strip("| ").split(" | ") for line in sections()[model].splitlines() if line.startswith("| `")]
    assert len(rows) > 20
    for key, *_, colocated, separated in rows:
        assert [colocated, separated] == [shown(config, key.strip("`")) for config in configs], key


@pytest.mark.parametrize("name", RECIPES)
def test_the_estimates_are_those_of_the_planner(name):
    row = next(line for line in DOC.splitlines() if line.startswith(f"| `{Path(name).stem}` |"))
    _, total, used, train_gb, rollout_gb, step_s, tokens_per_s, _, limit = row.strip("| ").split(" | ")
    config = load_config(name, [])
    work = preflight.device_work(config, assume(config.cluster.devices, config.cluster, probe()), [])
    assert work is not None
    held = [sum(kinds.values()) / 1e9 for kinds in devices.held_bytes(config, work).values()]
    found, rate = devices.expected(config, work)
    assert [float(train_gb), float(rollout_gb)] == pytest.approx(held, abs=0.06)
    shown_numbers = [float(text.replace(",", "")) for text in (step_s, tokens_per_s)]
    assert shown_numbers == pytest.approx([found.step_s, rate], rel=0.006)
    shared = config.workflow.schedule == "colocated"
    own = 0 if shared else config.rollout.replicas * config.rollout.tensor_parallel
    assert (int(total), int(used), limit) == (config.cluster.devices, config.trainer.world_size + own, found.limit)


def test_every_figure_of_the_page_is_marked_as_simulated():
    assert "Simulated, not run on NPUs" in DOC and "Nothing here\nwas run on an NPU" in DOC
