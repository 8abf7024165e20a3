"""The front: what the ladder's methods lose, against what they send and against the time that it takes on slow links.

A row is set beside data-parallel training of as many replicas, which sends the mean of its gradients in every step.
Times are predicted (`lowcomm.cost.predict`) for the ladder's own runs: replicas that compute as fast as a core of the
machine that trained data-parallel training's points, on links whose rate is varied. One replica sends nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lowcomm.cost.planner import front
from lowcomm.cost.predict import Links, predict, sent_per_step, stage_flops
from lowcomm.experiment.config import RunConfig
from lowcomm.experiment.project import merge
from lowcomm.methods.config import MethodConfig
from lowcomm.settings import ConfigError
from pipelines.ladder.fits import Cell, gap_rows
from pipelines.ladder.plan import Ladder
from pipelines.verdicts import Paired

#: Losses by seed.
Losses = Mapping[int, float]

#: Rows whose loss is drawn against their bytes, in the order of the table.
ROWS = (
    "averaging",
    "diloco/m1",
    "diloco/m2",
    "diloco/m4",
    "diloco/falling_momentum",
    "diloco/rising_momentum",
    "streaming/h30",
    "streaming/h100",
    "streaming/rising_momentum",
    "streaming/radial",
    "noloco/m4",
    "muon/batch",
    "muloco/m1",
    "muloco/m2",
    "muloco/m4",
    "sparse/m2",
    "sparse/eighth",
    "sparse/h15",
    "sparse/m4",
    "sparse/everyone",
    "sparse/without_feedback",
    "demo/m2",
    "gasloc/m4",
)
#: Links whose times are predicted, in Mbit/s, with a latency in ms.
RATES, LATENCY = (1000, 100, 10, 1), 20.0
YARDSTICK = "data_parallel"
#: A pipeline, as the rows that are trained as one have it: stages of a replica, and micro-batches of a step.
STAGES, MICRO_BATCHES = 2, 4


def yardstick(config: RunConfig) -> RunConfig:
    """Return data-parallel training of as many replicas on the same batch: what a run is set beside."""
    train = dataclasses.replace(config.train, optimizer="adamw", muon_lr=0.0, accumulation=1)
    return dataclasses.replace(config, method=MethodConfig("gradients"), stages=1, train=train)


def piped(config: RunConfig) -> RunConfig:
    """Return a run as a pipeline of `STAGES` stages; one that is trained as a pipeline is left as it is.

    Rows through a subspace are trained as one stage, which computes what a pipeline of more does, to rounding.
    """
    if config.stages > 1:
        return config
    return dataclasses.replace(
        config, stages=STAGES, train=dataclasses.replace(config.train, accumulation=MICRO_BATCHES)
    )


def times_fewer(config: RunConfig) -> tuple[float, float]:
    """Return how many times fewer bytes a run sends than data-parallel training over a dense pipeline in fp32.

    Of both axes: (among replicas, between stages), of all replicas together; a run of one stage is taken as a pipeline
    (`piped`). Infinite where the run sends nothing.
    """
    ours, theirs = sent_per_step(piped(config)), sent_per_step(piped(yardstick(config)))
    among, between = (base / own if own else math.inf for own, base in zip(ours, theirs, strict=True))
    return among, between


def crossing(config: RunConfig) -> str:
    """Say what crosses between a run's stages: "a subspace of 8 of 64, in 2 of 4 replicas"."""
    b = config.method.boundary
    kinds = {"subspace": f"a subspace of {b.rank} of {config.model.dim}", "low_rank": f"low rank of {b.rank}"}
    told = [kinds.get(b.kind, "all values")]
    told += [f"in {b.codec}"] if b.codec != "fp32" else []
    told += ["errors kept"] if b.error_feedback else []
    told += [f"in {b.replicas} of {config.replicas} replicas"] if b.replicas else []
    return ", ".join(told)


def hardship(config: RunConfig) -> str:
    """Say what is hard for a run, and what it has against that: "unlike text, H = 30" or "1 of 8 lies, median"."""
    m, alike = config.method, config.train.alike
    if alike < 1:
        text = f"{100 * alike:g} % of the text alike" if alike else "unlike text"
        return f"{text}, H = {m.sync_every_steps}"
    return f"{m.byzantine or 'none'} of {config.replicas} lies, {m.mean}"


def repaired(row: Losses, harmed: Losses, base: Losses) -> float:
    """Return which share of a harm, the rise of the loss from `base` to `harmed`, a row is spared; 1 for all of it.

    Of logarithms of the losses, and of the seeds that all three have. NaN where no harm is told apart from none: its
    95 % interval holds 0 or less, or there are fewer than two seeds.
    """
    seeds = row.keys() & harmed.keys() & base.keys()
    if len(seeds) < 2:
        return math.nan
    row, harmed, base = ({seed: losses[seed] for seed in seeds} for losses in (row, harmed, base))
    harm = Paired.of(harmed, base)
    return -Paired.of(row, harmed).mean / harm.mean if harm.interval()[0] > 0 else math.nan


def flops_per_second(ladder: Ladder, rung: str) -> float:
    """Return how fast a core was: the FLOPs of data-parallel training's points over their seconds, of the fastest.

    Raises ConfigError where there is no such point.
    """
    name = f"{YARDSTICK}/batch"
    if not (points := ladder.outcomes(rung, name)):
        raise ConfigError(f"no point of {name} at {rung}: python -m pipelines.ladder train {rung}")
    config = ladder.configs(rung)[name]
    flops = sum(map(sum, stage_flops(config))) * config.train.accumulation * config.train.steps
    return flops / min(point["seconds"] for point in points)


