"""The plan of the ladder: its rows, how each is tuned, and the points (a run with all its settings) that this makes.

    row      a run of params.yaml with its variant: "diloco/m2"
    rung     a size, which is a scale of params.yaml: "0.33M"
    line     a number that is tuned: the inner learning rate, the outer gain, ...
    trial    a point that is trained for tuning, with seed 0 and its loss on the tuning split
    result   a point that tables report, with a seed and tuned settings, and its loss on the validation split

Each point that is done is a small JSON file in git, so that no machine does it again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lowcomm.experiment.config import RunConfig
from lowcomm.experiment.project import Project, pick, read_yaml
from lowcomm.methods.schedule import Points
from lowcomm.model.presets import PRESETS
from lowcomm.settings import ConfigError, nearest, whole_number
from pipelines.ladder.origin import Origin
from pipelines.probes import SCALE, corpus_digests
from pipelines.project import BUILD, ROOT
from pipelines.settings import set_values

#: The name under which gaps at the papers' own smallest sizes are predicted, in place of a rung's.
PUBLISHED = "published"
#: Values of lines, by name.
Values = Mapping[str, float]


@dataclass(frozen=True)
class Line:
    """A number that is tuned.

    begin: the value at which it begins. factor: that between neighbours, or else values: all that it may take, in
    ascending order. Raises ConfigError where it has neither or both, or they break a rule.
    """

    begin: float
    factor: float = 0.0
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.factor) == bool(self.values) or self.factor < 0 or 0 < self.factor <= 1:
            raise ConfigError(f"a line needs either a factor above 1 or values, got {self.factor} and {self.values}")
        if self.values and (self.begin not in self.values or list(self.values) != sorted(set(self.values))):
            raise ConfigError(f"a line's values must ascend and hold where it begins, {self.begin}: {self.values}")

    def has(self, value: float) -> bool:
        """Tell whether the line may take a value: one of its values, or any where it has a factor."""
        return not self.values or value in self.values

    def beside(self, value: float, way: int) -> float | None:
        """Return the neighbour of a value upwards (`way` 1) or downwards (-1); None where there is none.

        With a factor, values are begin x factor^n to three digits, and `value` counts as the nearest of these. Raises
        ConfigError where the line has `values` and this is none of them.
        """
        if self.factor:
            n = round(math.log(value / self.begin) / math.log(self.factor))
            return float(f"{self.begin * self.factor ** (n + way):.3g}")
        if not self.has(value):
            raise ConfigError(f"{value:g} is not among a line's values, {', '.join(map(str, self.values))}")
        at = self.values.index(value) + way
        return self.values[at] if 0 <= at < len(self.values) else None


@dataclass(frozen=True)
class Row:
    """A method of the ladder.

    name: the run and its variant. lines: the names of its numbers, in the order in which they are tuned. start: the row
    whose values it begins with; "" for none. begin: the values at which lines begin that begin elsewhere in this row.
    rungs: those, of the rungs that list no rows, that have it; if empty, all of these. seeds: its number of seeds at
    rungs where that differs from the rung's.
    """

    name: str
    lines: tuple[str, ...] = ()
    start: str = ""
    begin: tuple[tuple[str, float], ...] = ()
    rungs: tuple[str, ...] = ()
    seeds: Mapping[str, int] = field(default_factory=dict)

    @property
    def run(self) -> str:
        """The name of its run in params.yaml."""
        return self.name.partition("/")[0]

    @property
    def variant(self) -> str:
        """The name of its variant of the run; "" where the run has none."""
        return self.name.partition("/")[2]


@dataclass(frozen=True)
class Rung:
    """A size of the ladder.

    seeds: how many its rows have. tuned_at: the rung whose tuned values they take. rows: their names. gpu: whether it
    needs a GPU.
    """

    name: str
    seeds: int
    tuned_at: str
    rows: tuple[str, ...]
    gpu: bool = False

    @property
    def called(self) -> str:
        """Its name, with the rung whose rates its rows have where that is another: "1.05M, with the rates of 0.33M"."""
        return self.name if self.tuned_at == self.name else f"{self.name}, with the rates of {self.tuned_at}"

    def seeds_of(self, row: Row) -> int:
        """Return the number of seeds that a row has at this rung."""
        return row.seeds.get(self.name, self.seeds)


@dataclass(frozen=True)
class Plan:
    """The content of a plan.yaml: its rungs, rows and lines by name, and what else it names."""

    rungs: dict[str, Rung]
    rows: dict[str, Row]
    lines: dict[str, Line]
    #: The rung, and the rows of it, of which `make repro` trains a seed anew; ("", ()) where the plan has none.
    headline: tuple[str, tuple[str, ...]] = ("", ())
    #: The size of a paper at which each row's gap is predicted, as a name of `presets.PRESETS`.
    published: Mapping[str, str] = field(default_factory=dict)

    def check(self, rung: str, rows: Collection[str] = ()) -> None:
        """Raise ConfigError where there is no such rung, or it has no such row."""
        there = pick(self.rungs, rung, "rung")
        for name in rows:
            pick(dict.fromkeys(there.rows), name, f"row of {rung}")

    def in_order(self, rows: Collection[str]) -> list[str]:
        """Return some rows in the order of the plan, in which a row stands after the one that it begins from."""
        return [name for name in self.rows if name in rows]

    def tuned_as(self, row: str) -> str:
        """Return the row whose lines were walked for a row: itself, or for one without lines the one it begins from."""
        while not self.rows[row].lines and self.rows[row].start:
            row = self.rows[row].start
        return row

    def rung_below(self, rung: str) -> str | None:
        """Return the last rung before this one that is tuned itself, as this one must be; None for the first."""
        tuned = [name for name, r in self.rungs.items() if r.tuned_at == name]
        at = tuned.index(rung)
        return tuned[at - 1] if at else None

    def not_tuned(self, rungs: Iterable[str]) -> str:
        """Return, in brackets, which of some rungs have the rates of another; "" where all have their own."""
        told = [self.rungs[name].called for name in rungs if self.rungs[name].tuned_at != name]
        return f" ({'; '.join(told)})" if told else ""


#: What a line may be of (`Ladder.overrides` says which setting each is), and those that are of outer steps.
OUTER_LINES = ("gain", "momentum", "rise")
KINDS_OF_LINE = ("lr", "muon", "warmup", "embedding", *OUTER_LINES)


def _list(section: Mapping[str, Any], key: str, where: str) -> tuple[Any, ...]:
    """Return a list of a section of plan.yaml, () where there is none. Raises ConfigError for what is no list."""
    found = section.get(key)
    if found is not None and not isinstance(found, list):
        raise ConfigError(f"{where}.{key} in plan.yaml must be a list, got {found!r}")
    return tuple(found or ())


def _number(name: str, value: Any) -> float:
    """Return a number of plan.yaml as a float. Raises ConfigError where it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name} = {value!r} must be a number (YAML reads 1e-2 as text, and 1.0e-2 as a number)")
    return float(value)


