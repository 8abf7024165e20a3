"""nbval runs the notebooks at their defaults, the smoke scale; tables there need the smoke runs, made here once."""

from __future__ import annotations

import fcntl
import os
import tempfile
import uuid
from collections.abc import Generator
from pathlib import Path

import nbformat
import nbval.kernel
import pytest
from jupyter_client.manager import KernelManager

from lowcomm.experiment.source import source_digest
from lowcomm.experiment.train import train_in_threads
from pipelines.launch import pool_of_cores
from pipelines.project import BUILD, load_params, prepared, run_folder, run_points

TRAINS, READS = Path(__file__).with_name("20_train.ipynb"), pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Give the kernels of this worker a profile of their own, without the reader's settings and a shared history.

    Kernels listen at files, not at ports: a port that a process beside takes before the kernel does would leave it
    alive and silent, and nbval would wait for it until its time is over.
    """
    profile = BUILD / "ipython" / getattr(config, "workerinput", {}).get("workerid", "main") / "profile_default"
    profile.mkdir(parents=True, exist_ok=True)
    (profile / "ipython_config.py").write_text("get_config().HistoryManager.enabled = False\n")
    os.environ["IPYTHONDIR"] = str(profile.parent)
    sockets = tempfile.TemporaryDirectory(prefix="nbval")  # not within the checkout: paths of sockets must be short
    config.add_cleanup(sockets.cleanup)

    def listening_at_files(**of_nbval: object) -> KernelManager:
        return KernelManager(transport="ipc", ip=f"{sockets.name}/{uuid.uuid4().hex}", **of_nbval)

    nbval.kernel.KernelManager = listening_at_files


def pytest_sessionstart(session: pytest.Session) -> None:
    """Train every run at smoke scale in threads, unless this source and these settings have done so already.

    A run a core at a time, as threads of one process keep one core busy; before the workers of pytest-xdist start.
    """
    if hasattr(session.config, "workerinput"):
        return
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the kernels': there is one for each core
    source, params = source_digest(), load_params()
    data = {corpus: prepared(corpus, "smoke") for corpus in params["corpora"]}
    points = [point for run in params["runs"] for point in run_points(run, scale="smoke", params=params)]
    todo = [config for config in points if not run_folder(config).is_complete(config.to_dict(), source)]
    if not todo:
        return
    with pool_of_cores() as pool:
        began = [
            pool.submit(train_in_threads, config, data[config.data.corpus], run_folder(config), again=True)
            for config in todo
        ]
        for done in began:
            done.result()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the notebooks that train something, which take longest; mark those that read what 20_train trains."""
    texts = {path: path.read_text() for path in {item.path for item in items}}
    parameters = nbformat.read(TRAINS, 4).cells[1].source
    run = next(line.split('"')[1] for line in parameters.splitlines() if line.startswith("run ="))
    items.sort(key=lambda item: not any(f"pipelines.{name} import" in texts[item.path] for name in ("launch", "live")))
    for item in items:
        item.stash[READS] = run in texts[item.path]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """Let no cell that reads a run be computed while 20_train trains it anew, in the same folder."""
    if not item.stash[READS]:
        return (yield)
    with (BUILD / "nbval.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if item.path == TRAINS else fcntl.LOCK_SH)
        return (yield)
