"""The static way of one parameter through the code: which files it enters, and to which it returns.

    python -m benchmarks.walk worker/task/runner.py:TaskRunner.run:task
    python -m benchmarks.walk --parts worker/task/runner.py:TaskRunner.run:task

What is followed is the parameter and every record that carries it: an object that is made with it, as a dataclass or
by an `__init__` that keeps it, and an object that carries such a one. A field of a record is followed only if the
parameter lies there. What a function returns is followed if it is one of these. With `--parts` the parameter's own
records are followed too (`task.plan`, where the field names a class of ours), and what carries them. A plain value
that is read from it (`task.round`) is another value, and so is what a call computes from it.

A file is entered by each call of one of its functions that hands on what is followed or is made on it, by a property
that is read of it, and by handing a function on before its arguments (`thread.run(function, task)`). A stay is as
many of these in a row as are in one file; a return is a stay in a file that the way had left. They count in the order
in which they are written. A function that is called again counts, and is not followed again.

Nothing is run: a callee is found by imports, by annotations of parameters, fields and results, and by constructors.
What none of these tell (a callee that is chosen as the program runs) is not followed.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path

SIDES = ("shared", "coordinator", "worker")
TOP = "tessera."

Function = ast.FunctionDef | ast.AsyncFunctionDef
Kind = tuple["Module", str]
"""A class, by its module and name; for a module, the name is empty."""
Paths = frozenset[tuple[str, ...]]
"""Where in a value that which is followed lies, by names of fields: of itself the path is empty."""

NOWHERE: Paths = frozenset()
ITSELF: Paths = frozenset({()})
_LOOPS = ast.For | ast.AsyncFor | ast.comprehension


@dataclass
class Module:
    """A file, its definitions by name, and what its imported names stand for."""

    name: str
    file: str
    functions: dict[str, Function] = field(default_factory=dict)
    """By qualified name."""
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    imported: dict[str, str] = field(default_factory=dict)
    """By local name, the dotted name."""


@dataclass(frozen=True)
class Place:
    """A function of a module."""

    module: Module = field(hash=False, compare=False)
    name: str
    file: str

    @property
    def node(self) -> Function:
        return self.module.functions[self.name]

    @property
    def owner(self) -> str | None:
        """The class that the function is a method of."""
        return self.name.rpartition(".")[0] or None


class Code:
    """All modules below a folder."""

    def __init__(self, root: Path) -> None:
        self.modules: dict[str, Module] = {}
        for side in SIDES:
            for path in sorted((root / side).rglob("*.py")):
                module = _module(path.relative_to(root), ast.parse(path.read_text()))
                self.modules[module.name] = module

    def by_file(self, file: str) -> Module:
        return next(module for module in self.modules.values() if module.file == file)

    def lookup(self, module: Module, name: str) -> Kind | None:
        """Return where a name that a module uses is defined; for a module, the name is empty."""
        if name in module.functions or name in module.classes:
            return module, name
        dotted = module.imported.get(name)
        if dotted is None:
            return None
        if found := self.modules.get(dotted):
            return found, ""
        where, _, last = dotted.rpartition(".")
        return self.lookup(found, last) if (found := self.modules.get(where)) else None

    def method(self, module: Module, owner: str, name: str) -> Place | None:
        """Return a method of a class or, if the class has none of that name, of one that it extends."""
        if f"{owner}.{name}" in module.functions:
            return Place(module, f"{owner}.{name}", module.file)
        found = (self.method(*base, name) for base in self.bases(module, owner))
        return next((place for place in found if place), None)

    def bases(self, module: Module, owner: str) -> Iterator[Kind]:
        """Yield the classes of ours that a class extends."""
        for base in module.classes[owner].bases:
            found = self.lookup(module, _outermost(base))
            if found and found[1] in found[0].classes:
                yield found

    def fields(self, module: Module, owner: str) -> list[str]:
        """Return the fields that a class declares, its bases' first: what a dataclass is made with."""
        own = [ast.unparse(node.target) for node in module.classes[owner].body if isinstance(node, ast.AnnAssign)]
        return [*(name for base in self.bases(module, owner) for name in self.fields(*base)), *own]

    def attribute(self, module: Module, owner: str, name: str) -> Kind | None:
        """Return the class of a field; of a container, that of what is in it."""
        for node in module.classes[owner].body:
            known = self.parameters(module, node) if isinstance(node, Function) else {}
            for inner in ast.walk(node):
                if isinstance(inner, ast.AnnAssign) and ast.unparse(inner.target) in (name, f"self.{name}"):
                    return self.named(module, inner.annotation)
                if isinstance(inner, ast.Assign) and any(ast.unparse(it) == f"self.{name}" for it in inner.targets):
                    return self.of_value(module, inner.value, known, owner)
        if f"{owner}.{name}" in module.functions:
            return self.named(module, module.functions[f"{owner}.{name}"].returns)
        found = (self.attribute(*base, name) for base in self.bases(module, owner))
        return next((kind for kind in found if kind), None)

    def parameters(self, module: Module, node: Function) -> dict[str, Kind]:
        """Return the classes of a function's parameters, of those that name one."""
        kinds = {it.arg: self.named(module, it.annotation) for it in _parameters(node)}
        return {name: kind for name, kind in kinds.items() if kind}

    def named(self, module: Module, annotation: ast.expr | None) -> Kind | None:
        """Return the class that an annotation names; of several, the first that is ours."""
        for node in ast.walk(annotation) if annotation else ():
            name = node.id if isinstance(node, ast.Name) else None
            found = self.lookup(module, name) if name else None
            if found and found[1] in found[0].classes:
                return found
        return None

    def of_value(self, module: Module, value: ast.expr, known: Mapping[str, Kind], owner: str | None) -> Kind | None:
        """Return the class of an expression's value."""
        if isinstance(value, ast.Name):
            return (module, owner) if value.id == "self" and owner else known.get(value.id)
        if isinstance(value, ast.Attribute):
            holder = self.of_value(module, value.value, known, owner)
            return self.attribute(*holder, value.attr) if holder and holder[1] else None
        if isinstance(value, ast.Call):
            if name := _imported_module(value):
                return (self.modules[name], "") if name in self.modules else None
            found = self.callee(module, value, known, owner)
            if isinstance(found, Place):
                if found.name.endswith(".__init__") and found.owner:
                    return found.module, found.owner
                return self.named(found.module, found.node.returns)
            if found is None and isinstance(value.func, ast.Attribute) and value.func.attr in ("get", "pop"):
                return self.of_value(module, value.func.value, known, owner)
            return found
        if isinstance(value, ast.Await | ast.NamedExpr | ast.Subscript):
            return self.of_value(module, value.value, known, owner)
        if isinstance(value, ast.IfExp | ast.BoolOp):
            sides = [value.body, value.orelse] if isinstance(value, ast.IfExp) else value.values
            return next((kind for it in sides if (kind := self.of_value(module, it, known, owner))), None)
        return None

    def callee(
        self, module: Module, call: ast.Call, known: Mapping[str, Kind], owner: str | None
    ) -> Place | Kind | None:
        """Return the function that a call enters, or the class that it makes one of without entering any."""
        if isinstance(call.func, ast.Name):
            found = self.lookup(module, call.func.id)
        elif isinstance(call.func, ast.Attribute):
            holder = call.func.value
            kind = self.of_value(module, holder, known, owner)
            if kind is None and isinstance(holder, ast.Name):
                kind = self.lookup(module, holder.id)
            if kind is None:
                return None
            if kind[1]:
                return self.method(*kind, call.func.attr) if kind[1] in kind[0].classes else None
            found = self.lookup(kind[0], call.func.attr)
        else:
            return None
        if found is None or found[1] == "":
            return None
        if found[1] in found[0].classes:
            return self.method(*found, "__init__") or found
        return Place(found[0], found[1], found[0].file)


