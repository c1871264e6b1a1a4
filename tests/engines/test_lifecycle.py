"""The state machine of rollout engines, and version spans, without any engine."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_asyncflow.engines.lifecycle import DIRTY, PAUSED, RUNNING, SLEEPING, UPDATING, Lifecycle, SpanTrack
from mindspeed_asyncflow.errors import EngineError, WeightSyncError
from mindspeed_asyncflow.records import VersionSpan

MOVES = {  # (state, verb) -> next state; every other pair is refused
    (RUNNING, "pause"): PAUSED,
    (PAUSED, "resume"): RUNNING,
    (PAUSED, "sleep"): SLEEPING,
    (SLEEPING, "wake"): PAUSED,
    (SLEEPING, "sleep_failed"): DIRTY,
    (RUNNING, "begin_update"): UPDATING,
    (PAUSED, "begin_update"): UPDATING,
    (DIRTY, "begin_update"): UPDATING,
    (UPDATING, "end_update"): RUNNING,
    (UPDATING, "fail_update"): DIRTY,
}
VERBS = ("pause", "resume", "sleep", "sleep_failed", "wake", "begin_update", "end_update", "fail_update")
PATHS = {
    RUNNING: (),
    PAUSED: ("pause",),
    SLEEPING: ("pause", "sleep"),
    UPDATING: ("begin_update",),
    DIRTY: ("begin_update", "fail_update"),
}


def move(life: Lifecycle, verb: str, version: int = 1) -> None:
    getattr(life, verb)(*([version] if verb in ("begin_update", "end_update") else []))


@pytest.mark.parametrize(("state", "verb"), itertools.product(PATHS, VERBS))
def test_every_move_is_either_allowed_or_refused_without_effect(state: str, verb: str) -> None:
    """Contract test 8: the complete table."""
    life = Lifecycle()
    for step in PATHS[state]:
        move(life, step)
    assert life.state == state
    if (state, verb) in MOVES:
        move(life, verb)
        assert life.state == MOVES[state, verb]
    else:
        with pytest.raises(EngineError, match=f"is refused while the engine is {state}"):
            move(life, verb)
        assert (life.state, life.version) == (state, 0)


def test_going_back_allows_one_update_to_an_older_version() -> None:
    life = Lifecycle(version=7)
    life.go_back()
    move(life, "begin_update", 3)
    move(life, "end_update", 3)
    assert (life.state, life.version) == (RUNNING, 3)
    with pytest.raises(WeightSyncError, match="versions only rise"):
        move(life, "begin_update", 2)


def test_half_loaded_weights_may_be_dropped_and_are_dirty_again_on_waking() -> None:
    life = Lifecycle()
    for verb in PATHS[DIRTY]:
        move(life, verb)
    with pytest.raises(EngineError, match="it needs PAUSED"):
        life.sleep(1)
    life.sleep(2)
    assert life.state == SLEEPING
    life.wake()
    assert life.state == DIRTY


@pytest.mark.parametrize("before", [RUNNING, PAUSED])
def test_an_update_returns_to_the_state_before_even_after_a_failure(before: str) -> None:
    life = Lifecycle()
    for step in PATHS[before]:
        move(life, step)
    for verb in ("begin_update", "fail_update", "begin_update", "fail_update", "begin_update", "end_update"):
        move(life, verb, version=7)
    assert (life.state, life.version) == (before, 7)


@pytest.mark.parametrize("loss", ["level 2", "failure"])
def test_lost_weights_leave_dirty_until_an_update_and_then_paused(loss: str) -> None:
    """The update that heals may bring any version, and the engine is where it was before it slept."""
    life = Lifecycle(version=5)
    life.begin_update(6)
    life.end_update(6, "f6")
    life.pause()
    life.sleep(2)
    if loss == "failure":
        life.sleep_failed()
    else:
        life.wake()
    assert (life.state, life.version, life.fingerprint) == (DIRTY, 6, "f6")
    life.begin_update(5)
    life.end_update(5, "f5")
    assert (life.state, life.version, life.fingerprint) == (PAUSED, 5, "f5")


def test_kept_weights_need_no_update_after_sleep() -> None:
    life = Lifecycle()
    for level in (2, 1):
        life.pause()
        life.sleep(level)
        life.wake()
        if level == 2:
            life.begin_update(3)
            life.end_update(3, "f3")
        life.resume()
    assert (life.state, life.version, life.fingerprint) == (RUNNING, 3, "f3")


def test_an_update_does_not_end_older_than_it_began() -> None:
    life = Lifecycle()
    life.begin_update(4)
    with pytest.raises(WeightSyncError, match="begun towards 4 or newer"):
        life.end_update(3)
    assert life.state == UPDATING
    life.end_update(5)
    assert life.version == 5


def test_an_older_version_is_refused_unless_dirty() -> None:
    life = Lifecycle(version=5)
    with pytest.raises(WeightSyncError, match="version 5 is served"):
        life.begin_update(4)
    assert life.state == RUNNING
    life.begin_update(5)
    life.fail_update()
    assert life.version == 5
    life.begin_update(4)
    life.end_update(4)
    assert (life.state, life.version) == (RUNNING, 4)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=12))
def test_spans_tile_the_answer_and_never_repeat_a_version_in_a_row(growth: list[tuple[int, int]]) -> None:
    """B44: version and new tokens between two cuts, in any pattern, also none."""
    track, versions = SpanTrack(), []
    for version, tokens in growth:
        versions += [version] * tokens
        track.cut(version, len(versions))
    assert [v for span in track.spans for v in [span.version] * (span.end - span.start)] == versions
    assert [s.end for s in track.spans[:-1]] == [s.start for s in track.spans[1:]]
    assert all(a.version != b.version for a, b in itertools.pairwise(track.spans))


def test_the_fingerprint_of_an_answer_is_that_of_its_last_token() -> None:
    """A cut without new tokens says nothing about who sampled the last one."""
    track = SpanTrack((VersionSpan(1, 0, 2),))
    track.cut(2, 2, "f2")
    assert track.fingerprint == ""
    track.cut(2, 4, "f2")
    track.cut(3, 4, "f3")
    assert (track.fingerprint, track.spans) == ("f2", [VersionSpan(1, 0, 2), VersionSpan(2, 2, 4)])
    track.cut(3, 5, "f3")
    assert track.fingerprint == "f3"


def test_resumed_spans_are_continued() -> None:
    """B31: three tokens of version 4, two more of version 5."""
    track = SpanTrack((VersionSpan(4, 0, 3),))
    track.cut(5, 5)
    assert track.spans == [VersionSpan(4, 0, 3), VersionSpan(5, 3, 5)]
