"""Predictions: against closed forms, against what runs send and hold, and against the replay of their traces."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lowcomm.comm.shares import mean_bytes
from lowcomm.comm.wire import Span
from lowcomm.cost.footprint import activation_bytes, cast_bytes, kept_of_messages, node_bytes, stage_memory
from lowcomm.cost.latency import blocking, expected_max, pair_seconds, sigma_of, uneven
from lowcomm.cost.predict import (
    Links,
    kinds_of_stage,
    message_bytes,
    predict,
    sent_per_step,
    stage_flops,
    stage_numel,
    turns,
)
from lowcomm.cost.replay import read_traces, replay, window
from lowcomm.experiment.config import RunConfig
from lowcomm.experiment.run_folder import RunFolder, read_metrics
from lowcomm.experiment.train import train_in_threads
from lowcomm.experiment.trainer import Trainer
from lowcomm.methods.boundary import make_boundary
from lowcomm.methods.config import MethodConfig
from lowcomm.methods.local_updates import LocalUpdates
from lowcomm.methods.muon import Muon
from lowcomm.methods.pipeline import bubble
from lowcomm.methods.streaming import Schedule
from lowcomm.model.accounting import forward_flops, parameter_shapes, training_flops
from lowcomm.model.config import stage_layers
from lowcomm.model.decoder import Decoder
from tests.conftest import small_run

STREAMING = {"fragments": "strided", "layers_per_fragment": 1, "overlap_steps": [1], "mixing": 0.5, "codec": "e3m0"}
PAIRS = {"peers": "group", "outer": "noloco", "outer_lr": 0.7, "outer_momentum": 0.5, "outer_pull": 0.7}
SLICED = {"trainable": "slice", "slices": 2, "sliced": ["mlp"]}
SUBSPACE = {"boundary": {"kind": "subspace", "rank": 4, "update_every_steps": 8, "update_lr": 1.0}}
#: Of `diloco_m2`, and of data-parallel training.
METHODS: dict[str, dict[str, Any]] = {
    "diloco": {},
    "streaming": STREAMING,
    "pairs": PAIRS | {"route": "random_micro_batch"},
    "sliced": SLICED,
    # One fragment is applied at the step at which the next is sent.
    "offloaded": STREAMING | PAIRS | {"offload_outer": True, "sync_every_steps": 6, "overlap_steps": [2]},
    "sparse": STREAMING
    | {"codec": "chunk_topk_2bit", "codec_keep": 0.02, "error_feedback": 0.9, "mean": "senders", "offload_outer": True},
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


@pytest.mark.parametrize("group", [None, 2])
@pytest.mark.parametrize(("replicas", "ratio", "every"), [(8, 0.3, 30), (64, 0.3, 30), (64, 1.0, 100)])
def test_uneven_machines_wait_as_the_barriers_of_noloco_do(
    group: int | None, replicas: int, ratio: float, every: int
) -> None:
    """As `latency.blocking`, which is Figure 5B's: a mean of 1, and whoever is last counts there."""
    sigma = sigma_of(ratio)
    spent = blocking(replicas, [every], outer_steps=60, mu=-(sigma**2) / 2, sigma=sigma, group=group)
    ours = uneven(replicas, ratio, every=every, group=group)
    assert ours - 1 == pytest.approx(spent[0] / (60 * every) - 1, rel=0.25, abs=0.01)


def test_slow_replicas_are_waited_for_where_gradients_travel_and_weigh_less_where_parameters_do() -> None:
    speeds, links = [1.0, 1.0, 0.5, 0.25], Links(1e9)
    local, gradients = (
        small_run(run, replicas=4, train={"steps": 16, "global_batch": 8, "seq_len": 16, "eval_sequences": 4})
        for run in ("diloco_m2", "data_parallel")
    )
    plain, uneven = (predict(local, [(1.0, 2.0)], links, speeds=s) for s in (None, speeds))
    assert (plain.trained, uneven.trained) == (1.0, 2.75 / 4)
    assert uneven.step_seconds == plain.step_seconds
    assert uneven.utilisation == plain.utilisation
    each_step = dataclasses.replace(local, method=dataclasses.replace(local.method, sync_every_steps=1))
    at_least_one = predict(each_step, [(1.0, 2.0)], links, speeds=speeds)  # and the others wait for it
    assert at_least_one.trained == 1.0
    assert float(at_least_one.step_seconds) == pytest.approx(4 * float(plain.step_seconds), rel=1e-3)
    plain, uneven = (predict(gradients, [(1.0, 2.0)], links, speeds=s) for s in (None, speeds))
    assert uneven.trained == 1.0
    assert float(uneven.step_seconds) == pytest.approx(4 * float(plain.step_seconds), rel=1e-3)
    assert float(uneven.utilisation) == pytest.approx((0.25 + 0.25 + 0.5 + 1) / 4, rel=1e-3)
    with pytest.raises(ValueError, match=r"speeds must be 4, above 0 and at most 1, got \[1.0\]"):
        predict(local, [(1.0, 2.0)], links, speeds=[1.0])


