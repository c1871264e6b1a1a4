"""One error type per boundary. Every message names what was seen and which knob to turn."""

from __future__ import annotations


class AsyncFlowError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConfigError(AsyncFlowError):
    """A setting is unknown, misplaced, of the wrong type, or does not fit the others."""


class PlatformError(AsyncFlowError):
    """The machine lacks a device, port, memory or library that the configuration asks for."""


class DataError(AsyncFlowError):
    """Prompts, tokenizer or model folder cannot be used as they are."""


class DockError(AsyncFlowError):
    """The transfer dock refused a call."""


class StaleHandle(DockError):
    """A row handle outlived its row: the slot now belongs to another generation."""


class DockFull(DockError):
    """A write does not fit into the warehouse (now, or ever)."""


class DockMemoryLost(DockError):
    """What a dock pair has left in shared memory is gone or damaged: it cannot go on from it."""


class ClaimLost(DockError):
    """A result came for a claim that has ended: its lease ran out, it was released, or its worker was forgotten."""


class ClaimUnknown(ClaimLost):
    """A pair of the dock has never granted this claim."""


class DeadlineExceeded(AsyncFlowError):
    """A wait ended without its event; the message says for whom it waited and how long."""


class ClientSilent(DeadlineExceeded):
    """A run that somebody drives from outside waits for its client, who calls nothing any more."""


class Unanswered(DeadlineExceeded):
    """The other side said nothing in time: whether it has carried out the call, or still will, is not known."""


class EngineError(AsyncFlowError):
    """A training or rollout engine refused a call or broke."""


class WeightSyncError(EngineError):
    """Weights served and weights trained differ, or a version is not available."""


class RewardError(AsyncFlowError):
    """A scorer returned something that is not a finite number or a declared abstention."""


class WorkerLost(AsyncFlowError):
    """A process of the run died; the message names it and its last words."""


class WorkerReplaced(WorkerLost):
    """A process died during a call, and another one has its place: what it was asked can be asked again."""


class MetricError(AsyncFlowError):
    """A metric name is not in the table, its parts do not fit, or a summary does not add up."""


class RecordError(AsyncFlowError):
    """What a run recorded for `asyncflow replay` is missing, torn, or does not fit the run."""


class CheckpointError(AsyncFlowError):
    """A checkpoint cannot be written, is not whole, is damaged, or does not fit the run."""


class LedgerError(AsyncFlowError):
    """The ledger of a run is missing, damaged, or cannot be written."""


class ServiceError(AsyncFlowError):
    """A request of the service interface cannot be met. `status`: that of its HTTP answer; `code`: one word for it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code
