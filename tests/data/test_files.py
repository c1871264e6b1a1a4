import csv
import json
import string
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_asyncflow.data.files import FIELDS_LIMIT, Files
from mindspeed_asyncflow.data.tasks import build_task
from mindspeed_asyncflow.errors import DataError

ALL = 10**9


def task_of(tmp_path, content: bytes, name="rows.jsonl", **columns):
    file = tmp_path / name
    file.write_bytes(content)
    return Files(str(file), columns)


def lines(*rows) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def pairs(problems):
    return [(problem.prompt, problem.truth) for problem in problems]


def test_bom_crlf_blank_lines_and_line_separators_inside_text_are_understood(tmp_path):
    """B84"""
    texts = ["plain 🙂", "中文提示", "one\u2028row\u0085still one"]
    rows = [json.dumps({"prompt": text, "answer": str(i)}, ensure_ascii=False) for i, text in enumerate(texts)]
    content = b"\xef\xbb\xbf" + "\r\n".join([*rows, ""]).encode() + b"\r\n"
    problems = task_of(tmp_path, content).problems(10, seed=0)
    assert [problem.prompt for problem in problems] == texts
    assert [problem.truth for problem in problems] == ["0", "1", "2"]


FORMS = {
    "rows.json": '[{"prompt": "a b", "answer": 4}, {"prompt": "中", "answer": true}]',
    "data.json": '{"data": [{"prompt": "a b", "answer": 4}, {"prompt": "中", "answer": true}], "version": "1"}',
    "columns.json": '{"prompt": ["a b", "中"], "answer": [4, true]}',
    "lines.json": '{"prompt": "a b", "answer": 4}\n{"prompt": "中", "answer": true}\n',
    "rows.csv": 'prompt,answer\r\n"a b",4\r\n\r\n中,true\r\n',
    "rows.tsv": "prompt\tanswer\na b\t4\n中\ttrue\n",
}


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", FORMS)
def test_every_format_gives_the_same_problems(tmp_path, name, bom):
    """B84"""
    problems = task_of(tmp_path, bom + FORMS[name].encode(), name).problems(ALL, seed=0)
    assert pairs(problems) == [("a b", "4"), ("中", "true")]


def test_no_more_than_size_rows_are_read_and_that_is_said(tmp_path):
    task = task_of(tmp_path, lines(*({"prompt": str(i), "answer": 1} for i in range(9))))
    assert [p.text for p in task.problems(4, seed=0)] == ["0", "1", "2", "3"]
    assert "has more than the 4 rows" in task.notes[0]
    assert len(task.problems(9, seed=0)) == 9 and task.notes == []


