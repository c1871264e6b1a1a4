"""`asyncflow doctor`: what this machine has, what is missing for a run, and the commands that mend it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mindspeed_asyncflow.cli import ascend, packages, preflight
from mindspeed_asyncflow.config import Config, load_config, parse_config
from mindspeed_asyncflow.config.checks import Finding
from mindspeed_asyncflow.config.machine import MIB, Machine, probe
from mindspeed_asyncflow.platforms import cann
from mindspeed_asyncflow.platforms.matrix import numbers
from mindspeed_asyncflow.platforms.pythons import pythons

NAME = "doctor"
HELP = "look at this machine: what is missing for a run, and the commands that install or mend it"
FAILED = "a run would not start here"  # what status 1 says
EXAMPLES = """  asyncflow doctor
  asyncflow doctor configs/qwen_tiny_npu.yaml --platform npu
  asyncflow doctor --json | python -m json.tool"""

PYTHONS = ((3, 10), (3, 12))  # from the first on, below the second
FILES = (1024, 65536)  # open files: fewer than the first do not start Ray and its workers, the second is plenty
MOST_FULL = 0.95  # Ray stops making objects on a disk that is fuller
OPTIONAL = ("matplotlib", "math-verify", "pyarrow")  # a run on CPUs starts without them
ENVIRONMENTS = {"trainer": "$TRAIN/bin/python", "rollout": "$ROLLOUT/bin/python"}  # as docs/ascend.md names them
FOLDERS = "$TRAIN, $ROLLOUT: folders of the Python environments of trainer and rollout; set both first (docs/ascend.md)"
BOOTSTRAP = "bash scripts/bootstrap.sh"


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that was looked at."""

    level: str  # ok, warning or error; seen: a fact that the items below judge
    what: str
    says: str
    do: tuple[str, ...] = ()  # commands


