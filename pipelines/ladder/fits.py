"""Gaps on the ladder: what methods lose to data-parallel training, how that falls with size, and what is predicted.

A gap is d = ln(loss / data-parallel's), paired by seeds (`verdicts.Paired`), against the data-parallel row of the same
batch and number of steps. Over sizes it is fitted by least squares on all pairs at once,

    d = at_one + slope ln N

with N parameters: straight in the logarithm, as gaps may be of either sign. Pairs count by how much those of their size
deviate, in all rows alike (`spreads_of`), and intervals are Student's: a bootstrap over 2 to 5 seeds holds the truth in
64 to 85 of 100 cases where it says 95, and so do intervals of pairs that are thought to deviate alike at all sizes. The
loss of data-parallel training itself follows L(N) = E + A N^-alpha, of which two sizes give two numbers; so its
prediction is for a range of alpha.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import yaml
from numpy.typing import ArrayLike

from lowcomm.experiment.project import pick
from lowcomm.model.accounting import parameters
from lowcomm.model.presets import PRESETS
from lowcomm.settings import ConfigError
from pipelines.ladder.plan import PUBLISHED, Ladder, Rung, base_of
from pipelines.project import locked, write_whole
from pipelines.report import Comparison, published, regime_of, span
from pipelines.verdicts import Evidence, Likely, Paired, Regime, Unpaired, log_ratios, quantile, student

#: Exponents of the law of loss: the likely one, as in published fits, and the highest; the lowest leaves no floor.
LIKELY, HIGHEST = 0.34, 0.6


#: A note for tables of gaps.
OF_SEED_0 = (
    "Seed 0 is the run by which tuning chose the rates (there its loss was taken on other text), so that a tuned row is"
    " likely to be better at it than at other seeds, and a row that has another's rates is not; rows of one seed are"
    " that seed."
)


#: The main row of each paper, and that of all four together, with their names in prose: the README tells of these rows,
#: and their lines are carried beyond our sizes.
MAIN_ROWS = {
    "diloco/m2": "DiLoCo on 2 replicas",
    "streaming/h30": "Streaming DiLoCo",
    "noloco/m4": "NoLoCo on 4",
    "partial/half": "half of the MLPs on each of 8 (H = 15, twice the batch, against data-parallel training on that)",
    "protocol/quarter": "a subspace of a quarter of the width",
    "together/all": "all four at once",
}
#: The fewest rows of three pairs or more that tell how much pairs of a size deviate.
SPREAD_ROWS = 5
#: The fewest pairs of a line that is drawn with its band: the band of fewer would fill a figure.
BAND_PAIRS = 6


class TooFewSeeds(ConfigError):
    """Raised where no rung of the ladder has enough seeds of some rows yet."""


@dataclass(frozen=True)
class Cell:
    """A row of the ladder at a rung: its losses by seed, those of data-parallel training, and what the runs were.

    base: the losses of the data-parallel row against which its gap is taken.
    """

    row: str
    rung: str
    replicas: int
    parameters: int
    tokens_per_parameter: float
    rounds: float  # infinite without local updates
    tokens_per_replica_and_step: float
    losses: dict[int, float]
    base: dict[int, float]

    @property
    def pairs(self) -> Paired:
        """The gap as differences of pairs of runs, by their seeds."""
        return Paired.of(self.losses, self.base)

    @property
    def gaps(self) -> list[float]:
        """The gap of each pair, ln(loss / data-parallel's), in the order of seeds."""
        return log_ratios(self.losses, self.base)

    @property
    def means(self) -> Unpaired:
        """The gap of the mean of all its runs to the mean of all runs of data-parallel training."""
        return Unpaired.of(self.losses, self.base)

    @property
    def bar(self) -> tuple[float, float]:
        """The ends of its bar in a figure, in % of the loss: those of the 95 % interval.

        They are the gaps of both pairs where there are two, and NaN where there is one.
        """
        _, low, high = self.pairs.percent()
        ends = [100 * math.expm1(gap) for gap in sorted(self.gaps)]
        return (ends[0], ends[1]) if len(ends) == 2 else (low, high)  # two have an interval of 13 deviations

    @property
    def regime(self) -> Regime:
        """The regime of its pairs: numbers of seeds and rounds, and tokens per parameter and per replica and step."""
        step = self.tokens_per_replica_and_step
        return Regime(len(self.gaps), self.rounds, self.tokens_per_parameter, step)


def read_cells(ladder: Ladder) -> list[Cell]:
    """Return the cells of all rows that have points, data-parallel training's included, rung by rung, from git.

    A row that has no seed in common with its data-parallel row is left out.
    """
    found = []
    for rung in ladder.plan.rungs.values():
        outcomes = {name: ladder.outcomes(rung.name, name) for name in rung.rows}
        losses = {name: {told["seed"]: told["val_loss"] for told in some} for name, some in outcomes.items()}
        configs = ladder.configs(rung.name)
        for name, c in configs.items():
            try:
                base = losses[base_of(name, configs)]
            except ConfigError as error:
                raise ConfigError(f"rung {rung.name}: {error}") from None
            if not losses[name].keys() & base.keys():
                continue
            tokens, numel = c.train.steps * c.train.global_batch * c.train.seq_len, parameters(c.model).total
            told = regime_of({"run": c.to_dict(), "tokens": tokens, "parameters": numel})
            what = told.tokens_per_parameter, told.rounds, told.tokens_per_replica_and_step
            found.append(Cell(name, rung.name, c.replicas, numel, *what, losses[name], base))
    return found


def at_their_best(
    ladder: Ladder, rows: Mapping[Any, str] | Sequence[str], *, seeds: int | Sequence[int] = (3, 2), at: str = ""
) -> tuple[str, Comparison]:
    """Return the largest tuned rung that has enough seeds of all of some rows, and their runs there, side by side.

    A rung with the rates of another is taken only where no tuned one has the seeds: what contradicts a paper there may
    be the rates (`beyond` has what is seen there). Name only rows that one claim compares: each further row may leave a
    smaller rung.

    Args:
        ladder: whose points are read.
        rows: the rows by their keys in the comparison; or rows, which are their own keys.
        seeds: how many all rows must have in common; of several numbers the first that some rung has. By default three
            where there are three, as the interval of two pairs is more than three times as wide.
        at: the only rung to look at, tuned or not; by default all.

    Raises:
        ConfigError: the plan has no such row; or no rung has the seeds (`TooFewSeeds`).
    """
    rows = dict(rows) if isinstance(rows, Mapping) else {row: row for row in rows}
    for row in rows.values():
        pick(ladder.plan.rows, row, "row of the ladder")
    rungs = [ladder.plan.rungs[at]] if at else list(reversed(ladder.plan.rungs.values()))
    rungs.sort(key=lambda rung: rung.tuned_at != rung.name)
    tries = [seeds] if isinstance(seeds, int) else list(seeds)
    found = {rung.name: _runs_at(ladder, rung, set(rows.values())) for rung in rungs}
    for least in tries:
        for name, runs in found.items():
            common = set.intersection(*({told["run"]["seed"] for told in runs.get(row, ())} for row in rows.values()))
            if len(common) >= least:
                return name, Comparison({key: runs[row] for key, row in rows.items()})
    some = " or ".join(map(str, tries))
    raise TooFewSeeds(f"no rung of the ladder has {some} seeds of all of {', '.join(rows.values())}: make ladder")


def best_runs(
    ladder: Ladder, rows: Mapping[Any, str] | Sequence[str], *, seeds: int | Sequence[int] = (3, 2), at: str = ""
) -> Comparison:
    """Return the runs of some rows, side by side, at the rung that `at_their_best` finds; the arguments are its own."""
    return at_their_best(ladder, rows, seeds=seeds, at=at)[1]


def beyond(
    ladder: Ladder, rows: Mapping[Any, str] | Sequence[str], rung: str, *, seeds: int | Sequence[int] = (3, 2)
) -> dict[str, Comparison]:
    """Return the runs of some rows, side by side, at each rung above `rung` that has enough seeds of all of them.

    The arguments are those of `at_their_best`.
    """
    names, found = list(ladder.plan.rungs), {}
    for name in names[names.index(rung) + 1 :]:
        with contextlib.suppress(TooFewSeeds):
            found[name] = best_runs(ladder, rows, seeds=seeds, at=name)
    return found


def evidence_at_best(
    ladder: Ladder, test: Callable[..., Evidence], one: str, other: str, **margin: float
) -> Evidence | None:
    """Return what a test of two rows says where both are at their best; None where no rung has enough seeds of both.

    Args:
        ladder: whose points are read.
        test: `Comparison.lower`, `Comparison.no_worse` or `Comparison.equal`.
        one: the row that is lower, no worse or equal.
        other: the row that it is held against.
        margin: the test's `by` or `margin`, where it is not the usual one.
    """
    try:
        return test(best_runs(ladder, (one, other)), one, other, **margin)
    except TooFewSeeds:
        return None


def told_over(ladder: Ladder, one: str, other: str, *, seeds: int | Sequence[int] = (3, 2)) -> str:
    """Say what a row loses over another where both are at their best, and at the sizes beyond.

    It is as in "by +3.66 (0.75 to 6.64) % at 0.33M (5 seeds) and by +2.54 (-4.29 to 9.87) % at 1.05M, with the rates of
    0.33M (3 seeds)", and says so where no rung has enough seeds of both, or where a row has no lines of its own and so
    the rates of another. `seeds` is as in `at_their_best`.
    """
    try:
        rung, best = at_their_best(ladder, (one, other), seeds=seeds)
    except TooFewSeeds:
        return "by an amount that is not known yet (no size has enough seeds of both)"
    places = {rung: best} | beyond(ladder, (one, other), rung, seeds=seeds)
    taken: dict[str, list[str]] = {}
    for row in (one, other):
        if (at := ladder.plan.tuned_as(row)) != row:
            taken.setdefault(at, []).append(row)
    rates = "".join(f", {' and '.join(rows)} at the rates of {at}" for at, rows in taken.items())
    return " and ".join(
        f"by {c.over(one, other, 2)} at {ladder.plan.rungs[name].called} ({c.told_seeds(one, other)}{rates})"
        for name, c in places.items()
    )


def each_at_its_best(
    ladder: Ladder, against: Mapping[str, str], *, seeds: int | Sequence[int] = (3, 2), and_beyond: bool = False
) -> dict[str, Comparison]:
    """Return runs of rows, each where it and what it is held against are at their best (see `at_their_best`).

    Args:
        ladder: whose points are read.
        against: the row that each row is held against, by the latter.
        seeds: how many both must have in common (see `at_their_best`).
        and_beyond: whether a row is also wanted at larger rungs that have its seeds.

    Returns:
        By rung, from small to large, the runs of the rows whose place is there, and of what they are held against.

    Raises:
        ConfigError: no rung has both rows of a pair.
    """
    rungs = ladder.plan.rungs
    places = {row: [at_their_best(ladder, (row, base), seeds=seeds)[0]] for row, base in against.items()}
    if and_beyond:
        for row, some in places.items():
            some += beyond(ladder, (row, against[row]), some[0], seeds=seeds)
    found = {}
    for rung in (rung for rung in rungs if any(rung in some for some in places.values())):
        here = dict.fromkeys(name for row, base in against.items() if rung in places[row] for name in (base, row))
        found[rung] = best_runs(ladder, list(here), seeds=1, at=rung)
    return found


def _runs_at(ladder: Ladder, rung: Rung, rows: Collection[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the summaries of some rows' points at a rung, seed by seed."""
    found: dict[str, list[dict[str, Any]]] = {}
    for point in ladder.points_there(rung.name, rows):
        told = json.loads(point.file.read_text()) | {"run": point.config.to_dict()}
        found.setdefault(point.row.name, []).append(told)
    return found


#: The columns of gaps.csv.
GAP_COLUMNS = ["method", "parameters", "tokens_per_parameter", "rounds", "seeds", "loss", "data_parallel_loss"]
GAP_COLUMNS += ["gap_pct", "low_pct", "high_pct", "rung", "data_parallel_seeds"]
GAP_COLUMNS += ["means_gap_pct", "means_low_pct", "means_high_pct", "gap_without_seed_0_pct"]


def gap_rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the rows of gaps.csv, each a cell's means over its pairs, and its gap in % with a 95 % interval.

    Their keys are `GAP_COLUMNS`. Data-parallel training, to which gaps are taken, is left out. Rounds are NaN where no
    parameters are exchanged. Beside the gap of pairs stands that of the means of all runs of both sides (`means_`).
    Tuning chose by the run of seed 0 (on other text), so that the gap without that seed stands beside that of all; it
    is NaN where there is no other seed.
    """
    found = []
    for cell in cells:
        if cell.row.startswith("data_parallel/"):
            continue
        pairs, both = cell.pairs, sorted(cell.losses.keys() & cell.base.keys())
        gap, low, high = pairs.percent()
        means, means_low, means_high = cell.means.percent()
        others = {seed: loss for seed, loss in cell.losses.items() if seed and seed in cell.base}
        found.append(
            {
                "method": cell.row,
                "parameters": cell.parameters,
                "tokens_per_parameter": cell.tokens_per_parameter,
                "rounds": cell.rounds if math.isfinite(cell.rounds) else math.nan,
                "seeds": pairs.seeds,
                "loss": float(np.mean([cell.losses[s] for s in both])),
                "data_parallel_loss": float(np.mean([cell.base[s] for s in both])),
                "gap_pct": gap,
                "low_pct": low,
                "high_pct": high,
                "rung": cell.rung,
                "data_parallel_seeds": len(cell.base),
                "means_gap_pct": means,
                "means_low_pct": means_low,
                "means_high_pct": means_high,
                "gap_without_seed_0_pct": Paired.of(others, cell.base).percent()[0] if others else math.nan,
            }
        )
    return found


def read_trials(ladder: Ladder) -> list[dict[str, Any]]:
    """Return all trials that are done: "rung", "row", "val_loss" (None if it diverged), "device" and lines' values."""
    found = []
    for file in sorted((ladder.results / "tuning").rglob("*.json")):
        outcome = json.loads(file.read_text())
        told = {key: outcome[key] for key in ("rung", "row", "val_loss")} | {"device": outcome["environment"]["device"]}
        found.append(told | outcome["values"])
    return found


@dataclass(frozen=True)
class Fit:
    """A fit of gaps d to sizes N: d = at_one + slope ln N, by least squares, each pair over the spread of its size.

    Attributes: `spreads`, how much single pairs deviate at each size, of which ratios matter alone; `deviation` of
    pairs about the line, over their spread, with `freedom` degrees of freedom; `weight`, the sum of 1 / spread^2 of all
    pairs; `centre` and `square`, the mean of ln N and the sum of its squares about that, with these weights; `count` of
    pairs.
    """

    at_one: float
    slope: float
    deviation: float
    freedom: int
    centre: float
    square: float
    count: int
    weight: float
    spreads: Mapping[float, float] = field(default_factory=dict)

    @classmethod
    def of(cls, sizes: ArrayLike, gaps: ArrayLike, spreads: Mapping[float, float] | None = None) -> Fit:
        """Fit gaps at sizes N, one of each for each pair.

        spreads: how much single pairs deviate at some sizes; the nearest of these counts for another size (`near`). By
        default pairs deviate alike. Raises ValueError where there are fewer than 3 pairs, or there is a single size.
        """
        x, d, spreads = np.log(np.asarray(sizes, float)), np.asarray(gaps, float), spreads or {}
        if len(x) < 3 or np.ptp(x) == 0:
            raise ValueError(f"a slope needs 3 pairs and 2 sizes, got {len(x)} and {len(np.unique(x))}")
        weights = np.array([near(spreads, size) ** -2 for size in np.asarray(sizes, float)])
        weight = float(weights.sum())
        centre = float((weights * x).sum()) / weight
        square = float((weights * (x - centre) ** 2).sum())
        slope = float((weights * (x - centre) * d).sum() / square)
        at_one = float((weights * d).sum()) / weight - slope * centre
        left = d - at_one - slope * x
        deviation = math.sqrt(float((weights * left**2).sum()) / (len(x) - 2))
        return cls(at_one, slope, deviation, len(x) - 2, centre, square, len(x), weight, spreads)

    @property
    def p_falls(self) -> float:
        """The probability of a slope as low as this or lower where the true one is 0 (one-sided)."""
        if self.deviation == 0:
            return float(self.slope >= 0)
        return student(self.slope * math.sqrt(self.square) / self.deviation, self.freedom)

    def per_decade(self) -> Likely:
        """Return the slope, with its 95 % interval, in % of the loss for each factor of 10 in size."""
        slope = Likely.around(self.slope, self.deviation / math.sqrt(self.square), self.freedom)
        return Likely(*(100 * math.log(10) * value for value in slope))

    def at(self, size: float, *, seeds: float = math.inf) -> Likely:
        """Return the gap at a size with its 95 % interval: that of the line itself, or of the mean of new seeds.

        seeds: how many new ones; infinite for the line itself.
        """
        return Likely.around(self.at_one + self.slope * math.log(size), self.error(size, seeds=seeds), self.freedom)

    def error(self, size: float, *, seeds: float = math.inf) -> float:
        """Return the standard error of the gap at a size; `seeds` as in `at`."""
        apart = (math.log(size) - self.centre) ** 2 / self.square
        return self.deviation * math.sqrt(1 / self.weight + apart + near(self.spreads, size) ** 2 / seeds)


def near(spreads: Mapping[float, float], size: float) -> float:
    """Return the spread at the size, of those that have one, whose logarithm is nearest; 1 where none has."""
    return spreads[min(spreads, key=lambda known: abs(math.log(known / size)))] if spreads else 1.0


def pooled_deviation(groups: Sequence[Sequence[float]]) -> float:
    """Return how much values deviate within groups of two or more, by the median of the groups' variances.

    So a group of a run that diverges does not decide it. Each variance is taken over the median of what it is of values
    that deviate by 1, which is (1 - 2 / (9 f))^3 for f degrees of freedom (Wilson and Hilferty).
    """
    ratios = [statistics.variance(some) / (1 - 2 / (9 * (len(some) - 1))) ** 3 for some in groups]
    return math.sqrt(statistics.median(ratios))


def spreads_of(cells: Sequence[Cell]) -> dict[float, float]:
    """Return how much the pairs of a row deviate at each size that has `SPREAD_ROWS` rows of three pairs or more.

    It is empty where no size has, so that pairs count alike.
    """
    groups: dict[float, list[list[float]]] = {}
    for cell in cells:
        if len(cell.gaps) > 2 and cell.losses != cell.base:
            groups.setdefault(cell.parameters, []).append(cell.gaps)
    return {size: pooled_deviation(some) for size, some in groups.items() if len(some) >= SPREAD_ROWS}


def fit_row(cells: Sequence[Cell], row: str, spreads: Mapping[float, float] | None = None) -> Fit:
    """Fit the gaps of a row over all its sizes. Raises ValueError where these, or its pairs, are too few.

    spreads: how much pairs deviate, by default as all rows of the cells tell (`spreads_of`).
    """
    pairs = [(c.parameters, gap) for c in cells if c.row == row for gap in c.gaps]
    spreads = spreads_of(cells) if spreads is None else spreads
    return Fit.of(*zip(*pairs, strict=True), spreads) if pairs else Fit.of([], [])


def shared_variance(cells: Sequence[Cell]) -> float:
    """Return the share of the variance of gaps over seeds that is common to rows that are held against the same runs.

    It is the correlation of the gaps of two rows, in the mean of all pairs of rows, over the seeds that all have; a
    share below 0 counts as 0. It is NaN for one row, or for fewer than two seeds.
    """
    seeds = set.intersection(*(cell.losses.keys() & cell.base.keys() for cell in cells)) if cells else set()
    if len(cells) < 2 or len(seeds) < 2:
        return math.nan
    gaps = np.log([[cell.losses[seed] / cell.base[seed] for seed in seeds] for cell in cells])
    pairs = np.corrcoef(gaps)[np.triu_indices(len(cells), 1)]
    return max(0.0, float(pairs.mean()))


def pair_correlation(cells: Sequence[Cell]) -> float:
    """Return the correlation of losses with the losses of the same seed that they are held against.

    It is the mean over rows, so that one which diverges does not decide it; where it is 0, pairs say no more than means
    do. Rows of fewer than three pairs are left out; it is NaN where no row is left.
    """
    found = []
    for cell in cells:
        if len(seeds := sorted(cell.losses.keys() & cell.base.keys())) > 2:
            logs = np.log([[some[seed] for seed in seeds] for some in (cell.losses, cell.base)])
            found.append(np.corrcoef(logs)[0, 1])
    return float(np.mean(found)) if found else math.nan


def seed_0_apart(cells: Sequence[Cell]) -> float:
    """Return by how much the loss of seed 0 is over the mean of the other seeds of a row, in %, as the median of rows.

    Rows of fewer than three seeds are left out; it is NaN where none is left.
    """
    found = []
    for cell in cells:
        others = [math.log(loss) for seed, loss in cell.losses.items() if seed]
        if 0 in cell.losses and len(others) > 1:
            found.append(math.log(cell.losses[0]) - statistics.mean(others))
    return 100 * math.expm1(statistics.median(found)) if found else math.nan


def false_findings(looks: Sequence[int]) -> float:
    """Return how often pairs without any difference are told apart, where they are tested again with more of them.

    It is the share of 20,000 draws of which one of the looks, each at so many pairs in ascending order, finds a
    difference at the level of 5 %, from either tail.
    """
    draws = 20_000
    pairs = np.random.default_rng(0).normal(size=(draws, looks[-1]))
    found = np.zeros(draws, bool)
    for count in looks:
        some = pairs[:, :count]
        t = some.mean(1) / some.std(1, ddof=1) * math.sqrt(count)
        found |= np.abs(t) > quantile(0.975, count - 1)
    return float(found.mean())


def several(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells of two seeds or more whose rows have such cells at several sizes, so that a line has a band."""
    some = [cell for cell in cells if len(cell.gaps) >= 2]
    sizes = {row: {cell.parameters for cell in some if cell.row == row} for row in {cell.row for cell in some}}
    return [cell for cell in some if len(sizes[cell.row]) > 1]


def regimes(cells: Sequence[Cell], rows: Collection[str] | None = None) -> list[str]:
    """Return a note for a table for each rung, which says what its runs were.

    Its outer rounds are those of the rows that exchange parameters. rows: those of the table, by default all.
    """
    cells = [cell for cell in cells if rows is None or cell.row in rows]
    found = []
    for rung in dict.fromkeys(cell.rung for cell in cells):
        here = [cell for cell in cells if cell.rung == rung]
        rounds = [cell.rounds for cell in here if math.isfinite(cell.rounds)]
        found.append(
            f"At {rung}: {here[0].parameters:,} parameters, {span([c.tokens_per_parameter for c in here])} tokens per"
            f" parameter, {f'{span(rounds)} outer rounds, ' if rounds else ''}"
            f"{span([c.tokens_per_replica_and_step for c in here])} tokens per replica and step; seeds:"
            f" {span([len(c.gaps) for c in here])}."
        )
    return found


def labelled_size(name: str) -> float:
    """Return the number of parameters of a size that is named by it, as "35m" or "1b"."""
    return float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]


def published_gaps() -> list[dict[str, Any]]:
    """Return the gaps of methods to data-parallel training that papers print, and those of a test by others.

    Columns: method (its run of the ladder), told (what and whose it is), parameters, ratio (D / k of that test's
    subspaces, else NaN), gap_pct (in % of the loss, which is the logarithm of printed perplexities). Slices have none,
    as the numbers that their paper prints could not be read.
    """
    found: list[dict[str, Any]] = []

    def add(method: str, told: str, size: float, loss: float, base: float, ratio: float = math.nan) -> None:
        gap = 100 * (loss / base - 1)
        found.append({"method": method, "told": told, "parameters": size, "ratio": ratio, "gap_pct": gap})

    laws = published("scaling_laws", "losses")
    alone = {row["parameters"]: row["loss"] for row in laws if row["method"] == "data_parallel"}
    for row in (row for row in laws if row["M"]):
        add("diloco", f"scaling laws, M={row['M']}", row["parameters"], row["loss"], alone[row["parameters"]])
    tables = published("streaming_diloco", "table5")
    alone = {row["scale"]: row["loss"] for row in tables if row["method"] == "data_parallel"}
    for row in (row for row in tables if row["method"] == "streaming"):
        size = labelled_size(row["scale"])
        add("streaming", f"Streaming DiLoCo, Table 5, H={row['H']}", size, row["loss"], alone[row["scale"]])
    sizes = {row["model"]: row["parameters"] for row in published("noloco", "table1")}
    for row in sorted(published("noloco", "table2"), key=lambda row: row["dp"]):
        for corpus in ("reddit", "c4"):
            base, _, noloco = map(math.log, row[corpus])
            add("noloco", f"NoLoCo, Table 2, M={row['dp']}", sizes[row["model"]], noloco, base)
    tables = {row["method"]: row for row in published("protocol_models", "table2") if row["c4"]}
    for corpus in ("c4", "bc"):
        losses = (math.log(tables[method][corpus]) for method in ("subspace", "dense"))
        add("protocol", "Protocol Models, Table 2", tables["dense"]["parameters"], *losses)
    for row in published("protocol_models", "retest"):
        add("protocol", "test of subspaces by others", row["parameters"], 1 + row["loss_pct"] / 100, 1, row["ratio"])
    return found


def loss_at(size: float, sizes: Sequence[float], losses: Sequence[float], alpha: float | None = None) -> float:
    """Return the loss at a size by L = E + A N^-alpha through the losses at the two largest of some sizes.

    alpha: by default the one that leaves no floor E. Raises ConfigError where there are fewer than two sizes.
    """
    if len(sizes) < 2:
        raise ConfigError(f"a loss at {size:,.0f} parameters wants those of two smaller sizes, got {len(sizes)}")
    (n1, l1), (n2, l2) = sorted(zip(sizes, losses, strict=True))[-2:]
    alpha = alpha or math.log(l1 / l2) / math.log(n2 / n1)
    factor = (l1 - l2) / (n1**-alpha - n2**-alpha)
    return l2 + factor * (size**-alpha - n2**-alpha)


def predict(cells: Sequence[Cell], row: str, size: float, *, seeds: float) -> dict[str, Any]:
    """Predict a row's "gap_pct" (in % of the loss) and its "loss" at a size from all smaller ones.

    Each is [likely, low, high]. The interval of a gap is that of 95 % for the mean of so many seeds about the fitted
    line, which deviate as those of the largest of these sizes do; that of data-parallel training's loss is the range of
    exponents; that of a method's loss has both.
    Data-parallel training has no gap. Raises ConfigError where there are fewer than two smaller sizes, and ValueError
    where pairs are too few to fit.
    """
    smaller = [c for c in cells if c.parameters < size and c.row == row]
    bases = {c.parameters: float(np.mean(list(c.base.values()))) for c in smaller}
    laws = [loss_at(size, list(bases), list(bases.values()), alpha) for alpha in (LIKELY, None, HIGHEST)]
    losses = laws[0], min(laws), max(laws)
    if row.startswith("data_parallel/"):
        return {"loss": [round(loss, 4) for loss in losses]}
    spreads = spreads_of([c for c in cells if c.parameters < size])
    gaps = fit_row(smaller, row, spreads).at(size, seeds=seeds)
    told = [round(loss * math.exp(gap), 4) for loss, gap in zip(losses, gaps, strict=True)]
    return {"gap_pct": [_percent(gap) for gap in gaps], "loss": told}


def _percent(gap: float) -> float:
    return round(100 * math.expm1(gap), 3)


def register(ladder: Ladder, what: str, asked: Collection[str] = ()) -> bool:
    """Add to predictions.yaml what is expected at a rung, or (`PUBLISHED`) at the papers' sizes that plan.yaml names.

    What has been registered of a row stays as it is. Tell whether anything was added.

    Args:
        ladder: whose points are read.
        what: the name of a rung, or `PUBLISHED`.
        asked: the rows that are predicted, by default all.

    Raises:
        ConfigError: a row has points there already, as what is known is not predicted; it is none of those that can be
            predicted there; or a smaller rung has no pairs of it, or all have too few together for a line.
    """
    with locked(ladder.build / "predictions.lock"):  # another command may be about to write what it has predicted
        return _register(ladder, what, asked)


def _register(ladder: Ladder, what: str, asked: Collection[str]) -> bool:
    plan, told = ladder.plan, ladder.read_predictions()
    if what == PUBLISHED:
        sizes = {name: PRESETS[name] for name in dict.fromkeys(plan.published.values())}
        rows = {name: [row for row, at in plan.published.items() if at == name] for name in sizes}
    else:
        # What is known is not predicted, nor asked for where it is not named.
        rows = {what: [name for name in plan.rungs[what].rows if name in asked or not ladder.outcomes(what, name)]}
        sizes = {what: next(iter(ladder.configs(what).values())).model}
    for row in asked:
        if not any(row in some for some in rows.values()):
            known = dict.fromkeys(itertools.chain(*rows.values()))
            raise ConfigError(f"nothing is predicted of {row} at {what}: it must be one of {', '.join(known)}")
    missing = {
        name: new
        for name, some in rows.items()
        if (new := [row for row in some if row in (asked or some) and row not in told.get(name, {}).get("rows", {})])
    }
    if not missing:
        return False
    if what != PUBLISHED:
        for row in missing[what]:
            if ladder.outcomes(what, row):
                raise ConfigError(f"points of {row} at {what} are there already: what is known is not predicted")
    cells = read_cells(ladder)
    for name, new in missing.items():
        size = parameters(sizes[name]).total
        _check_known(ladder, cells, new, size)
        there = told.setdefault(name, {"parameters": size, "rows": {}})
        for row in new:
            try:
                if what == PUBLISHED:
                    there["rows"][row] = {"gap_pct": [_percent(g) for g in fit_row(cells, row).at(size)]}
                else:
                    seeds = plan.rungs[what].seeds_of(plan.rows[row])
                    there["rows"][row] = {"seeds": seeds} | predict(cells, row, size, seeds=seeds)
            except ValueError as error:
                raise ConfigError(f"{row} at {name} cannot be predicted: {error}") from None
    text = yaml.safe_dump(told, sort_keys=False, default_flow_style=None)
    write_whole(ladder.results / "predictions.yaml", text)
    return True


def _check_known(ladder: Ladder, cells: Sequence[Cell], rows: Sequence[str], size: float) -> None:
    """Raise ConfigError where a rung below a size has one of the rows but no pairs of it yet, and needs no GPU."""
    known = {(cell.rung, cell.row) for cell in cells}
    for rung in ladder.plan.rungs.values():
        for row in (row for row in rows if row in rung.rows and not rung.gpu and (rung.name, row) not in known):
            if parameters(ladder.configs(rung.name)[row].model).total < size:
                raise ConfigError(f"no pairs of {row} at {rung.name}: python -m pipelines.ladder train {rung.name}")
