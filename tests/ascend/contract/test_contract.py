"""Every call of ours fits what the supported releases of torch_npu, MindSpeed, vLLM and vllm-ascend offer."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from mindspeed_asyncflow.engines.vllm import versions
from mindspeed_asyncflow.platforms import matrix
from tests.ascend.contract import calls, known, signatures
from tests.ascend.contract.absent import ABSENT

ROOT = Path(__file__).parents[3]
RELEASES = signatures.load()


@cache
def ours():
    return calls.collect(ROOT)


def problems(uses, release):
    """What does not fit, but for what is known to be absent from the release."""
    known = ABSENT.get((release.library, release.version), {})
    said = [signatures.problem(use, release) for use in uses if use.library == release.library]
    return [text for text in said if text and not any(f" {symbol} (" in text for symbol in known)]


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_every_use_fits_the_release(release):
    assert problems(ours(), release) == []


@pytest.mark.parametrize("key", ABSENT, ids=" ".join)
def test_what_is_excused_is_used_and_absent(key):
    (release,) = [r for r in RELEASES if (r.library, r.version) == key]
    wrong = [symbol for symbol in ABSENT[key] if release.symbols.get(symbol, "not used") is not None]
    assert wrong == []


def test_every_library_that_is_used_has_records_of_the_supported_releases():
    recorded = {(release.library, release.version) for release in RELEASES}
    wanted = {("vllm", v) for v in ("0.18.0", "0.23.0", "0.27.1")}
    wanted |= {("vllm_ascend", v) for v in ("0.18.0", "0.23.0", "main")}
    wanted |= {("mindspeed", v) for v in ("core_r0.16.0", "26.1.0_core_r0.12.1")}
    assert recorded >= wanted
    assert {use.library for use in ours()} <= {library for library, _ in recorded}
    for row in matrix.TRAINER:
        assert ("mindspeed", row.mindspeed) in recorded and ("torch_npu", row.torch_npu) in recorded


def test_records_say_where_they_come_from():
    for release in RELEASES:
        assert len(release.commit) in (40, 71) and release.source and len(release.date) == 10
    stored = [json.dumps(release.symbols) for release in RELEASES]
    assert sum(map(len, stored)) < 200_000


def test_the_calls_of_the_device_path_are_among_those_that_are_seen():
    seen = {(use.file.rpartition("/")[2], use.symbol) for use in ours()}
    assert ("kernels.py", "torch_npu.npu_fusion_attention") in seen
    assert ("attention_block.py", "torch_npu.npu_fusion_attention_grad") in seen
    assert ("npu.py", "torch_npu.npu.set_device") in seen
    assert ("backend.py", "vllm.v1.engine.core.EngineCore().step") in seen
    assert ("transfer.py", "vllm.distributed.weight_transfer.base.WeightTransferInitInfo") in seen
    assert any(symbol == "vllm_ascend.worker.worker.NPUWorker().update_weights" for _, symbol in seen)
    assert any(symbol == "mindspeed.megatron_adaptor" for _, symbol in seen)


# ---- drift is found ------------------------------------------------------------------------------------------------

CALLER = """
import sys
import torch
from vllm.v1.engine.core import EngineCore
from vllm.distributed.weight_transfer.base import WeightTransferEngine

def library():
    return sys.modules.get("torch_npu")

def attend(q):
    npu = library()
    return npu.npu_rms_norm(q, q, epsilon=1e-6)

class Backend:
    def __init__(self, config, executor):
        self.core = EngineCore(config, executor, log_stats=False)

    def step(self):
        torch.npu.synchronize()
        self.core.collective_rpc("update_weights", args=({},))
        return self.core.step()

class Engine(WeightTransferEngine):
    def receive_weights(self, update_info): ...
