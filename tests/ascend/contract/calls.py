"""Which symbols of the vendors' libraries our code uses, and how. Read from our source; nothing is imported.

A symbol is a dotted path, with `()` behind a class where an instance is meant: `vllm.v1.engine.core.EngineCore().step`.
`torch.npu` and `torch.ops.npu` count as what torch_npu puts there. Beside paths there are `env:NAME`, an environment
variable that we set, and `option:LIBRARY:NAME`, a key of a dictionary of settings that the library reads.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.ascend.contract.known import (
    BUILDS,
    CALL_BY_NAME,
    DERIVES,
    EXTENSIONS,
    FORWARDERS,
    GIVES,
    HINTS,
    MEMBERS,
    SETTINGS,
    TABLES,
    VERBS,
    WORKER,
    WORKERS,
    lookup,
)

OURS = ("mindspeed_asyncflow", "cann_kernels", "benchmarks")
VENDORS = ("torch_npu", "mindspeed", "vllm", "vllm_ascend")
# What a file that uses any of them says somewhere; the others need not be parsed.
SPEAKS = re.compile(r"torch_npu|\bmindspeed\b|vllm|torch\.npu|torch\.ops\.npu|get_device_module|VLLM|PYTORCH_NPU")
DOTTED = re.compile(rf"({'|'.join(VENDORS)})(\.\w+)+")
VARIABLE = re.compile(r"(VLLM|PYTORCH_NPU)_[A-Z0-9_]+")


@dataclass(frozen=True, slots=True)
class Use:
    """One place. `positional` is None where the symbol is named and not called."""

    file: str
    line: int
    symbol: str
    positional: int | None = None
    keywords: tuple[str, ...] = ()
    more: bool = False  # further arguments that the source does not show
    override: str = ""  # our signature, where our class redefines the method
    methods: tuple[str, ...] | None = None  # what our subclass of the symbol defines

    @property
    def library(self) -> str:
        if self.symbol.startswith("env:"):
            name = self.symbol.removeprefix("env:")
            return "torch_npu" if name.startswith("PYTORCH_NPU") else _vllm_of(name)
        return self.symbol.removeprefix("option:").partition(":")[0].partition(".")[0]


def _vllm_of(variable: str) -> str:
    return "vllm_ascend" if variable.startswith("VLLM_ASCEND_") else "vllm"


def collect(root: Path, folders: Iterable[str] = OURS) -> list[Use]:
    """Every use below `folders` of `root`, in order of file and line."""
    found = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    paths = [path for path in found if "migration" not in path.parts]  # names of other programs' settings, no calls
    return read({path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths})


def read(texts: dict[str, str]) -> list[Use]:
    """Every use in modules given as file name -> text."""
    found: list[Use] = []
    own: set[str] = set()
    for file, text in texts.items():
        if not SPEAKS.search(text):
            continue
        reader = _Reader(file)
        tree = ast.parse(text)
        for _ in range(3):  # what a name stands for may be told below its first use
            reader.uses = set()
            reader.visit(tree)
        found += sorted(reader.uses, key=lambda use: (use.line, use.symbol, use.positional is None))
        own |= reader.own
    ours = {f"{worker}.{name}" for worker in WORKERS for name in own}
    return [use for use in found if use.symbol not in ours]


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef, drop_first: bool) -> str:
    """`(a, b=..., *, c, **kw)` of a definition; every default is written as `...`."""
    a = node.args
    names = [arg.arg for arg in [*a.posonlyargs, *a.args]]
    parts = names[: len(names) - len(a.defaults)] + [f"{n}=..." for n in names[len(names) - len(a.defaults) :]]
    if a.posonlyargs:
        parts.insert(len(a.posonlyargs), "/")
    parts = parts[1:] if drop_first else parts
    parts = parts[1:] if parts[:1] == ["/"] else parts
    if a.vararg or a.kwonlyargs:
        parts.append(f"*{a.vararg.arg if a.vararg else ''}")
    parts += [
        arg.arg if default is None else f"{arg.arg}=..."
        for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)
    ]
    if a.kwarg:
        parts.append(f"**{a.kwarg.arg}")
    return f"({', '.join(parts)})"


def bound_outside(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the first parameter is filled by the instance or class."""
    return not any(getattr(d, "id", "") == "staticmethod" for d in node.decorator_list)