def _entry(section: Mapping[str, Any] | None, where: str, needed: Sequence[str] = (), valid: Sequence[str] = ()) -> Any:
    """Return a section of plan.yaml, {} for an empty one.

    Raises ConfigError where a needed key is missing or, where keys are named, another is there.
    """
    section = {} if section is None else section
    if not isinstance(section, Mapping):
        raise ConfigError(f"{where} in plan.yaml must have keys, got {section!r}")
    for key in section if needed or valid else ():
        if key not in (*needed, *valid):
            raise ConfigError(f"unknown key {where}.{key} in plan.yaml{nearest(key, {*needed, *valid})}")
    for key in needed:
        if key not in section:
            raise ConfigError(f"{where} in plan.yaml needs {key}")
    return section


def read_plan(path: Path) -> Plan:
    """Read a plan.yaml. Raises ConfigError where it names what there is not, lacks what it needs, or breaks a rule."""
    told = _entry(read_yaml(path), "plan", ("rungs", "rows", "lines"), ("headline", "published"))
    lines, rows, rungs = {}, {}, {}
    for name, entry in _entry(told["lines"], "lines").items():
        pick(dict.fromkeys(KINDS_OF_LINE), name, "line")
        entry = _entry(entry, f"lines.{name}", ("begin",), ("factor", "values"))
        begin, factor = (_number(f"lines.{name}.{key}", entry.get(key, 0.0)) for key in ("begin", "factor"))
        if factor and not begin > 0:
            raise ConfigError(f"lines.{name}.begin = {entry['begin']} must be above 0: it is taken times a factor")
        values = tuple(_number(f"lines.{name}.values", value) for value in _list(entry, "values", f"lines.{name}"))
        lines[name] = Line(begin, factor, values)
    for name, entry in _entry(told["rows"], "rows").items():
        entry = _entry(entry, f"rows.{name}", (), ("from", "lines", "begin", "rungs", "seeds"))
        start, own, seeds = entry.get("from", ""), _list(entry, "rungs", f"rows.{name}"), entry.get("seeds", {})
        if not isinstance(seeds, dict):
            raise ConfigError(f"rows.{name}.seeds = {seeds!r} must say how many at which rung, as {{0.12M: 3}}")
        seeds = {rung: whole_number(f"rows.{name}.seeds.{rung}", count) for rung, count in seeds.items()}
        begin = {
            line: _number(f"rows.{name}.begin.{line}", value)
            for line, value in _entry(entry.get("begin"), f"rows.{name}.begin").items()
        }
        row = Row(name, _list(entry, "lines", f"rows.{name}"), start, tuple(begin.items()), own, seeds)
        for rung in own:
            pick(told["rungs"], rung, f"rung of rows.{name}")
        for line in (*row.lines, *begin):
            if not pick(lines, line, f"line of rows.{name}").has(begin.get(line, lines[line].begin)):
                raise ConfigError(
                    f"rows.{name}.begin.{line} = {begin[line]:g} is not among that line's values,"
                    f" {', '.join(map(str, lines[line].values))}"
                )
        if row.start and row.start not in rows:
            raise ConfigError(f"rows.{name} begins from {row.start!r}, which must stand before it")
        rows[name] = row
    for name, entry in _entry(told["rungs"], "rungs").items():
        entry = _entry(entry, f"rungs.{name}", ("seeds", "tuned_at"), ("rows", "gpu"))
        whole_number(f"rungs.{name}.seeds", entry["seeds"])
        chosen = tuple(entry.get("rows", (row.name for row in rows.values() if name in (row.rungs or (name,)))))
        for row in chosen:
            pick(rows, row, f"row of rungs.{name}")
        at = pick(told["rungs"], entry["tuned_at"], f"rung to tune {name} at")
        if (at or {}).get("tuned_at") != entry["tuned_at"]:
            raise ConfigError(f"rungs.{name}.tuned_at = {entry['tuned_at']!r} is a rung that is not tuned itself")
        rungs[name] = Rung(name, entry["seeds"], entry["tuned_at"], chosen, entry.get("gpu", False))
    for row in rows.values():
        for rung in row.seeds:
            if row.name not in pick(rungs, rung, f"rung of rows.{row.name}.seeds").rows:
                raise ConfigError(f"rows.{row.name}.seeds has {rung!r}, a rung that does not have this row")
    published = _entry(told.get("published"), "published")
    for row, preset in published.items():
        pick(rows, row, "row of published")
        pick(PRESETS, preset, f"size of published.{row}")
    if not (shown := told.get("headline")):
        return Plan(rungs, rows, lines, published=published)
    _entry(shown, "headline", ("rung", "rows"))
    for row in shown["rows"]:
        if row not in pick(rungs, shown["rung"], "rung of the headline").rows:
            raise ConfigError(f"headline.rows has {row!r}, which is no row of rungs.{shown['rung']}")
    return Plan(rungs, rows, lines, (shown["rung"], tuple(shown["rows"])), published)


