"""nbval runs the notebooks at their defaults, the smoke scale; tables there need the smoke runs, made here once."""

from __future__ import annotations

import os

import pytest

from lowcomm.data import prepared
from lowcomm.metrics import complete
from lowcomm.params import load_params, run_dir, run_points, times_dir
from lowcomm.source import source_digest
from lowcomm.train import train_in_threads


def pytest_sessionstart(session: pytest.Session) -> None:
    """Train every run at smoke scale in threads, unless this source and these settings have done so already."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    source = source_digest()
    for config in (point for run in load_params()["runs"] for point in run_points(run, scale="smoke")):
        data = prepared(config.data.corpus, "smoke")
        if not complete(run_dir(config), config, source):
            train_in_threads(config, data, run_dir(config), times_dir(config))
