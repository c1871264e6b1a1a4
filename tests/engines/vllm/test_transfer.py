"""The transfer engine inside vLLM's worker, fed by a relay; importing vLLM alone takes seconds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.reshard.relay import manifest_to_json
from tests.reshard.whole_writer import WholeWriter

pytestmark = pytest.mark.slow


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full((3, 4), float(seed))) for name in ("first", "second")]


@pytest.mark.parametrize("handed_in", [True, False], ids=["by the worker", "of the model"])
def test_a_version_that_is_recycled_while_vllm_loads_it_is_not_loaded(tmp_path: Path, handed_in: bool) -> None:
    from mindspeed_asyncflow.engines.vllm.transfer import RelayTransferEngine, RelayUpdate

    later: list[int] = []
    with WholeWriter(str(tmp_path / "relay"), keep=1) as writer:

        def load_weights(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            for _ in tensors:
                while later:
                    writer.publish(later[0], weights(later.pop(0)))

        engine: Any = object.__new__(RelayTransferEngine)  # its constructor wants a whole vLLM configuration
        engine.model = SimpleNamespace(load_weights=load_weights)
        more = (load_weights,) if handed_in else ()
        manifest = writer.publish(1, weights(1))
        update = RelayUpdate(manifest=manifest_to_json(manifest))
        engine.receive_weights(update, *more)
        assert engine.loaded == manifest.fingerprint
        later += [2, 3]
        with pytest.raises(WeightSyncError, match=r"version 1 is not in the relay .* keeps 3"):
            engine.receive_weights(update, *more)
        assert engine.loaded == ""
