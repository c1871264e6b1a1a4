"""The parts of `resilience.py`, each in processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from our_side import PASSIVE, ROOT, run_command
from resilience_replica import GROUP, GROUPS, PARTITION

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.data.builtin_models import ensure_model
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS, grpo_tasks
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.errors import DockError
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.records import PromptRow

CONFIG = ROOT / "configs" / "qwen_tiny_cpu.yaml"
SAME = ("reward/mean", "actor/grad_norm", "actor/lr", "staleness/worst_max")  # compared at every step
COMMAND = [sys.executable, "-m", "mindspeed_asyncflow"]


def with_settings(settings: Mapping[str, Any]) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def chaos(out: Path, kills: int, seed: int, settings: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """The last line of `asyncflow chaos`."""
    log = out / "chaos.log"
    command = [*COMMAND, "chaos", str(CONFIG), "--kills", str(kills), "--seed", str(seed)]
    command += ["--run-folder", str(out / "chaos"), *with_settings(settings)]
    with contextlib.suppress(RuntimeError):  # exit status 1: something is not 0, which the line says
        run_command(command, log, PASSIVE, timeout_s)
    last = log.read_text(encoding="utf-8").splitlines()[-1]
    if not last.startswith("{"):
        raise RuntimeError(f"chaos did not come to its end; see {log}")
    return json.loads(last)


# ---- resumes ---------------------------------------------------------------------------------------------------------


def uninterrupted(out: Path, name: str, settings: Mapping[str, Any], steps: int, timeout_s: float) -> Path:
    """A whole run with a checkpoint after every step; its folder."""
    folder = out / name
    kept = {"trainer.steps": steps, "trainer.save_every": 1, "checkpoint.keep": steps + 1}
    command = [*COMMAND, "train", str(CONFIG), "--run-folder", str(folder), *with_settings({**settings, **kept})]
    run_command(command, out / f"{name}.log", PASSIVE, timeout_s)
    return folder


def resumed(
    out: Path, base: Path, cut: int, settings: Mapping[str, Any], steps: int, timeout_s: float
) -> dict[str, bool]:
    """Goes on from the checkpoint of step `cut` in a new folder; what is bit for bit as in `base`."""
    folder = out / f"{base.name}_from_{cut}"
    command = [*COMMAND, "train", str(CONFIG), "--run-folder", str(folder)]
    command += ["--resume", str(base / "checkpoints" / f"step_{cut:06d}")]
    command += with_settings({**settings, "trainer.steps": steps})
    run_command(command, out / f"{folder.name}.log", PASSIVE, timeout_s)
    weights = [(f / "hf" / "model.safetensors").read_bytes() for f in (base, folder)]
    theirs, mine = (_metrics(f) for f in (base, folder))
    metrics = all(mine[s].get(n) == theirs[s].get(n) for s in range(cut, steps) for n in SAME)
    return {"weights": weights[0] == weights[1], "metrics": metrics}


def _metrics(folder: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line for line in lines}


def ledger_share(folder: Path) -> float:
    """Processor seconds of the ledger over seconds of all steps."""
    with contextlib.closing(sqlite3.connect(RunFolder(folder).ledger)) as db:
        ((cost_s,),) = db.execute("SELECT value FROM fact WHERE key = 'cost_s'").fetchall()
    return float(cost_s) / sum(line["timing_s/step"] for line in _metrics(folder).values())


# ---- tokens in flight ------------------------------------------------------------------------------------------------


def tokens_kept(tries: int, seed: int, stream_s: float) -> list[tuple[int, int]]:
    """(sampled, in the dock) tokens at each of `tries` kills of a replica at a random moment of its answers."""
    config = Config()
    model = ensure_model(config.model, config.data, config.run.seed, lambda words: None)
    rng = random.Random(seed)
    return [_kill_once(str(model), stream_s, rng.uniform(1.0, 4.0) * stream_s) for _ in range(tries)]


def _kill_once(model: str, stream_s: float, after_s: float) -> tuple[int, int]:
    with (
        tempfile.NamedTemporaryFile(dir="/dev/shm") as count,
        DockServer(GRPO_COLUMNS, grpo_tasks(False), arena_mb=16, lease_s=600.0, secret="bench") as server,
        DockClient(server.address, "bench", 30.0) as dock,
    ):
        count.write(bytes(8))
        count.flush()
        ids = np.array([5, 6], np.int32)
        rows = dock.put_groups(
            PARTITION, [[PromptRow(g, m, GROUP, ids, "") for m in range(GROUP)] for g in range(GROUPS)]
        )
        words = [sys.executable, str(ROOT / "benchmarks" / "resilience_replica.py"), server.address, "bench", model]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        replica = subprocess.Popen([*words, count.name, str(stream_s)], stdout=subprocess.PIPE, env=environment)
        try:
            assert replica.stdout is not None and replica.stdout.readline(), "the replica did not start"
            time.sleep(after_s)
            replica.send_signal(signal.SIGKILL)
        finally:
            replica.kill()
            replica.wait()
        (sampled,) = struct.unpack("q", Path(count.name).read_bytes())
        return sampled, sum(_tokens_there(dock, row) for row in np.concatenate(rows))


def _tokens_there(dock: DockClient, row: int) -> int:
    """Of a complete answer, or of the part of one that the dock has."""
    for column in ("response_ids", "partial_ids"):
        with contextlib.suppress(DockError):  # nothing was written there
            return len(dock.read(np.array([row]), [column])[column][0])
    return 0


# ---- the pause of a checkpoint ---------------------------------------------------------------------------------------


def pause_over_copy(out: Path, times: int) -> float:
    """Median pause of a checkpoint over the median of a plain copy of the same bytes, in one trainer rank."""
    sys.path.insert(0, str(ROOT / "tests" / "engines" / "megatron"))  # the rank is that of the tests
    import checkpoint_cases
    from rank_group import RankGroup
    from tiny_models import make_model, make_samples

    sizes = {"hidden_size": 384, "intermediate_size": 1536, "vocab_size": 4096, "num_hidden_layers": 4}
    make_model("qwen2", str(out / "pause_model"), **sizes)
    group = RankGroup(1)
    try:
        (found,) = group.run(
            checkpoint_cases.pause_over_copy, timeout_s=600, folder=str(out / "pause_model"), samples=make_samples(),
            out=str(out / "pause"), times=times + 1,
        )  # fmt: skip
    finally:
        group.close()
    pauses, copies = found["pauses"][1:], found["copies"][1:]  # the first save makes the host buffers
    return statistics.median(pauses) / statistics.median(copies)


def shares(pairs: Sequence[tuple[int, int]]) -> float:
    """Tokens in the dock over tokens sampled, all tries together."""
    return sum(kept for _, kept in pairs) / max(1, sum(sampled for sampled, _ in pairs))
