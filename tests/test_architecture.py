"""The rules of docs/architecture.md, checked on the source: layers, rooms of heavy libraries, sizes, names."""

import argparse
import ast
import graphlib
import re
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mindspeed_asyncflow"

LAYERS = {
    0: ("records", "errors", "config"),
    1: ("platforms", "observe", "patches", "migration"),
    2: ("dock", "algorithms", "rewards", "environments", "data", "planner"),
    3: ("reshard", "engines"),
    4: ("workflow",),
    5: ("simulation", "service"),
    6: ("web",),
    7: ("cli", "__init__", "__main__"),
}
LAYER = {room: layer for layer, rooms in LAYERS.items() for room in rooms}

# Library -> the only places that may import it, also inside functions.
ROOMS = {
    "torch_npu": ("platforms/npu.py",),
    "mindspeed": ("platforms/mindspeed.py",),
    "megatron": ("engines/megatron/", "patches/", "platforms/"),
    "mbridge": ("engines/megatron/", "patches/"),
    "vllm": ("engines/vllm/", "patches/"),
    "vllm_ascend": ("engines/vllm/", "patches/"),
    "ray": ("service/",),
    "transformers": ("data/", "engines/"),
    "reasoning_gym": ("data/",),
    "cann_kernels": ("platforms/",),
    "triton": (),
    "torch": ("algorithms/", "data/", "engines/", "patches/", "platforms/", "reshard/"),
}
ENVIRONMENT_READERS = ("platforms/", "cli/", "engines/vllm/", "service/")
# The wall clock may jump, so it stamps what people read and compare, and no wait depends on it.
WALL_CLOCKS = ("observe/", "service/chaos.py", "service/cleanup.py", "engines/vllm/backend.py", "web/completions.py")
TOP_LEVEL = {
    *("mindspeed_asyncflow", "configs", "scripts", "tests", "cann_kernels", "docs", "benchmarks", "examples"),
    *("setup.py", "README.md", "README.zh-CN.md", "LICENSE", "pyproject.toml"),
}
TEST_FOLDERS_BESIDE_THE_PACKAGE = (
    "scripts",
    "benchmarks",
    "examples",
    "docs",
    "ascend",
    "cann_kernels",
    "peers",
    "report",
)


