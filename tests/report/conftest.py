"""A run and a real browser."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.report.runs import make_run

BROWSER = Path(os.environ.get("ASYNCFLOW_BROWSER", Path(__file__).parents[2] / ".cache/browser"))


@pytest.fixture
def folder(tmp_path):
    return make_run(tmp_path)


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium; skips where scripts/browser.sh has not brought one.

    Not of the whole session: while it lives, playwright's event loop counts as running in this thread.
    """
    if not (BROWSER / "stamp").is_file():
        pytest.skip("no browser: bash scripts/browser.sh")
    sys.path.insert(0, str(BROWSER / "site"))
    from playwright.sync_api import sync_playwright

    env = os.environ | {"LD_LIBRARY_PATH": str(BROWSER / "libraries/lib"), "FONTCONFIG_PATH": str(BROWSER / "fonts")}
    with ExitStack() as stack:
        player = stack.enter_context(sync_playwright())
        chromium = player.chromium.launch(
            executable_path=str(BROWSER / "chromium"), env=env, args=["--no-sandbox", "--disable-gpu"], timeout=60_000
        )
        stack.callback(chromium.close)
        yield chromium
    sys.path.remove(str(BROWSER / "site"))


@pytest.fixture
def expect(browser):
    """Playwright's `expect`, which waits until what it is told is so."""
    from playwright.sync_api import expect

    return expect
