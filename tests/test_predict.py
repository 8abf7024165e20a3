"""Predictions: against closed forms, against what runs send and hold, and against the replay of their traces."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lowcomm.config import RunConfig
from lowcomm.latency import expected_max, pair_seconds
from lowcomm.metrics import read_metrics
from lowcomm.model import Decoder
from lowcomm.outer import LocalUpdates
from lowcomm.pipeline import bubble
from lowcomm.predict import (
    Links,
    activation_bytes,
    message_bytes,
    node_bytes,
    predict,
    sent_per_step,
    stage_flops,
    stage_memory,
    turns,
)
from lowcomm.replay import read_traces, replay
from lowcomm.streaming import Schedule
from lowcomm.train import train_in_threads
from lowcomm.trainer import Trainer
from tests.conftest import small_run

STREAMING = {"fragments": "strided", "layers_per_fragment": 1, "overlap_steps": [1], "mixing": 0.5, "codec": "e3m0"}
PAIRS = {"peers": "group", "outer": "noloco", "outer_lr": 0.7, "outer_momentum": 0.5, "outer_pull": 0.7}
SLICED = {"trainable": "slice", "slices": 2, "sliced": ["mlp"]}
SUBSPACE = {"boundary": {"kind": "subspace", "rank": 4}}
#: Of `diloco_m2`, and of data-parallel training.
METHODS: dict[str, dict[str, Any]] = {
    "diloco": {},
    "streaming": STREAMING,
    "pairs": PAIRS | {"route": "random_micro_batch"},
    "sliced": SLICED,
    "all": STREAMING | PAIRS | SLICED | SUBSPACE,
    "gradients": {"route": "random_step"},
    "subspace": SUBSPACE,
}


def _run(name: str, *, steps: int = 16, **more: Any) -> RunConfig:
    run = "data_parallel" if name in ("gradients", "subspace") else "diloco_m2"
    method = METHODS[name] | ({} if run == "data_parallel" else {"close_last_round": False})
    train = {"steps": steps, "global_batch": 8, "accumulation": 2, "seq_len": 16, "eval_sequences": 4}
    grid = {"replicas": 4, "stages": 2, "train": train, "model": {"layers": 4}}
    return small_run(run, method=method, **(grid | more))


def test_the_largest_of_two_is_eq_7_and_of_many_what_draws_say() -> None:
    for sigma in (0.1, 0.5, 1.0):
        assert expected_max(2, sigma) == pytest.approx(pair_seconds(-(sigma**2) / 2, sigma), rel=1e-4)
    drawn = np.random.default_rng(0).lognormal(-0.125, 0.5, (200_000, 16)).max(1).mean()
    assert expected_max(16, 0.5) == pytest.approx(drawn, rel=0.01)
    assert expected_max(16, 0.0) == expected_max(1, 0.5) == 1.0
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        expected_max(0, 0.5)


def test_a_free_link_leaves_the_bubble_and_a_slow_one_little_else_than_bytes() -> None:
    config = _run("diloco")
    compute = [(1.0, 2.0)] * 2
    free = predict(config, compute, Links(1e12))
    assert float(free.step_seconds) == pytest.approx((2 + 1) * 3.0)
    assert float(free.utilisation) == pytest.approx(1 - bubble(2, 2))
    slow = predict(config, compute, Links(np.array([1e-4, 2e-4])))
    assert slow.step_seconds[0] / slow.step_seconds[1] == pytest.approx(2, rel=0.05)
    late = predict(config, compute, Links(1e12, latency_ms=1000.0))
    assert late.step_seconds > free.step_seconds + 3  # activations, gradients, and the norm's two phases


def test_stragglers_hold_up_everybody_more_than_pairs() -> None:
    uneven = Links(1e12, stragglers=0.5)
    seconds = {name: float(predict(_run(name), [(1.0, 2.0)] * 2, uneven).step_seconds) for name in ("diloco", "sliced")}
    assert seconds["diloco"] == pytest.approx(seconds["sliced"])
    everyone, two = _run("diloco"), dataclasses.replace(_run("pairs"))
    two = dataclasses.replace(two, method=dataclasses.replace(two.method, route="fixed"))
    found = [float(predict(c, [(1.0, 2.0)] * 2, uneven).step_seconds) for c in (everyone, two)]
    assert found[1] < found[0]


def test_sharded_models_are_not_predicted() -> None:
    with pytest.raises(ValueError, match="method.exchange = fsdp"):
        predict(small_run("data_parallel", method={"exchange": "fsdp"}), [(1.0, 1.0)], Links(1.0))
    with pytest.raises(ValueError, match="1 stages' seconds for 2 stages"):
        predict(_run("diloco"), [(1.0, 1.0)], Links(1.0))
    with pytest.raises(ValueError, match="mbit_per_s must be above 0, got 0"):
        Links(0)
    with pytest.raises(ValueError, match="jitter must be at least 0, got -1"):
        Links(1, jitter=-1)


@pytest.mark.parametrize("name", METHODS)
def test_bytes_are_the_ledgers(name: str, corpus: Path, tmp_path: Path) -> None:
    config = _run(name)
    summary = train_in_threads(config, corpus, tmp_path / "run")
    sent, t, h = summary["sent_bytes"], config.train, config.method.sync_every_steps
    activations, gradients = message_bytes(config)
    assert sent["route/activations"] == activations * t.accumulation * t.steps
    among, between = sent_per_step(config)
    assert between == (activations + gradients) * t.accumulation * config.replicas
    by_rank = summary["sent_bytes_per_rank"]
    if config.method.exchange == "gradients":
        assert sum(by_rank) == among * t.steps
        return
    total = 0.0
    for stage in range(2):
        parts = turns(config, stage)
        schedule = Schedule(len(parts), h)
        for index, part in enumerate(parts):
            had = schedule.turns_of(index, t.steps)
            total += config.replicas * (had * part.outer + (had - 1) * part.slow_weights)
    assert among * h == pytest.approx(
        sum(p.outer + p.slow_weights for s in range(2) for p in turns(config, s)) * config.replicas
    )
    # In random groups, owners of a slice meet or do not: the mean over replicas is of one turn.
    assert sum(by_rank) == pytest.approx(total, rel=0.0 if config.method.peers == "all" else 0.05)


@pytest.mark.parametrize("name", METHODS)
def test_memory_is_what_a_trainer_holds(name: str, corpus: Path, tmp_path: Path) -> None:
    config, found = _run(name), {}

    def look(trainer: Trainer, row: dict) -> None:
        if row["step"] < 16:
            return
        engine = trainer.engine
        outer = 0
        if isinstance(engine, LocalUpdates):
            outer = sum(f.resident + 4 * f.numel * f.outer.needs_peers for f in engine.fragments)
        weights = sum(4 * p.numel() for p in trainer.model.parameters())
        moments = sum(8 * p.numel() for p in trainer.trained.values())
        found[trainer.world.rank] = weights, moments, outer

    train_in_threads(config, corpus, tmp_path / "run", on_row=look)
    held = stage_memory(config)
    assert (held.weights, held.optimizer, held.outer) == max(found.values())
    assert node_bytes(config) > held.on_device + activation_bytes(config) - 1


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("mlp", ["relu", "gated"])
def test_activations_are_about_what_autograd_saves(mlp: str, recompute: bool) -> None:
    train = {"global_batch": 4, "accumulation": 1, "recompute": recompute}
    shape = {"dim": 64, "heads": 4, "ffn_dim": 256, "layers": 6, "mlp": mlp, "qk_norm": False}
    config = small_run("data_parallel", replicas=1, model=shape, train=train)
    model = Decoder(config.model).initialise(0)
    model.recompute = recompute
    saved: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if (place := x.untyped_storage().data_ptr()) not in own:
            saved[place] = x.untyped_storage().nbytes()
        return x

    ids = torch.randint(0, config.model.vocab_size, (4, config.train.seq_len))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss, _ = model.losses(ids, ids)
    inside = 0
    if recompute:  # what a block saves on its way back: a model without recomputing has them all
        again = dataclasses.replace(config, train=dataclasses.replace(config.train, recompute=False))
        inside = (activation_bytes(again) - activation_bytes(config)) / (config.model.layers - 1)
    logits = 4 * ids.numel() * config.model.vocab_size
    assert sum(saved.values()) + inside + 2 * logits == pytest.approx(activation_bytes(config), rel=0.2)
    assert loss.isfinite()


def test_flops_of_stages_are_those_of_the_whole() -> None:
    from lowcomm.accounting import forward_flops, training_flops

    for name in ("diloco", "sliced"):
        config = _run(name)
        stages, m = stage_flops(config), config.method
        assert sum(f for f, _ in stages) == forward_flops(config.model, 1, 16)
        whole = training_flops(config.model, 1, 16, sliced=m.sliced, slices=m.slices)
        assert sum(f + b for f, b in stages) == whole
    narrow, wide = (stage_flops(_run(n)) for n in ("subspace", "gradients"))
    assert all(a[0] == b[0] and a[1] > b[1] for a, b in zip(narrow, wide, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_a_slow_link_is_predicted_as_its_replay(name: str, corpus: Path, tmp_path: Path) -> None:
    """At 10 kbit/s computing is next to nothing, so the machine's speed decides nothing. Rounds from 3 to 6, of 7."""
    config = _run(name, steps=28, comm={"trace": True})
    train_in_threads(config, corpus, tmp_path / "run", tmp_path / "times")
    assert read_metrics(tmp_path / "run" / "metrics" / "rank-000.jsonl")
    apart = ("evaluation", "summary", "analysis")
    spans = [[s for s in t if 8 < s.step <= 24 and s.purpose not in apart] for t in read_traces(tmp_path / "times")]
    again = float(replay(spans, 1e-5).seconds) / 16
    expected = predict(config, [(0.0, 1e-9)] * 2, Links(0.01))
    assert float(expected.step_seconds) == pytest.approx(again, rel=0.1)
