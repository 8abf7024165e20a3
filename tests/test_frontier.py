"""The front: what was planted stands in its rows, set beside what computes the same, with bytes and minutes by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from lowcomm.experiment.config import RunConfig
from lowcomm.methods.config import BoundaryConfig, MethodConfig
from lowcomm.model.accounting import parameters
from lowcomm.settings import ConfigError
from pipelines.ladder.fits import read_cells
from pipelines.ladder.frontier import (
    CHOICES,
    LATENCY,
    MICRO_BATCHES,
    MUON,
    RATES,
    ROWS,
    STAGES,
    YARDSTICK,
    crossing,
    flops_per_second,
    front_rows,
    hardship,
    minutes,
    piped,
    repaired,
    times_fewer,
    tuning_of,
    why_not,
    yardstick,
)
from pipelines.ladder.plan import LADDER, Ladder, base_of
from tests.conftest import small_run
from tests.harness import small_ladder

METHODS = """
methods:
  none: {exchange: none}
  averaging: {exchange: parameters, sync_every_steps: 4, outer: average}
  diloco: {exchange: parameters, sync_every_steps: 4, outer: nesterov, outer_lr: 0.7, outer_momentum: 0.9}
runs:
  data_parallel: {method: none, corpus: rows, replicas: 1, sizes: ladder, seeds: [0], variants: {batch: {}}}
  averaging: {method: averaging, corpus: rows, replicas: 2, sizes: ladder, seeds: [0]}
  diloco: {method: diloco, corpus: rows, replicas: 2, sizes: ladder, seeds: [0], variants: {m2: {}, m1: {replicas: 1}}}
  muon:
    <<: &one {method: none, corpus: rows, replicas: 1, sizes: ladder, seeds: [0]}
    override: &muon {train: {optimizer: muon, muon_lr: 0.02}}
    variants: {batch: {}}
  muloco: {<<: *one, method: diloco, replicas: 2, override: *muon, variants: {m2: {}}}
  selective:
    <<: *one
    method: diloco
    replicas: 2
    variants: {all: {method: {boundary: {kind: subspace, rank: 2}}}}
"""
PLAN = """
rungs: {a: {seeds: 2, tuned_at: a}}
rows:
  data_parallel/batch: {lines: [lr]}
  averaging: {from: data_parallel/batch}
  diloco/m1: {from: data_parallel/batch, lines: [lr, gain]}
  diloco/m2: {from: diloco/m1, lines: [lr, gain]}
  muon/batch: {from: data_parallel/batch, lines: [muon]}
  muloco/m2: {from: muon/batch, lines: [gain]}
  selective/all: {from: data_parallel/batch, lines: [gain]}
