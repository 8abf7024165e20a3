"""The front: what the ladder's methods lose, against the bytes that they send and their time on slow links.

A row is set beside data-parallel training of as many replicas, which sends the mean of its gradients in every step.
Bytes between replicas are one axis; those between the stages of a pipeline are another, on which most rows compress
nothing.
Times are predicted (`lowcomm.cost.predict`) for the ladder's own runs: replicas that compute as fast as a core that has
trained data-parallel training's points, on links whose rate is varied. One replica sends nothing.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from lowcomm.cost.predict import Links, predict, sent_per_step, stage_flops
from lowcomm.experiment.config import RunConfig
from lowcomm.experiment.project import merge
from lowcomm.methods.config import MethodConfig
from lowcomm.methods.elastic import ElasticUpdates
from lowcomm.model.accounting import parameter_shapes
from lowcomm.settings import ConfigError
from pipelines.ladder.fits import Cell, read_trials
from pipelines.ladder.plan import Ladder, base_of
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
    "diloco/m1_rising",
    "diloco/m4_rising",
    "diloco/falling_rate",
    "streaming/h30",
    "streaming/h100",
    "streaming/m4",
    "streaming/rising_momentum",
    "streaming/radial",
    "noloco/m4",
    "noloco/rising_momentum",
    "noloco/m8",
    "partial/whole",
    "partial/half",
    "partial/quarter",
    "protocol/eighth",
    "protocol/quarter",
    "together/all",
    "muon/batch",
    "muloco/m1",
    "muloco/m2",
    "muloco/m4",
    "muloco/two_bits",
    "muloco/rising_momentum",
    "muloco/m4_rising",
    "sparse/m2",
    "sparse/eighth",
    "sparse/h15",
    "sparse/m4",
    "sparse/everyone",
    "sparse/without_feedback",
    "demo/m2",
    "gasloc/m4",
    "selective/all",
    "selective/half",
    "projected/muon",
    "hundred/projection",
)
#: Links whose times are predicted, in Mbit/s, with a latency in ms.
RATES, LATENCY = (1000, 100, 10, 1), 20.0
YARDSTICK, MUON = "data_parallel", "muon/batch"
#: The devices of points that were trained on a processor's core; a GPU has a name of its own.
PROCESSORS = ("x86_64", "aarch64", "arm64")
#: A pipeline as the rows that are trained as one have it: the stages of a replica, and the most micro-batches.
STAGES, MICRO_BATCHES = 2, 4


def yardstick(config: RunConfig) -> RunConfig:
    """Return what a run is set beside: data-parallel training of as many replicas on the same batch."""
    train = dataclasses.replace(config.train, optimizer="adamw", muon_lr=0.0, accumulation=1)
    return dataclasses.replace(config, method=MethodConfig("gradients"), stages=1, train=train)


def piped(config: RunConfig) -> RunConfig:
    """Return a run as a pipeline of `STAGES` stages; one that is trained as a pipeline is left as it is.

    Rows through a subspace are trained as one stage, which computes what a pipeline of more does, to rounding.
    """
    if config.stages > 1:
        return config
    micro_batches = math.gcd(config.local_batch, MICRO_BATCHES)  # as a replica's share of a small batch does not split
    return dataclasses.replace(
        config, stages=STAGES, train=dataclasses.replace(config.train, accumulation=micro_batches)
    )


def times_fewer(config: RunConfig) -> tuple[float, float]:
    """Return how many times fewer bytes a run sends than data-parallel training over a dense pipeline in fp32.

    It is (among replicas, between stages), of all replicas together; a run of one stage is taken as a pipeline
    (`piped`). A factor is infinite where the run sends nothing.
    """
    ours, theirs = sent_per_step(piped(config)), sent_per_step(piped(yardstick(config)))
    among, between = (base / own if own else math.inf for own, base in zip(ours, theirs, strict=True))
    return among, between


def crossing(config: RunConfig) -> str:
    """Return in words what crosses between a run's stages: "a subspace of 8 of 64, in 2 of 4 replicas"."""
    b = config.method.boundary
    kinds = {
        "subspace": f"a subspace of {b.rank} of {config.model.dim}",
        "projection": f"a projection on {b.rank} of {config.model.dim}",
        "low_rank": f"low rank of {b.rank}",
    }
    told = [kinds.get(b.kind, "all values")]
    told += [f"in {b.codec}"] if b.codec != "fp32" else []
    told += ["errors kept"] if b.error_feedback else []
    told += [f"in {b.replicas} of {config.replicas} replicas"] if b.replicas else []
    return ", ".join(told)


