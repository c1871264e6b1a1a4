"""A replica that answers rows of a dock until it is killed: ADDRESS SECRET MODEL_FOLDER COUNT_FILE STREAM_S.

The count file holds the tokens that its engine has sampled so far, exact at every moment, also that of its death.
"""

from __future__ import annotations

import mmap
import struct
import sys
from typing import Any

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.engines.reference import ReferenceEngine
from mindspeed_asyncflow.observe.trace import Tracer
from mindspeed_asyncflow.records import SamplingSpec
from mindspeed_asyncflow.workflow.workers import RolloutWorker, RowBatch

GROUP, GROUPS, LONGEST = 4, 8, 400
PARTITION = "train"


def counted(backend: Any, path: str) -> None:
    """From now on every step of the engine writes how many tokens it has sampled in all."""
    step, ended = backend.step, [0]
    with open(path, "r+b") as file:
        count = mmap.mmap(file.fileno(), 8)

    def count_too() -> Any:
        finished = step()
        ended[0] += sum(len(answer.token_ids) for answer in finished)
        count[:8] = struct.pack("q", ended[0] + sum(backend.progress().values()))
        return finished

    backend.step = count_too


def main() -> None:
    address, secret, model_folder, count_file, stream_s = sys.argv[1:6]
    config = Config().rollout
    engine = ReferenceEngine(
        model_folder, config, dtype="float32", max_model_len=LONGEST + 16, seed=0, stop_token_ids=()
    )  # fmt: skip
    counted(engine._backend, count_file)
    dock = DockClient(address, secret, 30.0)
    worker = RolloutWorker(
        engine, dock, SamplingSpec(LONGEST), name="rollout0", seed=0, commit_groups=1, timeout_s=600.0,
        tracer=Tracer("", "bench", enabled=False), group_size=GROUP, stream_out_s=float(stream_s),
    )  # fmt: skip
    claim = dock.claim("rollout", GROUPS, partition=PARTITION, worker="rollout0", unit="groups", timeout_s=30.0)
    print("answering", flush=True)
    worker.generate(claim.claim_id, RowBatch(claim.rows, claim.group_ids, claim.members))


if __name__ == "__main__":
    main()
