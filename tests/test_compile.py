"""Compiled steps: what torch.compile captures of every custom product trains as it does without."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from lowcomm.metrics import read_metrics
from lowcomm.train import train_in_threads
from tests.conftest import small_run

SLICED = {"sync_every_steps": 3, "trainable": "slice", "slices": 2, "sliced": ["mlp", "heads"]}
SUBSPACE = {"boundary": {"kind": "subspace", "rank": 4, "update_every_steps": 2, "update_lr": 1.0}}
BY_COORDINATES = {"boundary": SUBSPACE["boundary"] | {"mode": "reparametrised"}}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own capture does
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("run", "method"),
    [("data_parallel", {}), ("data_parallel", SUBSPACE), ("data_parallel", BY_COORDINATES), ("diloco_m2", SLICED)],
    ids=["dense", "projected", "reparametrised", "sliced"],
)
def test_a_compiled_run_is_the_run(
    run: str, method: dict[str, Any], recompute: bool, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured and differentiated ahead of time, then run as it is (aot_eager): no C++ compiler is needed for that."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    found = []
    for compiled in (False, True):
        replicas = 2 if run.startswith("diloco") else 1
        train = {"steps": 6, "compile": compiled, "recompute": recompute, "lr": 0.003}
        config = small_run(run, replicas=replicas, train=train, method=method)
        out = tmp_path / str(compiled)
        train_in_threads(config, corpus, out)
        rows = read_metrics(out / "metrics" / "rank-000.jsonl")
        found.append([r["loss"] for r in rows] + [rows[-1]["val_loss"]])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
