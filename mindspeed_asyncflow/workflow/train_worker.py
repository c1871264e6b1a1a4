"""What runs beside a training engine in every trainer rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindspeed_asyncflow.algorithms.aggregate import loss_denominator
from mindspeed_asyncflow.algorithms.moments import Moments
from mindspeed_asyncflow.config.schema import AlgorithmConfig, CorrectionConfig
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.engines.base import TrainEngine
from mindspeed_asyncflow.observe.checkpoints import SavedFile
from mindspeed_asyncflow.observe.trace import Tracer
from mindspeed_asyncflow.records import OptimReport, TrainSample
from mindspeed_asyncflow.reshard.relay_server import RelayServer
from mindspeed_asyncflow.workflow.batcher import pack
from mindspeed_asyncflow.workflow.partial import versions_per_token
from mindspeed_asyncflow.workflow.publisher import Publisher, RankShards
from mindspeed_asyncflow.workflow.sample_log import NoSamples
from mindspeed_asyncflow.workflow.state_keeping import KeepsState

TRAIN_COLUMNS = ["prompt_ids", "response_ids", "rollout_logprobs", "finish"]
CUT_OFF = 1  # code of the `finish` column for an answer that ended at the length limit


@dataclass(frozen=True, slots=True)
class ChunkRules:
    """How the rows of a chunk are trained; the same for all ranks and all chunks of a step."""

    version: int  # of the trainer
    oldest_allowed: int | None = None  # tokens that an older version sampled are masked; None: all are trained
    shift: float = 0.0  # advantages become (advantage - shift) * factor
    factor: float = 1.0


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


class TrainWorker(KeepsState):
    """One trainer rank. All ranks get the same calls in the same order; `published` runs beside the others, as what
    `KeepsState` says."""

    part, lane = "trainer", "train"

    def __init__(
        self,
        engine: TrainEngine,
        dock: DockClient,
        algorithm: AlgorithmConfig,
        correction: CorrectionConfig | None = None,
        *,
        name: str,
        replica: int,
        publisher: Publisher,
        tracer: Tracer,
        samples: NoSamples | None = None,
        conversations: bool = False,
    ) -> None:
        """`conversations`: an environment has written some tokens of the answers; they are not trained."""
        self.engine, self.dock, self.algorithm, self.name = engine, dock, algorithm, name
        self.replica, self.publisher, self.tracer = replica, publisher, tracer
        self.samples = samples or NoSamples()
        self.server: RelayServer | None = None
        self.probe: list[tuple[np.ndarray, np.ndarray]] = []
        self.advantage = "token_advantages" if algorithm.token_level else "advantage"
        self.masks = ["response_mask"] if conversations else []
        self.by_lag = algorithm.proximal == "log_linear" or (correction is not None and correction.stale_power > 0)
        reference = ["ref_logprobs"] if algorithm.kl_coef > 0 and not algorithm.kl_reward else []
        self.columns = [*TRAIN_COLUMNS, self.advantage, *self.masks, *reference, *self.samples.columns]

    def moments(self, rows: Sequence[int], rules: ChunkRules) -> tuple[Moments, Moments]:
        """Of the advantages of all trained tokens of `rows`, and of the rows' rewards."""
        if not len(rows):
            return Moments(), Moments()
        handles = np.array(rows, dtype=np.int64)
        spans = ["response_spans"] if rules.oldest_allowed is not None else []
        columns = self.dock.read(handles, ["response_ids", "finish", "reward", self.advantage, *self.masks, *spans])
        masks, _ = trained_tokens(columns, len(handles), rules, self.algorithm.mask_truncated)
        tokens = [
            np.broadcast_to(np.asarray(advantage, np.float64), len(ids))[mask > 0 if mask is not None else slice(None)]
            for advantage, ids, mask in zip(columns[self.advantage], columns["response_ids"], masks)
        ]
        return Moments.of(np.concatenate(tokens)), Moments.of(np.asarray(columns["reward"], np.float64))

    def train(
        self,
        plan: list[list[list[int]]],
        versions: dict[int, tuple[int, int]],
        groups: dict[int, tuple[int, int]],
        rules: ChunkRules,
        samples_wanted: int = 0,
    ) -> ChunkReport:
        """Accumulate gradients over this replica's micro-batches of `plan` ([replica][micro-batch][row]).

        `versions` and `groups` give (min, max) policy version and (group id, member) of each row.
        """
        began = time.perf_counter()
        with self.tracer.span("train/forward_backward", lane=self.name):
            mine = plan[self.replica]
            rows = np.array([r for batch in mine for r in batch], dtype=np.int64)
            samples, finish, oldest, too_old = self._read(rows, versions, groups, rules)
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
            too_old,
            oldest,
        )

    def _read(
        self,
        rows: np.ndarray,
        versions: dict[int, tuple[int, int]],
        groups: dict[int, tuple[int, int]],
        rules: ChunkRules,
    ) -> tuple[list[TrainSample], np.ndarray, dict[int, int], int]:
        """The samples, their `finish` codes, the oldest version of any trained token by row, and tokens too old."""
        if not len(rows):
            return [], np.zeros(0, dtype=np.uint8), {}, 0
        spans = ["response_spans"] if self.by_lag or rules.oldest_allowed is not None else []
        columns = self.dock.read(rows, [*self.columns, *spans])
        self.samples.add(rows, groups, versions, columns)
        masks, of_tokens = trained_tokens(columns, len(rows), rules, self.algorithm.mask_truncated)
        reference = columns.get("ref_logprobs")
        samples = []
        oldest: dict[int, int] = {}
        for i, row in enumerate(rows.tolist()):
            mask = masks[i]
            if mask is None:
                oldest[row] = versions[row][0]
            elif mask.any():
                oldest[row] = versions[row][0] if of_tokens is None else int(of_tokens[i][mask > 0].min())
            samples.append(
                TrainSample(
                    row=row,
                    group_id=groups[row][0],
                    member=groups[row][1],
                    prompt_ids=columns["prompt_ids"][i],
                    response_ids=columns["response_ids"][i],
                    rollout_logprobs=columns["rollout_logprobs"][i],
                    advantage=(np.asarray(columns[self.advantage][i], np.float64) - rules.shift) * rules.factor,
                    version_min=versions[row][0],
                    version_max=versions[row][1],
                    ref_logprobs=None if reference is None else reference[i],
                    loss_mask=mask,
                    lags=rules.version - of_tokens[i] if self.by_lag and of_tokens is not None else None,
                )
            )
        too_old = 0
        if rules.oldest_allowed is not None and of_tokens is not None:
            too_old = sum(int((v < rules.oldest_allowed).sum()) for v in of_tokens)
        return samples, columns["finish"], oldest, too_old

    def finish(self, version: int, tokens: int, sequences: int) -> FinishReport:
        """One optimizer step over everything accumulated; its weights, `version`, start on their way to the relay.

        `tokens` and `sequences` are those that the loss counted over the whole step; without any, nothing changes.
        """
        began = time.perf_counter()
        a = self.algorithm
        denominator = loss_denominator(a.aggregation, tokens, sequences, a.loss_horizon) if tokens else 0.0
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

    def serve(self, host: str, secret: bytes, ports: range) -> str:
        """Serve the relay of this node to the mirrors of other nodes from now on, at the first free one of `ports`;
        host:port."""
        self.server = RelayServer(self.publisher.relay.path, secret, host, ports)
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

    def _engine(self) -> TrainEngine:
        return self.engine

    def finish_save(self) -> list[SavedFile]:
        files = super().finish_save()
        self.samples.settle()  # of the steps that the checkpoint has
        return files

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        self.publisher.close()
        self.samples.close()
        self.engine.close()
        self.dock.close()
        self.tracer.close()


