"""What our source does not tell by itself of the libraries that it uses: types behind names, dictionaries with meaning.

Keys are (end of the file's path, name); `lookup` finds an entry.
"""

from __future__ import annotations

from collections.abc import Mapping

_HCCL = "vllm_ascend.distributed.weight_transfer.hccl_engine"
_IPC = "vllm_ascend.distributed.weight_transfer.npu_ipc_engine"

# The class behind a name.
HINTS = {
    ("engines/vllm/backend.py", "output"): "vllm.v1.engine.EngineCoreOutput()",
    ("engines/vllm/backend.py", "tensors"): "vllm.v1.outputs.LogprobsTensors()",
}
# What a call of ours gives.
GIVES = {
    ("engines/vllm/sender.py", "_registered('hccl')"): f"{_HCCL}.HCCLWeightTransferEngine",
    ("engines/vllm/sender.py", "_registered('npu_ipc')"): f"{_IPC}.NPUIPCWeightTransferEngine",
    ("platforms/attention_block.py", "torch_npu_for(q)"): "torch_npu",
}
# Types of members that the libraries' sources do not tell.
MEMBERS = {
    "vllm.v1.engine.core.EngineCore().model_executor": "vllm.v1.executor.abstract.Executor()",
    "vllm.v1.worker.cpu_worker.CPUWorker().model_runner": "vllm.v1.worker.cpu_model_runner.CPUModelRunner()",
    "vllm_ascend.worker.worker.NPUWorker().model_runner": "vllm_ascend.worker.model_runner_v1.NPUModelRunner()",
}
# Classes of ours that stand for one of theirs without deriving from it.
DERIVES = {("engines/vllm/sender.py", "_Deliver"): "vllm.distributed.weight_transfer.base.VLLMWeightSyncClient"}
# Classes that vLLM mixes into its worker: their `self` is that worker, beside what they define themselves.
EXTENSIONS = ("RelayWorker",)
WORKER = "worker()"  # stands for the classes of all libraries that have one
WORKERS = ("vllm.v1.worker.cpu_worker.CPUWorker()", "vllm_ascend.worker.worker.NPUWorker()")
# Our functions that call a method of vLLM's workers by its name, constants that hold such names, and our functions that
# build the class they are given.
CALL_BY_NAME = ("collective_rpc", "rpc")
VERBS = "_VERBS"
FORWARDERS = ("core_request",)

# Keys of dictionaries that a library reads as its options: by the name under which one is passed on, or by where it
# stands, with what it holds beside them.
SETTINGS = {"additional_config": "vllm_ascend"}
_MEGATRONS = "transformer_impl position_embedding_type use_flash_attn"
TABLES = {
    ("config/mindspeed.py", "NAMED"): "mindspeed",
    ("config/mindspeed.py", "REFUSED"): "mindspeed",
    ("config/ascend_rollout.py", "HARMFUL"): "vllm_ascend",
    ("platforms/mindspeed.py", "arguments()"): f"mindspeed but {_MEGATRONS}",
}
# Dictionaries that a library makes one of its classes from, by one of their keys.
BUILDS = {
    ("engines/vllm/native.py", "rank_offset"): f"{_HCCL}.HCCLWeightTransferInitInfo",
    ("engines/vllm/native.py", "dtype_names"): f"{_HCCL}.HCCLWeightTransferUpdateInfo",
    ("engines/vllm/sender.py", "group"): f"{_HCCL}.HCCLTrainerSendWeightsArgs",
    ("engines/vllm/sender.py", "send_mode"): f"{_IPC}.NPUIPCTrainerSendWeightsArgs",
}


def lookup(table: Mapping[tuple[str, str], str], file: str, name: str) -> str:
    """The entry for `name` in `file`, or ""."""
    return next((found for (end, known), found in table.items() if known == name and file.endswith(end)), "")
