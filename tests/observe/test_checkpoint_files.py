"""Checkpoints as files: whatever happens while one is written, a whole one is found afterwards."""

import errno
import os
from dataclasses import replace

import pytest

from mindspeed_asyncflow.errors import CheckpointError
from mindspeed_asyncflow.observe import checkpoints


def write(root, step, text=b"abcd"):
    """Everything but `complete`."""
    partial = checkpoints.begin(root, step)
    (partial / "trainer").mkdir()
    (partial / "trainer" / "rank0").write_bytes(text * step)
    (partial / "state.json").write_bytes(b"{}")
    return partial


def save(root, step, text=b"abcd"):
    partial = write(root, step, text)
    files = checkpoints.sums(partial)
    return checkpoints.complete(partial, files, step=step, version=step, config="digest")


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


class Crash(BaseException):
    """As kill -9: nothing of ours runs afterwards."""


CHANGES = ("rename", "replace", "symlink", "unlink", "rmdir", "mkdir", "fsync", "open")


def crash_at(monkeypatch, number):
    """The call of that number that changes the disk does not come about, nor does any later one."""
    made = [0]

    def guarded(change):
        def call(*args, **kwargs):
            made[0] += 1
            if made[0] >= number:
                raise Crash
            return change(*args, **kwargs)

        return call

    for name in CHANGES:
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))


@pytest.mark.parametrize("again", [False, True], ids=["next_step", "same_step"])
def test_a_crash_at_any_change_of_the_disk_leaves_a_whole_checkpoint(root, monkeypatch, again):
    save(root, 1)
    step, number, seen = (1 if again else 2), 0, set()
    while True:
        number += 1
        with monkeypatch.context() as patched:
            crash_at(patched, number)
            try:
                save(root, step, b"new ")
                checkpoints.retain(root, keep=1)
                break
            except Crash:
                pass
        found = checkpoints.newest_complete(root)
        assert found is not None
        text = (found / "trainer" / "rank0").read_bytes()
        assert text in (b"abcd", b"new " * step)
        seen.add(text)
        checkpoints.retain(root, keep=2)
        assert checkpoints.newest_complete(root) == found, "cleaning up after a crash takes nothing that is needed"
        checkpoints.discard_after(root, 0)
        save(root, 1)
    assert number > 8 and seen == {b"abcd", b"new " * step}, "both sides of the switch were seen"
    assert [p.name for p in sorted(root.iterdir())] == ["latest", f"step_{step:06d}"]
    assert (root / "latest").resolve() == root / f"step_{step:06d}"


def test_the_old_one_stays_until_the_new_one_is_complete(root, caplog):
    first = save(root, 1)
    partial = write(root, 2)
    files = checkpoints.sums(partial)
    lacking = [replace(files[0], bytes=files[0].bytes + 1), *files[1:]]
    with pytest.raises(CheckpointError, match=r"state\.json has 2 of 3 bytes"):
        checkpoints.complete(partial, lacking, step=2, version=2, config="digest")
    checkpoints.retain(root, keep=1)
    assert checkpoints.newest_complete(root) == first and not partial.exists()
    assert (root / "latest").resolve() == first


def test_only_files_that_somebody_named_make_a_checkpoint(root):
    partial = write(root, 1)
    files = checkpoints.sums(partial)
    (partial / "stray").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="files that nobody named: stray"):
        checkpoints.complete(partial, files, step=1, version=1, config="digest")
    (partial / "stray").unlink()
    assert checkpoints.verify(checkpoints.complete(partial, files, step=1, version=1, config="digest")).step == 1


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "trainer" / "rank0").write_bytes(b"abcd"), "rank0 has 4 of 8 bytes"),
        (lambda folder: (folder / "trainer" / "rank0").write_bytes(b"abcdabcX"), "rank0 has another checksum"),
        (lambda folder: (folder / "state.json").unlink(), "state.json is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text('{"format": 99}'), "format 99"),
    ],
    ids=["truncated", "flipped", "missing", "unsigned", "torn", "other_format"],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(root, caplog, damage, said):
    first, second = save(root, 1), save(root, 2)
    damage(second)
    with pytest.raises(CheckpointError, match=said):
        checkpoints.verify(second)
    assert checkpoints.newest_complete(root) == first
    assert said in caplog.text and str(second) in caplog.text


def test_retention_keeps_the_newest_whole_ones(root):
    for step in (1, 2, 3, 4):
        save(root, step)
    (root / "step_000004" / "state.json").unlink()
    (root / "step_000009").mkdir()  # as a removal that was cut short leaves it
    checkpoints.begin(root, 5)
    checkpoints.retain(root, keep=2)
    assert [p.name for p in sorted(root.glob("*step_*"))] == ["step_000002", "step_000003", "step_000004"]


def test_who_goes_on_from_an_earlier_one_removes_the_later_ones(root):
    for step in (1, 2, 3):
        save(root, step)
    checkpoints.discard_after(root, 1)
    assert checkpoints.newest_complete(root) == root / "step_000001" == (root / "latest").resolve()


def test_what_was_passed_over_is_set_aside_and_not_removed(root, caplog):
    for step in (1, 2, 3):
        save(root, step)
    (root / "step_000002" / "trainer" / "rank0").write_bytes(b"abcdabcX")  # 3 could not be read for a moment
    checkpoints.discard_after(root, 1, keep=True)
    kept = sorted(p.name for p in root.glob("damaged_*"))
    assert [name[: len("damaged_step_000002")] for name in kept] == ["damaged_step_000002", "damaged_step_000003"]
    assert all(name in caplog.text for name in kept)
    save(root, 2)
    checkpoints.retain(root, keep=1)
    assert checkpoints.newest_complete(root) == root / "step_000002" and sorted(root.glob("damaged_*"))[0].name in kept
    assert checkpoints.verify(root / kept[1]).step == 3
    (root / kept[1]).rename(root / "step_000003")  # by somebody who wants it after all
    assert checkpoints.newest_complete(root) == root / "step_000003"


def test_an_old_one_that_cannot_be_removed_is_a_warning_and_goes_the_next_time(root, monkeypatch, caplog):
    for step in (1, 2, 3):
        save(root, step)

    def refuse(folder):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(folder))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints.shutil, "rmtree", refuse)
        assert checkpoints.retain(root, keep=1) == []
    assert "step_000001" in caplog.text and "step_000002" in caplog.text
    assert checkpoints.newest_complete(root) == root / "step_000003"
    assert [p.name for p in sorted(checkpoints.retain(root, keep=1))] == ["step_000001", "step_000002"]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "the disk is full; free some, lower checkpoint.keep, or set run.folder"),
        (errno.EROFS, "read-only; set run.folder"),
        (errno.EFBIG, "ulimit -f"),
    ],
)
def test_a_disk_that_refuses_is_explained(root, monkeypatch, number, said):
    partial = write(root, 1)
    files = checkpoints.sums(partial)

    def refuse(descriptor):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        with pytest.raises(CheckpointError, match=said):
            checkpoints.complete(partial, files, step=1, version=1, config="digest")
    assert checkpoints.newest_complete(root) is None
    checkpoints.complete(partial, files, step=1, version=1, config="digest")  # when there is room again


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="checkpoints"):
        checkpoints.begin(tmp_path / "checkpoints", 1)
