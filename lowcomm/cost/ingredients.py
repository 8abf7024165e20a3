"""The ingredients of methods, and the loss that each costs: as measured by runs, and as papers print it.

A penalty is ln(loss with the ingredient / loss without it); those of a method's ingredients are added up. The table of
penalties (`results/ladder/penalties.csv`) has sources, our ladder and papers; each has measured an ingredient with some
numbers of replicas, amounts (H, slices, D / k) and sizes of model. An ingredient is taken from the source that
is nearest to what is asked, in the product of the factors of replicas, amount and parameters:

- between sizes it lies on the line through the neighbours in ln N; beyond them it stays what it was at the last one,
  and a gain there counts as none, so that no method is advised for what nobody has seen, while its deviation grows by
  a `drift` for each factor of e: by as much as its slope is uncertain;
- between amounts, and between numbers of replicas, it lies on the line in their logarithm; beyond them it goes on as
  the line from the first to the last, but does not fall. Amounts begin where nothing is paid for them: at H = 30 (of
  which "local updates" speak), at one slice, at the whole stream. Where one number of replicas was measured, the
  deviation grows with the distance to it, for each factor of e by as much as ingredients other than local updates
  change with that number where several were measured (the median of their slopes);
- where the source that is next is nearly as near, the two should agree: half of their difference is added to the
  deviation, times the square of the ratio of their distances.

`extrapolated` says how far away the run is that is nearest: the largest of its factors. That a sum of penalties is not
the penalty of the whole is measured too (the ingredient "composed") and widens the deviation of methods of several
ingredients.

A penalty becomes tokens, and so days, by a law of loss with a floor (`Law`): one that is larger than all that tokens
can do for a model of this size is never bought back.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lowcomm.methods.config import BoundaryConfig, MethodConfig
from lowcomm.methods.named import DeMo, DiLoCo, GASLoC, NoLoCo, SparseLoCo, StreamingDiLoCo
from lowcomm.model.config import ModelConfig
from lowcomm.settings import ConfigError


@dataclass(frozen=True)
class Method:
    """A method as a set of ingredients; by default it is dense data-parallel training with AdamW.

    sync_every_steps: H of local updates, 0 where gradients are exchanged. streaming: fragments that are sent in turn,
    in 4 bits, with overlap. pairs: random pairs average in place of all replicas (NoLoCo). slices: the number of slices
    that MLPs are cut into, of which a replica trains one. ratio: D / R of a subspace or a projection, 1 for a dense
    boundary.

    sparse_messages: of outer gradients the largest of each chunk are sent, in 2 bits, with error feedback and no
    momentum (SparseLoCo). muon: Muon is the inner optimizer. rising_momentum: the outer momentum rises from 0 in the
    first half of the run. gossip_momentum: with pairs, GASLoC's momentum takes the place of NoLoCo's. demo: DeMo, which
    sends the largest cosines of what has not been sent yet after each step, with plain SGD inside. projection: stages
    exchange coordinates of a model whose weights are free, in 4 bits, in place of a subspace's. two_bits: with Muon
    inside, outer gradients are sent in 2 bits each, with error feedback (MuLoCo). clipped_mean: outer gradients with a
    norm above the median norm are scaled down to it, so that a replica that sends nonsense cannot decide.
    """

    sync_every_steps: int = 0
    streaming: bool = False
    pairs: bool = False
    slices: int = 1
    ratio: int = 1
    sparse_messages: bool = False
    muon: bool = False
    rising_momentum: bool = False
    gossip_momentum: bool = False
    demo: bool = False
    projection: bool = False
    two_bits: bool = False
    clipped_mean: bool = False

    @property
    def name(self) -> str:
        """Return the name of the method in tables, such as "every 30 steps, streaming, pairs"."""
        if self.demo:
            return "DeMo"
        parts = ["gradients" if not self.sync_every_steps else f"every {self.sync_every_steps} steps"]
        parts += ["streaming"] * self.streaming + ["rising momentum"] * self.rising_momentum
        parts += ["pairs"] * self.pairs + ["GASLoC"] * self.gossip_momentum + ["sparse"] * self.sparse_messages
        parts += ["2 bits"] * self.two_bits + ["clipped mean"] * self.clipped_mean
        parts += [f"1/{self.slices} of MLPs"] * (self.slices > 1)
        parts += [f"{self._between_stages} 1/{self.ratio}"] * (self.ratio > 1)
        parts += ["Muon"] * self.muon
        return ", ".join(parts)

    @property
    def whatever_rounds(self) -> Method:
        """The method that stands for all that differ from this one in H alone, and hold as much memory as it does."""
        return replace(self, sync_every_steps=min(1, self.sync_every_steps))

    @property
    def _between_stages(self) -> str:
        return "projection" if self.projection else "subspace"

    def ingredients(self, stages: int) -> dict[str, float]:
        """Return the amounts of the method's ingredients, by their names in a table of penalties.

        Dense data-parallel training has none.
        """
        found = {}
        if self.demo:
            found = {"DeMo": 1.0}
        elif self.sync_every_steps:
            found = {"local updates": 1.0, "rounds": float(self.sync_every_steps)}
            found |= {name: 1.0 for name in ("streaming", "pairs") if getattr(self, name)}
            if self.pairs and stages > 1:
                found["routes"] = 1.0
            if self.slices > 1:
                found["slices"] = float(self.slices)
            since = ("sparse_messages", "rising_momentum", "gossip_momentum", "two_bits", "clipped_mean")
            found |= {name.replace("_", " "): 1.0 for name in since if getattr(self, name)}
        if self.muon:
            found["Muon inside" if self.sync_every_steps else "Muon"] = 1.0
        if self.ratio > 1:
            found[self._between_stages] = float(self.ratio)
        return {name: amount for name, amount in found.items() if amount != NO_PENALTY.get(name)}

    def settings(self, model: ModelConfig, stages: int) -> MethodConfig:
        """Return the method's settings: those of the named method that it is or begins with, and its choices.

        Raises ConfigError where the model is not as wide as the ratio is large.
        """
        codec = "bf16" if stages > 1 else "fp32"  # as what is computed
        boundary = BoundaryConfig(codec=codec)
        if self.ratio > 1:
            if not (rank := model.dim // self.ratio):
                raise ConfigError(f"a {self._between_stages} 1/{self.ratio} of model.dim = {model.dim} is less than 1")
            boundary = (
                BoundaryConfig("projection", rank, "e3m0")
                if self.projection
                else BoundaryConfig("subspace", rank, codec, update_every_steps=500, update_lr=1.0)
            )
        if not self.sync_every_steps:
            return MethodConfig(exchange="gradients", boundary=boundary)
        streamed = StreamingDiLoCo.default
        if self.demo:
            named = replace(DeMo.default, outer_lr_shape=DEMO_SHAPE)
        elif self.sparse_messages:
            named = SparseLoCo.default
        elif self.gossip_momentum:
            named = GASLoC.default
        elif self.pairs:
            named = NoLoCo.default
        else:
            named = replace(DiLoCo.default, outer_lr=streamed.outer_lr)
        found: dict[str, Any] = {"route": "random_micro_batch" if self.pairs and stages > 1 else "fixed"}
        if self.rising_momentum:
            found |= {"outer_momentum": 0.0, "outer_momentum_points": ("0@0", "0.9@0.5")}
        if self.streaming:
            found |= {name: getattr(streamed, name) for name in ("fragments", "overlap_steps", "mixing", "codec")}
            found |= {"offload_outer": True}
        if self.slices > 1:
            found |= {"trainable": "slice", "slices": self.slices, "sliced": ("mlp",)}
        if self.two_bits:
            found |= {"codec": "levels", "error_feedback": 0.9}
        if self.clipped_mean:
            found |= {"mean": "clipped"}
        return replace(named, sync_every_steps=self.sync_every_steps, boundary=boundary, **found)


#: DeMo's outer rate over a run, as factors of what it is set to: a short rise, and what a cosine does from there on.
DEMO_SHAPE = ("0@0", "1@0.05", "0.85@0.3", "0.5@0.55", "0.18@0.8", "0.05@1")
#: Ingredients that are the same however many replicas there are.
OF_NO_REPLICAS = ("subspace", "projection", "Muon")
#: Amounts at which there is nothing to pay for.
NO_PENALTY = {"rounds": 30.0, "slices": 1.0, "subspace": 1.0}


@dataclass(frozen=True)
class Penalty:
    """The penalty of an ingredient or of a whole method, ln(loss with it / loss without it).

    log_ratio: the likely value. deviation: its standard deviation. extrapolated: the largest factor (of replicas,
    amount or parameters) between what it is for and the nearest run, 1 where they are the same. source: the source that
    measured it, "" for a sum.
    """

    log_ratio: float
    deviation: float
    extrapolated: float
    source: str = ""


class Composed(NamedTuple):
    """A run of several ingredients beside the sum of what each costs; both are logarithms of loss ratios.

    whole: the penalty of the run. summed: that of its `count` ingredients. error: the standard error of the difference.
    """

    parameters: float
    whole: float
    summed: float
    count: int
    error: float

    def told(self) -> str:
        """Return both in words, in % of the loss."""
        summed, whole = (f"{100 * math.expm1(value):+.1f} %" for value in (self.summed, self.whole))
        return (
            f"Of {self.count} ingredients at {self.parameters:,.0f} parameters such a sum says {summed}, a run of all"
            f" {whole}; the standard error of the difference is {100 * self.error:.1f} %."
        )


@dataclass(frozen=True)
class Law:
    """A law of loss with a floor, in nats per token: L(N, D) = floor + a N^-alpha + b D^-beta.

    The numbers are those of Besiroglu et al. (2024, arXiv:2404.10102), who fitted the third approach of Hoffmann et al.
    (2022, arXiv:2203.15556) again.
    """

    floor: float = 1.8172
    a: float = 482.01
    alpha: float = 0.3478
    b: float = 2085.43
    beta: float = 0.3658

    def factor(self, log_ratio: float, parameters: float, tokens: float) -> float:
        """Return x such that x times the tokens make up for a penalty: L(N, x D) e^penalty = L(N, D).

        It is 1 for a penalty of 0 or below, and infinite where no number of tokens is enough.
        """
        rest, text = self.floor + self.a * parameters**-self.alpha, self.b * tokens**-self.beta
        left = (rest + text) * math.exp(-max(0.0, log_ratio)) - rest
        return (text / left) ** (1 / self.beta) if left > 0 else math.inf


#: Of a table of penalties.
_ASKED, _MEASURED = ("replicas", "amount", "parameters"), ("log_ratio", "deviation", "drift")
COLUMNS = ("ingredient", *_ASKED, *_MEASURED, "source")


class Penalties:
    """The penalty of each ingredient, from a table of what was measured.

    Args:
        table: has the columns `COLUMNS`. drift: by how much the deviation grows beyond the sizes that were measured,
            for each factor of e. Of "local updates" a row says what they cost at H = 30; of "rounds", what an H of its
            amount costs beyond that. The amount of "slices" is their number, that of "subspace" and of "projection"
            D / k. A "composed" row is a run of all ingredients at once, with H = 30, 2 slices, and a subspace of its
            amount.
        law: says how many tokens make up for a loss.

    Raises ConfigError where the table lacks a column, has two rows of one kind, or has values that mean nothing.
    """

    def __init__(self, table: pd.DataFrame, law: Law | None = None):
        self.law = law or Law()
        self._sources: dict[str, dict[str, list[Any]]] = {}  # of each ingredient
        self._told: dict[tuple[str, float, float, float], Penalty] = {}  # what has been asked, as methods ask it again
        if lacking := [column for column in COLUMNS if column not in table]:
            raise ConfigError(f"a table of penalties has the columns {', '.join(COLUMNS)}; it lacks {lacking[0]}")
        for name in (*_ASKED, *_MEASURED):
            if not pd.api.types.is_numeric_dtype(table[name]):
                raise ConfigError(f"the column {name} of a table of penalties holds numbers, got {table[name].dtype}")
        for row in table.sort_values(["replicas", "amount", "parameters"]).itertuples():
            positive = (
                row.replicas >= 1 and row.parameters > 0 and row.amount > 0 and min(row.deviation, row.drift) >= 0
            )
            if not (positive and all(math.isfinite(getattr(row, name)) for name in (*_ASKED, *_MEASURED))):
                needs = "replicas, amount, parameters, a log_ratio, a deviation and a drift"
                raise ConfigError(f"a penalty needs {needs}, got {row._asdict()}")
            if row.amount == NO_PENALTY.get(row.ingredient):
                raise ConfigError(f"nothing is paid for {row.ingredient} = {row.amount:g}: a table has no row of it")
            self._sources.setdefault(row.ingredient, {}).setdefault(row.source, []).append(row)
        key = ["source", "ingredient", *_ASKED]
        if (again := table[table.duplicated(key)]).size:
            raise ConfigError(f"a table of penalties has one row of each kind, got two of {list(again.iloc[0][key])}")

    @classmethod
    def read(cls, path: Path) -> Penalties:
        """Read the penalties of a CSV file (such as `planner.measured_penalties`).

        Raises ConfigError where there is no such file, or its table is not as `Penalties` needs it.
        """
        if not path.is_file():
            raise ConfigError(f"{path} is no file: penalties are a table as in results/ladder/penalties.csv")
        return cls(pd.read_csv(path))

    def one(self, ingredient: str, amount: float, replicas: float, parameters: float) -> Penalty:
        """Return the penalty of an ingredient alone, from its nearest source.

        Raises ConfigError where nothing has measured it.
        """
        question = ingredient, amount, replicas, parameters
        if question not in self._told:
            self._told[question] = self._one(*question)
        return self._told[question]

    def _one(self, ingredient: str, amount: float, replicas: float, parameters: float) -> Penalty:
        if ingredient not in self._sources:
            raise ConfigError(f"nothing has measured {ingredient}")
        asked = {"amount": amount, "parameters": parameters, "replicas": replicas}
        if ingredient in OF_NO_REPLICAS:
            del asked["replicas"]
        apart = {
            source: min(
                ([abs(math.log(value / getattr(row, name))) for name, value in asked.items()] for row in rows), key=sum
            )
            for source, rows in self._sources[ingredient].items()
        }
        source, *others = sorted(apart, key=lambda source: sum(apart[source]))
        value, deviation = self._of_source(ingredient, source, amount, replicas, parameters)
        if others:
            other, _ = self._of_source(ingredient, others[0], amount, replicas, parameters)
            near, far = sum(apart[source]), sum(apart[others[0]])
            deviation = math.hypot(deviation, (near / far) ** 2 * (other - value) / 2 if far else 0.0)
        return Penalty(value, deviation, math.exp(max(apart[source])), source)

    def _of_source(
        self, ingredient: str, source: str, amount: float, replicas: float, parameters: float
    ) -> tuple[float, float]:
        """Return the penalty of an ingredient by one source, as (log_ratio, deviation)."""

        def at_amount(rows: list[Any]) -> tuple[float, float]:
            points = [(there, *_at_size(some, parameters)) for there, some in _split(rows, "amount")]
            if ingredient in NO_PENALTY:
                points.append((NO_PENALTY[ingredient], 0.0, 0.0))
            return _rising(sorted(points), amount)

        rows = self._sources[ingredient][source]
        points = [(there, *at_amount(some)) for there, some in _split(rows, "replicas")]
        value, deviation = _rising(points, replicas)
        if len(points) == 1 and ingredient not in OF_NO_REPLICAS:
            deviation = math.hypot(deviation, self._per_replicas * math.log(replicas / points[0][0]))
        return value, deviation

    @functools.cached_property
    def _per_replicas(self) -> float:
        """Return by how much penalties change for each factor of e in replicas, where a source has several numbers.

        It is the median over sizes and amounts, each from the fewest replicas to the most, of all ingredients that are
        added to local updates.
        """
        slopes = []
        for ingredient, sources in self._sources.items():
            for rows in sources.values() if ingredient != "local updates" else ():
                for _, some in _split(rows, "amount"):
                    for _, alike in _split(some, "parameters"):
                        first, last = (end(alike, key=lambda row: row.replicas) for end in (min, max))
                        if last.replicas > first.replicas:
                            change = abs(last.log_ratio - first.log_ratio)
                            slopes.append(change / math.log(last.replicas / first.replicas))
        return statistics.median(slopes) if slopes else 0.0

    def knows(self, method: Method, stages: int) -> bool:
        """Tell whether all ingredients of a method have been measured, and slices at least as thin as the method's.

        How the penalty of slices goes on beyond the thinnest that were trained is unknown, but that it rises quickly.
        """
        return method.ingredients(stages).keys() <= self._sources.keys() and method.slices <= self._thinnest

    @functools.cached_property
    def _thinnest(self) -> float:
        """Return the largest number of slices that was measured, 1 where none was."""
        return max((row.amount for rows in self._sources.get("slices", {}).values() for row in rows), default=1.0)

    def parts(self, method: Method, replicas: int, stages: int, parameters: float) -> dict[str, Penalty]:
        """Return the penalty of each ingredient of a method, by its name.

        Raises ConfigError where one has not been measured.
        """
        amounts = method.ingredients(stages)
        return {name: self.one(name, amount, replicas, parameters) for name, amount in amounts.items()}

    def of(self, method: Method, replicas: int, stages: int, parameters: float) -> Penalty:
        """Return the sum of the penalties of a method's ingredients, which is 0 for dense data-parallel training.

        Raises ConfigError where one has not been measured.
        """
        return self._sum(self.parts(method, replicas, stages, parameters).values())

    def _sum(self, parts: Iterable[Penalty]) -> Penalty:
        """Return the sum of penalties, with a deviation that also counts what such a sum misses (`missed`)."""
        parts = list(parts)
        interplay = self.missed * (len(parts) - 1) if len(parts) > 1 else 0.0
        return Penalty(
            sum(p.log_ratio for p in parts),
            math.hypot(interplay, *(p.deviation for p in parts)),
            max((p.extrapolated for p in parts), default=1.0),
        )

    @functools.cached_property
    def missed(self) -> float:
        """Return how far a sum of penalties is off a composed run, at most, per ingredient beyond the first.

        It is a difference of logarithms of loss ratios, and 0 where there is no composed run.
        """
        checks = self.composed()
        return max((abs(c.whole - c.summed) / (c.count - 1) for c in checks), default=0.0)

    def composed(self) -> list[Composed]:
        """Return each composed run beside the sum of its ingredients' penalties, from small models to large.

        Runs with an ingredient that has not been measured are left out, as they have no sum.
        """
        found = []
        for rows in self._sources.get("composed", {}).values():
            for row in rows:
                method = Method(30, streaming=True, pairs=True, slices=2, ratio=round(row.amount))
                if not self.knows(method, 2):
                    continue
                parts = self.parts(method, round(row.replicas), 2, row.parameters).values()
                summed = sum(p.log_ratio for p in parts)
                error = math.hypot(row.deviation, *(p.deviation for p in parts))
                found.append(Composed(float(row.parameters), float(row.log_ratio), summed, len(parts), error))
        return sorted(found)

    def buy_back(self, penalty: Penalty, parameters: float, tokens: float) -> tuple[float, float, float]:
        """Return the factors on the tokens that buy a penalty back: (likely, low, high), one deviation each way.

        A factor is infinite where no number of tokens is enough.
        """
        p, off = penalty.log_ratio, penalty.deviation
        return tuple(self.law.factor(value, parameters, tokens) for value in (p, p - off, p + off))


def _split(rows: Sequence[Any], column: str) -> list[tuple[float, list[Any]]]:
    """Return the values of a column in ascending order, each with its rows."""
    return [(v, [row for row in rows if getattr(row, column) == v]) for v in sorted({getattr(r, column) for r in rows})]


def _at_size(rows: Sequence[Any], parameters: float) -> tuple[float, float]:
    """Return (log_ratio, deviation) at a number of parameters, from rows in ascending order of it.

    They are on the line through the neighbours in ln N. Beyond the first and the last row they are those of that row,
    but a gain counts as none, and the deviation grows by the row's drift for each factor of e.
    """
    end = rows[0] if parameters < rows[0].parameters else rows[-1]
    if rows[0].parameters <= parameters <= rows[-1].parameters and len(rows) > 1:
        a, b = (rows[i] for i in _neighbours([row.parameters for row in rows], parameters))
        share = math.log(parameters / a.parameters) / math.log(b.parameters / a.parameters)
        both = ((1 - share) * x + share * y for x, y in ((a.log_ratio, b.log_ratio), (a.deviation, b.deviation)))
        value, deviation = map(float, both)
        return value, deviation
    apart = abs(math.log(parameters / end.parameters))
    return float(max(0.0, end.log_ratio) if apart else end.log_ratio), float(end.deviation + apart * end.drift)


def _rising(points: Sequence[tuple[float, float, float]], x: float) -> tuple[float, float]:
    """Return (log_ratio, deviation) at x, from points (x, log_ratio, deviation) in ascending order of x.

    They are on the line through the neighbours in ln x. Beyond the last point it is the line from the first to the
    last, which does not fall; below the first it is level.
    """
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1:]
    left, right = _neighbours([point[0] for point in points], x)
    if x > points[-1][0]:
        left = 0
    (begin, a, a_off), (end, b, b_off) = points[left], points[right]
    share = math.log(x / begin) / math.log(end / begin)
    value = a + share * (b - a) if share <= 1 else b + (share - 1) * max(0.0, b - a)
    return value, math.hypot((1 - share) * a_off, share * b_off)


def _neighbours(sorted_values: Sequence[float], value: float) -> tuple[int, int]:
    """Return the indices of the two values between which `value` lies, or of the two at the end that it lies beyond."""
    right = next((i for i, v in enumerate(sorted_values) if i and value <= v), len(sorted_values) - 1)
    return right - 1, right
