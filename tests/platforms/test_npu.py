"""The order in which an NPU trainer loads its libraries, and its calls of the device, against stand-ins.

tests/ascend/emulation runs the same platform on an emulated device.
"""

import contextlib
import sys
import types

import pytest
import torch

from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms import kernels, npu


@pytest.fixture(autouse=True)
def without_megatron(monkeypatch):
    """As in a fresh process, whatever other tests imported."""
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def loaded(monkeypatch):
    """Stand-ins for torch_npu and mindspeed.megatron_adaptor; yields what was observed."""
    seen = {"order": [], "set_device": []}
    library = types.ModuleType("torch_npu")

    class Finder:
        """Loads the stand-ins and notes when, and with which arguments in sys.argv."""

        @staticmethod
        def find_spec(name, path=None, target=None):
            if name in ("torch_npu", "mindspeed", "mindspeed.megatron_adaptor"):
                from importlib.machinery import ModuleSpec

                return ModuleSpec(name, Finder, is_package=True)
            return None

        @staticmethod
        def create_module(spec):
            return library if spec.name == "torch_npu" else types.ModuleType(spec.name)

        @staticmethod
        def exec_module(module):
            seen["order"].append((module.__name__, len(sys.argv)))

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    monkeypatch.setattr(npu, "_prepared", False)
    for name in ("torch_npu", "mindspeed", "mindspeed.megatron_adaptor"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    device = types.SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        set_device=seen["set_device"].append,
        current_device=lambda: 1,
    )
    device.config = types.SimpleNamespace(allow_internal_format=True)
    library.npu = device
    monkeypatch.setattr(torch, "npu", device, raising=False)
    yield seen
    for name in ("torch_npu", "mindspeed", "mindspeed.megatron_adaptor"):
        sys.modules.pop(name, None)


def test_bootstrap_order_and_empty_arguments(loaded, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prog", "--tensor-parallel", "2"])
    npu.NpuPlatform().prepare_trainer(1)
    assert loaded["order"] == [("torch_npu", 3), ("mindspeed", 1), ("mindspeed.megatron_adaptor", 1)]
    assert sys.argv == ["prog", "--tensor-parallel", "2"]
    assert not torch.npu.config.allow_internal_format


def test_a_trainer_is_prepared_once_and_may_ask_again(loaded, monkeypatch):
    """The engine prepares its platform too, when megatron is there already."""
    npu.NpuPlatform().prepare_trainer(1)
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    npu.NpuPlatform().prepare_trainer(1)
    assert len(loaded["order"]) == 3


def test_late_bootstrap_is_refused(loaded, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    with pytest.raises(PlatformError, match=r"before megatron\.core"):
        npu.NpuPlatform().prepare_trainer(1)


def test_without_the_libraries_the_error_says_what_to_do():
    assert npu.device_count() == 0
    with pytest.raises(PlatformError, match=r"set_env\.sh"):
        npu.NpuPlatform().prepare_trainer(1)


def test_device_uses_the_one_mapping(loaded, monkeypatch):
    """B90"""
    monkeypatch.setenv(npu.VISIBLE_ENV, "4,5")
    monkeypatch.setattr(torch, "device", lambda *a: a)
    assert npu.NpuPlatform().device(physical_id=5) == ("npu", 1)
    assert loaded["set_device"] == [1]


def test_memory_calls_reach_the_device(loaded, monkeypatch):
    """A side stream belongs to the caller's device although a new thread starts on device 0, and can be waited for."""
    events = []

    class Stream:
        def synchronize(self):
            events.append("waited")

    @contextlib.contextmanager
    def stream(side):
        assert isinstance(side, Stream)
        events.append("inside")
        yield
        events.append("outside")

    torch.npu.Stream, torch.npu.stream = Stream, stream
    torch.npu.empty_cache = lambda: events.append("emptied")
    torch.npu.memory_reserved, torch.npu.memory_allocated = lambda: 30, lambda: 12
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory, **k: events.append(pin_memory) or real(*a, **k))
    platform = npu.NpuPlatform()
    with platform.side_stream("npu:1") as finish:
        finish()
    assert platform.free_bytes() == 18  # torch_npu counts what it reserved and what tensors have of it
    platform.free_unused()
    assert platform.pinned(5).shape == (5,)
    assert loaded["set_device"] == ["npu:1"]
    assert events == ["inside", "waited", "outside", "emptied", True]
    storage = torch.zeros(4).untyped_storage()
    platform.release_storage(storage)
    assert storage.nbytes() == 0
    platform.restore_storage(storage, 16)
    assert storage.nbytes() == 16


def test_a_grouped_matmul_that_cannot_be_compiled_is_said_with_its_settings(monkeypatch):
    """MindSpeed's own error where CANN is not there: its paths are None."""

    def load(verbose):
        raise TypeError("expected str, bytes or os.PathLike object, not NoneType")

    module = types.ModuleType("mindspeed.ops.gmm")
    module.GMMFunction = types.SimpleNamespace(builder=types.SimpleNamespace(load=load))
    for name in ("mindspeed", "mindspeed.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "mindspeed.ops.gmm", module)
    with pytest.raises(PlatformError, match=r"NoneType.*set_env\.sh.*trainer\.moe_grouped_gemm"):
        kernels.prepare_grouped_matmul(types.SimpleNamespace(type="npu"))
    kernels.prepare_grouped_matmul(torch.device("cpu"))
