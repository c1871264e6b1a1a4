"""Trainer ranks as processes: `python ranks.py JOB.json RANK`; rank 0 writes what was found beside the job."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from emulated import HERE, ROOT, environment

TINY_MODELS = ROOT / "tests" / "engines" / "megatron"


def run_ranks(folder: Path, job: dict[str, Any], *, emulated: bool, timeout_s: float = 400) -> dict[str, Any]:
    """Run a job (see `work`) on as many ranks as its sizes ask for."""
    folder.mkdir(parents=True, exist_ok=True)
    world = 1
    for axis in ("tensor", "pipeline", "data", "context"):
        world *= job["sizes"].get(f"{axis}_parallel", 1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    platform = "npu" if emulated else "cpu"
    (folder / "job.json").write_text(json.dumps({**job, "world": world, "port": port, "platform": platform}))
    command = [sys.executable, str(HERE / "ranks.py"), str(folder / "job.json")]
    environ = environment(emulated, devices=world)
    started = []
    for rank in range(world):
        log = (folder / f"rank{rank}.log").open("w")
        started.append(subprocess.Popen([*command, str(rank)], env=environ, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout_s) for process in started]
    finally:
        for process in started:
            process.kill()
    logs = "".join((folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(world))
    assert codes == [0] * world, logs
    return json.loads((folder / "found.json").read_text())


def loss(logprobs: Any, entropy: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    import torch

    advantages, mask = (torch.from_numpy(array).to(logprobs.device) for array in (batch.advantages, batch.loss_mask))
    total = -(logprobs * advantages * mask).sum()
    return total, {"loss_sum": total.detach(), "entropy_sum": (entropy * mask).sum(), "tokens_count": mask.sum()}


def work(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Load `load` if named, take `steps`, save to `save` if named; gives losses, norms, weights, operators called."""
    sys.path.insert(0, str(TINY_MODELS))
    from tiny_models import cut, make_samples

    from mindspeed_asyncflow.config.schema import TrainerConfig
    from mindspeed_asyncflow.engines.megatron import bootstrap

    bootstrap.bootstrap(job["platform"])
    from mindspeed_asyncflow.engines.megatron.engine import MegatronTrainEngine

    engine = MegatronTrainEngine(
        job["model"],
        TrainerConfig(**{"lr": 1e-3, "lr_warmup_steps": 0, **job["sizes"]}),
        dtype=job.get("dtype", "float32"),
        loss_fn=loss,
        rank=rank,
        world_size=job["world"],
        master_port=job["port"],
        seed=1,
        timeout_s=200,
        platform=job["platform"],
    )
    if job.get("load"):
        engine.load_checkpoint(job["load"])
    samples = make_samples()
    count = len(samples) // engine.data_parallel_size
    mine = samples[engine.data_parallel_rank * count :][:count]
    batches = cut(mine, (len(mine) // 2, len(mine) - len(mine) // 2))
    losses, norms = [], []
    for _ in range(job["steps"]):
        losses.append(engine.forward_backward(batches)["loss_sum"])
        norms.append(engine.optim_step(10.0).grad_norm)
    if job.get("save"):
        engine.begin_save(job["save"])
        engine.finish_save()
    weights = {name: tensor.float().flatten().tolist()[:64] for name, tensor in engine.export_weights()}
    operators = dict(sys.modules["torch_npu"].calls) if job["platform"] == "npu" else {}
    device = str(next(iter(engine.shards().values())).device)
    return {"losses": losses, "norms": norms, "weights": weights, "operators": operators, "device": device}


if __name__ == "__main__":
    described, number = Path(sys.argv[1]), int(sys.argv[2])
    found = work(json.loads(described.read_text()), number)
    if number == 0:
        (described.parent / "found.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # groups of the device backend have no orderly end here
