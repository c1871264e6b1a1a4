"""What runs beside a training engine in every trainer rank."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mindspeed_asyncflow.algorithms.aggregate import loss_denominator
from mindspeed_asyncflow.config.schema import AlgorithmConfig
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.engines.base import TrainEngine
from mindspeed_asyncflow.observe.trace import Tracer
from mindspeed_asyncflow.records import OptimReport, TrainSample
from mindspeed_asyncflow.reshard.relay_server import RelayServer
from mindspeed_asyncflow.workflow.batcher import pack
from mindspeed_asyncflow.workflow.partial import versions_per_token
from mindspeed_asyncflow.workflow.publisher import Publisher, RankShards
from mindspeed_asyncflow.workflow.sample_log import NoSamples

TRAIN_COLUMNS = ["prompt_ids", "response_ids", "rollout_logprobs", "advantage", "finish"]
CUT_OFF = 1  # code of the `finish` column for an answer that ended at the length limit


@dataclass(frozen=True, slots=True)
class ChunkReport:
    """Sums over the rows of one replica's share of a chunk."""

    sums: dict[str, float]
    busy_s: float
    samples: list[tuple] = field(default_factory=list)  # (row, prompt_ids, response_ids, truth, version_min) to show
    masked_tokens: int = 0  # of answers: too old to be trained
    oldest_trained: dict[int, int] = field(default_factory=dict)  # row -> oldest version of a trained token; a row
    # without a trained token is not in it, and counts in no denominator


@dataclass(frozen=True, slots=True)
class FinishReport:
    """The end of a global batch."""

    optim: OptimReport
    busy_s: float  # waiting included
    waited_s: float  # for the version before to be written


