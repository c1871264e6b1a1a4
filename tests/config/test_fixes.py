"""Every finding of a check says what to do: its sentence has a word of a remedy in it."""

import ast
import re
from pathlib import Path

import pytest

import mindspeed_asyncflow

PACKAGE = Path(mindspeed_asyncflow.__file__).parent
FILES = sorted(p for room in ("config", "cli") for p in (PACKAGE / room).glob("*.py"))
REMEDY = re.compile(
    r"\b(set|take|leave|raise|lower|use|name|make|must be|needs|need|stop|correct|install|is for|write|without it|"
    r"usual is|must fit|keeps it|takes any|give|put|inside groups|are used|through the relay|says how many|end|"
    r"must see it|they take turns|fix|mend|remedy|error)\b"
)


def sentences(path):
    """(line, literal words of the message) of everything that a rule yields, where its words stand there."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        parts = None
        if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 3:
            parts = node.value.elts
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding" and len(node.args) == 3:
            parts = node.args
        if parts and isinstance(parts[2], ast.Constant | ast.JoinedStr):
            words = [n.value for n in ast.walk(parts[2]) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            words += [n.id for n in ast.walk(parts[2]) if isinstance(n, ast.Name)]
            if len(" ".join(words).split()) > 3:  # else the words come from elsewhere
                yield node.lineno, " ".join(words)


@pytest.mark.parametrize("path", [p for p in FILES if list(sentences(p))], ids=lambda p: p.stem)
def test_every_finding_says_what_to_do(path):
    assert [f"line {line}: {text}" for line, text in sentences(path) if not REMEDY.search(text)] == []
