"""The lowered kernels, run on this processor, against float64."""

import pytest
import torch

from cann_kernels import exactly
from mindspeed_asyncflow.platforms import kernels, vocabulary_torch

pytestmark = pytest.mark.slow
VOCABULARY = 151_936
IN_TURN = 3e-5  # the lowered code adds up a tile number by number: 4096 roundings instead of a tree's 12
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def on_kernels(built, monkeypatch):
    """The operator calls the lowered kernels, and memory that nobody writes is NaN."""
    monkeypatch.setattr(kernels, "vocabulary_path", lambda logits, operator: getattr(built.kernels, operator))
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def example(rows: int, width: int, scale: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + width)
    logits = (torch.randn(rows, width, generator=generator) * scale).to(dtype)
    targets = torch.randint(0, width, (rows,), generator=generator)
    targets[0] = logits[0].argmax()  # a likely one too
    return logits, targets


@pytest.mark.parametrize("scale", [1.0, 3.0, 8.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_whole_vocabulary_agrees_with_float64(dtype, scale):
    """On one to four shards; on three, the last one ends in padding."""
    logits, targets = example(2, VOCABULARY, scale, dtype)
    slopes = torch.tensor([[1.0, -0.5], [0.2, 0.7]])
    wanted = exactly.in_float64(logits, targets, 0.7)
    wanted_gradient = exactly.gradients_in_float64(logits, targets, 0.7, slopes)
    for shards in (1, 2, 3, 4):
        parts = exactly.cut(logits, shards)
        exactly.assert_values(exactly.over_shards(parts, targets, 0.7, VOCABULARY), wanted, IN_TURN)
        exactly.assert_gradient(exactly.gradients(parts, targets, 0.7, VOCABULARY, slopes), wanted_gradient)


@pytest.mark.parametrize("width", [1, 31, 511, 512, 513, 4095, 4096, 4097, 4608, 9001])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_ends_of_tiles_agree_with_float64(dtype, width):
    for rows in (1, 7):  # fewer and more than programs in the grid
        logits, targets = example(rows, width, 3.0, dtype)
        slopes = torch.linspace(-1, 1, 2 * rows).view(2, rows)
        for shards in {1, min(3, width)}:
            parts = exactly.cut(logits, shards)
            found = exactly.over_shards(parts, targets, 1.0, width)
            exactly.assert_values(found, exactly.in_float64(logits, targets, 1.0), IN_TURN)
            gradient = exactly.gradients(parts, targets, 1.0, width, slopes)
            exactly.assert_gradient(gradient, exactly.gradients_in_float64(logits, targets, 1.0, slopes))


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_and_torch_give_the_same_four_numbers(built, dtype):
    """Also where rows lie apart in memory, and where every column is padding."""
    wide, targets = example(5, 6000, 3.0, dtype)
    logits = wide[:, 100:5100]
    for live in (0, 1, 4096, 4990, 5000):
        first = 17
        mine = built.kernels.stats(logits, targets, first, live, 0.5)
        wanted = vocabulary_torch.stats(logits, targets, first, live, 0.5)
        for name, a, b in zip(("top", "total", "weighted", "picked"), mine, wanted):
            torch.testing.assert_close(
                a, b, rtol=1e-5, atol=1e-6, msg=lambda m, name=name, live=live: f"{name} {live}: {m}"
            )
        slopes = [torch.linspace(-1, 1, 5) for _ in range(3)]
        ours = built.kernels.gradient(logits, targets, wanted[0], *slopes, first, live, 0.5)
        theirs = vocabulary_torch.gradient(logits, targets, wanted[0], *slopes, first, live, 0.5)
        torch.testing.assert_close(ours, theirs, rtol=2**-7 if dtype is torch.bfloat16 else 1e-4, atol=1e-5)
        assert not ours[:, live:].any()


def test_no_rows_run_no_kernel(built):
    logits, targets = torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)
    assert [part.shape for part in built.kernels.stats(logits, targets, 0, 5, 1.0)] == [(0,)] * 4
    none = torch.zeros(0)
    assert built.kernels.gradient(logits, targets, none, none, none, none, 0, 5, 1.0).shape == (0, 5)
