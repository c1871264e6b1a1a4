"""A patch says so when its target has moved, and installs once."""

import sys
import types

import pytest

from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.patches import moe_split_sizes


@pytest.fixture
def dispatcher(monkeypatch):
    """A stand-in for megatron's token dispatcher module."""
    names = ("megatron", "megatron.core", "megatron.core.transformer", "megatron.core.transformer.moe")
    for name in names:
        package = types.ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    module = types.ModuleType("megatron.core.transformer.moe.token_dispatcher")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules[names[-1]].token_dispatcher = module
    return module


def test_a_moved_target_is_named(dispatcher):
    with pytest.raises(PlatformError, match=r"maybe_move_tensor_to_cpu has moved .*pinned megatron-core"):
        moe_split_sizes.install()
    dispatcher.maybe_move_tensor_to_cpu = lambda tensor: tensor
    with pytest.raises(PlatformError, match=r"parameters \['tensor'\]"):
        moe_split_sizes.install()


def test_installing_twice_changes_nothing(dispatcher):
    def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
        return tensor

    dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    moe_split_sizes.install()
    moe_split_sizes.install()
    assert dispatcher.maybe_move_tensor_to_cpu is moe_split_sizes.on_host
