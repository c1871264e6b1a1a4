"""Prompts, rewards and weights that come from a client, without a run around them."""

import asyncio
import errno
import json
import os

import numpy as np
import pytest

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.config.service import CLIENT_KEYS, override_lines
from mindspeed_asyncflow.data.stream import prompts_in_order
from mindspeed_asyncflow.errors import ClaimLost, ClientSilent, ConfigError, DataError, ServiceError
from mindspeed_asyncflow.records import Completion, VersionSpan
from mindspeed_asyncflow.service import launch
from mindspeed_asyncflow.service.experience import cast
from mindspeed_asyncflow.service.intake import ClientPrompts
from mindspeed_asyncflow.service.outside import Gate
from mindspeed_asyncflow.service.outside_rewards import OutsideRewards
from mindspeed_asyncflow.service.presence import Presence
from mindspeed_asyncflow.service.prompts import encoded
from mindspeed_asyncflow.service.resuming import _data_is_used_up
from mindspeed_asyncflow.service.trajectories import given_of
from mindspeed_asyncflow.service.verbs import Prompt, Trajectory, TrajectoryGroup
from mindspeed_asyncflow.workflow.between import Between
from mindspeed_asyncflow.workflow.book import Issue
from mindspeed_asyncflow.workflow.given import Given
from mindspeed_asyncflow.workflow.workers import RowBatch

CONFIG = Config()


def issues(count, first=0, given=None):
    return [Issue(0, -1, np.array([first + i, 7], np.int32), f"truth {i}", "{}", given) for i in range(count)]


def prompts(tmp_path, batch=4, limit_s=600.0):
    presence = Presence(limit_s, lambda: None)
    return ClientPrompts(tmp_path / "prompts.jsonl", batch, presence.wait)


def taken(stream):
    return [[index for _, index, _ in batch] for batch in iter(lambda: next(stream, None), None)]


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_prompts_are_given_out_once_in_their_order_and_the_last_batch_may_be_short(tmp_path):
    async def main():
        stream = prompts(tmp_path)
        assert stream.add(issues(3), last=False) == 0
        assert stream.add(issues(3), last=True) == 3
        await stream.ready(4)
        return taken(stream), stream.exhausted

    assert asyncio.run(main()) == ([[0, 1, 2, 3], [4, 5]], True)


def test_a_new_driver_finds_every_prompt_that_was_taken_and_none_that_was_torn(tmp_path):
    given = Given(
        (Completion("", np.array([5, 6], np.int32), np.array([-1, -2], np.float32), "stop", (VersionSpan(3, 0, 2),)),),
        np.array([np.nan]),
    )
    first = prompts(tmp_path)
    first.add([*issues(2), *issues(1, first=2, given=given)], last=False)
    with open(first.path, "a", encoding="utf-8") as file:
        file.write('{"ids": [1, 2')
    again = prompts(tmp_path)
    assert [i.prompt_ids.tolist() for i in again.issues] == [[0, 7], [1, 7], [2, 7]]
    assert [i.prompt_index for i in again.issues] == [0, 1, 2]
    kept = again.issues[2].given
    assert kept.oldest == 3 and kept.answers[0].logprobs.tolist() == [-1, -2] and np.isnan(kept.rewards).all()
    again.add(issues(1, first=3), last=True)
    assert len(prompts(tmp_path).issues) == 4 and prompts(tmp_path).last


def test_a_resumed_run_goes_on_behind_the_last_prompt_of_its_checkpoint(tmp_path):
    stream = prompts(tmp_path)
    stream.add(issues(12), last=False)
    next(stream)
    state = json.loads(json.dumps(stream.state()))
    next(stream)
    stream.restore(state)
    assert [index for _, index, _ in next(stream)] == [4, 5, 6, 7]
    with pytest.raises(DataError, match="has given out 4"):
        prompts(tmp_path / "elsewhere").restore(state)


def test_a_run_that_was_stopped_goes_on_with_the_prompts_that_are_left(tmp_path):
    stream, run = prompts(tmp_path), {"book": {"groups": []}, "feeder": {"left": []}}
    stream.add(issues(8), last=True)
    next(stream)
    stream.close()
    assert not _data_is_used_up({"stream": stream.state(), "run": run}, CONFIG)
    again = prompts(tmp_path)
    again.restore(stream.state())
    assert taken(again) == [[4, 5, 6, 7]]
    assert _data_is_used_up({"stream": again.state(), "run": run}, CONFIG)