def hardship(config: RunConfig) -> str:
    """Return in words what is hard for a run and what it has against that.

    Examples are "unlike text, H = 30" and "1 of 8 lies, median".
    """
    m, alike = config.method, config.train.alike
    if alike < 1:
        text = f"{100 * alike:g} % of the text alike" if alike else "unlike text"
        return f"{text}, H = {m.sync_every_steps}"
    return f"{m.byzantine or 'none'} of {config.replicas} lies{loudly(config)}, {m.mean}"


def loudly(config: RunConfig) -> str:
    """Return in words how many times as loud as the others a run's lying replicas are; "" where they are as loud."""
    m = config.method
    return f" {-m.byzantine_factor:g} times as loudly" if m.byzantine and m.byzantine_factor != -1 else ""


def repaired(row: Losses, harmed: Losses, base: Losses) -> float:
    """Return the share of a harm, the rise of the loss from `base` to `harmed`, that a row is spared; 1 for all of it.

    Rises are of logarithms of the losses, over the seeds that all three have. It is NaN where the harm is not clear:
    its 95 % interval holds 0 or less, or there are fewer than two seeds.
    """
    seeds = row.keys() & harmed.keys() & base.keys()
    if len(seeds) < 2:
        return math.nan
    row, harmed, base = ({seed: losses[seed] for seed in seeds} for losses in (row, harmed, base))
    harm = Paired.of(harmed, base)
    return -Paired.of(row, harmed).mean / harm.mean if harm.likely.low > 0 else math.nan


def flops_per_second(ladder: Ladder, rung: str) -> float:
    """Return the FLOPs per second of a core: those of data-parallel training's fastest point at a rung.

    Points that a GPU has trained count only where there are no others. Raises ConfigError where there is no point.
    """
    name = f"{YARDSTICK}/batch"
    if not (points := ladder.outcomes(rung, name)):
        raise ConfigError(f"no point of {name} at {rung}: python -m pipelines.ladder train {rung}")
    config = ladder.configs(rung)[name]
    flops = sum(map(sum, stage_flops(config))) * config.train.accumulation * config.train.steps
    on_cores = [point for point in points if point["environment"]["device"] in PROCESSORS]
    return flops / min(point["seconds"] for point in on_cores or points)


def minutes(config: RunConfig, speed: float, rate: float) -> float:
    """Return the predicted minutes of a whole run on replicas of `speed` FLOP/s, whose links have `rate` Mbit/s."""
    compute = [(forward / speed, backward / speed) for forward, backward in stage_flops(config)]
    return float(predict(config, compute, Links(rate, LATENCY)).step_seconds) * config.train.steps / 60