def trained_tokens(
    columns: Mapping[str, Any], count: int, rules: ChunkRules, mask_truncated: bool
) -> tuple[list[np.ndarray | None], list[np.ndarray] | None]:
    """uint8 [L] of each of `count` answers: 0 where a token is not trained, None where all are; and, where `columns`
    has `response_spans`, the version of each token [L]. `response_mask` is there where an environment wrote tokens."""
    of_tokens = None
    masks: list[np.ndarray | None] = [None] * count
    if "response_spans" in columns:
        of_tokens = [versions_per_token(spans) for spans in columns["response_spans"]]
    if rules.oldest_allowed is not None and of_tokens is not None:
        masks = [(v >= rules.oldest_allowed).astype(np.uint8) for v in of_tokens]
    if "response_mask" in columns:
        masks = [_both(m, np.asarray(written)) for m, written in zip(masks, columns["response_mask"])]
    if mask_truncated:
        cut = np.asarray(columns["finish"]) == CUT_OFF
        ids = columns["response_ids"]
        masks = [np.zeros(len(answer), np.uint8) if c else m for m, c, answer in zip(masks, cut, ids)]
    return masks, of_tokens


def _both(mask: np.ndarray | None, other: np.ndarray) -> np.ndarray:
    return other if mask is None else mask * other


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
