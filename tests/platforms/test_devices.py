"""Physical to logical device ids."""

import logging

import pytest

from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms.devices import logical_device, visible_ids


def test_physical_id_is_counted_among_the_visible_ones():
    """B90"""
    assert logical_device(5, "4,5,6,7") == 1
    assert logical_device(7, "4, 5, 6, 7") == 3


@pytest.mark.parametrize("visible", [None, "", " "])
def test_without_a_limit_the_id_is_itself(visible):
    """B90"""
    assert logical_device(5, visible) == 5


def test_other_order_is_sorted_with_a_notice(caplog):
    """B90: visible '6,2'"""
    with caplog.at_level(logging.WARNING):
        assert logical_device(6, "6,2") == 1
        assert logical_device(2, "6,2") == 0
    assert "not ascending" in caplog.text and "2,6" in caplog.text


def test_a_device_that_is_not_visible_is_refused():
    with pytest.raises(PlatformError, match="device 3 was assigned"):
        logical_device(3, "4,5")


@pytest.mark.parametrize("visible", ["a,b", "1,1", "-1"])
def test_nonsense_is_refused(visible):
    with pytest.raises(PlatformError, match="visible devices"):
        visible_ids(visible)