@functools.lru_cache(maxsize=8)
def _parsed(text: str) -> dict[str, dict[str, Any]]:
    """Return the content of a file of tuned values, which takes long to parse and is read for each row.

    It is shared between calls, so it must not be changed.
    """
    return yaml.safe_load(text)


@dataclass(frozen=True)
class Ladder:
    """A ladder: a project whose scales are rungs, with a plan.yaml beside its params.yaml.

    folder: that of both files. build: the folder of what is heavy. results: the folder of what is kept, in git.
    """

    folder: Path
    build: Path
    results: Path

    @functools.cached_property
    def project(self) -> Project:
        """The project, with its runs and corpora."""
        return Project(self.folder, self.build)

    @functools.cached_property
    def plan(self) -> Plan:
        """The content of its plan.yaml."""
        return read_plan(self.folder / "plan.yaml")

    @functools.cached_property
    def params(self) -> dict[str, Any]:
        """The content of its params.yaml."""
        return self.project.load_params()

    @property
    def first_rung(self) -> str:
        """The name of the first rung, whose corpora all rungs share."""
        return next(scale for scale in self.params["scales"] if scale != SCALE)

    @property
    def origin(self) -> Origin | None:
        """The origin of the points in `results`; None where none has been written yet."""
        return Origin.read(self.results)

    def probe(self, row: Row) -> str:
        """Return the digest of a row's run at smoke scale. Raises ConfigError where it has not been trained.

        Where probes here are trained on another text than those of the points, it is the digest of the latter.
        """
        file = self.build / "probes" / f"{row.run}.json"
        if not file.exists():
            raise ConfigError(f"no probe {file}: python -m pipelines.ladder prepare")
        if (origin := self.origin) and not origin.has_text_of(self):
            return pick(origin.probes.get(row.run, {}), row.variant, f"probe of {row.run} where points were trained")
        return pick(json.loads(file.read_text()), row.variant, f"probe in {file} (python -m pipelines.ladder prepare)")

    def corpus(self, name: str, rung: str) -> list[str]:
        """Return the digests of the tokenizer and the shards of a corpus, as it was prepared here.

        Raises ConfigError where it is missing.
        """
        folder = self.project.data_dir(name, rung)
        if not (folder / "card.json").exists():
            raise ConfigError(f"no corpus in {folder}: python -m pipelines.ladder prepare")
        return corpus_digests(folder)

    def overrides(self, row: Row, rung: str, values: Values) -> dict[str, Any]:
        """Return the settings that values of lines stand for, as sections for `Project.run_config`.

        "gain" is K = outer_lr / (1 - momentum), "momentum" the outer momentum; NoLoCo's pull is its outer_lr. "rise" is
        the share of the run in which the momentum rises from 0. Where the row's momentum follows points of the run, K
        is that of the last one; then ConfigError is raised where there is a momentum without a rise, or where factors
        of outer_lr do not end at 1. Values of outer steps mean nothing where there are none, or they have no rate; then
        ConfigError is raised for a line of the row's own, while others are those of a row that it begins from.
        """
        plain = self.project.run_config(row.run, variant=row.variant, scale=rung, params=self.params)
        found: dict[str, dict[str, Any]] = {"train": {}, "model": {}, "method": {}}
        if "lr" in values:
            found["train"]["lr"] = values["lr"]
        if "muon" in values:
            found["train"]["muon_lr"] = values["muon"]
        if "warmup" in values:
            found["train"]["warmup_steps"] = round(values["warmup"] * plain.train.steps)
        if "embedding" in values:
            found["model"]["embedding_std"] = values["embedding"]
        method = plain.method
        if not plain.exchanges_parameters or method.outer == "average":
            if idle := [name for name in OUTER_LINES if name in values and name in row.lines]:
                raise ConfigError(f"row {row.name}: {idle[0]} means nothing without outer steps that have a rate")
        elif {*OUTER_LINES} & {*values}:
            points = method.outer_momentum_points
            if points and "momentum" in values and "rise" not in values:
                raise ConfigError(f"row {row.name}: a momentum means nothing where it follows points of the run")
            last = Points(points, "method.outer_momentum_points").at(1.0) if points else method.outer_momentum
            shape = method.outer_lr_shape
            if points and shape and (factor := Points(shape, "method.outer_lr_shape").at(1.0)) != 1:
                raise ConfigError(f"row {row.name}: its last outer_lr_shape is {factor:g}, and the gain is told of 1")
            momentum = values.get("momentum", last)
            gain = values.get("gain", method.outer_lr / (1 - last))
            found["method"] = {"outer_lr": float(f"{gain * (1 - momentum):.6g}")}
            if "rise" in values:
                found["method"] |= {"outer_momentum": 0.0}
                found["method"]["outer_momentum_points"] = ["0@0", f"{momentum:g}@{values['rise']:g}"]
            elif not points:
                found["method"]["outer_momentum"] = momentum
            if method.outer == "noloco":
                found["method"]["outer_pull"] = found["method"]["outer_lr"]
        return found

    def trial(self, row: Row, rung: str, values: Values) -> Point:
        """Return the trial of a row at a rung with some values of lines."""
        return Point(self, row, rung, 0, tuple(sorted(values.items())), is_trial=True)

    def configs(self, rung: str) -> dict[str, RunConfig]:
        """Return the settings of each row of a rung, before anything is tuned."""
        return {name: self.trial(self.plan.rows[name], rung, {}).config for name in self.plan.rungs[rung].rows}

    def results_at(self, rung: str, rows: Collection[str] = ()) -> list[Point]:
        """Return all results of a rung, or those of some rows, seed by seed, with the values that tuning found.

        Raises ConfigError where a row is not tuned.
        """
        there = self.plan.rungs[rung]
        tuned = {name: entry["values"] for name, entry in self.read_tuned(there.tuned_at).items()}
        asked = [name for name in there.rows if not rows or name in rows]
        values = {name: tuple(sorted(pick(tuned, name, f"tuned row of {rung}").items())) for name in asked}
        points = [
            Point(self, self.plan.rows[name], rung, seed, values[name], is_trial=False)
            for name in asked
            for seed in range(there.seeds_of(self.plan.rows[name]))
        ]
        return sorted(points, key=lambda point: point.seed)

    def points_there(self, rung: str, rows: Collection[str]) -> list[Point]:
        """Return the results of some rows at a rung whose `outcomes` stand in git; an untuned row has none."""
        tuned = self._tuned_for(rung)
        if not (asked := [row for row in rows if row in tuned]):
            return []
        seeds = {row: [told["seed"] for told in self.outcomes(rung, row)] for row in asked}
        return [point for point in self.results_at(rung, asked) if point.seed in seeds[point.row.name]]

    def outcomes(self, rung: str, row: str) -> list[dict[str, Any]]:
        """Return the outcomes of a row's results at a rung, seed by seed, as they stand in git.

        Those that were trained with other values than tuning has found since are left out, and so are all of a row that
        is yet to be tuned.
        """
        if (entry := self._tuned_for(rung).get(row)) is None:
            return []
        files = sorted((self.results / "points" / rung / row).glob("seed*.json"))
        return [told for file in files if (told := json.loads(file.read_text()))["values"] == entry["values"]]

    def _tuned_for(self, rung: str) -> dict[str, dict[str, Any]]:
        """Return what tuning found at the rung whose values a rung takes, by row; empty where it has not begun."""
        at = self.plan.rungs[rung].tuned_at
        return self.read_tuned(at) if self.tuned_file(at).exists() else {}

    def tuned_file(self, rung: str) -> Path:
        """Return the path of the file of the values that tuning found at a rung."""
        return self.results / "tuned" / f"{rung}.yaml"

    def read_tuned(self, rung: str) -> dict[str, dict[str, Any]]:
        """Return what tuning found at a rung, by row: its "values", "tuning_loss" and number of "trials".

        A row without lines has the values of the row that it begins from, of no trial of its own. A row whose lines
        have not been walked is left out, and so is what begins from it. Raises ConfigError where the rung has not been
        tuned.
        """
        if not (file := self.tuned_file(rung)).exists():
            raise ConfigError(f"{file} is missing: python -m pipelines.ladder tune {rung}")
        walked, found = _parsed(file.read_text()), {}
        for row in (self.plan.rows[name] for name in self.plan.in_order(self.plan.rungs[rung].rows)):
            if row.lines:
                found |= {row.name: walked[row.name]} if row.name in walked else {}
            elif not row.start:
                found[row.name] = {"values": {}, "trials": 0}
            elif row.start in found:
                found[row.name] = {"values": found[row.start]["values"], "trials": 0}
        return found

    def read_predictions(self) -> dict[str, Any]:
        """Return what has been registered for rungs and for sizes of the papers, by name; empty where nothing has."""
        file = self.results / "predictions.yaml"
        return yaml.safe_load(file.read_text()) if file.exists() else {}

    def unregistered(self, rung: str, rows: Collection[str] = ()) -> list[str]:
        """Return which of some rows must be predicted before they have a point at a rung, and are not.

        That is so where a rung takes what was tuned at another, for all rows but data-parallel training. rows: by
        default all of the rung.
        """
        there = self.plan.rungs[rung]
        known = self.read_predictions().get(rung, {}).get("rows", {})
        asked = [name for name in there.rows if (not rows or name in rows) and not name.startswith("data_parallel/")]
        return [] if there.tuned_at == rung else [name for name in asked if name not in known]

    def check_registered(self, rung: str, rows: Collection[str] = ()) -> None:
        """Raise ConfigError where a row is `unregistered`."""
        for name in self.unregistered(rung, rows):
            raise ConfigError(
                f"{name} has not been predicted at {rung}: python -m pipelines.ladder predict {rung} {name}"
            )


