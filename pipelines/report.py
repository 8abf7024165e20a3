"""Tables of our numbers beside a paper's, with seeds and spread, written as files that git can show."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from IPython.display import Markdown, display

from lowcomm.cost.tables import markdown
from lowcomm.experiment.project import pick
from lowcomm.settings import nearest
from pipelines.project import ROOT, read_run
from pipelines.verdicts import MARGIN, Claim, Corrected, Evidence, Paired, Regime, each, equal, lower, no_worse

PAPERS = ROOT / "results" / "papers"


def paper(name: str) -> dict[str, Any]:
    """Return the published numbers of a paper, from `results/papers/<name>.yaml`.

    Raises ValueError where there is no such file.
    """
    path = PAPERS / f"{name}.yaml"
    if not path.exists():
        raise ValueError(f"no paper named {name!r}{nearest(name, [p.stem for p in PAPERS.glob('*.yaml')])}")
    return yaml.safe_load(path.read_text())


def published(name: str, table: str, **where: Any) -> list[dict[str, Any]]:
    """Return the rows of a paper's published table whose columns equal `where`.

    Raises ValueError where there is no such paper, or no such table of it.
    """
    rows = pick(paper(name)["tables"], table, f"table of {name}")["rows"]
    return [r for r in rows if all(r.get(k) == v for k, v in where.items())]


def loss_below(a: float, b: float) -> float:
    """Return by what share the loss of perplexity `a` is below that of perplexity `b`.

    It is 1 - ln(a) / ln(b), an effect as that of `verdicts.lower`.
    """
    return 1 - math.log(a) / math.log(b)


def results_dir(scale: str, stage: str) -> Path:
    """Return the folder of the tables of a stage ("noloco/training") at one scale; it is made if it is missing."""
    folder = ROOT / "results" / scale / stage
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def spread(values: Sequence[float]) -> float:
    """Return the sample standard deviation over seeds; NaN for one seed."""
    return statistics.stdev(values) if len(values) > 1 else float("nan")


def plus_minus(values: Sequence[float], digits: int = 3) -> str:
    """Return '3.412 ± 0.008 (3)': mean, sample standard deviation and number of seeds; '3.412 (1)' for one seed."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {spread(values):.{digits}f} ({len(values)})" if len(values) > 1 else f"{mean} (1)"


def span(values: Sequence[float]) -> str:
    """Return the range of values as text: "512 to 2,048", or "512" where both ends read alike."""
    ends = [f"{v:,.1f}" if v < 20 else f"{v:,.0f}" for v in (min(values), max(values))]
    return " to ".join(dict.fromkeys(end.removesuffix(".0") for end in ends))


def ranged(middle: float, low: float, high: float) -> str:
    """Return '+0.42 (+0.21 to +0.63) %', a percentage with its interval, for a table.

    It is '+0.42 %' where the interval is NaN, and "" where the percentage is.
    """
    if math.isnan(middle):
        return ""
    return f"{middle:+.2f}" + ("" if math.isnan(low) else f" ({low:+.2f} to {high:+.2f})") + " %"


def in_prose(middle: float, low: float, high: float, digits: int = 1) -> str:
    """Return '+0.4 (0.2 to 0.6) %', a percentage with its interval, for prose.

    It is '+0.4 %' where the interval is NaN, as that of one seed is.
    """
    between = "" if math.isnan(low) else f" ({low:.{digits}f} to {high:.{digits}f})"
    return f"{middle:+.{digits}f}{between} %"


def listed(names: Sequence[str]) -> str:
    """Join names, each of them once, as prose does: "0.12M, 0.33M and 1.05M"."""
    *some, last = dict.fromkeys(names)
    return f"{', '.join(some)} and {last}" if some else last


def ladder_table(name: str) -> pd.DataFrame:
    """Return a table of the ladder's page, results/ladder/<name>.csv; an empty one where that is missing."""
    file = ROOT / "results" / "ladder" / f"{name}.csv"
    return pd.read_csv(file) if file.exists() else pd.DataFrame()


def read_claims(table: Path) -> list[Claim]:
    """Return the claims that a table's stage has written beside it; none where it has written none."""
    path = table.with_suffix(".claims.json")
    return [Claim.of(record) for record in json.loads(path.read_text())] if path.exists() else []


