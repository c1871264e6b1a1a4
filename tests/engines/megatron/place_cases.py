"""Functions that tests run inside trainer ranks which share their device with a rollout engine."""

import gc
import json
import os
from typing import Any

import numpy as np
import torch
from rank_cases import engine, share
from tiny_models import pack

from mindspeed_asyncflow.config.schema import RolloutConfig
from mindspeed_asyncflow.records import GenRequest, SamplingSpec

TRAIN = ("train weights", "gradients", "optimizer")
GENERATE = ("generation weights", "kv cache")
BUCKET_BYTES = 1 << 14


def rollout_engine(folder: str, dtype: str, memory: Any) -> Any:
    """Asleep: the trainer has the device first."""
    from mindspeed_asyncflow.engines.reference import ReferenceEngine

    made = ReferenceEngine(
        folder,
        RolloutConfig(engine="reference", timeout_s=60),
        dtype=dtype,
        max_model_len=64,
        seed=0,
        stop_token_ids=(),
        memory=memory,
    )
    made.pause("wait")
    made.sleep(2)
    return made


def resharder(made: Any, rollout: Any, folder: str, memory: Any, pool: Any) -> Any:
    """Every rank holds a whole replica while it generates."""
    import torch.distributed as dist

    from mindspeed_asyncflow.config.model import describe
    from mindspeed_asyncflow.config.parallel import RolloutParallel
    from mindspeed_asyncflow.reshard.in_place import InPlace
    from mindspeed_asyncflow.reshard.rollout_layout import rollout_layout

    with open(os.path.join(folder, "config.json")) as f:
        model = describe(json.load(f))
    layout = rollout_layout(model, RolloutParallel(replicas=dist.get_world_size()))
    return InPlace(
        made, rollout, layout, rank=dist.get_rank(), memory=memory, pool=pool, bucket_bytes=BUCKET_BYTES, timeout_s=60
    )


def score(rollout: Any, samples: list) -> np.ndarray:
    """The rollout's log-probs of what is trained of each sample, one after another."""
    pairs = []
    for s in samples:
        first = int(np.argmax(s["mask"])) + 1
        pairs.append((s["ids"][:first].astype(np.int32), s["ids"][first:].astype(np.int32)))
    return np.concatenate(rollout.score(pairs))


def answers(rollout: Any, samples: list, version: int) -> list[dict[str, Any]]:
    """Sampled answers as samples of their own, with the log-probs that the engine reports."""
    requests = [
        GenRequest(f"{version}-{i}", s["ids"].astype(np.int32), SamplingSpec(max_tokens=6), seed=100 * version + i)
        for i, s in enumerate(samples)
    ]
    by_id = {c.request_id: c for c in rollout.generate(requests, 60)}
    found = []
    for request in requests:
        completion = by_id[request.request_id]
        ids = np.concatenate([request.prompt_ids, completion.token_ids]).astype(np.int64)
        mask = np.zeros(len(ids), np.float32)
        mask[len(request.prompt_ids) - 1 : -1] = 1
        spans = {(span.version) for span in completion.spans}
        found.append(
            {
                "ids": ids,
                "mask": mask,
                "advantage": np.float64(0),
                "logprobs": completion.logprobs,
                "served": (spans, completion.fingerprint),
            }
        )
    return found


def trained(made: Any, samples: list) -> np.ndarray:
    """The trainer's log-probs at temperature 1 of what is trained of each sample, one after another."""
    (logprobs,) = made.logprobs([pack(samples)], temperature=1.0)
    return logprobs[np.concatenate([s["mask"] for s in samples]) != 0]


def turns(rank: int, folder: str, sizes: dict, samples: list, dtype: str) -> dict[str, Any]:
    """Train, generate, train, generate, train; the same training without generation; and the books at every turn."""
    from mindspeed_asyncflow.platforms.memory import DeviceMemory, HostPool
    from mindspeed_asyncflow.reshard.fingerprint import fingerprint_of

    def step(made: Any) -> tuple[float, float]:
        metrics = made.forward_backward(share(samples, made))
        return metrics["loss_sum"], made.optim_step(10.0).grad_norm

    with engine(rank, folder, sizes, dtype) as made:
        plain = [step(made) for _ in range(3)]
    found: dict[str, Any] = {"plain": plain, "steps": [], "turns": []}
    memory, pool = DeviceMemory(), HostPool()
    rollout = rollout_engine(folder, dtype, memory)
    try:
        with engine(rank, folder, sizes, dtype) as made:
            place = resharder(made, rollout, folder, memory, pool)
            types = {name: getattr(torch, dtype) for name, dtype, _ in rollout.weights_wanted()}
            mine = samples[made.data_parallel_rank :: made.data_parallel_size]
            for version in (1, 2):
                found["steps"].append(step(made))
                for kind, tensors in made.train_state().items():
                    memory.adopt(kind, tensors)
                turn: dict[str, Any] = {"training": memory.usage(), "trainer": trained(made, mine)}
                turn["exported"] = fingerprint_of({n: t.to(types[n]) for n, t in made.export_weights()})
                report = place.to_generation(version)
                turn |= {"generating": memory.usage(), "report": report, "rollout": score(rollout, mine)}
                gc.collect()  # what the other engine left in circles is nobody's
                turn["uncounted"] = memory.census() - memory.total()
                answered = answers(rollout, mine, version)
                turn["served"] = [a["served"] for a in answered]
                turn["sampled"] = np.concatenate([a["logprobs"] for a in answered])
                back = place.to_training()
                turn |= {"back": memory.usage(), "back report": back, "trainer again": trained(made, mine)}
                turn["sampled by trainer"] = trained(made, answered)
                found["turns"].append(turn)
            found["steps"].append(step(made))
            found["buffers made"] = pool.made
            found["storages"] = sum(len(made.train_state()[kind]) for kind in ("train weights", "optimizer"))
    finally:
        rollout.close()
    return found
