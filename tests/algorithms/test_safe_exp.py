import torch

from mindspeed_asyncflow.algorithms.safe_exp import safe_exp


def test_it_is_exp_below_the_cap_and_its_tangent_beyond():
    x = torch.tensor([-800.0, 0.0, 3.0, 5.0, 7.0], dtype=torch.float64, requires_grad=True)
    y = safe_exp(x, 5.0)
    y.sum().backward()
    top = torch.tensor(5.0, dtype=torch.float64).exp()
    torch.testing.assert_close(y[:4], x[:4].exp(), rtol=1e-12, atol=0)
    torch.testing.assert_close(y[4], 3 * top, rtol=1e-12, atol=0)
    torch.testing.assert_close(x.grad[1:3], x[1:3].exp(), rtol=1e-12, atol=0)
    torch.testing.assert_close(x.grad[4], top, rtol=1e-12, atol=0)
