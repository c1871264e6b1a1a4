"""What a run shares with those who drive it from outside: where it stands, and the places where it waits for them.

    waiting ─ init_engines ─► starting ─► running ─► ended | failed

The run's thread sets these states, any other may read them. What is inside the run (prompts, rewards, the gate) lives
in its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.service.completing import Completing
from mindspeed_asyncflow.service.intake import ClientPrompts
from mindspeed_asyncflow.service.outside_rewards import OutsideRewards
from mindspeed_asyncflow.service.presence import Presence
from mindspeed_asyncflow.service.session import Session

WAITING, STARTING, RUNNING, ENDED, FAILED = "waiting", "starting", "running", "ended", "failed"


class Gate:
    """`service.weight_sync` client: replicas get the versions that the client has asked for."""

    def __init__(self, presence: Presence, over: Callable[[], bool]) -> None:
        """`over`: no version is kept back any more, as the run is about to end."""
        self.presence, self.over = presence, over
        self.permitted = 0
        self._news = asyncio.Event()

    def permit(self, version: int) -> None:
        self.permitted = max(self.permitted, version)
        self._news.set()
        self._news = asyncio.Event()

    async def passed(self, version: int) -> None:
        """Wait until replicas may have `version`."""
        while version > self.permitted and not self.over():
            what = f"weight_sync_notify for version {version} (service.weight_sync client)"
            await self.presence.wait(self._news, what, self.over)


class Outside:
    """One run. `config`: its settings, as the client has changed them."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self.config, self.folder = config, folder
        self.state = STARTING
        self.phases: list[str] = []
        self.loop: asyncio.AbstractEventLoop | None = None  # while the run is on
        self.session: Session | None = None
        self.summary: dict[str, Any] = {}
        self.error = ""
        self.code = 0
        self.stopping = False
        self.over = threading.Event()
        self.presence = Presence(config.service.client_timeout_s, self._progressed)
        self.gate: Gate | None = None
        self.rewards: OutsideRewards | None = None
        self.prompts: ClientPrompts | None = None
        self.stores: dict[str, Any] = {}  # of other tenants, `partitions.TenantStore`
        self.loading: dict[int, asyncio.Task[None]] = {}  # what `weight_sync_notify` has begun, by replica
        self._completing: Completing | None = None
        self._cancel: Callable[[], object] | None = None

    # ---- told by the run ---------------------------------------------------------------------------------------------

    def phase(self, text: str) -> None:
        if text:
            self.phases.append(text)

    def complete(self, why: str) -> None:
        """The run of the folder has nothing left to do."""
        self.phase(f"already complete: {why}")
        self.ended(0, "")

    def furnish(self, checkpoint: Path | None) -> None:
        """The prompts that clients of earlier drivers have given, in this folder or in that where the run began."""
        if self.config.service.prompts != "client":
            return
        if checkpoint is not None and not self.folder.prompts.exists():
            theirs = RunFolder(checkpoint.parent.parent).prompts
            if theirs.is_file():
                partial = self.folder.prompts.with_suffix(".partial")
                shutil.copyfile(theirs, partial)
                partial.replace(self.folder.prompts)
        batch = self.config.workflow.groups_per_step
        self.prompts = ClientPrompts(self.folder.prompts, batch, self.presence.wait)

    def begins(self, session: Session, cancel: Callable[[], object]) -> None:
        """In the run's loop, before any worker starts; `cancel` ends the run at once."""
        self.loop, self.session, self._cancel = asyncio.get_running_loop(), session, cancel
        if self.config.service.weight_sync == "client":
            self.gate = Gate(self.presence, self._ends)

    def ready(self) -> None:
        """The replicas serve; training begins."""
        assert self.session is not None
        if self.gate is not None:
            self.gate.permit(self.session.version)
        self.state = RUNNING

    async def ends(self) -> None:
        """In the run's loop, as its last."""
        self.loop = None
        if self._completing is not None:
            await self._completing.pool.close()

    def ended(self, code: int, error: str) -> None:
        """The run is over and its folder complete."""
        self.code, self.error, self.loop = code, error, None
        with contextlib.suppress(OSError, ValueError):
            self.summary = json.loads(self.folder.summary.read_text(encoding="utf-8"))
        self.state = FAILED if error else ENDED
        self.over.set()

    # ---- asked by the run --------------------------------------------------------------------------------------------

    def scorer(self, scorer: Any) -> OutsideRewards:
        """In the place of the run's `scorer`."""
        session = self.session
        assert session is not None and session.dock is not None

        def given(group: int) -> Any:
            return None if session.run is None else session.run.book.given(group)

        self.rewards = OutsideRewards(self.config, session.dock.client, self.presence, scorer, given)
        return self.rewards

    def _progressed(self) -> None:
        if self.session is not None and self.session.run is not None:
            self.session.run.job.progressed()

    def _ends(self) -> bool:
        """Whether nothing is left to be answered, or the end is asked for: the loop that ends the book may itself wait
        for a publication."""
        run = self.session.run if self.session is not None else None
        if run is None:
            return False
        if self.stopping or run.window.version >= self.config.trainer.steps:
            return True
        no_more = run.book.ended or (self.prompts is not None and self.prompts.exhausted and not run.feeder.holds)
        return no_more and not run.book.open_groups()

    def completing(self) -> Completing:
        """The replicas, for requests beside the run; while the run is on."""
        assert self.loop is not None
        if self._completing is None:
            s = self.config.service
            self._completing = Completing(self._serving, self.loop, s.completions_share, s.completions_waiting)
        return self._completing

    def _serving(self) -> Session | None:
        return self.session if self.state == RUNNING else None

    # ---- asked by the client, in the run's loop ----------------------------------------------------------------------

    def stop(self, now: bool) -> None:
        """No further prompt is issued; with `now` the run ends here."""
        self.stopping = True
        if self.prompts is not None:
            self.prompts.close()
        if now and self._cancel is not None:
            self._cancel()
