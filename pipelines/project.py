"""This checkout as a project, with its folders, its `params.yaml` and its runs."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path

from lowcomm.experiment.project import Project

#: Root of the checkout: nothing relies on the working directory.
ROOT = Path(__file__).resolve().parent.parent
PROJECT = Project(ROOT)
#: The folder of everything heavy: corpora, shards, runs, executed notebooks. DVC tracks it, git ignores it.
BUILD = PROJECT.build

load_params = PROJECT.load_params
run_config = PROJECT.run_config
run_points = PROJECT.run_points
run_folder = PROJECT.run_folder
runs_dir = PROJECT.runs_dir
read_run = PROJECT.read_run
corpus_configs = PROJECT.corpus_configs
data_dir = PROJECT.data_dir


def prepared(corpus: str, scale: str | None = None) -> Path:
    """Return the folder of a corpus of this project, prepared where needed (`lowcomm.experiment.data.prepared`).

    scale: by default the one that `params.yaml` names.
    """
    from lowcomm.experiment.data import prepared as prepare

    return prepare(PROJECT, corpus, scale)


def record_seconds(stage: str, scale: str, seconds: float) -> None:
    """Write down how many seconds a stage took here, of which `pipelines.index --times` makes a table."""
    file = BUILD / "times" / scale / "stages" / f"{stage}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"stage": stage, "seconds": round(seconds, 1)}) + "\n")


def write_whole(file: Path, text: str) -> None:
    """Write a file, and its folder where that is missing, so that a kill at any moment leaves all of it or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".tmp")
    partial.write_text(text)
    partial.rename(file)


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Lock a file, which is made if need be, for the length of a `with` statement; other processes that ask wait."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, or its process is gone
        yield