def test_a_folder_a_pattern_and_a_file_name_with_a_pattern_in_it_are_read_in_sorted_order(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("b/1.jsonl", "a[1].jsonl", "c.csv", ".hidden.jsonl", "notes.txt"):
        form = "prompt,answer\n{},0\n" if name.endswith("csv") else '{{"prompt": "{}", "answer": 0}}\n'
        (tmp_path / name).write_text(form.format(name))

    def read(place):
        return [problem.text for problem in build_task(f"file:{place}", {}).problems(ALL, 0)]

    assert read(tmp_path) == ["a[1].jsonl", "b/1.jsonl", "c.csv"]
    assert read(f"{tmp_path}/*/*.jsonl") == ["b/1.jsonl"] and read(f"{tmp_path}/a[1].jsonl") == ["a[1].jsonl"]
    (tmp_path / "empty").mkdir()
    for place, said in (("empty", "holds no file"), ("*.parquet", "no such file"), ("notes.txt", r"end in \.jsonl")):
        with pytest.raises(DataError, match=said):
            read(tmp_path / place)


MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


@pytest.mark.parametrize("prompt", [MESSAGES, json.dumps(MESSAGES)])
def test_a_conversation_is_kept_as_messages_also_where_it_is_stored_as_json_text(tmp_path, prompt):
    assert task_of(tmp_path, lines({"prompt": prompt, "answer": "x"})).problems(1, 0)[0].prompt == tuple(MESSAGES)


@pytest.mark.parametrize("text", ["[1, 2]", "[", '[{"role": "user"}]', '"quoted"', '{"a": 1}'])
def test_text_that_only_looks_like_json_stays_text(tmp_path, text):
    assert task_of(tmp_path, lines({"prompt": text, "answer": text})).problems(1, 0)[0].prompt == text


def test_columns_are_mapped_and_nested_ones_found_also_inside_json_text(tmp_path):
    for nested in ({"style": "rule", "ground_truth": [1, 2]}, '{"style": "rule", "ground_truth": [1, 2]}'):
        row = {"question": "q", "reward_model": nested, "uid": 7, "sys": "be short", "level": 3, "source": "web"}
        names = {"prompt": "question", "answer": "reward_model.ground_truth", "id": "uid", "system": "sys"}
        (problem,) = task_of(tmp_path, lines(row), **names).problems(ALL, 0)
        assert problem.prompt == ({"role": "system", "content": "be short"}, {"role": "user", "content": "q"})
        assert (problem.truth, problem.id) == ("[1, 2]", "7")
        assert problem.fields == {"reward_model": nested, "level": 3, "source_": "web"}


def test_the_fields_that_come_along_can_be_chosen_and_are_bounded(tmp_path):
    row = {"prompt": "p", "answer": "a", "picture": "x" * FIELDS_LIMIT, "meta": {"level": 2}}
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*picture alone has .*data\.columns\.fields"):
        task_of(tmp_path, lines(row)).problems(ALL, 0)
    other = {"prompt": "q", "answer": "b", "hint": None}
    chosen = task_of(tmp_path, lines(row, other), fields="meta.level, hint").problems(ALL, 0)
    assert [p.fields for p in chosen] == [{"meta.level": 2, "hint": None}, {"meta.level": None, "hint": None}]
    with pytest.raises(
        DataError, match=r"data\.columns\.fields lists hint, which no row has; the last has answer, meta"
    ):
        task_of(tmp_path, lines(row), fields="meta.level, hint").problems(ALL, 0)
    assert task_of(tmp_path, lines(row), fields="").problems(ALL, 0)[0].fields == {}


def test_a_source_without_answers_says_so(tmp_path):
    with pytest.raises(DataError, match="no answer among its columns prompt"):
        task_of(tmp_path, lines({"prompt": "p"})).problems(ALL, 0)
    assert task_of(tmp_path, lines({"prompt": "p"}), answer="").problems(ALL, 0)[0].truth == ""
    with pytest.raises(DataError, match=r"data\.columns has question; it may name prompt, answer"):
        Files("rows.jsonl", {"question": "prompt"})


def test_unusable_rows_are_left_out_counted_and_named(tmp_path):
    good = {"prompt": "x", "answer": "y"}
    bad = [*({"prompt": prompt, "answer": "y"} for prompt in (None, "", 7)), {"prompt": "x"}]
    task = task_of(tmp_path, lines(good, *bad, {"prompt": [], "answer": 1}) + b'{"prompt": "\\ud800", "answer": ""}\n')
    assert len(task.problems(ALL, 0)) == 1
    (note,) = task.notes
    assert "6 unusable rows left out" in note and note.endswith("and 3 more)")
    assert "rows.jsonl:2: prompt is null; " in note and "rows.jsonl:3: prompt is empty; " in note
    assert "rows.jsonl:4: prompt must be text or a list of messages" in note
    with pytest.raises(DataError, match=r"no usable row; .*rows\.jsonl:1: prompt is null"):
        task_of(tmp_path, lines(*bad)).problems(ALL, 0)


def test_an_empty_cell_of_csv_is_a_null_and_line_numbers_count_quoted_line_ends(tmp_path):
    task = task_of(tmp_path, b'prompt,answer\n"a\nb",1\n,2\nc,3\n', "rows.csv")
    assert pairs(task.problems(ALL, 0)) == [("a\nb", "1"), ("c", "3")]
    assert "rows.csv:4: prompt is null" in task.notes[0]


@pytest.mark.parametrize("second", ["rows.jsonl:2", "rows.jsonl:1"])
def test_an_id_that_stands_twice_is_refused_with_both_places(tmp_path, second):
    row = {"prompt": "x", "answer": "y", "id": 5}
    if second.endswith("2"):
        task = task_of(tmp_path, lines(row, row))
    else:
        (tmp_path / "other.jsonl").write_bytes(lines(row))
        task_of(tmp_path, lines(row))
        task = Files(str(tmp_path))
    first = "rows.jsonl:1" if second.endswith("2") else "other.jsonl:1"
    with pytest.raises(DataError, match=f"{second}: id '5' stands at .*{first} already"):
        task.problems(ALL, 0)


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("rows.jsonl", b'{"prompt": "x", "answer": "y"}\n\n{not json}', r"rows\.jsonl:3: not JSON"),
        ("rows.jsonl", b"[1, 2]", r"rows\.jsonl:1: a row must be an object"),
        ("rows.json", b'[{"prompt": "x",\n"answer": }]', r"rows\.json:2: not JSON"),
        ("rows.json", b'[{"prompt": "x", "answer": "y"}, 3]', r"rows\.json, row 2: a row must be an object"),
        ("rows.json", b'{"prompt": ["x"], "answer": []}', "differ in length"),
        ("rows.jsonl", b'{"prompt": "x", "answer": "y", "answer": "z"}', "rows.jsonl:1: .*'answer' stands twice"),
        ("rows.json", b'[{"prompt": "x", "answer": {"a": 1, "a": 1}}]', "'a' stands twice in one object"),
        ("rows.json", b"3", "must be a list of rows"),
        ("rows.csv", b"prompt,answer\nx,y\nx\n", r"rows\.csv:3: 1 cells for the 2 columns"),
        ("rows.csv", b"prompt,prompt\nx,y\n", r"rows\.csv:1: a column name stands twice"),
        ("rows.csv", b'prompt,answer\nx,"y\n', r"rows\.csv:2: not CSV"),
        ("rows.jsonl", b"\xff\xfe\x00", "not UTF-8"),
        ("rows.jsonl", b"\n \r\n", "holds no rows"),
        ("rows.json", b"", "holds no rows"),
        ("rows.csv", b"", "holds no rows"),
    ],
)
def test_broken_and_empty_files_are_refused_with_file_and_line(tmp_path, name, content, said):
    """B84, B86"""
    with pytest.raises(DataError, match=said):
        task_of(tmp_path, content, name).problems(ALL, 0)


