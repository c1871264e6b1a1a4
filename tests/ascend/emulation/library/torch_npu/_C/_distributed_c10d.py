"""The options of a communicator, with what the device checks of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

KEYS = {"hccl_buffer_size": int, "group_name": str, "hccl_op_expansion_mode": int, "qos_service_level": int}


class _Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self._hccl_config: dict[str, Any] = {}
        self.backend, self._timeout = "hccl", timedelta(minutes=30)

    @property
    def hccl_config(self) -> dict[str, Any]:
        return self._hccl_config

    @hccl_config.setter
    def hccl_config(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if not isinstance(value, KEYS.get(name, object)):
                raise RuntimeError(f"Value type of {name} is not {KEYS[name].__name__}: {value!r}")
        self._hccl_config = dict(values)


class ProcessGroupHCCL:
    Options = _Options
