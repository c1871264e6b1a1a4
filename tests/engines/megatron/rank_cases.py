"""Functions that tests run inside trainer ranks (see rank_group.py); results are plain numbers and numpy arrays."""

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tiny_models import cut, policy_gradient

from mindspeed_asyncflow.config.schema import TrainerConfig


@contextlib.contextmanager
def engine(rank: int, folder: str, sizes: dict, dtype: str = "float32", temperature: float = 0.7) -> Iterator[Any]:
    from mindspeed_asyncflow.engines.megatron import MegatronTrainEngine

    trainer = TrainerConfig(**{"lr": 1e-2, "lr_warmup_steps": 0, **sizes})
    made = MegatronTrainEngine(
        folder,
        trainer,
        dtype=dtype,
        temperature=temperature,
        loss_fn=policy_gradient,
        rank=rank,
        world_size=trainer.world_size,
        master_port=0,  # the world is there already
        seed=1,
        timeout_s=60,
        platform="cpu",
    )
    try:
        yield made
    finally:
        made.close()


def share(samples: list, made: Any, cuts: tuple[int, ...] | None = None) -> list:
    """The micro-batches of this data-parallel replica: a contiguous part of the samples."""
    n = len(samples) // made.data_parallel_size
    mine = samples[made.data_parallel_rank * n : (made.data_parallel_rank + 1) * n]
    return cut(mine, cuts or (1, 2) + ((len(mine) - 3,) if len(mine) > 3 else (1,) * (len(mine) - 3)))


def gradients(made: Any) -> dict[str, np.ndarray]:
    """All gradients, reduced and under their Hugging Face names."""
    from megatron.core.distributed import finalize_model_grads

    from mindspeed_asyncflow.engines.megatron.export import export_tensors, gradient, held_weights, is_correction

    finalize_model_grads(made.models, None)
    trained = [entry for entry in made.plan if entry.trained]
    held = [held_weights(chunk) for chunk in made.chunks]
    grads = [{name: gradient(w) for name, w in chunk.items() if not is_correction(name)} for chunk in held]
    return {name: t.numpy() for name, t in export_tensors(made.bridge, grads, trained)}


def agree(rank: int, folder: str, sizes: dict, samples: list, dtype: str = "float32") -> dict[str, Any]:
    """Log-probs, metrics and gradients of one accumulation, then one optimizer step and the weights after it."""
    with engine(rank, folder, sizes, dtype) as made:
        batches = share(samples, made)
        scored = made.logprobs(batches)
        metrics = made.forward_backward(batches)
        result = {
            "replica": made.data_parallel_rank,
            "logprobs": np.concatenate(scored),
            "metrics": metrics,
            "grads": None if sizes.get("distributed_optimizer") else gradients(made),
        }
        made.step.clear()
        made.forward_backward(batches)
        report = made.optim_step(10.0)
        result |= {"norm": report.grad_norm, "applied": report.applied}
        result["weights"] = {name: t.float().numpy() for name, t in made.export_weights()}
        return result


def cuts(rank: int, folder: str, sizes: dict, samples: list, ways: list) -> list[dict[str, np.ndarray]]:
    """Gradients for each way to cut the samples: a list of calls, each a tuple of micro-batch sizes."""
    found = []
    with engine(rank, folder, sizes) as made:
        for calls in ways:
            first = 0
            for call in calls:
                made.forward_backward(cut(samples[first : first + sum(call)], call))
                first += sum(call)
            found.append(gradients(made))
            made.step.clear()
    return found


def scored_in_cuts(rank: int, folder: str, samples: list, ways: list) -> list[np.ndarray]:
    """Log-probabilities for each way to cut the samples into micro-batches."""
    with engine(rank, folder, {}) as made:
        return [np.concatenate(made.logprobs(cut(samples, way))) for way in ways]


def chunked_head(rank: int, folder: str, sizes: dict, samples: list) -> list[dict[str, np.ndarray]]:
    """Gradients with the output layer computed in one piece and three rows at a time."""
    from mindspeed_asyncflow.engines.megatron import model

    whole, found = model.LOGITS_PER_CHUNK, []
    with engine(rank, folder, sizes) as made:
        for limit in (whole, 3 * made.chunks[-1].output_layer.output_size_per_partition):
            model.LOGITS_PER_CHUNK = limit
            made.forward_backward(cut(samples, (8,)))
            found.append(gradients(made))
            made.step.clear()
    model.LOGITS_PER_CHUNK = whole
    return found


