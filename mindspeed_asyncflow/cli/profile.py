"""`asyncflow profile`: how long the blocks of a run take here, measured on its real workers."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_asyncflow.cli import preflight, settings
from mindspeed_asyncflow.config import Config, checks, dump_resolved
from mindspeed_asyncflow.planner.costs import Costs
from mindspeed_asyncflow.planner.fit import TERMS, Fit, Point, fit
from mindspeed_asyncflow.planner.profile import Profile

if TYPE_CHECKING:
    from mindspeed_asyncflow.cli.measure import Blocks

NAME = "profile"
HELP = "measure the blocks of a run on this machine, for plan and simulate"
EXAMPLES = """  asyncflow profile configs/qwen_tiny_cpu.yaml --out profile.json
  asyncflow plan configs/qwen_tiny_cpu.yaml --profile profile.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    settings.add_arguments(parser)
    parser.add_argument(
        "--out", metavar="FILE", type=Path, default=Path("profile.json"), help="where it goes (default: profile.json)"
    )


def run(arguments: argparse.Namespace) -> int:
    config = settings.load(arguments)
    for warning in checks.refuse_errors(preflight.inspect(config)):
        print(f"asyncflow: {warning}", file=sys.stderr)
    profile = measure(config)
    profile.save(arguments.out)
    print("\n".join(words(profile)))
    print(f"written to {arguments.out}")
    return 0


def measure(config: Config) -> Profile:
    """Start the workers, measure, end them all. Raises what a run would raise."""
    # Only now: Ray and what it loads take seconds, and a mistake is answered at once.
    from mindspeed_asyncflow.cli.measure import replica_alone
    from mindspeed_asyncflow.observe.log import close_logging, setup_logging
    from mindspeed_asyncflow.observe.progress import Progress
    from mindspeed_asyncflow.observe.run_folder import RunFolder
    from mindspeed_asyncflow.observe.trace import configure, get_tracer
    from mindspeed_asyncflow.service.processes import Processes

    config = replica_alone(config)
    progress = Progress(1, sys.stderr)
    signal.signal(signal.SIGTERM, _stop)
    with tempfile.TemporaryDirectory(prefix="asyncflow-profile-") as place:
        folder = RunFolder.create_at(Path(place) / "run", dump_resolved(config))
        setup_logging("driver", folder.log, write=progress.show)
        configure(folder.trace, "driver", enabled=False)
        processes, session = Processes(config), None
        try:
            session = _session(config, folder, progress)
            progress.phase("starting Ray")
            processes.start()
            return asyncio.run(_measure(session, progress))
        finally:
            processes.end(session)
            get_tracer().close()
            progress.close()
            close_logging()


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _session(config: Config, folder: Any, progress: Any) -> Any:
    from mindspeed_asyncflow.data.builtin_models import ensure_model
    from mindspeed_asyncflow.data.prompts import PromptSet
    from mindspeed_asyncflow.data.sources import make_sources
    from mindspeed_asyncflow.data.tokenizers import load_tokenizer
    from mindspeed_asyncflow.observe.writers import MetricsWriter, SamplesWriter
    from mindspeed_asyncflow.service.session import Session
    from mindspeed_asyncflow.workflow.recorder import StepRecorder

    progress.phase("preparing model")
    model_folder = ensure_model(config.model, config.data, config.run.seed, progress.note)
    tokenizer = load_tokenizer(model_folder, config.data.chat_template)
    prompts = PromptSet.build(make_sources(config.data), tokenizer, config.data, config.run.seed)
    metrics = MetricsWriter(folder)
    recorder = StepRecorder(config, metrics, SamplesWriter(folder), progress, str)
    return Session(config, folder, model_folder, tokenizer, prompts, recorder)


async def _measure(session: Any, progress: Any) -> Profile:
    from mindspeed_asyncflow.cli.measure import Blocks, alone, beside

    await session.start(progress.phase)
    await session.prepare(progress.phase)
    blocks = Blocks(session, progress.phase)
    await alone(blocks)
    found = fit(blocks.points)
    generating, training = await beside(blocks)
    slower = {"rollout": slowdown(generating, found), "train": slowdown(training, found)}
    progress.phase("")
    await session.close()
    return _profile(session.config, blocks, found, slower)


def slowdown(points: list[Point], found: Fit) -> float:
    """Measured over fitted seconds, at least 1."""
    fitted = 0.0
    for point in points:
        terms = TERMS[point.block]
        fitted += sum(found.coefficients[c] * (1.0 if t == "one" else point.amounts[t]) for t, c in terms.items())
    return max(1.0, sum(p.seconds for p in points) / fitted) if fitted > 0 else 1.0


def _profile(config: Config, blocks: Blocks, found: Fit, slower: dict[str, float]) -> Profile:
    prompt, answer = (sorted((int(n), float(count)) for n, count in seen.items()) for seen in blocks.seen)
    return Profile(
        config=config.model_dump(mode="json"),
        alone=Costs.of(found.coefficients),
        slower=slower,
        errors=found.errors,
        points=blocks.points,
        prompt_bins=prompt,
        answer_bins=answer,
    )


def words(profile: Profile) -> list[str]:
    lines = [f"== measured blocks ({len(profile.points)} points)"]
    for name, value in profile.alone.to_dict().items():
        if value:
            lines.append(f"{value:>12.4g}  {name}")
    lines.append("== relative error of the fit, by block")
    lines += [f"{error:>12.1%}  {block}" for block, error in profile.errors.items()]
    lines.append("== slower while the other side is busy")
    lines += [f"{factor:>12.2f}  {side}" for side, factor in profile.slower.items()]
    return lines
