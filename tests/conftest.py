"""What holds for all tests."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def no_job_outlives_its_test():
    """A run that a failed test leaves behind would take the machine from all tests after it."""
    yield
    module = sys.modules.get("tests.service.test_launch")
    if module is not None:
        module.Job.end_all()