def nothing_trained(rank: int, folder: str, samples: list) -> dict[str, Any]:
    """A batch of which every sample is masked out, and its optimizer step."""
    samples = [{**s, "mask": np.zeros_like(s["mask"])} for s in samples]
    with engine(rank, folder, {}) as made:
        before = {name: t.numpy() for name, t in made.export_weights()}
        metrics = made.forward_backward(cut(samples, (8,)))
        grads = gradients(made)
        report = made.optim_step(metrics["tokens_count"])
        after = {name: t.numpy() for name, t in made.export_weights()}
    return {
        "metrics": metrics,
        "zero": all(not g.any() for g in grads.values()),
        "applied": report.applied,
        "unchanged": all(np.array_equal(before[n], after[n]) for n in before),
    }


def bad_gradient(
    rank: int, folder: str, sizes: dict, samples: list, bad_rank: int, value: float, name: str
) -> dict[str, Any]:
    """The last element of parameter `name` of `bad_rank` gets the gradient `value`."""
    with engine(rank, folder, sizes) as made:
        before = {name: t.numpy() for name, t in made.export_weights()}
        metrics = made.forward_backward(share(samples, made))
        if rank == bad_rank:
            dict(made.chunks[0].named_parameters())[name].main_grad.view(-1)[-1] = value
        skipped = made.optim_step(10.0)
        after = {name: t.numpy() for name, t in made.export_weights()}
        made.forward_backward(share(samples, made))
        applied = made.optim_step(10.0)
        return {
            "applied": (skipped.applied, applied.applied),
            "bad": skipped.bad_tensor,
            "norm_is_nan": math.isnan(skipped.grad_norm),
            "lr": (skipped.lr, applied.lr),
            "unchanged": all(np.array_equal(before[n], after[n]) for n in before),
            "finite_after": all(np.isfinite(t.numpy()).all() for _, t in made.export_weights()),
            "metrics": metrics,
        }


def names(rank: int, folder: str, sizes: dict) -> dict[str, list[str]]:
    with engine(rank, folder, sizes) as made:
        return {"exported": [name for name, _ in made.export_weights()], "shards": list(made.shards())}


def qkv_rows(rank: int, folder: str, sizes: dict) -> dict[str, Any]:
    """What the layout says of layer 1's fused matrix, and whether each segment's rows are those of the saved model."""
    from safetensors.torch import load_file

    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    saved = load_file(os.path.join(folder, "model.safetensors"))
    with engine(rank, folder, sizes) as made:
        shard = made.shards()[name]
        param = next(p for p in made.layout.ranks[rank] if p.name == name)
        return {
            "rows": len(shard),
            "names": {s.name.split(".")[-2]: s.box.rows for s in param.segments},
            "equal": all(
                torch.equal(shard[s.row : s.row + s.box.rows], saved[s.name][s.box.r0 : s.box.r1])
                for s in param.segments
            ),
        }


def padded_vocabulary(rank: int, folder: str, samples: list) -> dict[str, Any]:
    """Log-probs before and after the padding row of the output layer becomes 50 everywhere, its export, and log-probs
    with all other rows 0."""
    from safetensors.torch import load_file

    with engine(rank, folder, {"tensor_parallel": 2}) as made:
        shards, batches = made.shards(), cut(samples, (8,))
        found: dict[str, Any] = {"before": made.logprobs(batches)[0]}
        head = shards.get("output_layer.weight", shards["embedding.word_embeddings.weight"])
        if rank == 1:
            head[-1] = 50.0
        found["padding at 50"] = made.logprobs(batches)[0]
        exported = dict(made.export_weights())
        name = "lm_head.weight" if "output_layer.weight" in shards else "model.embed_tokens.weight"
        found["exported"] = tuple(exported[name].shape)
        found["equal"] = torch.equal(exported[name], load_file(os.path.join(folder, "model.safetensors"))[name])
        head[: -1 if rank == 1 else None] = 0.0
        found["uniform"] = made.logprobs(batches, temperature=1.0)[0]
        return found | {"rows": len(head)}


def tensor_parallel_logprobs(rank: int, logits: np.ndarray, targets: np.ndarray, size: int) -> dict[str, np.ndarray]:
    """Each rank holds half of the (padded) vocabulary; gradient of sum(log-prob * (1, 2, 3, ...))."""
    import torch.distributed as dist

    from mindspeed_asyncflow.engines.megatron.logprobs import token_logprobs

    half = logits.shape[1] // 2
    mine = torch.from_numpy(logits[:, rank * half : (rank + 1) * half]).requires_grad_()
    logprob, entropy = token_logprobs(
        mine,
        torch.from_numpy(targets),
        temperature=0.7,
        vocab_size=size,
        vocab_start=rank * half,
        group=dist.group.WORLD,
    )
    (logprob * torch.arange(1.0, len(targets) + 1)).sum().backward()
    return {"logprob": logprob.detach().numpy(), "entropy": entropy.numpy(), "grad": mine.grad.numpy()}
