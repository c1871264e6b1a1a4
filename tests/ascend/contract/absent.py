"""Symbols that we use and that one release of a library does not have, each with the reason why that is right.

A new entry is a decision: our code must not reach the symbol in that release.
"""

NO_TRANSFER = "no transfer engine before 0.23: versions.CallShape.transfer_engine is False, our extension loads"
NO_NATIVE = "versions.AscendShape.native is empty there, and NativeTransfer refuses to be made"
NO_FACTORY = "versions.AscendShape.ipc_sender is `factory` from 0.27 on only"
FACTORY = "versions.AscendShape.ipc_sender is `factory` there, so nothing is passed to trainer_send_weights"
UNKNOWN_KEY = "unknown keys are ignored; the option came later"
STANDS_FOR = "vllm-ascend's engine adds it, for which ours stands on CPUs"
SET_ONLY = "is set on the worker, which has no use for it"

_TRANSFER = "vllm.distributed.weight_transfer"
_NO_CLIENT = {
    f"{_TRANSFER}.base.VLLMWeightSyncClient": NO_FACTORY,
    f"{_TRANSFER}.factory.WeightTransferTrainerFactory": NO_FACTORY,
    f"{_TRANSFER}.factory.WeightTransferTrainerFactory.trainer_init": NO_FACTORY,
}
_OF_ASCEND = {f"{_TRANSFER}.base.WeightTransferEngine().trainer_init": STANDS_FOR}
_CPU, _NPU = "vllm.v1.worker.cpu_worker.CPUWorker()", "vllm_ascend.worker.worker.NPUWorker()"
_HCCL = "vllm_ascend.distributed.weight_transfer.hccl_engine"
_IPC = "vllm_ascend.distributed.weight_transfer.npu_ipc_engine"

# (library, version) -> symbol -> reason
ABSENT: dict[tuple[str, str], dict[str, str]] = {
    ("vllm", "0.18.0"): {
        **_NO_CLIENT,
        **_OF_ASCEND,
        f"{_CPU}._weight_update_active": SET_ONLY,
        f"{_CPU}.start_weight_update": NO_TRANSFER,
        f"{_CPU}.finish_weight_update": NO_TRANSFER,
    },
    ("vllm", "0.23.0"): {**_NO_CLIENT, **_OF_ASCEND},
    ("vllm", "0.27.1"): _OF_ASCEND,
    ("vllm_ascend", "0.18.0"): {
        "option:vllm_ascend:weight_nz_mode": "unknown keys are ignored; VLLM_ASCEND_ENABLE_NZ says the same there",
        "option:vllm_ascend:enable_reduce_sample": UNKNOWN_KEY,
        "option:vllm_ascend:enable_fused_mc2": UNKNOWN_KEY,
        f"{_NPU}._weight_update_active": SET_ONLY,
        f"{_NPU}.init_weight_transfer_engine": NO_TRANSFER,
        f"{_NPU}.start_weight_update": NO_TRANSFER,
        f"{_NPU}.update_weights": NO_TRANSFER,
        f"{_NPU}.finish_weight_update": NO_TRANSFER,
        f"{_HCCL}.HCCLWeightTransferInitInfo": NO_NATIVE,
        f"{_HCCL}.HCCLWeightTransferUpdateInfo": NO_NATIVE,
        f"{_HCCL}.HCCLTrainerSendWeightsArgs": NO_NATIVE,
        f"{_HCCL}.HCCLWeightTransferEngine.trainer_init": NO_NATIVE,
        f"{_HCCL}.HCCLWeightTransferEngine.trainer_send_weights": NO_NATIVE,
        f"{_IPC}.NPUIPCTrainerInitInfo": NO_NATIVE,
        f"{_IPC}.NPUIPCTrainerSendWeightsArgs": NO_NATIVE,
        f"{_IPC}.NPUIPCWeightTransferEngine.trainer_send_weights": NO_NATIVE,
    },
    ("vllm_ascend", "0.23.0"): {f"{_IPC}.NPUIPCTrainerInitInfo": NO_FACTORY},
    ("vllm_ascend", "main"): {f"{_IPC}.NPUIPCTrainerSendWeightsArgs": FACTORY},
}
