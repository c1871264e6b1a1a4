"""What `npu-smi info` says of this node's devices.

It prints a table: two lines for each chip, the card's name and health above, the chip's ids, bus and memory below.
Cards have one chip (Atlas A2) or two (Atlas A3); frameworks see each chip as a device. The table of processes that
follows is not read. Written from outputs of releases 24 to 26 that users published.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mindspeed_asyncflow.errors import PlatformError

COMMAND = ("npu-smi", "info")
TIMEOUT_S = 5.0  # a healthy driver answers within a second
MOSTLY_USED = 0.15  # share of memory in use that an idle device does not reach: its own software takes about 5 %
# What the driver's tool prints where it cannot reach the driver; it may exit with 0 then.
_UNREACHABLE = re.compile(r"dcmi module initialize failed|DrvMngGetConsoleLogLevel failed|dcmi model init", re.I)
_PAIR = re.compile(r"(\d+)\s*/\s*(\d+)")


@dataclass(frozen=True, slots=True)
class Chip:
    """One device. `id` is its physical number, the one that ASCEND_RT_VISIBLE_DEVICES and Ray use."""

    id: int
    card: int
    name: str
    health: str  # OK, Warning, Alarm, Critical or UNKNOWN
    used_mib: int  # of its high-bandwidth memory
    memory_mib: int


@dataclass(frozen=True, slots=True)
class Report:
    version: str  # of the tool, which is that of the driver package
    chips: tuple[Chip, ...]


def read(run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> Report:
    """Ask the tool. Raises `PlatformError` where it is missing, fails, hangs or prints no table."""
    try:
        done = run(COMMAND, capture_output=True, text=True, timeout=TIMEOUT_S)
    except FileNotFoundError:
        raise PlatformError("npu-smi is not found: install the driver, or mount it into the container") from None
    except OSError as error:
        raise PlatformError(f"npu-smi cannot be run: {error}") from None
    except subprocess.TimeoutExpired:
        raise PlatformError(f"npu-smi info does not answer within {TIMEOUT_S:g} s: the driver hangs") from None
    said = done.stdout + done.stderr
    if done.returncode or _UNREACHABLE.search(said):
        words = " ".join(said.split())[:200] or "nothing"
        raise PlatformError(
            f"npu-smi info cannot reach the driver (status {done.returncode}, it says: {words}): check that the driver "
            "is loaded, that /dev/davinci* are visible here and may be read, and restart after an update of firmware"
        )
    return parse(done.stdout)


def parse(text: str) -> Report:
    """The devices in an output. Raises `PlatformError` for text that is no such table."""
    version = re.search(r"npu-smi\s+(\S+)", text)
    if version is None:
        raise PlatformError(f"npu-smi info printed no table of devices: {' '.join(text.split())[:200]!r}")
    chips: list[Chip] = []
    above: list[str] = []
    numbered = False  # a chip's line tells its physical number beside its number on the card
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if "Process id" in line:
            break
        if not line.lstrip().startswith("|") or len(cells) != 3:
            continue
        if cells[0].startswith("Chip"):
            numbered = len(cells[0].split()) > 1
        elif cells[0].startswith("NPU"):
            continue
        elif not above:
            above = cells
        else:
            chips.append(_chip(above, cells, numbered))
            above = []
    return Report(version[1], tuple(chips))


def _chip(above: Sequence[str], below: Sequence[str], numbered: bool) -> Chip:
    """One device from its two lines. Raises `PlatformError` for lines of another form."""
    try:
        card, name = above[0].split(None, 1)
        ids = [int(word) for word in below[0].split() if word.isdigit()]
        used, memory = map(int, _PAIR.findall(below[2])[-1])  # high-bandwidth memory stands last where there is more
        number = ids[1] if numbered and len(ids) > 1 else int(card)
        return Chip(number, int(card), name, above[1] or "UNKNOWN", used, memory)
    except (ValueError, IndexError):
        lines = " | ".join([*above, *below])
        raise PlatformError(f"npu-smi info has a line that is not understood: {lines}") from None


def check(report: Report, visible: Sequence[int] | None) -> Iterator[tuple[Literal["error", "warning"], str]]:
    """What is wrong with the devices that this process may use; `visible`: their physical numbers, None: all."""
    if not report.chips:
        yield "error", "npu-smi info lists no device: check `ls /dev/davinci*`, and the devices given to this container"
        return
    there = {chip.id: chip for chip in report.chips}
    wanted = sorted(there) if visible is None else list(visible)
    missing = [number for number in wanted if number not in there]
    if missing:
        listed = ", ".join(map(str, missing))
        yield "error", f"devices {listed} are asked for, npu-smi info lists {', '.join(map(str, sorted(there)))}"
    for chip in (there[number] for number in wanted if number in there):
        what = f"device {chip.id} (card {chip.card}, {chip.name})"
        if chip.health == "Warning":
            yield "warning", f"{what} is in health Warning: `npu-smi info -t health -i {chip.card}` says why"
        elif chip.health != "OK":
            yield (
                "error",
                f"{what} is in health {chip.health}: `npu-smi info -t health -i {chip.card}` says why; leave it out "
                "with ASCEND_RT_VISIBLE_DEVICES, or have it reset or replaced",
            )
        if chip.memory_mib and chip.used_mib > MOSTLY_USED * chip.memory_mib:
            yield (
                "warning",
                f"{what} has {chip.used_mib} of {chip.memory_mib} MiB in use: another job holds it, or processes of "
                "an earlier one are left",
            )
