"""The ladder: its plan keeps what it promises, tuning finds what it looks for, and no finished point is done again."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import psutil
import pytest
import torch
import yaml

from lowcomm.experiment.batches import TokenData
from lowcomm.experiment.run_folder import RunFolder
from lowcomm.experiment.train import train_in_threads
from lowcomm.experiment.trainer import saved_model
from lowcomm.model.accounting import parameters
from lowcomm.settings import ConfigError
from pipelines import launch
from pipelines.ladder import __main__ as ladder_main
from pipelines.ladder import workers
from pipelines.ladder.__main__ import main, overview, prepare
from pipelines.ladder.carry import carried
from pipelines.ladder.fits import (
    at_their_best,
    beyond,
    each_at_its_best,
    evidence_at_best,
    gap_rows,
    read_cells,
    read_trials,
    told_over,
)
from pipelines.ladder.headline import read_pairs
from pipelines.ladder.margins import judged_margins
from pipelines.ladder.origin import Origin
from pipelines.ladder.plan import LADDER, Ladder, Line, Plan, Point, Row, base_of, deciding, read_plan
from pipelines.ladder.positions import PARTS, loss_by_position
from pipelines.ladder.rows import known
from pipelines.ladder.tune import best_trial, tune, walk_line, walk_row
from pipelines.project import write_whole
from pipelines.report import Comparison
from pipelines.settings import set_values
from tests.conftest import small_run
from tests.harness import as_if_predicted, clean_environment, small_ladder


def walked(walk, loss) -> tuple[dict[str, float], float, list[dict[str, float]]]:
    """Drive a walk over a loss in closed form; returns the best values, their loss, and what was tried."""
    tried = []
    try:
        values = next(walk)
        while True:
            tried.append(values)
            values = walk.send(loss(values))
    except StopIteration as end:
        return *end.value, tried


@pytest.mark.parametrize("begin", [0.001, 0.012, 0.3])
def test_a_line_is_walked_to_its_valley(begin: float) -> None:
    line = Line(begin, factor=2**0.5)

    def loss(values: dict[str, float]) -> float:
        return math.log(values["lr"] / 0.0115) ** 2

    start = {"lr": begin}
    best, found, tried = walked(walk_line(line, "lr", start, loss(start)), loss)
    assert abs(math.log(best["lr"] / 0.0115)) <= math.log(2) / 4 + 0.01  # the nearest of the grid
    assert found == loss(best)
    assert len({v["lr"] for v in tried}) == len(tried)  # nothing twice
    beside = {line.beside(best["lr"], way) for way in (1, -1)}
    assert beside <= {begin, *(v["lr"] for v in tried)}  # both neighbours are known to be worse


def test_a_walk_ends_at_the_last_value_and_shuns_what_diverges() -> None:
    line = Line(0.5, values=(0.0, 0.3, 0.5, 0.8))
    best, _, tried = walked(walk_line(line, "m", {"m": 0.5}, 2.0), lambda v: math.nan if v["m"] == 0.8 else 1 + v["m"])
    assert best == {"m": 0.0}
    assert [v["m"] for v in tried] == [0.8, 0.3, 0.0]


def test_a_row_is_walked_line_by_line_from_what_it_is_given() -> None:
    plan = Plan({}, {}, {"lr": Line(1.0, factor=2.0), "gain": Line(1.0, factor=2.0)})

    def loss(v: dict[str, float]) -> float:  # a valley that runs aslant
        x, y = math.log2(v["lr"]) - 1, math.log2(v["gain"]) - 2
        return x**2 + y**2 + x * y / 2 + v["std"]

    row = Row("method", ("lr", "gain", "lr", "gain"), begin=(("gain", 16.0), ("std", 9.0)))
    best, found, tried = walked(walk_row(plan, row, [{"std": 0.0}]), loss)
    assert best == {"lr": 2.0, "gain": 4.0, "std": 0.0}
    assert found == 0
    assert tried[0] == {"lr": 1.0, "gain": 16.0, "std": 0.0}  # the row's own beginning, and what is known already


def test_a_row_is_walked_from_the_better_of_its_starts() -> None:
    plan = Plan({}, {}, {"lr": Line(1.0, factor=2.0)})
    row, losses = Row("method", ("lr",)), {1.0: 3.0, 2.0: 4.0, 4.0: 5.0, 8.0: 2.0, 16.0: 1.0, 32.0: 6.0}  # two valleys
    for starts in ([{"lr": 1.0}, {"lr": 8.0}], [{"lr": 8.0}, {"lr": 1.0}]):
        best, found, tried = walked(walk_row(plan, row, starts), lambda v: losses.get(v["lr"], 7.0))
        assert (best, found) == ({"lr": 16.0}, 1.0)
        assert tried[:2] == starts
    for starts in ([{"lr": 1.0}, {"lr": 8.0}], [{"lr": 8.0}, {"lr": 1.0}]):
        best, found, _ = walked(walk_row(plan, row, starts), lambda v: math.nan if v["lr"] > 1 else 2 - v["lr"])
        assert (best["lr"], found) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rungs": {"a": {"seeds": 1, "tuned_at": "z"}}}, "no rung to tune a at named 'z'"),
        ({"rows": {"one": {"from": "two"}, "two": {}}}, "rows.one begins from 'two', which must stand before it"),
        ({"rows": {"one": {"lines": ["ln"]}}}, "no line of rows.one named 'ln'"),
        ({"rows": {"one": {"begin": {"gian": 1.0}}}}, "no line of rows.one named 'gian'"),
        ({"rows": {"one": {"rungs": ["a"]}}}, "no rung of rows.one named 'a'"),
        ({"rows": {"one": {"seeds": {"a": 3}}}}, "no rung of rows.one.seeds named 'a'"),
        (
            {"rungs": {"a": {"seeds": 1, "tuned_at": "a", "rows": []}}, "rows": {"one": {"seeds": {"a": 3}}}},
            "rows.one.seeds has 'a', a rung that does not have this row",
        ),
        ({"rows": {"one": {"seeds": 3}}}, "rows.one.seeds = 3 must say how many at which rung"),
        ({"published": {"one": "noloco/smal"}}, "no size of published.one named 'noloco/smal'"),
        ({"rows": {"one": {"line": ["lr"]}}}, "unknown key rows.one.line in plan.yaml; did you mean 'lines'"),
        ({"headline": {"rung": "z", "rows": ["one"]}}, "no rung of the headline named 'z'"),
        (
            {"rungs": {"a": {"seeds": 1, "tuned_at": "a"}}, "headline": {"rung": "a", "rows": ["two"]}},
            "headline.rows has 'two', which is no row of rungs.a",
        ),
        ({"rungs": {"a": {"tuned_at": "a"}}}, "rungs.a in plan.yaml needs seeds"),
        (
            {"rungs": {"a": {"seeds": "three", "tuned_at": "a"}}},
            "rungs.a.seeds must be a whole number from 0 on, got 'three'",
        ),
        ({"rungs": {"a": None}}, "rungs.a in plan.yaml needs seeds"),
        (
            {"rungs": {"a": {"seeds": 1, "tuned_at": "b"}, "b": {"seeds": 1, "tuned_at": "a"}}},
            "rungs.a.tuned_at = 'b' is a rung that is not tuned itself",
        ),
        ({"rows": {"one": ["lr"]}}, r"rows.one in plan.yaml must have keys, got \['lr'\]"),
        ({"lines": {"outer_lr": {"begin": 1.0, "factor": 2.0}}}, "no line named 'outer_lr'"),
        ({"lines": {"lr": {"factor": 2.0}}}, "lines.lr in plan.yaml needs begin"),
        ({"lines": {"lr": {"begin": 0, "factor": 2.0}}}, "lines.lr.begin = 0 must be above 0"),
        ({"lines": {"lr": {"begin": 1.0}}}, "a line needs either a factor above 1 or values"),
        ({"lines": {"lr": {"begin": 1.0, "values": [2.0]}}}, "must ascend and hold where it begins, 1.0"),
        ({"lines": {"lr": {"begin": "1e-2", "factor": 2.0}}}, "lines.lr.begin = '1e-2' must be a number"),
        ({"rungs": {"a": {"seeds": -1, "tuned_at": "a"}}}, "rungs.a.seeds must be a whole number from 0 on, got -1"),
        ({"rows": {"one": {"seeds": {"a": 1.5}}}}, "rows.one.seeds.a must be a whole number from 0 on, got 1.5"),
        ({"rows": {"one": {"begin": 3}}}, "rows.one.begin in plan.yaml must have keys, got 3"),
        ({"rows": {"one": {"lines": "lr"}}}, "rows.one.lines in plan.yaml must be a list, got 'lr'"),
        ({"lines": {"lr": {"begin": 1.0, "values": 3}}}, "lines.lr.values in plan.yaml must be a list, got 3"),
        ({"published": ["one"]}, r"published in plan.yaml must have keys, got \['one'\]"),
        ({"rungs": {"a": {"seeds": 1, "tuned_at": "b"}, "b": None}}, "rungs.a.tuned_at = 'b' is a rung that is not"),
        (
            {"rows": {"one": {"lines": ["lr"], "begin": {"lr": 3.0}}}, "lines": {"lr": {"begin": 1, "values": [1, 2]}}},
            "rows.one.begin.lr = 3 is not among that line's values, 1.0, 2.0",
        ),
    ],
)
def test_a_plan_that_cannot_be_is_refused(change: dict, message: str, tmp_path: Path) -> None:
    plan = {"rungs": {}, "rows": {"one": {}}, "lines": {"lr": {"begin": 1.0, "factor": 2.0}}} | change
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    with pytest.raises(ConfigError, match=message):
        read_plan(tmp_path / "plan.yaml")


def test_a_row_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    """Else the first would be lost without a word."""
    file = tmp_path / "plan.yaml"
    file.write_text("rungs: {}\nlines: {}\nrows:\n  one: {seeds: {}}\n  two: {}\n  one: {}\n")
    with pytest.raises(ConfigError, match="plan.yaml is not YAML: key 'one' is named twice in .*, line 6, column 3"):
        read_plan(file)
    file.write_text("rungs: {}\nlines: {}\nrows:\n")
    assert read_plan(file).rows == {}
    file.write_text("rungs: {")
    with pytest.raises(ConfigError, match="plan.yaml is not YAML: while parsing"):
        read_plan(file)


def test_a_line_that_means_nothing_for_a_row_is_refused(small: Ladder) -> None:
    """If it were not refused, all trials of the line would be one and the same run."""
    with pytest.raises(ConfigError, match="row plain: gain means nothing without outer steps that have a rate"):
        _ = small.trial(Row("plain", ("lr", "gain")), "a", {"gain": 2.0}).config


def test_a_point_is_of_all_settings_that_decide_its_outcome() -> None:
    settings = set_values(LADDER.results_at("0.33M", ["together/all"])[0].config)
    found = deciding(settings)
    assert {"model", "method", "train", "data", "replicas", "stages", "seed"} <= found.keys()
    assert settings.keys() - found.keys() <= {"comm", "checkpoint"}
    assert settings["train"].keys() - found["train"].keys() <= {"log_every", "compile"}


def test_a_row_is_at_its_own_rungs(tmp_path: Path) -> None:
    there = {"seeds": 1, "tuned_at": "a"}
    plan = {
        "rungs": {"a": there, "b": there, "c": there | {"rows": ["one"]}},
        "rows": {"one": {}, "two": {"rungs": ["b"]}},
        "lines": {},
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    rungs = read_plan(tmp_path / "plan.yaml").rungs
    assert {name: rung.rows for name, rung in rungs.items()} == {"a": ("one",), "b": ("one", "two"), "c": ("one",)}


def test_the_plan_is_in_the_regime_that_it_promises() -> None:
    """20 tokens per parameter (long rows: 40), 512 per replica and step, 100 rounds from 0.33M on; pairs are pairs.

    But for rows of 32 replicas, which show what owners of slices do and which no claim is about.
    """
    plan = LADDER.plan

    def tuned(name: str) -> set[str]:
        row = plan.rows[name]
        return {*row.lines, *(tuned(row.start) if row.start else ())}

    for rung in plan.rungs.values():
        configs = LADDER.configs(rung.name)
        for name in rung.rows:
            begin = {line: plan.lines[line].begin for line in tuned(name)} | dict(plan.rows[name].begin)
            point = LADDER.trial(plan.rows[name], rung.name, begin)
            config = point.config
            t = config.train
            tokens = t.steps * t.global_batch * t.seq_len
            length = 2 if name.endswith("/long") else 1
            assert 19 < tokens / length / parameters(config.model).total < 20.5, point.title
            assert config.local_batch * t.seq_len >= (128 if config.replicas == 32 else 512)
            assert t.eval_split == "tuning"
            if config.exchanges_parameters and rung.name != "0.12M":
                rounds = t.steps // config.method.sync_every_steps
                assert rounds >= (30 if name == "streaming/h100" else 100), point.title
            base = "long" if length == 2 else "doubled" if t.global_batch == 32 else "batch"
            assert base_of(name, configs) == f"data_parallel/{base}"
            yardstick = configs[f"data_parallel/{base}"]
            assert (t.steps, t.global_batch, config.data) == (
                yardstick.train.steps,
                yardstick.train.global_batch,
                yardstick.data,
            )


def test_a_curve_is_the_mean_of_each_part() -> None:
    rows = [{"step": step, "loss": float(step % 2)} for step in range(1, 65)]
    assert workers.curve(rows) == [(step, 0.5) for step in range(2, 65, 2)]
    assert workers.curve(rows[:3]) == [(1, 1.0), (2, 0.0), (3, 1.0)]


def test_a_row_may_have_fewer_seeds_than_its_rung_or_more() -> None:
    plan = LADDER.plan
    for rung, row, seeds in (
        ("0.12M", "diloco/m2", 5),
        ("0.12M", "muon/batch", 3),
        ("0.33M", "diloco/m2", 5),
        ("0.33M", "streaming/h100", 3),
        ("1.05M", "diloco/m2", 3),
        ("1.05M", "partial/half", 3),
    ):
        assert plan.rungs[rung].seeds_of(plan.rows[row]) == seeds
    points = LADDER.results_at("0.12M", ["diloco/m2", "averaging"])
    assert len(points) == 10
    two = dataclasses.replace(plan.rows["averaging"], seeds={"0.12M": 2})
    fewer = dataclasses.replace(plan, rows=plan.rows | {"averaging": two})
    ladder = Ladder(LADDER.folder, LADDER.build, LADDER.results)
    ladder.__dict__["plan"] = fewer
    assert [p.seed for p in ladder.results_at("0.12M", ["averaging"])] == [0, 1]


def test_gain_and_momentum_are_settings_of_the_outer_step() -> None:
    rows = LADDER.plan.rows
    values = {"lr": 0.01, "gain": 2.4, "momentum": 0.5, "embedding": 0.3, "warmup": 0.1}
    nesterov, pulled, average = (
        LADDER.trial(rows[name], "0.12M", values).config for name in ("diloco/m2", "noloco/m4", "averaging")
    )
    assert (nesterov.method.outer_lr, nesterov.method.outer_momentum, nesterov.method.outer_pull) == (1.2, 0.5, 0.0)
    assert (pulled.method.outer_lr, pulled.method.outer_pull) == (1.2, 1.2)
    assert average.method.outer_lr == 1.0
    rising = {"gain": 2.0, "momentum": 0.6, "rise": 0.35}
    for row, pull in (("diloco/rising_momentum", 0.0), ("noloco/rising_momentum", 0.8)):
        method = LADDER.trial(rows[row], "0.12M", rising).config.method
        assert (method.outer_lr, method.outer_momentum_points) == (0.8, ("0@0", "0.6@0.35"))
        assert (method.outer_momentum, method.outer_pull) == (0.0, pull)
    falling = rows["diloco/falling_momentum"]
    method = LADDER.trial(falling, "0.12M", {"gain": 2.0}).config.method
    assert (method.outer_lr, method.outer_momentum_points[-1]) == (0.4, "0.8@0.2")
    for step in (0, 60, 112, 200, 1120):  # at one gain all along
        outer = LADDER.trial(falling, "0.12M", {"gain": 2.0}).config.plan().outer_at(step, 1120)
        assert outer.lr / (1 - outer.momentum) == pytest.approx(2.0)
    with pytest.raises(ConfigError, match="falling_momentum: a momentum means nothing where it follows points"):
        LADDER.overrides(falling, "0.12M", {"gain": 2.0, "momentum": 0.5})
    assert (nesterov.train.lr, nesterov.train.warmup_steps, nesterov.model.embedding_std) == (0.01, 112, 0.3)


METHODS = """
methods:
  none: {exchange: none}
  diloco: {exchange: parameters, sync_every_steps: 4, outer: nesterov, outer_lr: 0.7, outer_momentum: 0.9}
