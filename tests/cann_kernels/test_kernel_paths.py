"""Which path runs where, that it is counted, and what a device gets."""

import importlib
import logging
import sys
import types

import pytest
import torch

from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms import kernels, vocabulary_torch
from mindspeed_asyncflow.platforms.vocabulary import vocabulary_stats


def on_npu(dtype: torch.dtype) -> types.SimpleNamespace:
    return types.SimpleNamespace(device=types.SimpleNamespace(type="npu"), dtype=dtype)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, caplog):
    kernels.log.addHandler(caplog.handler)  # alone: whether its parent propagates depends on what ran before
    kernels.log.propagate = False
    kernels.log.setLevel(logging.INFO)
    monkeypatch.delenv(kernels.KERNELS_ENV, raising=False)
    monkeypatch.setattr(kernels, "_calls", type(kernels._calls)())
    kernels._triton_kernels.cache_clear()
    yield
    kernels._triton_kernels.cache_clear()
    kernels.log.removeHandler(caplog.handler)
    kernels.log.propagate = True
    kernels.log.setLevel(logging.NOTSET)


class FakeKernel:
    """A compiled kernel: remembers grid and arguments, and marks what it gets."""

    def __init__(self, seen):
        self.seen = seen

    def __getitem__(self, grid):
        return lambda *args, **options: self.seen.append((grid, args, options))


@pytest.fixture
def fake_triton(monkeypatch):
    """Stand-ins for triton-ascend with 40 vector cores; what was launched."""
    seen = []
    utils = types.SimpleNamespace(get_device_properties=lambda device: {"num_vectorcore": 40})
    driver = types.SimpleNamespace(active=types.SimpleNamespace(utils=utils))
    language = types.ModuleType("triton.language")
    language.constexpr = lambda value: value
    top = types.ModuleType("triton")
    top.jit = lambda fn=None, **_: FakeKernel(seen) if fn else (lambda f: FakeKernel(seen))
    top.language = language
    runtime = types.ModuleType("triton.runtime")
    runtime.driver = driver
    made = {"triton": top, "triton.language": language, "triton.runtime": runtime}
    made |= {name: types.ModuleType(name) for name in ("triton.backends", "triton.backends.ascend")}
    top.backends = made["triton.backends"]
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("cann_kernels.launch", "cann_kernels.vocabulary"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield seen
    for name in ("cann_kernels.launch", "cann_kernels.vocabulary"):
        sys.modules.pop(name, None)


def test_a_processor_runs_torch_and_both_passes_are_counted(caplog):
    logits = torch.randn(3, 5, requires_grad=True)
    stats = vocabulary_stats(logits, torch.tensor([0, 1, 2]))
    stats.total.sum().backward()
    vocabulary_stats(logits, torch.tensor([0, 1, 2]))
    assert kernels.path_calls() == {"vocabulary_stats/torch": 2, "vocabulary_gradient/torch": 1}
    assert caplog.text.count("vocabulary_stats/torch runs for the first time, for torch.float32 logits on cpu") == 1


def test_a_device_runs_the_kernels_unless_told_otherwise(fake_triton, monkeypatch):
    launch = importlib.import_module("cann_kernels.launch")
    for dtype in (torch.bfloat16, torch.float32):
        assert kernels.vocabulary_path(on_npu(dtype), "stats") == launch.ON_DEVICE.stats
    assert kernels.vocabulary_path(on_npu(torch.float16), "stats") is vocabulary_torch.stats  # not verified
    monkeypatch.setenv(kernels.KERNELS_ENV, "torch")
    assert kernels.vocabulary_path(on_npu(torch.bfloat16), "gradient") is vocabulary_torch.gradient
    counted = {"vocabulary_stats/triton": 2, "vocabulary_stats/torch": 1, "vocabulary_gradient/torch": 1}
    assert kernels.path_calls() == counted


@pytest.mark.parametrize("missing", ["triton", "triton.backends.ascend"])
def test_a_device_without_triton_for_ascend_runs_torch_and_says_why(fake_triton, missing, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, missing, None)  # importing it raises ImportError
    for _ in range(2):
        assert kernels.vocabulary_path(on_npu(torch.bfloat16), "stats") is vocabulary_torch.stats
    assert caplog.text.count("Triton-Ascend kernels cannot be loaded") == 1
    assert missing in caplog.text


def test_a_device_whose_driver_triton_cannot_use_runs_torch_and_says_why(fake_triton, monkeypatch, caplog):
    monkeypatch.setattr(sys.modules["triton.runtime"], "driver", types.SimpleNamespace())
    assert kernels.vocabulary_path(on_npu(torch.bfloat16), "stats") is vocabulary_torch.stats
    assert "no NPU driver that it can use" in caplog.text and "AttributeError" in caplog.text


def test_a_kernel_that_fails_names_the_way_around_it(fake_triton, monkeypatch):
    launch = importlib.import_module("cann_kernels.launch")
    monkeypatch.setitem(launch._KERNELS, "stats", {})  # has no grid
    with pytest.raises(PlatformError, match=r"vocabulary_stats .*ASYNCFLOW_KERNELS=torch"):
        launch.ON_DEVICE.stats(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), 0, 2, 1.0)


def test_an_unknown_choice_of_path_is_refused(monkeypatch):
    monkeypatch.setenv(kernels.KERNELS_ENV, "triton")
    with pytest.raises(PlatformError, match="ASYNCFLOW_KERNELS='triton'"):
        kernels.vocabulary_path(torch.zeros(1, 1), "stats")


def test_a_launch_has_a_program_per_core_and_no_more_than_rows(fake_triton):
    device = importlib.import_module("cann_kernels.launch").ON_DEVICE
    for rows, grid in ((3, (3,)), (200, (40,))):
        logits, targets = torch.zeros(rows, 8), torch.zeros(rows, dtype=torch.int64)
        device.stats(logits[:, :5], targets, 2, 4, 0.5)
        found, args, options = fake_triton.pop()
        assert found == grid and options == {"BLOCK": 4096, "TAIL": 512}
        assert args[1].dtype == torch.int32 and args[6:] == (rows, 8, 2, 4, 2.0)
        one = torch.ones(1).expand(rows)  # the gradient of a sum has stride 0
        device.gradient(logits[:, :5], targets, torch.zeros(rows), one, None, one, 2, 4, 0.5)
        found, args, _ = fake_triton.pop()
        assert found == grid and args[7:] == (rows, 8, 5, 2, 4, 2.0)
        assert all(slope.is_contiguous() for slope in args[3:6]) and not args[4].any()


def test_columns_that_lie_apart_are_put_side_by_side(fake_triton):
    device = importlib.import_module("cann_kernels.launch").ON_DEVICE
    device.stats(torch.zeros(5, 3).t(), torch.zeros(3, dtype=torch.int64), 0, 5, 1.0)
    _, args, _ = fake_triton.pop()
    assert args[0].stride() == (5, 1) and args[7] == 5
