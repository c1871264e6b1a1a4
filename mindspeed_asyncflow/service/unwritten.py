"""A disk that is full or cannot be written any more, in words that say what to do."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from mindspeed_asyncflow.errors import PlatformError

UNWRITTEN = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}  # those that can mean nothing else


def in_words(error: BaseException, folder: Path) -> BaseException:
    """`PlatformError` in place of an error of writing, to the run `folder` where it names no other path; any other
    error is given back as it is."""
    if not isinstance(error, OSError) or error.errno not in UNWRITTEN:
        return error
    where = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else folder
    try:
        free = f" ({shutil.disk_usage(where if where.exists() else where.parent).free / 2**20:.0f} MiB free there)"
    except OSError:
        free = ""
    words = PlatformError(
        f"cannot write to {where}: {os.strerror(error.errno)}{free}; make room or make it writable, then start the "
        f"same command with --run-folder {folder}: it goes on from its newest checkpoint"
    )
    words.__cause__ = error
    return words
