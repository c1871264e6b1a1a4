"""A run over several hosts: `python -m mindspeed_asyncflow.service.superpod --hosts FILE --config FILE ...`.

An agent on every host (`host_agent.py`), reached over ssh or another launcher command, goes through these steps with
all others; the first thing that goes wrong on any host ends the launch on all of them:

connect   every host answers, sees the run folder, has the same Python, packages and source
check     `asyncflow check`, on every host that has NPUs and on the first one
ray       a head on the first host; the others join it
run       `asyncflow train` on the first host; it places processes by topology (`assignment.py`)
stop      always: the run first, then Ray, processes and shared memory of every host
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.config.load import load_config
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import AsyncFlowError, ConfigError
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.platforms.topology import TOPOLOGY_ENV, Host, format_hosts, read_hosts
from mindspeed_asyncflow.service.host_agent import BEAT_S, DRIVER_STOP_S
from mindspeed_asyncflow.service.host_link import SSH, HostFailed, Link, launch_words

OK, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130
LATE_NEWS_S = 4.0  # a run that fails because a host is lost may say so before the host's connection ends
STOP_S = DRIVER_STOP_S + 20.0
# Variables of the launching shell that every host gets: where libraries lie and how they are to behave.
FORWARDED = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "TOOLCHAIN_HOME", "TASK_QUEUE_ENABLE", "CPU_AFFINITY_CONF"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TP_SOCKET_IFNAME"),
)
FORWARDED_STARTS = (
    *("ASCEND_", "HCCL_", "ACL_", "PYTORCH_NPU_", "VLLM_", "GLOO_", "HF_", "OMP_", "RAY_", "ASYNCFLOW_"),
    *("ATB_", "ASDOPS_", "LCAL_", "LCCL_"),  # set_env.sh of NNAL; its libraries read them while they run
)


class Interrupted(AsyncFlowError):
    """A signal asked the launch to stop."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="launch_qwen_grpo.sh --hosts", allow_abbrev=False)
    parser.add_argument(
        "--hosts", required=True, metavar="FILE", help="a host per line: NAME [slots=N] [superpod=NAME]"
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="configuration of the run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one setting over the file's")
    parser.add_argument("--run-folder", metavar="DIR", type=Path, help="new, or of a run; seen by all hosts")
    parser.add_argument("--resume", default="auto", metavar="auto|never|CHECKPOINT", help="as of `asyncflow train`")
    parser.add_argument("--launcher", default=SSH, help="runs a shell command on {host} (default: %(default)s)")
    parser.add_argument("--python", default=sys.executable, help="interpreter on every host (default: this one)")
    parser.add_argument("--ray-port", type=_port, default=6380, help="where hosts join the first one (%(default)s)")
    parser.add_argument("--worker-ports", type=_ports, metavar="MIN-MAX", help="ports of workers (default: any)")
    parser.add_argument("--connect-timeout", type=_seconds, default=60.0, help="seconds to reach a host (%(default)g)")
    parser.add_argument("--start-timeout", type=_seconds, default=180.0, help="seconds of a check or Ray (%(default)g)")
    parser.add_argument("--silence-timeout", type=_seconds, default=60.0, help="a host silent for so long is lost")
    parser.add_argument("--no-check", action="store_true", help="leave `asyncflow check` out")
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or not 1024 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port from 1024 to 65535")
    return int(text)


