"""Running the code of an answer against tests."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import os
import re
import secrets
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.errors import RewardError
from mindspeed_asyncflow.rewards import sandbox
from mindspeed_asyncflow.rewards.base import Answer

_OPENING = re.compile(r"```[ \t]*([\w+#.-]*)[ \t]*")  # at the end of a line
_PYTHON = ("python", "python3", "py")
_SCRIPT = str(Path(sandbox.__file__))
# The folder of the script must not be searched for modules, and -I would ignore PYTHONHASHSEED.
_BOOT = "import sys; del sys.path[0]; exec(compile(open(sys.argv[1]).read(), sys.argv[1], 'exec'))"


@dataclass(frozen=True, slots=True)
class Case:
    """One test: the program, what it reads, and what it must print; None: it only has to run to its end."""

    program: str
    stdin: str = ""
    stdout: str | None = None


class Code:
    """Share of tests that the answer's last block of Python passes: 1 for all, else 0 (`partial`: the share).

    The truth is a JSON object, or lines of Python that raise when a test fails:
      {"inputs": [...], "outputs": [...]}                       standard input and output of the program
      {"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]}      arguments and result of a function, as JSON values
      {"asserts": ["assert f(1, 2) == 3"]}                      each one by itself
    Every test runs in a sandbox of its own (sandbox.py), for at most `case_s` seconds. Where the time for all tests
    (0.9 of reward.timeout_s) is over before it is known what the program is worth, that is an error.
    """

    def __init__(
        self, partial: bool = False, case_s: float = 2.0, memory_mb: int = 512, output_kb: int = 256,
        timeout_s: float = 5.0,
    ) -> None:  # fmt: skip
        if case_s <= 0 or memory_mb < 32 or output_kb < 1:
            raise ValueError("case_s must be above 0, memory_mb at least 32 and output_kb at least 1")
        if sys.platform != "linux" or os.uname().machine not in sandbox._ARCHITECTURES:
            raise RewardError(f"scorer code has no sandbox for {sys.platform} on {os.uname().machine}")
        self.partial, self.case_s, self.most_bytes = partial, case_s, output_kb << 10
        self.all_s = 0.9 * timeout_s  # the pool would end the scorer itself, and then nothing would be known
        self.limits = {"cpu_s": math.ceil(case_s), "memory_mb": memory_mb, "output_bytes": self.most_bytes}

    def check(self) -> None:
        """Raises `RewardError` where the kernel does not let a sandbox be made."""
        if not self._passes(Case(""), 10.0):
            raise RewardError("scorer code cannot make a sandbox: this kernel or container refuses seccomp filters")

    def score(self, answer: Answer) -> float:
        block = block_of(answer.text)
        cases = cases_of(answer.text if block is None else block, answer.truth)
        if not answer.finished and block is None:
            return 0.0
        ends, passed, hung = time.monotonic() + self.all_s, 0, False
        for done, case in enumerate(cases):
            began = time.monotonic()
            limit = min(self.case_s, ends - began)
            good = limit > 0 and self._passes(case, limit)
            overdue = not good and time.monotonic() - began >= limit
            if overdue and done and limit < self.case_s and not hung:
                raise TimeoutError(f"time for {done} of {len(cases)} tests within {self.all_s:g} s (reward.timeout_s)")
            hung |= overdue
            passed += good
            if not good and not self.partial:
                return 0.0
        return passed / len(cases)

    def _passes(self, case: Case, limit_s: float) -> bool:
        program = case.program.encode("utf-8", "replace")
        word = ("exits:" if case.stdout is not None else "ends:") + secrets.token_hex(16)
        with contextlib.ExitStack() as stack:
            reading, writing = os.pipe()
            stack.callback(os.close, reading)
            told = json.dumps([self.limits, os.getpid(), writing])
            process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-B", "-c", _BOOT, _SCRIPT, told],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[writing],
                cwd="/",  # nothing can be written there, so nothing is left
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )
            os.close(writing)
            stack.callback(_end, process)
            given = b"%d\n%s%s\n%s" % (len(program), program, word.encode(), case.stdin.encode("utf-8", "replace"))
            printed = _talk(process, given, self.most_bytes, limit_s)
            if printed is None:
                return False
            os.set_blocking(reading, False)
            with contextlib.suppress(BlockingIOError):
                if os.read(reading, 64).strip() == word.encode():
                    return case.stdout is None or _same(printed.decode("utf-8", "replace"), case.stdout)
            return False


def _talk(process: subprocess.Popen, given: bytes, most_bytes: int, limit_s: float) -> bytes | None:
    """What the process prints until it ends well; None: it failed, printed too much or took too long."""
    assert process.stdin is not None and process.stdout is not None
    ends, printed, sent = time.monotonic() + limit_s, b"", 0
    with selectors.DefaultSelector() as selector:
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.get_map():
            left = ends - time.monotonic()
            if left <= 0:
                return None
            for key, _ in selector.select(left):
                if key.fileobj is process.stdin:
                    try:
                        sent += os.write(key.fd, given[sent : sent + 65536])
                    except BrokenPipeError:
                        sent = len(given)
                    if sent == len(given):
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                data = os.read(key.fd, 65536)
                printed += data
                if len(printed) > most_bytes:
                    return None
                if not data:
                    selector.unregister(process.stdout)
    try:
        return printed if process.wait(max(0.01, ends - time.monotonic())) == 0 else None
    except subprocess.TimeoutExpired:
        return None


def _end(process: subprocess.Popen) -> None:
    """Nothing of the process is left afterwards: it cannot start others, and is killed with its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _same(printed: str, wanted: str) -> bool:
    """Equal but for white space at line ends and at the end."""
    lines = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, wanted))
    return next(lines) == next(lines)


