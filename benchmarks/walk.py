"""The static way of one parameter through the code: which files it enters, and to which it returns.

    python -m benchmarks.walk worker/task/runner.py:TaskRunner.run:task

Follow calls in the order in which they are written, through every function that takes the parameter or a part of
it; the result of a call is another value. Nothing is run: a callee is found by imports, by annotations of parameters,
fields and results, and by constructors. What none of these tell (a callee that is chosen as the program runs) is not
followed. A function that is called again counts, and is not followed again.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

SIDES = ("shared", "coordinator", "worker")
TOP = "tessera."

Function = ast.FunctionDef | ast.AsyncFunctionDef
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

    def lookup(self, module: Module, name: str) -> tuple[Module, str] | None:
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
        for base in module.classes[owner].bases:
            found = self.lookup(module, _outermost(base))
            if found and found[1] in found[0].classes and (place := self.method(*found, name)):
                return place
        return None

    def attribute(self, module: Module, owner: str, name: str) -> tuple[Module, str] | None:
        """Return the class of a field."""
        for node in ast.walk(module.classes[owner]):
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in (name, f"self.{name}"):
                return self.named(module, node.annotation)
            if isinstance(node, ast.Assign) and any(ast.unparse(target) == f"self.{name}" for target in node.targets):
                return self.of_value(module, node.value, {}, owner)
        if place := self.method(module, owner, name):
            return self.named(place.module, place.node.returns)
        return None

    def named(self, module: Module, annotation: ast.expr | None) -> tuple[Module, str] | None:
        """Return the class that an annotation names; of several, the first that is ours."""
        for node in ast.walk(annotation) if annotation else ():
            name = node.id if isinstance(node, ast.Name) else None
            found = self.lookup(module, name) if name else None
            if found and found[1] in found[0].classes:
                return found
        return None

    def of_value(
        self, module: Module, value: ast.expr, known: Mapping[str, tuple[Module, str]], owner: str | None
    ) -> tuple[Module, str] | None:
        """Return the class of an expression's value."""
        if isinstance(value, ast.Name):
            return (module, owner) if value.id == "self" and owner else known.get(value.id)
        if isinstance(value, ast.Attribute):
            holder = self.of_value(module, value.value, known, owner)
            return self.attribute(*holder, value.attr) if holder else None
        if isinstance(value, ast.Call):
            found = self.callee(module, value, known, owner)
            if isinstance(found, Place):
                if found.name.endswith(".__init__") and found.owner:
                    return found.module, found.owner
                return self.named(found.module, found.node.returns)
            return found
        if isinstance(value, ast.Await | ast.NamedExpr):
            return self.of_value(module, value.value, known, owner)
        return None

    def callee(
        self, module: Module, call: ast.Call, known: Mapping[str, tuple[Module, str]], owner: str | None
    ) -> Place | tuple[Module, str] | None:
        """Return the function that a call enters, or the class that it makes one of without entering any."""
        if isinstance(call.func, ast.Name):
            found = self.lookup(module, call.func.id)
        elif isinstance(call.func, ast.Attribute):
            holder = call.func.value
            if isinstance(holder, ast.Name) and (named := self.lookup(module, holder.id)):
                if named[1] == "":
                    found = self.lookup(named[0], call.func.attr)
                else:
                    return self.method(*named, call.func.attr) if named[1] in named[0].classes else None
            else:
                kind = self.of_value(module, holder, known, owner)
                return self.method(*kind, call.func.attr) if kind else None
        else:
            return None
        if found is None or found[1] == "":
            return None
        if found[1] in found[0].classes:
            return self.method(*found, "__init__") or found
        return Place(found[0], found[1], found[0].file)


