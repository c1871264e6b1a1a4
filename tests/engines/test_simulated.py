import asyncio

import numpy as np
import pytest

from mindspeed_asyncflow.engines.simulated import NO_TOKEN, SimulatedEngine, Timeline
from mindspeed_asyncflow.errors import ClaimLost
from mindspeed_asyncflow.planner.costs import Costs
from mindspeed_asyncflow.simulation import clock

FLAT = Costs(prefill_token_s=0.0, decode_weights_s=1.0, decode_context_s=0.0, train_token_s=0.0)
GROWING = Costs(
    prefill_token_s=0.01, decode_weights_s=1.0, decode_context_s=0.002, train_token_s=0.0, decode_row_s=0.05
)


def step_by_step(costs, context, left, max_running):
    """The same engine, token by token: end of each answer in seconds."""
    waiting, running, now = list(range(len(left))), [], 0.0
    context, left, end = list(context), list(left), [0.0] * len(left)
    while waiting or running:
        fresh = []
        while waiting and len(running) < max_running:
            fresh.append(waiting.pop(0))
            running.append(fresh[-1])
        if fresh:
            now += costs.prefill_s(float(sum(context[i] for i in fresh)), float(sum(context[i] ** 2 for i in fresh)))
        now += float(costs.decode_s(float(len(running)), float(sum(context[i] for i in running))))
        for i in list(running):
            context[i] += 1
            left[i] -= 1
            if not left[i]:
                end[i] = now
                running.remove(i)
    return end


@pytest.mark.parametrize("max_running", [1, 3, 7, 50])
def test_the_closed_form_is_the_sum_over_single_tokens(max_running):
    rng = np.random.default_rng(max_running)
    context, left = rng.integers(1, 40, 30), rng.integers(1, 60, 30)
    timeline = Timeline(GROWING, context, left, np.zeros(30, bool), max_running)
    assert timeline.end_s == pytest.approx(step_by_step(GROWING, context, left, max_running), rel=1e-9)


def test_steps_at_a_time_is_the_inverse_of_the_time_of_a_step():
    context, left = np.array([10, 20, 5]), np.array([100, 40, 7])
    timeline = Timeline(GROWING, context, left, np.zeros(3, bool), 8)
    for i in range(3):
        assert timeline.steps_at(timeline.end_s[i] + 1e-7)[0] == timeline.end[i]
        assert timeline.steps_at(timeline.end_s[i] - 0.3)[0] == timeline.end[i] - 1


class Answers:
    def __init__(self, count):
        self.tokens, self.first, self.last = (np.full(count, NO_TOKEN) for _ in range(3))
        self.at = np.zeros(count)
        self.spans = []

    def __call__(self, places, done, first, last):
        self.tokens[places], self.first[places], self.last[places] = done, first, last
        self.at[places] = asyncio.get_running_loop().time()

    def note(self, places, done, version):
        self.spans.append((places.tolist(), done.tolist(), version))


def submit(engine, left, units=None, context=1):
    answers = Answers(len(left))
    left = np.array(left)
    units = np.arange(len(left)) if units is None else np.array(units)
    return answers, engine.submit(np.full(len(left), context), left, units, answers, answers.note)


def test_a_group_comes_when_its_last_member_ends():
    async def main():
        answers, ended = submit(SimulatedEngine(FLAT, 8), [3, 9, 5, 6], [0, 0, 1, 1])
        await ended
        return answers.at.tolist()

    assert clock.run(main()) == pytest.approx([9, 9, 6, 6])


def test_groups_come_back_at_few_shared_moments_and_the_last_one_when_it_ends():
    async def main():
        lengths = list(range(901, 1002))
        answers, ended = submit(SimulatedEngine(FLAT, 200), lengths)
        await ended
        return np.array(lengths), answers.at

    lengths, at = clock.run(main())
    assert at[-1] == pytest.approx(1001)
    waited = at - lengths
    assert (waited >= -1e-6).all() and waited.max() <= 1001 / 16  # one of at least 16 moments
    assert len(np.unique(at)) <= 1 + 100 / 1001 * 32 + 1


def test_what_waits_for_its_moment_is_of_the_version_that_made_it():
    async def main():
        engine = SimulatedEngine(FLAT, 8)
        answers, ended = submit(engine, [515, 990, 1000])
        await asyncio.sleep(516)  # the first is complete and waits for second 544
        await engine.load(1, 1.0)
        await ended
        return answers

    answers = clock.run(main())
    assert answers.at[0] == pytest.approx(516)
    assert answers.last.tolist() == [0, 1, 1]