@dataclass
class Frame:
    """A function as it is entered: what its names hold of what is followed, and of which classes they are."""

    place: Place
    held: dict[str, Paths]
    known: dict[str, Kind]
    results: dict[ast.expr, Paths] = field(default_factory=dict)
    returned: Paths = NOWHERE


@dataclass
class Walk:
    """The files that one parameter enters, in order."""

    code: Code
    parts: bool = False
    calls: list[Place] = field(default_factory=list)
    entered: dict[tuple[str, str, frozenset[tuple[str, Paths]]], Frame] = field(default_factory=dict)

    def enter(self, place: Place, mine: Mapping[str, Paths]) -> Frame:
        """Follow the calls of a function; `mine` are its parameters that hold what is followed."""
        self.calls.append(place)
        key = (place.file, place.name, frozenset(mine.items()))
        if key not in self.entered:
            frame = Frame(place, dict(mine), self.code.parameters(place.module, place.node))
            self.entered[key] = frame
            for node in _in_order(place.node):
                if isinstance(node, ast.Call):
                    frame.results[node] = self._call(frame, node)
                elif isinstance(node, ast.Attribute):
                    self._read(frame, node)
                elif isinstance(node, ast.Return):
                    frame.returned |= self._paths(frame, node.value) if node.value else NOWHERE
                else:
                    self._bind(frame, node)
        return self.entered[key]

    def _call(self, frame: Frame, call: ast.Call) -> Paths:
        """Enter what a call hands something to that is followed. Return where in the result it lies."""
        found = self.code.callee(frame.place.module, call, frame.known, frame.place.owner)
        for place, argument in enumerate(call.args):
            if isinstance(argument, ast.Name | ast.Attribute):
                handed = ast.Call(argument, call.args[place + 1 :], call.keywords)
                if isinstance(self.code.callee(frame.place.module, handed, frame.known, frame.place.owner), Place):
                    self._call(frame, handed)
        if found is None:
            return NOWHERE
        if not isinstance(found, Place):
            return _within(self._arguments(frame, call, self.code.fields(*found)))
        parameters = [argument.arg for argument in _parameters(found.node)]
        receives: dict[str, Paths] = {}
        if found.owner is not None and "staticmethod" not in map(ast.unparse, found.node.decorator_list):
            if isinstance(call.func, ast.Attribute):
                receives[parameters[0]] = self._paths(frame, call.func.value)
            parameters = parameters[1:]
        receives |= self._arguments(frame, call, parameters)
        receives = {name: paths for name, paths in receives.items() if paths}
        if not receives:
            return NOWHERE
        made = self.enter(found, receives)
        return made.held.get("self", NOWHERE) if found.name.endswith(".__init__") else made.returned

    def _read(self, frame: Frame, node: ast.Attribute) -> None:
        """Enter the property that is read of a record that is followed, if it is one."""
        held = self._paths(frame, node.value)
        kind = self.code.of_value(frame.place.module, node.value, frame.known, frame.place.owner) if held else None
        found = self.code.method(*kind, node.attr) if kind and kind[1] else None
        if found and {"property", "cached_property"} & set(map(ast.unparse, found.node.decorator_list)):
            frame.results[node] = self.enter(found, {"self": held}).returned

    def _arguments(self, frame: Frame, call: ast.Call, names: Sequence[str]) -> dict[str, Paths]:
        given = [*zip(names, call.args, strict=False), *((it.arg, it.value) for it in call.keywords if it.arg)]
        return {name: paths for name, value in given if (paths := self._paths(frame, value))}

    def _paths(self, frame: Frame, value: ast.expr) -> Paths:
        """Return where in an expression's value that which is followed lies."""
        if isinstance(value, ast.Name):
            return frame.held.get(value.id, NOWHERE)
        if isinstance(value, ast.Call) or value in frame.results:
            return frame.results.get(value, NOWHERE)
        if isinstance(value, ast.Attribute):
            of = self._paths(frame, value.value)
            found = frozenset(path[1:] for path in of if path[:1] == (value.attr,))
            kind = self.code.of_value(frame.place.module, value, frame.known, frame.place.owner)
            return found | ITSELF if self.parts and () in of and kind else found
        if isinstance(value, ast.Tuple):
            return _within({str(place): self._paths(frame, it) for place, it in enumerate(value.elts)})
        if isinstance(value, ast.IfExp):
            return self._paths(frame, value.body) | self._paths(frame, value.orelse)
        inner = {ast.List: "elts", ast.Set: "elts", ast.Dict: "values", ast.BoolOp: "values"}.get(type(value))
        if inner:
            return NOWHERE.union(*(self._paths(frame, it) for it in getattr(value, inner)))
        if isinstance(value, ast.Await | ast.NamedExpr | ast.Starred | ast.Subscript):
            return self._paths(frame, value.value)
        return NOWHERE

    def _bind(self, frame: Frame, node: ast.AST) -> None:
        for target, value in _bindings(node):
            kind = self.code.of_value(frame.place.module, value, frame.known, frame.place.owner)
            if isinstance(node, ast.AnnAssign):
                kind = self.code.named(frame.place.module, node.annotation) or kind
            if isinstance(target, ast.Tuple):
                kinds = self._kinds(frame, value)
                for place, inner in enumerate(target.elts):
                    paths = frozenset(path[1:] for path in self._paths(frame, value) if path[:1] == (str(place),))
                    self._name(frame, inner, paths, kinds[place] if place < len(kinds) else None)
            else:
                self._name(frame, target, self._paths(frame, value), kind)

    def _kinds(self, frame: Frame, value: ast.expr) -> list[Kind | None]:
        """Return the classes of the values that a call returns together."""
        if not isinstance(value, ast.Call):
            return []
        found = self.code.callee(frame.place.module, value, frame.known, frame.place.owner)
        returns = found.node.returns if isinstance(found, Place) else None
        if isinstance(found, Place) and isinstance(returns, ast.Subscript) and isinstance(returns.slice, ast.Tuple):
            return [self.code.named(found.module, it) for it in returns.slice.elts]
        return []

    def _name(self, frame: Frame, target: ast.expr, paths: Paths, kind: Kind | None) -> None:
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            kept = frame.held.get(target.value.id, NOWHERE) | _within({target.attr: paths})
            frame.held[target.value.id] = kept
        elif isinstance(target, ast.Name):
            frame.held[target.id] = frame.held.get(target.id, NOWHERE) | paths
            if kind:
                frame.known[target.id] = kind

    @cached_property
    def visits(self) -> list[tuple[str, list[str]]]:
        """The files, each once for as long as the walk stays in it, with the functions that it enters there."""
        runs = groupby(self.calls, key=lambda place: place.file)
        return [(file, [place.name for place in places]) for file, places in runs]

    @property
    def stays(self) -> list[str]:
        return [file for file, _ in self.visits]

    @property
    def returns(self) -> int:
        """How often the walk comes back to a file that it had left."""
        return len(self.stays) - len(set(self.stays))


