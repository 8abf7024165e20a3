"""Where text comes from: documents of a corpus, one after the other, as `datasets` reads them.

Two corpora need no download: the docstrings and the Python source of the standard library and of
pinned packages, read from the installed files at build time. All others go through
`datasets.load_dataset`: any Hub data set at a pinned revision, or local JSON, text and parquet files.
"""

from __future__ import annotations

import ast
import glob
import importlib.metadata as metadata
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowcomm.experiment.config import CorpusConfig
from lowcomm.settings import ConfigError

_SKIPPED_FOLDERS = {"test", "tests", "testing", "_vendor", "vendored", "site-packages", "idlelib", "lib2to3"}
_SHORTEST_DOCSTRING = 80  # characters


def documents(corpus: CorpusConfig, root: Path) -> Iterator[str]:
    """Yield the non-empty documents of a corpus in a fixed order; local paths begin at `root`.

    Raises ConfigError where the corpus cannot be read.
    """
    if corpus.source in ("docstrings", "python"):
        yield from _installed(corpus)
    else:
        for row in _rows(corpus, root):
            if corpus.field not in row:
                raise ConfigError(f"corpus {corpus.path} has columns {sorted(row)}, not {corpus.field!r}")
            text = row[corpus.field]
            if not isinstance(text, str):
                raise ConfigError(f"column {corpus.field!r} of {corpus.path} holds {type(text).__name__}, not text")
            if text:
                yield text


def sources(corpus: CorpusConfig) -> list[dict[str, str]]:
    """Return the "name", "version" and "licence" of everything that a corpus is read from."""
    if corpus.source not in ("docstrings", "python"):
        name = "/".join(p for p in (corpus.path, corpus.name) if p)
        return [{"name": name, "version": corpus.revision or "local", "licence": corpus.licence or "not stated"}]
    found = [{"name": "python standard library", "version": platform.python_version(), "licence": "PSF-2.0"}]
    for package in corpus.packages:
        meta = _distribution(package).metadata
        licence = meta.get("License-Expression") or (meta.get("License") or "").strip().split("\n")[0]
        if not licence or len(licence) > 60:
            named = [c.split(" :: ")[-1] for c in meta.get_all("Classifier", []) if c.startswith("License ::")]
            licence = ", ".join(named) or licence[:60] or "not stated"
        found.append({"name": package, "version": meta["Version"], "licence": licence})
    return found


def _distribution(package: str) -> metadata.Distribution:
    try:
        return metadata.distribution(package)
    except metadata.PackageNotFoundError:
        raise ConfigError(f"corpus package {package!r} is not installed; install the pinned environment") from None


def _python_files(corpus: CorpusConfig) -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    yield from (f for f in sorted(root.rglob("*.py")) if not _SKIPPED_FOLDERS & set(f.relative_to(root).parts))
    for package in corpus.packages:
        distribution = _distribution(package)
        names = sorted(str(f) for f in distribution.files or [] if f.suffix == ".py")
        for name in names:
            if not _SKIPPED_FOLDERS & set(Path(name).parts):
                yield Path(distribution.locate_file(name))


def _installed(corpus: CorpusConfig) -> Iterator[str]:
    seen: set[str] = set()  # packages share docstrings by inheritance
    for path in _python_files(corpus):
        try:
            source = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):  # other encodings, and files pip lists but did not install
            continue
        if corpus.source == "python":
            text = source.strip()
        else:
            text = "\n\n".join(d for d in _docstrings(source) if d not in seen and not seen.add(d))
        if text:
            yield text


def _docstrings(source: str) -> Iterator[str]:
    try:
        with warnings.catch_warnings():  # other people's invalid escapes
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # templates and Python 2 remnants
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) >= _SHORTEST_DOCSTRING:
                yield text


def _rows(corpus: CorpusConfig, root: Path) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset  # seconds to import, and only these sources need it

    if not corpus.path:
        raise ConfigError(f"corpus source {corpus.source} needs a path")
    if corpus.source == "hub":
        if not corpus.revision:
            raise ConfigError(f"corpus {corpus.path} needs a revision, so that a run stays what it was")
        kwargs = {"path": corpus.path, "name": corpus.name or None, "revision": corpus.revision, "split": corpus.split}
    else:
        pattern = str(root / corpus.path)
        if Path(pattern).is_dir():
            pattern = str(Path(pattern) / "**" / f"*.{'txt' if corpus.source == 'text' else corpus.source + '*'}")
        files = sorted(glob.glob(pattern, recursive=True))
        if not files:
            raise ConfigError(f"corpus path {corpus.path} matches no {corpus.source} file")
        kwargs = {"path": corpus.source, "data_files": files, "split": "train"}
        if corpus.source == "text":
            kwargs["sample_by"] = "document"
    try:
        yield from load_dataset(streaming=corpus.streaming or corpus.source != "hub", **kwargs)
    except Exception as error:  # datasets raises many kinds; all mean that the corpus cannot be had
        why = " ".join(str(error).split())
        raise ConfigError(f"corpus {corpus.path} cannot be read: {type(error).__name__}: {why}") from error