lines: {lr: {begin: 0.01, factor: 2.0}, gain: {begin: 2.0, factor: 2.0}, muon: {begin: 0.02, factor: 2.0}}
"""
#: Of each row its loss over data-parallel training's.
PLANTED = {
    "data_parallel/batch": 1.0,
    "averaging": 1.06,
    "diloco/m1": 0.99,
    "diloco/m2": 1.04,
    "muon/batch": 0.98,
    "muloco/m2": 1.01,
    "selective/all": 1.2,
}
SECONDS = (30.0, 24.0)
PIPELINE = f"{YARDSTICK}/pipeline"


@pytest.fixture
def ladder(tmp_path: Path) -> Ladder:
    """A ladder whose rows all have two seeds, of which the second was faster."""
    planted = small_ladder(tmp_path, tmp_path / "build", METHODS, PLAN)
    for row, factor in PLANTED.items():
        folder = planted.results / "points" / "a" / row
        folder.mkdir(parents=True)
        for seed, seconds in enumerate(SECONDS):
            told = {"seed": seed, "val_loss": (4.0 + 0.1 * seed) * factor, "seconds": seconds, "values": {}}
            told |= {"environment": {"device": "x86_64"}}
            (folder / f"seed{seed}.json").write_text(json.dumps(told))
    tuned = {row: {"values": {}, "tuning_loss": 4.0, "trials": 3} for row in PLANTED if row != "averaging"}
    planted.tuned_file("a").parent.mkdir()
    planted.tuned_file("a").write_text(yaml.safe_dump(tuned))
    return planted


def the_front(ladder: Ladder) -> dict[tuple[str, int], dict[str, Any]]:
    """The rows of the front by method and number of replicas."""
    return {(row["method"], row["replicas"]): row for row in front_rows(ladder, "a", read_cells(ladder))}


def test_each_row_is_set_beside_what_computes_the_same(ladder: Ladder) -> None:
    found = the_front(ladder)
    assert list(found) == [
        (YARDSTICK, 1),
        ("diloco/m1", 1),
        (MUON, 1),
        (YARDSTICK, 2),
        (MUON, 2),
        (PIPELINE, 2),  # beside selective/all
        ("averaging", 2),
        ("diloco/m2", 2),
        ("muloco/m2", 2),
        ("selective/all", 2),
    ]
    for (method, _), row in found.items():
        factor = PLANTED.get(method, 1.0)
        assert (row["seeds"], row["stages"]) == (2, 1 + (method in (PIPELINE, "selective/all")))
        assert (row["fewer_between"] > 1) == (method == "selective/all")
        assert row["loss"] == pytest.approx(4.05 * factor)
        assert row["gap_pct"] == pytest.approx(100 * (factor - 1))


def test_bytes_are_those_of_a_replica_and_fewer_is_against_data_parallel(ladder: Ladder) -> None:
    found, numel = the_front(ladder), parameters(ladder.configs("a")["averaging"].model).total
    assert found[YARDSTICK, 1]["bytes_per_step"] == found["diloco/m1", 1]["bytes_per_step"] == 0
    assert math.isinf(found["diloco/m1", 1]["fewer"])
    for method in (YARDSTICK, MUON, PIPELINE):
        assert found[method, 2]["bytes_per_step"] == pytest.approx(4 * numel)  # of two a half goes there, and back
        assert found[method, 2]["fewer"] == 1
    for method in ("averaging", "diloco/m2", "muloco/m2"):
        assert found[method, 2]["bytes_per_step"] == pytest.approx(numel)  # every 4 steps
        assert found[method, 2]["fewer"] == pytest.approx(4)


def test_on_the_front_is_what_no_row_of_as_many_replicas_beats_in_both(ladder: Ladder) -> None:
    on = {place for place, row in the_front(ladder).items() if row["on_front"]}
    assert on == {(MUON, 1), (MUON, 2), ("muloco/m2", 2)}


def test_a_row_is_beaten_by_the_seeds_that_both_have(ladder: Ladder) -> None:
    """A row of seed 0 alone, on which all rows do better, beats none by that."""
    file = ladder.results / "points" / "a" / "diloco" / "m2" / "seed1.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"val_loss": 3.0}))  # of both seeds the least
    assert the_front(ladder)["diloco/m2", 2]["on_front"]
    file.unlink()
    file = file.with_name("seed0.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"val_loss": 4.0 * 1.015}))
    assert not the_front(ladder)["diloco/m2", 2]["on_front"]
    assert the_front(ladder)["muloco/m2", 2]["on_front"]


def test_a_gpu_s_seconds_are_not_a_core_s(ladder: Ladder) -> None:
    speed, file = flops_per_second(ladder, "a"), ladder.results / "points" / "a" / YARDSTICK / "batch" / "seed1.json"
    told = json.loads(file.read_text()) | {"seconds": 1.0, "environment": {"device": "NVIDIA H200"}}
    file.write_text(json.dumps(told))
    assert flops_per_second(ladder, "a") == pytest.approx(speed * min(SECONDS) / max(SECONDS))


def test_minutes_are_of_the_fastest_core_and_of_what_is_sent(ladder: Ladder) -> None:
    """One replica takes as long as it took; two compute half of it each, and send a mean of gradients in each step."""
    found, config = the_front(ladder), ladder.configs("a")["averaging"]
    numel, steps = parameters(config.model).total, config.train.steps
    for rate in RATES:
        assert found[YARDSTICK, 1][f"minutes_{rate}"] == pytest.approx(min(SECONDS) / 60)
        wire = 8 * 4 * numel / (rate * 1e6) + 2 * LATENCY / 1e3
        assert found[YARDSTICK, 2][f"minutes_{rate}"] == pytest.approx((min(SECONDS) / 2 + steps * wire) / 60)
        assert found["diloco/m2", 2][f"minutes_{rate}"] < found[YARDSTICK, 2][f"minutes_{rate}"]
    speed = flops_per_second(ladder, "a")
    assert minutes(config, 2 * speed, math.inf) < minutes(config, speed, math.inf)


def test_a_speed_needs_a_point_of_data_parallel_training(ladder: Ladder) -> None:
    for file in (ladder.results / "points" / "a" / YARDSTICK / "batch").iterdir():
        file.unlink()
    with pytest.raises(ConfigError, match="no point of data_parallel/batch at a: python -m pipelines.ladder train a"):
        flops_per_second(ladder, "a")


def test_how_deep_a_row_was_tuned_is_the_plan_s_and_that_of_its_trials(ladder: Ladder) -> None:
    """The number of trials counts all that a row has had, also those of walks before the last one."""
    folder = ladder.results / "tuning" / "a" / "diloco" / "m2"
    folder.mkdir(parents=True)
    for lr in range(4):
        told = {"rung": "a", "row": "diloco/m2", "val_loss": 4.0, "values": {"lr": lr}}
        told["environment"] = {"device": "cpu"}
        (folder / f"lr={lr}.json").write_text(json.dumps(told))
    told = tuning_of(ladder, "a")
    assert told["diloco/m2"] == {"lines": "lr, gain", "trials": 4}
    assert told["averaging"] == {"lines": "", "trials": 0}
    assert the_front(ladder)["diloco/m2", 2]["lines"] == "lr, gain"


def composed(**boundary: Any) -> RunConfig:
    """A run of four replicas of two stages, with Muon inside and a boundary."""
    config = small_run("diloco_m2", replicas=4, stages=2, train={"global_batch": 16, "accumulation": 2})
    method = dataclasses.replace(config.method, boundary=BoundaryConfig(**boundary))
    train = dataclasses.replace(config.train, optimizer="muon", muon_lr=0.02)
    return dataclasses.replace(config, method=method, train=train)


def test_the_yardstick_has_the_same_batch_and_replicas_and_nothing_else() -> None:
    config = composed(kind="low_rank", rank=2)
    beside = yardstick(config)
    assert (beside.method, beside.stages) == (MethodConfig("gradients"), 1)
    assert (beside.train.optimizer, beside.train.accumulation) == ("adamw", 1)
    assert (beside.replicas, beside.train.global_batch) == (config.replicas, config.train.global_batch)


def test_times_fewer_is_of_both_axes() -> None:
    """Of a boundary in int8 a quarter is sent, and the blocks' scales; of half of the replicas the mean is."""
    dense = composed()
    assert times_fewer(yardstick(dense)) == (1.0, 1.0)
    among, between = times_fewer(dense)
    assert (among, between) == (pytest.approx(dense.method.sync_every_steps), 1.0)
    fewer = times_fewer(composed(codec="int8"))[1]
    assert 3.5 < fewer < 4
    assert 1 / times_fewer(composed(codec="int8", replicas=2))[1] == pytest.approx((1 + 1 / fewer) / 2)