def _ports(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    if not dash or _port(low) >= _port(high):
        raise argparse.ArgumentTypeError(f"{text!r}: expected MIN-MAX, such as 20000-20999")
    return int(low), int(high)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def forwarded(environment: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Variables that every host gets; which Ray to join, each is told by itself."""
    chosen = {k: v for k, v in environment if k in FORWARDED or k.startswith(FORWARDED_STARTS)}
    chosen.pop("RAY_ADDRESS", None)
    return chosen


def ray_secret() -> dict[str, str]:
    """Only hosts that know the token of this launch join its Ray; by itself Ray takes one that lies on the first."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


class Launch:
    """`folder`: logs go to it, and the run has it for its results."""

    def __init__(self, options: argparse.Namespace, hosts: Sequence[Host], config: Config, folder: RunFolder) -> None:
        self.options, self.hosts, self.config, self.folder = options, list(hosts), config, folder
        self.links: list[Link] = []
        self.started = False  # Ray, anywhere
        self._events: queue.SimpleQueue[tuple[Link | None, str, Any]] = queue.SimpleQueue()
        self._pinged = 0.0

    def go(self) -> int:
        """All steps; returns the run's exit status. Raises what ended the launch."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: self._events.put((None, "signal", number)))
        self._connect()
        if not self.options.no_check:
            self._check()
        self._ray()
        return self._run()

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        say(f"{len(self.hosts)} hosts: {', '.join(h.name for h in self.hosts)}; logs: {self.folder.logs}")
        options, logs = self.options, self.folder.logs
        addresses = [host.address or _resolve(host.name) for host in self.hosts]
        token, environment = secrets.token_hex(16), ray_secret() | forwarded(os.environ.items())
        shared = logs / ".seen-by-all-hosts"
        shared.write_text(token, encoding="utf-8")
        for host in self.hosts:
            words = launch_words(options.launcher, host.name, options.python)
            self.links.append(Link(host, words, logs / f"{host.name}.log", self._events))
        for link, address in zip(self.links, addresses):
            peers = [other for other in addresses if other and other != address]
            told = {"environment": environment, "silence_s": options.silence_timeout}
            link.send(hello=told | {"address": address, "peers": peers, "shared": str(shared), "token": token})
        answers = self._all("ready", self.links, options.connect_timeout, "--connect-timeout")
        shared.unlink()
        for link in self.links:
            link.ready = answers[link.name]
        refuse_differences({link.name: link.ready["equal"] for link in self.links})
        refuse_twice({link.name: link.ready["address"] for link in self.links})
        self.hosts = [self._furnished(link) for link in self.links]
        for host in self.hosts:
            pod = f", superpod {host.superpod}" if host.superpod else ""
            say(f"{host.name}: {host.address}, {host.slots} devices{pod}")
        (logs / "hosts").write_text(format_hosts(self.hosts), encoding="utf-8")

    def _furnished(self, link: Link) -> Host:
        """The host with what it says of itself where the file says nothing."""
        host, ready = link.host, link.ready
        if host.slots is None and not ready["npus"]:
            raise HostFailed(f"{host.name} has no NPU: put slots=N behind its name in {self.options.hosts}")
        on_npus = self.config.run.platform == "npu" or (self.config.run.platform == "auto" and ready["npus"])
        if on_npus and host.slots is not None and host.slots > ready["npus"]:
            raise HostFailed(
                f"{host.name}: slots={host.slots} in {self.options.hosts}, but it has {ready['npus']} NPUs"
            )
        slots = host.slots or ready["npus"]
        return replace(host, slots=slots, superpod=host.superpod or ready["superpod"], address=ready["address"])

    def _check(self) -> None:
        asked = [link for link in self.links if link is self.links[0] or link.ready["npus"]]
        say(f"checking {self.options.config} on {', '.join(link.name for link in asked)}")
        for link in asked:
            link.send(check={"arguments": self._settings(), "environment": self._topology()})
        answers = self._all("checked", asked, self.options.start_timeout, "--start-timeout")
        for link in asked:
            if answers[link.name] != 0:
                raise HostFailed(f"{link.name}: the check refuses (status {answers[link.name]}):{link.last_words()}")

    def _ray(self) -> None:
        head, *others = self.links
        self.started = True
        say(f"starting Ray on {head.name}, port {self.options.ray_port}")
        head.send(ray=self._ray_of(self.hosts[0], join=""))
        self._all("ray", [head], self.options.start_timeout, "--start-timeout")
        for link, host in zip(others, self.hosts[1:]):
            link.send(ray=self._ray_of(host, join=self._head))
        self._all("ray", others, self.options.start_timeout, "--start-timeout")
        say(f"Ray runs on {len(self.links)} hosts with {sum(h.slots or 0 for h in self.hosts)} devices")

    @property
    def _head(self) -> str:
        return f"{self.hosts[0].address}:{self.options.ray_port}"

    def _ray_of(self, host: Host, join: str) -> dict[str, Any]:
        arguments = [] if join else [f"--port={self.options.ray_port}"]
        if self.options.worker_ports:
            low, high = self.options.worker_ports
            arguments += [f"--min-worker-port={low}", f"--max-worker-port={high}"]
        if self.config.run.ray_cpus:
            arguments.append(f"--num-cpus={int(self.config.run.ray_cpus)}")
        return {"join": join, "address": host.address, "resources": {"NPU": host.slots}, "arguments": arguments}

    def _run(self) -> int:
        head = self.links[0]
        told = self._topology() | {"RAY_ADDRESS": self._head}
        arguments = [*self._settings(), "--run-folder", str(self.folder.path), "--resume", self.options.resume]
        head.send(run={"arguments": arguments, "environment": told})
        driver = self._all("driver", [head], self.options.start_timeout, "--start-timeout")[head.name]
        for link in self.links:
            link.send(owner=driver)
        while True:
            event = self._next(BEAT_S)
            if event is not None and event[1] == "ended":
                if event[2] not in (OK, INTERRUPTED):
                    self._late_news()
                return int(event[2])

    def _late_news(self) -> None:
        until = time.monotonic() + LATE_NEWS_S
        while (left := until - time.monotonic()) > 0:
            self._next(left)

    def _settings(self) -> list[str]:
        """Arguments of `check` and `train`; a dock pair on each host, where nobody sets another number."""
        own = [] if "pairs" in self.config.dock.model_fields_set else [f"dock.pairs={len(self.hosts)}"]
        return [self.options.config, *(word for setting in [*own, *self.options.set] for word in ("--set", setting))]

    def _topology(self) -> dict[str, str]:
        return {TOPOLOGY_ENV: str(self.folder.logs / "hosts")}

    # ---- events ------------------------------------------------------------------------------------------------------

    def _next(self, patience_s: float) -> tuple[Link, str, Any] | None:
        """The next answer, None after `patience_s`. Raises where a host has failed or is silent, or for a signal."""
        now = time.monotonic()
        if now - self._pinged > BEAT_S:
            self._pinged = now
            for listener in self.links:
                listener.send(ping=0)
        event: tuple[Link | None, str, Any] = (None, "", None)
        with contextlib.suppress(queue.Empty):
            event = self._events.get(timeout=min(patience_s, BEAT_S))
        link, verb, content = event
        if verb == "signal":
            raise Interrupted(f"stopped by {signal.Signals(content).name}")
        for silent in self.links:
            if silent.greeted and time.monotonic() - silent.heard > self.options.silence_timeout:
                limit = f"{self.options.silence_timeout:g} s (--silence-timeout)"
                raise HostFailed(f"{silent.name} is lost: nothing was heard of it for {limit}")
        if link is None:
            return None
        if verb == "closed" and link.greeted:
            output = self.folder.logs / f"{link.name}.log"
            raise HostFailed(f"{link.name} is lost: its connection ended ({content}); its output is in {output}")
        if verb == "closed":
            raise HostFailed(f"{link.name} cannot be reached: its launcher ended ({content}){link.last_words()}")
        if verb == "failed":
            raise HostFailed(f"{link.name}: {content}{link.last_words()}")
        return link, verb, content

    def _all(self, verb: str, links: Sequence[Link], limit_s: float, option: str) -> dict[str, Any]:
        """The answer `verb` of every link, by the host's name."""
        found: dict[str, Any] = {}
        until = time.monotonic() + limit_s
        while len(found) < len(links):
            left = until - time.monotonic()
            if left <= 0:
                missing = ", ".join(link.name for link in links if link.name not in found)
                raise HostFailed(f"no answer ({verb}) within {limit_s:g} s ({option}) from {missing}")
            event = self._next(left)
            if event is not None and event[1] == verb:
                found[event[0].name] = event[2]
        return found

    # ---- end ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Everything on every host. A second signal does not stop this."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for links in (self.links[:1], self.links[1:]):  # first the run: it ends its workers on all hosts
            for link in links:
                link.send(stop=0)
            self._wait_for_end(links)
        for link in self.links:
            if not link.end(BEAT_S):
                say(f"{link.name}: the connection did not end in order")

    def _wait_for_end(self, links: Sequence[Link]) -> None:
        waiting = {link.name for link in links if link.alive and link.greeted}  # others have started nothing
        until = time.monotonic() + STOP_S
        while waiting and (left := until - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                link, verb, _ = self._events.get(timeout=min(left, BEAT_S))
                if link is not None and verb in ("stopped", "closed"):
                    waiting.discard(link.name)
            for other in self.links:
                other.send(ping=0)
        for name in sorted(waiting):
            say(f"{name}: did not stop within {STOP_S:g} s; it stops by itself once its connection has ended")


def refuse_differences(versions: dict[str, dict[str, str]]) -> None:
    """Raise `HostFailed` for each host that is not like the first one."""
    (first, wanted), *rest = versions.items()
    lines = [
        f"\n    {name} has {what} {value}, {first} has {wanted[what]}"
        for name, found in rest
        for what, value in found.items()
        if value != wanted[what]
    ]
    if lines:
        raise HostFailed("hosts differ; install the same on all of them:" + "".join(lines))


def refuse_twice(addresses: dict[str, str]) -> None:
    """Raise `HostFailed` where two names are one machine, whose devices would be given away twice."""
    first: dict[str, str] = {}
    for name, address in addresses.items():
        if (other := first.setdefault(address, name)) != name:
            raise HostFailed(f"{other} and {name} are one machine ({address}): name it once in the host file")


def _resolve(name: str) -> str:
    """An address of the host; "" where its name stands for none here (it may still be one to the launcher command)."""
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    try:
        hosts = read_hosts(options.hosts)
        config = load_config(options.config, options.set)
        folder = _folder(options, config)
    except ConfigError as error:
        say(str(error))
        return WRONG
    launch = Launch(options, hosts, config, folder)
    try:
        return launch.go()
    except Interrupted as error:
        say(str(error))
        return INTERRUPTED
    except AsyncFlowError as error:
        say(f"error: {error}")
        return FAILED if launch.started else WRONG
    finally:
        say("stopping all hosts")
        launch.stop()


def _folder(options: argparse.Namespace, config: Config) -> RunFolder:
    path = options.run_folder
    if path is None and options.resume not in ("auto", "never"):
        path = Path(options.resume).absolute().parent.parent
    if path is None:
        return RunFolder.reserve(config.run.folder, config.run.name)
    folder = RunFolder(path.absolute())
    if folder.is_run and options.resume != "never":
        folder.logs.mkdir(exist_ok=True)
        return folder
    if folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
        raise ConfigError(f"{folder.path} is there and not an empty folder; give a new one for the results of this run")
    folder.logs.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
