"""Train state on a device that a replica in a process of its own uses in turn: the relay's way, with vllm-ascend."""

from types import SimpleNamespace

import pytest
import torch

from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms.memory import GRADIENTS, OPTIMIZER, TRAIN_WEIGHTS, DeviceMemory
from mindspeed_asyncflow.workflow.sharing import SwappedDevice
from tests.ascend.reshard.stand_in import DEVICE_BYTES, StandInNpu, machine

MIB = 1 << 20


@pytest.fixture
def device():
    with machine("npu") as (platform, _):
        weights, moments = torch.randn(1 << 20), torch.randn(1 << 20)
        state = {TRAIN_WEIGHTS: [weights], GRADIENTS: [torch.ones(1 << 20)], OPTIMIZER: [moments]}
        engine = SimpleNamespace(train_state=lambda: state)
        yield SwappedDevice(engine, DeviceMemory(platform)), platform, state


def test_train_state_leaves_and_comes_back_bit_for_bit(device):
    shared, _, state = device
    before = [tensor.clone() for tensor in (*state[TRAIN_WEIGHTS], *state[OPTIMIZER])]
    for version in range(3):
        shared.give(version)
        assert set(shared.memory.usage().values()) == {0}
        shared.take_back()
        assert shared.memory.total() == 12 * MIB
        for tensor, copy in zip((*state[TRAIN_WEIGHTS], *state[OPTIMIZER]), before):
            assert torch.equal(tensor, copy)
        assert not state[GRADIENTS][0].any()


def test_a_replica_that_keeps_the_device_while_it_sleeps_is_named_before_anything_comes_back(device):
    """The first sleep of vllm-ascend freed nothing where its pool and the allocator's segments did not get on."""
    shared, platform, _ = device
    assert isinstance(platform, StandInNpu)
    shared.give(0)
    platform._runtime.taken = DEVICE_BYTES - 11 * MIB
    with pytest.raises(PlatformError, match="state of 12 MiB finds 11 MiB free on its device, although the replica"):
        shared.take_back()
    assert set(shared.memory.usage().values()) == {0}
    platform._runtime.taken = DEVICE_BYTES - 12 * MIB
    shared.take_back()
    assert shared.memory.total() == 12 * MIB
