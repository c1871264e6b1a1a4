"""The ledger as it is written: in batches, beside the run, and again after a crash."""

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_asyncflow.errors import LedgerError
from mindspeed_asyncflow.observe.ledger import Ledger, inherit


def rows(path, query):
    with sqlite3.connect(path) as db:
        return db.execute(query).fetchall()


def issue(ledger, group):
    ledger.note("issued", batch=0, groups=[group], prompts=[[0, group]], replaces=[])


def test_settle_returns_when_all_notes_are_on_disk_and_the_position_counts_them(tmp_path):
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    for group in range(5):
        issue(ledger, group)
    ledger.settle()
    assert rows(path, "SELECT COUNT(*), MAX(seq) FROM issued") == [(5, 5)] and ledger.position == 5
    ledger.close()


def test_a_ledger_goes_on_where_the_one_before_ended(tmp_path):
    path = tmp_path / "ledger.sqlite"
    for group in (0, 1):
        ledger = Ledger(path)
        issue(ledger, group)
        ledger.close()
    assert rows(path, "SELECT seq, grp FROM issued") == [(1, 0), (2, 1)]


def test_numpy_scalars_are_stored_as_numbers(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.note("dropped", group=np.int64(7), samples=np.int32(2), reason="stale")
    ledger.close()
    assert rows(tmp_path / "ledger.sqlite", "SELECT grp, samples FROM dropped") == [(7, 2)]


def test_what_was_settled_survives_a_killed_process(tmp_path):
    path = tmp_path / "ledger.sqlite"
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom mindspeed_asyncflow.observe.ledger import Ledger\n"
        "ledger = Ledger(Path(sys.argv[1]))\n"
        "def issue(g): ledger.note('issued', batch=0, groups=[g], prompts=[[0, g]], replaces=[])\n"
        "for g in range(50): issue(g)\nledger.settle()\n"
        "for g in range(50, 5000): issue(g)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    ledger = Ledger(path)
    issue(ledger, 9999)
    ledger.close()
    groups = [g for (g,) in rows(path, "SELECT grp FROM issued ORDER BY seq")]
    assert groups[:50] == list(range(50)) and groups[-1] == 9999
    assert groups[:-1] == list(range(len(groups) - 1)), "a batch is written whole or not at all"


def test_a_ledger_that_cannot_be_written_says_so_and_loses_nothing(tmp_path):
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    with sqlite3.connect(path) as db:
        db.execute("ALTER TABLE issued RENAME TO away")
    issue(ledger, 0)
    with pytest.raises(LedgerError, match="cannot write the ledger"):
        ledger.settle()
    with sqlite3.connect(path) as db:
        db.execute("ALTER TABLE away RENAME TO issued")
    issue(ledger, 1)
    ledger.settle()
    assert rows(path, "SELECT seq, grp FROM issued") == [(1, 0), (2, 1)]
    ledger.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(LedgerError, match=r"missing.*run\.folder"):
        Ledger(tmp_path / "missing" / "ledger.sqlite")


def test_the_cost_is_part_of_the_ledger(tmp_path):
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    issue(ledger, 0)
    ledger.settle()
    ledger.close()
    ((cost,),) = rows(path, "SELECT value FROM fact WHERE key = 'cost_s'")
    assert float(cost) > 0
    assert os.path.getsize(path) > 0


def test_a_run_that_goes_on_elsewhere_begins_with_the_ledger_of_the_other(tmp_path, monkeypatch):
    source, target = tmp_path / "first.sqlite", tmp_path / "second.sqlite"
    first = Ledger(source)
    issue(first, 0)
    first.settle()
    inherit(source, target)
    issue(first, 1)
    first.close()
    second = Ledger(target)
    issue(second, 7)
    second.close()
    assert rows(target, "SELECT seq, grp FROM issued") == [(1, 0), (2, 7)]
    assert rows(source, "SELECT seq, grp FROM issued") == [(1, 0), (2, 1)]

    class Killed(BaseException):
        pass

    def killed(path, target):
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Path, "replace", killed)
        inherit(source, tmp_path / "third.sqlite")
    assert not (tmp_path / "third.sqlite").exists(), "half a copy has not its name"
    inherit(tmp_path / "none.sqlite", tmp_path / "third.sqlite")
    assert not (tmp_path / "third.sqlite").exists()
