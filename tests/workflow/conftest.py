"""The record of a small run."""

import pytest

from tests.workflow.recorded import record, settings


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The folder of events of a run."""
    folder = tmp_path_factory.mktemp("run") / "events"
    record(folder, settings())
    return folder


@pytest.fixture
def recorded(original, tmp_path):
    """A copy of it that a test may change."""
    folder = tmp_path / "events"
    folder.mkdir()
    for file in original.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder
