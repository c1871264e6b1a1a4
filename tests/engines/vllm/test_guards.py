"""NPU settings that break weight updates are refused without needing an NPU."""

from __future__ import annotations

import pytest

from mindspeed_asyncflow.engines.vllm.guards import check_npu_settings
from mindspeed_asyncflow.errors import PlatformError

GOOD = {"VLLM_ASCEND_ENABLE_NZ": "0"}


def test_good_settings_pass() -> None:
    check_npu_settings(GOOD, sleep=True, enforce_eager=True)
    check_npu_settings({**GOOD, "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}, sleep=False, enforce_eager=True)


@pytest.mark.parametrize("environ", [{}, {"VLLM_ASCEND_ENABLE_NZ": "1"}])
def test_the_nz_layout_is_refused_and_on_by_default(environ: dict[str, str]) -> None:
    with pytest.raises(PlatformError, match="VLLM_ASCEND_ENABLE_NZ must be 0"):
        check_npu_settings(environ, sleep=False, enforce_eager=True)


@pytest.mark.parametrize("value", ["expandable_segments:True", "max_split_size_mb:64, expandable_segments: true"])
def test_expandable_segments_are_refused_with_sleep(value: str) -> None:
    with pytest.raises(PlatformError, match="expandable_segments"):
        check_npu_settings({**GOOD, "PYTORCH_NPU_ALLOC_CONF": value}, sleep=True, enforce_eager=True)


def test_graph_mode_is_refused() -> None:
    with pytest.raises(PlatformError, match="eager"):
        check_npu_settings(GOOD, sleep=False, enforce_eager=False)