@pytest.mark.parametrize("text, finished, score", [(" 42\n", True, 1), ("42", False, 0), ("42.0", True, 0)])
def test_only_the_exact_answer_counts(text, finished, score):
    assert Files("rows.jsonl").score(text, "42", finished) == score


def test_parquet_gives_what_json_gives(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="not installed")
    from pyarrow import parquet

    rows = [
        {"prompt": MESSAGES, "reward_model": {"ground_truth": "4"}, "tools": None, "made": b"\x00\xff"},
        {"prompt": MESSAGES[1:], "reward_model": {"ground_truth": "5"}, "tools": ["a"], "made": b""},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    problems = Files(str(tmp_path / "rows.parquet"), {"answer": "reward_model.ground_truth"}).problems(ALL, 0)
    assert pairs(problems) == [(tuple(MESSAGES), "4"), ((MESSAGES[1],), "5")]
    assert problems[0].fields == {"reward_model": {"ground_truth": "4"}, "tools": None, "made": "AP8="}
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"rows\.parquet: not Parquet"):
        Files(str(tmp_path / "rows.parquet")).problems(ALL, 0)


def test_parquet_without_its_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="pip install pyarrow"):
        task_of(tmp_path, b"", "rows.parquet").problems(ALL, 0)


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda value: not value.lstrip().startswith("[")
)
names = st.text(string.ascii_letters, min_size=1, max_size=5).map("extra {}".format)
tables = st.lists(names, max_size=2, unique=True).flatmap(
    lambda extra: st.lists(
        st.fixed_dictionaries(dict.fromkeys(("prompt", "answer", *extra), text)), min_size=1, max_size=5
    )
)


@settings(max_examples=40, deadline=None)
@given(tables, st.sampled_from(["jsonl", "json", "columns", "csv", "tsv", "parquet"]), st.booleans())
def test_whatever_is_written_is_read(tmp_path_factory, rows, form, bom):
    """B84: any Unicode text, in every format, with and without a byte order mark."""
    file = tmp_path_factory.mktemp("rows") / f"rows.{'json' if form == 'columns' else form}"
    if form == "parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="not installed")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        with file.open("w", encoding="utf-8-sig" if bom else "utf-8", newline="") as out:
            if form == "jsonl":
                out.write("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
            elif form == "json":
                json.dump(rows, out)
            elif form == "columns":
                json.dump({name: [row[name] for row in rows] for name in rows[0]}, out)
            else:
                writer = csv.DictWriter(out, list(rows[0]), delimiter="\t" if form == "tsv" else ",")
                writer.writeheader()
                writer.writerows(rows)
    problems = Files(str(file)).problems(ALL, seed=0)
    read = [{"prompt": p.prompt, "answer": p.truth, **p.fields} for p in problems]
    assert read == rows
