"""Symbols that we use and that one release of a library does not have, each with the reason why that is right.

A new entry is a decision: our code must not reach the symbol in that release.
"""

NO_TRANSFER = "no transfer engine before 0.23: versions.CallShape.transfer_engine is False, our extension loads"
NO_FACTORY = "versions.AscendShape.ipc_sender is `factory` from 0.27 on only"
SET_ONLY = "is set on the worker, which has no use for it"

_TRAINER = "vllm.distributed.weight_transfer.factory.WeightTransferTrainerFactory"
_CPU, _NPU = "vllm.v1.worker.cpu_worker.CPUWorker()", "vllm_ascend.worker.worker.NPUWorker()"
_IPC = "vllm_ascend.distributed.weight_transfer.npu_ipc_engine.NPUIPCTrainerInitInfo"

# (library, version) -> symbol -> reason
ABSENT: dict[tuple[str, str], dict[str, str]] = {
    ("vllm", "0.18.0"): {
        f"{_CPU}._weight_update_active": SET_ONLY,
        f"{_CPU}.start_weight_update": NO_TRANSFER,
        f"{_CPU}.finish_weight_update": NO_TRANSFER,
        _TRAINER: NO_FACTORY,
        f"{_TRAINER}.trainer_init": NO_FACTORY,
    },
    ("vllm", "0.23.0"): {_TRAINER: NO_FACTORY, f"{_TRAINER}.trainer_init": NO_FACTORY},
    ("vllm_ascend", "0.18.0"): {
        "option:vllm_ascend:weight_nz_mode": "unknown keys are ignored; VLLM_ASCEND_ENABLE_NZ says the same there",
        "option:vllm_ascend:enable_reduce_sample": "unknown keys are ignored; the feature came later",
        f"{_NPU}._weight_update_active": SET_ONLY,
        f"{_NPU}.init_weight_transfer_engine": NO_TRANSFER,
        f"{_NPU}.start_weight_update": NO_TRANSFER,
        f"{_NPU}.update_weights": NO_TRANSFER,
        f"{_NPU}.finish_weight_update": NO_TRANSFER,
        _IPC: NO_FACTORY,
    },
    ("vllm_ascend", "0.23.0"): {_IPC: NO_FACTORY},
}