def minutes(config: RunConfig, speed: float, rate: float) -> float:
    """Return the minutes of a whole run on replicas of so many FLOP/s, whose links have a rate in Mbit/s."""
    compute = [(forward / speed, backward / speed) for forward, backward in stage_flops(config)]
    return float(predict(config, compute, Links(rate, LATENCY)).step_seconds) * config.train.steps / 60


def front_rows(ladder: Ladder, rung: str, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the front's table at a rung: of each row, and of data-parallel training on as many replicas, what it is.

    Columns: method, replicas, seeds, loss, gap_pct, low_pct, high_pct, bytes_per_step (that a replica sends, in the
    mean), fewer (times fewer than data-parallel training of as many), minutes_<rate> for each of `RATES`, on_front
    (whether no row of as many replicas sends less and loses less).
    """
    configs, speed = ladder.configs(rung), flops_per_second(ladder, rung)
    gaps = {row["method"]: row for row in gap_rows([c for c in cells if c.rung == rung])}
    known = {name: gaps[name] for name in ROWS if name in gaps}
    base = next(c for c in cells if (c.rung, c.row) == (rung, f"{YARDSTICK}/batch"))
    alone = {"loss": sum(base.losses.values()) / len(base.losses), "seeds": len(base.losses), "gap_pct": 0.0}
    alone |= {"low_pct": 0.0, "high_pct": 0.0}
    rows = []
    for replicas in sorted({configs[name].replicas for name in known}):
        here = {name: configs[name] for name in known if configs[name].replicas == replicas}
        beside = yardstick(next(iter(here.values())))
        most = sent_per_step(beside)[0] / replicas
        found = []
        for name, config in {YARDSTICK: beside, **here}.items():
            nbytes = sent_per_step(config)[0] / replicas
            told = alone if name == YARDSTICK else known[name]
            row = {"method": name, "replicas": replicas}
            row |= {key: told[key] for key in ("seeds", "loss", "gap_pct", "low_pct", "high_pct")}
            row |= {"bytes_per_step": nbytes, "fewer": most / nbytes if nbytes else math.inf}
            found.append(row | {f"minutes_{rate}": minutes(config, speed, rate) for rate in RATES})
        on = front([row["bytes_per_step"] for row in found], [row["gap_pct"] for row in found])
        rows += [row | {"on_front": is_on} for row, is_on in zip(found, on, strict=True)]
    return rows


#: What composes with what: settings of a run (by section) that each choice has.
CHOICES: dict[str, dict[str, Any]] = {
    "sparse, 2 bits, feedback": {
        "method": {"codec": "chunk_topk_2bit", "codec_keep": 1 / 64, "error_feedback": 0.95},
    },
    "4 bits": {"method": {"codec": "e3m0"}},
    "cosines, sparse": {"method": {"basis": "cosines", "codec": "chunk_topk", "codec_keep": 1 / 128}},
    "streaming": {"method": {"fragments": "strided", "layers_per_fragment": 2, "overlap_steps": [1], "mixing": 0.5}},
    "NoLoCo": {"method": {"peers": "group", "outer": "noloco", "outer_momentum": 0.5, "outer_pull": 0.7}},
    "GASLoC": {"method": {"peers": "group", "outer": "gasloc", "outer_momentum": 0.5}},
    "sign descent": {"method": {"outer": "sign", "outer_momentum": 0.0}},
    "median": {"method": {"mean": "median"}},
    "clipped": {"method": {"mean": "clipped"}},
    "radial": {"method": {"mean": "radial"}},
    "outer rate by points": {"method": {"outer_lr_shape": ["1@0", "0.5@1"]}},
    "half of the MLPs": {"method": {"trainable": "slice", "slices": 2, "sliced": ["mlp"]}},
    "subspace pipeline": {"stages": 2, "method": {"boundary": {"kind": "subspace", "rank": 4}}},
    "half of them compress": {"stages": 2, "method": {"boundary": {"kind": "subspace", "rank": 4, "replicas": 4}}},
    "Muon": {"train": {"optimizer": "muon", "muon_lr": 0.02}},
    "unlike text": {"train": {"alike": 0.0}},
}


def composes(ladder: Ladder, rung: str) -> list[dict[str, str]]:
    """Return of each pair of `CHOICES` whether DiLoCo on 8 replicas can have both: one, other, and why not ("": can).

    Whether pairs that can be had train and resume, the tests of this repository say (`tests/test_together.py`).
    """
    found, names = [], list(CHOICES)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            found.append({"one": one, "other": other, "why_not": why_not(ladder, rung, CHOICES[one], CHOICES[other])})
    return found


def why_not(ladder: Ladder, rung: str, one: dict[str, Any], other: dict[str, Any]) -> str:
    """Return why two choices, settings of a run by section, do not go together on 8 replicas; "" where they do."""
    both = merge(one, other)
    if both != merge(other, one):  # they name the same setting differently
        return "one choice"
    try:
        ladder.project.run_config("diloco", variant="doubled", scale=rung, params=ladder.params, replicas=8, **both)
    except ConfigError as error:
        return str(error)
    return ""
