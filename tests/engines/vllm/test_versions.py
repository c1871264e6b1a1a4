"""The adapter's calls fit the recorded shapes of every vLLM release that it claims (contract test 13)."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from mindspeed_asyncflow.engines.vllm import versions
from mindspeed_asyncflow.errors import EngineError


@dataclass
class Worker:
    """What all recorded workers share: our extension's methods, and a strict life cycle."""

    log: list[str] = field(default_factory=list)
    open: bool = False

    def relay_begin(self) -> None:
        self.log.append("begin")

    def relay_end(self) -> str:
        assert not self.open
        self.log.append("end")
        return "fp"


class Worker018(Worker):
    """vllm-ascend 0.18: no verbs of its own."""

    def relay_load(self, manifest: str) -> None:
        self.log.append(f"load {manifest}")


class Worker023(Worker):
    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        assert is_checkpoint_format and not self.open
        self.open = True
        self.log.append("start")

    def update_weights(self, update_info: dict) -> None:
        assert self.open
        self.log.append(f"load {update_info['manifest']}")

    def finish_weight_update(self) -> None:
        assert self.open
        self.open = False
        self.log.append("finish")


class Worker027(Worker023):
    def start_weight_update(self) -> None:  # type: ignore[override]
        super().start_weight_update(True)


VLLM = {"0.18.0": Worker018, "0.23.0": Worker023, "0.24.0": Worker023, "0.25.1": Worker027, "0.32.0": Worker027}
ASCEND = {"0.18.0": Worker018, "0.22.1": Worker018, "0.23.0": Worker023, "0.26.1": Worker023, "0.27.1": Worker027}
RELEASES = [(versions.shape_for(v, experts=False), worker) for v, worker in VLLM.items()]
RELEASES += [(versions.ascend_shape_for(v), worker) for v, worker in ASCEND.items()]
NAMES = [f"vllm {v}" for v in VLLM] + [f"vllm-ascend {v}" for v in ASCEND]


@pytest.mark.parametrize(("shape", "kind"), RELEASES, ids=NAMES)
def test_an_update_runs_the_life_cycle_of_the_release(shape: versions.CallShape, kind: type[Worker]) -> None:
    worker = kind()

    def rpc(method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(worker, method)(*args)]

    assert versions.update_weights(rpc, shape, "m") == ["fp"]
    middle = ["start", "load m", "finish"] if shape.transfer_engine else ["load m"]
    assert worker.log == ["begin", *middle, "end"]


def test_releases_that_lose_weights_are_refused() -> None:
    with pytest.raises(EngineError, match=r"use 0\.18 or newer"):
        versions.shape_for("0.11.2", experts=False)
    with pytest.raises(EngineError, match=r"use 0\.18 or newer"):
        versions.ascend_shape_for("0.17.0")
    with pytest.raises(EngineError, match="corrupts expert weights"):
        versions.shape_for("0.32.0", experts=True)
    assert versions.shape_for("0.32.0", experts=False).transfer_engine
    with pytest.raises(EngineError, match="cannot read the vLLM version"):
        versions.parse("dev")


def test_a_worker_without_a_verb_of_its_release_is_refused_at_the_start() -> None:
    """vllm-ascend of one release on the vLLM of another has the number of the one and the worker of the other."""

    def rpc(method: str, args: tuple[Any, ...]) -> list[list[str]]:
        assert method == "missing_verbs"
        return [[verb for verb in args[0] if not hasattr(Worker018, verb)], []]

    with pytest.raises(EngineError, match=r"vLLM 0\.23\.0 has no .*start_weight_update"):
        versions.check_verbs(rpc, versions.ascend_shape_for("0.23.0"), "0.23.0")
    versions.check_verbs(lambda method, args: [[], []], versions.ascend_shape_for("0.23.0"), "0.23.0")


@pytest.mark.parametrize(("text", "parsed"), [("0.27.1+cpu", (0, 27)), ("0.23.0rc1", (0, 23)), ("1.0", (1, 0))])
def test_version_strings_are_read(text: str, parsed: tuple[int, int]) -> None:
    assert versions.parse(text) == parsed


def test_requests_are_built_whatever_required_fields_a_release_has() -> None:
    class Old(msgspec.Struct):
        request_id: str
        prompt_token_ids: list[int] | None
        mm_features: list | None
        eos_token_id: int | None  # gone since
        arrival_time: float
        priority: int = 0

    built = versions.core_request(Old, request_id="r", prompt_token_ids=[1], arrival_time=2.0)
    assert built == Old("r", [1], None, None, 2.0, 0)


@pytest.mark.slow
def test_the_installed_release_has_the_recorded_signatures() -> None:
    """A new vLLM that changes a verb fails here before it fails in a run."""
    import vllm
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_worker import Worker as Installed

    shape = versions.shape_for(vllm.__version__, experts=False)
    recorded = Worker027 if shape.first >= (0, 25) else Worker023
    for verb in ("start_weight_update", "update_weights", "finish_weight_update"):
        assert [p for p in inspect.signature(getattr(Installed, verb)).parameters] == [
            p for p in inspect.signature(getattr(recorded, verb)).parameters
        ]
    expected = {
        "step": ["self"],
        "preprocess_add_request": ["self", "request"],
        "add_request": ["self", "request", "request_wave"],
        "abort_requests": ["self", "request_ids"],
        "reset_prefix_cache": ["self", "reset_running_requests", "reset_connector"],
        "reset_encoder_cache": ["self"],
        "collective_rpc": ["self", "method", "timeout", "args", "kwargs"],
    }
    for name, parameters in expected.items():
        assert list(inspect.signature(getattr(EngineCore, name)).parameters) == parameters
