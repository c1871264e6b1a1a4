"""What HCCL's groups take of a device."""

import pytest

from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms.communicators import buffer_limit_mb, buffer_mb_for, communicator_bytes


def test_a_group_takes_twice_its_buffer_and_a_dozen_as_many_times_more():
    assert communicator_bytes(200) == 400 << 20
    assert communicator_bytes(64, communicators=12) == 12 * 128 << 20


def test_a_buffer_is_as_large_as_a_message_in_whole_mib():
    assert [buffer_mb_for(size) for size in (0, 1, 1 << 20, (1 << 20) + 1, 64 << 20)] == [1, 1, 1, 2, 64]


def test_the_environment_bounds_it_and_a_bad_bound_is_named():
    assert buffer_limit_mb({}) == 200
    assert buffer_limit_mb({"HCCL_BUFFSIZE": "32"}) == 32
    for bad in ("0", "-5", "1.5", "", "200MB", "²"):
        with pytest.raises(PlatformError, match=r"HCCL_BUFFSIZE=.*whole number of MiB"):
            buffer_limit_mb({"HCCL_BUFFSIZE": bad})