def test_a_run_of_one_stage_counts_as_a_pipeline() -> None:
    config = small_run("diloco_m2", replicas=2, train={"global_batch": 16})
    assert (piped(config).stages, piped(config).train.accumulation) == (STAGES, MICRO_BATCHES)
    two = composed()
    assert piped(two) is two
    assert times_fewer(config)[1] == 1


def test_what_crosses_and_what_is_hard_is_said_in_words() -> None:
    subspace = dataclasses.replace(composed(), train=small_run(replicas=4, train={"global_batch": 16}).train)
    method = dataclasses.replace(subspace.method, boundary=BoundaryConfig("subspace", rank=4, replicas=2))
    subspace = dataclasses.replace(subspace, method=method)
    assert crossing(subspace) == f"a subspace of 4 of {subspace.model.dim}, in 2 of 4 replicas"
    low_rank = composed(kind="low_rank", rank=2, codec="e3m0", error_feedback=True)
    assert crossing(low_rank) == "low rank of 2, in e3m0, errors kept"
    projection = composed(kind="projection", rank=2, codec="e3m0")
    assert crossing(projection) == f"a projection on 2 of {projection.model.dim}, in e3m0"
    assert crossing(composed()) == "all values"
    unlike = dataclasses.replace(low_rank, train=dataclasses.replace(low_rank.train, alike=0.0))
    assert hardship(unlike) == "unlike text, H = 4"
    some = dataclasses.replace(low_rank, train=dataclasses.replace(low_rank.train, alike=0.25))
    assert hardship(some) == "25 % of the text alike, H = 4"
    liar = dataclasses.replace(low_rank, method=dataclasses.replace(low_rank.method, byzantine=1, mean="median"))
    assert hardship(liar) == "1 of 4 lies, median"
    loud = dataclasses.replace(liar, method=dataclasses.replace(liar.method, byzantine_factor=-8.0))
    assert hardship(loud) == "1 of 4 lies 8 times as loudly, median"


