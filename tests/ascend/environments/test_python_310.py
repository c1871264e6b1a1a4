"""The package can be loaded by Python 3.10, for which the vendor builds its wheels beside 3.11."""

import ast
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "mindspeed_asyncflow"
PINS = ROOT / "scripts" / "requirements" / "core.txt"
LIGHT = (
    *("annotated-types", "ml-dtypes", "msgspec", "numpy", "psutil", "pydantic", "pydantic-core", "pyyaml"),
    *("typing-extensions", "typing-inspection"),
)
HEAVY = (  # not installed for this
    *("megatron", "ray", "torch", "torch_npu", "transformers", "vllm"),
    *("fastapi", "httpx", "starlette", "uvicorn"),
)
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if path.name != "__main__.py"
)
LOAD = """
import importlib, json, sys
loaded, heavy = [], {}
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
        loaded.append(name)
    except ModuleNotFoundError as error:
        heavy[name] = error.name
print(json.dumps([sys.version_info[:2], loaded, heavy]))
"""


@pytest.mark.parametrize("folder", ["mindspeed_asyncflow", "scripts", "cann_kernels"])
def test_every_file_is_written_in_the_language_of_310(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 10))


def test_what_310_does_not_know_is_found_by_this_check():
    with pytest.raises(SyntaxError):
        ast.parse("try:\n    f()\nexcept* OSError:\n    pass\n", feature_version=(3, 10))


def python_310():
    """A Python 3.10 that runs; a launcher of that name may have no release behind it."""
    places = [*Path.home().glob(".pyenv/versions/3.10.*/bin/python"), shutil.which("python3.10")]
    places += Path.home().glob(".local/share/uv/python/cpython-3.10*/bin/python")
    works = "import sys, venv; raise SystemExit(sys.version_info[:2] != (3, 10))"
    runs = (str(p) for p in places if p and subprocess.run([p, "-c", works], capture_output=True).returncode == 0)
    return next(runs, None)


@pytest.fixture(scope="module")
def environment():
    """An environment of Python 3.10 with the pinned releases of the light libraries only, kept in .cache."""
    base = python_310()
    if base is None:
        pytest.skip("there is no Python 3.10 on this machine")
    mark = hashlib.sha256(f"{base} {LIGHT} {PINS.read_text()}".encode()).hexdigest()
    folder = ROOT / ".cache" / "python310"
    stamp, python = folder / "stamp", folder / "bin" / "python"
    if not stamp.is_file() or stamp.read_text() != mark:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([base, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--disable-pip-version-check", "-c", PINS, *LIGHT], check=True, timeout=300)
        stamp.write_text(mark)
    return str(python)


@pytest.mark.slow
def test_every_module_that_needs_no_heavy_library_loads_in_310(environment):
    done = subprocess.run(
        [environment, "-c", LOAD], input=json.dumps(MODULES), capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    version, loaded, heavy = json.loads(done.stdout)
    assert version == [3, 10]
    assert {name: missing for name, missing in heavy.items() if missing.split(".")[0] not in HEAVY} == {}
    assert len(loaded) > len(MODULES) / 2
    rooms = ("config", "dock", "records", "errors", "observe", "planner", "platforms.ports", "platforms.pythons")
    assert [name for name in heavy if name.split(".", 1)[-1].startswith(rooms)] == []
