"""Fixtures of the engine tests: policies, and one shared engine of each kind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.engines.bench import Bench, House, Policy, make_model


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Policy]]:
    root = tmp_path_factory.mktemp("models")
    return {
        family: {name: Policy(make_model(root / family / name, family, seed)) for seed, name in enumerate("ab")}
        for family in ("dense", "experts")
    }


@pytest.fixture(scope="session")
def house(policies: dict[str, dict[str, Policy]]) -> Iterator[House]:
    """vLLM changes the process that it runs in; everything else of the test run gets it back as it was."""
    environ = dict(os.environ)
    patched = {(torch, "set_num_threads"), (torch.accelerator, "synchronize"), (torch.accelerator, "empty_cache")}
    originals = {(owner, name): getattr(owner, name) for owner, name in patched}
    threads = torch.get_num_threads()
    house = House(policies)
    yield house
    house.close()
    for (owner, name), value in originals.items():
        setattr(owner, name, value)
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environ)


@pytest.fixture(params=["reference", pytest.param("vllm", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def bench(kind: str, house: House) -> Bench:
    """A RUNNING engine that serves policy "a" of the dense family."""
    return house.bench(kind, "dense")
