"""nbval runs the notebooks at their defaults, the smoke scale; tables there need the smoke runs, made here once."""

from __future__ import annotations

import os

import pytest

from lowcomm.comm import run_threads
from lowcomm.config import data_dir, load_params, run_config, run_dir, times_dir
from lowcomm.data import prepared
from lowcomm.launch import source_digest
from lowcomm.train import train


def pytest_sessionstart(session: pytest.Session) -> None:
    """Train every run at smoke scale in threads, unless this source has done so already."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    for run in load_params()["runs"]:
        config = run_config(run, scale="smoke")
        prepared(config.data.corpus, "smoke")
        out, times = (f(run, "smoke", config.seed) for f in (run_dir, times_dir))
        made_with = times / "source.sha256"
        if (out / "summary.json").exists() and made_with.exists() and made_with.read_text() == source_digest():
            continue
        data = data_dir(config.data.corpus, "smoke")
        run_threads(
            lambda w, c=config, d=data, o=out, t=times: train(c, w, d, o, t), replicas=config.replicas, comm=config.comm
        )
        made_with.write_text(source_digest())