def test_who_meets_more_often_waits_longer() -> None:
    among = {"stages": 4, "micro_batches": 16}
    assert uneven(8, 0.0, every=1) == 1.0
    assert uneven(1, 0.3) == pytest.approx(1.0, abs=0.03)
    assert uneven(8, 0.3, every=1) == pytest.approx(expected_max(8, sigma_of(0.3)), rel=0.02)
    alone = uneven(1, 0.3, **among)  # stages of one pipeline meet at each step
    assert alone > 1.2
    rarely, pairs = uneven(8, 0.3, every=10), uneven(8, 0.3, every=10, group=2)
    assert 1 < pairs < rarely < uneven(8, 0.3, every=1)
    assert uneven(8, 0.3, every=10, overlap=5) < rarely
    assert uneven(8, 0.3, every=10, routed=True, **among) > uneven(8, 0.3, every=10, **among)


def test_stages_that_differ_are_counted_apart() -> None:
    def layers_of(config: RunConfig, stage: int) -> int:
        return len(stage_layers(config.model.layers, config.stages, stage))

    config = _run("diloco", stages=3, model={"layers": 7})
    assert [layers_of(config, s) for s in range(3)] == [2, 2, 3]
    assert kinds_of_stage(config) == {0: 1, 1: 1, 2: 1}
    uneven_cut = _run("diloco", stages=5, model={"layers": 7})
    assert sum(n * layers_of(uneven_cut, s) for s, n in kinds_of_stage(uneven_cut).items()) == 7
    assert sum(kinds_of_stage(uneven_cut).values()) == 5
    even = _run("diloco", stages=6, model={"layers": 6})
    assert kinds_of_stage(even) == {0: 1, 1: 4, 5: 1}


def test_sharded_models_are_not_predicted() -> None:
    with pytest.raises(ValueError, match="method.exchange = fsdp"):
        predict(small_run("data_parallel", method={"exchange": "fsdp"}), [(1.0, 1.0)], Links(1.0))
    with pytest.raises(ValueError, match="1 stages' seconds for 2 stages"):
        predict(_run("diloco"), [(1.0, 1.0)], Links(1.0))
    with pytest.raises(ValueError, match="mbit_per_s must be above 0, got 0"):
        Links(0)
    with pytest.raises(ValueError, match="jitter must be from 0 to 100, got -1"):
        Links(1, jitter=-1)
    turned = _run("subspace")
    boundary = dataclasses.replace(turned.method.boundary, mode="reparametrised")
    turned = dataclasses.replace(turned, method=dataclasses.replace(turned.method, boundary=boundary))
    with pytest.raises(ValueError, match="re-parametrised models are not predicted"):
        stage_flops(turned)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_sends_holds_and_takes_what_is_predicted(name: str, corpus: Path, tmp_path: Path) -> None:
    config, held = _run(name, steps=36, comm={"trace": True}), {}

    def look(trainer: Trainer, row: dict) -> None:
        before = held.get(trainer.world.stage, (0, 0, 0))
        held[trainer.world.stage] = tuple(map(max, before, _held(trainer, row["step"])))

    folder = RunFolder(tmp_path / "run", tmp_path / "times")
    summary = train_in_threads(config, corpus, folder, on_row=look)
    _bytes_are_the_ledgers(config, summary)
    for stage, (weights, moments, outer) in held.items():
        told = stage_memory(config, stage)
        assert (told.weights, told.optimizer, told.outer_on_device) == (weights, moments, outer)
    assert node_bytes(config) > max(sum(parts) for parts in held.values())
    _a_slow_link_is_as_its_replay(config, folder)


