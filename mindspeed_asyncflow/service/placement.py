"""Which process of a run needs which devices, whether the cluster has them, and starting and ending Ray."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray

from mindspeed_asyncflow.config.feasibility import needed_replicas, own_replicas
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms.topology import Node, cluster_nodes, declared_hosts
from mindspeed_asyncflow.service.cleanup import scratch_prefix
from mindspeed_asyncflow.service.inherited import OBJECT_STORE_BYTES, worker_environment, worth_telling

DEVICE = "NPU"  # Ray's resource name; on the CPU platform the same name is declared by us


@dataclass(frozen=True, slots=True)
class Demand:
    """Devices of every kind of worker, and the setting that asks for them."""

    name: str
    count: int  # processes
    devices_each: int
    keys: str
    needed: int  # processes without which the run does not start


def demands(config: Config) -> list[Demand]:
    """Replicas on devices of trainer ranks demand none."""
    t, r = config.trainer, config.rollout
    sizes = "trainer.tensor_parallel, pipeline_parallel, context_parallel, data_parallel"
    wanted = [Demand("trainer", t.world_size, 1, sizes, t.world_size)]
    if critics := config.critic_size:
        wanted.append(Demand("critic", critics, 1, f"algorithm.advantage gae; {sizes}", critics))
    if own := own_replicas(config):
        keys = "rollout.replicas, rollout.tensor_parallel" + (", rollout.min_replicas" if r.min_replicas else "")
        wanted.append(Demand("rollout", own, r.tensor_parallel, keys, needed_replicas(config)))
    return wanted


def check_feasible(wanted: Sequence[Demand], available: Mapping[str, float]) -> None:
    """Raise PlatformError, listing wanted and available, instead of waiting for devices that cannot come."""
    total = sum(d.needed * d.devices_each for d in wanted)
    have = int(available.get(DEVICE, 0))
    if total <= have:
        return
    rows = "".join(f"\n  {d.name}: {d.needed} x {d.devices_each} ({d.keys})" for d in wanted)
    raise PlatformError(f"the run wants {total} {DEVICE}s, the cluster has {have}; lower these settings:{rows}")


def no_ray(error: Exception, waited_s: float, address: str) -> str:
    """In words that Ray could not be started, or joined at `address`."""
    what = f"Ray at {address} (RAY_ADDRESS) cannot be joined" if address else "Ray did not start"
    turn = (
        "is it running, and is this machine one of its nodes?"
        if address
        else "Ray gives its daemons 30 s: free the machine, and look for other Rays on it (`ray status`)"
    )
    return f"{what} ({type(error).__name__} after {waited_s:.0f} s: {str(error).strip()}); {turn}"


def nodes() -> list[Node]:
    """Nodes of the cluster that this process is connected to, in the order in which processes fill them."""
    return cluster_nodes(ray.nodes(), DEVICE, declared_hosts(os.environ))


class Cluster:
    """A private Ray of this run on this machine, or a running one that `RAY_ADDRESS` names."""

    def __init__(self, config: Config, platform_name: str, wanted: Sequence[Demand] | None = None) -> None:
        self.wanted = demands(config) if wanted is None else wanted
        self.platform_name = platform_name
        self.cpus = config.run.ray_cpus
        self.folder: Path | None = None

    def make_folder(self) -> Path | None:
        """The scratch folder of a private Ray; None where a running one is used."""
        if not os.environ.get("RAY_ADDRESS"):
            self.folder = Path(tempfile.mkdtemp(prefix=scratch_prefix()))
        return self.folder

    def start(self) -> None:
        """Environment of all workers first: they inherit it from here."""
        os.environ.update(worker_environment(os.environ))
        began = time.monotonic()
        try:
            if self.folder is None:
                ray.init(log_to_driver=False, logging_level=logging.WARNING)
            else:
                self._start_private()
        except Exception as error:  # boundary: Ray raises bare exceptions for what its daemons do
            raise PlatformError(no_ray(error, time.monotonic() - began, os.environ.get("RAY_ADDRESS", ""))) from error
        check_feasible(self.wanted, ray.cluster_resources())

    def _start_private(self) -> None:
        for noisy in ("ray._private.accelerators.npu", "ray._private.authentication.authentication_token_setup"):
            logging.getLogger(noisy).setLevel(logging.CRITICAL)  # the first looks for a library of NPU machines
        declared = None
        if self.platform_name == "cpu":
            declared = {DEVICE: float(sum(d.count * d.devices_each for d in self.wanted))}
        ray.init(
            address="local",
            num_cpus=int(self.cpus) if self.cpus else None,
            resources=declared,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(self.folder),
        )

    def last_words(self, pid: int, lines: int = 15) -> str:
        """The end of what a dead worker wrote to stderr, without what every worker writes there."""
        if self.folder is None or not pid:
            return ""
        for file in self.folder.glob(f"session_*/logs/worker-*-{pid}.err"):
            return "\n".join(worth_telling(file.read_text(errors="replace"))[-lines:])
        return ""

    def stop(self) -> None:
        ray.shutdown()

    def remove_folder(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