def _full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("cleared", [True, False])
def test_a_disk_that_is_full_for_a_moment_loses_nothing_that_was_taken(tmp_path, monkeypatch, cleared):
    """The call has left whole lines, which are removed at once, or else by the next call."""
    stream = prompts(tmp_path)
    stream.add(issues(2), last=False)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", _full)
        if not cleared:
            full.setattr(os, "truncate", _full)
        with pytest.raises(ServiceError, match="No space left") as refused:
            stream.add(issues(2, first=2), last=True)
    assert refused.value.status == 507 and len(stream.issues) == 2 and not stream.last
    assert (len(stream.path.read_bytes().splitlines()) == 2) == cleared
    assert stream.add(issues(1, first=4), last=False) == 2
    again = prompts(tmp_path)
    assert [issue.prompt_ids.tolist() for issue in again.issues] == [[0, 7], [1, 7], [4, 7]] and not again.last


def test_prompts_are_on_the_disk_before_they_are_taken(tmp_path, monkeypatch):
    stream, synced, fsync = prompts(tmp_path), [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(stream.path.read_text()), fsync(file)))
    stream.add(issues(1), last=True)
    assert len(synced) == 1 and synced[0] == stream.path.read_text() and synced[0].count("\n") == 2


def test_a_client_run_is_complete_only_when_it_was_told_that_no_prompt_will_come(tmp_path):
    stream, run = prompts(tmp_path), {"book": {"groups": []}, "feeder": {"left": []}}
    stream.add(issues(4), last=False)
    next(stream)
    assert not _data_is_used_up({"stream": stream.state(), "run": run}, CONFIG)
    stream.add([], last=True)
    assert _data_is_used_up({"stream": stream.state(), "run": run}, CONFIG)


def test_an_audit_expects_the_prompts_of_a_client_in_the_order_of_their_numbers(tmp_path):
    order = prompts_in_order(prompts(tmp_path).facts(), epochs=1)
    assert [next(order) for _ in range(3)] == [(0, 0), (0, 1), (0, 2)]


def test_nothing_is_given_out_once_the_run_is_being_stopped(tmp_path):
    async def main():
        stream = prompts(tmp_path)
        stream.add(issues(4), last=False)
        stream.close()
        await stream.ready(8)
        return next(stream, None), stream.queued

    assert asyncio.run(main()) == (None, 4)


# ---- a client that is there, or not ----------------------------------------------------------------------------------


def test_a_wait_for_a_silent_client_ends_and_names_it_and_the_knob():
    async def main():
        presence = Presence(0.05, lambda: None)
        presence.name = "agent7"
        await presence.wait(asyncio.Event(), "12 prompts")

    with pytest.raises(ClientSilent, match=r"12 prompts, and agent7 has called nothing.*service\.client_timeout_s"):
        asyncio.run(main())


def test_a_client_within_a_call_is_not_silent_and_the_watchdog_does_not_count_the_wait():
    progressed = []

    async def main():
        presence = Presence(0.05, lambda: progressed.append(1))
        event = asyncio.Event()
        asyncio.get_running_loop().call_later(0.3, event.set)
        with presence.calling():
            await presence.wait(event, "12 prompts")

    asyncio.run(main())
    assert progressed


def test_the_gate_lets_a_version_through_when_it_is_asked_for_or_the_run_ends():
    async def main():
        ends = []
        gate = Gate(Presence(600.0, lambda: None), lambda: bool(ends))
        second = asyncio.ensure_future(gate.passed(2))
        gate.permit(1)
        await gate.passed(1)
        assert not second.done()
        gate.permit(2)
        await second
        ends.append(1)
        await gate.passed(3)

    asyncio.run(asyncio.wait_for(main(), 10))


# ---- rewards ---------------------------------------------------------------------------------------------------------


class NoDock:
    def read(self, rows, columns):
        return {"response_ids": [[1]] * len(rows), "truth": [b""] * len(rows), "fields": [b"{}"] * len(rows)}

    def write(self, rows, values, **how):
        self.written = dict(zip(rows.tolist(), zip(values["reward"].tolist(), values["advantage"].tolist())))

    def renew(self, claim_id):
        pass


