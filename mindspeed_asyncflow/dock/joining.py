"""Prompt groups as a put names them: are its members possible, and may they join groups that are there?"""

from __future__ import annotations

import numpy as np

from mindspeed_asyncflow.dock.partition import Partition
from mindspeed_asyncflow.dock.store import Store, Values
from mindspeed_asyncflow.dock.wire import Message, WireError
from mindspeed_asyncflow.errors import DockError


def read_groups(message: Message, most_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Ids, sizes and counts of groups, int64 [g], and the members, int32 [rows], of a put."""
    ids, sizes, counts = message.ints("group_ids"), message.ints("sizes"), message.ints("counts")
    members = message.ints("members", "int32")
    if not len(ids) == len(sizes) == len(counts) or not len(ids) or counts.sum() != len(members):
        raise WireError("a put needs one size and count per group and one member number per row")
    if counts.min() < 1 or counts.max() > most_rows:
        raise DockError("a put gives each of its groups at least one row")
    if int(members.min()) < 0:
        raise DockError(f"members count from 0, got {members.min()}")
    if len(members) > len(ids):
        _refuse_twice(np.repeat(np.arange(len(ids)), counts), members, ids)
    return ids, sizes, counts, members


def late_refusal(
    store: Store, part: Partition, ids: np.ndarray, late: np.ndarray, members: np.ndarray, counts: np.ndarray,
    values: Values,
) -> str:  # fmt: skip
    """Why the rows of a put cannot join those of its groups (`late`, bool [g]) that are there; "" when they can."""
    schema, rows = store.schema, part.rows
    groups = part.groups.lookup(ids[late])
    shared = schema.mask([c.name for c in schema.columns.values() if c.shared])
    there = rows.ready[part.groups.pool[part.groups.start[groups]]] & shared
    given = schema.layout(values.columns).mask & shared
    if np.count_nonzero(there == given) != len(there):
        group = int(ids[late][np.argmax(there != given)])
        return f"group {group} has shared columns: members that come later bring the same ones, with equal values"
    if not all(store.equal(part, values, i, groups, late) for i, p in enumerate(values.parts) if p.shared):
        return "members were put into a group whose shared columns have other values"
    slots = rows.lasting(part.groups.members(groups)[0])  # one that is on its way out may come anew
    known = set(zip(rows.group[slots].tolist(), rows.member[slots].tolist()))
    coming = zip(np.repeat(part.groups.lookup(ids), counts).tolist(), members.tolist())
    twice = next((member for group, member in coming if (group, member) in known), None)
    return "" if twice is None else f"member {twice} of a group is there already"


def _refuse_twice(owner: np.ndarray, members: np.ndarray, ids: np.ndarray) -> None:
    key = np.sort((owner << 32) | members)
    same = key[1:] == key[:-1]
    if np.count_nonzero(same):
        group, member = divmod(int(key[int(np.argmax(same))]), 1 << 32)
        raise DockError(f"a put brings member {member} of group {ids[group]} twice")