def _module(path: Path, tree: ast.Module) -> Module:
    module = Module(".".join(path.with_suffix("").parts).removesuffix(".__init__"), str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            where = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            module.imported |= {it.asname or it.name: f"{where}{it.name}".removeprefix(TOP) for it in node.names}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            module.classes[node.name] = node
        module.functions |= dict(_functions(node))
    return module


def _functions(node: ast.AST) -> Iterator[tuple[str, Function]]:
    """Yield a function, or the methods of a class, by qualified name."""
    if isinstance(node, Function):
        yield node.name, node
    elif isinstance(node, ast.ClassDef):
        yield from ((f"{node.name}.{inner.name}", inner) for inner in node.body if isinstance(inner, Function))


def _parameters(node: Function) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def _within(held: Mapping[str, Paths]) -> Paths:
    """Return where that which is followed lies in a record whose fields hold it so."""
    return frozenset((name, *path) for name, paths in held.items() for path in paths)


def _imported_module(call: ast.Call) -> str | None:
    """Return the module that a call of `import_module` imports."""
    if ast.unparse(call.func) == "importlib.import_module" and isinstance(call.args[0], ast.Constant):
        return str(call.args[0].value).removeprefix(TOP)
    return None


def _outermost(base: ast.expr) -> str:
    return _outermost(base.value) if isinstance(base, ast.Subscript) else ast.unparse(base)


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Yield calls, reads and bindings in the order in which they happen: what is inside a call comes before it, and
    what a loop goes through before its body."""
    first = [node.iter] if isinstance(node, _LOOPS) else getattr(node, "generators", [])
    for child in first:
        yield from _in_order(child)
    if isinstance(node, _LOOPS):
        yield node
    for child in ast.iter_child_nodes(node):
        if child not in first:
            yield from _in_order(child)
    if isinstance(node, ast.Call | ast.Attribute | ast.Return) or (
        not isinstance(node, _LOOPS) and any(True for _ in _bindings(node))
    ):
        yield node


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets that a statement binds, each with the value."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            else:
                yield target, node.value
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value:
        yield node.target, node.value
    elif isinstance(node, _LOOPS):
        yield node.target, node.iter
    elif isinstance(node, ast.withitem) and node.optional_vars:
        yield node.optional_vars, node.context_expr


def walk(root: Path, start: str, *, parts: bool = False) -> Walk:
    """Follow a parameter, given as FILE:FUNCTION:PARAMETER. Raises KeyError for what is not there."""
    file, name, parameter = start.split(":")
    code = Code(root)
    module = code.by_file(file)
    made = Walk(code, parts)
    made.enter(Place(module, name, file), {parameter: ITSELF})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", help="FILE:FUNCTION:PARAMETER")
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout")
    parser.add_argument("--parts", action="store_true", help="follow the records of the parameter too")
    given = parser.parse_args()
    made = walk(given.root, given.start, parts=given.parts)
    for number, (file, names) in enumerate(made.visits, 1):
        again = made.stays[: number - 1].count(file)
        print(f"{number:4} {file}{f' (visit {again + 1})' if again else ''}: {', '.join(names)}")
    print(f"{len(made.stays)} stays in {len(set(made.stays))} files, {made.returns} returns to a file that was left")


if __name__ == "__main__":
    main()
