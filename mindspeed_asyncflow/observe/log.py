"""One logger per process: short on the console, full in the run folder's `log.txt`."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = "asyncflow"
SHOWN = f"{ROOT}.console"


def get_logger(part: str = "") -> logging.Logger:
    """Logger of one part of the program, e.g. `get_logger("dock")`."""
    return logging.getLogger(f"{ROOT}.{part}" if part else ROOT)


def shown(text: str) -> None:
    """Into the file only, what the console shows by other ways (`Progress`, `print`)."""
    logging.getLogger(SHOWN).info("%s", text)


class _File(logging.FileHandler):
    """A full disk costs lines, not the run, and does not fill the console with tracebacks."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def setup_logging(
    process: str,
    file: Path | str | None,
    *,
    console: bool = True,
    level: str = "INFO",
    write: Callable[[str], None] | None = None,
) -> logging.Logger:
    """Set up the logger of this process, replacing an earlier set-up.

    `process` stands in every line of `file`, to which all processes of the run append. The console shows `level` and
    above without tracebacks; `write` takes its lines instead of stderr (`Progress.show`, so that the live block and
    the log do not write over each other).
    """
    logger = logging.getLogger(ROOT)
    close_logging()
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    if file is not None:
        full = _File(file, mode="a", encoding="utf-8")
        full.setFormatter(
            logging.Formatter(
                f"%(asctime)s.%(msecs)03d {process}[%(process)d] %(levelname)s %(name)s: %(message)s",
                datefmt="%Y-%m-%d %H:%M:%S",
            )
        )
        logger.addHandler(full)
    if console:
        short = _Console(write or _stderr)
        short.setLevel(level)
        short.addFilter(lambda record: record.name != SHOWN)
        logger.addHandler(short)
    return logger


def close_logging() -> None:
    """Close files and take handlers away."""
    logger = logging.getLogger(ROOT)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


class _Console(logging.Handler):
    """Warnings and errors carry their level, plain messages do not; tracebacks go to the file only."""

    def __init__(self, write: Callable[[str], None]):
        super().__init__()
        self._write_line = write

    def emit(self, record: logging.LogRecord) -> None:
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        self._write_line(prefix + record.getMessage())


def _stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
