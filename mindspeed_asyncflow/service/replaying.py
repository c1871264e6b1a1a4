"""`asyncflow replay`: the dock and the trainer ranks of a recorded run, and the record through them once more."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import time
from pathlib import Path

from mindspeed_asyncflow.config.load import dump_resolved
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.data.builtin_models import ensure_model
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.observe.log import close_logging, setup_logging
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.observe.trace import configure
from mindspeed_asyncflow.reshard.relay_table import table_from_text
from mindspeed_asyncflow.service import wiring
from mindspeed_asyncflow.service.placement import demands
from mindspeed_asyncflow.service.processes import Processes
from mindspeed_asyncflow.service.relays import plan_relays
from mindspeed_asyncflow.service.workers import Workers
from mindspeed_asyncflow.workflow.events import surroundings
from mindspeed_asyncflow.workflow.record import Record
from mindspeed_asyncflow.workflow.replay import Replay, Verdict

SAME, DIFFERENT = 0, 1


def replay(run: Path, config: Config, record: Record, steps: int, out: Path | None = None) -> int:
    """Repeat the first `steps` steps of the run in the folder `run`, whose settings and record are given.

    0: every version has the same bytes and every metric the same bits; 1: something differs, the first difference is
    printed. What is written goes to `out`, a new folder (default: a dated one in `run`/replays).
    """
    signal.signal(signal.SIGTERM, _stop)
    results = RunFolder.create_at(out or run / "replays" / time.strftime("%Y%m%d-%H%M%S"), dump_resolved(config))
    setup_logging("driver", results.log, write=_say)
    configure(results.trace, "driver", enabled=False)
    try:
        verdict = _run(_alone(config), record, RunFolder(run), results, steps)
    finally:
        close_logging()
    said = {
        "repeated": verdict.repeated,
        "recorded": len(record.steps),
        "made": record.made,
        "difference": verdict.difference,
    }
    results.summary.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    _say(_words(verdict, record))
    return DIFFERENT if verdict.difference else SAME


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _say(line: str) -> None:
    print(line, flush=True)


def _alone(config: Config) -> Config:
    """The same trainer with devices of its own, and nothing recorded."""
    return config.model_copy(
        update={
            "workflow": config.workflow.model_copy(update={"schedule": "separated", "lend": False, "relay": "auto"}),
            "dock": config.dock.model_copy(
                update={"pairs": 1, "port": 0, "max_rows": 0, "arena_mb": config.dock.pairs * config.dock.arena_mb}
            ),
            "observe": config.observe.model_copy(update={"events": False, "trace": False}),
        }
    )


def _run(config: Config, record: Record, folder: RunFolder, results: RunFolder, steps: int) -> Verdict:
    model_folder = ensure_model(config.model, config.data, config.run.seed, _say)
    trainers = [demand for demand in demands(config) if demand.name == "trainer"]
    processes, workers = Processes(config, trainers), Workers(config, results)
    try:
        processes.start()
        return asyncio.run(_main(workers, model_folder, record, folder, steps))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        processes.end(workers)


async def _main(workers: Workers, model_folder: str, record: Record, folder: RunFolder, steps: int) -> Verdict:
    loop, main = asyncio.get_running_loop(), asyncio.current_task()
    assert main is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, main.cancel)
    config, secret, results = workers.config, secrets.token_bytes(16), workers.folder
    _say(f"starting the dock and {config.trainer.world_size} trainer rank(s)")
    pair, ranks = workers.spawn("dock0"), workers.spawn_trainers()
    await workers.find_places([pair, *ranks], {}, all_there=True)
    addresses = await workers.start_dock([pair], secret)
    spec = wiring.WorkerSpec(
        config, model_folder, (), addresses, secret, str(results.trace), str(results.log), str(results.events)
    )
    relays = plan_relays([workers.places[rank.name] for rank in ranks])
    await workers.start_trainers(ranks, spec, relays.ranks)
    table = table_from_text(await workers.within(ranks[0].table(), "trainer0 to describe the relay"))
    with DockClient(addresses, secret, config.dock.wait_s) as dock:
        again = Replay(
            config, record, folder.events, dock, ranks, wiring.leaders(config), relays.ranks[0].path, table, _say
        )
        verdict = await again.run(steps)
        await workers.close()
    return verdict


def _words(verdict: Verdict, record: Record) -> str:
    extent = record.extent()
    if not verdict.difference:
        same = f"{verdict.repeated} of {len(record.steps)} recorded versions repeated bit for bit"
        return f"{same}; {extent}" if extent else same
    now = surroundings()
    lines = [f"differs: {verdict.difference}", f"{verdict.repeated} versions before it repeated bit for bit"]
    lines += [
        f"recorded with {name} {record.surroundings[name]}, repeated with {now[name]}: this may be why"
        for name in now
        if record.surroundings[name] != now[name]
    ]
    lines += [extent] if extent else []
    return "\n".join(lines)
