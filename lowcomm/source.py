"""What a run is made with: which modules a source imports, and digests of those that train and of files."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def imports(source: str) -> set[str]:
    """Modules of `lowcomm` that a source imports, or starts by name with `-m`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "lowcomm":
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lowcomm."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"^lowcomm\.(\w+)$", node.value))
    return {m for m in found if (PACKAGE / f"{m}.py").exists()}


def closure(modules: Iterable[str]) -> set[str]:
    """Modules and all that they import."""
    todo, done = set(modules), set()
    while todo:
        module = todo.pop()
        done.add(module)
        todo |= imports((PACKAGE / f"{module}.py").read_text()) - done
    return done


def sha256(path: Path) -> str:
    """Of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def source_digest() -> str:
    """SHA-256 over the source of the trainer and all that it imports."""
    digest = hashlib.sha256()
    for module in sorted(closure(["train"])):
        digest.update(module.encode() + (PACKAGE / f"{module}.py").read_bytes())
    return digest.hexdigest()