def by_variant(runs: Iterable[str], scale: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the summaries of runs at a scale, a list of seeds for each (run, variant); "rows" has a seed's metrics."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        for summary in read_run(run, scale):
            found.setdefault((run, summary["variant"]), []).append(summary)
    return found


def curves(seeds: Iterable[Mapping[str, Any]], key: str = "val_loss") -> pd.DataFrame:
    """Return a metric of the seeds of a run, a row for each seed and a column for each step at which it was taken."""
    return pd.DataFrame([{row["step"]: row[key] for row in seed["rows"] if key in row} for seed in seeds])


def regime_of(summary: Mapping[str, Any]) -> Regime:
    """Return the regime of a single run, which has one seed, from its summary.

    The rounds are infinite where the run exchanges no parameters.
    """
    run, train, method = summary["run"], summary["run"]["train"], summary["run"]["method"]
    rounds = train["steps"] / method["sync_every_steps"] if method["exchange"] == "parameters" else math.inf
    step = train["global_batch"] * train["seq_len"] / run["replicas"]
    return Regime(1, rounds, summary["tokens"] / summary["parameters"], step)


class Comparison:
    """Runs side by side, paired by their seeds.

    Args:
        runs: the summaries (one for each seed) of each cell, by any key.
        of: which number of a summary is compared: its loss, or another that is above 0.

    Attributes:
        losses: each cell's validation losses (or what `of` names), in the order of its summaries.
        loss: the mean of each cell's `losses`.
        noise: the standard deviation of a single run over seeds, pooled over all cells with several; NaN without any.
    """

    def __init__(self, runs: Mapping[Any, Sequence[dict[str, Any]]], of: str = "val_loss"):
        self.runs, self.of = dict(runs), of
        self.losses = {key: [s[of] for s in some] for key, some in runs.items()}
        self.loss = {key: statistics.mean(values) for key, values in self.losses.items()}
        freedom = sum(len(values) - 1 for values in self.losses.values())
        squares = sum((v - self.loss[key]) ** 2 for key, values in self.losses.items() for v in values)
        self.noise = math.sqrt(squares / freedom) if freedom else math.nan

    def _by_seed(self, key: Any) -> dict[int, float]:
        return {s["run"]["seed"]: s[self.of] for s in self.runs[key]}

    def _common_mean(self, a: Any, b: Any) -> float:
        """Return the mean loss of `a` over the seeds that `b` has too."""
        losses, others = self._by_seed(a), self._by_seed(b)
        return statistics.mean(losses[seed] for seed in losses.keys() & others.keys())

    def pairs(self, a: Any, b: Any) -> Paired:
        """Pair the runs of two cells by their seeds. Raises ValueError where they have no seed in common."""
        return Paired.of(self._by_seed(a), self._by_seed(b))

    def regime(self, *keys: Any) -> Regime:
        """Return the regime of some cells (default: all): the least of their runs' numbers, and the seeds of all."""
        keys = keys or tuple(self.runs)
        regime = functools.reduce(Regime.least, (regime_of(s) for key in keys for s in self.runs[key]))
        seeds = set.intersection(*(set(self._by_seed(key)) for key in keys))
        return dataclasses.replace(regime, seeds=len(seeds))

    def _here(self, evidence: Evidence, *keys: Any) -> Evidence:
        """Return evidence with the regime of the cells that it is from."""
        return dataclasses.replace(evidence, regime=self.regime(*keys))

    def lower(self, a: Any, b: Any, by: float = 0.0) -> Evidence:
        """Return evidence that the loss of `a` is lower than that of `b`, by more than `by` in its logarithm."""
        return self._here(lower(self.pairs(a, b), by), a, b)

    def no_worse(self, a: Any, b: Any, margin: float = MARGIN) -> Evidence:
        """Return evidence that the loss of `a` is above that of `b` by less than a margin in its logarithm."""
        return self._here(no_worse(self.pairs(a, b), margin), a, b)

    def equal(self, a: Any, b: Any, margin: float = MARGIN) -> Evidence:
        """Return evidence that the losses of `a` and `b` differ by less than a margin in their logarithms."""
        return self._here(equal(self.pairs(a, b), margin), a, b)

    def rises_less(self, rise: tuple[Any, Any], other: tuple[Any, Any], margin: float = 0.0) -> Evidence:
        """Return evidence that the loss rises by less from the second to the first cell of `rise` than of `other`.

        Rises are of logarithms of the losses. With a margin it is evidence that the rise is above the other by less
        than that.
        """
        (a, b), (c, d) = ({key: self._by_seed(key) for key in pair}.values() for pair in (rise, other))
        seeds = set.intersection(*map(set, (a, b, c, d)))
        pairs = Paired.of({s: a[s] * d[s] for s in seeds}, {s: b[s] * c[s] for s in seeds})
        return self._here(no_worse(pairs, margin) if margin else lower(pairs), *rise, *other)

    def fact(self, holds: Callable[[dict[str, Any]], bool], *keys: Any) -> Evidence:
        """Return evidence that each run of some cells (default: all) shows something by itself, without a comparison.

        holds: tells from the summary of a run whether it does. A seed shows it if all of its runs do.
        """
        shown: dict[int, bool] = {}
        for run in (s for key in keys or self.runs for s in self.runs[key]):
            seed = run["run"]["seed"]
            shown[seed] = shown.get(seed, True) and bool(holds(run))
        return self._here(each(shown), *keys)

    def mean_difference(self, a: Any, b: Any) -> float:
        """Return the mean loss of `a` less that of `b`, both over the seeds that both have.

        Means over all seeds of each would also differ by the luck of the seeds that only one has.
        """
        return self._common_mean(a, b) - self._common_mean(b, a)

    def difference(self, a: Any, b: Any) -> str:
        """Return '+0.123 (0.078 to 0.168)': `mean_difference` and its pairs' 95 % interval; '+0.123' for one seed."""
        pairs, likely = self.pairs(a, b), self.mean_difference(a, b)
        half = (pairs.likely.high - pairs.mean) * self._common_mean(b, a)
        return f"{likely:+.3f}" + ("" if math.isnan(half) else f" ({likely - half:.3f} to {likely + half:.3f})")

    def over(self, a: Any, b: Any, digits: int = 1) -> str:
        """Return '+0.4 (0.2 to 0.6) %': how far the loss of `a` is above that of `b`, in the mean of pairs.

        It is '+0.4 %' for one seed.
        """
        return in_prose(*self.pairs(a, b).percent(), digits)

    def told_seeds(self, a: Any, b: Any) -> str:
        """Return '5 seeds', or '1 seed': how many seeds both cells have."""
        seeds = self.pairs(a, b).seeds
        return f"{seeds} seed{'s' * (seeds != 1)}"

    def above(self, a: Any, b: Any) -> bool | None:
        """Tell whether the loss of `a` is higher (True) or lower (False) than that of `b`; None where it is not clear.

        It is clear where the 95 % interval of the pairs leaves out 0. This is for notes: claims are judged by their
        evidence.
        """
        _, low, high = self.pairs(a, b).likely
        return True if low > 0 else False if high < 0 else None

    def told(self, key: Any) -> str:
        """Return '3.412 ± 0.008 (3)': the mean loss of a cell, its deviation and its number of runs (`plus_minus`)."""
        return plus_minus(self.losses[key])

    def about(self, *keys: Any) -> str:
        """Return a note for a table that says what the runs of some cells (default: all) were."""
        runs = [s for key in keys or self.runs for s in self.runs[key]]
        regimes = [regime_of(s) for s in runs]
        seeds = [len(self.runs[key]) for key in keys or self.runs]
        parts = [
            f"{span([s['parameters'] for s in runs])} parameters",
            f"{span([r.tokens_per_parameter for r in regimes])} tokens per parameter",
            f"{span([r.tokens_per_replica_and_step for r in regimes])} tokens per replica and step",
            f"{span(seeds)} seed{'s' * (max(seeds) > 1)}",
        ]
        if rounds := [r.rounds for r in regimes if math.isfinite(r.rounds)]:
            parts.insert(2, f"{span(rounds)} outer rounds")
        several = max(seeds) > 1
        return f"Our runs: {', '.join(parts)}." + (
            f" Losses of single runs differ by {self.noise:.3f} (standard deviation over seeds, all cells together);"
            " differences are of the seeds that both sides have, with the 95 % interval of these pairs."
            if several
            else ""
        )


def write(
    table: pd.DataFrame,
    path: Path,
    *,
    title: str,
    shown: pd.DataFrame | None = None,
    claims: Sequence[Claim] = (),
    notes: Sequence[str] = (),
) -> None:
    """Write `path`.csv (plain columns), `path`.md and, with claims, `path`.claims.json; display claims and notes.

    The page, `path`.md, has the title, `shown` or else the table, and the notes as a list. Claims are judged by
    `pipelines.index`, as all claims of a paper are needed for that. Without claims a `path`.claims.json is removed.
    """
    table.to_csv(path.with_suffix(".csv"), index=False, float_format="%.6g", lineterminator="\n")
    body = [f"### {title}", "", markdown(table if shown is None else shown), "", *(f"- {line}" for line in notes)]
    path.with_suffix(".md").write_text("\n".join(body).rstrip() + "\n")
    path.with_suffix(".claims.json").unlink(missing_ok=True)
    if claims:
        records = [claim.record() for claim in claims]
        path.with_suffix(".claims.json").write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    display(Markdown("\n".join(f"- {line}" for line in (*map(told, claims), *notes))))


def told(claim: Claim, outcome: str = "", corrected: Corrected | None = None) -> str:
    """Return a claim in words, with its outcome and its corrected probabilities where these are known.

    They are known once all of a paper's claims are.
    """
    words = f"Claim: {claim.text}. {outcome or 'Seen'}: {claim.seen}."
    if claim.criterion:
        words += f" Called borne out if {claim.criterion}."
    found = claim.evidence
    if found is not None and not claim.outside and not found.is_fact:
        words += f" (p = {found.p_for:.2g} for it, {found.p_against:.2g} against it, "
        if corrected is None:
            words += "before correction.)"
        else:
            words += f"and as one of {corrected.tests} tests {corrected.p_for:.2g} and {corrected.p_against:.2g}.)"
    return words