def front_rows(ladder: Ladder, rung: str, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the front's table at a rung, with a line for each row, and for each run that it is set beside.

    Set beside are data-parallel training of as many replicas, the same with Muon, and over a dense pipeline where a row
    is one: each has the loss of the row of one replica that computes the same. Rows that compress what crosses between
    stages count as pipelines (`piped`).

    Columns: method, replicas, stages, seeds, loss, gap_pct, low_pct, high_pct, bytes_per_step (that a replica sends to
    others, in the mean), fewer (times fewer than data-parallel training of as many), fewer_between (the same of what
    crosses between stages; 1 where nothing is compressed), minutes_<rate> for each of `RATES`, on_front (whether no row
    of as many replicas, on the same batch, beats it: sends no more to others and has no more loss, over the seeds that
    both have, and less of one), lines and trials (see `tuning_of`).

    Raises ConfigError where no point of data-parallel training says how fast a core is (`flops_per_second`).
    """
    configs, speed, tuning = ladder.configs(rung), flops_per_second(ladder, rung), tuning_of(ladder, rung)
    here = {cell.row: cell for cell in cells if cell.rung == rung}
    groups: dict[tuple[int, str], list[str]] = {}
    for name in (name for name in ROWS if name in here):
        groups.setdefault((configs[name].replicas, base_of(name, configs)), []).append(name)
    rows = []
    for (replicas, base), names in sorted(groups.items()):
        some = [(name, name, as_meant(configs[name])) for name in names]
        beside = [(YARDSTICK, base, dense := yardstick(some[0][2]))]
        if MUON in here and base == base_of(MUON, configs) and MUON not in names:
            beside.append((MUON, MUON, dataclasses.replace(dense, train=configs[MUON].train)))
        if any(c.stages > 1 for _, _, c in some):
            beside.append((f"{YARDSTICK}/pipeline", base, piped(dense)))
        found, most = [], sent_per_step(dense)[0] / replicas
        for method, row, config in beside + some:
            nbytes, cell = sent_per_step(config)[0] / replicas, here[row]
            gap, low, high = cell.pairs.percent()
            told = {"method": method, "replicas": replicas, "stages": config.stages, "seeds": cell.pairs.seeds}
            told |= {"loss": sum(cell.losses.values()) / len(cell.losses), "gap_pct": gap, "low_pct": low}
            told |= {"high_pct": high, "bytes_per_step": nbytes, "fewer": most / nbytes if nbytes else math.inf}
            told |= {"fewer_between": times_fewer(config)[1]}
            told |= {f"minutes_{rate}": minutes(config, speed, rate) for rate in RATES}
            found.append(told | tuning[row])
        sent, losses = [told["bytes_per_step"] for told in found], [here[row].losses for _, row, _ in beside + some]
        places = list(zip(sent, losses, strict=True))
        on = [not any(_beats(one, other) for one in places) for other in places]
        rows += [told | {"on_front": is_on} for told, is_on in zip(found, on, strict=True)]
    return rows


def _beats(one: tuple[float, Losses], other: tuple[float, Losses]) -> bool:
    """Tell whether the first of two (bytes, losses) has no more of both and less of one, over the seeds that both have.

    It does not where they have no seed in common.
    """
    if not one[1].keys() & other[1].keys():
        return False
    above = Paired.of(one[1], other[1]).mean
    return one[0] <= other[0] and above <= 0 and (one[0] < other[0] or above < 0)


def as_meant(config: RunConfig) -> RunConfig:
    """Return a run as a pipeline where it compresses what crosses between stages, and else as it is."""
    return piped(config) if config.method.boundary.kind != "dense" else config


def tuning_of(ladder: Ladder, rung: str) -> dict[str, dict[str, Any]]:
    """Return how each row of a rung was tuned: its "lines", in the order in which they were walked, and its "trials".

    The trials are the number of runs of all walks of the row, at the rung where the values were found; those of the row
    that it begins with are not among them.
    """
    there = ladder.plan.rungs[rung]
    trials = collections.Counter(trial["row"] for trial in read_trials(ladder) if trial["rung"] == there.tuned_at)
    return {name: {"lines": ", ".join(ladder.plan.rows[name].lines), "trials": trials[name]} for name in there.rows}


ELASTIC = "elastic replicas"
#: The choices of `composes`, each with the settings of a run, by section, that it has; "elastic": replicas leave and
#: come back.
CHOICES: dict[str, dict[str, Any]] = {
    "sparse, 2 bits, feedback": {
        "method": {"codec": "chunk_topk_2bit", "codec_keep": 1 / 64, "error_feedback": 0.95},
    },
    "4 bits": {"method": {"codec": "e3m0"}},
    "cosines, sparse": {"method": {"basis": "cosines", "codec": "chunk_topk", "codec_keep": 1 / 128}},
    "streaming": {"method": {"fragments": "strided", "layers_per_fragment": 2, "overlap_steps": [1], "mixing": 0.5}},
    "balanced fragments": {"method": {"fragments": "balanced", "fragment_count": 2}},
    "NoLoCo": {"method": {"peers": "group", "outer": "noloco", "outer_momentum": 0.5, "outer_pull": 0.7}},
    "GASLoC": {"method": {"peers": "group", "outer": "gasloc", "outer_momentum": 0.5}},
    "sign descent": {"method": {"outer": "sign", "outer_momentum": 0.0}},
    "median": {"method": {"mean": "median"}},
    "trimmed mean": {"method": {"mean": "trimmed", "mean_trim": 0.25}},
    "clipped": {"method": {"mean": "clipped"}},
    "radial": {"method": {"mean": "radial"}},
    "outer rate by points": {"method": {"outer_lr_shape": ["1@0", "0.5@1"]}},
    "outer momentum by points": {"method": {"outer_momentum_points": ["0@0", "0.8@0.5"]}},
    "half of the MLPs": {"method": {"trainable": "slice", "slices": 2, "sliced": ["mlp"]}},
    "subspace pipeline": {"stages": 2, "method": {"boundary": {"kind": "subspace", "rank": 4}}},
    "half of them compress": {"stages": 2, "method": {"boundary": {"kind": "subspace", "rank": 4, "replicas": 4}}},
    "low-rank pipeline": {"stages": 2, "method": {"boundary": {"kind": "low_rank", "rank": 4}}},
    "projecting pipeline": {"stages": 2, "method": {"boundary": {"kind": "projection", "rank": 4}}},
    "Muon": {"train": {"optimizer": "muon", "muon_lr": 0.02}},
    "unlike text": {"train": {"alike": 0.0}},
    "a replica that lies": {"method": {"byzantine": 1}},
    ELASTIC: {"elastic": True},
}

#: Pairs that go together and that no test trains; of those with `ELASTIC` tests train some.
UNTRAINED = frozenset(
    {
        ("NoLoCo", "outer momentum by points"),
        ("median", "half of the MLPs"),
        ("trimmed mean", "half of the MLPs"),
        ("clipped", "half of the MLPs"),
    }
)


def composes(ladder: Ladder, rung: str) -> list[dict[str, str]]:
    """Return for each pair of `CHOICES` whether DiLoCo on 8 replicas can have both.

    Columns: one, other, and why_not, "" where it can. Whether such pairs train and resume, the tests of this repository
    say (`tests/test_together.py`).
    """
    found, names = [], list(CHOICES)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            found.append({"one": one, "other": other, "why_not": why_not(ladder, rung, CHOICES[one], CHOICES[other])})
    return found


def why_not(ladder: Ladder, rung: str, one: dict[str, Any], other: dict[str, Any]) -> str:
    """Return why two choices, with settings as in `CHOICES`, do not go together on 8 replicas; "" where they do."""
    both = merge(one, other)
    if both != merge(other, one):  # they name the same setting differently
        return "one choice"
    is_elastic = both.pop("elastic", False)
    told = {"variant": "m2", "scale": rung, "params": ladder.params, "replicas": 8}
    try:
        config = ladder.project.run_config("diloco", **told, **both)
        if is_elastic:
            _check_elastic(config)
    except ConfigError as error:
        return str(error)
    return ""


class _Asked(Exception):
    """Raised where an elastic replica first calls its store: by then no setting has been refused."""


class _NoStore:
    """A stand-in for the store of elastic replicas, which ends the start of a replica at its first call."""

    def write_once(self, name: str, text: str) -> NoReturn:
        raise _Asked


def _check_elastic(config: RunConfig) -> None:
    """Raise ConfigError where elastic replicas refuse a run; a quorum is half of the replicas."""
    for stage in range(config.stages):
        shapes = parameter_shapes(config.model, config.constraint, stage=stage, stages=config.stages)
        parameters = {name: torch.zeros(shape, requires_grad=True) for name, shape in shapes.items()}
        told = {"slot": 0, "slots": config.replicas, "steps": config.train.steps, "layers": config.model.layers}
        with contextlib.suppress(_Asked):
            ElasticUpdates(parameters, _NoStore(), method=config.method, **told)
