"""Physical to logical device ids: the one mapping that everybody uses.

Ray and `npu-smi` speak of physical ids; inside a process that sees only some devices, the runtime counts the visible
ones from 0. Pure functions, testable without a device.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from mindspeed_asyncflow.errors import PlatformError

VISIBLE_ENV = "ASCEND_RT_VISIBLE_DEVICES"
log = logging.getLogger(__name__)


def visible_ids(visible: str | None) -> list[int] | None:
    """Physical ids in the order in which the runtime counts them; None when nothing limits them.

    The NPU runtime wants an ascending list: another order is sorted, with a notice, so that logical ids are the same
    in every process of the node.
    """
    if visible is None or visible.strip() == "":
        return None
    try:
        ids = [int(part) for part in visible.split(",")]
    except ValueError:
        raise PlatformError(f"visible devices {visible!r}: expected comma-separated numbers such as 0,1,2") from None
    if len(set(ids)) != len(ids) or min(ids) < 0:
        raise PlatformError(f"visible devices {visible!r}: ids must be distinct and not negative")
    if ids != sorted(ids):
        log.warning("visible devices %r are not ascending: using %s", visible, ",".join(map(str, sorted(ids))))
    return sorted(ids)


def logical_device(physical_id: int, visible: str | None) -> int:
    """The index by which this process addresses the device `physical_id`, given its visible-devices setting."""
    ids = visible_ids(visible)
    if ids is None:
        return physical_id
    if physical_id not in ids:
        raise PlatformError(f"device {physical_id} was assigned, but only {visible!r} are visible to this process")
    return ids.index(physical_id)


def physical_device(index: int, visible: str | None) -> int:
    """The id of the device that this process addresses as `index`: what two processes must agree on to share memory."""
    ids = visible_ids(visible)
    if ids is None:
        return index
    if not 0 <= index < len(ids):
        raise PlatformError(f"device index {index} does not exist: {len(ids)} devices are visible ({visible!r})")
    return ids[index]


def visible_to(assigned: Iterable[int | str], visible: str | None = None) -> str:
    """The visible-devices setting of a process that shall see only the `assigned` physical ids, in ascending order.

    `visible`: the setting that it was started with. Whether Ray has narrowed that list already, or was told not to
    (RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES), the outcome is the same.
    """
    wanted = visible_ids(",".join(map(str, sorted(map(int, assigned)))))
    if wanted is None:
        raise PlatformError("no device was assigned to a process that needs one")
    for device in wanted:
        logical_device(device, visible)
    return ",".join(map(str, wanted))