"""
RECORDS = {
    "torch_npu": "module",
    "torch_npu.npu_rms_norm": ["(self, gamma, epsilon=...)"],
    "torch_npu.npu.synchronize": ["(device=...)"],
    "vllm.v1.engine.core.EngineCore": ["(vllm_config, executor_class, log_stats)"],
    "vllm.v1.engine.core.EngineCore().step": ["()"],
    "vllm.v1.engine.core.EngineCore().collective_rpc": ["(method, timeout=..., args=..., kwargs=...)"],
    "vllm.v1.worker.cpu_worker.CPUWorker().update_weights": ["(update_info)"],
    "vllm_ascend.worker.worker.NPUWorker().update_weights": ["(update_info)"],
    "vllm.distributed.weight_transfer.base.WeightTransferEngine": ["(config)"],
    "vllm.distributed.weight_transfer.base.WeightTransferEngine().receive_weights": ["(update_info)"],
}
ABSTRACT = {"vllm.distributed.weight_transfer.base.WeightTransferEngine": ["receive_weights"]}


def drift(symbols=(), abstract=ABSTRACT, text=CALLER):
    """Findings about `text` with some records changed."""
    release = signatures.Release("any", "9.9", "", "", "", RECORDS | dict(symbols), abstract)
    return [said for use in calls.read({"ours.py": text}) if (said := signatures.problem(use, release))]


def test_the_example_itself_fits():
    assert drift() == []


@pytest.mark.parametrize(
    ("symbol", "record", "line", "said"),
    [
        ("torch_npu.npu_rms_norm", ["(self, gamma, eps=...)"], 12, "no parameter epsilon"),
        ("torch_npu.npu_rms_norm", ["(self, epsilon=...)"], 12, "epsilon is passed twice"),
        ("torch_npu.npu_rms_norm", ["(self, *, gamma, epsilon=...)"], 12, "2 positional arguments are passed"),
        ("torch_npu.npu_rms_norm", ["(self, gamma, beta, epsilon=...)"], 12, "beta of (self"),
        ("torch_npu.npu_rms_norm", None, 12, "no such symbol"),
        ("torch_npu.npu.synchronize", None, 19, "no such symbol"),
        ("torch_npu.npu.synchronize", "value", 19, "is called, but is a value"),
        ("vllm.v1.engine.core.EngineCore", ["(vllm_config, *, log_stats)"], 16, "takes 1"),
        ("vllm.v1.engine.core.EngineCore().step", None, 21, "no such symbol"),
        ("vllm.v1.worker.cpu_worker.CPUWorker().update_weights", ["()"], 20, "takes 0"),
        ("vllm_ascend.worker.worker.NPUWorker().update_weights", None, 20, "no such symbol"),
        (
            "vllm.distributed.weight_transfer.base.WeightTransferEngine().receive_weights",
            ["(update_info, load_weights)"],
            24,
            "it is called as (update_info, load_weights)",
        ),
    ],
)
def test_a_drift_is_named_with_its_file_and_line(symbol, record, line, said):
    (found,) = [text for text in drift({symbol: record}) if "import" not in text]
    assert found.startswith(f"ours.py:{line}: {symbol} (any 9.9): ") and said in found


def test_a_module_that_disappears_is_found_at_its_import():
    gone = drift({"vllm.distributed.weight_transfer.base.WeightTransferEngine": None})
    assert [text.partition(":")[2].partition(":")[0] for text in gone] == ["5", "23"]


def test_a_new_abstract_method_of_a_base_is_found():
    (found,) = drift(abstract={next(iter(ABSTRACT)): ["receive_weights", "prepare"]})
    assert "ours.py:23: " in found and "our subclass does not define prepare" in found


def test_a_new_call_without_a_record_asks_for_a_refresh():
    release = signatures.Release("any", "9.9", "", "", "", RECORDS, ABSTRACT)
    uses = calls.read({"ours.py": CALLER + "\ntorch.npu.set_compile_mode(jit_compile=False)\n"})
    (found,) = [said for use in uses if (said := signatures.problem(use, release))]
    assert "torch_npu.npu.set_compile_mode" in found and "run scripts/refresh_contracts.py" in found


def test_an_excuse_covers_its_own_symbol_only():
    (release,) = [r for r in RELEASES if (r.library, r.version) == ("vllm", "0.18.0")]
    spoilt = replace(release, symbols=release.symbols | {"vllm.v1.engine.core.EngineCore().step": None})
    new = set(problems(ours(), spoilt)) - set(problems(ours(), release))
    assert {text.split(": ")[1].split(" ")[0] for text in new} == {"vllm.v1.engine.core.EngineCore().step"}


@pytest.mark.parametrize(
    "release", [r for r in RELEASES if r.library in ("vllm", "vllm_ascend")], ids=lambda release: release.name
)
def test_the_row_of_a_release_names_verbs_and_arguments_of_its_worker(release):
    version = "0.27.1" if release.version == "main" else release.version
    on_npu = release.library == "vllm_ascend"
    row = versions.ascend_shape_for(version) if on_npu else versions.shape_for(version, experts=False)
    worker = known.WORKERS[on_npu]
    assert [verb for verb in row.verbs if not isinstance(release.symbols[f"{worker}.{verb}"], list)] == []
    if row.transfer_engine:
        start = calls.Use("versions.py", 0, f"{worker}.start_weight_update", positional=len(row.start_args))
        assert signatures.problem(start, release) == ""
        assert signatures.problem(replace(start, positional=2), release) != ""
