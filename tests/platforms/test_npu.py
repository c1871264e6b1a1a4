"""Our calls to torch_npu and MindSpeed, against strict stand-ins. This checks the calls, not the hardware."""

import contextlib
import sys
import types

import numpy as np
import pytest
import torch

from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms import kernels, npu
from mindspeed_asyncflow.platforms.packing import pack_layout


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
    for name in ("torch_npu", "mindspeed", "mindspeed.megatron_adaptor"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    device = types.SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        set_device=seen["set_device"].append,
        current_device=lambda: 1,
    )
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


class StrictOps:
    """The operators with the rules of their documentation checked."""

    @staticmethod
    def npu_rms_norm(x, gamma, epsilon=1e-6):
        inverse = (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
        return x * inverse * gamma, inverse

    @staticmethod
    def npu_swiglu(x, dim=-1):
        gate, up = x.chunk(2, dim)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def npu_rotary_mul(x, cos, sin):
        assert x.dim() == cos.dim() == 4 and cos.shape == (1, x.shape[1], 1, x.shape[3]) and cos.dtype == x.dtype
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    @staticmethod
    def npu_fusion_attention(
        q, k, v, head_num, input_layout, *, atten_mask, scale, keep_prob, sparse_mode, actual_seq_qlen, actual_seq_kvlen
    ):
        assert input_layout == "TND" and q.dim() == 3 and head_num == q.shape[1] and keep_prob == 1.0
        assert sparse_mode == 3 and atten_mask.shape == (2048, 2048) and atten_mask.dtype == torch.bool
        assert atten_mask[0, 1] and not atten_mask[1, 1] and not atten_mask[1, 0]
        assert isinstance(actual_seq_qlen, list) and actual_seq_qlen == actual_seq_kvlen
        assert actual_seq_qlen[-1] == len(q) and len(actual_seq_qlen) <= 1024
        cu = np.array([0, *actual_seq_qlen])
        layout = pack_layout(cu)
        out = kernels.attention_packed(q, k, v, layout, scale)
        return out.view(len(q), head_num, -1), None, None, None, 0, 0, 0


@pytest.fixture
def on_npu(monkeypatch):
    """Each kernel as it runs on an NPU; attention inside the stand-in takes the torch path again."""
    depth = []

    def attention(*args, **kwargs):
        depth.append(1)
        try:
            return StrictOps.npu_fusion_attention(*args, **kwargs)
        finally:
            depth.pop()

    fake = types.SimpleNamespace(
        npu_rms_norm=StrictOps.npu_rms_norm,
        npu_swiglu=StrictOps.npu_swiglu,
        npu_rotary_mul=StrictOps.npu_rotary_mul,
        npu_fusion_attention=attention,
    )
    monkeypatch.setattr(kernels, "_torch_npu", lambda x: None if depth else fake)


def test_npu_operators_get_what_they_want_and_give_the_same(on_npu, monkeypatch):
    torch.manual_seed(0)
    x, weight = torch.randn(9, 1, 16), torch.rand(16)
    angles = torch.rand(9, 1, 4)
    q, k, v = torch.randn(9, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    layout = pack_layout(np.array([0, 3, 5, 9]))

    def all_of_them():
        return (
            kernels.rms_norm(x, weight, 1e-6),
            kernels.swiglu(x),
            kernels.rotary(q, angles.cos(), angles.sin()),
            kernels.attention_packed(q, k, v, layout, 0.3),
        )

    on_device = all_of_them()
    monkeypatch.setattr(kernels, "_torch_npu", lambda x: None)
    for a, b in zip(on_device, all_of_them()):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_more_samples_than_the_operator_takes_are_split(on_npu):
    cu = np.arange(0, 2 * 1500 + 1, 2)
    q, k, v = torch.randn(3000, 2, 4), torch.randn(3000, 1, 4), torch.randn(3000, 1, 4)
    assert kernels.attention_packed(q, k, v, pack_layout(cu), 0.5).shape == (3000, 8)
