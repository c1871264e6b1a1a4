"""Target: the `__init__` files of the packages mbridge and mbridge.models (0.15).

Reason: they import the converter of every architecture, vision models and torch's compiler among them, which doubles
the start time of each trainer rank. Bare packages in their place let `mbridge.models.qwen2` be imported alone.
Link: https://github.com/ISEEKYAN/mbridge/blob/main/mbridge/models/__init__.py
Remove: when mbridge imports its architectures lazily.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types

from mindspeed_asyncflow import patches

PACKAGES = ("mbridge", "mbridge.models")


def install() -> None:
    if "mbridge" in sys.modules:
        return
    spec = importlib.util.find_spec("mbridge")
    patches.require(spec is not None and bool(spec.submodule_search_locations), "mbridge", "it is not installed")
    assert spec is not None and spec.submodule_search_locations is not None
    root = list(spec.submodule_search_locations)
    patches.require(os.path.isfile(os.path.join(root[0], "models", "qwen2.py")), "mbridge.models.qwen2", "no such file")
    for name in PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [os.path.join(folder, *name.split(".")[1:]) for folder in root]
        package.__spec__ = importlib.util.spec_from_loader(name, loader=None, is_package=True)
        sys.modules[name] = package
    sys.modules["mbridge"].models = sys.modules["mbridge.models"]  # type: ignore[attr-defined]