runs:
  plain: {method: none, corpus: rows, replicas: 1, sizes: ladder, seeds: [0]}
  diloco:
    {method: diloco, corpus: rows, replicas: 2, sizes: ladder, seeds: [0], variants: {m2: {}, m4: {replicas: 4}}}
"""
PLAN = """
headline: {rung: a, rows: [plain, diloco/m2]}
rungs:
  a: {seeds: 2, tuned_at: a}
  b: {seeds: 1, tuned_at: a, rows: [plain, diloco/m2]}
rows:
  plain: {lines: [lr]}
  diloco/m2: {from: plain, lines: [gain, momentum]}
  diloco/m4: {from: diloco/m2}
lines:
  lr: {begin: 0.01, values: [0.001, 0.01, 0.02]}
  gain: {begin: 1.0, values: [1.0, 2.0]}
  momentum: {begin: 0.9, values: [0.9, 1.0]}  # 1.0 is refused
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ladder:
    """A ladder of two rungs and three rows, whose points take a second; of workers, which take longer, there is one."""
    for module in (launch, workers):
        monkeypatch.setattr(module, "cores", lambda: 1)
    ladder = small_ladder(tmp_path, tmp_path / "build", METHODS, PLAN)
    as_if_predicted(ladder)
    return ladder


def outcomes(ladder: Ladder) -> dict[str, tuple[float, int]]:
    """The loss of each point, and when it was written."""
    files = sorted({*ladder.results.rglob("*.json")} - {ladder.results / "origin.json"})
    return {
        str(f.relative_to(ladder.results)): (json.loads(f.read_text())["val_loss"], f.stat().st_mtime_ns) for f in files
    }


