"""Libraries that MindSpeed imports and whose contents no test calls: importable, empty, and loud when used."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

PLACEHOLDERS = ("torchair", "torch_npu.profiler", "torch_npu.dynamo", "torch_npu.utils", "triton", "scipy")


class _Unused:
    """What stands for an imported name: it may be subclassed, and be a decorator or give one. Anything else, such as
    arithmetic on what a call gives, is an error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unused(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], types.FunctionType | type) and not kwargs:
            return args[0]
        return _Unused(f"{self._name}(...)")

    def __mro_entries__(self, bases: Any) -> tuple:
        return (object,)

    def __getitem__(self, key: Any) -> Any:
        return self


class _Placeholder(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unused(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if any(name == p or name.startswith(p + ".") for p in PLACEHOLDERS):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return _Placeholder(spec.name)

    def exec_module(self, module: Any) -> None: ...


def install() -> None:
    sys.meta_path.append(_Finder())
    import torch_npu.utils.collect_env as collect_env

    collect_env.get_cann_version = lambda *args, **kwargs: "9.1.0"
    import triton
    import triton.runtime.driver as driver

    triton.__version__ = "3.2.0"
    target = types.SimpleNamespace(backend="npu", arch="Ascend910B3")
    driver.active = types.SimpleNamespace(get_current_target=lambda: target)
