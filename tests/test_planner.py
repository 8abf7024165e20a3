"""The planner: what it tries, leaves out, ranks and refuses."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lowcomm.__main__ import main as lowcomm
from lowcomm.cost import planner
from lowcomm.cost.footprint import node_bytes
from lowcomm.cost.ingredients import DEMO_SHAPE, Law, Method, Penalties, Penalty
from lowcomm.cost.planner import Cluster, Job, front, methods, model_of, plan, run_of, shown, withstanding
from lowcomm.cost.predict import Links, message_bytes
from lowcomm.experiment.data import prepared
from lowcomm.experiment.project import Project
from lowcomm.experiment.train import train_in_threads
from lowcomm.methods.elastic import check_elastic
from lowcomm.methods.named import DeMo, SparseLoCo
from lowcomm.model.accounting import parameters, training_flops
from lowcomm.model.config import ModelConfig
from lowcomm.model.huggingface import public_config
from lowcomm.model.presets import PRESETS
from lowcomm.settings import ConfigError
from pipelines.ladder.penalties import penalties_of
from pipelines.ladder.plan import LADDER
from pipelines.report import published

MODEL = ModelConfig(256, 8, 8, 1024, 4096, 512)
JOB = Job(MODEL, tokens=1e9, global_batch=64)
COLUMNS = ["ingredient", "replicas", "amount", "parameters", "log_ratio", "deviation", "source"]
SIZE = parameters(MODEL).total
ROWS = [
    ("local updates", 2, 1, SIZE, 0.02, 0.01, "ours"),
    ("local updates", 8, 1, SIZE, 0.10, 0.01, "ours"),
    ("rounds", 2, 100, SIZE, 0.03, 0.01, "ours"),
    ("streaming", 2, 1, SIZE, 0.01, 0.01, "ours"),
    ("pairs", 8, 1, SIZE, 0.02, 0.02, "ours"),
    ("routes", 8, 1, SIZE, 0.01, 0.01, "ours"),
    ("slices", 8, 2, SIZE, 0.01, 0.01, "ours"),
    ("slices", 8, 8, SIZE, 0.20, 0.01, "ours"),
    ("subspace", 1, 8, SIZE, 0.15, 0.01, "ours"),
]


def _table(rows: Sequence[tuple], drift: float = 0.0) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=COLUMNS).assign(drift=drift)


PENALTIES = Penalties(_table(ROWS))


def _installed() -> Penalties:
    return Penalties.read(planner.measured_penalties())


def _cluster(mbit_per_s: float, *, nodes: int = 8, memory_gb: float = 24.0) -> Cluster:
    return Cluster(nodes, memory_gb, 1.0, Links(mbit_per_s, latency_ms=1.0), price_per_node_hour=0.5)


def test_the_front_is_what_nothing_beats_in_both() -> None:
    assert front([1, 2, 3, 3, 4], [5, 3, 4, 1, 1]) == [True, True, False, True, False]
    assert front([1, 1], [2, 2]) == [True, True]


def test_a_fast_link_wants_gradients_and_a_slow_one_anything_but() -> None:
    fast, slow = plan(_cluster(1e7), JOB, PENALTIES), plan(_cluster(10.0), JOB, PENALTIES)
    assert fast.method[0] == "gradients"
    assert fast.utilisation[0] > 0.9
    assert slow.method[0] != "gradients"
    assert slow.days_to_equal_loss[0] < slow[slow.method == "gradients"].days_to_equal_loss.min() / 3
    for table in (fast, slow):
        assert table.days_to_equal_loss_high.is_monotonic_increasing
        best, reach = table[table.front], table[table.days_to_equal_loss_high < math.inf]
        assert best.days.min() == reach.days.min()
        assert best.loss_percent.min() == reach.loss_percent.min()
        assert (table.replicas * table.stages == 8).all()
        assert (table.cost == table.days * 24 * 8 * 0.5).all()
    assert len(shown(slow)) == len(slow)


def test_slow_machines_keep_gradients_and_pipelines_waiting_and_not_local_updates() -> None:
    keys = ["method", "replicas", "stages", "recompute"]
    equal, uneven = (
        plan(cluster, JOB, PENALTIES).set_index(keys).days
        for cluster in (_cluster(1e9), dataclasses.replace(_cluster(1e9), slow=2, slow_speed=0.5))
    )
    longer = (uneven / equal).reset_index()
    alone = (longer.stages == 1) & (longer.method != "gradients")
    assert alone.any()
    assert not alone.all()
    even = longer.method.str.fullmatch(r"every \d+0 steps")  # half of a round is a whole number of steps
    np.testing.assert_allclose(longer[alone & even].days, 8 / (6 + 2 * 0.5), rtol=1e-6)
    assert longer[alone & ~even].days.between(1.1428, 1.3).all()  # a slow one takes the next whole number of a turn's
    assert longer[~alone].days.between(1.95, 2).all()  # messages take as long as they did
    cluster = dataclasses.replace(_cluster(1e9), slow=3, slow_speed=0.5)
    rows = {(row.stages, row.method): row for row in plan(cluster, JOB, PENALTIES).itertuples()}
    assert "--slot N     # N from 0 to 7, on each" in planner.command(rows[1, "every 30 steps"], cluster)
    assert "torchrun --nnodes 8" in planner.command(rows[1, "gradients"], cluster)
    boxes = dataclasses.replace(cluster, per_box=4, inside_mbit_per_s=1e6)
    assert "CUDA_VISIBLE_DEVICES=K lowcomm train planned" in planner.command(rows[1, "every 30 steps"], boxes)
    assert "# N from 0 to 7, and K from 0 to 3 in each box" in planner.command(rows[1, "every 30 steps"], boxes)
    assert cluster.speeds(8) == [1.0] * 5 + [0.5] * 3
    assert cluster.speeds(4) == [1.0, 1.0, 0.5, 0.5]
    with pytest.raises(ValueError, match="slow must be fewer than nodes = 8"):
        dataclasses.replace(cluster, slow=8)


def test_what_is_newer_than_the_papers_is_tried_where_it_has_been_measured() -> None:
    """It says what the front would be without it; Muon's gain counts as none beyond the sizes of its runs."""
    table = plan(_cluster(10.0), JOB, PENALTIES)
    assert not table[list(planner.SINCE)].to_numpy().any()
    assert all("in no row" in line for line in planner.moves_front(table))
    more = [
        ("sparse messages", 8, 1, SIZE, 0.005, 0.01, "ours"),
        ("Muon inside", 8, 1, SIZE / 10, -0.05, 0.01, "ours"),
        ("rising momentum", 2, 1, SIZE, -0.004, 0.01, "ours"),
        ("gossip momentum", 8, 1, SIZE, 0.001, 0.01, "ours"),
        ("DeMo", 2, 1, SIZE, 0.04, 0.01, "ours"),
    ]
    table = plan(_cluster(10.0), JOB, Penalties(_table(ROWS + more)))
    sparse, muon, rising, gossip, demo, projection, two_bits = planner.moves_front(table)
    assert all("on the front" in line for line in (rising, gossip, demo))
    assert all("in no row" in line for line in (projection, two_bits))
    best = table.iloc[0]
    assert best.sparse_messages
    without = table[~table.sparse_messages].days_to_equal_loss_high.min() / best.days_to_equal_loss_high
    assert sparse.endswith(f"rows on the front; {without:.3g} times the days to equal loss without it")
    assert muon == "Muon: not on the front"  # where it gains nothing, its own products take time
    both = table.set_index(["method", "replicas", "stages"])
    assert both.loss_percent["every 30 steps, Muon", 8, 1] == both.loss_percent["every 30 steps", 8, 1]
    assert both.memory_gb["every 30 steps, Muon", 8, 1] < both.memory_gb["every 30 steps", 8, 1]  # one moment, not two
    assert both.days["every 30 steps, Muon", 8, 1] > both.days["every 30 steps", 8, 1]
    assert both.bytes_per_token["every 30 steps, sparse", 8, 1] < both.bytes_per_token["every 30 steps", 8, 1] / 10
    assert both.loss_percent["every 30 steps, rising momentum", 8, 1] < both.loss_percent["every 30 steps", 8, 1]
    assert both.bytes_per_token["every 30 steps, pairs, GASLoC", 8, 1] == pytest.approx(
        both.bytes_per_token["every 30 steps, pairs", 8, 1], rel=0.01
    )
    # A ring sends each value of 4 bytes 7/8 times twice; 32 of 4,096, of 5.5 bytes with their place, go to 7 others.
    fewer = both.bytes_per_token["gradients", 8, 1] / both.bytes_per_token["DeMo", 8, 1]
    assert fewer == pytest.approx((2 * 7 / 8 * 4 * 4096) / (7 * 32 * 5.5), rel=0.01)
    run = run_of(planner.method_of(best), JOB, best.replicas, best.stages)
    assert run.method == dataclasses.replace(SparseLoCo.default, sync_every_steps=best.sync_every_steps)
    (each_step,) = table[table.demo & (table.replicas == 8)].itertuples()
    run = run_of(planner.method_of(table.loc[each_step.Index]), JOB, 8, 1)
    assert run.method == dataclasses.replace(DeMo.default, outer_lr_shape=DEMO_SHAPE)
    assert (run.train.optimizer, run.train.decay, run.train.weight_decay) == ("sgd", "constant", 0.0)
    ours = LADDER.configs("0.12M")["demo/m2"]  # whose loss it tells
    assert (ours.method.outer_lr_shape, ours.train.decay) == (run.method.outer_lr_shape, run.train.decay)


