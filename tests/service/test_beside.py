"""Checkpoints that somebody asks for, records as they come, and the prompts of an earlier folder."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from mindspeed_asyncflow.config.load import dump_resolved
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import CheckpointError, ServiceError
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.service import beside
from mindspeed_asyncflow.service.outside import RUNNING, Outside
from mindspeed_asyncflow.workflow.between import Between


def driven(folder, **sections):
    config = Config.model_validate(sections)
    return Outside(config, RunFolder.create_at(folder, dump_resolved(config)))


def asked(folder, saved, unsaved=""):
    """What `checkpoint` comes to between two steps, where writing it is `saved`."""

    async def main():
        outside, between = driven(folder), Between(lambda: None)
        training = SimpleNamespace(between=between, lacks_scores=lambda: False)
        run = SimpleNamespace(over=False, training=training, job=SimpleNamespace(step=3))
        session = SimpleNamespace(run=run, complete=(3, folder), saved=saved, unsaved=unsaved, config=outside.config)
        outside.session, outside.state, outside.loop = session, RUNNING, asyncio.get_running_loop()
        call = asyncio.ensure_future(beside.checkpoint(outside, 0.2))
        while not (between.wanted or call.done()):
            await asyncio.sleep(0)
        await between.do(3)
        return await asyncio.wait_for(call, 10)

    return asyncio.run(main())


def test_a_checkpoint_that_is_not_written_in_time_is_a_timeout_of_the_call(tmp_path):
    async def for_ever(step):
        await asyncio.Event().wait()

    with pytest.raises(ServiceError, match="step 3 is not written") as refused:
        asked(tmp_path, for_ever)
    assert (refused.value.status, refused.value.code) == (504, "timeout")


def test_a_checkpoint_that_a_recovery_gave_up_can_be_asked_for_again_and_one_that_failed_says_why(tmp_path):
    async def given_up(step):
        raise CheckpointError("no checkpoint of step 3")

    with pytest.raises(ServiceError) as refused:
        asked(tmp_path / "a", given_up)
    assert (refused.value.status, refused.value.code) == (503, "recovering")
    with pytest.raises(CheckpointError, match="no checkpoint of step 3"):
        asked(tmp_path / "b", given_up, "the disk is full")


def test_records_go_on_where_their_file_was_cut_back_and_has_grown_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(beside, "LOOK_S", 0.001)
    outside = driven(tmp_path)

    def write(steps, more=""):
        lines = [json.dumps({"step": step, "more": more}) + "\n" for step in steps]
        outside.folder.metrics.write_text("".join(lines))

    async def main():
        write(range(3))
        found = []
        async for record in beside.records(outside, 0):
            found.append(record["step"])
            if record["step"] == 2:
                write(range(5), "longer lines, so that the old end is within one")
                outside.over.set()
        return found

    assert asyncio.run(asyncio.wait_for(main(), 10)) == [0, 1, 2, 3, 4]


def test_prompts_of_the_run_before_are_there_whole_or_not_at_all(tmp_path, monkeypatch):
    before = driven(tmp_path / "before", service={"prompts": "client"})
    before.folder.prompts.write_text('{"last": true}\n')
    checkpoint = before.folder.checkpoints / "step_000001"

    def killed(source, target):
        target.write_text('{"la')
        raise KeyboardInterrupt

    outside = driven(tmp_path / "run", service={"prompts": "client"})
    with monkeypatch.context() as torn, pytest.raises(KeyboardInterrupt):
        torn.setattr("mindspeed_asyncflow.service.outside.shutil.copyfile", killed)
        outside.furnish(checkpoint)
    outside.furnish(checkpoint)
    assert outside.prompts.last
