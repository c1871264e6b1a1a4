"""W&B, SwanLab and MLflow themselves, offline and all at once, through the helper processes of a run.

They live in an environment of their own, which `bash scripts/trackers.sh` makes; without it these tests are skipped.
"""

import json
import subprocess
from pathlib import Path

import pytest

from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.observe.log import close_logging, setup_logging
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.observe.trackers import open_trackers
from mindspeed_asyncflow.observe.trackers.remote import read_ids
from mindspeed_asyncflow.observe.writers import MetricsWriter

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".cache" / "trackers" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ROOT / ".cache" / "trackers" / "stamp").exists(),
        reason="no W&B, SwanLab and MLflow: bash scripts/trackers.sh",
    ),
]
SERVICES = ("wandb", "swanlab", "mlflow")
# Reads what W&B keeps offline: records in blocks of 32 KiB as LevelDB's logs have them, each a protobuf message.
READ = """
import glob, json, struct, sys
from wandb.proto import wandb_internal_pb2

def records(data):
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)  # kind: whole, first, middle, last part
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""

found = []
for file in sorted(glob.glob(sys.argv[1] + "/wandb/offline-run-*/run-*.wandb")):
    for data in records(open(file, "rb").read()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            found.append([items["step"], items["reward/mean"]])
print(json.dumps(found))
"""


def track(folder, config, steps):
    writer = MetricsWriter(folder, open_trackers(config, folder))
    for step in steps:
        writer.write(step, {"reward/mean": step / 4, "actor/lr": 1e-4, "actor/grad_norm": float("nan")})
    writer.close()


def test_all_at_once_offline_and_continued_under_the_same_ids(tmp_path):
    folder = RunFolder.create(tmp_path, "t", "")
    chosen = {"trackers": [*SERVICES, "tensorboard"], "trackers_python": str(PYTHON), "trackers_wait_s": 240}
    config = parse_config(json.dumps({"observe": chosen}))
    warnings: list[str] = []
    setup_logging("driver", None, write=warnings.append, level="WARNING")
    try:
        track(folder, config, range(3))
        ids = read_ids(folder.trackers)
        assert set(ids) == set(SERVICES)
        track(folder, config, range(2, 4))  # went back to a checkpoint after step 1
    finally:
        close_logging()
    assert warnings == []
    assert read_ids(folder.trackers) == ids

    again = [(0, 0.0), (1, 0.25), (2, 0.5), (2, 0.5), (3, 0.75)]
    (run,) = folder.path.glob(f"mlruns/*/{ids['mlflow']}")
    rows = [line.split() for line in (run / "metrics/reward/mean").read_text().splitlines()]
    assert [(int(step), float(value)) for _, value, step in rows] == again
    assert (run / "params/workflow.max_lag").read_text() == "1"
    assert not (run / "metrics/actor/grad_norm").exists()

    done = subprocess.run([PYTHON, "-c", READ, folder.path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [tuple(row) for row in json.loads(done.stdout)] == again
    assert len({p.name.rpartition("-")[2] for p in folder.path.glob("wandb/offline-run-*")}) == 1  # one id

    logs = folder.path.glob(f"swanlab/run-*-{ids['swanlab']}/logs/*/*.log")
    points = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    assert sorted((p["index"], p["data"]) for p in points if p["data"] != 1e-4) == again
    assert list(folder.tensorboard.iterdir())


@pytest.mark.nightly
def test_online_without_a_login_is_said_once_and_kept_here(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "SWANLAB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    folder = RunFolder.create(tmp_path, "t", "")
    chosen = {"trackers": SERVICES, "trackers_python": str(PYTHON), "trackers_wait_s": 240, "online": True}
    warnings: list[str] = []
    setup_logging("driver", None, write=warnings.append, level="WARNING")
    try:
        track(folder, parse_config(json.dumps({"observe": chosen})), range(2))
    finally:
        close_logging()
    assert sorted(warning.split()[1] for warning in warnings) == ["mlflow:", "swanlab:", "wandb:"]
    assert all("written into the run folder, since" in warning for warning in warnings)
    for place in ("mlruns/*/*/metrics/reward/mean", "wandb/offline-run-*/run-*.wandb", "swanlab/run-*/logs/*/*.log"):
        assert list(folder.path.glob(place)), place
