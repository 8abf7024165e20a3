"""Judge what the ladder was to show: gaps within margins, and gaps that fall with size.

Margins of diloco/m1 and of the rows whose momentum rises were named before their runs from 0.33M on; those of the
others were written down after their first points.

They are judged by the rule for claims (`pipelines.verdicts`): a gap is within a margin if pairs of runs are no worse
than that, and it falls if the slope of its line is below 0; all together are corrected for their number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipelines.ladder.fits import MAIN_ROWS, Cell, fit_row, several, spreads_of
from pipelines.ladder.plan import Plan
from pipelines.verdicts import HEADLINE, NOTHING, Claim, Evidence, Likely, Regime, judge, no_worse

#: By how many % of the loss each row may be above data-parallel training, by the rung from which on it may. A method at
#: its best may be the row whose momentum rises.
MARGINS = {
    "streaming/h30": {"0.33M": 1.5, "1.05M": 1.0},
    "streaming/rising_momentum": {"0.33M": 1.5, "1.05M": 1.0},
    "diloco/m2": {"0.33M": 2.0},
    "diloco/rising_momentum": {"0.33M": 2.0},
    "noloco/m4": {"0.33M": 3.0},
    "noloco/rising_momentum": {"0.33M": 3.0},
    "diloco/m1": {"0.33M": 0.5},
    "diloco/m1_rising": {"0.33M": 0.5},
}
#: What a slope needs: its deviation is that of the pairs of all sizes together, so that two at each size are enough.
SLOPE = replace(HEADLINE, seeds=2)
#: The rows whose gaps were to fall with size.
FALLING = (*MAIN_ROWS, "diloco/rising_momentum", "streaming/rising_momentum")


@dataclass(frozen=True)
class Judged:
    """A line of the table of margins and slopes, with its outcome.

    rung: the rung of a margin, or those of a slope, between commas. margin: in % of the loss; NaN for a slope. gap: the
    likely gap in % of the loss, or slope in % for each factor of 10 in size, with its 95 % interval; NaN where there is
    none. means: the gap of the means of all runs of both sides, by which nothing is judged; NaN for a slope.
    """

    row: str
    rung: str
    margin: float
    gap: Likely
    means: Likely
    claim: Claim
    outcome: str

    @property
    def is_above(self) -> bool:
        """Tell whether the likely gap is above its margin, or the likely slope above 0; False where nothing was run."""
        return self.gap.value > (0.0 if math.isnan(self.margin) else self.margin)

    def record(self) -> dict[str, Any]:
        """Return the line as columns of a table; p_for and p_against are those before correction."""
        found = self.claim.evidence or Evidence(math.nan, math.nan)
        ends = ("gap_pct", "low_pct", "high_pct")
        told = dict(zip(ends, self.gap, strict=True))
        told |= dict(zip((f"means_{end}" for end in ends), self.means, strict=True))
        seeds = 0 if found.regime is None else int(found.regime.seeds)
        told = {"row": self.row, "rung": self.rung, "margin_pct": self.margin, "seeds": seeds} | told
        told |= {"p_for": found.p_for, "p_against": found.p_against, "outcome": self.outcome}
        return told | {"is_above": self.is_above}


def judged_margins(plan: Plan, cells: Sequence[Cell]) -> list[Judged]:
    """Judge all margins and all slopes together, and return the lines of the margins, then those of the slopes.

    A margin is judged at the rungs that have points of its row, or are to have them and need no GPU.
    """
    by_place, spreads = {(cell.row, cell.rung): cell for cell in cells}, spreads_of(cells)
    lines = []
    for row, margins in MARGINS.items():
        margin = math.nan
        for name, rung in plan.rungs.items():
            margin, cell = margins.get(name, margin), by_place.get((row, name))
            if math.isnan(margin) or (cell is None and (rung.gpu or row not in rung.rows)):
                continue
            lines.append((row, name, margin, *_margin(row, name, margin, cell)))
    for row in FALLING:
        if here := _sizes_of(row, cells):
            lines.append((row, ", ".join(cell.rung for cell in here), math.nan, *_slope(row, here, spreads)))
    outcomes = judge([claim for *_, claim in lines])
    return [Judged(*line, outcome) for line, outcome in zip(lines, outcomes, strict=True)]


def _sizes_of(row: str, cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells over which a slope is judged: those in the papers' regime, or all where these are not two."""
    own = several([cell for cell in cells if cell.row == row])
    return several([cell for cell in own if not cell.regime.lacks(SLOPE)]) or own


def _margin(row: str, rung: str, margin: float, cell: Cell | None) -> tuple[Likely, Likely, Claim]:
    text = f"{row} is within {margin:g} % of data-parallel training at {rung}"
    if cell is None:
        return NOTHING, NOTHING, Claim(text, "nothing")
    evidence = replace(no_worse(cell.pairs, math.log1p(margin / 100)), regime=cell.regime)
    gap = cell.pairs.percent()
    return gap, cell.means.percent(), Claim(text, f"{gap.value:+.2f} %", evidence)


def _slope(row: str, cells: Sequence[Cell], spreads: Mapping[float, float]) -> tuple[Likely, Likely, Claim]:
    fit = fit_row(cells, row, spreads)
    slope = fit.per_decade()
    regime = functools.reduce(Regime.least, (cell.regime for cell in cells))
    evidence = Evidence(fit.p_falls, 1 - fit.p_falls, regime=regime)
    text, seen = f"the gap of {row} falls with size", f"{slope.value:+.2f} % per decade"
    return slope, NOTHING, Claim(text, seen, evidence, needs=SLOPE)
