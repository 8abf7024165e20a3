"""One rule for what our runs say of a paper's claims.

Runs are compared in pairs: of one seed, so that both begin with the same weights and see the same tokens in the same
order. A pair's difference is d = ln(a / b) of two losses; over the seeds it has a mean, a deviation, and Student's t.

    a is lower than b              t of d against 0, both ways (`lower`)
    a is as good as b              two one-sided tests: d is above -m, and below m (`equal`)
    a is no worse than b           one test: d is below m (`no_worse`)
    each run shows it              no test: all seeds do, or none does (`each`)

with a margin m, 1 % where a claim names no other. Each gives two probabilities: `p_for`, of seeing this where the claim
does not hold, and `p_against`, of seeing this where it does. Over all claims of a paper both are corrected for their
number (Holm). Then a claim is

    Borne out                      p_for is small, and the effect within a factor of 2 of the paper's, if that has one
    Borne out in direction only    p_for is small, but the effect is another
    Not borne out                  p_against is small
    Not resolved                   neither is
    Outside this regime            the runs are too short, too few or too small for it: nothing is judged

What runs were, and what a claim needs of them, are a `Regime`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

#: The corrected probability below which one counts as small.
LEVEL = 0.05
#: The factor of a paper's effect, up or down, within which an effect counts as the paper's.
FACTOR = 2.0
#: The difference d up to which two methods are "as good", by default: 1 % of the loss.
MARGIN = 0.01
OUTCOMES = BORNE_OUT, DIRECTION, NOT_BORNE_OUT, NOT_RESOLVED, OUTSIDE = (
    "Borne out",
    "Borne out in direction only",
    "Not borne out",
    "Not resolved",
    "Outside this regime",
)


def student(t: float, freedom: int) -> float:
    """Return P(T < t) of Student's t, by its finite series (Abramowitz and Stegun, 26.7.3 and 26.7.4).

    Raises ValueError where there is no degree of freedom.
    """
    if freedom < 1:
        raise ValueError(f"Student's t needs 1 degree of freedom or more, got {freedom}")
    if math.isinf(t):
        return float(t > 0)
    angle = math.atan(t / math.sqrt(freedom))
    odd, cosine = freedom % 2, math.cos(angle)
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= k / (k + 1) * cosine**2
    total *= math.sin(angle)
    found = 0.5 + (angle + total) / math.pi if odd else 0.5 + total / 2
    return min(1.0, max(0.0, found))  # rounding may go beyond


def quantile(probability: float, freedom: int) -> float:
    """Return the t below which Student's t lies with a probability, by bisection.

    Raises ValueError where the probability is not between 0 and 1, or there is no degree of freedom.
    """
    if not 0 < probability < 1:
        raise ValueError(f"a quantile is of a probability within 0 and 1, got {probability}")
    low, high = -math.pi / 2, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student(math.tan(middle), freedom) < probability else (low, middle)
    return math.tan(low)


class Likely(NamedTuple):
    """A likely value, and the ends of its 95 % interval, which are NaN where its error is unknown."""

    value: float
    low: float
    high: float

    @classmethod
    def around(cls, value: float, error: float, freedom: int) -> Likely:
        """Return a value with its 95 % interval, by Student's t, from its standard error.

        The ends are NaN where there is no degree of freedom.
        """
        off = quantile(0.975, freedom) * error if freedom else math.nan
        return cls(value, value - off, value + off)

    def percent(self) -> Likely:
        """Return the value and the ends, each a difference d = ln(a / b), as percentages of the loss, 100 (e^d - 1)."""
        return Likely(*(100 * math.expm1(d) for d in self))


#: What stands where nothing was run, or where there is no such value.
NOTHING = Likely(math.nan, math.nan, math.nan)


def log_ratios(a: Mapping[int, float], b: Mapping[int, float]) -> list[float]:
    """Return ln(a / b) of the losses of each seed that both sides have, in the order of seeds."""
    return [math.log(a[seed] / b[seed]) for seed in sorted(a.keys() & b.keys())]


@dataclass(frozen=True)
class Paired:
    """The differences d = ln(a / b) of pairs of runs, of which 0.01 is 1 % of the loss.

    seeds: the number of pairs. mean: that of d. deviation: the standard deviation of d; NaN for one seed.
    """

    seeds: int
    mean: float
    deviation: float

    @classmethod
    def of(cls, a: Mapping[int, float], b: Mapping[int, float]) -> Paired:
        """Pair two groups of losses by their seeds; seeds that only one group has are left out.

        Raises ValueError where there is no pair.
        """
        if not (found := log_ratios(a, b)):
            raise ValueError(f"no seed is of both sides: {sorted(a)} and {sorted(b)}")
        return cls(len(found), statistics.mean(found), statistics.stdev(found) if len(found) > 1 else math.nan)

    def below(self, bound: float) -> float:
        """Return the probability of a mean as low as this one or lower, where the true one is `bound`.

        It is NaN for one seed.
        """
        if self.seeds < 2:
            return math.nan
        apart = self.mean - bound
        if self.deviation == 0:  # bit-identical runs, say
            return 0.5 if apart == 0 else float(apart > 0)
        return student(apart / (self.deviation / math.sqrt(self.seeds)), self.seeds - 1)

    @property
    def likely(self) -> Likely:
        """The mean with its 95 % interval, whose ends are NaN for one seed."""
        return Likely.around(self.mean, self.deviation / math.sqrt(self.seeds), self.seeds - 1)

    def percent(self) -> Likely:
        """Return the mean with its 95 % interval, as percentages of the loss."""
        return self.likely.percent()


@dataclass(frozen=True)
class Unpaired:
    """The difference of the means of two groups of runs, which need no seed in common; no claim is judged by it.

    Where losses of one seed have nothing in common, all runs of both sides say more than the pairs do. mean: the mean
    of ln(a) less that of ln(b). error: its standard error; NaN where a side has one run. freedom: Welch's degrees of
    freedom, rounded down; 0 where a side has one run.
    """

    mean: float
    error: float
    freedom: int

    @classmethod
    def of(cls, a: Mapping[int, float], b: Mapping[int, float]) -> Unpaired:
        """Return the difference of two groups of losses, by seed. Raises ValueError where one of them is empty."""
        if not a or not b:
            raise ValueError(f"a difference of means is of runs on both sides, got {len(a)} and {len(b)}")
        logs = [[math.log(loss) for loss in some.values()] for some in (a, b)]
        mean = statistics.mean(logs[0]) - statistics.mean(logs[1])
        if min(map(len, logs)) < 2:
            return cls(mean, math.nan, 0)
        squares = [statistics.variance(some) / len(some) for some in logs]
        if not sum(squares):
            return cls(mean, 0.0, len(a) + len(b) - 2)
        shares = sum(square**2 / (len(some) - 1) for square, some in zip(squares, logs, strict=True))
        return cls(mean, math.sqrt(sum(squares)), int(sum(squares) ** 2 / shares + 1e-9))

    def percent(self) -> Likely:
        """Return the difference with its 95 % interval, as percentages of the loss."""
        return Likely.around(self.mean, self.error, self.freedom).percent()


@dataclass(frozen=True)
class Regime:
    """The numbers of seeds, outer rounds and tokens that runs had, or that a claim needs of them.

    Without local updates the rounds are infinite.
    """

    seeds: float = 0
    rounds: float = 0
    tokens_per_parameter: float = 0
    tokens_per_replica_and_step: float = 0

    def least(self, other: Regime) -> Regime:
        """Return the regime with the smaller of both in each number."""
        return Regime(*(min(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self)))

    def lacks(self, needed: Regime) -> str:
        """Return what is too little, as "2 of 3 seeds, 37 of 100 rounds"; "" where nothing is."""
        short = []
        for field in dataclasses.fields(self):
            there, asked = getattr(self, field.name), getattr(needed, field.name)
            if there < asked:
                short.append(f"{there:.3g} of {asked:.3g} {field.name.replace('_', ' ')}")
        return ", ".join(short)


#: What a paper's main claims need of our runs, and what its ablations need, which are short in the papers too. Two
#: pairs that agree by chance would have next to no deviation, so that three are needed.
HEADLINE = Regime(3, 100, 19, 512)
ABLATION = Regime(3, 40, 19, 512)


@dataclass(frozen=True)
class Evidence:
    """The probabilities by which runs speak for a claim and against it, before any correction.

    p_for: that of seeing this where the claim does not hold. p_against: that of seeing this where it does. Small ones
    speak; both are NaN where there is one seed, which says nothing.

    effect: the size of what was seen, in the units of the paper's; None where it has no size. regime: that of the runs;
    None for what needs no runs. is_fact: whether its probabilities are 0 or 1 because it is no test: then it is
    corrected for nothing, and no other claim is corrected for it.
    """

    p_for: float
    p_against: float
    effect: float | None = None
    regime: Regime | None = None
    is_fact: bool = False


def lower(pairs: Paired, by: float = 0.0) -> Evidence:
    """Return evidence that a is lower than b, by more than d = `by`, from either tail; its effect is 1 - a / b."""
    tail = pairs.below(-by)
    return Evidence(_twice(tail), _twice(1 - tail), 1 - math.exp(pairs.mean))


def equal(pairs: Paired, margin: float) -> Evidence:
    """Return evidence that a and b differ by less than a margin (two one-sided tests).

    Against it speak both tails beyond what was seen, where the true difference is the margin: there are two chances.
    """
    under, over = pairs.below(margin), 1 - pairs.below(-margin)
    seen = dataclasses.replace(pairs, mean=abs(pairs.mean))
    return Evidence(max(under, over), min(1.0, 2 - seen.below(margin) - seen.below(-margin)))


def no_worse(pairs: Paired, margin: float = 0.0) -> Evidence:
    """Return evidence that a is above b by less than a margin, or below it."""
    tail = pairs.below(margin)
    return Evidence(tail, 1 - tail)


def fact(holds: bool) -> Evidence:
    """Return evidence from what needs no seeds, as a closed form, a simulation or a count: it holds, or it does not."""
    return Evidence(float(not holds), float(holds), is_fact=True)


def each(shown: Mapping[int, bool]) -> Evidence:
    """Return evidence of what a run shows by itself, such as a rank: for it if all seeds do, against it if none does.

    It is neither where only some do, and NaN for fewer than two seeds.
    """
    if len(shown) < 2:
        return Evidence(math.nan, math.nan)
    return Evidence(float(not all(shown.values())), float(any(shown.values())), is_fact=True)


def together(*parts: Evidence | None) -> Evidence | None:
    """Return evidence that all parts hold; None where one of them is None, as nothing was run for it.

    Evidence for it is the weakest of the parts', and evidence against it the strongest, where that of tests is
    corrected for their number. Both are NaN where those of a part are, as of one seed. It is a fact where all parts are
    facts, or where a part that is a fact fails. The regime is the least of the parts', and the effect the mean of
    theirs, None unless all have one. Raises ValueError where there is no part.
    """
    if not parts:
        raise ValueError("nothing to judge together")
    there = [part for part in parts if part is not None]
    if len(there) < len(parts):
        return None
    regimes = [part.regime for part in there if part.regime is not None]
    regime = functools.reduce(Regime.least, regimes) if regimes else None
    effects = [part.effect for part in there if part.effect is not None]
    effect = statistics.mean(effects) if len(effects) == len(there) else None
    if any(math.isnan(part.p_for) for part in there):
        return Evidence(math.nan, math.nan, effect, regime)
    facts, tests = ([part for part in there if part.is_fact == is_fact] for is_fact in (True, False))
    against = [part.p_against for part in facts]
    against += [min(1.0, len(tests) * min(part.p_against for part in tests))] if tests else []
    decided = not tests or 0.0 in [part.p_against for part in facts]
    return Evidence(max(part.p_for for part in there), min(against), effect, regime, decided)


def _twice(p: float) -> float:
    return p if math.isnan(p) else min(1.0, 2 * p)


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, and what was seen of it.

    Attributes:
        text: what the paper claims, as a sentence without its full stop; its own numbers in brackets.
        seen: what was seen: our numbers, as a sentence without its full stop.
        evidence: what speaks for it and against it; None where one of its rows has no run.
        published: the size that the paper prints, in the units of the evidence's effect; None where it has none.
        criterion: when it is called borne out, where that does not go without saying.
        needs: what it needs of the runs, where its evidence is of runs.
        apart: why nothing is judged whatever the runs were, if so: "one size", "no public checkpoint".
        paper: whose claim it is, on a page that has those of several papers.
    """

    text: str
    seen: str
    evidence: Evidence | None = None
    published: float | None = None
    criterion: str = ""
    needs: Regime = HEADLINE
    apart: str = ""
    paper: str = ""

    @property
    def outside(self) -> str:
        """The reason why the claim is not judged; "" where it is."""
        if self.apart or self.evidence is None:
            return self.apart or "nothing was run for it"
        lacks = self.evidence.regime.lacks(self.needs) if self.evidence.regime else ""
        return lacks or ("one seed" if math.isnan(self.evidence.p_for) else "")

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Claim:
        """Return the claim of which `record` has made a record."""
        told = dict(record)
        if told["evidence"] is not None:
            evidence = {k: math.nan if v is None and k.startswith("p_") else v for k, v in told["evidence"].items()}
            regime = evidence["regime"] and Regime(*map(float, evidence["regime"].values()))
            told["evidence"] = Evidence(**evidence | {"regime": regime})
        return cls(**told | {"needs": Regime(**told["needs"])})

    def record(self) -> dict[str, Any]:
        """Return the claim as a dictionary for JSON, with None in place of NaN, and "inf" in place of infinity."""

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: plain(v) for key, v in value.items()}
            if isinstance(value, float) and not math.isfinite(value):
                return None if math.isnan(value) else str(value)
            return value

        return plain(dataclasses.asdict(self))


