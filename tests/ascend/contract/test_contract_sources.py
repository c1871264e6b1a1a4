"""Symbols are found in released sources by reading them: definitions, imports, fields, operators."""

import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

from tests.ascend.contract import signatures
from tests.ascend.contract.files import Files
from tests.ascend.contract.sources import Library

PACKAGE = {
    "lib/__init__.py": """
from .version import __version__
from .part import *
from . import deep
LAZY = {"Late": ".part:Base"}
def __getattr__(name): ...
""",
    "lib/version.py": "__version__ = version = '1.2'\n",
    "lib/part.py": """
import abc
from dataclasses import KW_ONLY, dataclass, field
from typing import overload
from other.room import Outer
from msgspec import Struct

try:
    import fast
except ImportError:
    def plain(a, b=1, /, c=2, *rest, key, word=None, **more): ...

@overload
def twice(x: int): ...
def twice(x, y=None): ...

class Base(abc.ABC):
    limit: int = 3
    def __init__(self, config, *, late=False):
        self.inner = Inner(1)
        self.held: Inner | None = None
    @abc.abstractmethod
    def must(self, x): ...
    @property
    def made(self) -> "Inner": ...
    @classmethod
    def build(cls, source): ...
    @staticmethod
    def free(a): ...

class Child(Base):
    def must(self, x, y=1): ...

@dataclass
class Inner:
    size: int
    name: str = ""
    table: dict = field(default_factory=dict)
    def grow(self, by): ...

@dataclass
class Named:
    first: int
    _: KW_ONLY
    second: int = 0

class Message(Struct):
    text: str
    kind: int | None = None

class Far(Outer):
    pass

class Switch:
    def __setattr__(self, name, value):
        if name == "loud": ...

switch = Switch()
alias = plain
""",
    "lib/deep/__init__.py": """
def read(): return os.environ['VLLM_KNOWN'], config.get('spelled'), '--with-dashes'
""",
}


@pytest.fixture(scope="module")
def library():
    return Library({"lib": Files(PACKAGE)})


@pytest.mark.parametrize(
    ("symbol", "record"),
    [
        ("lib", "module"),
        ("lib.deep", "module"),
        ("lib.__version__", "value"),
        ("lib.part.plain", ["(a, b=..., /, c=..., *rest, key, word=..., **more)"]),
        ("lib.plain", ["(a, b=..., /, c=..., *rest, key, word=..., **more)"]),
        ("lib.part.alias", ["(a, b=..., /, c=..., *rest, key, word=..., **more)"]),
        ("lib.part.twice", ["(x, y=...)"]),
        ("lib.Late", ["(config, *, late=...)"]),
        ("lib.part.Child", ["(config, *, late=...)"]),
        ("lib.part.Child().must", ["(x, y=...)"]),
        ("lib.part.Child.must", ["(self, x, y=...)"]),
        ("lib.part.Child().limit", "value"),
        ("lib.part.Child.build", ["(source)"]),
        ("lib.part.Child().free", ["(a)"]),
        ("lib.part.Child().inner.grow", ["(by)"]),
        ("lib.part.Child().held.grow", ["(by)"]),
        ("lib.part.Child().made.size", "value"),
        ("lib.part.Inner", ["(size, name=..., table=...)"]),
        ("lib.part.Named", ["(first, second=...)"]),
        ("lib.part.Message", ["(text, kind=...)"]),
        ("lib.part.switch.loud", "value"),
        ("env:VLLM_KNOWN", "value"),
        ("option:lib:spelled", "value"),
        ("option:lib:with_dashes", "value"),
        ("lib.part.Far", ["(*args, **kwargs)"]),
        ("lib.part.Far().anything", "untyped"),  # its base is not among the sources
        ("lib.part.Child().limit.bits", "untyped"),
        ("lib.part.gone", None),
        ("lib.gone", None),
        ("lib.gone.deeper", None),
        ("lib.part.Child().gone", None),
        ("lib.part.Child().inner.gone", None),
        ("lib.part.switch.quiet", None),
        ("env:VLLM_UNKNOWN", None),
        ("option:lib:unspelled", None),
    ],
)
def test_a_symbol_is_what_the_source_says(library, symbol, record):
    assert library.record(symbol) == record


def test_abstract_methods_are_those_that_no_base_defines(library):
    assert library.abstract("lib.part.Base") == ["must"]
    assert library.abstract("lib.part.Child") == []


def test_operators_are_read_from_their_schemas():
    schemas = """
custom:
  - func: npu_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)
  - func: npu_norm.out(Tensor self, int[2] size=[1, 2], *, Tensor(a!) out) -> Tensor
"""
    package = {"torch_npu/__init__.py": "", "torch_npu/csrc/aten/npu_native_functions.yaml": schemas}
    library = Library({"torch_npu": Files(package)})
    assert library.record("torch_npu.npu_norm") == ["(self, gamma, epsilon=...)", "(self, size=..., *, out)"]
    assert library.record("torch_npu.npu_gone") is None


def test_compiled_names_count_where_the_library_itself_uses_them():
    package = {"torch_npu/__init__.py": "import torch_npu\nx = torch_npu._C.Group.Options()\n"}
    library = Library({"torch_npu": Files(package)})
    assert library.record("torch_npu._C.Group.Options") == "untyped"
    assert library.record("torch_npu._C.Group.Choices") is None


def test_a_wheel_is_read_without_being_installed(tmp_path):
    with zipfile.ZipFile(tmp_path / "lib-1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("lib/__init__.py", "def f(a): ...")
        wheel.writestr("lib/native.so", b"\x7fELF\x00PYTORCH_NPU_ALLOC_CONF\x00other\x00")
        wheel.writestr("other/__init__.py", "def g(a): ...")
    library = Library({"lib": Files.of_archive(tmp_path / "lib-1.2-py3-none-any.whl", "lib")})
    assert library.record("lib.f") == ["(a)"]
    assert library.record("env:PYTORCH_NPU_ALLOC_CONF") == "value"
    assert library.record("other.g") is None
    assert "lib" not in sys.modules


@pytest.mark.slow
def test_the_records_of_the_installed_vllm_are_what_its_source_says():
    spec = importlib.util.find_spec("vllm")
    (release,) = [r for r in signatures.load() if (r.library, r.version) == ("vllm", "0.27.1")]
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    library = Library({"vllm": Files.of_folder(Path(spec.origin).parents[1], "vllm")})
    version = library.files["vllm"].read("vllm/_version.py") or ""
    if f"'{release.version}" not in version:
        pytest.skip(f"the record is of vLLM {release.version}, another one is installed")
    recorded = {s: record for s, record in release.symbols.items() if not s.startswith("env:")}
    assert len(recorded) > 50
    assert {symbol: library.record(symbol) for symbol in recorded} == recorded
