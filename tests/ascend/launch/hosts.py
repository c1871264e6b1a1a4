"""Hosts for a launch on one machine: namespaces with a network, processes and shared memory of their own."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
_numbers = itertools.count()
NPU_SMI = """#!/bin/sh
# As npu-smi of a superpod node answers where only its number is asked.
[ "$*" = "info -t spod-info -i 0 -c 0" ] || exit 1
printf '        SDID                           : 16777216\\n'
printf '        Super Pod Size                 : 384\\n'
printf '        Super Pod ID                   : %s\\n' "$(cat "$(dirname "$0")/superpod")"
"""
# A first process that outlives every launch, as a host does. TMPDIR: Ray's scratch folder is the host's own.
BOOT = "mount -t tmpfs none /dev/shm && mount -t tmpfs none /mnt && echo up && exec sleep 100000"


def possible() -> bool:
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "unshare", "nsenter")):
        return False
    return _ok("unshare", "-n", "-m", "-p", "-f", "--mount-proc", "ip", "link", "add", "type", "bridge")


def _ok(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


class NamespaceHost:
    def __init__(self, name: str, network: str, address: str) -> None:
        self.name, self.network, self.address = name, network, address
        _run("ip", "-n", network, "link", "set", "lo", "up")
        enter = ["ip", "netns", "exec", network, "unshare", "-m", "-p", "-f", "--kill-child", "--mount-proc"]
        self.outer = subprocess.Popen(
            [*enter, "sh", "-c", BOOT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.outer.stdout is not None and self.outer.stdout.readline() == "up\n"
        children = f"/proc/{self.outer.pid}/task/{self.outer.pid}/children"
        self.first = int(Path(children).read_text().split()[0])  # process 1 of the host
        self.root = Path("/proc", str(self.first), "root")

    def enter(self) -> list[str]:
        return ["nsenter", "-t", str(self.first), "-n", "-m", "-p"]

    def processes(self) -> list[str]:
        """Command lines of what runs there, beside its first process, which leaves zombies alone."""
        space = os.readlink(f"/proc/{self.first}/ns/pid")
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and int(entry.name) != self.first and os.readlink(entry / "ns/pid") == space:
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return [command for command in found if command]

    def shared_memory(self) -> list[str]:
        return sorted(os.listdir(self.root / "dev" / "shm"))

    def scratch(self) -> list[str]:
        return sorted(name for name in os.listdir(self.root / "mnt") if name.startswith("asyncflow"))

    @property
    def alive(self) -> bool:
        return self.outer.poll() is None

    def kill(self) -> None:
        """Power off: every process ends at once, and its memory with it."""
        os.kill(self.first, 9)
        self.outer.wait(10)

    def remove(self) -> None:
        if self.alive:
            self.kill()
        subprocess.run(["ip", "netns", "delete", self.network], capture_output=True, check=False)


class Hosts:
    """`count` hosts on one switch, and `launcher`, which stands for ssh: LAUNCHER HOST COMMAND."""

    def __init__(self, count: int, folder: Path) -> None:
        number, start = next(_numbers), f"af{os.getpid() % 100000}"
        self.folder, self.switch = folder, f"{start}s{number}"
        self.hosts: list[NamespaceHost] = []
        _run("ip", "netns", "add", self.switch)
        _run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self.switch, "link", "set", "br0", "up")
        for i in range(count):
            network, port, address = f"{start}h{number}{i}", f"p{i}", f"10.78.0.{i + 1}"
            _run("ip", "netns", "add", network)
            _run("ip", "-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", network)
            _run("ip", "-n", self.switch, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", network, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", network, "link", "set", "eth0", "up")
            self.hosts.append(NamespaceHost(f"node{i}", network, address))
        self.launcher = folder / "launcher"
        cases = "".join(f'{h.name}) set -- {" ".join(h.enter())} -- sh -c "$2";;\n' for h in self.hosts)
        self.launcher.write_text(
            f'#!/bin/sh\nexport TMPDIR=/mnt\ncase $1 in\n{cases}*) echo "ssh: $1: Name or service not known" >&2; '
            'exit 255;;\nesac\nexec "$@"\n'
        )
        self.launcher.chmod(0o755)
        self.tools = folder / "tools"
        self.tools.mkdir()
        (self.tools / "npu-smi").write_text(NPU_SMI)
        (self.tools / "npu-smi").chmod(0o755)
        (self.tools / "superpod").write_text("3")

    def file(self, *lines: str) -> Path:
        path = self.folder / "hosts.txt"
        given = lines or tuple(f"{h.name} slots=1 address={h.address}" for h in self.hosts)
        path.write_text("\n".join(given) + "\n")
        return path

    def left(self, timeout_s: float = 5.0) -> dict[str, list[str]]:
        """Processes, shared memory and scratch files of living hosts."""
        until = time.monotonic() + timeout_s
        while True:
            found = {h.name: [*h.processes(), *h.shared_memory(), *h.scratch()] for h in self.hosts if h.alive}
            if not any(found.values()) or time.monotonic() > until:
                return {name: what for name, what in found.items() if what}
            time.sleep(0.2)

    def remove(self) -> None:
        for host in self.hosts:
            host.remove()
        subprocess.run(["ip", "netns", "delete", self.switch], capture_output=True, check=False)
