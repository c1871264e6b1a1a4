"""What docs/algorithms.md names exists, and its settings are accepted."""

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from mindspeed_asyncflow.config.algorithm import AlgorithmConfig, CorrectionConfig
from mindspeed_asyncflow.config.keys import all_paths
from mindspeed_asyncflow.config.learning import rules
from mindspeed_asyncflow.config.schema import Config

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(
    ("section", "field"),
    [
        (AlgorithmConfig, "advantage"),
        (AlgorithmConfig, "loss"),
        (AlgorithmConfig, "aggregation"),
        (AlgorithmConfig, "proximal"),
        (AlgorithmConfig, "kl_type"),
    ],
)
def test_every_name_that_can_be_chosen_has_a_row(section, field):
    names = get_args(section.model_fields[field].annotation)
    rows = set(re.findall(r"^\| `([\w+-]+)`", PAGE, re.MULTILINE))
    assert set(names) <= rows


def test_every_setting_of_algorithm_and_correction_is_named_and_nothing_else_is():
    mine = {p.split(".")[-1] for p in all_paths() if p.startswith(("algorithm.", "correction."))} - {"group_size"}
    words = set(re.findall(r"`([a-z_]+)[`:]", PAGE)) | {w.split(".")[-1] for w in re.findall(r"`([a-z_.]+)[`:]", PAGE)}
    assert mine <= words
    dotted = set(
        re.findall(r"`((?:algorithm|correction|reward|critic|workflow|rollout|evaluation)\.[a-z_]+)[`:]", PAGE)
    )
    assert dotted <= set(all_paths())


@pytest.mark.parametrize("example", EXAMPLES)
def test_settings_that_reproduce_other_toolkits_are_accepted(example):
    config = Config.model_validate(yaml.safe_load(example))
    assert not [r for r in rules(config) if r[0] == "error"]
    assert config.algorithm.proximal == "current" and len(EXAMPLES) == 2


def test_defaults_that_the_page_states():
    a, c = AlgorithmConfig(), CorrectionConfig()
    stated = (c.cap, c.floor, c.reject_low, c.reject_high, a.advantage_eps, a.clip_low, a.clip_high, a.dppo_cap)
    assert stated == (2, 0, 0.5, 2, 1e-6, 0.2, 0.28, 20)
    assert (a.advantage, a.loss, a.aggregation, a.proximal, a.kl_type) == tuple(
        re.findall(r"^\| `([\w-]+)` \(default\)", PAGE, re.MULTILINE)[i] for i in (1, 2, 4, 0, 3)
    )