class TrainWorker:
    """One trainer rank. All ranks get the same calls in the same order; `published` runs beside the others."""

    def __init__(
        self,
        engine: TrainEngine,
        dock: DockClient,
        algorithm: AlgorithmConfig,
        *,
        name: str,
        replica: int,
        publisher: Publisher,
        tracer: Tracer,
        samples: NoSamples | None = None,
    ) -> None:
        self.engine, self.dock, self.algorithm, self.name = engine, dock, algorithm, name
        self.replica, self.publisher, self.tracer = replica, publisher, tracer
        self.samples = samples or NoSamples()
        self.server: RelayServer | None = None
        self.probe: list[tuple[np.ndarray, np.ndarray]] = []
        reference = ["ref_logprobs"] if algorithm.kl_coef > 0 else []
        self.columns = [*TRAIN_COLUMNS, *reference, *self.samples.columns]

    def train(
        self,
        plan: list[list[list[int]]],
        versions: dict[int, tuple[int, int]],
        groups: dict[int, tuple[int, int]],
        samples_wanted: int = 0,
        oldest_allowed: int | None = None,
    ) -> ChunkReport:
        """Accumulate gradients over this replica's micro-batches of `plan` ([replica][micro-batch][row]).

        `versions` and `groups` give (min, max) policy version and (group id, member) of each row. `oldest_allowed`:
        tokens that an older version sampled are masked; None: all are trained.
        """
        began = time.perf_counter()
        with self.tracer.span("train/forward_backward", lane=self.name):
            mine = plan[self.replica]
            rows = np.array([r for batch in mine for r in batch], dtype=np.int64)
            samples, finish, oldest = self._read(rows, versions, groups, oldest_allowed)
            by_row = {s.row: s for s in samples}
            sums = self.engine.forward_backward([pack([by_row[r] for r in batch]) for batch in mine])
        shown = list({s.group_id: s for s in reversed(samples)}.values())[::-1][:samples_wanted]  # one per prompt
        truths = self.dock.read(np.array([s.row for s in shown]), ["truth"])["truth"] if shown else []
        return ChunkReport(
            sums | lengths(samples, finish),
            time.perf_counter() - began,
            [
                (s.row, np.array(s.prompt_ids), np.array(s.response_ids), bytes(t).decode("utf-8"), s.version_min)
                for s, t in zip(shown, truths)
            ],
            sum(int((s.loss_mask == 0).sum()) for s in samples if s.loss_mask is not None),
            oldest,
        )

    def _read(
        self,
        rows: np.ndarray,
        versions: dict[int, tuple[int, int]],
        groups: dict[int, tuple[int, int]],
        oldest_allowed: int | None,
    ) -> tuple[list[TrainSample], np.ndarray, dict[int, int]]:
        """The samples, their `finish` codes, and the oldest version of any trained token by row."""
        if not len(rows):
            return [], np.zeros(0, dtype=np.uint8), {}
        masking = oldest_allowed is not None
        columns = self.dock.read(rows, [*self.columns, "response_spans"] if masking else self.columns)
        self.samples.add(rows, groups, versions, columns)
        reference = columns.get("ref_logprobs")
        oldest = {row: versions[row][0] for row in rows.tolist()}
        masks: dict[int, np.ndarray] = {}
        if oldest_allowed is not None:
            of_tokens = {r: versions_per_token(t) for r, t in zip(rows.tolist(), columns["response_spans"])}
            masks = {r: (v >= oldest_allowed).astype(np.uint8) for r, v in of_tokens.items()}
            oldest = {r: int(v[masks[r] > 0].min()) for r, v in of_tokens.items() if masks[r].any()}
        samples = [
            TrainSample(
                row=int(row),
                group_id=groups[int(row)][0],
                member=groups[int(row)][1],
                prompt_ids=columns["prompt_ids"][i],
                response_ids=columns["response_ids"][i],
                rollout_logprobs=columns["rollout_logprobs"][i],
                advantage=float(columns["advantage"][i]),
                version_min=versions[int(row)][0],
                version_max=versions[int(row)][1],
                ref_logprobs=None if reference is None else reference[i],
                loss_mask=masks.get(int(row)),
            )
            for i, row in enumerate(rows)
        ]
        return samples, columns["finish"], oldest

    def finish(self, version: int, tokens: int, sequences: int) -> FinishReport:
        """One optimizer step over everything accumulated; its weights, `version`, start on their way to the relay."""
        began = time.perf_counter()
        # Without trained tokens there is nothing to step on: the engine leaves weights and schedule as they are.
        denominator = loss_denominator(self.algorithm.aggregation, tokens, sequences) if tokens else 0.0
        with self.tracer.span("train/wait_published", lane=self.name):
            waited_s = self.publisher.settle()
        with self.tracer.span("train/optimizer", lane=self.name, version=version):
            optim = self.engine.optim_step(denominator)
        self.samples.finish(version)
        self.publisher.start(version)
        return FinishReport(optim, time.perf_counter() - began, waited_s)

    def start(self, version: int, probe: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """The starting weights on their way to the relay; remember the probe answers."""
        self.probe = list(probe)
        self.publisher.start(version)

    def table(self) -> bytes:
        """What the relay holds, as text; the same on every rank."""
        return self.publisher.relay.table.text

    def serve(self, host: str, secret: bytes) -> str:
        """Serve the relay of this node to the mirrors of other nodes from now on; host:port."""
        self.server = RelayServer(self.publisher.relay.path, secret, host)
        return self.server.address

    def published(self, version: int) -> RankShards:
        """What this rank wrote of `version`, as soon as all of it is in the relay."""
        return self.publisher.result(version)

    def score_probe(self) -> list[np.ndarray]:
        """Log-probabilities of the probe answers at the present version, float32 [L] each."""
        if not self.probe:
            return []
        samples = [
            TrainSample(-1, i, 0, p, r, np.zeros(len(r), np.float32), 0.0, 0, 0) for i, (p, r) in enumerate(self.probe)
        ]
        with self.tracer.span("train/probe", lane=self.name):
            packed = pack(samples)
            flat = self.engine.logprobs([packed], temperature=1.0)[0]  # as rollout engines score
        cuts = np.cumsum([len(r) for _, r in self.probe])[:-1]
        return np.split(flat[packed.loss_mask > 0], cuts)

    def save(self, folder: str, extra: dict) -> None:
        """Checkpoint shards, then the Hugging Face folder of the trained policy beside it."""
        with self.tracer.span("train/save", lane=self.name):
            self.engine.save_checkpoint(str(Path(folder) / "trainer"), extra)
            self.engine.save_hf(str(Path(folder) / "hf"))
            if self.name == "trainer0":
                (Path(folder) / "extra.json").write_text(json.dumps(extra))

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        self.publisher.close()
        self.samples.close()
        self.engine.close()
        self.dock.close()
        self.tracer.close()


def lengths(samples: Sequence[TrainSample], finish: np.ndarray) -> dict[str, float]:
    """Parts of the length metrics."""
    if not samples:
        return {}
    prompts = [len(s.prompt_ids) for s in samples]
    answers = [len(s.response_ids) for s in samples]
    return {
        "samples_count": len(samples),
        "prompt_length_sum": sum(prompts),
        "prompt_length/max": max(prompts),
        "prompt_length/min": min(prompts),
        "response_length_sum": sum(answers),
        "response_length/max": max(answers),
        "response_length/min": min(answers),
        "response_length/clip_ratio_sum": float((np.asarray(finish) == CUT_OFF).sum()),
    }