@dataclass
class Walk:
    """The files that one parameter enters, in order."""

    code: Code
    files: list[str] = field(default_factory=list)
    entered: set[tuple[str, str, frozenset[str]]] = field(default_factory=set)

    def enter(self, place: Place, mine: frozenset[str]) -> None:
        """Follow the calls of a function; `mine` are its parameters that hold what is followed."""
        self.files.append(place.file)
        key = (place.file, place.name, mine)
        if key in self.entered:
            return
        self.entered.add(key)
        known = {
            argument.arg: found
            for argument in _parameters(place.node)
            if (found := self.code.named(place.module, argument.annotation))
        }
        held = set(mine)
        for node in _in_order(place.node):
            if isinstance(node, ast.Call):
                self._call(place, node, held, known)
            else:
                self._bind(place, node, held, known)

    def _call(self, place: Place, call: ast.Call, held: set[str], known: dict[str, tuple[Module, str]]) -> None:
        found = self.code.callee(place.module, call, known, place.owner)
        if not isinstance(found, Place):
            return
        parameters = [argument.arg for argument in _parameters(found.node)]
        bound = found.owner is not None and "staticmethod" not in map(ast.unparse, found.node.decorator_list)
        receives = set()
        if bound and parameters:
            receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
            if receiver is not None and _names(receiver) & held - {"self"}:
                receives.add(parameters[0])
            parameters = parameters[1:]
        receives |= {name for name, value in zip(parameters, call.args, strict=False) if _names(value) & held}
        receives |= {item.arg for item in call.keywords if item.arg and _names(item.value) & held}
        if receives:
            self.enter(found, frozenset(receives))

    def _bind(self, place: Place, node: ast.AST, held: set[str], known: dict[str, tuple[Module, str]]) -> None:
        for target, value in _bindings(node):
            names = {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
            if _names(value) & held:
                held |= names
            if isinstance(target, ast.Name):
                kind = self.code.of_value(place.module, value, known, place.owner)
                if isinstance(node, ast.AnnAssign):
                    kind = self.code.named(place.module, node.annotation) or kind
                if kind:
                    known[target.id] = kind

    @cached_property
    def stays(self) -> list[str]:
        """The files, each once for as long as the walk stays in it."""
        return [file for file, before in zip(self.files, [None, *self.files], strict=False) if file != before]

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


def _names(node: ast.AST) -> set[str]:
    """Return the names whose values an expression hands on; the result of a call is another value."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Call):
        return set()
    return set().union(*map(_names, ast.iter_child_nodes(node)))


def _outermost(base: ast.expr) -> str:
    return _outermost(base.value) if isinstance(base, ast.Subscript) else ast.unparse(base)


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Yield calls and bindings in the order in which they happen: what is inside a call comes before it, and what a
    loop goes through before its body."""
    first = [node.iter] if isinstance(node, _LOOPS) else getattr(node, "generators", [])
    for child in first:
        yield from _in_order(child)
    if isinstance(node, _LOOPS):
        yield node
    for child in ast.iter_child_nodes(node):
        if child not in first:
            yield from _in_order(child)
    if isinstance(node, ast.Call) or (not isinstance(node, _LOOPS) and any(True for _ in _bindings(node))):
        yield node


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets that a statement binds, each with the value."""
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value:
        yield node.target, node.value
    elif isinstance(node, _LOOPS):
        yield node.target, node.iter
    elif isinstance(node, ast.withitem) and node.optional_vars:
        yield node.optional_vars, node.context_expr


def walk(root: Path, start: str) -> Walk:
    """Follow a parameter, given as FILE:FUNCTION:PARAMETER. Raises KeyError for what is not there."""
    file, name, parameter = start.split(":")
    code = Code(root)
    module = code.by_file(file)
    made = Walk(code)
    made.enter(Place(module, name, file), frozenset({parameter}))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", help="FILE:FUNCTION:PARAMETER")
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout")
    given = parser.parse_args()
    made = walk(given.root, given.start)
    for number, file in enumerate(made.stays, 1):
        again = made.stays[: number - 1].count(file)
        print(f"{number:4} {file}{f'  (visit {again + 1})' if again else ''}")
    print(f"{len(made.stays)} stays in {len(set(made.stays))} files, {made.returns} returns to a file that was left")


if __name__ == "__main__":
    main()
