"""The table of what ingredients of methods cost in loss, as measured and as printed, for the planner.

The planner reads it as `lowcomm.cost.ingredients` says. Measured are pairs of the ladder's rows, seed by seed, of which
one has the ingredient and the other does not; sizes with fewer rounds than the papers' are a source of their own
(`FEW_ROUNDS`). Printed is what the papers' tables say, at the papers' sizes, some of them 10,000 times ours. Both are
smoothed by a fit over sizes, where there are enough of these (`fits.Fit`); the deviation is then its error.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pandas as pd

from lowcomm.cost.ingredients import Method, Penalties
from pipelines.ladder.fits import Cell, Fit, labelled_size, near, pooled_deviation, read_cells
from pipelines.ladder.plan import Ladder
from pipelines.report import paper, published
from pipelines.verdicts import HEADLINE, Paired, log_ratios, quantile

#: What pairs of the ladder's rows measure: the ingredient, its amount, the row that has it, and the one that does not
#: ("": that of data-parallel training, see `plan.base_of`). Both have the same H, but for "rounds". The amount of a
#: subspace, of a projection in 4 bits and of all at once is D / k, which is read from the run (None).
PAIRS = (
    ("local updates", 1, "diloco/m1", ""),
    ("local updates", 1, "diloco/m2", ""),
    ("local updates", 1, "diloco/m4", ""),
    ("rounds", 100, "streaming/h100", "streaming/h30"),
    ("streaming", 1, "streaming/h30", "diloco/m2"),
    ("pairs", 1, "noloco/m4", "diloco/m4"),
    ("routes", 1, "noloco/routes", "noloco/m4"),
    ("routes", 1, "together/all", "together/without_routes"),  # where nothing else has measured them
    ("slices", 2, "partial/half", "partial/whole"),
    ("slices", 4, "partial/quarter", "partial/whole"),
    ("subspace", None, "protocol/eighth", ""),
    ("subspace", None, "protocol/quarter", ""),
    ("sparse messages", 1, "sparse/m2", "diloco/m2"),
    ("sparse messages", 1, "sparse/m4", "diloco/m4"),
    ("rising momentum", 1, "diloco/rising_momentum", "diloco/m2"),
    ("gossip momentum", 1, "gasloc/m4", "noloco/m4"),
    ("DeMo", 1, "demo/m2", ""),
    ("Muon", 1, "muon/batch", ""),
    ("projection", None, "projected/muon", "muon/batch"),
    ("Muon inside", 1, "muloco/m2", "diloco/m2"),
    ("Muon inside", 1, "muloco/m4", "diloco/m4"),
    ("two bits", 1, "muloco/two_bits", "muloco/m2"),
    ("clipped mean", 1, "loud/clipped", "honest/mean"),  # with one of 8 that says the opposite, as loudly as all others
    ("composed", None, "together/all", ""),
)
OURS, FEW_ROUNDS = "the ladder", "the ladder, few rounds"
#: The row with all four papers, and the choices of it, left out by a row each, that make up each ingredient.
ALL = "together/all"
MADE_OF = {
    "streaming": ("fragments", "overlap", "4 bits"),
    "pairs": ("pairs",),
    "routes": ("routes",),
    "slices": ("slices",),
    "subspace": ("subspace",),
}
#: Degrees of freedom of which Student's t is as good as normal.
MANY = 1000
#: Columns of `composed_rows`.
COMPOSED_COLUMNS = ["rung", "ingredient", "alone_pct", "deviation_pct", "taken_from", "source", "left_out", "seeds"]
COMPOSED_COLUMNS += ["within_pct", "within_low", "within_high", "apart_pct", "apart_error", "apart_off"]
COMPOSED_COLUMNS += ["by_seed_pct", "by_seed_off", "by_seed_seeds"]


@dataclass(frozen=True)
class Series:
    """An ingredient at some sizes, each with values of ln(loss with it / loss without it), of seeds or of settings.

    replicas and amount: those of its runs. source: what has measured it, as in the table.
    """

    ingredient: str
    replicas: int
    amount: float
    source: str
    values: dict[float, list[float]]  # by number of parameters
    alone: float = math.nan  # the deviation of a value that stands alone
    corrected: float = 0.0  # the deviation of what was added to all values

    def rows(self, noise: Mapping[float, float] | None = None) -> Iterator[dict[str, Any]]:
        """Yield a row of the table for each size, with the steepest that the fit's slope may be beside it.

        With two sizes and three values or more the likely value is the fit's, the deviation its error, and the drift
        the error of its slope, plus the slope itself where it rises: nothing says that a rise stops where the sizes do.
        Else the likely value is the mean, the deviation its standard error (`alone` for one value), and drift and
        steepest are NaN.

        noise: how much single values deviate at each size; they are thought to deviate by no less, as two that happen
        to be near each other do not show it. By default they deviate alike at all sizes, by what they show.
        """
        pairs = [(size, value) for size, some in self.values.items() for value in some]
        fit = Fit.of(*zip(*pairs, strict=True), noise) if len(self.values) > 1 and len(pairs) > 2 else None
        if fit is not None and noise:
            fit = replace(fit, deviation=max(fit.deviation, 1.0))
        for size, some in sorted(self.values.items()):
            drift = steepest = math.nan
            if fit is not None:
                likely, off = fit.at_one + fit.slope * math.log(size), fit.error(size)
                error = fit.deviation / math.sqrt(fit.square)
                drift, steepest = max(0.0, fit.slope) + error, abs(fit.slope) + error
            else:
                likely = statistics.mean(some)
                least = near(noise, size) if noise else 0.0
                off = max(statistics.stdev(some), least) / math.sqrt(len(some)) if len(some) > 1 else self.alone
            yield {
                "ingredient": self.ingredient,
                "replicas": self.replicas,
                "amount": self.amount,
                "parameters": int(size),
                "log_ratio": likely,
                "deviation": math.hypot(off, self.corrected),
                "drift": drift,
                "measured": statistics.mean(some),
                "values": len(some),
                "source": self.source,
                "steepest": steepest,
            }


class MeasuredPair(NamedTuple):
    """A pair of rows of one size that measures an ingredient: the cell that has it, and losses, by seed, without it."""

    ingredient: str
    amount: float
    cell: Cell
    other: Mapping[int, float]


def pairs_of(ladder: Ladder, cells: Sequence[Cell]) -> Iterator[MeasuredPair]:
    """Yield each of the `PAIRS` at each size that has both of its rows, the first of those that measure the same."""
    by, had = {(cell.row, cell.rung): cell for cell in cells}, set()
    for ingredient, amount, row, against in PAIRS:
        for cell in (cell for cell in cells if cell.row == row):
            if not against or (against, cell.rung) in by:
                config = ladder.configs(cell.rung)[row]
                here = amount or config.model.dim / config.method.boundary.rank
                if (what := (ingredient, here, cell.replicas, cell.rung)) in had:
                    continue
                had.add(what)
                yield MeasuredPair(ingredient, here, cell, by[against, cell.rung].losses if against else cell.base)


def measured(ladder: Ladder, cells: Sequence[Cell]) -> list[Series]:
    """Return the series of the ladder's points: of each pair of rows, for each amount and number of replicas.

    Sizes with few rounds are in series of their own.
    """
    values: dict[tuple[str, str, int, float], list[tuple[Cell, list[float]]]] = {}
    for pair in pairs_of(ladder, cells):
        if gaps := log_ratios(pair.cell.losses, pair.other):
            key = pair.ingredient, pair.cell.row, pair.cell.replicas, pair.amount
            values.setdefault(key, []).append((pair.cell, gaps))
    found = []
    for (ingredient, _, replicas, amount), told in values.items():
        for source in (OURS, FEW_ROUNDS):
            some = [(cell, gaps) for cell, gaps in told if (cell.rounds >= HEADLINE.rounds) == (source == OURS)]
            if some:
                sizes = {float(cell.parameters): gaps for cell, gaps in some}
                found.append(Series(ingredient, replicas, amount, source, sizes))
    return found


def printed() -> list[Series]:
    """Return the series of the papers' tables, and those of a test of subspaces by others."""
    found = []
    losses = published("scaling_laws", "losses")
    base = {row["parameters"]: row["loss"] for row in losses if row["method"] == "data_parallel"}
    for replicas in sorted({row["M"] for row in losses if row["M"]}):
        gaps = {r["parameters"]: [math.log(r["loss"] / base[r["parameters"]])] for r in losses if r["M"] == replicas}
        found.append(Series("local updates", replicas, 1, f"arXiv:{paper('scaling_laws')['arxiv']}", gaps))

    name = "streaming_diloco"
    at_30 = {row["scale"]: row["loss"] for row in published(name, "table5", method="diloco", H=30)}
    streaming = {r["scale"]: r["loss"] for r in published(name, "table5", method="streaming", H=30)}
    values = {labelled_size(s): [math.log(streaming[s] / at_30[s])] for s in at_30}
    found.append(Series("streaming", 2, 1, f"arXiv:{paper(name)['arxiv']}, Table 5", values))
    for replicas in (2, 4):
        often, rarely = (
            {row["scale"]: row["loss"] for row in published(name, "table6", M=replicas, H=h)} for h in (30, 100)
        )
        values = {labelled_size(s): [math.log(rarely[s] / often[s])] for s in often}
        found.append(Series("rounds", replicas, 100, f"arXiv:{paper(name)['arxiv']}, Table 6", values))

    name = "noloco"  # perplexities, of data-parallel training, DiLoCo and NoLoCo
    sizes = {row["model"]: row["parameters"] for row in published(name, "table1")}
    grids: dict[int, dict[float, list[float]]] = {}
    for row in published(name, "table2"):
        for _, diloco, noloco in (row["reddit"], row["c4"]):
            there = grids.setdefault(row["dp"], {}).setdefault(sizes[row["model"]], [])
            there.append(math.log(math.log(noloco) / math.log(diloco)))
    # Its NoLoCo exchanges twice as often as its DiLoCo, which is no effect of pairs: what that saves is added.
    often, rarely = (published(name, "settings", method=method)[0]["H"] for method in ("noloco", "diloco"))
    known = Penalties(_table([row for series in found for row in series.rows()]))
    for replicas, values in grids.items():
        both = {size: [known.one("rounds", h, replicas, size) for h in (often, rarely)] for size in values}
        values = {
            size: [value + both[size][1].log_ratio - both[size][0].log_ratio for value in some]
            for size, some in values.items()
        }
        source = f"arXiv:{paper(name)['arxiv']}, Table 2, at one H"
        off = max(math.hypot(*(penalty.deviation for penalty in two)) for two in both.values())
        found.append(Series("pairs", replicas, 1, source, values, corrected=off))

    # Not the paper's own claim, that 1/100 costs nothing: at 1/8 an independent test and the ladder contradict it. In
    # that test each size has a ratio of its own; it is as uncertain as its losses differ for each e-fold of the ratio.
    tested = published("protocol_models", "retest")
    costs = {row["ratio"]: math.log1p(row["loss_pct"] / 100) for row in tested}
    off = statistics.stdev(cost / math.log(ratio) for ratio, cost in costs.items())
    for row in tested:
        cost, ratio = costs[row["ratio"]], row["ratio"]
        values = {row["parameters"]: [cost]}
        found.append(Series("subspace", 1, ratio, "arXiv:2606.05484", values, off * math.log(ratio)))
    return found


