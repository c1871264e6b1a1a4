"""What one of two ranks does that train and generate in turn, on its CPU and then on the emulated torch_npu."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from mindspeed_asyncflow.config.model import describe
from mindspeed_asyncflow.config.parallel import RolloutParallel, TrainParallel
from mindspeed_asyncflow.config.schema import RolloutConfig
from mindspeed_asyncflow.engines.reference import ReferenceEngine
from mindspeed_asyncflow.platforms.base import current
from mindspeed_asyncflow.platforms.memory import DeviceMemory, HostPool
from mindspeed_asyncflow.reshard.in_place import InPlace
from mindspeed_asyncflow.reshard.rollout_layout import rollout_layout
from mindspeed_asyncflow.reshard.train_layout import train_layout
from tests.ascend.reshard.stand_in import noted
from tests.engines.bench import MAX_LEN, ask, prompt
from tests.reshard.ranks import World
from tests.reshard.stand_ins import StandInTrainer

MODULES = ("tests.ascend.reshard.engine_ranks", "transformers.models.qwen2.modeling_qwen2")
EMULATION = str(Path(__file__).parents[1] / "emulation" / "library")
TIMEOUT_S = 60.0


def turns(world: World, name: str, folder: str) -> dict[str, Any]:
    """Three turns on platform `name`; each time the weights have changed, and the engine answers with the new ones."""
    if name == "npu":
        sys.path.insert(0, EMULATION)
        import torch_npu  # noqa: F401  from here on this process is one with an NPU
    platform, rank = current(name), world.rank
    model = describe(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))
    source = train_layout(model, TrainParallel(tensor=world.count))
    memory = DeviceMemory(platform)
    engine = ReferenceEngine(
        folder, RolloutConfig(max_running=4, timeout_s=60.0), dtype="float32", max_model_len=MAX_LEN, seed=0,
        stop_token_ids=(), memory=memory,
    )  # fmt: skip
    engine.pause("abort")
    engine.sleep(2)
    generator = torch.Generator().manual_seed(rank)
    shards = {p.name: torch.randn(p.shape, generator=generator) * 0.1 for p in source.ranks[rank]}
    trainer = StandInTrainer(memory, source, shards, torch.float32)
    seen: dict[str, Any] = {"device": str(trainer.weights.device), "turns": [], "census": []}
    with noted(platform) as calls:
        both = InPlace(
            trainer, engine, rollout_layout(model, RolloutParallel(replicas=world.count)), rank=rank, memory=memory,
            pool=HostPool(platform), bucket_bytes=1 << 16, timeout_s=TIMEOUT_S,
        )  # fmt: skip
        for version in range(3):
            report = both.to_generation(version)
            requests = [ask(f"r{i}", prompt(*range(3 + 4 * i)), 6, seed=i) for i in range(2)]
            answers = sorted(engine.generate(requests, TIMEOUT_S), key=lambda answer: answer.request_id)
            back = both.to_training()
            seen["turns"].append({
                "fingerprint": report.fingerprint, "generating": report.usage_after, "training": back.usage_after,
                "tokens": [answer.token_ids.tolist() for answer in answers],
                "logprobs": [answer.logprobs.tolist() for answer in answers],
                "weights": float(trainer.weights.double().sum()),
                "sent": report.transfer and report.transfer.sent_bytes,
            })  # fmt: skip
            seen["census"].append(memory.census())
            trainer.weights.mul_(1.05)  # an optimizer step
    seen["calls"] = calls.by_thread
    engine.close()
    return seen