def anew(ladder: Ladder) -> Ladder:
    """The same ladder as a new process would see it."""
    return Ladder(ladder.folder, ladder.build, ladder.results)


class InClosedForm:
    """Stands in for `Workers`: the loss of a point is a function of its rung and values."""

    def __init__(self, loss: Callable[[str, dict[str, float]], float]):
        self.loss, self.asked = loss, []

    def run(self, tasks: Sequence[workers.Task]) -> None:
        waiting = list(tasks)
        while waiting:
            task, told = waiting.pop(0), None
            try:
                while True:
                    point = task.send(told)
                    values = dict(point.values)
                    self.asked.append((point.rung, point.row.name, values))
                    told = {"val_loss": self.loss(point.rung, values)}
            except StopIteration as end:
                waiting += end.value


TWO_RUNGS = """
rungs: {a: {seeds: 1, tuned_at: a}, b: {seeds: 1, tuned_at: b}}
rows:
  plain: {lines: [lr]}
  diloco/m2: {from: plain, lines: [lr, gain]}
  diloco/m4: {from: diloco/m2}
lines:
  lr: {begin: 0.01, factor: 2.0}
  gain: {begin: 1.0, factor: 2.0}
"""


def test_a_row_of_a_larger_rung_begins_with_the_better_of_two(tmp_path: Path) -> None:
    """A row begins with its values at the rung below or its parent's here; without lines it has its parent's."""
    ladder = small_ladder(tmp_path, tmp_path / "build", METHODS, TWO_RUNGS)
    best = {"a": 0.04, "b": 0.005}

    def loss(rung: str, v: dict[str, float]) -> float:
        return math.log2(v["lr"] / best[rung]) ** 2 + math.log2(v.get("gain", 1.0) / 2) ** 2

    first, second = InClosedForm(loss), InClosedForm(loss)
    assert tune(ladder, "a", first)["diloco/m2"]["values"] == {"lr": 0.04, "gain": 2.0}
    found = tune(ladder, "b", second)
    assert found == ladder.read_tuned("b")
    begun = [values for _, row, values in second.asked if row == "diloco/m2"][:2]
    assert begun == [{"lr": 0.04, "gain": 2.0}, {"lr": 0.005, "gain": 1.0}]  # 9 off, and 1 off
    assert found["diloco/m2"]["values"] == {"lr": 0.005, "gain": 2.0}
    walked_on = [values for _, row, values in second.asked if row == "diloco/m2"][2:]
    assert all(values["lr"] <= 0.01 for values in walked_on)  # from the better one
    assert found["diloco/m4"] == {"values": found["diloco/m2"]["values"], "trials": 0}
    assert found["diloco/m2"]["tuning_loss"] == 0


