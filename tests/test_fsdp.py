"""FSDP2 through World: the gradients of data-parallel training, and its bytes on the ledger."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lowcomm.experiment.run_folder import read_metrics
from lowcomm.experiment.train import train_in_threads
from lowcomm.settings import ConfigError
from tests.conftest import command_line, small_run
from tests.harness import train_in_processes

#: Plain SGD without clipping: elementwise, so that equal gradients give equal weights.
SGD = {"optimizer": "sgd", "lr": 0.1, "clip_norm": 0.0, "eval_every": 5}


def _fsdp(out: Path, corpus: Path, **train) -> Path:
    config = small_run("data_parallel", method={"exchange": "fsdp"}, train=train)
    done = train_in_processes(2, *command_line(config, corpus, out))
    assert done.returncode == 0, done.stderr
    return out


def test_fsdp_is_data_parallel_bit_for_bit(corpus: Path, tmp_path: Path) -> None:
    fsdp = _fsdp(tmp_path / "fsdp", corpus, **SGD)
    train_in_threads(small_run("data_parallel", train=SGD), corpus, tmp_path / "dp")
    theirs, ours = (load_file(p / "model.safetensors") for p in (fsdp, tmp_path / "dp"))
    assert theirs.keys() == ours.keys()
    for name in ours:
        assert torch.equal(theirs[name], ours[name]), name
    losses = [[r["loss"] for r in read_metrics(p / "metrics" / "rank-000.jsonl")] for p in (fsdp, tmp_path / "dp")]
    assert losses[0] == losses[1]


def test_fsdp_sends_each_gradient_once_and_each_weight_twice(corpus: Path, tmp_path: Path) -> None:
    summary = json.loads((_fsdp(tmp_path / "fsdp", corpus) / "summary.json").read_text())
    steps, half = summary["run"]["train"]["steps"], 4 * summary["parameters"] // 2
    # With two ranks a rank sends half of all gradients a step. FSDP2 pads uneven shards, by under 1 %.
    assert summary["sent_bytes"]["replica/fsdp scatter"] == pytest.approx(steps * half, rel=0.01)
    # Blocks are gathered for the forward and again for the backward pass, the root once a step, and for evaluation.
    gathers = summary["sent_bytes"]["replica/fsdp gather"] / half
    assert steps + 1 < gathers <= 2 * steps + 3


def test_fsdp_needs_processes(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="method.exchange = fsdp needs processes"):
        train_in_threads(small_run("data_parallel", method={"exchange": "fsdp"}), corpus, tmp_path)
