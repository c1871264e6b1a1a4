"""Operators with hand-written backward passes against autograd on the plain formula."""

import pytest
import torch
import torch.nn.functional as F

from mindspeed_asyncflow.platforms import kernels


def same_values_and_gradients(mine, plain, *inputs, atol=2e-6):
    inputs = [x.clone().requires_grad_() for x in inputs]
    found = []
    for function in (mine, plain):
        out = function(*inputs)
        torch.manual_seed(9)
        out.backward(torch.randn_like(out))
        found.append([out.detach(), *(x.grad.clone() for x in inputs)])
        for x in inputs:
            x.grad = None
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, atol=atol, rtol=1e-5)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_rms_norm():
    same_values_and_gradients(
        lambda x, w: kernels.rms_norm(x, w, 1e-6),
        lambda x, w: F.rms_norm(x, (16,), w, 1e-6),
        torch.randn(5, 2, 16),
        torch.rand(16) + 0.5,
    )


def test_grouped_matmul_with_a_group_that_has_no_rows():
    counts = torch.tensor([2, 0, 4])
    same_values_and_gradients(
        lambda x, w: kernels.grouped_matmul(x, w.transpose(1, 2), counts),
        lambda x, w: torch.einsum("nk,nmk->nm", x, w.repeat_interleave(counts, 0)),
        torch.randn(6, 5),
        torch.randn(3, 7, 5),
    )


def test_rms_norm_of_bf16_computes_statistics_in_fp32():
    x = (torch.randn(4, 64) * 30).bfloat16()
    weight = torch.ones(64, dtype=torch.bfloat16)
    out = kernels.rms_norm(x, weight, 1e-6)
    assert out.dtype == torch.bfloat16
    exact = F.rms_norm(x.double(), (64,), eps=1e-6)
    torch.testing.assert_close(out.double(), exact, atol=1e-2, rtol=5e-3)


def test_swiglu():
    same_values_and_gradients(
        kernels.swiglu, lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], torch.randn(7, 1, 24)
    )


def test_rotary():
    angles = torch.outer(torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0]), torch.rand(4))[:, None]

    def plain(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    same_values_and_gradients(lambda x: kernels.rotary(x, angles.cos(), angles.sin()), plain, torch.randn(5, 3, 8))


def test_rotary_of_a_strided_view():
    """megatron hands over slices of the fused query-key-value projection."""
    whole = torch.randn(5, 4, 8)
    angles = torch.rand(5, 1, 4)
    view = whole[:, 1:3]
    assert not view.is_contiguous()
    found = kernels.rotary(view, angles.cos(), angles.sin())
    assert torch.equal(found, kernels.rotary(view.contiguous(), angles.cos(), angles.sin()))
