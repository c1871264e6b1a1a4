"""The critic against transformers in float64, over every way to cut it, and what all of its ranks do together."""

import critic_cases
import numpy as np
import pytest
import torch
from test_engine import DP2, PP2, SP2, TP2, distance, world_of
from tiny_models import make_model, make_samples, name_of, split_experts

pytestmark = pytest.mark.slow

CASES = [
    ("qwen2", {}),
    ("qwen3", TP2),
    ("qwen2", SP2),
    ("qwen3_moe", SP2),
    ("qwen2", PP2),
    ("qwen3", {**PP2, "virtual_pipeline": 2}),
    ("qwen2", DP2),
    ("qwen3", {**DP2, "distributed_optimizer": True}),
    ("qwen3", {"context_parallel": 2}),
    ("qwen3_moe", {**DP2, "expert_parallel": 2}),
    ("deepseek_v3", {}),
    ("qwen2", {**SP2, **PP2}),
    ("qwen2", {**SP2, "context_parallel": 2}),
]
CASES.sort(key=lambda case: world_of(case[1]))
BIAS = 0.2
ONE, TWO = ((1, 2, 5),), ((3, 1), (4, 0))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    found = {}
    for kind in ("qwen2", "qwen3", "qwen3_moe", "deepseek_v3"):
        folder = str(tmp_path_factory.mktemp(kind))
        found[kind] = (folder, make_model(kind, folder))
    return found


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(11)
    made = make_samples()
    for sample in made:
        sample["values"], sample["returns"] = rng.normal(size=(2, len(sample["ids"]))) * sample["mask"]
    return made


@pytest.fixture(scope="module")
def head():
    return np.random.default_rng(12).normal(0, 0.1, 64).astype(np.float32)


@pytest.fixture(scope="module")
def references(models, samples, head):
    return {kind: reference(model, samples, head) for kind, (_, model) in models.items()}


def reference(model, samples, head):
    """One sample at a time, in float64 (experts: torch has none): values, the loss written out, and its gradients."""
    kind = torch.float32 if hasattr(model.config, "num_experts_per_tok") else torch.float64
    model = model.to(kind)
    model.zero_grad()
    weight = torch.from_numpy(head).to(kind).requires_grad_()
    bias = torch.tensor(BIAS, dtype=kind, requires_grad=True)
    values, loss = [], torch.zeros((), dtype=kind)
    for sample in samples:
        hidden = model.base_model(torch.from_numpy(sample["ids"])[None]).last_hidden_state[0]
        value = hidden @ weight + bias
        mask = torch.from_numpy(sample["mask"]) > 0
        before, returns = (torch.from_numpy(sample[n].astype(np.float32)).to(kind) for n in ("values", "returns"))
        near = torch.minimum(torch.maximum(value, before - critic_cases.CLIP), before + critic_cases.CLIP)
        errors = torch.maximum((value - returns) ** 2, (near - returns) ** 2)
        loss = loss + errors[mask].sum() / 2
        values.append((value * mask).detach().numpy())
    loss.backward()
    grads = {n: p.grad.float().numpy() for n, p in model.named_parameters() if p.grad is not None}
    grads = split_experts(grads) | {"value_head.weight": weight.grad[None].numpy()}
    grads["value_head.bias"] = bias.grad[None].numpy()
    model.float()
    return {
        "values": np.concatenate(values),
        "loss": loss.item(),
        "grads": grads,
        "norm": float(np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))),
    }


def ways_of(sizes):
    return TWO if sizes.get("data_parallel") else ONE


