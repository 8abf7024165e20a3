"""Tables: ours beside the paper's, with seeds and spread, written so that git can show them."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from IPython.display import Markdown, display

from lowcomm.cost.tables import markdown
from lowcomm.experiment.project import pick
from lowcomm.settings import nearest
from pipelines.project import ROOT

PAPERS = ROOT / "results" / "papers"


def paper(name: str) -> dict[str, Any]:
    """The published numbers of a paper: `results/papers/<name>.yaml`."""
    path = PAPERS / f"{name}.yaml"
    if not path.exists():
        raise ValueError(f"no paper named {name!r}{nearest(name, [p.stem for p in PAPERS.glob('*.yaml')])}")
    return yaml.safe_load(path.read_text())


def published(name: str, table: str, **where: Any) -> list[dict[str, Any]]:
    """Rows of a published table whose columns equal `where`."""
    rows = pick(paper(name)["tables"], table, f"table of {name}")["rows"]
    return [r for r in rows if all(r.get(k) == v for k, v in where.items())]


def results_dir(scale: str, stage: str) -> Path:
    """Folder of the tables of a stage ("noloco/training") at one scale, made if it is missing."""
    folder = ROOT / "results" / scale / stage
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def spread(values: Sequence[float]) -> float:
    """Sample standard deviation over seeds; NaN for one seed."""
    return statistics.stdev(values) if len(values) > 1 else float("nan")


def plus_minus(values: Sequence[float], digits: int = 3) -> str:
    """'3.412 ± 0.008 (3)': mean, sample standard deviation, number of seeds."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {spread(values):.{digits}f} ({len(values)})" if len(values) > 1 else f"{mean} (1)"


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, and what our runs or closed forms say of it.

    Attributes:
        text: what the paper claims, as a sentence without its full stop; its own numbers in brackets.
        holds: whether it is borne out; None if the noise hides it.
        seen: what was seen: our numbers, as a sentence without its full stop.
        criterion: when it is called borne out, where that does not go without saying.
        unjudged: why it cannot be judged, if it cannot: "one seed", "no public checkpoint", ...
    """

    text: str
    holds: bool | None
    seen: str
    criterion: str = ""
    unjudged: str = ""

    @property
    def verdict(self) -> str:
        """The one rule: what is not judged says why; else borne out or not, or not resolved within the noise."""
        if self.unjudged:
            return f"Not judged ({self.unjudged})"
        return {True: "Borne out", False: "Not borne out", None: "Not resolved"}[self.holds]

    def __str__(self) -> str:
        told = f"Claim: {self.text}. {self.verdict}: {self.seen}."
        return f"{told} Called borne out if {self.criterion}." if self.criterion else told


def read_claims(table: Path) -> list[Claim]:
    """The claims that a table's stage has written beside it."""
    path = table.with_suffix(".claims.json")
    return [Claim(**record) for record in json.loads(path.read_text())] if path.exists() else []


def every(holds: Iterable[bool | None]) -> bool | None:
    """Combine several answers: False if one does not, else None if the noise hides one."""
    told = list(holds)
    return False if False in told else None if None in told else True


def student(freedom: int, level: float = 0.95) -> float:
    """Return the bound below which the size of Student's t stays with this probability.

    Abramowitz and Stegun, 26.7.3 and 26.7.4, inverted by bisection.
    """
    if freedom < 1 or not 0 < level < 1:
        raise ValueError(f"Student's t of {freedom} degrees of freedom, at level {level}: 1 or more, and within 0 to 1")

    def below(angle: float) -> float:
        odd, cosine = freedom % 2, math.cos(angle)
        term, total = (cosine if odd else 1.0), 0.0
        for k in range(1 + odd, freedom, 2):
            total += term
            term *= k / (k + 1) * cosine**2
        total *= math.sin(angle)
        return 2 / math.pi * (angle + total) if odd else total

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < level else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


class Comparison:
    """Runs side by side, and which of their differences the seeds resolve.

    Args:
        runs: the summaries (one a seed) of each cell, by any key.

    Attributes:
        loss: each cell's mean validation loss.
        noise: standard deviation over seeds of a single run, pooled over all cells with several; NaN without any.
        freedom: its degrees of freedom, of each such cell one less than it has seeds.
        judged: whether there is such a cell.
    """

    def __init__(self, runs: Mapping[Any, Sequence[dict[str, Any]]]):
        self.runs = runs
        self.losses = {key: [s["val_loss"] for s in some] for key, some in runs.items()}
        self.loss = {key: statistics.mean(values) for key, values in self.losses.items()}
        self.freedom = sum(len(values) - 1 for values in self.losses.values())
        self.judged = self.freedom > 0
        squares = sum((v - self.loss[key]) ** 2 for key, values in self.losses.items() for v in values)
        self.noise = math.sqrt(squares / self.freedom) if self.judged else float("nan")

    def resolved(self, *keys: Any) -> float:
        """The least difference of two cells (or of two such differences) that is told from noise, at 95 %.

        Student's t, as the noise is itself an estimate, of few seeds. NaN where there is none.
        """
        if not self.judged:
            return float("nan")
        return student(self.freedom) * self.noise * math.sqrt(sum(1 / len(self.losses[key]) for key in keys))

    def above(self, a: Any, b: Any) -> bool | None:
        """Tell whether the loss of `a` is higher (True) or lower (False) than that of `b`; None within the noise."""
        difference = self.loss[a] - self.loss[b]
        return difference > 0 if self.judged and abs(difference) > self.resolved(a, b) else None

    def below(self, a: Any, b: Any) -> bool | None:
        """Tell whether the loss of `a` is lower (True) or higher (False) than that of `b`; None within the noise."""
        return self.above(b, a)

    def difference(self, a: Any, b: Any) -> str:
        """'+0.123', or '+0.012 (not resolved)': the loss of `a` less that of `b`."""
        told = f"{self.loss[a] - self.loss[b]:+.3f}"
        return told + (" (not resolved)" if self.judged and self.above(a, b) is None else "")

    def told(self, key: Any) -> str:
        """'3.412 ± 0.008 (3)'."""
        return plus_minus(self.losses[key])

    def claim(self, text: str, holds: bool | None, seen: str, criterion: str = "") -> Claim:
        """A claim that rests on these runs: not judged where no cell has several seeds."""
        return Claim(text, holds, seen, criterion, "" if self.judged else "one seed")

    def unharmed(self, *pairs: tuple[Any, Any]) -> bool | None:
        """Tell whether the first of each pair loses nothing to the second: False if one does, None within the noise."""
        return every(None if (above := self.above(*pair)) is None else not above for pair in pairs)


def write(
    table: pd.DataFrame,
    path: Path,
    *,
    title: str,
    shown: pd.DataFrame | None = None,
    claims: Sequence[Claim] = (),
    notes: Sequence[str] = (),
) -> None:
    """Write `path`.csv (plain columns), `path`.md and, with claims, `path`.claims.json; show claims and notes.

    The page has the title, `shown` or the table, and then claims and notes as a list.
    """
    table.to_csv(path.with_suffix(".csv"), index=False, float_format="%.6g", lineterminator="\n")
    told = [f"- {line}" for line in (*claims, *notes)]
    body = [f"### {title}", "", markdown(table if shown is None else shown), "", *told]
    path.with_suffix(".md").write_text("\n".join(body).rstrip() + "\n")
    path.with_suffix(".claims.json").unlink(missing_ok=True)
    if claims:
        records = [dataclasses.asdict(claim) for claim in claims]
        path.with_suffix(".claims.json").write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    display(Markdown("\n".join(told)))
