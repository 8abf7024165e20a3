"""Write digests of the code that each stage reaches, which make it stale; comments and docstrings do not count.

    python -m pipelines.staleness

A stage of dvc.yaml depends on a list in build/sources/: a line for each definition that its notebook (or command)
reaches, with its module and a digest of its syntax tree. A list is made by following names: from the notebook's cells
to the definitions that they import, from these to what they name in turn, through `lowcomm` and `pipelines`; of a
class, the methods whose names something reached uses. So a change to a function touches the tables that use it, and no
others. Prose touches none, nor does a new name for a function: a digest knows functions by the order in which they are
met.

Training is followed module by module, as its choices find each other by name (`lowcomm.choices`); what it decides, the
probes tell (`pipelines.probes`).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import shutil
from pathlib import Path

import nbformat

from lowcomm.experiment.source import without_docstrings
from pipelines.project import BUILD, ROOT

PACKAGES = ("lowcomm", "pipelines")
#: The modules of stages that run a module and no notebook, by the names of their lists.
COMMANDS = {
    "index": "pipelines.index",
    "settings": "pipelines.settings",
    "data": "lowcomm.experiment.data",
    "ladder_rows": "pipelines.ladder.rows",
}
TRAINER = "lowcomm.experiment.train"
#: Packages whose modules find each other by name, so that what reaches a base class may reach all classes derived.
CHOICES = ("lowcomm.codecs", "lowcomm.methods")

#: A definition: its module, and the name at the top of that ("" for what runs on import), with ".method" if it is one.
Place = tuple[str, str]


@functools.cache
def path_of(module: str) -> Path | None:
    """Return the file of a module of this repository; None for other modules."""
    if module.split(".")[0] not in PACKAGES:
        return None
    path = ROOT.joinpath(*module.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists()), None)


def digest(text: str) -> str:
    """Return the SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def parsed(path: Path) -> ast.AST:
    """Return the syntax tree of a module, or of all code cells of a notebook, without docstrings."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = "\n".join(c.source for c in nbformat.reads(text, as_version=4).cells if c.cell_type == "code")
    return without_docstrings(ast.parse(text))


@functools.cache
def renamable() -> frozenset[str]:
    """Return the names of functions and methods that decide nothing: they are no string, keyword or field anywhere."""
    functions: set[str] = set()
    others: set[str] = set()
    paths = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    for node in (n for path in [*paths, *(ROOT / "notebooks").glob("*.ipynb")] for n in ast.walk(parsed(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            others.add(node.value)
        elif isinstance(node, ast.keyword):
            others.add(node.arg or "")
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            others.add(node.target.id)
    return frozenset(name for name in functions - others if not name.startswith("__"))


@functools.cache
def used(node: ast.AST) -> list[ast.Name | ast.Attribute | ast.ImportFrom]:
    """Return the names, attributes and imports within a node, but for annotations of functions: they decide nothing."""
    todo, found = [node], []
    while todo:
        at = todo.pop()
        if isinstance(at, ast.Name | ast.Attribute | ast.ImportFrom):
            found.append(at)
        for field, value in ast.iter_fields(at):
            if field in ("returns", "annotation") and not isinstance(at, ast.AnnAssign):
                continue
            todo += [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, ast.AST)]
    return found


@functools.cache
def dumped(node: ast.AST) -> list[str]:
    """Return the text of a syntax tree in pieces, cut at `renamable` names: every second piece is one of these."""
    pieces = [""]
    for number, piece in enumerate(re.split(r"'([A-Za-z_]\w*)'", ast.dump(node))):
        if number % 2 and piece in renamable():
            pieces += [piece, ""]
        else:
            pieces[-1] += f"'{piece}'" if number % 2 else piece
    return pieces


class Module:
    """The definitions of a module, by name, and the places of what it imports from this repository.

    package: the one that `from . import` means.
    """

    def __init__(self, tree: ast.AST, package: str):
        self.statements: dict[str, list[ast.stmt]] = {}
        #: The place of each imported name; (module, "*") for a module as a whole.
        self.imports: dict[str, Place] = {}
        for node in ast.walk(tree):
            for alias in node.names if isinstance(node, ast.ImportFrom) else []:
                whole = f"{node.module or package}.{alias.name}"
                place = (whole, "*") if path_of(whole) else (node.module or package, alias.name)
                if path_of(place[0]):
                    self.imports[alias.asname or alias.name] = place
        for statement in tree.body:
            for name in _defined(statement):
                self.statements.setdefault(name, []).append(statement)


def _defined(statement: ast.stmt) -> list[str]:
    """Return the names that a statement at the top of a module defines; [""] where it does something else.

    Imports, and what is for type checkers alone, define none.
    """
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom) or _is_for_types(statement):
        return []
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [n.id for t in targets if t is not None for n in ast.walk(t) if isinstance(n, ast.Name)] or [""]


def _is_for_types(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and getattr(statement.test, "id", "") == "TYPE_CHECKING"


@functools.cache
def load(module: str) -> Module:
    """Return the definitions and imports of a module of this repository."""
    path = path_of(module)
    return Module(parsed(path), module if path.name == "__init__.py" else module.rpartition(".")[0])


@functools.cache
def derived() -> dict[str, list[Place]]:
    """Return the places of all classes in the packages `CHOICES`, by the names of their bases."""
    found: dict[str, list[Place]] = {}
    for package in CHOICES:
        for path in sorted(path_of(package).parent.glob("*.py")):
            module = package if path.stem == "__init__" else f"{package}.{path.stem}"
            for name, (node, *_) in load(module).statements.items():
                for base in node.bases if isinstance(node, ast.ClassDef) else []:
                    found.setdefault(getattr(base, "id", ""), []).append((module, name))
    return found


class Reach:
    """All that some code reaches.

    tree: the code. module: the name of the module that it is; "" for a notebook. Attributes: `found`, a digest for each
    place that is reached, the code's own included.
    """

    def __init__(self, tree: ast.AST, module: str = ""):
        self.found: dict[Place, str] = {}
        self._numbers: dict[str, str] = {}  # of functions, in the order in which they are met
        self._attributes: set[str] = set()
        self._methods: dict[str, list[tuple[Place, Module, ast.stmt]]] = {}  # not reached so far, by their names
        self._todo: list[Place] = []
        own = Module(tree, module.rpartition(".")[0])
        for name, statements in own.statements.items():
            self._read((module, name), own, statements)
        while self._todo:
            self._visit(self._todo.pop())

    def _visit(self, place: Place) -> None:
        module, name = place
        if place in self.found or path_of(module) is None:
            return
        of = load(module)
        if name in of.imports:  # handed on, as by a package's __init__
            source, there = of.imports[name]
            self._todo.append((source, "" if there == "*" else there))
        elif name in of.statements:
            self._read(place, of, of.statements[name])
            if name and "" in of.statements:
                self._todo.append((module, ""))

    def _read(self, place: Place, of: Module, statements: list[ast.stmt]) -> None:
        """Digest the statements at a place, and queue what they use; methods wait until something uses their names."""
        kept: list[ast.AST] = []
        for statement in statements:
            if not isinstance(statement, ast.ClassDef):
                kept.append(statement)
                continue
            module, name = place
            if module.startswith(CHOICES):
                self._todo += derived().get(name, [])
            kept += [*statement.bases, *statement.keywords, *statement.decorator_list]
            for inner in statement.body:
                method = getattr(inner, "name", "")
                if not method:
                    kept.append(inner)
                elif method.startswith("__") or method in self._attributes:
                    self._read((module, f"{name}.{method}"), of, [inner])
                else:
                    self._methods.setdefault(method, []).append(((module, f"{name}.{method}"), of, inner))
        self.found[place] = self._digest(kept)
        for node in kept:
            self._follow(node, of, place[0])

    def _digest(self, nodes: list[ast.AST]) -> str:
        """Return the SHA-256 of syntax trees, with the numbers of functions in place of their names."""
        trees = (
            "".join(self._numbered(piece) if at % 2 else piece for at, piece in enumerate(dumped(node)))
            for node in nodes
        )
        return digest("\n".join(trees))

    def _numbered(self, name: str) -> str:
        return self._numbers.setdefault(name, f"#{len(self._numbers)}")

    def _follow(self, node: ast.AST, of: Module, module: str) -> None:
        for use in used(node):
            if isinstance(use, ast.ImportFrom):
                self._todo += [(use.module or "", alias.name) for alias in use.names]
            elif isinstance(use, ast.Name):
                place = of.imports.get(use.id, (module, use.id))
                self._todo += [place] if place[1] != "*" else []
            else:
                source, whole = of.imports.get(getattr(use.value, "id", ""), ("", ""))
                self._todo += [(source, use.attr)] if whole == "*" else []
                self._attributes.add(use.attr)
                for waiting in self._methods.pop(use.attr, []):
                    self._read(waiting[0], waiting[1], [waiting[2]])


def of_notebook(path: Path) -> dict[Place, str]:
    """Return digests of all places that a notebook's code cells reach; that of the cells is at ("cells", "*")."""
    reach = Reach(parsed(path)).found
    own = [value for (module, _), value in sorted(reach.items()) if not module]
    return {("cells", "*"): digest(" ".join(own))} | {place: value for place, value in reach.items() if place[0]}


