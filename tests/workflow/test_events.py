"""Events as lines of a file."""

import json

import numpy as np

from mindspeed_asyncflow.records import OptimReport
from mindspeed_asyncflow.workflow.events import EventLog


def test_events_wait_in_memory_until_a_version_is_finished(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path, clock=lambda: 1.5)
    log.note("issued", batch=np.int64(3), groups=np.arange(2))
    assert path.read_text() == ""
    log.note("finished", version=1, tokens=2, samples=1, optim=OptimReport(False, float("nan"), 0.1, "w"))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"t": 1.5, "kind": "issued", "batch": 3, "groups": [0, 1]},
        {"t": 1.5, "kind": "finished", "version": 1, "tokens": 2, "samples": 1, "applied": False, "grad_norm": "nan",
         "lr": 0.1},
    ]  # fmt: skip
    log.close()