def block_of(text: str) -> str | None:
    """The last whole fenced block that is called Python, else the last one without a name. None: there is none."""
    found: dict[bool, str] = {}
    name, lines = "", list[str]()
    inside = False
    for line in text.replace("\r\n", "\n").split("\n"):
        start, fence, _ = line.rpartition("```")
        if fence and (opening := _OPENING.fullmatch(line, len(start))) and (opening[1] or not inside):
            name, lines, inside = opening[1].lower(), [], True
        elif inside and line.rstrip().endswith("```"):
            lines += [start] if start.strip() else []
            if name in ("", *_PYTHON):
                found[name != ""] = "\n".join(lines)
            inside = False
        elif inside:
            lines.append(line)
    return found.get(True, found.get(False))


def cases_of(program: str, truth: str) -> list[Case]:
    """The tests in a truth. Raises ValueError for one that holds none."""
    text = truth.strip()
    if not text.startswith("{"):
        if not text:
            raise ValueError("the truth holds no test")
        return [Case(f"{program}\n{_python(text)}\n")]
    try:
        tests: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the truth is neither JSON nor Python: {error}") from error
    if isinstance(tests.get("asserts"), list) and tests["asserts"]:
        return [Case(f"{program}\n{line}\n") for line in map(_python, tests["asserts"])]
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"the truth has {sorted(tests)}; code needs inputs and outputs of one length, or asserts")
    pairs = list(zip(inputs, outputs))
    if name := tests.get("fn_name"):
        if not str(name).isidentifier():
            raise ValueError(f"fn_name {name!r} is no name of a function")
        if strange := [given for given in inputs if not isinstance(given, list)]:
            raise ValueError(f"inputs of {name} must be lists of arguments, not {strange[0]!r:.80}")
        # By way of JSON: tuples are lists, and an object that says it is equal to everything is refused.
        result = f"import json as _json\nassert _json.loads(_json.dumps({name}(*%r))) == %r\n"
        return [Case(f"{program}\n{result % pair}") for pair in pairs]
    if strange := [text for text in (*inputs, *outputs) if not isinstance(text, str | int | float)]:
        raise ValueError(f"inputs and outputs of a program must be texts, not {strange[0]!r:.80}")
    return [Case(program, str(given), str(wanted)) for given, wanted in pairs]


def _python(text: Any) -> str:
    try:
        tree = ast.parse(str(text), "<truth>")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the truth is no Python: {error}") from error
    if not any(isinstance(node, ast.Assert | ast.Raise | ast.Call) for node in ast.walk(tree)):
        raise ValueError(f"the truth tests nothing: it has no assert, raise or call: {str(text)[:80]!r}")
    return str(text)