def _bytes_are_the_ledgers(config: RunConfig, summary: dict[str, Any]) -> None:
    sent, t, h = summary["sent_bytes"], config.train, config.method.sync_every_steps
    activations, gradients = message_bytes(config)
    assert sent["route/activations"] == activations * t.accumulation * t.steps
    among, between = sent_per_step(config)
    every = config.method.boundary.update_every_steps
    moves = (t.steps - 1) // every / t.steps if every else 0.0  # a step; the last is none
    dim, rank = config.model.dim, config.method.boundary.rank
    basis, gram = 4 * dim * rank * config.replicas, mean_bytes(dim * dim, 4, config.replicas) * config.replicas
    messages = (activations + gradients) * t.accumulation * config.replicas
    assert between == messages + (basis / every if every else 0)
    by_rank = summary["sent_bytes_per_rank"]
    if config.method.exchange == "gradients":
        assert sum(by_rank) == pytest.approx((among - (gram / every if every else 0) + moves * gram) * t.steps)
        return
    total = moves * gram * t.steps
    for stage in range(2):
        parts = turns(config, stage)
        schedule = Schedule(len(parts), h)
        for index, part in enumerate(parts):
            had = schedule.turns_of(index, t.steps)
            slow = part["slow weights"].mean if "slow weights" in part else 0
            total += config.replicas * (had * part["outer"].mean + (had - 1) * slow)
    assert sum(by_rank) == pytest.approx(total)


def _held(trainer: Trainer, step: int) -> tuple[int, int, int]:
    """Return the bytes of weights, of moments and of outer state on the device that a trainer holds after a step."""
    engine, config, outer = trainer.engine, trainer.config, 0
    if isinstance(engine, LocalUpdates):
        outer = sum(f.resident + (f.peers is not None) * 4 * f.numel for f in engine.fragments)
        if config.method.offload_outer:
            for index, f in enumerate(engine.fragments):  # what the next step's turns need is on its way already
                whole = f.under_way is not None and f.due <= step + 1
                sent = index in engine.plan.turns(step + 1)
                copies = len(f._stepped) if whole else sent * (1 + (f.feedback > 0))
                assert f.resident == 4 * f.numel * copies
    weights = sum(4 * p.numel() for p in trainer.model.parameters())
    kept = trainer.optimizer.state.values()
    return weights, sum(4 * v.numel() for s in kept for n, v in s.items() if n != "step"), outer


def _a_slow_link_is_as_its_replay(config: RunConfig, folder: RunFolder) -> None:
    """At 10 kbit/s computing is next to nothing, so the machine's speed decides nothing. Rounds from 3 to 8, of 9."""
    assert read_metrics(folder.metrics(0))
    spans = window(read_traces(folder.times), 9, 32)
    again = float(replay(spans, 1e-5).seconds) / 24
    expected = predict(config, [(0.0, 1e-9)] * 2, Links(0.01))
    assert float(expected.step_seconds) == pytest.approx(again, rel=0.1)


@pytest.mark.parametrize("kind", ["dense", "low_rank", "projection"])
def test_errors_that_boundaries_keep_and_what_messages_take_are_counted(
    kind: str, corpus: Path, tmp_path: Path
) -> None:
    boundary = {"kind": kind, "rank": 0 if kind == "dense" else 4, "codec": "e3m0", "error_feedback": True}
    grid = {"replicas": 1, "stages": 3, "model": {"layers": 3}, "train": {"steps": 2, "accumulation": 2}}
    config = small_run("data_parallel", **grid, method={"boundary": boundary})
    found = {}

    def look(trainer: Trainer, row: dict) -> None:
        found[trainer.world.stage] = sum(4 * x.numel() for x in trainer.passes.boundary.errors.values())

    train_in_threads(config, corpus, tmp_path / "run", on_row=look)
    assert found == {stage: kept_of_messages(config, stage) for stage in range(3)}
    assert found[1] == found[0] + found[2] > 0
    without = small_run("data_parallel", **grid, method={"boundary": boundary | {"error_feedback": False}})
    assert node_bytes(without) < node_bytes(config) <= node_bytes(without) + found[1]

    model = Decoder(config.model, config.constraint).initialise(0)
    one, x = make_boundary(config.method.boundary, config.model, model), torch.randn(1, 32, config.model.dim)
    with FlopCounterMode(display=False) as counter:
        one.read_gradients(one.gradients(x), (1, 32))
    assert counter.get_total_flops() == one.flops(32)


