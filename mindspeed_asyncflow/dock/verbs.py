"""The verbs of a node that move no values: they read a message and tell the controller."""

from __future__ import annotations

from mindspeed_asyncflow.dock.columns import Schema, TaskSpec
from mindspeed_asyncflow.dock.controller import Controller
from mindspeed_asyncflow.dock.wire import Message
from mindspeed_asyncflow.errors import DockError


class ControlVerbs:
    """Each returns the answer or raises; see `DockNode`."""

    schema: Schema
    controller: Controller

    # -- claims end ------------------------------------------------------------------------------------------------

    def _done(self, message: Message, now: float) -> dict:
        rows, claim_id = message.optional_ints("rows"), message.optional_whole("claim_id")
        part, slots = (None, None) if rows is None else self.controller.resolve(rows)
        if claim_id is not None:
            self.controller.done(claim_id, part, slots, now)
        elif part is not None and slots is not None:
            self.controller.done_rows(part, message.text("task"), slots, now)
        else:
            raise DockError("done needs a claim, or a task and rows")
        return {}

    def _release(self, message: Message, now: float) -> dict:
        rows = message.optional_ints("rows")
        part, slots = (None, None) if rows is None else self.controller.resolve(rows)
        self.controller.release(message.whole("claim_id"), part, slots, now)
        return {}

    def _renew(self, message: Message, now: float) -> dict:
        self.controller.leases.get(message.whole("claim_id"), now)
        return {}

    def _finish(self, message: Message, now: float) -> dict:
        task = self.schema.task(message.text("task"))
        part, slots = self.controller.resolve(message.ints("rows"))
        self.controller.finish(part, task.name, slots, now)
        return {}

    def _forget(self, message: Message, now: float) -> dict:
        return {"claims": self.controller.forget_worker(message.text("worker"), now)}

    # -- rows and partitions go ------------------------------------------------------------------------------------

    def _drop(self, message: Message, now: float) -> dict:
        rows = message.optional_ints("rows")
        if rows is not None:
            part, slots = self.controller.resolve(rows)
        else:
            part = self.controller.open(message.text("partition"))
            slots = part.members(part.groups.find(message.ints("group_ids").tolist()))
        self.controller.drop(part, slots, message.text("reason"), now)
        return {}

    def _free(self, message: Message, now: float) -> dict:
        self.controller.free(*self.controller.resolve(message.ints("rows")), now)
        return {}

    def _seal(self, message: Message, now: float) -> dict:
        self.controller.seal(message.text("partition"), now)
        return {}

    def _close(self, message: Message, now: float) -> dict:
        self.controller.close(message.text("partition"), now)
        return {}

    def _task(self, message: Message, now: float) -> dict:
        self.controller.add_task(TaskSpec(message.text("name"), tuple(message.names("columns"))), now)
        return {}
