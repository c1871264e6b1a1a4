"""Physical to logical device ids. B90"""

import ast
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms import devices
from mindspeed_asyncflow.platforms.devices import logical_device, physical_device, visible_ids, visible_to

DEVICES = st.lists(st.integers(0, 63), min_size=1, max_size=16, unique=True)


def test_the_list_of_visible_devices_is_known_to_one_module_whose_functions_everybody_calls():
    """B90"""
    package = Path(devices.__file__).parents[1]
    named = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value == devices.VISIBLE_ENV
    }
    refused_in = "config/rules_placement.py"  # where no setting may write the list
    assert named - {refused_in} == {"platforms/devices.py"}


def written(ids):
    return ",".join(map(str, ids))


def test_physical_id_is_counted_among_the_visible_ones():
    """B90"""
    assert logical_device(5, "4,5,6,7") == 1
    assert logical_device(7, "4, 5, 6, 7") == 3


@pytest.mark.parametrize("visible", [None, "", " "])
def test_without_a_limit_the_id_is_itself(visible):
    """B90"""
    assert logical_device(5, visible) == 5 == physical_device(5, visible)


def test_other_order_is_sorted_with_a_notice(caplog):
    """B90: visible '6,2'"""
    with caplog.at_level(logging.WARNING):
        assert logical_device(6, "6,2") == 1
        assert logical_device(2, "6,2") == 0
    assert "not ascending" in caplog.text and "2,6" in caplog.text


def test_a_device_that_is_not_visible_is_refused():
    with pytest.raises(PlatformError, match="device 3 was assigned"):
        logical_device(3, "4,5")


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_beyond_the_visible_devices_is_refused(index):
    with pytest.raises(PlatformError, match=f"index {index} does not exist: 2 devices"):
        physical_device(index, "4,5")


@pytest.mark.parametrize("visible", ["a,b", "1,1", "-1"])
def test_nonsense_is_refused(visible):
    with pytest.raises(PlatformError, match="visible devices"):
        visible_ids(visible)


@given(visible=DEVICES)
def test_to_physical_and_back_is_the_same_and_ascending_whatever_the_order_and_gaps(visible):
    """B90: non-contiguous and unsorted lists"""
    text = written(visible)
    indices = [logical_device(device, text) for device in sorted(visible)]
    assert indices == list(range(len(visible)))
    assert [physical_device(index, text) for index in indices] == sorted(visible)


@given(data=st.data(), visible=DEVICES)
def test_a_process_sees_its_devices_in_one_order_whether_ray_narrowed_the_list_or_not(data, visible):
    """B90: with the override flag the process still has the list of the whole node."""
    assigned = data.draw(st.lists(st.sampled_from(visible), min_size=1, unique=True))
    narrowed = visible_to(map(str, assigned), written(assigned))
    assert narrowed == visible_to(assigned, written(visible)) == visible_to(assigned, None) == written(sorted(assigned))
    assert visible_to(assigned, narrowed) == narrowed


@given(visible=DEVICES, stranger=st.integers(64, 99))
def test_a_device_outside_the_nodes_list_is_refused(visible, stranger):
    with pytest.raises(PlatformError, match=f"device {stranger} was assigned"):
        visible_to([visible[0], stranger], written(visible))


def test_trainer_rank_and_replica_of_its_device_name_the_same_physical_one():
    """What npu_ipc compares: the trainer sees its one device, the replica those of two ranks."""
    ranks, replica = ["9", "3"], visible_to(["9", "3"])
    assert [physical_device(0, visible_to([device])) for device in ranks] == [9, 3]
    assert [physical_device(logical_device(int(device), replica), replica) for device in ranks] == [9, 3]
    assert replica == "3,9"
