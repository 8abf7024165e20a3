"""Digests: of files, and of the code that trains, whatever its comments and docstrings say."""

from __future__ import annotations

import ast
import functools
import hashlib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def without_docstrings(tree: ast.AST) -> ast.AST:
    """The syntax tree without docstrings, changed in place; strings that no statement uses are such everywhere."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [
                statement
                for statement in body
                if not (isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str))
            ]
    return tree


@functools.cache
def source_digest() -> str:
    """SHA-256 of the package's code, but for `cost`, which no run uses: of its syntax trees without docstrings."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        if name.parts[0] != "cost":
            tree = without_docstrings(ast.parse(path.read_text()))
            digest.update(f"{name.as_posix()}\n{ast.dump(tree)}\n".encode())
    return digest.hexdigest()
