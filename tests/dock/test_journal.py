"""The journal of a pair: what is read back after a crash at any byte, and what happens when memory is short."""

import errno
import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from mindspeed_asyncflow.dock import journal as journal_module
from mindspeed_asyncflow.dock.journal import Journal, read_journal
from mindspeed_asyncflow.errors import DockError, DockFull, PlatformError

TOKEN = b"t" * 32
EFFECTS = [
    ("seal", {"partition": "p"}),
    ("leave", {"partition": "p", "slots": np.arange(7), "held": np.empty(0, np.int64), "reason": "old"}),
    ("done", {"partition": "p", "task": "t", "slots": np.array([3, 1])}),
    ("answer", {"client": 1, "request": 2, "frame": b"\x00\xff" * 40}),
]


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "arena.journal")


@pytest.fixture
def journal(path):
    made = Journal(path, TOKEN)
    made.start([("boot", {"number": 0})])
    yield made
    made.close(remove=True)


def plain(effects) -> list:
    return [
        (kind, {n: v.tolist() if isinstance(v, np.ndarray) else v for n, v in fields.items()})
        for kind, fields in effects
    ]


def append(journal: Journal) -> list[int]:
    """One entry per effect; returns where each ends."""
    ends = [journal.size]
    for kind, fields in EFFECTS:
        journal.note(kind, fields)
        journal.flush()
        ends.append(journal.size)
    return ends


def test_effects_come_back_to_the_bit_and_in_order(journal, path):
    append(journal)
    assert plain(read_journal(path, TOKEN)) == plain([("boot", {"number": 0}), *EFFECTS])


def test_a_tail_that_was_cut_at_any_byte_is_ignored_and_what_was_before_it_is_kept(journal, path, tmp_path):
    ends = append(journal)
    whole = Path(path).read_bytes()
    for cut in range(ends[0], ends[-1] + 1):
        for tail in (b"", bytes(4096)):  # the file ends there, or allocated memory follows
            torn = tmp_path / "torn"
            torn.write_bytes(whole[:cut] + tail)
            complete = sum((whole[:cut] + tail).startswith(whole[:end]) for end in ends) - 1
            assert len(list(read_journal(str(torn), TOKEN))) == 1 + complete, f"cut at {cut}"


def test_a_damaged_entry_is_refused_and_ignored_where_it_is_the_last_one(journal, path, tmp_path):
    """The last one may have been cut short by the death of its writer; what comes after another one relies on it."""
    ends = append(journal)
    whole = bytearray(Path(path).read_bytes())
    for first, last in itertools.pairwise(ends):
        for at in range(first + 4, last):
            hurt = whole.copy()
            hurt[at] ^= 0x5A
            (tmp_path / "hurt").write_bytes(hurt)
            if last == ends[-1]:
                assert plain(read_journal(str(tmp_path / "hurt"), TOKEN)) == plain(
                    [("boot", {"number": 0}), *EFFECTS[:-1]]
                )
            else:
                with pytest.raises(DockError, match=f"damaged {first} bytes"):
                    list(read_journal(str(tmp_path / "hurt"), TOKEN))


def test_a_call_with_several_effects_is_there_wholly_or_not_at_all(journal, path, tmp_path):
    begin = journal.size
    for kind, fields in EFFECTS:
        journal.note(kind, fields)
    journal.flush()
    whole = Path(path).read_bytes()
    for cut in range(begin, journal.size):
        (tmp_path / "torn").write_bytes(whole[:cut])
        assert len(list(read_journal(str(tmp_path / "torn"), TOKEN))) == 1


def test_a_journal_of_another_arena_or_no_journal_is_refused(journal, path, tmp_path):
    with pytest.raises(DockError, match="not the journal of this arena"):
        list(read_journal(path, b"u" * 32))
    for raw in (b"", b"AFJR", b"something else" * 10):
        (tmp_path / "other").write_bytes(raw)
        with pytest.raises(DockError, match="not the journal of this arena"):
            list(read_journal(str(tmp_path / "other"), TOKEN))


def test_a_fresh_description_replaces_the_file_or_leaves_it_as_it_was(journal, path, monkeypatch):
    append(journal)
    journal.note("seal", {"partition": "q"})

    def fails(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, "rename", fails)
        with pytest.raises(PlatformError, match="cannot be written"):
            journal.start([("boot", {"number": 1})])
    assert not os.path.exists(f"{path}.new")
    journal.flush()  # what was noted is not lost
    assert plain(read_journal(path, TOKEN))[-1] == ("seal", {"partition": "q"})
    journal.start([("boot", {"number": 1})])
    append(journal)
    assert plain(read_journal(path, TOKEN)) == plain([("boot", {"number": 1}), *EFFECTS])


def test_room_is_there_before_it_is_needed_and_its_lack_is_dock_full(journal, monkeypatch):
    asked = []
    allocate = os.posix_fallocate
    monkeypatch.setattr(
        journal_module.os, "posix_fallocate", lambda fd, at, n: (asked.append(at + n), allocate(fd, at, n))
    )
    journal.ensure_room(10_000)
    assert asked[-1] >= journal.size + 10_000
    count = len(asked)
    journal.ensure_room(10_000)
    assert len(asked) == count

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal_module.os, "posix_fallocate", full)
    journal.ensure_room(10_000)
    with pytest.raises(DockFull, match="shared memory is full"):
        journal.ensure_room(100 << 20)
