"""How processes ask the NPU memory allocator to grow its segments, or not to. Pure functions of an environment."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_asyncflow.errors import PlatformError

OWN, GENERAL = "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
_ALONE = ("max_split_size_mb", "garbage_collection_threshold")  # torch_npu takes them without growing segments only


def allocator_environment(present: Mapping[str, str], expandable: bool, key: str) -> dict[str, str]:
    """The variable with `expandable_segments` set, its other options as they are in `present`.

    torch_npu takes its options from one of two variables and refuses both. `key`: the setting, for the message of the
    `PlatformError` for options that exclude each other.
    """
    if present.get(OWN) and present.get(GENERAL):
        raise PlatformError(f"{OWN} and {GENERAL} are both set, torch_npu takes one of them: unset {GENERAL}")
    variable = GENERAL if present.get(GENERAL) else OWN
    options = [option.strip() for option in present.get(variable, "").split(",") if option.strip()]
    others = [option for option in options if not option.startswith("expandable_segments:")]
    excluded = [option for option in others if option.split(":")[0] in _ALONE]
    if expandable and excluded:
        raise PlatformError(f"{variable} has {', '.join(excluded)}, which cannot be with {key}=true: set {key}=false")
    return {variable: ",".join([*others, f"expandable_segments:{expandable}"])}