def test_without_moments_there_are_no_means_in_their_place() -> None:
    method = {"boundary": {"second_moment": "row", "update_every_steps": 0, "update_lr": 0.0}}
    sgd, adamw = (small_run("protocol", train={"optimizer": name}, method=method) for name in ("sgd", "adamw"))
    assert stage_memory(sgd, 0).optimizer == 0 < stage_memory(adamw, 0).optimizer


def test_one_replica_waits_for_nobody() -> None:
    """An outer optimizer on one replica sends nothing, so that no latency is paid for it."""
    local, alone = (small_run(name, replicas=1) for name in ("diloco_m2", "data_parallel"))
    links = Links(1.0, latency_ms=200)
    seconds = [float(predict(c, [(0.01, 0.02)], links).step_seconds) for c in (local, alone)]
    assert seconds[0] == seconds[1]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("mlp", ["relu", "gated"])
def test_activations_are_about_what_autograd_saves(mlp: str, recompute: bool, stages: int) -> None:
    """The last stage is measured, all of whose micro-batches go forward before one comes back; its head is left out."""
    train = {"global_batch": 4, "accumulation": stages, "recompute": recompute, "steps": 12}
    shape = {"dim": 64, "heads": 4, "ffn_dim": 256, "layers": 6, "mlp": mlp, "qk_norm": False, "z_loss": 0.0}
    config = small_run("data_parallel", replicas=1, stages=stages, model=shape, train=train)
    model = Decoder(config.model).initialise(0).cut(stages - 1, stages)
    model.recompute = recompute
    saved: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    alive = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        if (place := x.untyped_storage().data_ptr()) not in own:
            saved[place] = x.untyped_storage().nbytes()
            alive.append(x)
        return x

    ids = torch.randint(0, config.model.vocab_size, (4 // stages, config.train.seq_len))
    for m in range(stages):  # as many micro-batches
        x = ids if stages == 1 else torch.randn(*ids.shape, 64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            stream = model.hidden(x)
        alive.append(stream)
        if stages > 1:
            keep(torch.empty_like(stream))  # its gradient
        if m == stages - 1:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                alive.append(model.head_losses(stream, ids))
    inside = 0.0
    if recompute:  # what a block saves on its way back: a model without recomputing has them all
        again = Decoder(config.model).initialise(0).blocks["0"]
        seen: dict[int, int] = {}

        def see(x: torch.Tensor) -> torch.Tensor:
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            alive.append(x)
            return x

        weights = {p.untyped_storage().data_ptr() for p in again.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(see, lambda x: x):
            angles = (table[: ids.shape[1]] for table in (model.cos_TC, model.sin_TC))
            again(torch.randn(*ids.shape, 64, requires_grad=True), *angles)
        inside = sum(n for place, n in seen.items() if place not in weights | own)
    logits = 4 * ids.numel() * config.model.vocab_size
    told = activation_bytes(config, stages - 1)
    assert sum(saved.values()) - logits + max(inside, 3 * logits) == pytest.approx(told, rel=0.2)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # of norms, on a CPU
def test_weights_are_held_in_bf16_as_well_where_that_is_computed() -> None:
    """Each matrix once for each micro-batch that waits; tables and scales of norms are not cast."""
    config = small_run("data_parallel", replicas=1, train={"precision": "bf16"})
    model, cast = Decoder(config.model).initialise(0), {}
    shapes = {p.shape for p in model.parameters() if p.ndim == 2}

    def see(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.bfloat16 and {x.shape, x.mT.shape if x.ndim == 2 else None} & shapes:
            cast[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            alive.append(x)
        return x

    ids, alive = torch.randint(0, config.model.vocab_size, (3, 7)), []
    with (
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        torch.autograd.graph.saved_tensors_hooks(see, lambda x: x),
    ):
        alive.append(model.losses(ids, ids))
    assert sum(cast.values()) == cast_bytes(config, 0) > 0
    assert cast_bytes(small_run("data_parallel", replicas=1), 0) == 0
    told = {}
    for recompute in (False, True):
        train = {"precision": "bf16", "recompute": recompute, "accumulation": 4}
        pipeline = small_run("data_parallel", replicas=1, stages=2, train=train)
        told[recompute] = sum(cast_bytes(pipeline, stage) for stage in (0, 1))
    assert told[False] == 4 * cast_bytes(config, 0)  # all micro-batches have gone forward
    assert 0 < told[True] < cast_bytes(config, 0)


def test_an_exchange_that_is_waited_for_has_a_message_and_a_mean() -> None:
    """Both count where activations, gone by then, took fewer bytes; with overlap a fragment is on its way as well."""
    small = {"replicas": 2, "train": {"seq_len": 2, "global_batch": 2}}
    told = {}
    for tau in (0, 1):
        config = small_run("diloco_m2", **small, method={"overlap_steps": [tau], "sync_every_steps": 4})
        held, numel = stage_memory(config, 0).on_device, stage_numel(config, 0)
        told[tau] = (node_bytes(config) - held) / (4 * numel)
        assert activation_bytes(config, 0) < 8 * numel
    assert told[0] == 2.0
    assert 1.0 < told[1] == 1.0 + activation_bytes(config, 0) / (4 * numel)


def test_each_boundary_of_a_pipeline_may_have_a_link_of_its_own() -> None:
    config, compute = small_run("data_parallel", replicas=1, stages=3, model={"layers": 3}), [(1e-3, 2e-3)] * 3
    slow, fast = Links(0.1, latency_ms=5), Links(1e6)
    alike, one, none = (
        float(predict(config, compute, slow, within).step_seconds) for within in (None, [fast, slow], [fast, fast])
    )
    assert alike == float(predict(config, compute, slow, [slow, slow]).step_seconds)
    assert none < one < alike
    with pytest.raises(ValueError, match="1 links within a replica for 3 stages: one for each of its boundaries"):
        predict(config, compute, slow, [fast])


def test_a_round_waits_for_each_phase_of_its_exchange() -> None:
    """On links that take 20 ms and no time beside: a mean of all is 2 messages one after the other, that of pairs 1."""
    pairs = {"peers": "group", "outer": "noloco", "outer_lr": 0.7, "outer_momentum": 0.5, "outer_pull": 0.7}
    for method, phases in (({}, 2), (pairs, 1)):
        config = small_run("diloco_m2", replicas=4, method=method | {"sync_every_steps": 5})
        seconds = float(predict(config, [(0.0, 1e-9)], Links(math.inf, latency_ms=20)).step_seconds)
        assert seconds == pytest.approx(phases * 0.02 / 5, rel=1e-3)


def test_flops_of_stages_are_those_of_the_whole() -> None:
    for name in ("diloco", "sliced"):
        config = _run(name)
        stages, m = stage_flops(config), config.method
        head_back = 2 * 2 * 16 * config.model.dim * config.model.vocab_size  # of the last stage, at once
        assert sum(f for f, _ in stages) == forward_flops(config.model, 1, 16) + head_back
        whole = training_flops(config.model, 1, 16, sliced=m.sliced, slices=m.slices)
        assert sum(f + b for f, b in stages) == whole
    plain = _run("diloco")
    muon = dataclasses.replace(plain, train=dataclasses.replace(plain.train, optimizer="muon", muon_lr=0.02))
    products = [Muon.step_flops(parameter_shapes(muon.model, stage=stage, stages=2)) for stage in (0, 1)]
    more = [b - a for (_, a), (_, b) in zip(stage_flops(plain), stage_flops(muon), strict=True)]
    assert more == [count / 2 for count in products]  # of a micro-batch, of which a step has two
    narrow, wide = (stage_flops(_run(n)) for n in ("subspace", "gradients"))
    assert all(a[0] == b[0] and a[1] > b[1] for a, b in zip(narrow, wide, strict=True))


def test_of_two_overlaps_the_shorter_one_is_waited_for() -> None:
    def seconds(*overlap: int) -> float:
        method = STREAMING | {"overlap_steps": list(overlap), "sync_every_steps": 8, "codec": "fp32"}
        return float(predict(small_run("diloco_m2", replicas=2, method=method), [(1.0, 2.0)], Links(0.05)).step_seconds)

    assert seconds(5) < seconds(2, 5) == seconds(5, 2) == seconds(2)


def _computing(config: RunConfig, spans: list[list[Span]], wanted: float) -> tuple[list[tuple[float, float]], float]:
    """Return what `predict` needs: seconds (forward, backward) of a micro-batch at each stage, and `stragglers`.

    A step's computing is the time between waits, divided into forward and backward as its FLOPs are. Ranks that share
    processors are uneven in a way that no rank sees by itself, so `stragglers` is the number (0 to 4) with which a
    predicted step over a free link is as long as is `wanted`: 0 where that is shorter than without.
    """
    shares, each = [], np.array([_by_step(of_rank) for of_rank in spans]).reshape(config.stages, config.replicas, -1)
    for stage, (forward, backward) in zip(each, stage_flops(config), strict=True):
        a_flop = float(stage.mean()) / config.train.accumulation / (forward + backward)
        shares.append((forward * a_flop, backward * a_flop))
    low, high = 0.0, 4.0
    for _ in range(12):
        middle = (low + high) / 2
        took = float(predict(config, shares, Links(math.inf, stragglers=middle)).step_seconds)
        low, high = (middle, high) if took < wanted else (low, middle)
    return shares, low


def _by_step(spans: list[Span]) -> list[float]:
    """Return the seconds per step that a rank computes, from each step that sends something to the next that does."""
    begun: dict[int, float] = {}
    waited: dict[int, float] = {}
    for s in spans:
        begun[s.step] = min(begun.get(s.step, s.submitted), s.submitted)
        if s.entered_wait < math.inf:
            waited[s.step] = waited.get(s.step, 0.0) + s.left_wait - s.entered_wait
    return [(begun[b] - begun[a] - waited.get(a, 0.0)) / (b - a) for a, b in pairwise(sorted(begun))]


@pytest.mark.parametrize("name", ["pairs", "gradients"])
def test_a_live_run_is_predicted_as_its_replay(name: str, corpus: Path, tmp_path: Path) -> None:
    """Its computing alone tells it, where sending takes far longer than computing and where both take as long."""
    config = _run(name, steps=44, comm={"trace": True})
    train_in_threads(config, corpus, RunFolder(tmp_path / "run", tmp_path / "times"))
    traces = read_traces(tmp_path / "times")
    spans = window(traces, 9, 40)

    def replayed(mbit_per_s: float | np.ndarray) -> np.ndarray:
        return replay(spans, np.asarray(mbit_per_s) / 1e3).seconds / 32

    free = float(replayed(math.inf))
    compute, stragglers = _computing(config, spans, free)
    rates = np.array([0.05, 0.05 * float(replayed(0.05)) / free])
    assert 1.5 < replayed(rates)[1] / free < 2.1  # it sends for as long as it computes
    slow, both = predict(config, compute, Links(rates, stragglers=stragglers)).step_seconds / replayed(rates)
    assert slow == pytest.approx(1, rel=0.05)
    assert both == pytest.approx(1, rel=0.2)
    # What is waited for after the window is not: it ends when its last step does.
    begun, ended = (min(s.submitted for t in traces for s in t if s.step == step) for step in (9, 41))
    assert replayed(1e9) * 32 < 1.2 * (ended - begun)


@pytest.mark.parametrize("kind", ["diloco", "streaming", "gradients"])
def test_a_single_rate_is_one_of_many_and_may_be_infinite(kind: str) -> None:
    streaming = {"fragments": "strided", "layers_per_fragment": 1, "overlap_steps": [1], "codec": "e3m0"}
    config = small_run("diloco_m2", method=streaming if kind == "streaming" else {})
    if kind == "gradients":
        config = dataclasses.replace(config, method=MethodConfig("gradients"))
    rates = [1.0, 100.0, math.inf]
    many = predict(config, [(0.01, 0.02)], Links(rates, latency_ms=5.0)).step_seconds
    alone = [float(predict(config, [(0.01, 0.02)], Links(rate, latency_ms=5.0)).step_seconds) for rate in rates]
    assert alone == list(many)
    assert all(map(math.isfinite, alone))
    assert alone[0] >= alone[1] >= alone[2] > 0
