"""Compiled steps: what torch.compile captures of every custom product trains as it does without."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from lowcomm.experiment.run_folder import RunFolder, read_metrics
from lowcomm.experiment.train import train_in_threads
from tests.conftest import small_run

SLICED = {"sync_every_steps": 3, "trainable": "slice", "slices": 2, "sliced": ["mlp", "heads"]}
SUBSPACE = {"boundary": {"kind": "subspace", "rank": 4, "update_every_steps": 2, "update_lr": 1.0}}
BY_COORDINATES = {"boundary": SUBSPACE["boundary"] | {"mode": "reparametrised"}}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own capture does
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("run", "method", "stages"),
    [
        ("data_parallel", {}, 1),
        ("data_parallel", SUBSPACE, 1),
        ("data_parallel", BY_COORDINATES, 1),
        ("diloco_m2", SLICED, 1),
        ("data_parallel", {}, 2),
        ("data_parallel", SUBSPACE, 2),
    ],
    ids=["dense", "projected", "reparametrised", "sliced", "pipeline", "projected pipeline"],
)
def test_a_compiled_run_is_the_run(
    run: str,
    method: dict[str, Any],
    stages: int,
    recompute: bool,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Captured and differentiated ahead of time, then run as it is (aot_eager): no C++ compiler is needed for that."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    found = []
    for compiled in (False, True):
        replicas = 2 if run.startswith("diloco") else 1
        train = {"steps": 6, "compile": compiled, "recompute": recompute, "lr": 0.003, "accumulation": stages}
        config = small_run(run, replicas=replicas, stages=stages, train=train, method=method)
        folder = RunFolder.beside(tmp_path / str(compiled))
        train_in_threads(config, corpus, folder)
        rows = read_metrics(folder.losses(config.to_dict()))
        found.append([r["loss"] for r in rows] + [rows[-1]["val_loss"]])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