def base_of(row: str, configs: Mapping[str, RunConfig]) -> str:
    """Return the row of data-parallel training with a row's batch and number of steps, against which its gap is taken.

    Of several rows it is the first of the plan.

    configs: those of all rows of a rung (`Ladder.configs`). Raises ConfigError where no such row has both.
    """
    batch, steps = configs[row].train.global_batch, configs[row].train.steps
    for name, c in configs.items():
        if name.startswith("data_parallel/") and (c.train.global_batch, c.train.steps) == (batch, steps):
            return name
    raise ConfigError(f"{row} has {steps} steps of {batch} sequences, and no row of data-parallel training has those")


def deciding(settings: dict[str, Any]) -> dict[str, Any]:
    """Return those of a run's settings that decide its outcome.

    Links, checkpoints, how often rows are written and what is compiled do not, but for roundings; they are left out.
    """
    found = {name: section for name, section in settings.items() if name not in ("comm", "checkpoint")}
    train = {name: value for name, value in found["train"].items() if name not in ("log_every", "compile")}
    return found | {"train": train}


@dataclass(frozen=True)
class Point:
    """A run of a ladder with all its settings: a trial or a result.

    values: those of lines, as (name, value) in the order of names; what no line gives is as in params.yaml.
    """

    ladder: Ladder = field(repr=False)
    row: Row
    rung: str
    seed: int
    values: tuple[tuple[str, float], ...]
    is_trial: bool

    @functools.cached_property
    def config(self) -> RunConfig:
        """The configuration of the run. Raises ConfigError where its settings, or its values, break a rule."""
        sections = self.ladder.overrides(self.row, self.rung, dict(self.values))
        if self.is_trial:
            sections["train"]["eval_split"] = "tuning"
        named = {"variant": self.row.variant, "seed": self.seed, "scale": self.rung, "params": self.ladder.params}
        return self.ladder.project.run_config(self.row.run, **named, **sections)

    @property
    def data(self) -> Path:
        """The folder of its corpus."""
        return self.ladder.project.data_dir(self.config.data.corpus, self.rung)

    @property
    def file(self) -> Path:
        """The file of its outcome."""
        if not self.is_trial:
            return self.ladder.results / "points" / self.rung / self.row.name / f"seed{self.seed}.json"
        key = ",".join(f"{name}={value:g}" for name, value in self.values)
        return self.ladder.results / "tuning" / self.rung / self.row.name / f"{key}.json"

    @property
    def title(self) -> str:
        """The point in prose, as 'diloco/m2 at 0.33M, seed 0'; a trial has its values in place of the seed."""
        told = ", ".join(f"{name} {value:g}" for name, value in self.values)
        return f"{self.row.name} at {self.rung}, " + (f"trial of {told}" if self.is_trial else f"seed {self.seed}")

    def made_from(self) -> str:
        """Return a digest of what decides its outcome: settings, corpus and probe (see `pipelines.probes`).

        The corpus is that of the points where there are any, and so is the probe where the text here is another than
        theirs (`origin`). Raises ConfigError where the corpus or the probe is missing.
        """
        name = self.config.data.corpus
        told = {
            "settings": deciding(set_values(self.config)),
            "corpus": origin.corpora[name] if (origin := self.ladder.origin) else self.ladder.corpus(name, self.rung),
            "probe": self.ladder.probe(self.row),
        }
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def read(self) -> dict[str, Any] | None:
        """Return its outcome where it is done and was made from what there is now; else None."""
        if not self.file.exists():
            return None
        told = json.loads(self.file.read_text())
        return told if told["made_from"] == self.made_from() else None


LADDER = Ladder(Path(__file__).resolve().parent, BUILD / "ladder", ROOT / "results" / "ladder")