def rewards(given=lambda group: None, lease_s=120.0):
    config = Config.model_validate({"service": {"rewards": "client"}, "dock": {"lease_s": lease_s}})
    return OutsideRewards(config, NoDock(), Presence(600.0, lambda: None), None, given)


def batch(*groups):
    rows = np.arange(2 * len(groups), dtype=np.int64) + 10
    return RowBatch(rows, np.repeat(groups, 2).astype(np.int64), np.tile([0, 1], len(groups)).astype(np.int32))


def test_several_clients_share_the_groups_of_one_claim_and_their_advantages_are_kept():
    async def main():
        outside = rewards()
        scoring = asyncio.ensure_future(outside.score(1, batch(5, 6, 7)))
        first, mine = await outside.get(2, 1.0)
        second, theirs = await outside.get(9, 1.0)
        assert [g.group for g in mine] == [5, 6] and [g.group for g in theirs] == [7]
        assert outside.put(first, np.arange(10, 14), [(1.0, None), (0.0, None), (3.0, None), (3.0, None)]) == 0
        assert outside.put(second, np.array([14, 15]), [(1.0, 4.5), (0.0, -4.5)]) == 0
        report = await scoring
        return report, outside.worker.dock.written

    report, written = asyncio.run(main())
    assert report.scores == (1, 0, 3, 3, 1, 0) and not report.unscored
    assert [written[row][0] for row in range(10, 16)] == [1, 0, 3, 3, 1, 0]
    assert written[12][1] == 0 and written[14][1] == 4.5 and written[10][1] > 0 > written[11][1]


def test_the_claim_of_the_scorer_lives_on_while_a_client_judges_and_its_loss_is_heard_of():
    async def main():
        outside, renewed = rewards(lease_s=0.06), []
        outside.worker.dock.renew = renewed.append
        scoring = asyncio.ensure_future(outside.score(1, batch(5)))
        await asyncio.sleep(0.5)
        claim, _ = await outside.get(9, 1.0)
        outside.put(claim, np.array([10, 11]), [(1.0, None), (0.0, None)])
        await scoring
        assert len(renewed) >= 3 and set(renewed) == {1}

        def ended(claim_id):
            raise ClaimLost("it has ended")

        outside.worker.dock.renew = ended
        with pytest.raises(ClaimLost):
            await outside.score(2, batch(6))
        assert not outside.waiting

    asyncio.run(asyncio.wait_for(main(), 10))


def test_what_a_slow_client_holds_is_given_to_the_next_also_while_other_groups_wait():
    async def main():
        outside = rewards(lease_s=0.05)
        scoring = asyncio.ensure_future(outside.score(1, batch(5, 6)))
        await outside.get(1, 1.0)
        await asyncio.sleep(0.1)
        claim, found = await outside.get(9, 1.0)
        assert sorted(g.group for g in found) == [5, 6]
        outside.put(claim, np.arange(10, 14), [(1.0, None), (0.0, None)] * 2)
        await scoring

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_reward_that_is_nan_leaves_its_row_out():
    async def main():
        outside = rewards()
        scoring = asyncio.ensure_future(outside.score(1, batch(5, 6)))
        claim, _ = await outside.get(9, 1.0)
        outside.put(claim, np.arange(10, 14), [(1.0, None), (np.nan, None), (3.0, None), (1.0, None)])
        return await scoring

    assert set(asyncio.run(main()).unscored) == {10, 11}  # one answer cannot be compared


def test_claims_that_are_not_held_and_rows_of_others_are_refused_and_nothing_is_taken():
    async def main():
        outside = rewards()
        scoring = asyncio.ensure_future(outside.score(1, batch(5, 6)))
        claim, _ = await outside.get(1, 1.0)
        for rows, code in (([10, 12], "rows"), ([10], "rows"), ([10, 10], "rows"), ([99], "rows")):
            with pytest.raises(ServiceError) as refused:
                outside.put(claim, np.array(rows), [(0.0, None)] * len(rows))
            assert refused.value.code == code
        with pytest.raises(ServiceError, match="is not held") as refused:
            outside.put(claim + 1, np.array([12, 13]), [(0.0, None)] * 2)
        assert refused.value.status == 404
        assert outside.put(claim, np.array([10, 11]), [(0.0, None), (1.0, None)]) == 0
        scoring.cancel()
        await asyncio.wait([scoring])
        assert outside.waiting == 0  # what the loop does not wait for any more, nobody gets

    asyncio.run(main())


