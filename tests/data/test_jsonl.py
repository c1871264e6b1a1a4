import json

import pytest

from mindspeed_asyncflow.data.tasks import build_task
from mindspeed_asyncflow.errors import DataError


def task_of(tmp_path, content: bytes):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    return build_task(f"jsonl:{file}", {})


def test_bom_crlf_blank_lines_and_line_separators_inside_text_are_understood(tmp_path):
    """B84"""
    texts = ["plain 🙂", "中文提示", "one\u2028row\u0085still one"]
    rows = [json.dumps({"prompt": text, "answer": str(i)}, ensure_ascii=False) for i, text in enumerate(texts)]
    content = b"\xef\xbb\xbf" + "\r\n".join([*rows, ""]).encode() + b"\r\n"
    problems = task_of(tmp_path, content).problems(10, seed=0)
    assert [problem.prompt for problem in problems] == texts
    assert [problem.truth for problem in problems] == ["0", "1", "2"]


def test_no_more_than_size_rows_are_read(tmp_path):
    content = b"".join(b'{"prompt": "%d", "answer": 1}\n' % i for i in range(9))
    assert [p.text for p in task_of(tmp_path, content).problems(4, seed=0)] == ["0", "1", "2", "3"]


def test_a_conversation_is_kept_as_messages(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    content = json.dumps({"prompt": messages, "answer": "x"}).encode()
    assert task_of(tmp_path, content).problems(1, seed=0)[0].prompt == tuple(messages)


@pytest.mark.parametrize(
    "line, message",
    [
        (b"{not json}", "not JSON"),
        (b"[1, 2]", "needs the fields prompt and answer, has list"),
        (b'{"prompt": "x"}', r"has \['prompt'\]"),
        (b'{"prompt": 7, "answer": "x"}', "text or a list"),
        (b'{"prompt": [], "answer": "x"}', "text or a list"),
    ],
)
def test_a_bad_row_is_reported_with_file_and_line(tmp_path, line, message):
    """B84"""
    good = b'{"prompt": "x", "answer": "y"}\n\n'
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 3: .*{message}"):
        task_of(tmp_path, good + line).problems(10, seed=0)


def test_missing_empty_and_undecodable_files_are_clear_errors(tmp_path):
    """B86"""
    with pytest.raises(DataError, match="there is no file"):
        build_task("jsonl:nowhere.jsonl", {}).problems(1, seed=0)
    with pytest.raises(DataError, match="holds no rows"):
        task_of(tmp_path, b"\n \r\n").problems(1, seed=0)
    with pytest.raises(DataError, match="not UTF-8"):
        task_of(tmp_path, b"\xff\xfe\x00").problems(1, seed=0)


@pytest.mark.parametrize("text, finished, score", [(" 42\n", True, 1), ("42", False, 0), ("42.0", True, 0)])
def test_only_the_exact_answer_counts(tmp_path, text, finished, score):
    assert task_of(tmp_path, b"").score(text, "42", finished) == score
