"""`train`: from settings to a run folder, with nothing left behind whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TextIO

import numpy as np

from mindspeed_asyncflow.config.load import with_absolute_paths
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.data.builtin_models import ensure_model
from mindspeed_asyncflow.data.prompts import PromptSet
from mindspeed_asyncflow.data.sources import make_sources
from mindspeed_asyncflow.data.tokenizers import load_tokenizer
from mindspeed_asyncflow.errors import AsyncFlowError, ConfigError, DataError, PlatformError, WorkerLost
from mindspeed_asyncflow.observe.bottleneck import Sizes
from mindspeed_asyncflow.observe.ledger import Ledger, inherit
from mindspeed_asyncflow.observe.log import close_logging, get_logger, setup_logging, shown
from mindspeed_asyncflow.observe.progress import Progress
from mindspeed_asyncflow.observe.report import write_report
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.observe.summary import closing_words, write_summary
from mindspeed_asyncflow.observe.trace import configure, get_tracer, merge_traces
from mindspeed_asyncflow.observe.trackers import open_trackers
from mindspeed_asyncflow.observe.writers import MetricsWriter, SamplesWriter
from mindspeed_asyncflow.service import resuming
from mindspeed_asyncflow.service.outside import Outside
from mindspeed_asyncflow.service.processes import Processes
from mindspeed_asyncflow.service.recovery import Recovery
from mindspeed_asyncflow.service.session import Session
from mindspeed_asyncflow.service.steady import SteadyLoop
from mindspeed_asyncflow.service.unwritten import in_words
from mindspeed_asyncflow.workflow.events import EventLog, NoEvents, Told
from mindspeed_asyncflow.workflow.recorder import StepRecorder

OK, FAILED, WRONG_SETTINGS, INTERRUPTED = 0, 1, 2, 130


class Interrupted(AsyncFlowError):
    """A signal asked the run to stop."""


def train(
    config: Config,
    run_folder: Path | None = None,
    warnings: Iterable[str] = (),
    resume: str = resuming.AUTO,
    driven: Callable[[resuming.Start], Outside] | None = None,
) -> int:
    """Run `config` to the end with its results in `run_folder` (default: a dated one in run.folder).

    `warnings` were shown before and go into the log. `resume`: auto (go on where the run of `run_folder` ended), never,
    or the folder of a checkpoint. A run that is complete is left as it is. `driven`: makes what is shared with those
    who drive the run from outside. Returns the exit code.

    0: all steps done; 1: failed, the root error is printed and in the summary; 2: settings or data that cannot be used,
    found before any worker started; 130: stopped by SIGINT or SIGTERM. On
    every way out all processes of the run are ended, within 15 s, and its shared memory is removed.
    """
    if driven is None and (waits := config.service.by_client):
        raise ConfigError(f"{', '.join(waits)}: the run would wait for a client; start it with `asyncflow serve`")
    began = time.perf_counter()
    signal.signal(signal.SIGTERM, _stop)
    config = with_absolute_paths(config)
    with resuming.begin(config, run_folder, resume) as start:
        outside = None if driven is None else driven(start)
        if start.complete:
            if outside is not None:
                outside.complete(start.complete)
            print(f"already complete: {start.complete}; {start.folder.path} is left as it is", flush=True)
            return OK
        return _train(config, start, warnings, began, outside)


def _train(
    config: Config, start: resuming.Start, warnings: Iterable[str], began: float, outside: Outside | None
) -> int:
    folder = start.folder
    progress = Progress(config.trainer.steps, sys.stdout, sizes=Sizes.of(config))
    setup_logging("driver", folder.log, write=progress.show)
    for warning in warnings:
        shown(warning)
    configure(folder.trace, "driver", enabled=config.observe.trace)
    progress.note(f"run folder: {folder.path}")
    if start.again:
        progress.note(str(start))
    launch = _Launch(config, start, progress, outside)
    error: BaseException | None = None
    try:
        launch.run()
    except (KeyboardInterrupt, SystemExit, asyncio.CancelledError):
        by_client = outside is not None and outside.stopping
        error = Interrupted("stopped by its client" if by_client else "stopped by a signal")
    except Exception as failure:  # boundary: whatever ended the run becomes its root error and exit code
        error = failure
    finally:
        launch.end()
    if error is not None and launch.processes.lost:
        error = PlatformError(launch.processes.lost)
    error = error or launch.unwritten
    error = None if error is None else in_words(error, folder.path)
    code = launch.report(error, time.perf_counter() - began)
    if outside is not None:
        outside.ended(code, "" if error is None else f"{type(error).__name__}: {error}")
    launch.processes.leave(code)
    return code


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _tell(text: str, stream: TextIO) -> None:
    print(text, file=stream, flush=True)
    shown(text.strip())


class _Launch:
    """One launch: what has been opened so far, so that it can be closed in order."""

    def __init__(
        self, config: Config, start: resuming.Start, progress: Progress, outside: Outside | None = None
    ) -> None:
        self.outside = outside
        self.config, self.begins, self.folder, self.progress = config, start, start.folder, progress
        # Before the processes of the run get their mark: what helps a tracker ends by itself, after them.
        self.metrics = MetricsWriter(start.folder, open_trackers(config, start.folder))
        self.processes = Processes(config)
        self.events = NoEvents()
        self.session: Session | None = None
        self.recorder: StepRecorder | None = None
        self.unwritten: OSError | None = None  # what the end of the run could not write

    def _say(self, text: str) -> None:
        self.progress.phase(text)
        if self.outside is not None:
            self.outside.phase(text)

    def run(self) -> None:
        config, say = self.config, self._say
        say("preparing model")
        model_folder = ensure_model(config.model, config.data, config.run.seed, self.progress.note)
        tokenizer = load_tokenizer(model_folder, config.data.chat_template)
        say("preparing prompts")
        prompts = PromptSet.build(make_sources(config.data), tokenizer, config.data, config.run.seed)
        for note in prompts.notes():
            self.progress.note(note)

        def decode(ids: np.ndarray) -> str:
            return tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

        self.recorder = StepRecorder(config, self.metrics, SamplesWriter(self.folder), self.progress, decode)
        if self.outside is not None:
            self.outside.furnish(self.begins.checkpoint)
        given = (config, self.folder, model_folder, tokenizer, prompts, self.recorder, self.outside)
        self.session = Session(*given)
        say("starting Ray")
        self.processes.start()
        with asyncio.Runner(loop_factory=SteadyLoop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        loop, main = asyncio.get_running_loop(), asyncio.current_task()
        assert main is not None and self.session is not None and self.recorder is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, main.cancel)
        ticker = asyncio.create_task(self._tick())
        session, say = self.session, self._say
        if self.outside is not None:
            self.outside.begins(session, main.cancel)
        log = EventLog(self.folder.events / "events.jsonl") if self.config.observe.events else None
        checkpoint = self.begins.checkpoint
        if checkpoint is not None and checkpoint.parent != self.folder.checkpoints and not self.folder.ledger.exists():
            inherit(RunFolder(checkpoint.parent.parent).ledger, self.folder.ledger)
        self.events = session.events = Told(Ledger(self.folder.ledger), log)
        if not self.begins.again:
            session.note_begun()
        try:
            await session.start(say)
            if self.begins.again:
                say("going back to the checkpoint" if checkpoint else "beginning again")
                await session.restore(checkpoint, self.begins.undo)
            await session.prepare(say)
            say("training the first batch")
            if self.outside is not None:
                self.outside.ready()
            await Recovery(session, say).train()
            say("evaluating held-out prompts")
            await session.bring_all_up()
            await session.evaluate()
            say("")
            await session.close()  # in order; after a failure `end` kills instead
        finally:
            ticker.cancel()
            if self.outside is not None:
                await self.outside.ends()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self.progress.tick()

    def end(self) -> None:
        """End every process and remove what they shared. A second Ctrl-C must not leave anything behind."""
        self.processes.end(self.session)
        for close in (self.metrics.close, self.events.close, get_tracer().close):
            try:
                close()
            except OSError as error:  # the others may still be written
                self.unwritten = error

    def report(self, error: BaseException | None, wall_s: float) -> int:
        """Summary, trace, report and closing words; returns the exit code."""
        self.progress.close()
        if error is not None and not isinstance(error, Interrupted):
            get_logger("service").debug("root error\n%s", "".join(traceback.format_exception(error)))
        if isinstance(error, WorkerLost):
            for pid, words in self.processes.last_words.items():
                if f"process {pid})" in str(error) and words:
                    _tell(f"last words of process {pid}:\n{words}", sys.stderr)
        if self.recorder is not None and self.session is not None and self.session.run is not None:
            message = "" if error is None else f"{type(error).__name__}: {error}"
            summary = self.recorder.summary(self.session.run.window, self.session.sync, wall_s, message)
            try:
                write_summary(self.folder, summary)
                with contextlib.suppress(OSError):
                    merge_traces(self.folder.trace)
                write_report(self.folder.path)
            except OSError as unwritten:
                _tell(f"the summary could not be written: {unwritten}", sys.stderr)
                error = error or unwritten
            _tell("\n" + closing_words(summary, self.folder.path), sys.stdout)
        elif error is not None:
            _tell(f"error: {error}", sys.stderr)
        if error is not None and not isinstance(error, AsyncFlowError):
            traceback.print_exception(error)
        close_logging()
        if not self.processes.started and isinstance(error, ConfigError | DataError | PlatformError):
            return WRONG_SETTINGS
        return OK if error is None else INTERRUPTED if isinstance(error, Interrupted) else FAILED