def test_answers_wait_for_room():
    async def main():
        answers, ended = submit(SimulatedEngine(FLAT, 2), [4, 6, 5])
        await ended
        return answers.at.tolist()

    assert clock.run(main()) == pytest.approx([4, 6, 9])


def test_new_answers_join_those_that_run():
    async def main():
        engine = SimulatedEngine(FLAT, 8)
        first, one = submit(engine, [10, 4])
        await asyncio.sleep(6)
        second, two = submit(engine, [2, 7])
        await asyncio.gather(one, two)
        return first.at.tolist(), second.at.tolist()

    assert clock.run(main()) == (pytest.approx([10, 4]), pytest.approx([8, 13]))


def test_a_load_in_flight_stops_all_for_its_time_and_marks_versions():
    async def main():
        engine = SimulatedEngine(FLAT, 2)
        answers, ended = submit(engine, [4, 10, 5])  # the third begins at step 4
        await asyncio.sleep(6)
        await engine.load(3, 2.5)
        await ended
        return answers

    answers = clock.run(main())
    assert answers.at.tolist() == pytest.approx([4, 12.5, 11.5])
    assert answers.first.tolist() == [0, 0, 0]
    assert answers.last.tolist() == [0, 3, 3]
    assert answers.spans == [([1, 2], [6, 2], 0)]


def test_an_answer_that_starts_after_a_load_has_the_new_version_only():
    async def main():
        engine = SimulatedEngine(FLAT, 1)
        answers, ended = submit(engine, [4, 5])
        await asyncio.sleep(2)
        await engine.load(1, 1.0)
        await ended
        return answers

    answers = clock.run(main())
    assert answers.first.tolist() == [0, 1]
    assert answers.last.tolist() == [1, 1]


def test_a_stop_gives_what_was_generated():
    async def main():
        engine = SimulatedEngine(FLAT, 2)
        answers, ended = submit(engine, [3, 10, 8], [0, 1, 1])
        await asyncio.sleep(5)
        assert len(engine) == 2
        assert engine.stop() == 2
        await ended
        return answers, len(engine)

    answers, left = clock.run(main())
    assert answers.tokens.tolist() == [3, 5, 2]
    assert left == 0


def test_a_stop_before_the_first_token_gives_nothing():
    async def main():
        engine = SimulatedEngine(FLAT, 1)
        answers, ended = submit(engine, [3, 10])
        await asyncio.sleep(1)
        engine.stop()
        await ended
        return answers

    answers = clock.run(main())
    assert answers.tokens.tolist() == [1, 0]
    assert answers.first.tolist() == [0, NO_TOKEN]
    assert answers.last.tolist() == [0, NO_TOKEN]


def test_tokens_are_conserved_under_cuts_at_any_time():
    async def main(seed):
        rng = np.random.default_rng(seed)
        engine = SimulatedEngine(GROWING, 5)
        wanted = rng.integers(1, 60, 40)
        answers, ended = submit(engine, wanted.tolist(), rng.integers(0, 9, 40), context=7)
        for version in range(1, 9):
            await asyncio.sleep(float(rng.uniform(0, 40)))
            if version % 3 == 0:
                engine.set_speed(float(rng.uniform(0.2, 2)))
            else:
                await engine.load(version, float(rng.uniform(0, 3)))
        await ended
        return wanted, answers

    for seed in range(4):
        wanted, answers = clock.run(main(seed))
        assert (answers.tokens == wanted).all()
        assert (answers.first <= answers.last).all()
        assert (answers.first >= 0).all()


def test_half_speed_takes_twice_as_long():
    async def main():
        answers, ended = submit(SimulatedEngine(FLAT, 8, speed=0.5), [10])
        await ended
        return answers.at.tolist()

    assert clock.run(main()) == pytest.approx([20])


def test_a_lost_replica_fails_its_requests():
    async def main():
        engine = SimulatedEngine(FLAT, 8)
        answers, ended = submit(engine, [10])
        await asyncio.sleep(3)
        engine.fail(RuntimeError("gone"))
        with pytest.raises(RuntimeError, match="gone"):
            await ended
        await asyncio.sleep(30)
        return answers.tokens.tolist()

    assert clock.run(main()) == [NO_TOKEN]


def test_refused_answers_are_the_error_of_who_waits_and_others_go_on():
    def refuse(*answers):
        raise ClaimLost("gone")

    async def main():
        engine = SimulatedEngine(FLAT, 8)
        refused = engine.submit(np.array([1, 1]), np.array([4, 9]), np.array([0, 1]), refuse)
        answers, ended = submit(engine, [6])
        with pytest.raises(ClaimLost, match="gone"):
            await refused
        assert len(engine) == 1
        await ended
        return answers.at.tolist()

    assert clock.run(main()) == pytest.approx([6])
