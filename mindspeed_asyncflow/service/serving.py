"""`asyncflow serve`: a run in the main thread, and beside it whoever offers its calls to others."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import AsyncFlowError
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.service import launch, resuming
from mindspeed_asyncflow.service.api import RunApi
from mindspeed_asyncflow.service.verbs import Verbs

OWNER = "owner"
LOOK_S = 0.2
REFUSED_S = 3.0  # in which whoever asked for a run that cannot begin hears why


def serve(
    config: Config,
    run_folder: Path | None = None,
    warnings: Iterable[str] = (),
    resume: str = resuming.AUTO,
    offer: Callable[[Verbs], AbstractContextManager[None]] = lambda verbs: contextlib.nullcontext(),
    start: bool = False,
    check: Callable[[Config], None] = lambda config: None,
) -> int:
    """One run, which begins when a client asks for it (`start`: at once); the settings are those of `launch.train`.

    `offer` gives the calls to others as long as its block lasts, from before the run until `service.linger_s` after it,
    or until a client calls `stop`. `check` raises `ConfigError` for settings, as a client has changed them, that cannot
    work. Returns the exit code of the run; 0 where none began and the server was stopped.
    """
    api = RunApi(config, check, None if run_folder is None else RunFolder(run_folder))
    _listen()
    try:
        with offer(api):
            if start:
                api.begin(api.begun_by or OWNER, {})
            while not api.asked.wait(LOOK_S):
                pass
            return _run(api, run_folder, warnings, resume)
    except KeyboardInterrupt:
        return launch.INTERRUPTED


def _run(api: RunApi, run_folder: Path | None, warnings: Iterable[str], resume: str) -> int:
    try:
        code = launch.train(api.config, run_folder, warnings, resume, api.driven)
    except AsyncFlowError as error:  # before the run has begun: its folder, a checkpoint
        api.refused = str(error)
        _linger(api, min(api.config.service.linger_s, REFUSED_S))
        raise
    interrupted = code == launch.INTERRUPTED  # by a signal or stop(now): nobody wants it to stay
    _linger(api, min(api.config.service.linger_s, REFUSED_S) if interrupted else api.config.service.linger_s)
    return code


def _linger(api: RunApi, limit_s: float) -> None:
    """Who has not heard of the end yet may still ask. A signal ends it."""
    _listen()
    if limit_s and not api.stopped.is_set():
        print(f"the server answers status, metrics and export for {limit_s:g} s more (service.linger_s), or until stop")
    until = time.monotonic() + limit_s
    with contextlib.suppress(KeyboardInterrupt):
        while not api.stopped.is_set() and time.monotonic() < until:
            api.stopped.wait(LOOK_S)


def _listen() -> None:
    """Both signals raise `KeyboardInterrupt` in the main thread; the end of a run leaves them switched off."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
