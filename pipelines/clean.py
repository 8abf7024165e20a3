"""Clean notebooks in place, always to the same bytes.

    python -m pipelines.clean            clean all of notebooks/
    python -m pipelines.clean --check    name those that are not clean, and change nothing
    python -m pipelines.clean --refresh  first run the notebooks that have checked cells, to renew their outputs

Outputs are removed, except those of cells that begin with `# NBVAL_CHECK_OUTPUT`, whose exact integers nbval compares.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from pipelines.project import ROOT

KEEP = "# NBVAL_CHECK_OUTPUT"


def cleaned(text: str) -> str:
    """Return the clean form of a notebook's JSON text.

    Its metadata name the kernel and the language alone, its cells are numbered and keep their tags, and of outputs
    only those that are checked are left.
    """
    notebook = nbformat.reads(text, as_version=4)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index:02d}"
        tags = cell.metadata.get("tags")
        cell.metadata = {"tags": tags} if tags else {}
        cell.source = cell.source.rstrip()
        if cell.cell_type == "code":
            kept = cell.outputs if cell.source.startswith(KEEP) else []
            cell.execution_count = 1 if kept else None  # nbval wants a cell with outputs to have been run
            for output in kept:
                if output.output_type == "execute_result":
                    output.execution_count = 1
            cell.outputs = kept
    return nbformat.writes(notebook, indent=1, ensure_ascii=False).rstrip() + "\n"


def refreshed(path: Path) -> str:
    """Return a notebook's JSON text, after running it at its defaults if it has cells whose outputs are checked."""
    notebook = nbformat.read(path, as_version=4)
    if any(c.source.startswith(KEEP) for c in notebook.cells if c.cell_type == "code"):
        NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute()
    return nbformat.writes(notebook)


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv`, by default the process's own, and return its exit status; see `--help`.

    It is 1 where `--check` finds a notebook that is not clean.
    """
    parser = argparse.ArgumentParser(prog="python -m pipelines.clean", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--refresh", action="store_true")
    args = parser.parse_args(argv)
    dirty = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        before = path.read_text()
        after = cleaned(refreshed(path) if args.refresh else before)
        if before != after:
            dirty.append(path.name)
            if not args.check:
                path.write_text(after)
    for name in dirty:
        print(f"{'not clean' if args.check else 'cleaned'}: {name}")
    return 1 if dirty and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
