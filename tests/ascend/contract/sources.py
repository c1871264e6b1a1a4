"""Symbols of a library, looked up in its released source, which is parsed and never imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from tests.ascend.contract.calls import bound_outside, signature
from tests.ascend.contract.files import Files

# What a symbol is: signatures that it may be called with; or "module", "value"; "untyped" where the owner exists and
# the source does not tell the type; None where there is no such symbol.
Record = list[str] | str | None
Function = ast.FunctionDef | ast.AsyncFunctionDef
FIELD_BASES = ("Struct", "NamedTuple", "BaseModel")
FIELD_DECORATORS = ("dataclass", "config", "define")
SCHEMA = re.compile(r"^[ -]+func: (\w+)(?:\.\w+)?\((.*)\) *->", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Class:
    module: str
    node: ast.ClassDef


@dataclass(frozen=True, slots=True)
class _Def:
    node: Function


@dataclass(frozen=True, slots=True)
class _Value:
    module: str
    type: ast.expr | None  # an annotation, or what was assigned


@dataclass(frozen=True, slots=True)
class _Mod:
    name: str


@dataclass(frozen=True, slots=True)
class _Binding:
    """A class that is written in C++; `uses` are the attributes that the library's own Python takes from it."""

    path: str


Found = _Class | _Def | _Value | _Mod | _Binding | None