def test_a_row_begins_with_its_best_trial_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ladder = small_ladder(tmp_path, tmp_path / "build", METHODS, TWO_RUNGS)
    monkeypatch.setattr(Point, "made_from", lambda point: "this code")
    row = ladder.plan.rows["diloco/m2"]
    assert best_trial(ladder, row, "a") == []
    assert known(ladder) == {name: {} for name in ladder.plan.rows}  # nothing is tuned yet
    trials = ((0.01, 3.5, "this code"), (0.02, 3.0, "this code"), (0.04, 2.0, "older code"), (0.08, None, "this code"))
    for lr, loss, made_from in trials:
        file = ladder.trial(row, "a", {"lr": lr, "gain": 4.0}).file
        file.parent.mkdir(parents=True, exist_ok=True)
        told = {"values": {"lr": lr, "gain": 4.0}, "val_loss": loss, "made_from": made_from}
        file.write_text(json.dumps(told))
    assert best_trial(ladder, row, "a") == [{"lr": 0.02, "gain": 4.0}]
    walked = InClosedForm(lambda _, v: abs(v["lr"] - 0.02) + abs(v.get("gain", 4.0) - 4))
    assert tune(ladder, "a", walked)["diloco/m2"]["values"] == {"lr": 0.02, "gain": 4.0}
    begun = [values for _, name, values in walked.asked if name == "diloco/m2"][:2]
    assert begun == [{"lr": 0.02, "gain": 1.0}, {"lr": 0.02, "gain": 4.0}]  # its parent's, and its own


def test_what_has_been_found_and_still_stands_is_walked_again_only_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder = small_ladder(tmp_path, tmp_path / "build", METHODS, TWO_RUNGS)
    code = ["this code"]
    monkeypatch.setattr(Point, "made_from", lambda point: code[0])

    def loss(_: str, v: dict[str, float]) -> float:
        return math.log2(v["lr"] / 0.02) ** 2 + math.log2(v.get("gain", 2.0) / 2) ** 2

    def walked(*rows: str) -> set[str]:
        asked = InClosedForm(loss)
        tune(ladder, "a", asked, rows)
        return {row for _, row, _ in asked.asked}

    assert walked() == {"plain", "diloco/m2"}
    for name, found in ladder.read_tuned("a").items():
        file = ladder.trial(ladder.plan.rows[name], "a", found["values"]).file
        file.parent.mkdir(parents=True, exist_ok=True)
        told = {"values": found["values"], "val_loss": found.get("tuning_loss"), "made_from": "this code"}
        file.write_text(json.dumps(told))
    assert walked() == set()
    assert walked("diloco/m2") == {"diloco/m2"}
    row = ladder.plan.rows["diloco/m4"]
    ladder.plan.rows["diloco/m4"] = dataclasses.replace(row, lines=("lr",))
    assert walked() == {"diloco/m4"}  # what it has is its parent's
    ladder.plan.rows["diloco/m4"] = row
    write_whole(
        ladder.tuned_file("a"), ladder.tuned_file("a").read_text().replace("tuning_loss: 0.0", "tuning_loss: 0.1")
    )
    assert walked() == {"plain", "diloco/m2"}  # whose trials have another loss
    code[0] = "another code"
    assert walked() == {"plain", "diloco/m2"}


