"""nbval runs the notebooks at their defaults, the smoke scale; tables there need the smoke runs, made here once."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from lowcomm.experiment.source import source_digest
from lowcomm.experiment.train import train_in_threads
from pipelines.project import load_params, prepared, run_folder, run_points


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
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        began = [pool.submit(train_in_threads, config, data[config.data.corpus], run_folder(config)) for config in todo]
        for done in began:
            done.result()
