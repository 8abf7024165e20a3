"""What stages are made of: for each notebook, the modules of `lowcomm` that it imports, and their digests.

    python -m pipelines.sources

A stage of dvc.yaml depends on its notebook's list in build/sources/, so it runs again when one of its modules changes,
and stays as it is when another does. `sha256sum -c` reads such a list.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat

from pipelines.project import BUILD, ROOT
from pipelines.source import closure, imports, sha256

SOURCES = [*sorted((ROOT / "notebooks").glob("*.ipynb")), ROOT / "pipelines" / "index.py"]


def modules(source: Path) -> list[str]:
    """Paths in the repository of all modules that a notebook or a script is made of."""
    if source.suffix == ".py":
        code = [source.read_text()]
    else:
        code = [c.source for c in nbformat.read(source, as_version=4).cells if c.cell_type == "code"]
    return [f"lowcomm/{m}.py" for m in sorted(closure({"__init__"}.union(*map(imports, code))))]


def main() -> None:
    """Write the lists of all notebooks, and of nothing else."""
    folder = BUILD / "sources"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for source in SOURCES:
        lines = [f"{sha256(ROOT / m)}  {m}\n" for m in modules(source)]
        (folder / f"{source.stem}.txt").write_text("".join(lines))


if __name__ == "__main__":
    main()
