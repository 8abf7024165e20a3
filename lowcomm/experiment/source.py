"""Digests: of files, and of the code that trains, whatever its comments and docstrings say."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import os
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def without_docstrings(tree: ast.AST) -> ast.AST:
    """Remove docstrings from a syntax tree, in place, and return it; every lone string in a `body` counts as one."""
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
    """Return the SHA-256 of the package's syntax trees without docstrings, in hexadecimal.

    `cost`, which no run uses, is left out. Parsing takes a third of a second, which each process would spend as it
    starts: so the digest is kept in `__pycache__`, under the digest of the files as they are.
    """
    files = {path.relative_to(PACKAGE): path.read_bytes() for path in sorted(PACKAGE.rglob("*.py"))}
    some = {name.as_posix(): text for name, text in files.items() if name.parts[0] != "cost"}
    as_they_are = hashlib.sha256(repr((sys.version_info[:2], some)).encode()).hexdigest()
    kept = PACKAGE / "__pycache__" / f"source-{as_they_are}.sha256"
    with contextlib.suppress(OSError):
        return kept.read_text()
    digest = hashlib.sha256()
    for name, text in some.items():
        digest.update(f"{name}\n{ast.dump(without_docstrings(ast.parse(text)))}\n".encode())
    if not sys.dont_write_bytecode:
        with contextlib.suppress(OSError):  # of a package that this user cannot write to
            kept.parent.mkdir(exist_ok=True)
            partial = kept.with_suffix(f".{os.getpid()}")
            partial.write_text(digest.hexdigest())
            partial.rename(kept)
    return digest.hexdigest()