def test_what_a_client_holds_for_too_long_is_given_to_the_next_one():
    async def main():
        outside = rewards(lease_s=0.05)
        scoring = asyncio.ensure_future(outside.score(1, batch(5)))
        first, _ = await outside.get(1, 1.0)
        second, groups = await outside.get(1, 5.0)
        assert [g.group for g in groups] == [5] and second != first
        with pytest.raises(ServiceError):
            outside.put(first, np.array([10, 11]), [(0.0, None), (1.0, None)])
        outside.put(second, np.array([10, 11]), [(0.0, None), (1.0, None)])
        await scoring

    asyncio.run(main())


def test_answers_that_came_with_rewards_are_not_shown_to_the_client():
    answer = Completion("", np.array([1], np.int32), np.zeros(1, np.float32), "stop", (VersionSpan(0, 0, 1),))
    given = Given((answer, answer), np.array([2.0, 4.0]), np.array([-7.0, 7.0], np.float32))

    async def main():
        outside = rewards(lambda group: given if group == 6 else None)
        scoring = asyncio.ensure_future(outside.score(1, batch(5, 6)))
        claim, groups = await outside.get(9, 1.0)
        assert [g.group for g in groups] == [5]
        outside.put(claim, np.array([10, 11]), [(0.0, None), (1.0, None)])
        return await scoring, outside.worker.dock.written

    report, written = asyncio.run(main())
    assert report.scores == (0, 1, 2, 4) and written[12] == (2, -7) and written[13] == (4, 7)


# ---- trajectories, columns, settings ---------------------------------------------------------------------------------


def trajectory(**changed):
    plain = {"response_ids": np.array([1, 2]), "rollout_logprobs": np.array([-0.1, -0.2]), "version": 2}
    return Trajectory(**plain | changed)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"response_ids": np.array([], np.int64)}, "at least one"),
        ({"response_ids": np.array([1, 99])}, "whole numbers from 0 to 49"),
        ({"response_ids": np.array([[1, 2]])}, "whole numbers"),
        ({"response_ids": np.arange(40), "rollout_logprobs": np.zeros(40)}, "room is for"),
        ({"rollout_logprobs": np.array([-0.1])}, "2 rows|shape"),
        ({"rollout_logprobs": np.array([-0.1, np.nan])}, "finite"),
        ({"rollout_logprobs": np.array([-0.1, 0.5])}, "not above 0"),
        ({"version": 3}, "cannot have sampled it"),
        ({"version": -1}, "cannot have sampled it"),
        ({"response_mask": np.array([1, 2])}, "0 or 1"),
        ({"response_mask": np.array([0, 0])}, "a 1 somewhere"),
        ({"response_mask": np.array([1, 0])}, "service.masks"),
    ],
)
def test_a_trajectory_that_does_not_fit_is_refused_by_its_place(changed, said):
    config = Config.model_validate({"algorithm": {"group_size": 2}, "data": {"max_prompt_tokens": 20}})
    group = TrajectoryGroup(Prompt("a"), [trajectory(), trajectory(**changed)])
    with pytest.raises(ServiceError, match=said) as refused:
        given_of(group, np.array([1, 2, 3]), config, 50, newest=2)
    assert refused.value.status == 422


def test_with_masks_every_answer_of_the_run_has_one():
    config = Config.model_validate({"algorithm": {"group_size": 2}, "service": {"masks": True}})
    group = TrajectoryGroup(Prompt("a"), [trajectory(), trajectory(response_mask=np.array([1, 0]))])
    given = given_of(group, np.array([1, 2, 3]), config, 50, newest=2)
    assert [a.mask.tolist() for a in given.answers] == [[1, 1], [1, 0]]