def test_muons_messages_of_2_bits_are_tried_where_they_have_been_measured() -> None:
    """MuLoCo sends half of the bits of E3M0, each parameter with levels of its own."""
    more = [("Muon inside", 8, 1, SIZE, -0.05, 0.01, "ours"), ("two bits", 2, 1, SIZE, 0.01, 0.01, "ours")]
    table = plan(_cluster(10.0), JOB, Penalties(_table(ROWS + more)))
    assert "on the front" in planner.moves_front(table)[-1]
    both = table.set_index(["method", "replicas", "stages"])
    two, four = (both.loc[(f"every 30 steps, {what}, Muon", 8, 1)] for what in ("2 bits", "streaming"))
    assert two.bytes_per_token == pytest.approx(four.bytes_per_token / 2, rel=0.01)
    run = run_of(Method(30, muon=True, two_bits=True), JOB, 8, 1)
    assert (run.method.codec, run.method.error_feedback, run.train.optimizer) == ("levels", 0.9, "muon")
    assert not any(m.two_bits and not m.muon for m in methods(8, 1))


def test_replicas_that_are_not_trusted_have_a_mean_that_none_decides() -> None:
    """All of them are heard, three own each value, and a machine holds the messages of all until it knows their norms.

    It costs what it costs in loss, and no method without it is in the table.
    """
    ask = dataclasses.replace(_cluster(10.0), untrusted=True)
    with pytest.raises(ConfigError, match="8 nodes have no configuration: replicas that are not trusted"):
        plan(ask, JOB, PENALTIES)
    known = Penalties(_table([*ROWS, ("clipped mean", 8, 1, SIZE, 0.03, 0.01, "ours")]))
    trusting, table = plan(_cluster(10.0), JOB, known), plan(ask, JOB, known)
    assert table.clipped_mean.all()
    assert not trusting.clipped_mean.any()
    assert not (table.pairs | table.demo).any()
    assert (table.sync_every_steps > 0).all()
    assert (table.replicas // table.slices).min() == 4
    keys = ["method", "replicas", "stages"]
    plain, clipped = trusting.set_index(keys), table.set_index(keys)
    before, after = plain.loc[("every 30 steps", 8, 1)], clipped.loc[("every 30 steps, clipped mean", 8, 1)]
    assert math.log1p(after.loss_percent / 100) - math.log1p(before.loss_percent / 100) == pytest.approx(0.03)
    assert after.bytes_per_token > 3 * before.bytes_per_token  # whole messages to all others in place of shares
    assert (after.memory_gb - before.memory_gb) * 1e9 == pytest.approx(8 * 4 * SIZE, rel=0.3)
    first = table.iloc[0]
    assert run_of(planner.method_of(first), JOB, first.replicas, first.stages).method.mean == "clipped"
    assert "between any two. Any of them may send nonsense.\n" in planner.question(ask, JOB, "any")
    two = dataclasses.replace(ask, nodes=2)
    with pytest.raises(ConfigError, match="train by local updates, at least three of them"):
        plan(two, JOB, known)


@pytest.mark.parametrize("nodes", [3, 4, 5, 8])
def test_what_it_says_to_elastic_replicas_they_can_do(nodes: int) -> None:
    """Machines that are not equally fast train as elastic replicas, whose rounds may have half of them."""
    known = Penalties(_table([*ROWS, ("clipped mean", nodes, 1, SIZE, 0.03, 0.01, "ours")]))
    uneven = dataclasses.replace(_cluster(10.0, nodes=nodes), slow=1)
    for cluster in (uneven, dataclasses.replace(uneven, untrusted=True)):
        table = plan(cluster, JOB, known)
        elastic = table[table.quorum > 0]
        assert len(elastic)
        for row in elastic.itertuples():
            check_elastic(run_of(planner.method_of(row), JOB, row.replicas, 1).plan(0), row.quorum)
            flag = f" --quorum {row.quorum} " in f"{planner.command(row, cluster)} "
            assert flag == (row.quorum != max(1, nodes // 2))
        assert (table.quorum == 0).sum() == ((table.stages > 1) | (table.sync_every_steps == 0)).sum()
    assert not plan(dataclasses.replace(uneven, slow=0), JOB, known).quorum.any()


def test_turns_that_come_too_soon_for_elastic_replicas_are_left_out() -> None:
    """With 48 layers in fragments of 3 there is a turn at each step, at which the turn before is still under way."""
    job = Job(dataclasses.replace(JOB.model, layers=48), 1e9, 256)
    even = plan(_cluster(10.0, memory_gb=1e3), job, PENALTIES)
    uneven = plan(dataclasses.replace(_cluster(10.0, memory_gb=1e3), slow=1), job, PENALTIES)
    soon = "streaming and stages == 1 and sync_every_steps == 30"
    assert len(even.query(soon))
    assert not len(uneven.query(soon))


def test_messages_that_a_mean_needs_at_once_are_counted() -> None:
    """They are held beside activations where exchanges overlap; reduced in shares, they take as much as a fragment."""

    def held(mean: str, codec: str, replicas: int, *, streaming: bool) -> float:
        config = run_of(Method(30, streaming=streaming), JOB, replicas, 1)
        method = dataclasses.replace(config.method, mean=mean, codec=codec, mean_trim=0.25 if mean == "trimmed" else 0)
        config = dataclasses.replace(config, method=method)
        fragment = 4 * max(f.numel for f in config.plan(0).fragments)
        plain = dataclasses.replace(config, method=dataclasses.replace(method, mean="mean", mean_trim=0.0))
        return (node_bytes(config) - node_bytes(plain)) / fragment

    for mean in ("clipped", "median", "trimmed"):
        assert held(mean, "e3m0", 8, streaming=True) == pytest.approx(8)  # gathered, and so whole messages
    assert held("median", "e3m0", 16, streaming=True) == pytest.approx(1)  # in shares
    assert held("clipped", "e3m0", 16, streaming=True) == pytest.approx(16)
    assert held("senders", "e3m0", 8, streaming=True) == 0


def test_what_does_not_fit_is_left_out_and_slices_make_it_fit() -> None:
    whole = node_bytes(run_of(Method(30), JOB, 8, 1, recompute=True)) / 1e9
    sliced = node_bytes(run_of(Method(30, slices=8), JOB, 8, 1, recompute=True)) / 1e9
    assert sliced < whole
    table = plan(_cluster(100.0, memory_gb=(whole + sliced) / 2), JOB, PENALTIES)
    alone = table[
        (table.stages == 1) & table.method.str.startswith("every 30 steps") & ~table.method.str.contains("str")
    ]
    assert "every 30 steps, 1/8 of MLPs" in set(alone.method)
    assert "every 30 steps" not in set(alone.method)
    assert (table.memory_gb <= (whole + sliced) / 2).all()
    nothing = plan(_cluster(100.0, memory_gb=1e-3), JOB, PENALTIES)
    assert nothing.empty
    least = nothing.attrs["least"]["memory_gb"]
    assert plan(_cluster(100.0, memory_gb=0.999 * least), JOB, PENALTIES).empty
    assert len(plan(_cluster(100.0, memory_gb=1.001 * least), JOB, PENALTIES))


def test_every_grid_has_its_methods_and_each_is_a_run() -> None:
    for replicas, stages in ((1, 8), (2, 4), (4, 2), (8, 1)):
        found = list(methods(replicas, stages))
        assert len(set(found)) == len(found) == len({m.name for m in found})
        assert any(m.ratio > 1 for m in found) == (stages > 1)
        assert any(m.pairs for m in found) == (replicas > 2)
        for method in found:
            config = run_of(method, JOB, replicas, stages)
            assert config.train.global_batch == 64
            assert config.train.steps * 64 * 512 == pytest.approx(1e9, rel=1e-4)
            between = "dense" if method.ratio == 1 else "projection" if method.projection else "subspace"
            assert config.method.boundary.kind == between
            assert config.train.optimizer == ("sgd" if method.demo else "muon" if method.muon else "adamw")
            assert method.muon or not method.projection  # none has been trained without
            assert config.method.slices == method.slices


def test_a_projection_is_advised_where_links_between_stages_are_slow() -> None:
    """A projected pipeline sends 21 of 256 coordinates, in 4 bits and with a scale for each block of values.

    A dense pipeline sends all of them in bf16.
    """
    more = [*ROWS, ("Muon", 1, 1, SIZE, -0.02, 0.01, "ours"), ("projection", 1, 12.8, SIZE, 0.08, 0.01, "ours")]
    known = Penalties(_table(more))
    method = Method(ratio=planner.PROJECTED, muon=True, projection=True)
    dense, projected = (run_of(m, JOB, 1, 8) for m in (Method(muon=True), method))
    assert message_bytes(dense)[1] / message_bytes(projected)[1] == pytest.approx(
        4 * 256 / 21 / (1 + 2 / 256), rel=1e-3
    )
    assert known.of(method, 1, 8, SIZE).log_ratio == pytest.approx(0.06)
    tight = dataclasses.replace(
        _cluster(10.0), memory_gb=0.9 * node_bytes(run_of(Method(), JOB, 8, 1, recompute=True)) / 1e9
    )
    assert "projection 1/12" in plan(tight, JOB, known).method[0]
    assert not plan(tight, JOB, PENALTIES).projection.any()


def test_a_subspace_stays_in_runs_that_are_too_short_for_it_to_move() -> None:
    long, short = (run_of(Method(ratio=8), Job(MODEL, tokens, 64), 1, 8) for tokens in (1e9, 1e7))
    assert long.method.boundary.update_every_steps == 500 > short.train.steps
    assert short.method.boundary.update_every_steps == short.method.boundary.update_lr == 0


def test_the_batch_is_rounded_to_what_replicas_can_share() -> None:
    assert [JOB.batch(n) for n in (1, 3, 7, 64)] == [64, 63, 63, 64]
    config = run_of(Method(30), JOB, 7, 1)
    assert (config.train.global_batch, config.local_batch) == (63, 9)
    assert config.train.steps * 63 * 512 == pytest.approx(1e9, rel=1e-4)
    for replicas in (100, 40):
        with pytest.raises(ConfigError, match=f"global_batch = 64 does not split into {replicas} replicas, nor does"):
            JOB.batch(replicas)
    table = plan(_cluster(100.0, nodes=7), JOB, PENALTIES)
    assert set(table[table.replicas == 7].global_batch) == {63}
    # The nearest multiples, 258, 259 and 253, leave a replica a prime share, of which a pipeline has one micro-batch.
    asked = dataclasses.replace(JOB, global_batch=256)
    for replicas, batch, count in ((6, 252, 14), (7, 252, 12), (11, 264, 12)):
        config = run_of(Method(30), asked, replicas, 2)
        assert (config.train.global_batch, config.train.accumulation) == (batch, count)
        assert run_of(Method(30), asked, replicas, 1).train.global_batch == replicas * round(256 / replicas)
    for replicas, stages in ((8, 2), (32, 4), (16, 8), (8, 16)):  # of few sequences each is a micro-batch: 256 it is
        assert asked.batch(replicas, stages) == 256
    assert Job(MODEL, 1e12, 10_000_019).batch(6, 2) == 10_000_020  # the nearest whose share, 1,666,670, splits in 10
    assert JOB.batch(22, 2) == 66  # three sequences for each, and so three micro-batches at most
    with pytest.raises(ConfigError, match="305 steps are fewer than 10 rounds of 100"):
        run_of(Method(100), Job(MODEL, tokens=1e7, global_batch=64), 2, 1)
    with pytest.raises(ConfigError, match="153 steps are fewer than 10 rounds of 30"):
        run_of(Method(30), Job(MODEL, tokens=5e6, global_batch=64), 2, 1)
    with pytest.raises(ValueError, match=r"tokens must be 10 steps' or more, 327,680, got 300000"):
        Job(MODEL, tokens=3e5, global_batch=64)


def _rounds(penalties: Penalties, sync_every_steps: float) -> Penalty:
    return penalties.one("rounds", sync_every_steps, 2, SIZE)


def test_an_amount_lies_on_the_line_through_its_neighbours() -> None:
    """H = 30 costs 0 and H = 100 costs 0.03; beyond, the line in ln H goes on, but does not fall."""
    assert _rounds(PENALTIES, 100).log_ratio == pytest.approx(0.03)
    assert _rounds(PENALTIES, 55).log_ratio == pytest.approx(0.03 * math.log(55 / 30) / math.log(100 / 30))
    long = _rounds(PENALTIES, 1000)
    assert long.log_ratio == pytest.approx(0.03 * math.log(1000 / 30) / math.log(100 / 30))
    assert long.deviation > 2 * _rounds(PENALTIES, 100).deviation
    assert long.extrapolated == pytest.approx(10)
    assert _rounds(PENALTIES, 10).log_ratio == 0.0
    falling = [row for row in ROWS if row[0] != "rounds"] + [("rounds", 2, 100, SIZE, -0.01, 0.01, "ours")]
    assert _rounds(Penalties(_table(falling)), 3000).log_ratio == pytest.approx(-0.01)
    # Of slices there are three points: none at 1, 0.01 at 2, 0.20 at 8; beyond, the line is that from 1 to 8.
    assert PENALTIES.one("slices", 4, 8, SIZE).log_ratio == pytest.approx(0.105)
    assert PENALTIES.one("slices", 64, 8, SIZE).log_ratio == pytest.approx(0.40)


def test_a_size_lies_on_the_line_through_its_neighbours_and_no_fall_is_hoped_for() -> None:
    sizes = [("local updates", 2, 1, size, gap, 0.001, "ours") for size, gap in ((1e5, 0.08), (1e6, 0.04), (1e7, 0.02))]
    penalties = Penalties(_table(sizes, drift=0.01))
    seen = {size: penalties.one("local updates", 1, 2, size) for size in (1e4, 1e5, 10**5.5, 1e7, 1e9)}
    assert [p.log_ratio for p in seen.values()] == pytest.approx([0.08, 0.08, 0.06, 0.02, 0.02])
    assert [p.extrapolated for p in seen.values()] == pytest.approx([10, 1, 10**0.5, 1, 100])
    grown = 0.001 + 0.01 * math.log(100)
    assert [p.deviation for p in seen.values()] == pytest.approx([0.001 + 0.01 * math.log(10), *[0.001] * 3, grown])
    gains = Penalties(_table([(*row[:4], -row[4], *row[5:]) for row in sizes]))
    assert [gains.one("local updates", 1, 2, size).log_ratio for size in (1e4, 1e5, 1e7, 1e9)] == [0, -0.08, -0.02, 0]


def test_the_nearest_source_is_asked() -> None:
    """Ours has few replicas and a small model, the paper's many and a large one."""
    table = [("local updates", 2, 1, 1e6, 0.04, 0.01, "ours"), ("local updates", 8, 1, 1e9, 0.01, 0.01, "theirs")]
    penalties = Penalties(_table(table))
    for replicas, size, source in ((2, 1e6, "ours"), (2, 1e9, "theirs"), (8, 1e6, "ours"), (8, 1e8, "theirs")):
        assert penalties.one("local updates", 1, replicas, size).source == source


def test_a_source_that_is_nearly_as_near_makes_a_penalty_less_sure() -> None:
    """Half way to a source that says 0.06 less, half of that is added to the deviation; at its own size none."""
    table = [("streaming", 2, 1, 1e6, 0.08, 0.01, "ours"), ("streaming", 2, 1, 1e10, 0.02, 0.01, "theirs")]
    penalties = Penalties(_table(table))
    for size, share in ((1e6, 0.0), (1e7, 1 / 9), (0.9999e8, 1.0)):  # (1 / 3)^2, (4 / 4)^2
        off = penalties.one("streaming", 1, 2, size).deviation
        assert off == pytest.approx(math.hypot(0.01, share * 0.03), rel=1e-3)


def test_a_penalty_of_one_number_of_replicas_is_less_sure_of_others() -> None:
    """Its deviation grows, for each factor of e, by as much as others change: here by 0.02 from 4 replicas to 16."""
    pairs = [("pairs", count, 1, SIZE, value, 0.01, "ours") for count, value in ((4, 0.01), (16, 0.03))]
    rows = [("streaming", 2, 1, SIZE, 0.01, 0.01, "ours"), ("Muon", 1, 1, SIZE, 0.01, 0.01, "ours"), *pairs]
    penalties = Penalties(_table(rows))
    assert penalties.one("streaming", 1, 2, SIZE).deviation == 0.01
    assert penalties.one("streaming", 1, 8, SIZE).deviation == pytest.approx(math.hypot(0.01, 0.02))
    assert penalties.one("Muon", 1, 8, SIZE).deviation == 0.01  # has nothing to do with them
    more = [("streaming", 16, -0.05), ("routes", 16, 0.015), *((name, 4, 0.01) for name in ("streaming", "routes"))]
    rows = [(name, count, 1, SIZE, value, 0.01, "ours") for name, count, value in more]
    rows += [*pairs, ("projection", 1, 8, SIZE, 0.01, 0.01, "ours"), ("sparse messages", 4, 1, SIZE, 0.0, 0.0, "ours")]
    several = Penalties(_table(rows))  # which change by 0.02, -0.06 and 0.005: by 0.02 in the median
    assert several.one("projection", 8, 8, SIZE).deviation == 0.01
    assert several.one("sparse messages", 1, 16, SIZE).deviation == pytest.approx(0.02)


def test_the_nearest_run_is_one_and_not_the_best_of_several() -> None:
    """Four replicas of the small size and two of the large one are no run of four at the large size."""
    table = [("local updates", 4, 1, 1e5, 0.08, 0.01, "ours"), ("local updates", 2, 1, 1e6, 0.03, 0.01, "ours")]
    penalties = Penalties(_table(table))
    assert penalties.one("local updates", 1, 4, 1e6).extrapolated == pytest.approx(2)
    assert penalties.one("local updates", 1, 4, 2e5).extrapolated == pytest.approx(2)
    far = [*table, ("local updates", 4, 1, 1e8, 0.01, 0.01, "theirs")]
    assert penalties.one("local updates", 1, 4, 4e6).source == "ours"
    assert Penalties(_table(far)).one("local updates", 1, 4, 3e7).source == "theirs"


def test_a_method_of_what_nothing_has_measured_is_not_advised() -> None:
    table = _table([row for row in ROWS if row[0] not in ("slices", "routes")])
    found = plan(_cluster(100.0), JOB, Penalties(table))
    assert set(found.slices) == {1}
    assert set(found[found.pairs].stages) == {1}
    thinner = _table([row for row in ROWS if row[:3] != ("slices", 8, 8)])
    assert set(plan(_cluster(100.0), JOB, Penalties(thinner)).slices) == {1, 2}
    with pytest.raises(ConfigError, match="nothing has measured slices"):
        Penalties(table).of(Method(30, slices=2), 8, 1, SIZE)


def test_gossip_with_a_momentum_costs_what_pairs_do_and_its_own() -> None:
    """Its own cost has been measured against pairs, so that the cost of pairs is added to it."""
    known = Penalties(_table([*ROWS, ("gossip momentum", 8, 1, SIZE, 0.001, 0.01, "ours")]))
    pairs, gossip = (known.of(Method(30, pairs=True, gossip_momentum=g), 8, 1, SIZE) for g in (False, True))
    assert gossip.log_ratio - pairs.log_ratio == pytest.approx(0.001)


def test_a_composed_run_says_by_how_much_sums_miss() -> None:
    """The run lost 0.40; its six ingredients cost 0.10 + 0.01 + 0.02 + 0.01 + 0.01 + 0.15 = 0.30."""
    table = _table([*ROWS, ("composed", 8, 8, SIZE, 0.40, 0.0, "ours")])
    penalties = Penalties(table)
    ((size, whole, summed, count, error),) = penalties.composed()
    assert (size, whole, count) == (SIZE, 0.40, 6)
    assert summed == pytest.approx(0.30)
    assert error == pytest.approx(math.sqrt(5 * 0.01**2 + 0.02**2))
    assert penalties.missed == pytest.approx(0.02)  # for each ingredient beyond the first
    better = ("composed", 8, 8, SIZE, 0.20, 0.0, "ours")
    assert Penalties(_table([*ROWS, better])).missed == pytest.approx(0.02)
    assert Penalties(_table([*ROWS, better, ("composed", 8, 8, 2 * SIZE, 0.31, 0.0, "ours")])).missed == pytest.approx(
        0.02
    )
    lacking = Penalties(table[table.ingredient != "routes"])
    assert lacking.composed() == []
    assert lacking.of(Method(30, streaming=True), 2, 1, SIZE).log_ratio == pytest.approx(0.03)
    for method, others in ((Method(30), 0), (Method(30, streaming=True, slices=2), 2)):
        wider, plain = (p.of(method, 8, 1, SIZE) for p in (penalties, PENALTIES))
        assert wider.log_ratio == plain.log_ratio
        assert wider.deviation == pytest.approx(math.hypot(plain.deviation, 0.02 * others))


def test_tokens_buy_back_what_is_above_the_floor() -> None:
    law = Law(floor=2.0, a=0.0, alpha=1.0, b=1000.0, beta=0.5)
    tokens = 1e6  # a loss of 3, of which 1 falls with tokens
    assert law.factor(0.0, 1e6, tokens) == law.factor(-0.1, 1e6, tokens) == 1.0
    assert law.factor(math.log(3 / 2.5), 1e6, tokens) == pytest.approx(
        4.0
    )  # half of that 1 is won by four times as many
    assert math.isinf(law.factor(math.log(3 / 2), 1e6, tokens))
    # As printed, at 1.3 billion parameters and 26 billion tokens: 2.46 nats, of which 0.32 are of tokens.
    like = Law()
    rest, text = like.floor + like.a * 1.3e9**-like.alpha, like.b * 26e9**-like.beta
    assert (rest + text, text) == (pytest.approx(2.466, abs=1e-3), pytest.approx(0.323, abs=1e-3))
    p = 0.02
    x = like.factor(p, 1.3e9, 26e9)
    assert (rest + like.b * (x * 26e9) ** -like.beta) * math.exp(p) == pytest.approx(rest + text)
    assert math.isinf(like.factor(0.2, 1.3e9, 26e9))


def test_long_rounds_are_tried_and_wanted_by_slow_links() -> None:
    job = Job(MODEL, tokens=1e10, global_batch=64)
    cheap = [(*row[:4], row[4] / 10, *row[5:]) for row in ROWS]
    penalties = Penalties(_table(cheap))
    fast, slow = (plan(_cluster(rate), job, penalties) for rate in (1000.0, 0.3))
    assert {0, 30, 100, 300, 1000} == set(slow.sync_every_steps)
    assert slow.sync_every_steps[0] == 1000 > fast.sync_every_steps[0]


def test_a_box_of_machines_is_a_machine_where_its_link_is_fast() -> None:
    """Two boxes of four: as two machines of four times the memory and speed, if the shards hold no more than that."""
    links, job = Links(100.0, 5.0), Job(MODEL, tokens=1e9, global_batch=64)
    boxes = plan(Cluster(8, 6.0, 1.0, links, per_box=4, inside_mbit_per_s=1e15), job, PENALTIES)
    assert {(w, r, s) for w, r, s in zip(boxes.width, boxes.replicas, boxes.stages, strict=True)} == {
        (w, r, s) for w, n in ((1, 8), (2, 4), (4, 2)) for r in (1, 2, 4, 8) for s in (1, 2, 4, 8) if r * s == n
    }
    whole = plan(Cluster(2, 24.0, 4.0, links), job, PENALTIES).set_index(["method", "replicas", "stages"])
    shards = boxes[boxes.width == 4].set_index(["method", "replicas", "stages"])
    assert set(shards.index) == set(whole.index)
    plain = [key for key in whole.index if key[2] == 1]
    assert list(shards.loc[plain].step_seconds) == pytest.approx(list(whole.loc[plain].step_seconds))
    gathered = 2 * 4 * parameters(MODEL).total / MODEL.layers / 1e9
    one = node_bytes(run_of(Method(30), job, 2, 1, width=4)) / 1e9
    assert shards.loc["every 30 steps", 2, 1].memory_gb == pytest.approx(one / 4 + gathered)
    slow = plan(Cluster(8, 6.0, 1.0, links, per_box=4, inside_mbit_per_s=10.0), job, PENALTIES)
    shards = slow[slow.width == 4].set_index(["method", "replicas", "stages"])
    assert (shards.loc[plain].step_seconds > 2 * whole.loc[plain].step_seconds).all()
    assert (slow.utilisation <= 1 + 1e-9).all()
    same = ["method", "replicas", "stages", "width"]
    boxes, slow = boxes.set_index(same), slow.set_index(same).loc[boxes.set_index(same).index]
    busy, busy_too = (table.utilisation * table.step_seconds for table in (boxes, slow))
    np.testing.assert_allclose(busy, busy_too, rtol=1e-6)  # a box's link changes no computing
    config = run_of(Method(30), job, 2, 1, width=4)
    passes = config.train.accumulation
    longer = planner._slower(config, [(1e-3 / 3, 2e-3 / 3)], 4, 10.0)
    nbytes = 3 / 4 * SIZE * (2 * 2 * passes + 4)  # weights in bf16 for each pass, and gradients in fp32 once
    assert longer == pytest.approx(8 * nbytes / 10e6 / (passes * 1e-3))


def test_machines_of_a_box_share_its_link_and_talk_inside_it_where_they_can() -> None:
    cluster = Cluster(16, 24.0, 1.0, Links(80.0, 5.0), per_box=8, inside_mbit_per_s=1e5)
    for width, stages, between, within in (
        (1, 8, 10, [1e5] * 7),
        (1, 16, 10, [1e5] * 7 + [80] + [1e5] * 7),  # of a replica over both boxes one boundary is between them
        (2, 4, 20, [1e5] * 3),
        (8, 2, 80, [80]),
    ):
        links, own = cluster.links_of(width, stages)
        assert (links.mbit_per_s, links.latency_ms) == (between, 5.0)
        assert [ls.mbit_per_s for ls in own] == within
        assert [ls.latency_ms for ls in own] == [5.0 if rate == 80 else 0.0 for rate in within]
    one = dataclasses.replace(cluster, nodes=8)
    links, own = one.links_of(1, 2)
    assert {ls.mbit_per_s for ls in (links, *own)} == {1e5}
    uneven = dataclasses.replace(cluster, nodes=12, per_box=6)  # a box holds a replica and a half
    assert [ls.mbit_per_s for ls in uneven.links_of(1, 4)[1]] == [pytest.approx(80 / 6)] * 3
    for wrong, message in (
        ({"per_box": 3}, "per_box must be at least 1 and divide nodes = 16, got 3"),
        ({"inside_mbit_per_s": 0.0}, "inside_mbit_per_s must be above 0, and finite, got 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(cluster, **wrong)


def test_a_model_is_asked_for_by_name_shape_or_folder(tmp_path: Path) -> None:
    assert model_of("partial_updates/1.3b") is PRESETS["partial_updates/1.3b"]
    shape = "dim=256, layers=8, heads=8, ffn_dim=1024, vocab_size=4096, seq_len=512"
    assert model_of(shape) == MODEL
    assert model_of(shape, seq_len=64).seq_len == 64
    (tmp_path / "config.json").write_text(json.dumps(public_config(dataclasses.replace(MODEL, seq_len=131_072))))
    for asked in (tmp_path, tmp_path / "config.json"):
        assert parameters(model_of(str(asked))) == parameters(MODEL)
        assert model_of(str(asked)).seq_len == 4096
    with pytest.raises(ConfigError, match=r"no preset named '1.3b'; did you mean 'partial_updates/1.3b'\?"):
        model_of("1.3b")
    with pytest.raises(ConfigError, match="unknown key model.dims; did you mean 'dim'"):
        model_of("dims=256")
    with pytest.raises(ConfigError, match=r"--model 'dim=\[1' is no list of KEY=VALUE: while parsing a flow sequence"):
        model_of("dim=[1")


@pytest.mark.parametrize("nodes", [2, 8])
def test_a_dense_boundary_is_billed_as_the_bf16_that_is_computed(nodes: int) -> None:
    """Of one replica nothing else travels: activations one way, their gradients the other."""
    table = plan(_cluster(100.0, nodes=nodes), JOB, PENALTIES)
    (row,) = table[(table.stages == nodes) & (table.ratio == 1)].itertuples()
    assert row.method == "gradients"
    assert row.bytes_per_token == 2 * MODEL.dim * (nodes - 1) * 2
    config = run_of(Method(), JOB, 1, nodes)
    tokens = config.local_batch // config.train.accumulation * config.train.seq_len
    assert config.train.precision == config.method.boundary.codec == "bf16"
    assert message_bytes(config) == (2 * MODEL.dim * tokens, 2 * MODEL.dim * tokens)


def test_penalties_come_from_the_nearest_run_and_add_up() -> None:
    # With 2 replicas 0.02, with 8 0.10: on the line in the logarithm between them, and on it beyond.
    assert PENALTIES.one("local updates", 1, 8, SIZE).log_ratio == pytest.approx(0.10)
    assert PENALTIES.one("local updates", 1, 4, SIZE).log_ratio == pytest.approx(0.06)
    near = PENALTIES.one("local updates", 1, 16, SIZE)
    assert near.log_ratio == pytest.approx(0.14)
    assert near.extrapolated == pytest.approx(2.0)
    assert PENALTIES.of(Method(), 8, 1, SIZE) == Penalty(0.0, 0.0, 1.0)
    both = PENALTIES.of(Method(30, streaming=True, slices=2), 2, 1, SIZE)
    assert both.log_ratio == pytest.approx(0.02 + 0.01 + 0.01)
    assert both.deviation == pytest.approx(0.01 * math.sqrt(3))  # no other number of replicas was measured
    assert both.extrapolated == pytest.approx(4.0)  # slices, measured with eight replicas
    rarer = PENALTIES.of(Method(100, streaming=True, slices=2), 2, 1, SIZE)
    assert rarer.log_ratio - both.log_ratio == pytest.approx(0.03)
    routed, alone = (PENALTIES.of(Method(30, pairs=True), 8, stages, SIZE) for stages in (2, 1))
    assert routed.log_ratio - alone.log_ratio == pytest.approx(0.01)
    narrow = PENALTIES.of(Method(ratio=100), 1, 8, SIZE)
    assert narrow.log_ratio == pytest.approx(0.15 * math.log(100) / math.log(8))
    assert narrow.extrapolated == pytest.approx(12.5)
    assert PENALTIES.of(Method(ratio=8), 4, 8, SIZE).extrapolated == 1.0  # of replicas it does not depend
    with pytest.raises(ConfigError, match="nothing has measured quantum"):
        PENALTIES.one("quantum", 1, 1, SIZE)
    table = _table(ROWS)
    with pytest.raises(ConfigError, match="parameters, a log_ratio, a deviation and a drift, got"):
        Penalties(table.assign(deviation=-1.0))
    with pytest.raises(ConfigError, match="parameters, a log_ratio, a deviation and a drift, got"):
        Penalties(table.assign(log_ratio=math.nan))
    for number in ("replicas", "amount", "parameters", "deviation", "drift"):
        for value in (math.nan, math.inf):
            with pytest.raises(ConfigError, match="parameters, a log_ratio, a deviation and a drift, got"):
                Penalties(table.assign(**{number: table[number].where(table.index > 0, value)}))
    for name, free in (("rounds", 30), ("slices", 1), ("subspace", 1)):
        with pytest.raises(ConfigError, match=f"nothing is paid for {name} = {free}: a table has no row of it"):
            Penalties(table.assign(amount=table.amount.where(table.ingredient != name, free).astype(float)))
    with pytest.raises(ConfigError, match=r"has the columns ingredient, .*; it lacks drift"):
        Penalties(table.drop(columns="drift"))
    with pytest.raises(ConfigError, match="the column amount of a table of penalties holds numbers, got"):
        Penalties(table.assign(amount="few"))
    with pytest.raises(ConfigError, match="a table of penalties has one row of each kind, got two of"):
        Penalties(pd.concat([table, table[:1]]))


def test_days_to_equal_loss_are_those_of_the_tokens_that_buy_it_back() -> None:
    table = plan(_cluster(100.0), JOB, PENALTIES)
    for row in table.itertuples():
        penalty, off = math.log1p(row.loss_percent / 100), row.loss_deviation / 100
        likely, low, high = (Law().factor(p, SIZE, JOB.tokens) for p in (penalty, penalty - off, penalty + off))
        assert row.days_to_equal_loss == pytest.approx(row.days * likely)
        assert row.days_to_equal_loss_low == pytest.approx(row.days * low)
        assert row.days_to_equal_loss_high == pytest.approx(row.days * high)


def test_the_committed_penalties_are_of_the_ladder_and_the_papers() -> None:
    """Else: python -m pipelines.run_notebook notebooks/80_ladder.ipynb page -p scale laptop."""
    shown, made = pd.read_csv(planner.measured_penalties()), penalties_of(LADDER)
    pd.testing.assert_frame_equal(shown, made, check_dtype=False)
    printed = Penalties.read(planner.measured_penalties())
    (eight,) = [r for r in published("scaling_laws", "losses") if (r["scale"], r["M"]) == ("1.3b", 8)]
    (base,) = [r for r in published("scaling_laws", "losses") if (r["scale"], r["method"]) == ("1.3b", "data_parallel")]
    found = printed.one("local updates", 1, 8, 1.3e9)
    assert found.source == "arXiv:2503.09799"
    assert found.log_ratio == pytest.approx(math.log(eight["loss"] / base["loss"]), abs=2 * 0.003)


def test_the_composed_run_is_the_method_whose_ingredients_are_summed() -> None:
    """`Penalties.composed` sums the ingredients of one method, which must be that of the ladder's run of all four."""
    (gap,) = Penalties(_table([*ROWS, ("composed", 4, 8, SIZE, 0.2, 0.01, "ours")])).composed()
    method = Method(30, streaming=True, pairs=True, slices=2, ratio=8)
    assert gap.summed == pytest.approx(sum(p.log_ratio for p in PENALTIES.parts(method, 4, 2, SIZE).values()))
    run = LADDER.configs("0.33M")["together/all"]
    assert (run.replicas, run.stages, run.model.dim // run.method.boundary.rank) == (4, 2, 8)
    planned = method.settings(run.model, run.stages)
    for name in (
        "sync_every_steps",
        "fragments",
        "overlap_steps",
        "mixing",
        "codec",
        "outer",
        "peers",
        "slices",
        "route",
    ):
        assert getattr(run.method, name) == getattr(planned, name), name


def test_the_first_row_becomes_a_project_that_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The project that --write makes is read as the same configuration, and two ranks of it train a few steps."""
    shape = "dim=32,layers=4,heads=2,ffn_dim=64,vocab_size=300,seq_len=32"
    words = ["--nodes", "2", "--memory-gb", "1", "--mbit-per-s", "3", "--tflops", "0.001", "--model", shape]
    words += ["--tokens", "400000", "--global-batch", "64", "--write", str(tmp_path / "here")]
    assert lowcomm(["plan", *words]) == 0
    said = capsys.readouterr().out
    assert "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint FIRST-MACHINE:29500" in said
    project = Project(tmp_path / "here")
    config = project.run_config("planned")
    table = plan(Cluster(2, 1.0, 0.001, Links(3.0)), Job(model_of(shape), 400_000, 64), _installed())
    first = next(table.itertuples())
    wanted = run_of(planner.method_of(first), Job(model_of(shape), 400_000, 64), first.replicas, first.stages)
    assert (config.model, config.method) == (wanted.model, wanted.method)
    assert (config.replicas, config.stages, config.train.steps) == (first.replicas, first.stages, wanted.train.steps)
    text = tmp_path / "here" / "corpus"
    text.mkdir()
    for number in range(60):
        words_ = [f"w{number * 7 % (k + 3)} is {chr(97 + k % 26)}{k}\n" for k in range(80)]
        (text / f"{number}.txt").write_text("".join(words_))
    quick = {"steps": 4, "warmup_steps": 0, "precision": "fp32", "compile": False, "eval_every": 0}
    short = project.run_config("planned", train=quick, method={"sync_every_steps": 4})
    summary = train_in_threads(short, prepared(project, "text"), project.run_folder(short))
    assert math.isfinite(summary["val_loss"])
    assert planner.main(words) == 2
    assert "params.yaml exists already" in capsys.readouterr().err


def test_blocks_are_computed_again_only_where_their_insides_do_not_fit() -> None:
    roomy, tight = (plan(_cluster(100.0, memory_gb=gb), JOB, PENALTIES) for gb in (500.0, 0.75))
    assert not roomy.recompute.any()
    assert tight.recompute.any()
    assert (tight.memory_gb <= 0.75).all()


def test_memory_does_not_depend_on_the_length_of_rounds() -> None:
    """The planner relies on it: what does not fit with the shortest rounds is not tried with longer ones."""
    for replicas, stages in ((2, 4), (4, 2), (8, 1)):
        tried = [*methods(replicas, stages), *withstanding(methods(replicas, stages), replicas)]
        held: dict[Method, set[int]] = {}
        for method in tried:
            held.setdefault(method.whatever_rounds, set()).add(node_bytes(run_of(method, JOB, replicas, stages)))
        assert len(held) < len(tried) / 3
        assert {len(found) for found in held.values()} == {1}


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = [
        "--nodes",
        "8",
        "--memory-gb",
        "24",
        "--mbit-per-s",
        "100",
        "--latency-ms",
        "40",
        "--model",
        "partial_updates/1.3b",
    ]
    table = tmp_path / "penalties.csv"
    _table(ROWS).to_csv(table, index=False)
    monkeypatch.setattr(planner, "measured_penalties", lambda: table)
    assert lowcomm(["plan", *words]) == 0
    said = capsys.readouterr().out
    assert "Times are lower bounds" in said
    assert said.startswith("8 machines of 24 GB that sustain 60 TFLOP/s, 100 Mbit/s and 40 ms between any two.\n")
    assert "1.34 billion parameters, on 2.68e+10 tokens, about 256 sequences of 1,024 tokens per step." in said
    assert "extrapolated: the largest factor between" in said
    for rows in (3, 5):
        planner.main([*words, "--rows", str(rows)])
        assert len(re.findall(r"\n\| (?:every|gradients).* x ", capsys.readouterr().out)) == rows
    planner.main([*words, "--per-box", "4", "--inside-mbit-per-s", "1e6", "--rows", "1"])
    boxes = capsys.readouterr().out
    assert "between any two boxes of 4, 1e+06 Mbit/s within one" in boxes
    assert "The first row shards each stage over the 4 machines of its box" in boxes
    assert "\nTo run the best row that does not (every " in boxes
    assert "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend" in boxes
    few = [*words, "--per-box", "8", "--inside-mbit-per-s", "1e6", "--memory-gb", "5", "--write", str(tmp_path / "no")]
    assert planner.main(few) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'no'} is not written: all rows that fit are sharded\n"
    assert not (tmp_path / "no").exists()
    planner.main([*words, "--memory-gb", "80", "--slow", "2", "--slow-speed", "0.25"])
    uneven = capsys.readouterr().out
    assert "between any two, the last 2 at 0.25 of that speed." in uneven
    assert "what that costs in loss no run has measured" in uneven
    assert "| method | replicas x stages |" in said
    monkeypatch.setattr(planner, "measured_penalties", lambda: tmp_path / "none" / "penalties.csv")
    assert planner.main([*words, "--penalties", str(table)]) == 0
    assert capsys.readouterr().out == said
    monkeypatch.setattr(planner, "measured_penalties", lambda: table)
    assert "| cost |" not in said
    assert planner.main([*words, "--nodes", "1", "--memory-gb", "1000", "--price", "2"]) == 0
    alone = capsys.readouterr().out
    assert alone.startswith("1 machine of 1000 GB that sustains 60 TFLOP/s")
    assert "| cost |" in alone
    for more, code, message in (
        (["--model", "partial_updates/13b"], 2, "no preset named 'partial_updates/13b'; did you mean"),
        (["--memory-gb", "1"], 1, "nothing fits into 1 GB: the least is "),
        (["--memory-gb", "1"], 1, "sequences per step would not fit either (--global-batch)"),
        (["--mbit-per-s", "0"], 2, "mbit_per_s must be above 0, got 0.0"),
        (["--latency-ms", "nan"], 2, "latency_ms must be from 0 to 1e+06, got nan"),
        (["--jitter", "1e200"], 2, "jitter must be from 0 to 100, got 1e+200"),
        (["--nodes", "0"], 2, "nodes must be above 0, and finite, got 0"),
        (["--nodes", "601"], 2, "601 nodes have no configuration: global_batch = 256 does not split into 601 replicas"),
        (["--global-batch", "-8"], 2, "global_batch must be above 0, and finite, got -8"),
        (["--tokens", "inf"], 2, "tokens must be above 0, and finite, got inf"),
        (["--tokens", "-5"], 2, "tokens must be above 0, and finite, got -5"),
        (["--tokens", "0"], 2, "tokens must be above 0, and finite, got 0"),
        (["--rows", "0"], 2, "--rows must be at least 1, got 0"),
        (["--per-box", "2"], 2, "and finite, got 0.0: it is the rate inside of boxes of 2"),
        (["--penalties", str(tmp_path)], 2, " is no file: "),
        (["--penalties", "nowhere/penalties.csv"], 2, "penalties.csv is no file"),
    ):
        with pytest.raises(SystemExit) as stopped:
            planner.main(words + more)
        assert stopped.value.code == code
        assert message in capsys.readouterr().err


#: Questions, each with what a sensible answer holds.
QUESTIONS = {
    "eight machines": ("--nodes 8 --memory-gb 24 --mbit-per-s 100 --latency-ms 40 --model partial_updates/1.3b", 1.3e9),
    "two boxes": (
        "--nodes 16 --per-box 8 --inside-mbit-per-s 3600000 --memory-gb 80 --tflops 400 --mbit-per-s 1000"
        " --latency-ms 5 --model partial_updates/1.3b",
        1.3e9,
    ),
    "32 at home": ("--nodes 32 --memory-gb 24 --mbit-per-s 50 --latency-ms 100 --model partial_updates/1.3b", 1.3e9),
    "seven": ("--nodes 7 --memory-gb 80 --mbit-per-s 1000 --latency-ms 40 --model partial_updates/1.3b", 1.3e9),
    "a folder of 7B": ("--nodes 16 --memory-gb 80 --mbit-per-s 1000 --latency-ms 40 --model FOLDER", 6.7e9),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_are_answered_with_sense(name: str, tmp_path: Path) -> None:
    """The first row saves days over gradients, by runs and tables that are not thousands of times away."""
    words, size = QUESTIONS[name]
    llama = ModelConfig(4096, 32, 32, 11008, 32_000, 4096)
    (tmp_path / "config.json").write_text(json.dumps(public_config(llama)))
    given = planner.arguments().parse_args(words.replace("FOLDER", str(tmp_path)).split())
    cluster, job = planner.asked_by(given)
    assert parameters(job.model).total == pytest.approx(size, rel=0.05)
    table = plan(cluster, job, _installed())
    first = table.iloc[0]
    assert first.sync_every_steps >= 30
    assert first.extrapolated < 20
    assert first.loss_deviation < 2
    gradients = table[(table.sync_every_steps == 0) & (table.ratio == 1) & ~table.muon]
    assert first.days_to_equal_loss_high < gradients.days_to_equal_loss.min()
    assert first.memory_gb <= cluster.memory_gb
    if name == "two boxes":
        assert first.replicas == 2  # one in each, so that only rounds cross between them
    if name == "seven":
        assert (first.global_batch % 7, abs(first.global_batch - 256) < 32) == (0, True)


def test_better_data_parallel_training_is_what_it_computes_or_sends() -> None:
    """On a fast link it computes all the time; on a slow one it sends 2 bytes of each parameter in a ring."""
    fast, slow = (planner.overlapped_days(_cluster(rate), JOB) for rate in (1e9, 1.0))
    flops = training_flops(MODEL, 1, MODEL.seq_len) / MODEL.seq_len * JOB.tokens
    assert fast == pytest.approx(flops / 8e12 / 86_400)
    steps = JOB.tokens / (JOB.global_batch * MODEL.seq_len)
    assert slow == pytest.approx(fast / 3 + steps * 2 * 7 / 8 * 16 * SIZE / 1e6 / 86_400)
    waiting = dataclasses.replace(_cluster(1e9), slow=2, slow_speed=0.5)
    assert planner.overlapped_days(waiting, JOB) == pytest.approx(2 * fast)
    boxes = dataclasses.replace(_cluster(1.0), per_box=4, inside_mbit_per_s=1e9)
    assert planner.overlapped_days(boxes, JOB) == pytest.approx(fast / 3 + (slow - fast / 3) * (1 / 2) / (7 / 8))


def test_presets_are_planned_on_machines_that_hold_them() -> None:
    for name in ("streaming_diloco/1b", "noloco/medium", "protocol_models/2b"):
        table = plan(Cluster(4, 500.0, 100.0, Links(1000.0)), Job(PRESETS[name], 1e9), PENALTIES)
        assert {1, 2, 4} == set(table.stages)
        assert (table.utilisation < 1 + 1e-9).all()
        assert (table.utilisation > 0).all()
