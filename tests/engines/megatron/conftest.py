"""Trainer ranks shared by the tests of this folder: starting them costs more than what they compute."""

import pytest
from rank_group import RankGroups


@pytest.fixture(scope="module")
def groups():
    groups = RankGroups()
    yield groups
    groups.close()
