"""nbval runs the notebooks at their defaults, the smoke scale; tables there need the smoke runs, made here once."""

from __future__ import annotations

import os

import pytest

from lowcomm.comm import run_threads
from lowcomm.data import prepared
from lowcomm.metrics import complete, made_with
from lowcomm.params import load_params, run_dir, run_points, times_dir
from lowcomm.source import source_digest
from lowcomm.train import train


def pytest_sessionstart(session: pytest.Session) -> None:
    """Train every run at smoke scale in threads, unless this source and these settings have done so already."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    source = source_digest()
    for config in (point for run in load_params()["runs"] for point in run_points(run, scale="smoke")):
        data = prepared(config.data.corpus, "smoke")
        out, times = run_dir(config), times_dir(config)
        if made_with(out) == source and complete(out, config):
            continue
        run_threads(
            lambda w, c=config, d=data, o=out, t=times: train(c, w, d, o, t), replicas=config.replicas, comm=config.comm
        )