@dataclass
class Library:
    """Released sources by top package; more than one where classes of one derive from those of another."""

    files: Mapping[str, Files]
    _trees: dict[str, ast.Module | None] = field(default_factory=dict)

    def record(self, symbol: str) -> Record:
        if symbol.startswith("env:"):
            name = symbol.removeprefix("env:")
            return "value" if any(files.search(name, top) for top, files in self.files.items()) else None
        if symbol.startswith("option:"):
            _, top, name = symbol.split(":")
            written = (f'"{name}"', f"'{name}'", f'"--{name.replace("_", "-")}"', f"'--{name.replace('_', '-')}'")
            return "value" if any(self.files[top].contains(text, top) for text in written) else None
        found, instance = self._walk(symbol)
        if found is None and (schemas := self.operators.get(symbol)):
            return schemas
        if isinstance(found, _Class):
            return self._construction(found)
        if isinstance(found, _Def):
            return [signature(found.node, drop_first=instance)]
        if isinstance(found, _Mod):
            return "module"
        if isinstance(found, _Binding):
            return "untyped"
        return "value" if found is not None else ("untyped" if instance is None else None)

    def abstract(self, symbol: str) -> list[str]:
        """Methods that a subclass of `symbol` must define."""
        found, _ = self._walk(symbol)
        wanted: dict[str, bool] = {}
        for owner in reversed(list(self._ancestry(found)) if isinstance(found, _Class) else []):
            for part in owner.node.body:
                if isinstance(part, Function):
                    wanted[part.name] = any("abstractmethod" in ast.unparse(d) for d in part.decorator_list)
        return sorted(name for name, missing in wanted.items() if missing)

    @cached_property
    def operators(self) -> dict[str, list[str]]:
        """Operators that torch_npu registers from C++: their schemas stand in YAML inside the wheel."""
        found: dict[str, list[str]] = {}
        for name in ("npu_native_functions.yaml", "npu_native_functions_by_codegen.yaml"):
            text = self.files["torch_npu"].read(f"torch_npu/csrc/aten/{name}") if "torch_npu" in self.files else None
            for operator, parameters in SCHEMA.findall(text or ""):
                found.setdefault(f"torch_npu.{operator}", []).append(_from_schema(parameters))
        return {symbol: sorted(set(schemas)) for symbol, schemas in found.items()}

    # ---- walking along a path ---------------------------------------------------------------------------------------

    def _walk(self, symbol: str) -> tuple[Found, bool | None]:
        """What the path leads to, and whether it was reached through an instance; None for that where a type on the
        way is not told."""
        parts = symbol.split(".")
        found: Found = None
        for count in range(len(parts), 0, -1):
            module = ".".join(parts[:count])
            if "(" not in module and self._tree(module) is not None:
                found, parts = _Mod(module), parts[count:]
                break
        instance = False
        for part in parts:
            name, called, _ = part.partition("(")
            found, drop = self._step(found, name, instance)
            if found is None and self._is_binding(symbol):
                return _Binding(symbol), False
            if found is None:
                return None, None if drop is None else False
            instance = bool(called)
            if isinstance(found, _Value) and part is not parts[-1]:
                found, instance = self._type(found.module, found.type), True
                if found is None:
                    return None, None
            if isinstance(found, _Def) and part is parts[-1]:
                return found, drop
        return found, instance

    def _step(self, found: Found, name: str, instance: bool) -> tuple[Found, bool | None]:
        """One name further, and whether the first parameter of a function is filled there."""
        if isinstance(found, _Mod):
            return self._in_module(found.name, name), False
        if isinstance(found, _Class):
            return self._in_class(found, name, instance)
        return None, False

    def _in_class(self, cls: _Class, name: str, instance: bool) -> tuple[Found, bool | None]:
        external = False
        for owner in self._ancestry(cls):
            external = external or self._has_external_base(owner)
            for part in _flat(owner.node.body):
                if isinstance(part, Function) and part.name == name:
                    if any("property" in ast.unparse(d) for d in part.decorator_list):
                        return _Value(owner.module, part.returns), False
                    decorators = {getattr(d, "id", "") for d in part.decorator_list}
                    return _Def(part), "classmethod" in decorators or (instance and bound_outside(part))
                if (value := _assigned(part, name)) is not None:
                    return _Value(owner.module, value), False
            for part in ast.walk(owner.node):
                if (value := _assigned(part, f"self.{name}")) is not None:
                    return _Value(owner.module, value), False
                by_name = isinstance(part, Function) and part.name in ("__getattr__", "__setattr__")
                if by_name and any(isinstance(n, ast.Constant) and n.value == name for n in ast.walk(part)):
                    return _Value(owner.module, None), False
        return None, None if external else False

    def _has_external_base(self, cls: _Class) -> bool:
        known = ("object", "ABC", "Generic", "Protocol", "Enum", "Exception", "ValueError", "RuntimeError")
        names = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in cls.node.bases]
        return any(
            self._type(cls.module, base) is None and name not in known
            for base, name in zip(cls.node.bases, names, strict=True)
        )

    def _ancestry(self, cls: _Class) -> Iterator[_Class]:
        """The class and its bases as far as their source is here, nearest first."""
        yield cls
        for base in cls.node.bases:
            found = self._type(cls.module, base)
            if isinstance(found, _Class) and found != cls:
                yield from self._ancestry(found)

    def _type(self, module: str, node: ast.expr | None) -> Found:
        """The class that an annotation names, or an assigned call makes."""
        match node:
            case ast.BinOp(left=left, right=right):
                return self._type(module, left) or self._type(module, right)
            case ast.Call(func=func):
                found = self._type(module, func)
                return found if isinstance(found, _Class) else None
            case ast.Subscript(value=value, slice=inner):
                wrapped = ast.unparse(value).rpartition(".")[2] in ("Optional", "Union", "Annotated")
                return self._type(module, inner if wrapped else value)
            case ast.Tuple(elts=elements):
                return next(filter(None, (self._type(module, e) for e in elements)), None)
            case ast.Constant(value=str(text)):
                return self._type(module, ast.parse(text, mode="eval").body)
            case ast.Name() | ast.Attribute():
                first, *rest = ast.unparse(node).split(".")
                found = self._in_module(module, first)
                for name in rest:
                    found = self._step(found, name, False)[0]
                return found if isinstance(found, _Class) else None
        return None

    def _in_module(self, module: str, name: str, seen: frozenset[str] = frozenset()) -> Found:
        tree = self._tree(module)
        if tree is None or module in seen:
            return None
        seen |= {module}
        stars: list[str] = []
        for part in _flat(tree.body):
            if isinstance(part, Function) and part.name == name:
                if not any("overload" in ast.unparse(d) for d in part.decorator_list):
                    return _Def(part)
            elif isinstance(part, ast.ClassDef) and part.name == name:
                return _Class(module, part)
            elif isinstance(part, ast.ImportFrom):
                origin = self._absolute(module, part)
                for alias in part.names:
                    if (alias.asname or alias.name) == name:
                        return self._in_module(origin, alias.name, seen) or self._module(f"{origin}.{alias.name}")
                    stars += [origin] if alias.name == "*" else []
            elif isinstance(part, ast.Import):
                for alias in part.names:
                    if (alias.asname or alias.name.partition(".")[0]) == name and self._module(alias.name):
                        return self._module(alias.name if alias.asname else name)
            elif (value := _assigned(part, name)) is not None:
                other = value.id if isinstance(value, ast.Name) and value.id != name else ""
                return (self._in_module(module, other) if other else None) or _Value(module, value)
        for origin in stars:
            if found := self._in_module(origin, name, seen):
                return found
        return self._lazy(module, tree, name) or self._module(f"{module}.{name}")

    def _lazy(self, module: str, tree: ast.Module, name: str) -> Found:
        """A name that the module's `__getattr__` loads, out of a table of `name: "module:attribute"`."""
        for part in tree.body:
            table = part.value if isinstance(part, ast.Assign | ast.AnnAssign) else None
            for key, value in zip(table.keys, table.values, strict=True) if isinstance(table, ast.Dict) else ():
                if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Constant):
                    origin, colon, attribute = str(value.value).partition(":")
                    if colon:
                        return self._in_module(f"{module}{origin}" if origin.startswith(".") else origin, attribute)
        return None

    def _module(self, name: str) -> Found:
        return _Mod(name) if self._tree(name) is not None else None

    def _path(self, module: str) -> str | None:
        files = self.files.get(module.partition(".")[0])
        base = module.replace(".", "/")
        paths = [f"{base}/__init__.py", f"{base}.py"] if files else []
        return next((path for path in paths if files is not None and files.read(path) is not None), None)

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            path = self._path(module)
            text = self.files[module.partition(".")[0]].read(path) if path else None
            self._trees[module] = None if text is None else ast.parse(text)
        return self._trees[module]

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module.split(".")
        inside = len(package) if (self._path(module) or "").endswith("__init__.py") else len(package) - 1
        return ".".join([*package[: inside - node.level + 1], *filter(None, [node.module])])

    def _is_binding(self, symbol: str) -> bool:
        """A path into compiled code counts where the library's own Python goes the same way."""
        top, _, rest = symbol.partition(".")
        return rest.startswith("_C.") and top in self.files and self.files[top].search(rest.partition("(")[0], top)

    # ---- making an object -------------------------------------------------------------------------------------------

    def _construction(self, cls: _Class) -> Record:
        for owner in self._ancestry(cls):
            for name in ("__init__", "__new__"):
                for part in owner.node.body:
                    if isinstance(part, Function) and part.name == name:
                        return [signature(part, drop_first=True)]
            if self._has_fields(owner):
                return [self._fields(owner)]
        return ["(*args, **kwargs)"] if any(map(self._has_external_base, self._ancestry(cls))) else ["()"]

    def _has_fields(self, cls: _Class) -> bool:
        decorated = [ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in cls.node.decorator_list]
        bases = [ast.unparse(base) for owner in self._ancestry(cls) for base in owner.node.bases]
        return any(d in FIELD_DECORATORS for d in decorated) or any(b.endswith(FIELD_BASES) for b in bases)

    def _fields(self, cls: _Class) -> str:
        fields: dict[str, bool] = {}
        for owner in reversed(list(self._ancestry(cls))):
            for part in owner.node.body:
                declared = ast.unparse(part.annotation) if isinstance(part, ast.AnnAssign) else "ClassVar"
                if isinstance(part, ast.AnnAssign) and "ClassVar" not in declared and not declared.endswith("KW_ONLY"):
                    fields[ast.unparse(part.target)] = _has_default(part.value)
        given = [*cls.node.decorator_list, *(k for k in cls.node.keywords if k.arg == "kw_only")]
        by_name = any("kw_only=True" in ast.unparse(part) for part in given)
        names = [name if not default else f"{name}=..." for name, default in fields.items()]
        ordered = names if by_name else sorted(names, key=lambda n: n.endswith("=..."))
        return f"({', '.join(['*'] * (by_name and bool(names)) + ordered)})"


