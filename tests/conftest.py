"""Shared set-up: a small corpus, prepared once, and small runs on it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lowcomm import elastic_store
from lowcomm.comm.notes import Notes
from lowcomm.experiment.config import CorpusConfig, DataConfig, RunConfig
from lowcomm.experiment.data import prepare
from pipelines.project import load_params, run_config

VOCAB = 400
DATA = DataConfig("docstrings", VOCAB, max_characters=150_000)

# A worker of pytest-xdist has a core; at these sizes a second thread of an operation only waits for it, and spins.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# torch's store looks up the name of each address that it connects to, and waits for a resolver that does not answer.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let reports carry the words of the table of faults."""
    for item in items:
        if (fault := item.get_closest_marker("fault")) is not None:
            item.user_properties.append(("fault", fault.args))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared corpus of 150,000 characters of docstrings."""
    folder = tmp_path_factory.mktemp("data") / "docstrings"
    prepare(CorpusConfig("docstrings"), DATA, folder)
    return folder


def small_run(run: str = "diloco_m2", **override: Any) -> RunConfig:
    """Return a run of params.yaml (of a sweep, the first variant) at smoke scale, made smaller; sections merge."""
    params = load_params()
    variants = params["runs"][run].get("variants", {"": {}})
    base: dict[str, Any] = {
        "variant": next(iter(variants)),
        "model": {"vocab_size": VOCAB},
        "data": vars(DATA),
        "train": {"steps": 12, "warmup_steps": 3, "eval_every": 0, "eval_sequences": 8},
    }
    if run.startswith("diloco"):
        base["method"] = {"sync_every_steps": 4}
    for section, values in override.items():
        base[section] = base.get(section, {}) | values if isinstance(values, dict) else values
    return run_config(run, scale="smoke", params=params, **base)


def settings_of(config: RunConfig) -> list[str]:
    """Return the words for `--set` that make `config` of its run at smoke scale."""
    smoke = run_config(config.name, variant=config.variant, scale="smoke")
    grid = [
        f"{key}={getattr(config, key)}" for key in ("replicas", "stages") if getattr(config, key) != getattr(smoke, key)
    ]
    boundary, default = vars(config.method.boundary), vars(smoke.method.boundary)
    grid += [f"method.boundary.{key}={value}" for key, value in boundary.items() if value != default[key]]
    return grid + [
        f"{section}.{key}={json.dumps(value)}"
        for section in ("model", "data", "train", "method", "comm", "checkpoint")
        for key, value in vars(getattr(config, section)).items()
        if value != getattr(getattr(smoke, section), key) and key != "boundary"
    ]


def command_line(config: RunConfig, corpus: Path, out: Path) -> list[str]:
    """Return the words with which `lowcomm.train` trains `config`."""
    words = [config.name, *(["--variant", config.variant] if config.variant else [])]
    words += ["--scale", "smoke", "--data", str(corpus), "--out", str(out)]
    return words + [w for s in settings_of(config) for w in ("--set", s)]


@pytest.fixture
def store() -> Notes:
    """A store for elastic replicas, kept by the test."""
    return elastic_store("127.0.0.1:0", hosts=True)
