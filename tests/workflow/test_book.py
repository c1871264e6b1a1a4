import asyncio

import numpy as np

from mindspeed_asyncflow.workflow.book import Issue, StepBook


def issue(index):
    return Issue(epoch=0, prompt_index=index, prompt_ids=np.array([index], np.int32), truth=str(index))


def test_a_dropped_group_leaves_its_batch_and_its_prompt_can_come_back_as_a_new_group():
    async def scenario():
        book = StepBook(group_size=2)
        groups = book.make_groups(0, [issue(0), issue(1)])
        book.add(0, groups)
        batch, prompt = book.close_group(0)
        book.add(batch, book.make_groups(batch, [prompt]))
        return book, prompt

    book, prompt = asyncio.run(scenario())
    assert prompt.prompt_index == 0
    assert book.pending(0) == [1, 2]


def test_a_group_that_is_gone_before_the_news_of_its_put_come_is_not_open_afterwards():
    async def scenario():
        book = StepBook(group_size=2)
        groups = book.make_groups(0, [issue(0), issue(1)])
        assert book.knows(0) and not book.is_open(0)
        book.close_group(0)
        book.add(0, groups)
        return book

    book = asyncio.run(scenario())
    assert book.pending() == [1] and book.count(0) == book.count() == 1 and not book.knows(0)


def test_group_ids_rise_and_members_count_up():
    book = StepBook(group_size=3)
    rows = [row for group in book.make_groups(0, [issue(5), issue(6)]) for row in group]
    assert [(r.group_id, r.member) for r in rows] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert {r.prompt_index for r in rows} == {5, 6}


def test_waiting_for_a_batch_ends_when_the_data_ends():
    """B45: a consumer that waits for the batch after the last one is told that there is none."""

    async def scenario():
        book = StepBook(group_size=1)
        book.add(0, book.make_groups(0, [issue(0)]))
        waiting = asyncio.create_task(book.wait_for_batch(1))
        await asyncio.sleep(0)
        assert not waiting.done()
        book.end()
        return await asyncio.wait_for(waiting, 1), await book.wait_for_batch(0)

    assert asyncio.run(scenario()) == (False, True)