def holm(found: Sequence[float]) -> list[float]:
    """Return probabilities, in their order, with Holm's correction for their number; NaN stays, and does not count."""
    counted = sorted((p, i) for i, p in enumerate(found) if not math.isnan(p))
    out, highest = list(found), 0.0
    for rank, (p, i) in enumerate(counted):
        highest = max(highest, min(1.0, (len(counted) - rank) * p))
        out[i] = highest
    return out


@dataclass(frozen=True)
class Corrected:
    """The two probabilities of a claim's evidence, corrected as one of `tests` tests of its paper."""

    p_for: float
    p_against: float
    tests: int


def corrected(claims: Sequence[Claim]) -> list[Corrected | None]:
    """Return the corrected probabilities of each claim of a page, those of each paper for the number of its tests.

    Facts, and claims outside the regime, are no tests; they have None.
    """
    papers: dict[str, list[int]] = {}
    for i, claim in enumerate(claims):
        if not claim.outside and not claim.evidence.is_fact:
            papers.setdefault(claim.paper, []).append(i)
    found: list[Corrected | None] = [None] * len(claims)
    for tested in papers.values():
        sides = (holm([getattr(claims[i].evidence, side) for i in tested]) for side in ("p_for", "p_against"))
        for i, p_for, p_against in zip(tested, *sides, strict=True):
            found[i] = Corrected(p_for, p_against, len(tested))
    return found


def judge(claims: Sequence[Claim]) -> list[str]:
    """Return the outcome of each claim of a page, where those of one paper are `corrected` for their number."""

    def outcome(claim: Claim, tested: Corrected | None) -> str:
        if claim.outside:
            return f"{OUTSIDE} ({claim.outside})"
        found = tested or claim.evidence
        return _outcome(claim, found.p_for, found.p_against)

    return [outcome(*both) for both in zip(claims, corrected(claims), strict=True)]


def _outcome(claim: Claim, p_for: float, p_against: float) -> str:
    if p_for < LEVEL:
        return BORNE_OUT if _as_large(claim) else DIRECTION
    return NOT_BORNE_OUT if p_against < LEVEL else NOT_RESOLVED


def _as_large(claim: Claim) -> bool:
    """Tell whether the effect is the paper's, within `FACTOR`; True where the paper prints none."""
    if claim.published is None:
        return True
    ours = claim.evidence.effect
    if ours is None or not claim.published:
        raise ValueError(f"claim {claim.text!r} has a published size {claim.published} and an effect {ours}")
    return 1 / FACTOR <= ours / claim.published <= FACTOR
