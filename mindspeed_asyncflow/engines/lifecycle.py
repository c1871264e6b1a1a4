"""States and version rules that every rollout engine obeys. Pure: no thread, no clock, no engine.

    RUNNING --pause--> PAUSED --resume--> RUNNING
    RUNNING, PAUSED, DIRTY --begin_update--> UPDATING --end_update--> what it was before (RUNNING or PAUSED)
    UPDATING --fail_update--> DIRTY        (only a complete update leaves DIRTY)
    PAUSED --sleep--> SLEEPING --wake--> PAUSED

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


class Lifecycle:
    """State and served version of one engine."""

    def __init__(self, version: int = 0) -> None:
        self.state = RUNNING
        self.version = version
        self._after_update = RUNNING

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

    def sleep(self) -> None:
        self.require("sleep", PAUSED)
        self.state = SLEEPING

    def wake(self) -> None:
        self.require("wake", SLEEPING)
        self.state = PAUSED

    def begin_update(self, version: int) -> None:
        """Enter UPDATING towards `version`, which must not be older than the served one unless DIRTY."""
        self.require("update", RUNNING, PAUSED, DIRTY)
        if self.state != DIRTY:
            if version < self.version:
                raise WeightSyncError(
                    f"update to version {version} refused: version {self.version} is served and versions only rise"
                )
            self._after_update = self.state
        self.state = UPDATING

    def end_update(self, version: int) -> None:
        self.require("end of update", UPDATING)
        self.version = version
        self.state = self._after_update

    def fail_update(self) -> None:
        self.require("failure of update", UPDATING)
        self.state = DIRTY


class SpanTrack:
    """Which version sampled which tokens of one answer, while the answer grows."""

    __slots__ = ("spans",)

    def __init__(self, resumed: tuple[VersionSpan, ...] = ()) -> None:
        self.spans: list[VersionSpan] = list(resumed)

    def cut(self, version: int, length: int) -> None:
        """All tokens after the last span, up to `length` in all, were sampled by `version`."""
        start = self.spans[-1].end if self.spans else 0
        if length <= start:
            return
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version, start, length))
