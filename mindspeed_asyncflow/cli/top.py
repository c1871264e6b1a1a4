"""`asyncflow top`: how a run is doing, from its folder, while it goes on or after it."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.errors import AsyncFlowError, ConfigError
from mindspeed_asyncflow.observe.attached import View, look
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.observe.summary import duration

NAME = "top"
HELP = "show how a run is doing: progress, reward, speed, lags, queues and what holds it back"
EXAMPLES = (
    "  asyncflow top                       # the newest run, until it ends; Ctrl-C leaves the view, not the run\n"
    "  asyncflow top runs/first --every 5\n"
    "  asyncflow top runs/latest --once    # plain text, once"
)
WAIT_S = 2.0  # for a dock, which may be frozen
BARS = "▁▂▃▄▅▆▇█"
COLORS = {"running": "green", "starting": "cyan", "ended": "bold", "failed": "bold red", "lost": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_folder", metavar="RUN", type=Path, nargs="?", default=Path("runs/latest"),
        help="a run folder, of a run that goes on or is over (default: runs/latest)",
    )  # fmt: skip
    parser.add_argument("--once", action="store_true", help="print it once as plain text, as without a terminal")
    parser.add_argument(
        "--every", metavar="SECONDS", type=float, default=1.0, help="how often to look again (default: 1)"
    )


def run(arguments: argparse.Namespace) -> int:
    if not arguments.every > 0:
        raise ConfigError(f"--every needs a number of seconds above 0, got {arguments.every:g}")
    folder = RunFolder(arguments.run_folder).of_run()
    # Some environments on NPUs leave rich out.
    live = not arguments.once and sys.stdout.isatty() and importlib.util.find_spec("rich") is not None
    if not live:
        print(plain(see(folder)))
        return 0
    return _watch(folder, arguments.every)


def _watch(folder: RunFolder, every_s: float) -> int:
    from rich.live import Live

    view = see(folder)
    try:
        with Live(table(view), auto_refresh=False) as screen:
            while view.alive:
                time.sleep(every_s)
                view = see(folder)
                screen.update(table(view), refresh=True)
    except KeyboardInterrupt:  # the usual way to leave
        pass
    return 0


def see(folder: RunFolder) -> View:
    return look(folder, lambda: _driver_lives(folder), waiting=_waiting(folder))


def _waiting(folder: RunFolder) -> dict[str, int]:
    """Rows by task that wait in the dock now; empty where none is running, or none can be reached from this machine."""
    if not folder.dock.is_file():
        return {}
    from mindspeed_asyncflow.cli.dock import where
    from mindspeed_asyncflow.dock.client import DockClient
    from mindspeed_asyncflow.dock.describe import waiting_rows

    try:
        with DockClient(*where(folder.path), wait_s=WAIT_S, map_arena=False, restart_s=0.0, home=0) as dock:
            return waiting_rows(dock.stats())
    except AsyncFlowError:
        return {}


def _driver_lives(folder: RunFolder) -> bool | None:
    import psutil

    from mindspeed_asyncflow.service.process_table import read_table

    if folder.held_here:
        return True
    try:
        found = read_table(folder.processes).get("driver")
    except (OSError, ValueError):
        return None
    if found is None:  # it enters itself when its workers are placed
        return False if folder.metrics.is_file() and folder.metrics.stat().st_size else None
    pid, host = found
    here = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return psutil.pid_exists(pid) if host in here else None


def plain(view: View) -> str:
    """The view as lines without control codes."""
    lines = [f"{view.name}: {_head(view)}"]
    if view.words:
        lines.append(f"  {view.words}")
    for title, rows in view.sections:
        lines.append(title)
        lines += [f"  {label:<24}{value}" for label, value in rows]
    if view.lags:
        lines.append("lag of trained answers, versions")
        lines += [f"  {lag:<4}{bar:<20} {share:.0%}" for lag, bar, share in histogram(view.lags)]
    if view.bottleneck:
        lines.append(view.bottleneck)
    return "\n".join(lines)


def table(view: View) -> Any:
    """The same for a terminal, as a thing that rich draws."""
    from rich.columns import Columns
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    full = round(60 * min(1.0, view.steps / max(1, view.wanted)))
    parts: list[Any] = [Text.assemble(("█" * full, "green"), ("░" * (60 - full), "dim"))]
    if view.words:
        parts.append(Text(view.words, style=COLORS.get(view.state, "")))
    if view.bottleneck:  # above what a low terminal cuts off
        parts.append(Text(view.bottleneck, style="bold yellow"))
    if len(view.rewards) > 1:
        parts.append(Text.assemble(("reward  ", "dim"), (sparkline(view.rewards[-52:]), "green")))
    blocks = []
    for title, rows in [*view.sections, ("lag, versions", _lag_rows(view))]:
        block = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
        for label, value in rows:
            block.add_row(Text(label, style="dim"), Text(value))
        if rows:
            blocks.append(block)
    parts.append(Columns(blocks, padding=(1, 4)))
    heading = Text.assemble((view.name, "bold"), "  ", (_head(view), COLORS.get(view.state, "")))
    return Panel(Group(*parts), title=heading, title_align="left")


def _lag_rows(view: View) -> list[tuple[str, str]]:
    return [(str(lag), f"{bar} {share:.0%}") for lag, bar, share in histogram(view.lags)]


def _head(view: View) -> str:
    ran = f", {duration(view.ran_s)}" if view.ran_s is not None else ""
    left = f", {duration(view.left_s)} left" if view.left_s is not None else ""
    several = view.state == "simulated" and not view.steps  # schedules were compared: there is no one count of steps
    steps = "" if several else f", step {view.steps}/{view.wanted}"
    return f"{view.state}{steps}{ran}{left}"


def histogram(lags: dict[int, int], width: int = 20) -> list[tuple[int, str, float]]:
    """(lag, bar, share of the answers); the most frequent lag has the longest bar."""
    total, most = sum(lags.values()), max(lags.values(), default=1)
    return [(lag, "█" * max(1, round(width * count / most)), count / total) for lag, count in sorted(lags.items())]


def sparkline(values: list[float]) -> str:
    """One character for each value, between the least and the greatest of them."""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)
