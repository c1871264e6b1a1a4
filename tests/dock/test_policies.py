"""Policies over plain arrays."""

import numpy as np
import pytest

from mindspeed_asyncflow.dock.policies import first_ready, pick, ready_prefix
from mindspeed_asyncflow.errors import DockError

READY = np.array([True, True, False, True, True])


@pytest.mark.parametrize(
    ("count", "first", "prefix"), [(1, [0], [0]), (3, [0, 1, 3], [0, 1]), (9, [0, 1, 3, 4], [0, 1])]
)
def test_fifo_skips_what_is_not_ready_and_in_order_stops_there(count, first, prefix):
    assert first_ready(READY, count).tolist() == first
    assert ready_prefix(READY, count).tolist() == prefix


def test_nothing_ready_or_nothing_there_grants_nothing():
    for ready in (np.zeros(3, bool), np.zeros(0, bool)):
        assert not len(first_ready(ready, 2)) and not len(ready_prefix(ready, 2))


def test_group_policies_refuse_single_rows():
    assert pick("fifo", "groups", [3]).order == "listed"
    for name, ids in (("in_order", None), ("fifo", [1])):
        with pytest.raises(DockError, match="unit='groups'"):
            pick(name, "rows", ids)
