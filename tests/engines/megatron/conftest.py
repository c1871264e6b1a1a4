"""Trainer ranks shared by the tests of this folder: starting them costs more than what they compute."""

import pytest
from rank_group import RankGroups
from tiny_models import make_model


@pytest.fixture(scope="module")
def groups():
    groups = RankGroups()
    yield groups
    groups.close()


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Small models by family, as Hugging Face folders."""
    found = {kind: str(tmp_path_factory.mktemp(kind)) for kind in ("qwen2", "qwen3", "qwen3_moe", "deepseek_v3")}
    for kind, folder in found.items():
        make_model(kind, folder)
    return found
