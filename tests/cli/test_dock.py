"""What `asyncflow dock` shows of a running job, and says of one that is not running."""

import json
import re
import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from mindspeed_asyncflow.cli import main
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS, grpo_tasks
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.errors import DeadlineExceeded
from mindspeed_asyncflow.records import PromptRow

SECRET = b"0123456789abcdef"


@pytest.fixture
def job(tmp_path):
    """A run folder whose dock of two pairs is up and holds one group of two rows."""
    servers = [DockServer(GRPO_COLUMNS, grpo_tasks(False), arena_mb=1, secret=SECRET).start() for _ in range(2)]
    addresses = [server.address for server in servers]
    with DockClient(addresses, SECRET) as client:
        client.put_groups("train", [[PromptRow(5, m, 2, np.arange(3, dtype=np.int32), "truth") for m in range(2)]])
    (tmp_path / "config.yaml").write_text("run: {}\n")
    (tmp_path / "dock.json").write_text(json.dumps({"addresses": addresses, "secret": SECRET.hex()}))
    yield tmp_path, servers
    for server in servers:
        server.close()


def test_rows_by_task_and_state_are_shown_pair_by_pair(job, capsys):
    folder, servers = job
    assert main(["dock", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert all(f"pair {i} of 2 at {server.address}" in shown for i, server in enumerate(servers))
    assert "train: 2 rows in 1 groups" in shown
    header, rollout = (line.split() for line in shown.splitlines() if line.split()[0] in ("task", "rollout"))
    states = dict(zip(header, rollout))
    assert (states["waiting"], states["ready"], states["claimed"], states["done"]) == ("0", "2", "0", "0")


def test_waits_are_shown_in_one_unit_under_what_they_measure(job, capsys):
    folder, servers = job
    addresses = [server.address for server in servers]
    with DockClient(addresses, SECRET) as client:
        (home,) = (
            n for n, pair in enumerate(client.pairs()) if pair.stats()["partitions"].get("train", {}).get("rows")
        )
    with DockClient(addresses, SECRET, home=home) as client:
        client.claim("rollout", 2, partition="train", worker="w", columns=("prompt_ids",))
        for _ in range(2):
            with pytest.raises(DeadlineExceeded):
                client.claim("rollout", 2, partition="train", worker="w", columns=("prompt_ids",), timeout_s=0.2)
    assert main(["dock", str(folder)]) == 0
    shown = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    waits = [dict(zip(head, row)) for head, row in pairwise(shown) if head[0] == "task"]
    held = next(row for row in waits if row["claims"] == "1")
    assert 0.2 < float(held["longest wait s"]) < float(held["waited s/claim"]) < 30


def test_json_has_one_object_per_pair(job, capsys):
    folder, servers = job
    assert main(["dock", str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == [server.address for server in servers]
    rows = [pair["partitions"].get("train", {"rows": 0})["rows"] for pair in shown.values()]
    assert sorted(rows) == [0, 2]


def test_watching_ends_with_the_job(job, capsys):
    folder, servers = job

    def end() -> None:
        time.sleep(0.5)
        for server in servers:
            server.close()

    thread = threading.Thread(target=end)
    thread.start()
    assert main(["dock", str(folder), "--watch", "0.1"]) == 0
    thread.join()
    shown = capsys.readouterr().out
    assert shown.rstrip().endswith("the job has ended") and "claims/s" in shown


@pytest.mark.parametrize(
    ("broken", "message", "code"),
    [
        ("no folder", "name a run folder", 2),
        ("ended", "the job has ended or has not started its dock", 2),
        ("garbage", "cannot be read", 1),
        ("gone", "has the job ended?", 1),
        ("backwards", "0 or more, got -1", 2),
    ],
)
def test_a_job_that_cannot_be_looked_at_is_explained(job, capsys, broken, message, code):
    folder, servers = job
    more = []
    if broken == "no folder":
        folder = folder / "nowhere"
    elif broken == "ended":
        (folder / "dock.json").unlink()
    elif broken == "garbage":
        (folder / "dock.json").write_text("{")
    elif broken == "gone":
        for server in servers:
            server.close()
    else:
        more = ["--watch", "-1"]
    assert main(["dock", str(folder), *more]) == code
    assert message in capsys.readouterr().err