def penalties_of(ladder: Ladder) -> pd.DataFrame:
    """Return the table of penalties, with the columns of `lowcomm.cost.ingredients.COLUMNS` and what was measured.

    The latter are the mean of the values at a size, `measured`, and their number, `values`.

    The ladder's values deviate at least as the values of all its rows do at their size. A value that stands alone has
    the largest deviation of its source; where there is one size, the drift is the largest slope of its source, with its
    error.
    """
    ours = measured(ladder, read_cells(ladder))
    groups: dict[float, list[list[float]]] = {}
    for series in ours:
        for size, some in series.values.items():
            groups.setdefault(size, []).extend([some] * (len(some) > 1))
    noise = {size: pooled_deviation(some) for size, some in groups.items() if some}
    rows = [row for some in ours for row in some.rows(noise)] + [row for some in printed() for row in some.rows()]
    found = _table(rows)
    found["log_ratio"], found["measured"] = found.log_ratio.round(5), found.measured.round(5)
    return found.drop(columns="steepest")


def _table(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return rows of series as a table, in which what a lone value or size lacks is the largest of its source."""
    found = pd.DataFrame(rows)
    for column, most in (("deviation", found.deviation), ("drift", found.steepest)):
        of_source = most.groupby(found.source).transform("max")
        found[column] = found[column].fillna(of_source).fillna(most.max()).round(5)
    return found


def composed_rows(ladder: Ladder, cells: Sequence[Cell], penalties: pd.DataFrame) -> list[dict[str, Any]]:
    """Return what the ingredients of the run of all four papers cost alone and in it, and their sums, at each size.

    There is a row for each ingredient, or one for each choice of the run that makes it up; then one for their "sum",
    beside which the run's own gap stands. A size has no rows where an ingredient of it has not been measured.

    Columns (`COMPOSED_COLUMNS`): rung, ingredient; alone_pct and deviation_pct, in % of the loss, as `Penalties.one`
    takes them from `source`, `taken_from` times away; left_out, the choice; within_pct with its 95 % interval
    (within_low, within_high), the loss of the run over the loss of the one without the choice, in %, over `seeds`;
    and for the sum apart_pct, 100 ln(sum / whole), with apart_error, its standard error, NaN for one seed, and
    apart_off, by which its 95 % interval goes to either side, by Student's t (Satterthwaite), NaN for fewer than
    three seeds. Errors of ingredients count there as if they were known and had nothing in common. by_seed_pct is the
    same from the runs of that size alone, seed by seed, with by_seed_off to either side, over by_seed_seeds; NaN
    where an ingredient has no pair of that size and its amount, or fewer than three seeds are of all runs.
    """
    known, by_place = Penalties(penalties), {(cell.row, cell.rung): cell for cell in cells}
    found: list[dict[str, Any]] = []
    for cell in (cell for cell in cells if cell.row == ALL):
        config = ladder.configs(cell.rung)[ALL]
        ratio, slices = config.model.dim // config.method.boundary.rank, config.method.slices
        method = Method(config.method.sync_every_steps, streaming=True, pairs=True, slices=slices, ratio=ratio)
        if not known.knows(method, config.stages):
            continue
        alone = known.parts(method, config.replicas, config.stages, cell.parameters)
        blank = dict.fromkeys(COMPOSED_COLUMNS, math.nan) | {
            "rung": cell.rung,
            "source": "",
            "left_out": "",
            "seeds": 0,
        }
        for name, penalty in alone.items():
            told = blank | {"ingredient": name} | _percents(penalty.log_ratio, penalty.deviation)
            told |= {"taken_from": penalty.extrapolated, "source": penalty.source}
            for choice in MADE_OF.get(name, ("",)):
                other = by_place.get((f"together/without_{choice.replace(' ', '_')}", cell.rung))
                both = other is not None and cell.losses.keys() & other.losses.keys()
                within = _within(Paired.of(cell.losses, other.losses)) if both else {}
                found.append(told | {"left_out": choice} | within)
        total = sum(p.log_ratio for p in alone.values())
        off, pairs = math.hypot(*(p.deviation for p in alone.values())), cell.pairs
        own = pairs.deviation / math.sqrt(pairs.seeds)
        apart = {"apart_pct": 100 * (total - pairs.mean), "apart_error": 100 * math.hypot(off, own)}
        if pairs.seeds >= HEADLINE.seeds:
            freedom = int((pairs.seeds - 1) * (math.hypot(off, own) / own) ** 4) if own else MANY
            apart["apart_off"] = quantile(0.975, min(freedom, MANY)) * apart["apart_error"]
        amounts = dict.fromkeys(alone, 1.0) | {"slices": slices, "subspace": ratio}
        by_seed = _by_seed(pairs_of(ladder, cells), cell, {name: amounts[name] for name in alone})
        if by_seed is not None and by_seed.seeds >= HEADLINE.seeds:
            mean, low, _ = by_seed.likely
            apart |= {"by_seed_pct": 100 * mean, "by_seed_off": 100 * (mean - low), "by_seed_seeds": by_seed.seeds}
        found.append(blank | {"ingredient": "sum"} | _percents(total, off) | _within(pairs) | apart)
    return found


def _by_seed(measured_pairs: Iterable[MeasuredPair], whole: Cell, amounts: Mapping[str, float]) -> Paired | None:
    """Return ln(sum of ingredients / run of all) over the seeds that all their runs at the whole's size have.

    Of several pairs that measure an amount of an ingredient it is the one with the nearest number of replicas. None
    where an ingredient has none, and where no seed is of all runs.
    """
    here = [pair for pair in measured_pairs if pair.cell.rung == whole.rung]
    total = {seed: whole.base[seed] / whole.losses[seed] for seed in whole.losses.keys() & whole.base.keys()}
    for name, amount in amounts.items():
        options = [pair for pair in here if (pair.ingredient, pair.amount) == (name, amount)]
        if not options:
            return None
        pair = min(options, key=lambda pair: abs(math.log(pair.cell.replicas / whole.replicas)))
        both = total.keys() & pair.cell.losses.keys() & pair.other.keys()
        total = {seed: total[seed] * pair.cell.losses[seed] / pair.other[seed] for seed in both}
    return Paired.of(total, dict.fromkeys(total, 1.0)) if total else None


def _percents(log_ratio: float, deviation: float) -> dict[str, float]:
    return {"alone_pct": 100 * math.expm1(log_ratio), "deviation_pct": 100 * deviation}


def _within(pairs: Paired) -> dict[str, float]:
    return {"seeds": pairs.seeds} | dict(zip(("within_pct", "within_low", "within_high"), pairs.percent(), strict=True))