def _has_default(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in ("field", "Field"):
        return bool(value.args) or any(k.arg in ("default", "default_factory") for k in value.keywords)
    return value is not None


def _assigned(part: ast.AST, name: str) -> ast.expr | None:
    """What a statement assigns to `name`: its annotation, else the value."""
    if isinstance(part, ast.AnnAssign) and ast.unparse(part.target) == name:
        return part.annotation
    if isinstance(part, ast.Assign):
        targets = [e for t in part.targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
        if name in map(ast.unparse, targets):
            return part.value
    return None


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, those under if, try and with included."""
    for part in body:
        yield part
        if isinstance(part, ast.If | ast.Try | ast.With):
            yield from _flat(part.body)
            for handler in getattr(part, "handlers", []):
                yield from _flat(handler.body)
            yield from _flat(getattr(part, "orelse", []))


def _from_schema(parameters: str) -> str:
    """`Tensor x, float eps=1e-06, *, int[2] y` -> `(x, eps=..., *, y)`."""
    depth, parts = 0, [""]
    for character in parameters:
        depth += (character in "[(") - (character in ")]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    names = [part.strip() for part in parts if part.strip()]
    return f"({', '.join(n if n == '*' else _schema_name(n) for n in names)})"


def _schema_name(parameter: str) -> str:
    declared, default, _ = parameter.partition("=")
    return declared.split()[-1] + ("=..." if default else "")