class _Reader(ast.NodeVisitor):
    def __init__(self, file: str) -> None:
        self.file = file
        self.uses: set[Use] = set()
        self._scopes: list[dict[str, str]] = [{}]
        self.own: set[str] = set()  # what the extensions of this module add to the worker
        self._typed_ours: set[str] = set()  # members of the worker that hold objects of our own classes
        self._classes: set[str] = set()
        self._class = ""
        self._members: dict[str, str] = {}  # "Class.attribute" -> path
        self._returns: dict[str, str] = {}  # function of this module -> path
        self._dicts: list[dict[str, set[str]]] = [{}]  # names of dictionaries -> their keys, as far as shown
        self._strings: dict[str, str] = {}  # constants
        self._returned: dict[str, set[str]] = {}  # functions of this module -> keys of the dictionary that they return

    # ---- what an expression stands for --------------------------------------------------------------------------

    def _path(self, node: ast.AST | None) -> str:
        """The vendor path of an expression, or ""."""
        match node:
            case ast.Name(id=name):
                return lookup(HINTS, self.file, name) or next(
                    (scope[name] for scope in reversed(self._scopes) if name in scope), ""
                )
            case ast.Attribute(value=ast.Name(id="self"), attr=attr) if self._class:
                known = self._members.get(f"{self._class}.{attr}", "")
                if self._class not in EXTENSIONS:
                    return known
                return "" if attr in self._typed_ours | self.own else f"{WORKER}.{attr}"
            case ast.Attribute(value=value, attr=attr):
                base = self._path(value)
                return _canonical(f"{base}.{attr}") if base else ""
            case ast.Call():
                return self._result(node)
            case ast.Subscript(value=value, slice=index):
                if ast.unparse(value) == "sys.modules":
                    return self._vendor(index)
                base = self._path(value)
                return base if _is_class(base) else ""  # a generic class with its parameters
            case ast.IfExp(body=one, orelse=other):
                return self._path(one) or self._path(other)
            case ast.BoolOp(values=values):
                return next(filter(None, map(self._path, values)), "")
            case ast.Constant(value=str(text)) if text.isidentifier():  # an annotation in quotes
                return next((scope[text] for scope in reversed(self._scopes) if text in scope), "")
        return ""

    def _result(self, call: ast.Call) -> str:
        """What a call gives."""
        called = ast.unparse(call.func)
        if called in ("importlib.import_module", "import_module", "__import__", "sys.modules.get") and call.args:
            return self._vendor(call.args[0])
        if called == "torch.get_device_module":
            return "torch_npu.npu"
        for argument in call.args[:1]:
            if given := lookup(GIVES, self.file, f"{called}({ast.unparse(argument)})"):
                return given
        if called == "getattr" and len(call.args) > 1 and isinstance(call.args[1], ast.Constant):
            base = self._path(call.args[0])
            return _canonical(f"{base}.{call.args[1].value}") if base else ""
        path = self._path(call.func)
        if path:
            return f"{path}()" if _is_class(path) else ""
        return self._returns.get(called.removeprefix("self."), "")

    def _vendor(self, node: ast.AST) -> str:
        """The module that a string, or a constant of this module, names, if it is a vendor's."""
        text = node.value if isinstance(node, ast.Constant) else self._strings.get(ast.unparse(node), "")
        return text if isinstance(text, str) and text.partition(".")[0] in VENDORS else ""

    # ---- names ------------------------------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            if top in VENDORS:
                self._use(node, alias.name)
            if top in (*VENDORS, "torch"):
                self._scopes[-1][alias.asname or top] = alias.name if alias.asname else top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or (node.module or "").partition(".")[0] not in (*VENDORS, "torch"):
            return
        for alias in node.names:
            path = _canonical(f"{node.module}.{alias.name}")
            self._scopes[-1][alias.asname or alias.name] = path
            if path.partition(".")[0] in VENDORS:
                self._use(node, path)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for one, value in pairs:
                self._bind(one, self._path(value))
                self._note_keys(one, value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        declared = self._path(node.annotation)
        self._bind(node.target, self._path(node.value) or (f"{declared}()" if _is_class(declared) else ""))
        if node.value is not None:
            self._note_keys(node.target, node.value)
        self.generic_visit(node)

    def _note_keys(self, target: ast.expr, value: ast.expr) -> None:
        if not isinstance(target, ast.Name):
            return
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            self._strings[target.id] = value.value
        words = {n.value for n in ast.walk(value) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        self._options(value, target.id, self._keys(value) or words)
        for verb in sorted(words) if target.id.endswith(VERBS) else ():
            self._use(value, f"{WORKER}.{verb}")
        if keys := self._keys(value):
            self._dicts[-1][target.id] = keys

    def _options(self, node: ast.AST, table: str, names: set[str]) -> None:
        library, _, left_out = lookup(TABLES, self.file, table).partition(" but ")
        for name in sorted(names - set(left_out.split())) if library else ():
            self._use(node, f"option:{library}:{name}")

    def _keys(self, node: ast.AST) -> set[str]:
        """String keys of the dictionaries that an expression may give, as far as this module shows them."""
        match node:
            case ast.Dict():
                spread = [v for k, v in zip(node.keys, node.values, strict=True) if k is None]
                own = {k.value for k in node.keys if isinstance(k, ast.Constant) and isinstance(k.value, str)}
                return own.union(*map(self._keys, spread))
            case ast.Name(id=name):
                return next((keys[name] for keys in reversed(self._dicts) if name in keys), set())
            case ast.IfExp(body=one, orelse=other) | ast.BinOp(left=one, right=other):
                return self._keys(one) | self._keys(other)
            case ast.Call(func=ast.Name(id=name)):
                return self._returned.get(name, set())
        return set()

    def _bind(self, target: ast.expr, path: str) -> None:
        if not path:
            return
        if isinstance(target, ast.Name):
            self._scopes[-1][target.id] = path
        elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
            self._members[f"{self._class}.{target.attr}"] = path

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._scopes.append({})
        self._dicts.append({})
        for arg in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            declared = self._path(arg.annotation)
            self._bind(ast.Name(arg.arg), f"{declared}()" if _is_class(declared) else "")
        self.generic_visit(node)
        for part in ast.walk(node):
            if isinstance(part, ast.Return) and part.value is not None:
                if path := self._path(part.value):
                    self._returns[node.name] = path
                if keys := self._keys(part.value):
                    self._returned[node.name] = keys
                    self._options(part, f"{node.name}()", keys)
        self._scopes.pop()
        self._dicts.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        defined = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
        bases = [*map(self._path, node.bases), lookup(DERIVES, self.file, node.name)]
        for base in filter(_is_vendors, bases):
            self._use(node, base, methods=tuple(part.name for part in defined))
            for part in defined:
                if not part.name.startswith("__"):
                    self._use(part, f"{base}().{part.name}", override=signature(part, bound_outside(part)))
        if node.name in EXTENSIONS:
            given = [t for part in node.body if isinstance(part, ast.Assign) for t in part.targets]
            self.own |= {part.name for part in defined} | {ast.unparse(target) for target in given}
            self.own |= {ast.unparse(p.target) for p in node.body if isinstance(p, ast.AnnAssign) and p.value}
            typed = [part for part in node.body if isinstance(part, ast.AnnAssign) and not part.value]
            self._typed_ours |= {ast.unparse(p.target) for p in typed if ast.unparse(p.annotation) in self._classes}
        self._classes.add(node.name)
        outer, self._class = self._class, node.name
        self.generic_visit(node)
        self._class = outer

    # ---- uses -------------------------------------------------------------------------------------------------------

    def _use(self, node: ast.AST, symbol: str, **how: object) -> None:
        for worker in WORKERS if symbol.startswith(WORKER) else ("",):
            path = _with_types(worker + symbol.removeprefix(WORKER) if worker else symbol)
            self.uses.add(Use(self.file, node.lineno, path, **how))  # type: ignore[attr-defined, arg-type]

    def visit_Call(self, node: ast.Call) -> None:
        path = self._path(node.func)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        first = node.args[0] if node.args else None
        keywords, more = self._keywords(node)
        if _is_vendors(path):
            more = more or any(isinstance(a, ast.Starred) for a in node.args)
            count = sum(not isinstance(a, ast.Starred) for a in node.args)
            self._use(node, path, positional=count, keywords=keywords, more=more)
        elif name in FORWARDERS and (built := self._path(first)):
            self._use(node, built, positional=0, keywords=keywords, more=True)
        elif name == "getattr" and _is_vendors(got := self._result(node)) and len(node.args) == 2:
            self._use(node, got)
        if name in CALL_BY_NAME and isinstance(first, ast.Constant) and isinstance(first.value, str):
            passed = next((k.value for k in node.keywords if k.arg == "args"), None)
            shown = len(passed.elts) if isinstance(passed, ast.Tuple) else 0
            self._use(node, f"{WORKER}.{first.value}", positional=shown, more=passed is not None and not shown)
        if name == "import_module" and first is not None and (module := self._vendor(first)):
            self._use(node, module)
        if not path:
            self.visit(node.func)
        for part in [*node.args, *node.keywords]:
            self.visit(part)

    def _keywords(self, node: ast.Call) -> tuple[tuple[str, ...], bool]:
        """Names given by keyword, those in dictionaries of this function included; True where there may be more."""
        names, more = {k.arg for k in node.keywords if k.arg}, False
        for keyword in node.keywords:
            if keyword.arg is None:
                names |= self._keys(keyword.value)
                more = True
        return tuple(sorted(names)), more

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg and VARIABLE.fullmatch(node.arg):
            self._use(node.value, f"env:{node.arg}")
        self._settings(node.arg, node.value)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            self._settings(key.value if isinstance(key, ast.Constant) else None, value)
        names = tuple(sorted(self._keys(node)))
        for built in filter(None, (lookup(BUILDS, self.file, name) for name in names)):
            self._use(node, built, positional=0, keywords=names)
        self.generic_visit(node)

    def _settings(self, passed_as: object, value: ast.expr) -> None:
        for name in self._keys(value) if passed_as in SETTINGS else ():
            self._use(value, f"option:{SETTINGS[str(passed_as)]}:{name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._path(node)
        held = ast.unparse(node.value) == "self" and self._class not in EXTENSIONS  # was seen when it was put there
        if _is_vendors(path) and not held:
            self._use(node, path)
        else:
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and DOTTED.fullmatch(node.value.replace(":", ".")):
            self._use(node, node.value.replace(":", "."))
        elif isinstance(node.value, str) and VARIABLE.fullmatch(node.value):
            self._use(node, f"env:{node.value}")


def _canonical(path: str) -> str:
    for ours, theirs in (("torch.npu", "torch_npu.npu"), ("torch.ops.npu", "torch_npu")):
        if path == ours or path.startswith(f"{ours}."):
            return theirs + path[len(ours) :]
    return path


def _with_types(path: str) -> str:
    for member, type_ in MEMBERS.items():
        if path.startswith(f"{member}."):
            return type_ + path[len(member) :]
    return path


def _is_vendors(path: str) -> bool:
    return path.partition(".")[0] in (*VENDORS, WORKER)


def _is_class(path: str) -> bool:
    last = path.rpartition(".")[2]
    return bool(path) and path.partition(".")[0] in VENDORS and last.lstrip("_")[:1].isupper() and "(" not in last