def test_the_share_of_a_harm_that_is_repaired() -> None:
    base = {0: 2.0, 1: 2.1, 2: 2.2}
    harmed = {seed: loss * math.exp(0.2 + 0.001 * seed) for seed, loss in base.items()}
    row = {seed: loss * math.exp(0.05) for seed, loss in base.items()}
    assert repaired(row, harmed, base) == pytest.approx(1 - 0.05 / 0.201)
    assert repaired(base, harmed, base) == pytest.approx(1)
    assert repaired(harmed, harmed, base) == 0
    worse = {seed: loss * math.exp(0.402) for seed, loss in base.items()}
    assert repaired(worse, harmed, base) == pytest.approx(-1)
    assert repaired(row | {3: 9.0}, harmed, base) == repaired(row, harmed, base)  # a seed that the others lack
    assert math.isnan(repaired({0: 2.1}, harmed, base))  # one seed
    assert math.isnan(repaired(row, {0: 1.8, 1: 3.0, 2: 2.2}, base))  # no harm that is told
    assert math.isnan(repaired(row, base, harmed))  # a gain


def test_choices_go_together_or_it_is_said_why_not() -> None:
    def told(one: str, other: str) -> str:
        return why_not(LADDER, "smoke", CHOICES[one], CHOICES[other])

    assert told("4 bits", "median") == ""
    assert told("median", "clipped") == "one choice"
    assert told("a replica that lies", "clipped") == ""
    assert "is about outer gradients: not with method.outer = gasloc" in told("GASLoC", "a replica that lies")
    assert told("elastic replicas", "streaming") == ""
    assert told("half of them compress", "elastic replicas").startswith("elastic replicas all compress between their")
    late = {"method": {"fragments": "strided", "layers_per_fragment": 2, "overlap_steps": [20]}}
    assert "elastic rounds come one after the other" in why_not(LADDER, "smoke", late, CHOICES["elastic replicas"])


def test_the_rows_of_the_page_are_the_plan_s() -> None:
    assert set(ROWS) <= set(LADDER.plan.rows)
    assert len(set(ROWS)) == len(ROWS)
    rungs = {rung: LADDER.configs(rung) for rung in ("0.12M", "0.33M")}
    assert set(ROWS) <= {row for configs in rungs.values() for row in configs}
    for configs in rungs.values():
        here = [row for row in ROWS if row in configs]
        assert {base_of(row, configs) for row in here} == {f"{YARDSTICK}/batch", f"{YARDSTICK}/doubled"}
    configs = rungs["0.12M"]
    for row in ("together/all", "hundred/projection"):
        assert (configs[row].stages, configs[row].train.accumulation) == (STAGES, MICRO_BATCHES)
