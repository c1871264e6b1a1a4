"""States and version rules that every rollout engine obeys. Pure: no thread, no clock, no engine.

    RUNNING --pause--> PAUSED --resume--> RUNNING
    RUNNING, PAUSED, DIRTY --begin_update--> UPDATING --end_update--> what it was before (RUNNING or PAUSED)
    UPDATING --fail_update--> DIRTY        (only a complete update leaves DIRTY)
    PAUSED --sleep(1)--> SLEEPING --wake--> PAUSED
    PAUSED, DIRTY --sleep(2)--> SLEEPING --wake--> DIRTY   (the weights are gone; after the update it is PAUSED)

Every other move raises `EngineError` and changes nothing.
"""

from __future__ import annotations

from mindspeed_asyncflow.errors import EngineError, WeightSyncError
from mindspeed_asyncflow.records import VersionSpan

RUNNING = "RUNNING"
PAUSED = "PAUSED"
UPDATING = "UPDATING"
SLEEPING = "SLEEPING"
DIRTY = "DIRTY"

PAUSE_MODES = ("keep", "wait", "abort")
SLEEPS_FROM = {1: (PAUSED,), 2: (PAUSED, DIRTY)}  # states by sleep level


class Lifecycle:
    """State and served version of one engine, and the fingerprint of its weights.

    The fingerprint is "" while the weights of the model folder are served, which nobody published.
    """

    def __init__(self, version: int = 0) -> None:
        self.state = RUNNING
        self.version = version
        self.fingerprint = ""
        self._after_update = RUNNING
        self._oldest = 0  # version that the update under way may lead to
        self._weights_kept = True
        self._goes_back = False

    def require(self, verb: str, *allowed: str) -> None:
        """Raise `EngineError` unless the state is one of `allowed`."""
        if self.state not in allowed:
            raise EngineError(f"{verb} is refused while the engine is {self.state}; it needs {' or '.join(allowed)}")

    def pause(self) -> None:
        self.require("pause", RUNNING)
        self.state = PAUSED

    def resume(self) -> None:
        self.require("resume", PAUSED)
        self.state = RUNNING

    def sleep(self, level: int = 1) -> None:
        """Level 1 keeps the weights somewhere, level 2 does not."""
        self.require("sleep", *SLEEPS_FROM[level])
        self.state = SLEEPING
        self._weights_kept = level < 2

    def sleep_failed(self) -> None:
        """Nobody knows which weights are left."""
        self.require("failure of sleep", SLEEPING)
        self.state, self._after_update = DIRTY, PAUSED

    def wake(self) -> None:
        self.require("wake", SLEEPING)
        self.state, self._after_update = (PAUSED if self._weights_kept else DIRTY), PAUSED

    def go_back(self) -> None:
        """The next update may lead to an older version: training goes on from an earlier state."""
        self._goes_back = True

    def begin_update(self, version: int) -> None:
        """Enter UPDATING towards `version`, which must not be older than the served one unless DIRTY or going back."""
        self.require("update", RUNNING, PAUSED, DIRTY)
        if self.state != DIRTY:
            if version < self.version and not self._goes_back:
                raise WeightSyncError(
                    f"update to version {version} refused: version {self.version} is served and versions only rise"
                )
            self._after_update = self.state
        self._oldest = version
        self.state = UPDATING

    def end_update(self, version: int, fingerprint: str = "") -> None:
        """Serve `version`, which must not be older than the one that was begun."""
        self.require("end of update", UPDATING)
        if version < self._oldest:
            raise WeightSyncError(f"update to version {version} refused: it was begun towards {self._oldest} or newer")
        self.version, self.fingerprint = version, fingerprint
        self._goes_back = False
        self.state = self._after_update

    def fail_update(self) -> None:
        self.require("failure of update", UPDATING)
        self.state = DIRTY


class SpanTrack:
    """Which version sampled which tokens of one answer, while the answer grows."""

    __slots__ = ("fingerprint", "spans")

    def __init__(self, resumed: tuple[VersionSpan, ...] = ()) -> None:
        self.spans: list[VersionSpan] = list(resumed)
        self.fingerprint = ""  # of the weights that sampled the last token; "" while all tokens were resumed

    def cut(self, version: int, length: int, fingerprint: str = "") -> None:
        """All tokens after the last span, up to `length` in all, were sampled by `version` with these weights."""
        start = self.spans[-1].end if self.spans else 0
        if length <= start:
            return
        self.fingerprint = fingerprint
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version, start, length))
