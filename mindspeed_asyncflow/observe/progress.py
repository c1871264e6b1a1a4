"""What a user sees while a run goes on: a small live block on a terminal, plain lines elsewhere and in the log file.

The caller's loop drives it: `phase` and `step` when something happened, `tick` a few times per second so that seconds
run on. It has no thread and reads no environment.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

from mindspeed_asyncflow.observe.bottleneck import Sizes, averaged, bottleneck, kind
from mindspeed_asyncflow.observe.log import shown
from mindspeed_asyncflow.observe.summary import duration

_PLAIN_EVERY_S = 5.0
_REDRAW_EVERY_S = 0.1
_BOLD, _DIM, _GREEN, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[32m", "\x1b[0m"


class Progress:
    """Live view of `total_steps` steps on `stream`."""

    def __init__(
        self,
        total_steps: int,
        stream: TextIO,
        *,
        color: bool = True,
        live: bool | None = None,
        width: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sizes: Sizes | None = None,
    ):
        """`live`: rewrite a block (default: where `stream` is a terminal). `color`: only used in the live block.
        `width`: columns, default the terminal's at each drawing. `sizes`: say also what holds the run back."""
        self._total = total_steps
        self._stream = stream
        self._live = stream.isatty() if live is None else live
        self._color = color and self._live
        self._width = width
        self._clock = clock
        self._sizes = sizes
        self._recent: deque[Mapping[str, float]] = deque(maxlen=10)
        self._begin = clock()
        self._phase = ""
        self._phase_begin = self._begin
        self._done = 0
        self._first_step_at: float | None = None
        self._last_step_at = self._begin
        self._metrics: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=10)
        self._heldout: float | None = None
        self._lines_shown = 0
        self._drawn_at = -math.inf
        self._plain_at = -math.inf
        self._closed = False
        self._inside = ""  # how far the step that runs has come

    def phase(self, text: str) -> None:
        """Something before, between or after the steps begins, e.g. `starting trainer`."""
        if self._phase:
            self._said(f"[{self._elapsed()}] {self._phase}: done in {duration(self._clock() - self._phase_begin)}")
        self._phase = text
        self._phase_begin = self._plain_at = self._clock()
        if text:
            self._said(f"[{self._elapsed()}] {text} ...")
        self._draw(force=True)

    def inside(self, scored: int, trained: int) -> None:
        """How many answers were scored since the last step, and trained in the one that runs."""
        self._inside = f", {scored} answers scored, {trained} trained"

    def resumed(self, steps: int) -> None:
        """So many steps were made by processes before this one."""
        self._done = steps

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step `step` (0-based) is trained; `metrics` under the names of the table, any subset."""
        now = self._clock()
        if self._phase:
            self.phase("")
        self._done, self._inside = step + 1, ""
        if self._first_step_at is None:
            self._first_step_at, self._first_step = now, self._done
        self._last_step_at = now
        self._metrics.update(metrics)
        self._recent.append(metrics)
        if math.isfinite(metrics.get("reward/mean", math.nan)):
            self._rewards.append(metrics["reward/mean"])
        bound = [kind(sentence)] if (sentence := self._bottleneck()) else []
        line = "  ".join([self._step_text(), *(f"{k} {v}" for k, v in self._fields()), *bound])
        shown(line)
        if self._live:
            self._draw(force=True)
        elif self._total <= 20 or self._done in (1, self._total) or now - self._plain_at >= _PLAIN_EVERY_S:
            self._plain_at = now
            self._line(line)

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """An evaluation ended; `metrics` are its own."""
        value, k = metrics["eval/mean_at_k"], int(metrics["eval/k"])
        self._heldout = value
        more = f", pass@{k} {metrics['eval/pass_at_k']:.3f}, maj@{k} {metrics['eval/maj_at_k']:.3f}" if k > 1 else ""
        none = f", {metrics['eval/unscored']:.1%} without a score" if metrics["eval/unscored"] else ""
        self._said(f"[{self._elapsed()}] held-out {value:.3f}{more}{none} (version {metrics['eval/version']:.0f})")
        self._draw(force=True)

    def tick(self) -> None:
        """Let the seconds run on; cheap, call it as often as you like."""
        now = self._clock()
        if self._live:
            self._draw()
        elif (self._phase or self._inside) and now - self._plain_at >= 3 * _PLAIN_EVERY_S:
            self._plain_at = now
            what = self._phase or f"in step {self._done + 1} of {self._total}"
            took = duration(now - (self._phase_begin if self._phase else self._last_step_at))
            self._line(f"[{self._elapsed()}] {what} ... {took}{self._inside}")

    def note(self, text: str) -> None:
        """A line that stays, above the live block and in the log file."""
        shown(text)
        self.show(text)

    def show(self, text: str) -> None:
        """As `note`, for the logger, whose lines are in the file already."""
        self._erase()
        self._stream.write(text + "\n")
        self._draw(force=True)
        self._stream.flush()

    def close(self) -> None:
        """Leave the last state on the screen. Later calls only print notes."""
        if self._closed:
            return
        self._draw(force=True)
        self._closed = True
        self._lines_shown = 0

    # drawing

    def _draw(self, force: bool = False) -> None:
        now = self._clock()
        if not self._live or self._closed or (not force and now - self._drawn_at < _REDRAW_EVERY_S):
            return
        self._drawn_at = now
        width = max(20, (self._width or shutil.get_terminal_size().columns) - 1)
        lines = self._block(width)
        self._erase()
        # No line may wrap: the block is erased by counting lines.
        self._stream.write("".join(line + "\n" for line in lines))
        self._lines_shown = len(lines)
        self._stream.flush()

    def _erase(self) -> None:
        if self._lines_shown:
            self._stream.write(f"\x1b[{self._lines_shown}A\x1b[J")
            self._lines_shown = 0

    def _block(self, width: int) -> list[str]:
        head = self._step_text() if self._done else f"step 0/{self._total}  {self._elapsed()}"
        if self._phase:
            head += f"  {self._phase} ... {duration(self._clock() - self._phase_begin)}{self._inside}"
        bar_width = min(30, width - len(head) - 2)
        if bar_width >= 8:
            full = round(bar_width * min(1.0, self._done / max(1, self._total)))
            head = f"{self._paint('█' * full, _GREEN)}{self._paint('░' * (bar_width - full), _DIM)}  {head}"
        else:
            head = head[:width]
        lines = [head]
        row: list[str] = []
        used = 0
        for key, value in self._fields():
            size = len(key) + 1 + len(value)
            if row and used + 3 + size > width:
                lines.append("   ".join(row))
                row, used = [], 0
            if size > width:
                continue
            used += size + (3 if row else 0)
            row.append(f"{self._paint(key, _DIM)} {self._paint(value, _BOLD)}")
        lines += ["   ".join(row)] if row else []
        sentence = self._bottleneck()
        return [*lines, sentence] if sentence and len(sentence) <= width else lines

    def _paint(self, text: str, code: str) -> str:
        return f"{code}{text}{_RESET}" if self._color and text else text

    def _said(self, text: str) -> None:
        """A line for the file, and for a console without live block."""
        shown(text)
        if not self._live:
            self._line(text)

    def _line(self, text: str) -> None:
        if not self._closed:
            self._stream.write(text + "\n")
            self._stream.flush()

    # content

    def _elapsed(self) -> str:
        return duration(self._clock() - self._begin)

    def _step_text(self) -> str:
        left = self._time_left()
        return f"step {self._done}/{self._total}  {self._elapsed()}" + (f", {duration(left)} left" if left else "")

    def _time_left(self) -> float | None:
        """From the pace since the first step: start-up does not count."""
        if self._first_step_at is None or self._done <= self._first_step or self._done >= self._total:
            return None
        pace = (self._last_step_at - self._first_step_at) / (self._done - self._first_step)
        return max(0.0, pace * (self._total - self._done) - (self._clock() - self._last_step_at))

    def _bottleneck(self) -> str:
        """Over the last steps; one alone says little."""
        return bottleneck(averaged(self._recent), self._sizes) if self._sizes is not None else ""

    def _fields(self) -> list[tuple[str, str]]:
        fields: list[tuple[str, str]] = []
        if self._rewards:
            mean = sum(self._rewards) / len(self._rewards)
            fields.append(("reward", f"{self._rewards[-1]:.3f} (10-step mean {mean:.3f})"))
        if self._heldout is not None:
            fields.append(("held-out", f"{self._heldout:.3f}"))
        for key, name, form in (
            ("samples/s", "perf/samples_per_s", "{:,.0f}"),
            ("tokens/s", "perf/tokens_per_s", "{:,.0f}"),
            ("lag", "staleness/worst_max", "{:.0f}"),
            ("trainer idle", "idle/trainer", "{:.0%}"),
            ("rollout idle", "idle/rollout", "{:.0%}"),
            ("loss", "actor/pg_loss", "{:+.4f}"),
            ("grad", "actor/grad_norm", "{:.3g}"),
        ):
            value = self._metrics.get(name)
            if value is not None:
                fields.append((key, form.format(value) if math.isfinite(value) else "n/a"))
        return fields
