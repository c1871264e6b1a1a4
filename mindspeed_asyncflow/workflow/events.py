"""What happened in a run and in which order: one line of JSON per event, written by the driver alone.

    kind        noted by       fields as they stand in the file, beside `t` (seconds of the loop clock) and `kind`
    begun       service        format, config (digest of the resolved settings), libraries, machine
    data        service        what the order of prompts depends on (`PromptStream.facts`), group_size
    issued      feed           batch, groups [group], prompts [[epoch, prompt index]], replaces [dropped group] or empty
    claimed     claims         task, worker, rows [[group, member]]
    answering   rollout        replica, since (version), rows: it begins with them
    generated   rollout        replica, since (version), rows, unfinished
    scored      score          rows, unscored, flat
    dropped     who drops      reason, group or groups, samples (without it: all that the groups have left)
    loaded      weight sync    replica, version, fingerprint
    joined      rollout        replica; also `lost` and `left`, with claims: how many it held
    lost        supervision    component, why: its process died, or was killed because it froze
    recovered   supervision    component, seconds: another process has its place
    trained     train          step, plan [replica][micro-batch][[group, member]], versions [replica][micro-batch]
                               [[oldest, newest]], rules, sums [replica]{name: value}
    finished    train          version, tokens, samples, applied, grad_norm, lr
    published   weight sync    version, fingerprint, checksums (8 hex digits per shard, in the relay table's order)
    cut         service        version: of the checkpoint whose state this is
    saved       service        version: its checkpoint is complete
    resumed     service        as begun, and ledger (its position in the checkpoint), version, checkpoint
    restored    run            open [group]: what the run goes on with, rows that have scores
    ended       run            open [group]: neither trained nor dropped

Replay needs begun, trained, finished and published; the others are for people and tests. Dock handles mean nothing
after the run, so rows are (group, member). What trained rows contain is in the files of `sample_log.py`. Events wait in
memory until a version is finished or published, a replica is lost, or many wait; `EventLog.note` says what it is given.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_asyncflow.observe.ledger import Ledger
from mindspeed_asyncflow.records import OptimReport, WeightManifest
from mindspeed_asyncflow.workflow.clock import now
from mindspeed_asyncflow.workflow.train_worker import ChunkRules

FORMAT = 2
LIBRARIES = ("torch", "megatron-core", "numpy")  # those that decide which bits a step computes
MOST_WAITING = 2000
WRITTEN_AT_ONCE = frozenset({"begun", "resumed", "finished", "published", "lost", "left"})


class NoEvents:
    """Where nothing is recorded."""

    def note(self, kind: str, **fields: Any) -> None: ...

    def position(self) -> int:
        """Notes that the ledger has been given so far, those included that are not on disk yet; 0 without a ledger."""
        return 0

    def flush(self) -> None:
        """The event log has what was noted so far."""

    def settle(self) -> None:
        """Wait until the ledger is on disk. Raises `LedgerError` where it cannot be written."""

    def close(self) -> None: ...


class Told(NoEvents):
    """Gives every note to the ledger, and to the event log where there is one."""

    def __init__(self, ledger: Ledger, log: EventLog | None) -> None:
        self.ledger, self.log = ledger, log
        self.sinks: list[Ledger | EventLog] = [ledger] if log is None else [ledger, log]

    def position(self) -> int:
        return self.ledger.position

    def settle(self) -> None:
        self.ledger.settle()

    def note(self, kind: str, **fields: Any) -> None:
        for sink in self.sinks:
            sink.note(kind, **fields)

    def flush(self) -> None:
        if self.log is not None:
            self.log.flush()

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


class EventLog(NoEvents):
    """Appends to `path`. Lives in the driver's event loop; a line that a crash tears is the last one."""

    def __init__(self, path: Path, clock: Callable[[], float] = now) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        self._clock = clock
        self._lines: list[str] = []

    def note(self, kind: str, **fields: Any) -> None:
        """Fields are plain values or arrays, and what is turned into such here, so that it costs nothing elsewhere:

        begun: config (text of the resolved settings); scored and restored: scores [row], for the ledger; trained: plan,
        groups, versions and rules as given to `TrainWorker.train`, sums of one rank of every replica, and rewards by
        row, for the ledger; finished: optim (`OptimReport`); published: manifest.
        """
        if kind in _FORMS:
            fields = _FORMS[kind](**fields)
        event = {"t": round(self._clock(), 6), "kind": kind} | fields
        self._lines.append(json.dumps(event, default=_plain, separators=(",", ":")))
        if kind in WRITTEN_AT_ONCE or len(self._lines) >= MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        if self._lines:
            self._file.write("\n".join(self._lines) + "\n")
            self._file.flush()
            self._lines.clear()

    def close(self) -> None:
        self.flush()
        self._file.close()


def _begun(config: str) -> dict[str, Any]:
    return {"format": FORMAT, "config": digest_of(config)} | surroundings()


def _resumed(config: str, **others: Any) -> dict[str, Any]:
    return others | _begun(config)


def _scored(scores: Sequence[float], **others: Any) -> dict[str, Any]:
    return others


def _trained(
    plan: Sequence[Sequence[Sequence[int]]],
    groups: Mapping[int, tuple[int, int]],
    versions: Mapping[int, tuple[int, int]],
    sums: Sequence[Mapping[str, float]],
    rules: ChunkRules,
    rewards: Mapping[int, float],
    **others: Any,
) -> dict[str, Any]:
    return others | {
        "rules": {"oldest_allowed": rules.oldest_allowed, "shift": rules.shift, "factor": rules.factor},
        "plan": [[[groups[r] for r in batch] for batch in replica] for replica in plan],
        "versions": [[[versions[r] for r in batch] for batch in replica] for replica in plan],
        "sums": [exact_sums(of_replica) for of_replica in sums],
    }


def _finished(optim: OptimReport, **others: Any) -> dict[str, Any]:
    return others | optim_fields(optim)


def _published(manifest: WeightManifest) -> dict[str, Any]:
    return {"version": manifest.version} | manifest_fields(manifest)


_FORMS: dict[str, Callable[..., dict[str, Any]]] = {
    "begun": _begun,
    "resumed": _resumed,
    "scored": _scored,
    "restored": _scored,
    "trained": _trained,
    "finished": _finished,
    "published": _published,
}


def exact_sums(sums: Mapping[str, float]) -> dict[str, float | str]:
    return {name: exact(value) for name, value in sums.items()}


def optim_fields(optim: OptimReport) -> dict[str, Any]:
    """What an `OptimReport` says that must be equal when the step is repeated."""
    return {"applied": bool(optim.applied), "grad_norm": exact(optim.grad_norm), "lr": exact(optim.lr)}


def manifest_fields(manifest: WeightManifest) -> dict[str, Any]:
    """What a `WeightManifest` says about the bytes of a version."""
    return {
        "fingerprint": manifest.fingerprint,
        "checksums": "".join(f"{int(crc):08x}" for crc in manifest.checksums),
    }


def exact(value: float) -> float | str:
    """A number that JSON gives back with every bit; not-finite ones, which JSON does not have, by name."""
    value = float(value)
    return value if math.isfinite(value) else repr(value)


def digest_of(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def surroundings() -> dict[str, Any]:
    """What may change bits although nothing of the run has changed."""
    return {
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES if _is_installed(name)},
        "machine": f"{platform.machine()} {_processor()}".strip(),
    }


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _plain(value: Any) -> Any:
    """numpy values as JSON has them."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"an event holds a {type(value).__name__}, which JSON does not have")