@pytest.mark.parametrize(
    ("name", "column", "fits"),
    [
        ("reward", np.array([1, 2]), True),
        ("reward", [1.5, 2.5], True),
        ("reward", np.array([1.0]), False),
        ("reward", ["a", "b"], False),
        ("finish", np.array([0, 1]), True),
        ("finish", np.array([0, 256]), False),
        ("finish", np.array([0.5, 1]), False),
        ("response_ids", [np.array([1]), np.array([], np.float64)], True),
        ("response_ids", np.array([1, 2]), False),
        ("response_spans", [np.array([[0, 0, 1]]), np.array([[0, 0]])], False),
        ("prompt_ids", [np.array([1]), np.array([2])], False),
        ("asked", np.array([1, 1]), False),
        ("../etc", np.array([1, 1]), False),
    ],
)
def test_columns_are_cast_where_nothing_is_lost_and_refused_by_name_otherwise(name, column, fits):
    if fits:
        assert len(cast(name, column, 2)) == 2
    else:
        with pytest.raises(ServiceError) as refused:
            cast(name, column, 2)
        assert refused.value.code == "columns"


def test_clients_change_no_path_no_code_and_no_size_of_the_server():
    touchy = ["run.folder", "model.source", "model.cache", "data.task", "data.chat_template", "reward.scorers"]
    touchy += ["turns.environment", "rollout.engine", "trainer.engine", "rollout.replicas", "dock.arena_mb"]
    assert [line.split()[0] for line in override_lines(dict.fromkeys(touchy))] == touchy
    assert not list(override_lines(dict.fromkeys(CLIENT_KEYS)))


def test_numbers_of_clients_are_bounded():
    for value in (2**31, -(10**400), float("inf"), float("nan")):
        (line,) = override_lines({"trainer.steps": value})
        assert "largest number" in line
    assert not list(override_lines({"trainer.steps": 2**31 - 1, "checkpoint.hf": True, "trainer.lr": 1e-9}))


def test_every_key_that_a_client_may_change_is_a_number_or_a_choice():
    for key in CLIENT_KEYS:
        section, name = key.split(".")
        value = getattr(getattr(CONFIG, section), name)
        assert value is None or isinstance(value, int | float | bool | str), key
        if isinstance(value, str):
            assert "Literal" in str(type(getattr(CONFIG, section)).model_fields[name].annotation), key


def test_errors_of_what_is_done_between_steps_go_to_who_asked_and_the_run_goes_on():
    async def main():
        woken = []
        between = Between(lambda: woken.append(1))

        async def fails(step):
            raise ServiceError(409, "no", "not now")

        async def works(step):
            return step

        first, second, given_up = between.ask(fails), between.ask(works), between.ask(fails)
        given_up.cancel()
        assert between.wanted and woken
        await between.do(3)
        assert not between.wanted and await second == 3
        with pytest.raises(ServiceError):
            await first

    asyncio.run(main())


@pytest.mark.parametrize(
    "prompt", [[], [{"role": "user"}], ["hello"], "", "9" * 9, np.array([[1]]), np.array([-1]), np.array([1.5])]
)
def test_prompts_that_cannot_be_asked_are_refused_by_their_place(prompt):
    class Bytes:
        bos_token_id, chat_template = None, None

        def __len__(self):
            return 256

        def __call__(self, texts, add_special_tokens=False):
            return {"input_ids": [list(text.encode()) for text in texts]}

        def decode(self, ids):
            return bytes(ids).decode()

    data = CONFIG.data.model_copy(update={"max_prompt_tokens": 8})
    found = encoded([Prompt("12>", "12", {"source": 7})], Bytes(), data)[0]
    assert json.loads(found.fields)["source"] == 0 and json.loads(found.fields)["prompt"] == "12>"
    with pytest.raises(ServiceError, match=r"prompt 1 of the call|template") as refused:
        encoded([Prompt("12>"), Prompt(prompt)], Bytes(), data)
    assert refused.value.code == "prompt"


def test_a_run_that_would_wait_for_a_client_is_not_started_without_one(tmp_path):
    config = Config.model_validate({"service": {"rewards": "client"}, "run": {"folder": str(tmp_path / "runs")}})
    with pytest.raises(ConfigError, match=r"service\.rewards.*asyncflow serve"):
        launch.train(config)
    assert not (tmp_path / "runs").exists()
