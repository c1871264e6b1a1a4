"""Workers with the call shapes and the habits of vllm-ascend's releases, around vLLM's own layerwise reload on CPU.

Expert layers keep their weights turned for the kernels; up to 0.26 that makes new parameters without a loader, and
waking turns them back. The methods of our worker extension are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from mindspeed_asyncflow.engines.vllm.transfer import RelayTransferEngine, RelayUpdate, RelayWorker

EXPERTS, HIDDEN, INNER = 2, 6, 4  # w13 [E, 2 * INNER, HIDDEN], w2 [E, HIDDEN, INNER] in a checkpoint


class Turning(QuantizeMethodBase):
    """Turns expert weights for the kernels. `in_place`: as main does, the parameter and its loader stay."""

    def __init__(self, in_place: bool) -> None:
        self.in_place = in_place

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None: ...

    def apply(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        for name in ("w13_weight", "w2_weight"):
            parameter = getattr(layer, name)
            turned = parameter.data.transpose(1, 2).contiguous()
            if self.in_place:
                parameter.data = turned
            else:
                setattr(layer, name, torch.nn.Parameter(turned, requires_grad=False))


def _load(param: torch.Tensor, loaded: torch.Tensor) -> None:  # vLLM asks for the first one's name
    assert param.shape == loaded.shape, f"{tuple(loaded.shape)} into {tuple(param.shape)}"
    param.data.copy_(loaded)


class Model(torch.nn.Module):
    """One expert layer and a norm."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.norm, self.experts = torch.nn.Module(), torch.nn.Module()
        for layer, name, shape in (
            (self.norm, "weight", (HIDDEN,)),
            (self.experts, "w13_weight", (EXPERTS, 2 * INNER, HIDDEN)),
            (self.experts, "w2_weight", (EXPERTS, HIDDEN, INNER)),
        ):
            parameter = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
            parameter.weight_loader = _load  # type: ignore[attr-defined]
            layer.register_parameter(name, parameter)
        self.experts.quant_method = Turning(in_place)  # type: ignore[assignment]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            parameter = self.get_parameter(name)
            parameter.weight_loader(parameter, loaded)  # type: ignore[attr-defined, operator]


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: tuple(p.shape) for name, p in Model(True).named_parameters()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def kernel_form(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the kernels must find after `weights` were loaded."""
    return {n: w.transpose(1, 2).contiguous() if "experts" in n else w for n, w in weights.items()}


class Wire:
    """A native transfer engine that loads what lies on it. `lost`: it receives and never loads."""

    def __init__(self, model: Model, reloads: bool = True, lost: bool = False) -> None:
        self.model, self.reloads, self.lost = model, reloads, lost
        self.pairs: list[tuple[str, torch.Tensor]] = []
        self.joined: dict[str, Any] | None = None

    def start_weight_update(self) -> None:
        if self.reloads:
            initialize_layerwise_reload(self.model)

    def receive_weights(self, info: dict[str, Any], load_weights: Callable[..., None] | None = None) -> None:
        load = load_weights or self.model.load_weights
        for pair in self.pairs:
            if isinstance(pair[1], BaseException):
                raise pair[1]
            if not self.lost:
                load([pair])

    def finish_weight_update(self) -> None:
        if self.reloads:
            finalize_layerwise_reload(self.model, None)


class Npu018(RelayWorker):
    """No transfer verbs. Waking turns expert weights back, whatever comes next."""

    in_place = False

    def __init__(self, first: dict[str, torch.Tensor], backend: str = "relay") -> None:
        model = Model(self.in_place)
        record_metadata_for_reloading(model)
        model.load_weights(first.items())
        model.experts.quant_method.process_weights_after_loading(model.experts)  # type: ignore[operator, union-attr]
        self.model_runner = SimpleNamespace(model=model, kv_caches=[])
        self.model_config, self.vllm_config, self.device = None, None, torch.device("cpu")
        self.weight_transfer_engine = self._engine(model, backend)
        self.calls: list[str] = []

    def _engine(self, model: Model, backend: str) -> Any:
        return None

    def rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(method)
        return [getattr(self, method)(*args)]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.data for name, p in self.model_runner.model.named_parameters()}

    def sleep(self, level: int = 1) -> None:
        if level == 2:
            for parameter in self.model_runner.model.parameters():
                parameter.data.fill_(float("nan"))

    def wake_up(self, tags: list[str] | None = None) -> None:
        experts = self.model_runner.model.experts
        for name in ("w13_weight", "w2_weight"):
            turned = getattr(experts, name).transpose(1, 2)
            setattr(experts, name, torch.nn.Parameter(turned, requires_grad=False))


class Npu023(Npu018):
    """The worker owns the reload and hands the engine what loads."""

    _weight_update_active = False

    def _engine(self, model: Model, backend: str) -> Any:
        if backend != "relay":
            return Wire(model)
        engine: Any = object.__new__(RelayTransferEngine)  # its constructor wants a whole vLLM configuration
        engine.model, engine.model_config = model, None
        return engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.weight_transfer_engine.joined = init_info

    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        assert is_checkpoint_format and not self._weight_update_active
        initialize_layerwise_reload(self.model_runner.model)
        self._weight_update_active = True

    def _info(self, update_info: dict[str, Any]) -> Any:
        return RelayUpdate(**update_info) if "manifest" in update_info else update_info

    def update_weights(self, update_info: dict[str, Any]) -> None:
        assert self._weight_update_active
        load = self.model_runner.model.load_weights
        self.weight_transfer_engine.receive_weights(self._info(update_info), load_weights=load)

    def finish_weight_update(self) -> None:
        assert self._weight_update_active
        finalize_layerwise_reload(self.model_runner.model, self.model_config)
        self._weight_update_active = False


class Npu027(Npu023):
    """The engine owns the reload, npu_ipc has none, parameters keep their loaders and waking turns nothing."""

    in_place = True

    def _engine(self, model: Model, backend: str) -> Any:
        return Wire(model, reloads=False) if backend == "npu_ipc" else super()._engine(model, backend)

    def start_weight_update(self) -> None:  # type: ignore[override]
        assert not self._weight_update_active
        self.weight_transfer_engine.start_weight_update()
        self._weight_update_active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        assert self._weight_update_active
        try:
            self.weight_transfer_engine.receive_weights(self._info(update_info))
        except BaseException:
            self._weight_update_active = False
            raise

    def finish_weight_update(self) -> None:
        assert self._weight_update_active
        self.weight_transfer_engine.finish_weight_update()
        self._weight_update_active = False

    def wake_up(self, tags: list[str] | None = None) -> None:
        """The memory is back."""


WORKERS = {"0.18.0": Npu018, "0.23.0": Npu023, "0.24.0": Npu023, "0.26.0": Npu023, "0.27.1": Npu027}