@pytest.mark.parametrize(("kind", "sizes"), CASES, ids=map(name_of, CASES))
def test_critic_agrees_with_transformers(groups, models, references, samples, head, kind, sizes):
    """B76: the replicas' micro-batches have different sizes, and one of them has nothing to train."""
    expected, model = references[kind], models[kind][1]
    ranks = groups.of(world_of(sizes)).run(
        critic_cases.agree, folder=models[kind][0], sizes=sizes, samples=samples, ways=ways_of(sizes), weight=head,
        bias=BIAS,
    )  # fmt: skip
    by_replica = {r["replica"]: r for r in ranks}
    replicas = [by_replica[i] for i in sorted(by_replica)]
    values = np.concatenate([r["values"] for r in replicas])
    assert np.abs(values - expected["values"]).max() < 2e-5
    assert sum(r["metrics"]["critic/vf_loss_sum"] for r in replicas) == pytest.approx(expected["loss"], rel=1e-5)
    for r in ranks:
        assert r["zero"], "an untrained head values every state at 0"
        assert r["metrics"] == by_replica[r["replica"]]["metrics"]
        assert r["norm"] == pytest.approx(expected["norm"] / 10.0, rel=1e-5) and r["applied"] and r["moved"]
        assert sum("embedding" in n for n in r["names"]) <= 1 and not any("lm_head" in n for n in r["names"])
        if r["grads"] is not None:
            assert r["grads"].keys() == expected["grads"].keys()
            worst = max((distance(r["grads"][n], g), n) for n, g in expected["grads"].items())
            assert worst[0] < 2e-5, worst
    heads = sum("output_layer.weight" in r["names"] for r in ranks)
    assert heads == len(ranks) // sizes.get("pipeline_parallel", 1)
    assert "lm_head.weight" in model.state_dict()


@pytest.mark.parametrize("sizes", [SP2, {**DP2, "distributed_optimizer": True}], ids=["tensor", "sharded"])
def test_bfloat16_stays_near_float32_and_learns(groups, models, references, samples, head, sizes):
    ranks = groups.of(2).run(
        critic_cases.agree, folder=models["qwen3"][0], sizes=sizes, samples=samples, ways=ways_of(sizes), weight=head,
        bias=BIAS, dtype="bfloat16",
    )  # fmt: skip
    assert ranks[0]["norm"] == pytest.approx(references["qwen3"]["norm"] / 10.0, rel=0.1)
    assert all(r["applied"] and r["moved"] for r in ranks)


@pytest.mark.parametrize("name", ["decoder.layers.1.self_attention.linear_proj.weight", "output_layer.weight"])
@pytest.mark.parametrize("sizes", [DP2, {**DP2, "distributed_optimizer": True}], ids=["plain", "sharded"])
def test_bad_gradient_on_one_rank_is_skipped_by_all_and_named(groups, models, samples, sizes, name):
    """B26"""
    wanted = {"output_layer.weight": "value_head.weight"}.get(name, "model.layers.1.self_attn.o_proj.weight")
    for found in groups.of(2).run(
        critic_cases.bad_gradient, folder=models["qwen2"][0], sizes=sizes, samples=samples, ways=TWO, name=name
    ):
        assert found == [(False, wanted, True)] * 2 + [(True, "", False)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_constant_returns_are_learnt(groups, models, samples, dtype):
    same = [{**s, "returns": np.full(len(s["ids"]), 0.75)} for s in samples]
    (errors,) = groups.of(1).run(
        critic_cases.learn, folder=models["qwen2"][0], sizes={}, samples=same, steps=25, dtype=dtype
    )
    assert errors[0] == pytest.approx(0.75**2) and min(errors) < 0.01


@pytest.mark.parametrize(
    "sizes", [{}, {**DP2, "distributed_optimizer": True}, PP2, SP2], ids=["one", "sharded", "pipeline", "tensor"]
)
def test_checkpoint_continues_exactly(groups, models, samples, tmp_path, sizes):
    for r in groups.of(world_of(sizes)).run(
        critic_cases.resume, folder=models["qwen2"][0], sizes=sizes, samples=samples, ways=ways_of(sizes),
        out=str(tmp_path),
    ):  # fmt: skip
        assert r == {"equal": True}