def tracked() -> list[str]:
    """Files of the project: tracked ones, and new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in listed if (ROOT / name).is_file()]


SOURCES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


@cache
def tree(name: str) -> ast.Module:
    return ast.parse((PACKAGE / name).read_text(encoding="utf-8"))


def room(name: str) -> str:
    """`dock/client.py` -> `dock`, `records.py` -> `records`."""
    return name.removesuffix(".py").split("/")[0]


def imports(name: str) -> list[str]:
    """Every imported module of a file, absolute and dotted, imports inside functions and for types included."""
    package = ["mindspeed_asyncflow", *name.split("/")[:-1]]
    found = []
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*package[: len(package) - node.level + 1], node.module or ""]) if node.level else node.module
            )
            found += [f"{base.rstrip('.')}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.append(node.args[0].value)
    return found


def own_imports(name: str) -> list[str]:
    """Imports from the package itself, without its name; `from mindspeed_asyncflow import x` gives `x`."""
    return [found.partition(".")[2] for found in imports(name) if found.startswith("mindspeed_asyncflow.")]


@pytest.mark.parametrize("name", SOURCES)
def test_imports_go_downwards(name):
    here = LAYER[room(name)]
    for target in own_imports(name):
        there = target.split(".")[0]
        if there == "__version__" or there == room(name):
            continue
        assert there in LAYER, f"{name} imports {target}, which has no layer"
        assert LAYER[there] <= here, f"{name} (layer {here}) imports {target} (layer {LAYER[there]})"


def test_rooms_of_one_layer_do_not_import_each_other_in_a_circle():
    needs: dict[str, set[str]] = {}
    for name in SOURCES:
        needs.setdefault(room(name), set()).update(t.split(".")[0] for t in own_imports(name))
    for own, rooms in needs.items():
        rooms.discard(own)
    graphlib.TopologicalSorter(needs).prepare()  # raises CycleError with the circle


@pytest.mark.parametrize("name", SOURCES)
def test_engines_are_seen_through_their_protocols(name):
    if name.startswith("engines/") or name == "service/wiring.py":
        return
    concrete = [t for t in own_imports(name) if re.match(r"engines\.(?!base\b|registry\b)", t)]
    if name.startswith("simulation/"):
        concrete = [t for t in concrete if not t.startswith("engines.simulated")]
    assert concrete == [], f"{name} imports concrete engines; only service/wiring.py may"


@pytest.mark.parametrize("name", SOURCES)
def test_heavy_libraries_stay_in_their_rooms(name):
    for found in imports(name):
        library = found.split(".")[0]
        if library in ROOMS and not name.startswith(ROOMS[library]):
            pytest.fail(f"{name} imports {found}; only {', '.join(ROOMS[library])} may import {library}")


@pytest.mark.parametrize("name", SOURCES)
def test_device_words_stand_in_platforms_and_patches_only(name):
    if name.startswith(("platforms/", "patches/")):
        return
    words = [
        f"line {node.lineno}: torch.{node.attr}"
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Attribute)
        and node.attr in ("cuda", "npu")
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ]
    assert words == [], f"{name} speaks of devices: {words}"


@pytest.mark.parametrize("name", SOURCES)
def test_environment_variables_are_read_in_few_rooms(name):
    if name.startswith(ENVIRONMENT_READERS):
        return
    uses = [
        node.lineno
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    ]
    assert uses == [], f"{name} reads the environment on lines {uses}; make it a setting"


@pytest.mark.parametrize("name", SOURCES)
def test_the_wall_clock_is_read_where_moments_are_written_down_only(name):
    """A clock that somebody sets must not end a wait, or make one endless."""
    if name.startswith(WALL_CLOCKS):
        return
    uses = [
        node.lineno
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Attribute)
        and (node.attr, getattr(node.value, "id", "")) in {("time", "time"), ("time_ns", "time"), ("now", "datetime")}
    ]
    assert uses == [], f"{name} reads the wall clock on lines {uses}; waits take time.monotonic or the loop's clock"


def test_files_and_functions_stay_small():
    lengths = {name: len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) for name in SOURCES}
    assert {name: count for name, count in lengths.items() if count > 400} == {}
    assert statistics.median(count for count in lengths.values() if count > 3) < 150
    long = {}
    for name in SOURCES:
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > 80:
                    long[f"{name}:{node.name}"] = lines
    assert long == {}


@pytest.mark.parametrize("module", ["mindspeed_asyncflow", "mindspeed_asyncflow.config", "mindspeed_asyncflow.records"])
def test_light_modules_load_no_heavy_library(module):
    heavy = ("torch", "ray", "transformers", "vllm", "megatron", "torch_npu")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


CONFIGS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_loads_and_passes_its_check(name, monkeypatch):
    from mindspeed_asyncflow.cli.preflight import inspect, model_sizes
    from mindspeed_asyncflow.config import checks, load_config, schedules
    from mindspeed_asyncflow.config.machine import Machine, assume

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(Machine, "has_module", lambda self, module: True)
    config = load_config(name)
    machine = Machine(2, 0, 24 << 30, 24 << 30, 12 << 30, 50 << 30)
    if config.rollout.engine == "simulated":  # its devices are not those of a machine
        errors = [message for level, _, message in schedules.rules(config) if level == "error"]
    elif config.run.platform == "npu":
        cluster = assume(config.cluster.devices, config.cluster, machine)
        errors = [str(f) for f in inspect(config, cluster) if f.level == "error"]
    else:
        errors = [str(f) for f in checks.check(config, machine, model_sizes(config)) if f.level == "error"]
    assert errors == []


def test_the_default_configuration_is_short_and_every_key_is_explained():
    lines = (ROOT / "configs/qwen_tiny_cpu.yaml").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 40
    assert [line for line in lines if line.startswith("  ") and " # " not in line] == []


def test_tests_mirror_the_package():
    strays = []
    for path in sorted((ROOT / "tests").glob("*/**/test_*.py")):
        inside = path.relative_to(ROOT / "tests")
        if inside.parts[0] in TEST_FOLDERS_BESIDE_THE_PACKAGE:
            continue
        if not (PACKAGE / inside.parent).is_dir():
            strays.append(str(inside))
    assert strays == [], "tests/<folder>/ stands for mindspeed_asyncflow/<folder>/"


def test_nothing_else_lies_at_the_top():
    top = {name.split("/")[0] for name in tracked()}
    assert {name for name in top if name not in TOP_LEVEL and not name.startswith(".")} == set()


def test_no_machine_path_and_no_registry_host_is_written_down():
    # Put together here, so that this file does not contain what it forbids.
    paths = [rf"(?<![\w./-])/{top}/\w" for top in ("root", "work", "home", "tmp", "opt")]
    hosts = [
        "pypi." + "org",
        "files.python" + "hosted",
        "registry.npm" + "js",
        "deb.debian." + "org",
        "proxy.go" + "lang",
    ]
    forbidden = re.compile("|".join([*paths, *map(re.escape, hosts)]))
    found = []
    for name in tracked():
        lines = (ROOT / name).read_text("utf-8", "ignore").splitlines()
        found += [f"{name}:{n}: {line.strip()[:99]}" for n, line in enumerate(lines, 1) if forbidden.search(line)]
    assert found == []


def test_the_index_of_cpu_torch_builds_is_named_in_one_place():
    address = "download.py" + "torch"
    naming = [n for n in tracked() if not n.endswith(".png") and address in (ROOT / n).read_text("utf-8", "ignore")]
    assert naming == ["scripts/bootstrap.sh"]


def test_the_command_line_is_frozen():
    """May grow: a new option is added to options.txt too. Nothing there is ever renamed or removed."""
    from mindspeed_asyncflow.cli import build_parser

    def options(prefix: str, parser: argparse.ArgumentParser) -> list[str]:
        found = []
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, sub in action.choices.items():
                    found += options(name, sub)
            else:
                found.append(f"{prefix} {action.option_strings[-1] if action.option_strings else action.metavar}")
        return found

    text = (PACKAGE / "cli/options.txt").read_text(encoding="utf-8")
    frozen = [line for line in text.splitlines() if not line.startswith("#")]
    assert sorted(options("asyncflow", build_parser())) == sorted(frozen)
