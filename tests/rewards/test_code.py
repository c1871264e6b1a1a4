import json
import os
import subprocess
import sys

import pytest

from mindspeed_asyncflow.errors import RewardError
from mindspeed_asyncflow.rewards.base import Answer
from mindspeed_asyncflow.rewards.code import Code, block_of, cases_of

ADD = "def f(a, b):\n    return a + b"
CASES = json.dumps({"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]})


def score(program, truth, finished=True, fenced=True, **options):
    text = f"Here it is:\n```python\n{program}\n```\nDone." if fenced else program
    return Code(**({"case_s": 20.0, "timeout_s": 60.0} | options)).score(Answer(text, truth, finished))


@pytest.mark.parametrize(
    ("program", "truth", "right"),
    [
        (ADD, CASES, 1.0),
        ("def f(a, b):\n    return a - b", CASES, 0.0),
        (ADD, json.dumps({"asserts": ["assert f(1, 2) == 3", "assert f(0, 0) == 0"]}), 1.0),
        (ADD, "assert f(1, 2) == 3\nassert f(2, 2) == 5", 0.0),
        ("print(int(input()) * 2)", json.dumps({"inputs": ["4\n", "5\n"], "outputs": ["8", "10\n"]}), 1.0),
        ("import sys\nprint(int(input()) * 2)\nsys.exit(0)", json.dumps({"inputs": ["4\n"], "outputs": ["8"]}), 1.0),
        ("print('é漢')", json.dumps({"inputs": [""], "outputs": ["é漢"]}), 1.0),
        ("def f(a, b:", CASES, 0.0),
    ],
)
def test_programs_are_judged_by_their_tests(program, truth, right):
    assert score(program, truth) == right


def test_partial_credit_only_where_asked_for():
    assert score("def f(a, b):\n    return 3", CASES) == 0.0
    assert score("def f(a, b):\n    return 3", CASES, partial=True) == 0.5


@pytest.mark.parametrize("leave", ["import sys\nsys.exit(0)", "import os\nos._exit(0)"])
def test_a_program_that_leaves_before_its_tests_has_not_passed_them(leave):
    assert score(leave, "assert f(1, 2) == 3") == 0.0


@pytest.mark.parametrize(
    "attempt",
    [
        "import socket\nsocket.socket()",
        "import os\nos.fork()",
        "import os\nos.execv('/usr/bin/env', ['env'])",
        "open('here', 'w')",
        "open('../there', 'a')",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\nos.unlink('../there')",
        "import ctypes\nif ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == -1:\n    raise PermissionError",
        "import os\nos.removexattr('here', 'user.x')",
        "import os\nos.mkdir('../there')",
        "import ctypes\nif ctypes.CDLL(None).ptrace(16, 1, 0, 0) == -1:\n    raise PermissionError",
    ],
)
def test_the_sandbox_refuses_network_processes_writing_and_signals(attempt):
    tried = "\n".join(f"    {line}" for line in attempt.splitlines())
    assert score(f"try:\n{tried}\n    done = True\nexcept PermissionError:\n    done = False", "assert not done") == 1.0


def test_memory_is_bounded_and_ordinary_programs_work():
    assert score("try:\n    bytearray(1 << 40)\nexcept MemoryError:\n    good = True", "assert good") == 1.0
    modules = "math, collections, heapq, itertools, re, json, random, functools, bisect, decimal, fractions, typing"
    assert (
        score(
            f"import {modules}\nimport threading\nt = threading.Thread(target=print)\nt.start()\nt.join()",
            "assert True",
        )
        == 1.0
    )


@pytest.mark.parametrize("program", ["while True:\n    pass", "import time\ntime.sleep(60)"])
def test_what_does_not_end_is_ended(program):
    assert score(program, "assert True", case_s=0.3) == 0.0
    assert not running()


def test_endless_output_is_not_collected():
    printing = "while True:\n    print('y' * 100000)"
    assert score(printing, json.dumps({"inputs": [""], "outputs": ["y"]}), case_s=1.0) == 0.0
    assert not running()


def running():
    """Sandboxed programs of this process that are alive."""
    listed = subprocess.run(["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return [line for line in listed.stdout.splitlines() if "sandbox.py" in line]


def test_a_cut_off_answer_without_a_whole_block_has_no_program():
    assert score(ADD, CASES, finished=False, fenced=False) == 0.0
    assert score(ADD, CASES, finished=True, fenced=False) == 1.0


@pytest.mark.parametrize(
    ("truth", "said"),
    [
        ("", "no test"),
        ("{", "neither JSON"),
        ('{"a": 1}', "inputs and outputs"),
        ('{"inputs": [1], "outputs": []}', "one length"),
        ("it returns the sum", "no Python"),
        ("x = 3", "tests nothing"),
        ('{"asserts": ["assert f(1) == 2", "f"]}', "tests nothing"),
        ('{"asserts": ["assert f(1"]}', "no Python"),
        ('{"fn_name": "f", "inputs": [3], "outputs": [4]}', "lists of arguments"),
        ('{"inputs": [["4"]], "outputs": [["8"]]}', "must be texts"),
        ('{"fn_name": "f(); g", "inputs": [[1]], "outputs": [1]}', "no name of a function"),
    ],
)
def test_a_truth_without_usable_tests_is_an_error(truth, said):
    with pytest.raises(ValueError, match=said):
        cases_of(ADD, truth)


@pytest.mark.parametrize("options", [{"case_s": 0}, {"memory_mb": 1}, {"output_kb": 0}])
def test_limits_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match="case_s"):
        Code(**options)


def test_a_machine_without_sandboxes_is_told_before_the_run(monkeypatch):
    Code().check()
    monkeypatch.setattr(Code, "_passes", lambda *_: False)
    with pytest.raises(RewardError, match="seccomp"):
        Code().check()


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("It prints\n```text\n3\n```\nwith\n```python\nx = 1\n```", "x = 1"),
        ("```cpp\nint x;\n```\n```py\nx = 1\n```\n", "x = 1"),
        ("```Python3\r\nx = 1\r\n```\r\nIt prints\r\n```\r\n3\r\n```", "x = 1"),
        ("```python\nx = 1\n```\nBetter: ```python\nx = 2```", "x = 2"),
        ("```\nx = 1\n```", "x = 1"),
        ("```python\nx = 1\n```\n```python\nx = ", "x = 1"),
        ("```cpp\nint x;\n```", None),
        ("x = 1", None),
    ],
)
def test_the_last_whole_block_of_python_is_the_program(text, block):
    assert block_of(text) == block


def test_a_result_is_compared_as_json_so_that_nothing_equals_everything():
    truth = json.dumps({"fn_name": "f", "inputs": [[]], "outputs": [[1, 2]]})
    assert score("def f():\n    return (1, 2)", truth) == 1.0
    assert score("class X:\n    def __eq__(self, _):\n        return True\ndef f():\n    return X()", truth) == 0.0


def test_time_that_is_over_for_a_program_without_fault_is_an_error_not_a_zero():
    truth = json.dumps({"asserts": ["assert True"] * 1000})
    with pytest.raises(TimeoutError, match="of 1000 tests"):
        score("", truth, timeout_s=0.5)


def test_a_superuser_has_no_privileges_inside_but_to_read():
    status = "[line.split()[1] for line in open('/proc/self/status') if line.startswith('CapEff')]"
    assert score(f"held = int({status}[0], 16)", "assert held & ~4 == 0") == 1.0


def test_hashes_are_the_same_in_every_run():
    wanted = {"inputs": [""], "outputs": [str(score_of_hash())]}
    assert score("print(hash('a'))", json.dumps(wanted)) == 1.0


def score_of_hash():
    command = [sys.executable, "-S", "-c", "print(hash('a'))"]
    return int(subprocess.run(command, env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True).stdout)