def test_commands_of_one_checkout_prepare_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ladder = small_ladder(tmp_path, tmp_path / "build", METHODS, TWO_RUNGS)
    begun, go_on = [], threading.Event()

    def preparing(*_: object) -> None:
        begun.append(threading.current_thread().name)
        go_on.wait(60)

    monkeypatch.setattr(ladder_main, "_prepare", preparing)
    threads = [threading.Thread(target=prepare, args=(ladder,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    assert len(begun) == 1
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert len(begun) == 2


def test_a_row_without_a_probe_is_told_what_makes_one(tmp_path: Path) -> None:
    ladder = small_ladder(tmp_path, tmp_path / "build", METHODS, TWO_RUNGS)
    row = ladder.plan.rows["diloco/m4"]
    with pytest.raises(ConfigError, match=r"no probe .*diloco\.json: python -m pipelines\.ladder prepare"):
        ladder.probe(row)
    probes = ladder.build / "probes"
    probes.mkdir(parents=True)
    (probes / "diloco.json").write_text('{"m2": "a digest"}')
    assert ladder.probe(ladder.plan.rows["diloco/m2"]) == "a digest"
    with pytest.raises(ConfigError, match=r"no probe in .*diloco\.json \(.* prepare\) named 'm4'; did you mean 'm2'"):
        ladder.probe(row)


def test_some_rows_are_tuned_from_what_is_known_of_their_parents(tmp_path: Path) -> None:
    ladder = small_ladder(tmp_path, tmp_path / "build", METHODS, TWO_RUNGS)

    def loss(_: str, v: dict[str, float]) -> float:
        return math.log2(v["lr"] / 0.04) ** 2 + math.log2(v.get("gain", 1.0) / 2) ** 2

    with pytest.raises(ConfigError, match="diloco/m2 begins from plain, which has not been tuned at a: name both"):
        tune(ladder, "a", InClosedForm(loss), ["diloco/m2"])
    with pytest.raises(ConfigError, match="no row of a named 'diloco/m3'; did you mean"):
        tune(ladder, "a", InClosedForm(loss), ["diloco/m3"])
    assert list(tune(ladder, "a", InClosedForm(loss), ["plain"])) == ["plain"] == list(ladder.read_tuned("a"))
    walked = InClosedForm(loss)
    assert list(tune(ladder, "a", walked, ["diloco/m4", "diloco/m2"])) == ["diloco/m2", "diloco/m4"]
    assert walked.asked[0] == ("a", "diloco/m2", {"lr": 0.04, "gain": 1.0})  # from its parent, which was tuned before
    assert {row for _, row, _ in walked.asked} == {"diloco/m2"}
    kept = ladder.read_tuned("a")
    assert list(kept) == ["plain", "diloco/m2", "diloco/m4"]
    assert kept == tune(ladder, "a", InClosedForm(loss))

    def breaks(_: str, v: dict[str, float]) -> float:
        if "gain" in v:
            raise RuntimeError("a worker has died")
        return math.log2(v["lr"] / 0.01) ** 2

    with pytest.raises(RuntimeError):
        tune(ladder, "a", InClosedForm(breaks))
    assert ladder.read_tuned("a") == kept | {"plain": ladder.read_tuned("a")["plain"]}  # what was found stays found
    assert ladder.read_tuned("a")["plain"]["values"] == {"lr": 0.01}


def test_two_commands_that_tune_at_once_keep_what_both_have_found(tmp_path: Path) -> None:
    ladder = small_ladder(tmp_path, tmp_path / "build", METHODS, TWO_RUNGS)
    tune(ladder, "a", InClosedForm(lambda _, v: math.log2(v["lr"] / 0.04) ** 2))

    def meanwhile(_: str, v: dict[str, float]) -> float:
        if "gain" in v:  # while this command walks the second row, another has walked the first anew
            known = yaml.safe_load(ladder.tuned_file("a").read_text())
            known["plain"] |= {"values": {"lr": 0.02}}
            write_whole(ladder.tuned_file("a"), yaml.safe_dump(known))
        return math.log2(v["lr"] / 0.04) ** 2 + math.log2(v.get("gain", 1.0) / 2) ** 2

    tune(ladder, "a", InClosedForm(meanwhile), ["diloco/m2"])
    found = ladder.read_tuned("a")
    assert (found["plain"]["values"], found["diloco/m2"]["values"]["gain"]) == ({"lr": 0.02}, 2.0)
    assert "diloco/m4" not in yaml.safe_load(ladder.tuned_file("a").read_text())  # which has no lines


def test_a_value_that_a_line_has_no_more_is_left_out(tmp_path: Path) -> None:
    """A row that was tuned to it begins where its line begins."""
    ladder = small_ladder(tmp_path, tmp_path / "build", METHODS, PLAN)
    write_whole(ladder.tuned_file("a"), yaml.safe_dump({"plain": {"values": {"lr": 0.005}, "trials": 1}}))
    walked = InClosedForm(lambda *_: 3.0)
    tune(ladder, "a", walked, ["diloco/m2"])
    assert walked.asked[0][2] == {"gain": 1.0, "momentum": 0.9}


@pytest.mark.longest
def test_points_are_those_of_plain_runs_and_none_is_done_again(small: Ladder, capsys: pytest.CaptureFixture) -> None:
    for words in (["tune", "a"], ["train", "a"], ["train", "b"]):
        assert main(words, small) == 0, capsys.readouterr().err
    done = outcomes(small)
    assert sum(name.startswith("points/a/") for name in done) == 6
    assert sum(name.startswith("points/b/") for name in done) == 2
    tuned = small.read_tuned("a")
    trials = {name: loss for name, (loss, _) in done.items() if name.startswith("tuning/a/plain/")}
    assert len(trials) >= 2
    assert f"lr={tuned['plain']['values']['lr']:g}" in min(trials, key=trials.get)
    assert set(tuned["diloco/m4"]["values"]) == {"lr", "gain", "momentum"}
    assert tuned["diloco/m2"]["values"]["momentum"] == 0.9
    for point in small.results_at("b"):  # transferred as it was found at "a", and on the validation split
        assert dict(point.values) == tuned[point.row.name]["values"]
        assert point.config.train.eval_split == "validation"
        plain = train_in_threads(point.config, point.data, small.build / "again" / point.row.name)
        assert plain["val_loss"] == point.read()["val_loss"]
    assert f"{'plain':30}{len(trials):7}   2 of 2   " in overview(small)

    again = small.build / "headline"
    with pytest.raises(ConfigError, match="plain at a, seed 0 is not in .*plain: dvc repro headline"):
        read_pairs(small, again)
    (again / "points" / "a" / "old").mkdir(parents=True)
    (again / "points" / "a" / "old" / "seed0.json").write_text("{}")
    probes = small.build / "probes"
    before = (probes / "diloco.json").read_text()
    assert main(["headline"], small) == 0
    assert (probes / "diloco.json").read_text() == before  # those of other rows may be in use
    shutil.rmtree(probes)
    prepare(small, headline=True)
    assert list(json.loads((probes / "diloco.json").read_text())) == ["m2"]  # no others than it needs
    told = json.loads((small.build / "headline-made-from.json").read_text())
    assert [pair.point.title for pair in read_pairs(small, again)] == ["plain at a, seed 0", "diloco/m2 at a, seed 0"]
    assert told == {pair.point.row.name: pair.there["made_from"] for pair in read_pairs(small, again)}
    for pair in read_pairs(small, again):  # the same run, but for clock and machine
        assert pair.there.keys() - pair.here.keys() == {"seconds", "environment"}
        assert pair.here.items() <= pair.there.items()
        assert [step for step, _ in pair.here["curve"]] == list(range(1, 13))
        assert len(pair.here["loss_by_position"]) == PARTS
    assert len(list(again.rglob("*.json"))) == 2  # what the plan does not have is gone
    origin = small.origin
    dataclasses.replace(origin, corpora={name: ["another"] for name in origin.corpora}).write(small.results)
    assert main(["headline"], small) == 0
    assert {pair.here["python"] for pair in read_pairs(small, again)} == {platform.python_version()}
    origin.write(small.results)
    assert main(["headline"], small) == 0
    assert all("python" not in pair.here for pair in read_pairs(small, again))

    rows = known(small)
    assert set(rows) == set(small.plan.rows)
    assert rows["plain"].keys() == {"a", "b"}
    assert rows["plain"]["b"]["settings"]["train"]["lr"] == tuned["plain"]["values"]["lr"]
    file = small.results / "points" / "a" / "plain" / "seed1.json"
    file.write_text(file.read_text() + "\n")
    now = known(small)
    assert {name for name in rows if now[name] != rows[name]} == {"plain"}
    assert {key for key, value in rows["plain"]["a"].items() if now["plain"]["a"][key] != value} == {"seed 1"}
    done = outcomes(small)

    for words in (["tune", "a"], ["train", "a"], ["train", "b"]):  # on another machine, even
        assert main(words, anew(small)) == 0
    assert outcomes(small) == done

    params = small.folder / "params.yaml"
    params.write_text(params.read_text().replace("sync_every_steps: 4", "sync_every_steps: 3"))
    assert main(["train", "b"], anew(small)) == 0
    changed = {name for name, outcome in outcomes(small).items() if outcome != done[name]}
    assert changed == {"points/b/diloco/m2/seed0.json"}

    for what in ("train", "predict"):
        assert main([what, "c"], small) == 1
        assert "no rung named 'c'" in capsys.readouterr().err
    (small.results / "predictions.yaml").unlink()
    assert main(["train", "b"], small) == 1
    assert "has not been predicted at b: python -m pipelines.ladder predict b" in capsys.readouterr().err
    assert main(["predict", "b", "diloco/m2"], small) == 1
    assert "at b are there already" in capsys.readouterr().err
    assert main(["tune", "b"], small) == 1
    assert "rung b takes what was found at a: nothing is tuned at it" in capsys.readouterr().err


@pytest.mark.longest
@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_ladder_that_is_killed_goes_on(number: signal.Signals, small: Ladder) -> None:
    """Points that were done are kept as they are, the workers end too, and a second call does the rest."""
    for name, old, new in (("params", "steps: 12", "steps: 80"), ("plan", "rows: [plain, diloco/m2]", "rows: [plain]")):
        file = small.folder / f"{name}.yaml"
        file.write_text(file.read_text().replace(old, new).replace("tuned_at: a}", "tuned_at: a, rows: [plain]}"))
    assert main(["prepare"], small) == 0
    here = f"Ladder(Path({str(small.folder)!r}), Path({str(small.build)!r}), Path({str(small.results)!r}))"
    script = small.folder.parent / "tune.py"
    script.write_text(
        "from pathlib import Path\nfrom pipelines.ladder.__main__ import main\n"
        "from pipelines.ladder.plan import Ladder\n"
        f"if __name__ == '__main__':\n    raise SystemExit(main(['tune', 'a'], {here}))\n"
    )
    child = subprocess.Popen([sys.executable, str(script)], env=clean_environment())
    deadline = time.monotonic() + 60
    while not (first := outcomes(small)) and time.monotonic() < deadline:
        time.sleep(0.02)
    started = [process.pid for process in psutil.Process(child.pid).children(recursive=True)]
    child.send_signal(number)
    assert child.wait(60) == (1 if number == signal.SIGTERM else -number)
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)
    assert first
    assert main(["tune", "a"], anew(small)) == 0
    after = outcomes(small)
    assert first.items() <= after.items()
    assert len(after) > len(first)


def test_workers_that_are_told_to_stop_between_two_points_end(small: Ladder) -> None:
    class ToldToStop(dict):
        def __setitem__(self, pipe: object, told: object) -> None:
            raise workers.Stopped("told to stop")

    assert main(["prepare"], small) == 0

    def one() -> workers.Task:
        yield small.trial(small.plan.rows["plain"], "a", {"lr": 0.01})
        return []

    several = workers.Workers(stopping_s=30)
    several._busy = ToldToStop()
    with pytest.raises(workers.Stopped), several:
        several.run([one()])
    (process,) = several._processes
    assert process.exitcode in (0, -signal.SIGTERM)  # it was not killed


@pytest.mark.parametrize(
    ("run", "method"),
    [
        ("diloco_m2", {}),
        ("protocol", {"boundary": {"update_every_steps": 4}}),
        ("protocol", {"boundary": {"update_every_steps": 4, "mode": "reparametrised"}}),
    ],
)
def test_parts_of_a_sequence_make_up_the_loss(run: str, method: dict, corpus: Path, tmp_path: Path) -> None:
    config = small_run(run, method=method)
    summary = train_in_threads(config, corpus, folder := RunFolder(tmp_path / "run", tmp_path / "times"))
    parts = loss_by_position(config, corpus, folder.model)
    assert config.train.seq_len % PARTS == 0
    assert sum(parts) / PARTS == pytest.approx(summary["val_loss"], abs=2e-5)
    tokens = TokenData(corpus, seq_len=config.train.seq_len, global_batch=config.train.global_batch, seed=config.seed)
    windows = tokens.held_out(config.train.eval_sequences)
    early = windows[:, : config.train.seq_len // PARTS + 1]
    with torch.no_grad():
        _, first = saved_model(config, folder.model).losses(early[:, :-1], early[:, 1:])
    assert parts[0] == pytest.approx(first.item(), abs=2e-5)


def test_a_point_is_compiled_only_where_there_is_a_compiler(small: Ladder, monkeypatch: pytest.MonkeyPatch) -> None:
    params = small.folder / "params.yaml"
    before = small.trial(small.plan.rows["plain"], "a", {"lr": 0.01})
    prepare(small)
    plain, digest = workers.train_point(before), before.made_from()
    params.write_text(params.read_text().replace("{steps: 8, ", "{compile: true, steps: 8, "))
    point = anew(small).trial(small.plan.rows["plain"], "a", {"lr": 0.01})
    assert point.config.train.compile
    assert point.made_from() == digest  # but for roundings it decides nothing
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert workers.train_point(point)["val_loss"] == plain["val_loss"]
    monkeypatch.setenv("CXX", sys.executable)
    assert workers.can_compile()
    assert workers.train_point(point, compiled=False)["val_loss"] == plain["val_loss"]  # as for the headline


def test_an_origin_is_carried_over_a_change_that_touches_no_bit() -> None:
    """On a processor that rounds otherwise than the origin's, digests of the code before and after say what changed."""
    texts = {"python": "3.11.0", "corpora": {"rows": ["x"]}, "smoke": {"rows": ["y"]}}
    origin = Origin(**texts, probes={"a": {"": "1", "two": "2"}, "b": {"": "3"}}, source="old")
    before = Origin(**texts, probes={"a": {"": "1", "two": "22"}, "b": {"": "33"}}, source="old")
    after = Origin(**texts, probes={"a": {"": "1", "two": "22", "new": "4"}, "b": {"": "34"}}, source="new")
    found, changed = carried(origin, before, after)
    assert found == Origin(**texts, probes={"a": {"": "1", "two": "2", "new": "4"}, "b": {"": "34"}}, source="new")
    assert changed == ["b"]
    with pytest.raises(ConfigError, match="the code as it was has the digest new, and the probes of the points are of"):
        carried(origin, dataclasses.replace(before, source="new"), after)
    with pytest.raises(ConfigError, match="on another text here"):
        carried(origin, before, dataclasses.replace(after, smoke={"rows": ["z"]}))


def test_points_of_another_corpus_are_shown_and_not_added_to(small: Ladder, capsys: pytest.CaptureFixture) -> None:
    """As on a machine with another release of Python, whose own source is another text."""
    assert main(["tune", "a"], small) == 0
    assert main(["train", "a"], small) == 0
    again = Ladder(small.folder, small.build.parent / "elsewhere", small.results)
    rows = small.folder / "rows.jsonl"
    rows.write_text(rows.read_text().replace("in plain words", "in plainer words"))
    assert main(["train", "a"], again) == 0, capsys.readouterr().err
    assert again.corpus("rows", "a") != small.corpus("rows", "a")
    assert again.origin == small.origin == Origin.here(small)
    points = again.results_at("a")
    points[0].file.unlink()
    assert [point.read() is None for point in points] == [True, *([False] * (len(points) - 1))]
    assert main(["train", "a"], again) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"ConfigError: the corpus rows was made with Python 3\.\S+ here, but that of the points in", told)
    for file in small.results.rglob("*.json"):
        file.unlink()
    assert main(["tune", "a"], again) == 0
    assert again.origin == Origin.here(again) != Origin.here(small)


def test_points_of_this_code_are_done_on_a_machine_that_rounds_otherwise(
    small: Ladder, capsys: pytest.CaptureFixture
) -> None:
    """Its own probes have other digests, which count where the code is another; it is said whose points are stale."""
    assert main(["tune", "a", "plain"], small) == 0
    origin, elsewhere = small.origin, small.build.parent / "elsewhere"
    assert origin.is_of_this_code
    digests = {"plain": {"": "of another processor"}, "diloco": origin.probes["diloco"]}
    dataclasses.replace(origin, probes=digests).write(small.results)
    prepare(small)  # takes them as they are
    for file in (small.results / "tuning" / "a" / "plain").iterdir():
        told = json.loads(file.read_text())
        point = small.trial(small.plan.rows["plain"], "a", told["values"])
        file.write_text(json.dumps(told | {"made_from": point.made_from()}))
    before, again = outcomes(small), Ladder(small.folder, elsewhere, small.results)
    assert main(["tune", "a", "plain"], again) == 0
    assert outcomes(again) == before
    assert again.origin.probes == Origin.here(again).probes == digests
    assert not (elsewhere / "probe-runs").exists()  # none was trained

    dataclasses.replace(again.origin, source="of other code").write(small.results)
    prepare(again)
    told = capsys.readouterr().out
    assert "other probes than those of the points, which count as not done: plain\n" in told
    assert again.origin == Origin.here(again) == origin
    assert again.trial(point.row, "a", dict(point.values)).read() is None


def test_a_point_that_is_done_when_another_fails_is_kept(small: Ladder) -> None:
    """Its worker waits for the next one by then, and ends too."""
    assert main(["prepare"], small) == 0
    point = small.trial(small.plan.rows["plain"], "a", {"lr": 0.01})
    with workers.Workers() as some:
        some._start()
        pipe = some._idle.pop()
        some._busy[pipe] = (None, point)
        pipe.send(point)
        assert pipe.poll(60)
        time.sleep(0.5)  # by when it waits
    assert [process.exitcode for process in some._processes] == [0]
    assert point.read()["val_loss"] > 0


def test_a_point_that_fails_holds_nobody_up(small: Ladder) -> None:
    """Its worker, which waits for the next one, is told that there is none."""

    def task(point: Point) -> workers.Task:
        yield point
        return []

    point = small.trial(small.plan.rows["plain"], "a", {"lr": 0.01})  # whose corpus nobody has prepared
    with workers.Workers() as some:
        with pytest.raises(RuntimeError, match=re.escape(point.title)):
            some.run([task(point)])
        time.sleep(1)  # the worker is back where it waits
        begin = time.monotonic()
    assert time.monotonic() - begin < workers.SAVING_S / 10  # else it is waited for as long as a checkpoint may take


def test_a_point_that_fails_stops_no_other(small: Ladder, capsys: pytest.CaptureFixture) -> None:
    """Where a result diverges, all other points are trained first, and then the command names it and fails."""
    tuned = {"plain": {"values": {"lr": 1e30}, "trials": 1}, "diloco/m2": {"values": {"lr": 0.01}, "trials": 1}}
    write_whole(small.tuned_file("a"), yaml.safe_dump(tuned))
    assert main(["train", "a", "plain", "diloco/m2"], small) == 1
    told = capsys.readouterr()
    failures = told.err.splitlines()[-2:]
    for begin, failure in zip(("Failed: plain at a, seed 0: NotF", "plain at a, seed 1: NotF"), failures, strict=True):
        assert failure.startswith(begin), told.err
    assert [len(small.outcomes("a", row)) for row in ("plain", "diloco/m2")] == [0, 2]
    assert "0 of 4 points are done" in told.out


def test_a_ladder_may_be_moved_as_a_whole(small: Ladder, tmp_path: Path) -> None:
    """Links between the corpora of its sizes are relative, and one to elsewhere is renewed."""
    prepare(small)
    link = small.project.data_dir("rows", "b")
    assert link.is_symlink()
    moved = tmp_path / "elsewhere"
    shutil.move(small.build, moved)
    again = Ladder(small.folder, moved, small.results)
    assert again.project.data_dir("rows", "b").resolve() == again.project.data_dir("rows", "a").resolve()
    assert again.corpus("rows", "b") == again.corpus("rows", "a")
    link = again.project.data_dir("rows", "b")
    link.unlink()
    link.symlink_to(tmp_path / "gone")
    prepare(again)
    assert link.resolve() == again.project.data_dir("rows", "a").resolve()
    link.unlink()
    link.mkdir()
    with pytest.raises(ConfigError, match="must be a link to the corpus of a: all rungs share one; remove it"):
        prepare(again)


def test_points_of_other_values_than_tuning_has_found_are_left_out(small: Ladder) -> None:
    tuned = {"plain": {"values": {"lr": 0.01}, "trials": 1}}
    write_whole(small.tuned_file("a"), yaml.safe_dump(tuned))
    points = small.results_at("a", ["plain"])
    for point, lr in zip(points, (0.01, 0.02), strict=False):  # the second was trained before tuning found another
        told = {"seed": point.seed, "val_loss": 3.0, "values": dict(point.values) | {"lr": lr}}
        write_whole(point.file, json.dumps(told))
    assert [point.seed for point in small.points_there("a", ["plain"])] == [0]
    assert [told["seed"] for told in small.outcomes("a", "plain")] == [0]


def test_a_row_without_lines_has_the_rates_that_its_parent_has_now(small: Ladder) -> None:
    """Nothing of its own is kept; what was trained with the parent's former rates is left out until it is done anew."""
    stale = {"plain": {"values": {"lr": 0.01}, "trials": 1}, "diloco/m2": {"values": {"lr": 0.02}, "trials": 2}}
    stale["diloco/m4"] = {"values": {"lr": 0.01}, "trials": 0}
    write_whole(small.tuned_file("a"), yaml.safe_dump(stale))
    assert small.read_tuned("a")["diloco/m4"] == {"values": {"lr": 0.02}, "trials": 0}
    for point, lr in zip(small.results_at("a", ["diloco/m4"]), (0.01, 0.02), strict=True):
        write_whole(point.file, json.dumps({"seed": point.seed, "val_loss": 3.0, "values": {"lr": lr}}))
    assert [told["seed"] for told in small.outcomes("a", "diloco/m4")] == [1]
    assert small.plan.tuned_as("diloco/m4") == "diloco/m2" == small.plan.tuned_as("diloco/m2")
    write_whole(small.tuned_file("a"), yaml.safe_dump({"plain": stale["plain"]}))
    assert list(small.read_tuned("a")) == ["plain"]  # what begins from a row that is yet to be tuned is so as well
    assert small.outcomes("a", "diloco/m4") == []


def test_headlines_are_of_the_largest_tuned_rung_that_has_them(small: Ladder) -> None:
    """A rung that has the rates of another is shown beside it, and judged only where no tuned rung has the seeds."""
    tuned = {name: {"values": {}, "trials": 0} for name in ("plain", "diloco/m2")}  # the third is yet to be tuned
    small.tuned_file("a").parent.mkdir(parents=True)
    small.tuned_file("a").write_text(json.dumps(tuned))
    rows = {"one": "plain", "two": "diloco/m2"}
    with pytest.raises(ConfigError, match="no rung of the ladder has 1 seeds of all of plain, diloco/m2: make ladder"):
        at_their_best(small, rows, seeds=1)

    def plant(rung: str, *rows: str) -> None:
        for point in small.results_at(rung, rows):
            point.file.parent.mkdir(parents=True, exist_ok=True)
            told = {"val_loss": 3.0 + point.seed, "seed": point.seed, "tokens": 100, "parameters": 10, "values": {}}
            point.file.write_text(json.dumps(told))

    plant("a", *rows.values())
    rung, compared = at_their_best(small, rows)
    assert (rung, compared.losses["one"], compared.loss["two"]) == ("a", [3.0, 4.0], 3.5)
    assert compared.regime("two").rounds == 3  # 12 steps, H = 4
    plant("b", "plain")  # a single seed, of one of the two
    assert at_their_best(small, rows, seeds=1)[0] == "a"
    assert not beyond(small, rows, "a", seeds=1)
    assert list(beyond(small, ["plain"], "a", seeds=1)) == ["b"]  # what compares no other row does not wait for it
    plant("b", "diloco/m2")
    assert at_their_best(small, rows, seeds=1)[0] == "a"  # of which b has the rates
    assert [at_their_best(small, rows, seeds=1, at=rung)[0] for rung in ("a", "b")] == ["a", "b"]
    assert list(beyond(small, rows, "a", seeds=1)) == ["b"]
    assert not beyond(small, rows, "b", seeds=1)
    for point in small.results_at("a", ["diloco/m4"]):
        write_whole(
            point.file, json.dumps({"val_loss": 3.0, "seed": point.seed, "tokens": 100, "parameters": 10, "values": {}})
        )
    assert told_over(small, "diloco/m4", "plain", seeds=1).endswith("seeds, diloco/m4 at the rates of diloco/m2)")
    shutil.rmtree(small.results / "points" / "a" / "diloco" / "m4")
    told = told_over(small, "diloco/m2", "plain", seeds=1)
    assert re.fullmatch(
        r"by \+0.00 .* % at a \(2 seeds\) and by \+0.00 % at b, with the rates of a \(1 seed\)", told
    ), told
    own = dataclasses.replace(small.plan.rungs["b"], tuned_at="b")
    small.plan.rungs["b"] = own
    small.tuned_file("b").write_text(small.tuned_file("a").read_text())
    plant("b", *rows.values())
    assert at_their_best(small, rows, seeds=1)[0] == "b"  # the larger of two that are tuned
    assert at_their_best(small, rows)[0] == "a"  # which has two, and none has three
    with pytest.raises(ConfigError, match="no rung of the ladder has 3 seeds of all of plain, diloco/m2"):
        at_their_best(small, rows, seeds=3)
    with pytest.raises(ConfigError, match="no rung of the ladder has 3 or 2 seeds of all of plain, diloco/m4"):
        at_their_best(small, ["plain", "diloco/m4"])


def test_a_claim_of_two_rows_waits_for_both(small: Ladder) -> None:
    """Until a size has two seeds of both, there is no evidence; then it is that of these runs."""
    small.tuned_file("a").parent.mkdir(parents=True)
    small.tuned_file("a").write_text(json.dumps({name: {"values": {}, "trials": 0} for name in small.plan.rows}))
    pair = ("diloco/m2", "plain")
    for point in small.results_at("a", pair):
        assert evidence_at_best(small, Comparison.lower, *pair) is None
        assert told_over(small, *pair).startswith("by an amount that is not known yet")
        loss = (3.0 + point.seed) * (0.9 if point.row.name == pair[0] else 1.0)
        told = {"val_loss": loss, "seed": point.seed, "tokens": 100, "parameters": 10, "values": {}}
        write_whole(point.file, json.dumps(told))
    found = evidence_at_best(small, Comparison.lower, *pair)
    assert (found.regime.seeds, found.effect) == (2, pytest.approx(0.1))
    assert found.p_for < 0.01
    assert evidence_at_best(small, Comparison.lower, *pair, by=0.2).p_against < 0.01
    assert told_over(small, *pair).startswith("by -10.00")
    with pytest.raises(ConfigError, match="no row of the ladder named 'diloco/m3'"):  # which nobody waits for
        evidence_at_best(small, Comparison.lower, "diloco/m3", "plain")
    with pytest.raises(ConfigError, match="diloco/m3"):
        told_over(small, "diloco/m3", "plain")


def test_a_row_is_at_the_largest_rung_that_has_its_seeds_whatever_others_wait_for(small: Ladder) -> None:
    small.tuned_file("a").parent.mkdir(parents=True)
    small.tuned_file("a").write_text(json.dumps({name: {"values": {}, "trials": 0} for name in small.plan.rows}))
    for row in ("plain", "diloco/m2"):
        small.plan.rows[row].seeds["b"] = 3
    for rung, counts in (("a", (2, 2, 2)), ("b", (3, 3, 0))):
        for row, count in zip(small.plan.rows, counts, strict=True):
            for seed in range(count):
                file = small.results / "points" / rung / row / f"seed{seed}.json"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(
                    json.dumps({"val_loss": 3.0, "seed": seed, "tokens": 100, "parameters": 10, "values": {}})
                )
    found = each_at_its_best(small, {"diloco/m2": "plain", "diloco/m4": "plain"})
    assert [(rung, list(c.runs)) for rung, c in found.items()] == [
        ("a", ["plain", "diloco/m4"]),
        ("b", ["plain", "diloco/m2"]),  # three seeds there, and two where its rates were tuned
    ]
    found = each_at_its_best(small, {"diloco/m2": "plain", "diloco/m4": "plain"}, seeds=2, and_beyond=True)
    assert {rung: list(c.runs) for rung, c in found.items()} == {
        "a": ["plain", "diloco/m2", "diloco/m4"],  # of which b has the rates
        "b": ["plain", "diloco/m2"],
    }
    file = small.results / "points" / "b" / "plain" / "seed1.json"
    file.unlink()  # two are left, but two of both there are at "a" too, and three of both nowhere
    assert list(beyond(small, ["plain", "diloco/m2"], "a")) == ["b"]
    file.with_name("seed2.json").unlink()
    assert not beyond(small, ["plain", "diloco/m2"], "a")
    assert at_their_best(small, ["plain", "diloco/m2"])[0] == "a"


def test_no_table_of_the_first_pipeline_trains_the_ladder() -> None:
    """No stage of the ladder has what tables read as its output, else `dvc repro` would train the ladder first."""
    stages = yaml.safe_load((LADDER.results / "dvc.yaml").read_text())["stages"].values()
    made = [out for stage in stages for out in stage.get("outs", [])]
    assert made
    assert all(out.startswith("build/ladder/") for out in made)


def test_what_was_tuned_has_its_trial_in_git() -> None:
    """Else nobody can see what it was chosen from."""
    for rung in (rung.name for rung in LADDER.plan.rungs.values() if rung.tuned_at == rung.name):
        trials = collections.defaultdict(dict)
        for trial in read_trials(LADDER):
            if trial["rung"] == rung:
                key = tuple(sorted((name, trial[name]) for name in LADDER.plan.lines if name in trial))
                trials[trial["row"]][key] = trial["val_loss"]
        for row, entry in LADDER.read_tuned(rung).items():
            if LADDER.plan.rows[row].lines:
                assert trials[row].get(tuple(sorted(entry["values"].items()))) == entry["tuning_loss"], (rung, row)


def test_what_a_gpu_is_to_train_has_been_predicted() -> None:
    """`make gpu` leaves out rows that are not."""
    rungs = [rung for rung in LADDER.plan.rungs.values() if rung.gpu]
    assert rungs
    assert [LADDER.unregistered(rung.name) for rung in rungs] == [[]] * len(rungs)
    assert all(set(rung.rows) <= set(LADDER.read_tuned(rung.tuned_at)) for rung in rungs)


def test_every_variant_is_a_row() -> None:
    """A probe is trained of each variant, which would be for nothing where no row has it."""
    runs = LADDER.params["runs"].items()
    variants = {f"{run}/{name}".rstrip("/") for run, entry in runs for name in entry.get("variants", [""])}
    assert variants == set(LADDER.plan.rows)


def test_the_ladders_tables_are_of_the_points_in_git() -> None:
    """Else: python -m pipelines.run_notebook notebooks/80_ladder.ipynb page -p scale laptop."""
    cells = read_cells(LADDER)
    rows = {"gaps": gap_rows(cells), "margins": [line.record() for line in judged_margins(LADDER.plan, cells)]}
    for name, made in rows.items():
        shown, made = pd.read_csv(LADDER.results / f"{name}.csv"), pd.DataFrame(made)
        pd.testing.assert_frame_equal(shown[list(made)], made, check_dtype=False, rtol=1e-4)
    counted = collections.Counter((trial["rung"], trial["row"]) for trial in read_trials(LADDER))
    tuned = pd.read_csv(LADDER.results / "tuning.csv")
    assert dict(zip(zip(tuned.rung, tuned.method, strict=True), tuned.trials, strict=True)) == counted
