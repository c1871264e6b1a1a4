"""Short on the console, full in the file."""

import logging

import pytest

from mindspeed_asyncflow.observe.log import close_logging, get_logger, setup_logging


@pytest.fixture(autouse=True)
def _closed():
    yield
    close_logging()


def test_the_console_is_short_and_the_file_has_process_and_traceback(tmp_path):
    shown: list[str] = []
    setup_logging("trainer0", tmp_path / "log.txt", write=shown.append)
    get_logger("dock").debug("detail")
    get_logger("dock").info("ready")
    try:
        raise ValueError("root")
    except ValueError:
        get_logger("dock").exception("claim failed")
    assert shown == ["ready", "error: claim failed"]
    text = (tmp_path / "log.txt").read_text()
    assert "detail" in text and "ValueError: root" in text and "asyncflow.dock" in text
    assert all("trainer0[" in line for line in text.splitlines() if "asyncflow.dock:" in line)


def test_setting_up_twice_writes_each_line_once(tmp_path):
    shown: list[str] = []
    for _ in range(2):
        setup_logging("driver", tmp_path / "log.txt", write=shown.append)
    get_logger().info("once")
    assert shown == ["once"]
    assert (tmp_path / "log.txt").read_text().count("once") == 1


def test_other_libraries_loggers_are_left_alone(tmp_path):
    before = list(logging.getLogger().handlers)
    setup_logging("driver", tmp_path / "log.txt", console=False)
    assert logging.getLogger().handlers == before
