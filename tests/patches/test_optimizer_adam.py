"""FusedAdam against torch's AdamW, and its state layout."""

import pytest
import torch

from mindspeed_asyncflow.patches.optimizer_adam import FusedAdam


@pytest.mark.parametrize(("ours", "torch_class"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_steps_equal_torch(ours, torch_class):
    torch.manual_seed(0)
    start = [torch.randn(4, 3), torch.randn(5)]
    found = []
    for make in (
        lambda p: FusedAdam(p, lr=0.1, betas=(0.8, 0.95), weight_decay=0.2, adam_w_mode=ours),
        lambda p: torch_class(p, lr=0.1, betas=(0.8, 0.95), weight_decay=0.2),
    ):
        params = [torch.nn.Parameter(t.clone()) for t in start]
        optimizer = make(params)
        for k in range(4):
            for p in params:
                p.grad = torch.sin(p.detach() * (k + 1))
            optimizer.step()
        found.append(params)
    for mine, theirs in zip(*found):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


def test_the_step_is_counted_in_the_group():
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([param])
    for _ in range(3):
        param.grad = torch.ones(2)
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 3
    assert set(optimizer.state[param]) == {"exp_avg", "exp_avg_sq"}
