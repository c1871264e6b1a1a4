"""Reading back what a run recorded."""

import pytest

from mindspeed_asyncflow.errors import RecordError
from mindspeed_asyncflow.workflow.record import read_record
from tests.workflow.recorded import edit_events


def test_a_torn_line_before_others_is_an_error(recorded):
    path = recorded / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], lines[3][:10] + "\n", *lines[4:]]))
    with pytest.raises(RecordError, match="line 4 is torn or changed"):
        read_record(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda events: events[1:], "does not begin with the begin"),
        (lambda events: [events[0], *events], "begun twice"),
        (lambda events: events[:1], "nothing to repeat"),
        (lambda events: [events[0] | {"format": 9}, *events[1:]], "has format 9"),
        (lambda events: [*events[:2], {"kind": "trained", "step": 0}], "line 3: no event of this program"),
    ],
)
def test_records_that_cannot_be_repeated_say_why(recorded, change, words):
    edit_events(recorded, change)
    with pytest.raises(RecordError, match=words):
        read_record(recorded / "events.jsonl")