def of_command(module: str) -> dict[Place, str]:
    """Return digests of the definitions of a module, and of all places that they reach."""
    return Reach(parsed(path_of(module)), module).found


def modules_of_training() -> list[str]:
    """Return the names of the trainer's module and of all modules that it imports, or finds by name, in order."""
    todo, found = [TRAINER], set()
    while todo:
        name = todo.pop()
        if name in found or path_of(name) is None:
            continue
        found.add(name)
        if name in CHOICES:
            todo += [f"{name}.{p.stem}" for p in path_of(name).parent.glob("*.py") if p.stem != "__init__"]
        todo += [source for source, _ in load(name).imports.values()]
        todo.append(name.rpartition(".")[0])
    return sorted(found)


def of_training() -> dict[Place, str]:
    """Return digests of whole modules: the trainer's, and all that it imports or finds by name."""
    return {(module, "*"): digest(ast.dump(parsed(path_of(module)))) for module in modules_of_training()}


def main() -> None:
    """Write the lists of all notebooks, of all commands and of training into build/sources, and remove all others."""
    found = {path.stem: of_notebook(path) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
    found |= {name: of_command(module) for name, module in COMMANDS.items()} | {"train": of_training()}
    folder = BUILD / "sources"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, reached in found.items():
        lines = sorted(f"{module} {value}\n" for (module, _), value in reached.items())
        (folder / f"{name}.txt").write_text("".join(lines))


if __name__ == "__main__":
    main()
