import sys

import pytest

from mindspeed_asyncflow.config.intake import DataConfig, SourceConfig
from mindspeed_asyncflow.data.sources import make_sources
from mindspeed_asyncflow.data.tasks import named_tasks
from mindspeed_asyncflow.errors import DataError


def test_without_a_mix_there_is_one_source_of_the_task():
    (source,) = make_sources(DataConfig(size=50)).train
    assert (source.task.name, source.size, source.weight) == ("sort4", 50, 1.0)


def test_a_mix_takes_files_whole_and_makes_as_many_as_said_of_the_others():
    mix = [SourceConfig(task="file:a.csv", weight=2), SourceConfig(task="sort4"), SourceConfig(task="sort5", size=7)]
    sources = make_sources(DataConfig(size=50, mix=mix, validation=[SourceConfig(task="file:b.csv", size=3)]))
    assert [source.size for source in sources.train] == [sys.maxsize, 50, 7]
    assert [source.weight for source in sources.train] == [2.0, 1.0, 1.0]
    assert [source.size for source in sources.validation] == [3]


def test_the_source_of_a_prompt_counts_the_named_tasks():
    mix = [SourceConfig(task="sort4"), SourceConfig(task="sort_long", options={"max_digits": 9})]
    named = named_tasks(DataConfig(mix=mix, validation=[SourceConfig(task="sort5")]))
    assert named == [("sort4", {}), ("sort_long", {"max_digits": 9}), ("sort5", {})]
    assert named_tasks(DataConfig()) == [("sort4", {})]


def test_columns_belong_to_files():
    with pytest.raises(DataError, match="sort4 has no columns"):
        make_sources(DataConfig(columns={"prompt": "question"}))
    data = DataConfig(task="file:rows.csv", columns={"prompt": "question"})
    assert make_sources(data).train[0].task.columns["prompt"] == "question"
