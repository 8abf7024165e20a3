"""For the tests and for the notebooks: each worker of pytest-xdist keeps to one core, which ranks on threads share."""

from __future__ import annotations

import os

from pipelines.launch import keep_to_core


def pytest_configure() -> None:
    """Choose the core by the worker's number; without pytest-xdist all cores are used."""
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        keep_to_core(0, int(worker.removeprefix("gw")))