@dataclass(frozen=True, slots=True)
class Facts:
    """What was seen; a test puts its own in."""

    python: str
    executable: str
    asked: list[str] | None
    installed: dict[str, str]
    machine: Machine
    open_files: tuple[int, int]  # soft, hard limit; -1: none
    temporary: tuple[str, int, int]  # folder of Ray's sessions, bytes in all, free
    folder_writable: tuple[str, bool]  # where runs go
    rays: tuple[int, ...]  # process ids of Ray heads on this machine
    ray_address: str
    listening: str  # "": a process can listen on loopback; else why not
    host_name: str  # "": the machine's own name leads to an address; else why not
    findings: tuple[Finding, ...]  # about a small run on CPUs here
    cann: str = ""  # installed, whether its environment was read or not
    npu_findings: tuple[Finding, ...] | None = None  # None: no NPU side was looked at
    npu_lines: tuple[str, ...] = ()
    pythons: Mapping[str, str] = field(default_factory=lambda: dict(ENVIRONMENTS))  # of both sides, for commands


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        help="settings whose Pythons and run folder are looked at (default: none)",
    )
    parser.add_argument(
        "--platform",
        choices=("cpu", "npu"),
        help="which run the exit status speaks of (default: one on CPUs); npu looks for Ascend software in any case",
    )
    parser.add_argument("--json", action="store_true", help="print what was found as one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config) if arguments.config else Config()
    facts = look(config, npu=arguments.platform == "npu")
    items = [*examine(facts), *_npu(facts)]
    able = {"cpu": _able(examine(facts))}
    if facts.npu_findings is not None:
        able["npu"] = able["cpu"] and _able(_npu(facts))
    if arguments.json:
        print(json.dumps({"can_run": able, "items": [asdict(item) for item in items]}))
    else:
        for item in items:
            print(f"{item.level:<8} {item.what}: {item.says}")
            for command in item.do:
                print(f"{'':<8}   do: {command}")
        if any(folder in command for item in items for command in item.do for folder in ("$TRAIN", "$ROLLOUT")):
            print(FOLDERS)
        for name, can in able.items():
            print(f"a run on {name.upper()}s {'would start' if can else 'would not start: mend the errors above'}")
    return 0 if able[arguments.platform or "cpu"] else 1


def look(config: Config, npu: bool) -> Facts:
    """This machine. `npu`: look for Ascend software though no device is seen."""
    small = parse_config("", ["run.platform=cpu", f"run.folder={json.dumps(config.run.folder)}"])
    machine = probe(config.run.folder)
    temporary = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    usage = shutil.disk_usage(temporary) if os.path.isdir(temporary) else None
    place = next(
        p for p in (Path(config.run.folder).absolute(), *Path(config.run.folder).absolute().parents) if p.exists()
    )
    toolkit = cann.installed_cann() or cann.cann_version(os.environ)
    findings: tuple[Finding, ...] | None = None
    lines: tuple[str, ...] = ()
    if npu or machine.npus or toolkit:
        wanted = config.model_copy(update={"run": config.run.model_copy(update={"platform": "npu"})})
        node = ascend.look(wanted)
        findings = tuple(ascend.findings(wanted, machine, node))
        lines = tuple(line for line in ascend.lines(wanted, node) if not line.startswith("HCCL"))
    return Facts(
        python=platform.python_version(),
        executable=sys.executable,
        asked=packages.asked(),
        installed=packages.installed(),
        machine=machine,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        temporary=(temporary, usage.total if usage else 0, usage.free if usage else 0),
        folder_writable=(str(place), place.is_dir() and os.access(place, os.W_OK)),
        rays=tuple(_processes("gcs_server")),
        ray_address=os.environ.get("RAY_ADDRESS", ""),
        listening=_listening(),
        host_name=_host_name(),
        findings=tuple(preflight.inspect(small, machine)),
        cann=toolkit,
        npu_findings=findings,
        npu_lines=lines,
        pythons={side: pythons(config).get(f"placement.{side}_python", named) for side, named in ENVIRONMENTS.items()},
    )


def _processes(name: str) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            if path.read_text().strip() == name:
                yield int(path.parent.name)
        except OSError:  # it has ended, or is not ours to see
            continue


def _listening() -> str:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            return ""
    except OSError as error:
        return str(error)


def _host_name() -> str:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return f"{name}: {error}"
    return ""


def examine(facts: Facts) -> list[Item]:
    """Everything that a run on CPUs needs. Pure."""
    return [*_python(facts), *_packages(facts), *_room(facts), *_limits(facts), *_network(facts), *_run(facts)]


def _able(items: list[Item]) -> bool:
    return all(item.level != "error" for item in items)


def _python(facts: Facts) -> Iterator[Item]:
    lowest, beyond = PYTHONS
    if lowest <= numbers(facts.python)[:2] < beyond:
        yield Item("ok", "Python", f"{facts.python}, {facts.executable}")
    else:
        text = f"{facts.python}: 3.10 or 3.11 is needed"
        yield Item("error", "Python", text, ("apt-get install python3.11-venv", BOOTSTRAP))


def _packages(facts: Facts) -> Iterator[Item]:
    if facts.asked is None:
        text = "this project is not installed in this Python, so versions cannot be compared"
        yield Item("warning", "packages", text, (f"{facts.executable} -m pip install --no-deps -e .",))
        return
    wanted = list(packages.wanted(facts.asked, "cpu", facts.python, facts.installed))
    missing = [w for w in wanted if not w.found]
    other = [w for w in wanted if w.found and not w.fits]
    needed = [w for w in missing if w.name not in OPTIONAL]
    install = packages.install_commands(facts.executable, missing)
    if missing:
        text = (
            f"not installed: {', '.join(w.pin for w in missing)}; the first command makes an environment that has all"
        )
        yield Item("error" if needed else "warning", "packages", text, (BOOTSTRAP, *install))
    if other:
        text = ", ".join(f"{w.name} {w.found} ({w.sign}{w.version} is tested)" for w in other)
        yield Item("warning", "packages", text, tuple(packages.install_commands(facts.executable, other)))
    if not missing and not other:
        yield Item("ok", "packages", f"all {len(wanted)} that setup.py asks for, in its versions")


def _room(facts: Facts) -> Iterator[Item]:
    m = facts.machine
    yield Item("ok", "CPUs", f"{m.cpus} that this process may use")
    yield Item("ok", "memory", f"{m.free_memory_bytes / MIB:.0f} of {m.memory_bytes / MIB:.0f} MiB free")
    if m.shm_bytes:
        yield Item("ok", "/dev/shm", f"{m.shm_bytes / MIB:.0f} MiB free")
    else:
        text = "no shared memory, in which the dock and weight versions live"
        yield Item(
            "error", "/dev/shm", text, ("mount -t tmpfs -o size=8G tmpfs /dev/shm", "docker run --shm-size 8g ...")
        )
    place, writable = facts.folder_writable
    if writable:
        yield Item("ok", "disk", f"{m.disk_bytes / MIB:.0f} MiB free where runs go, {place}")
    else:
        text = f"{place} cannot be written, runs go there"
        yield Item("error", "disk", text, (f"chmod u+w {place}", "asyncflow train CONFIG --set run.folder=PATH"))
    folder, total, free = facts.temporary
    if not total:
        yield Item("error", "temporary files", f"{folder} is no folder; Ray needs one", (f"mkdir -p {folder}",))
    elif free < (1 - MOST_FULL) * total:
        text = f"{folder} is {100 * (1 - free / total):.0f} % full; Ray makes no objects above {100 * MOST_FULL:.0f} %"
        yield Item("warning", "temporary files", text, ("export RAY_TMPDIR=/path/with/room",))
    else:
        yield Item("ok", "temporary files", f"{free / MIB:.0f} MiB free in {folder}")


def _limits(facts: Facts) -> Iterator[Item]:
    soft, hard = facts.open_files
    few, plenty = FILES
    if soft == resource.RLIM_INFINITY or soft >= plenty:
        yield Item("ok", "open files", "no limit" if soft == resource.RLIM_INFINITY else f"{soft} (ulimit -n)")
        return
    reach = plenty if hard == resource.RLIM_INFINITY else min(plenty, hard)
    do = (f"ulimit -n {reach}",) if reach > soft else ("raise `nofile` in /etc/security/limits.conf, log in again",)
    level = "error" if soft < few else "ok" if reach <= soft else "warning"
    text = f"{soft} (ulimit -n), {plenty} is plenty for large runs"
    yield Item(level, "open files", text, () if level == "ok" else do)


def _network(facts: Facts) -> Iterator[Item]:
    if facts.listening:
        text = f"no process can listen on 127.0.0.1: {facts.listening}"
        yield Item("error", "ports", text, ("ip link set lo up",))
    else:
        yield Item("ok", "ports", "free ones can be taken on 127.0.0.1")
    if facts.host_name:
        text = f"the machine's own name leads nowhere ({facts.host_name}); processes of several nodes need it"
        yield Item("warning", "host name", text, ('echo "127.0.0.1 $(hostname)" >> /etc/hosts',))
    if facts.ray_address:
        text = f"RAY_ADDRESS={facts.ray_address}: runs join that cluster instead of starting one of their own"
        yield Item("warning", "Ray", text, ("unset RAY_ADDRESS",))
    elif facts.rays:
        ids = ", ".join(map(str, facts.rays))
        text = f"{len(facts.rays)} head{'s' * (len(facts.rays) > 1)} run here already (process {ids}), of other runs"
        yield Item("ok", "Ray", f"{text} or left behind; a new run starts its own")
    else:
        yield Item("ok", "Ray", "none runs; a run starts its own")


def _run(facts: Facts) -> Iterator[Item]:
    """The check of a small run on CPUs here: what it says has its fix in the sentence."""
    for finding in facts.findings:
        if finding.level == "error":
            yield Item("error", "a small run here", str(finding).removeprefix("error: "))


def _npu(facts: Facts) -> list[Item]:
    if facts.npu_findings is None:
        return [
            Item("ok", "NPUs", "none, and no CANN in its usual place: runs are on CPUs (--platform npu looks anyway)")
        ]
    seen = [Item("seen", "Ascend", line) for line in facts.npu_lines]
    found = [Item(f.level, "Ascend", str(f).partition(": ")[2], _ascend_commands(f, facts)) for f in facts.npu_findings]
    if not facts.machine.npus:
        text = "no device file /dev/davinci*: install the driver and firmware, or give the container its devices"
        found.insert(
            0, Item("error", "NPUs", text, ("docker run --device /dev/davinci0 --device /dev/davinci_manager ...",))
        )
    return seen + found


# A word of a finding -> what to type.
_REMEDIES = (
    ("CANN is not found", ("source /usr/local/Ascend/cann/set_env.sh",)),
    ("MindSpeed is not installed", ("bash scripts/install_mindspeed.sh {trainer}",)),
    ("trainer: torch_npu is not", ("{trainer} -m pip install -e '.[npu-train]'",)),
    ("rollout: torch_npu is not", ("{rollout} -m pip install -e '.[npu-rollout]'",)),
    ("vllm-ascend is not installed", ("{rollout} -m pip install -e '.[npu-rollout]'",)),
    (
        "vllm is not installed",
        ("VLLM_TARGET_DEVICE=empty {rollout} -m pip install -v ./vllm  # its source, same number",),
    ),
    ("imports triton-ascend", ("{trainer} -m pip install triton-ascend scipy",)),
)


def _ascend_commands(finding: Finding, facts: Facts) -> tuple[str, ...]:
    found = next((do for word, do in _REMEDIES if word in finding.message), ())
    return tuple(command.format(**facts.pythons) for command in found)
