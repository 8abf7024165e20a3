"""For the tests and for the notebooks: each worker of pytest-xdist keeps to one core."""

from __future__ import annotations

import os


def pytest_configure() -> None:
    """Ranks on threads wake each other at each message; on one core they do it in half the time of two."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
