"""Tables: ours beside the paper's, with seeds and spread, written so that git can show them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

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


def results_dir(scale: str, paper: str) -> Path:
    """Folder of a paper's tables at one scale, made if it is missing."""
    folder = ROOT / "results" / scale / paper
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def spread(values: Sequence[float]) -> float:
    """Sample standard deviation over seeds; NaN for one seed."""
    return statistics.stdev(values) if len(values) > 1 else float("nan")


def plus_minus(values: Sequence[float], digits: int = 3) -> str:
    """'3.412 ± 0.008 (3)': mean, sample standard deviation, number of seeds."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {spread(values):.{digits}f} ({len(values)})" if len(values) > 1 else f"{mean} (1)"


def verdict(holds: bool | None, *, judged: bool = True) -> str:
    """Whether a claim is borne out; None: the noise hides it. Not `judged`: one seed has no spread to be judged by."""
    if not judged:
        return "Not judged (one seed)"
    return {True: "Borne out", False: "Not borne out", None: "Not resolved"}[holds]


def every(holds: Iterable[bool | None]) -> bool | None:
    """Whether all hold: False if one does not, else None if the noise hides one."""
    told = list(holds)
    return False if False in told else None if None in told else True


def student(freedom: int, level: float = 0.95) -> float:
    """What the size of Student's t of so many degrees of freedom stays below with this probability.

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
        """Whether the loss of `a` is higher (True) or lower (False) than of `b`; None within the noise."""
        difference = self.loss[a] - self.loss[b]
        return difference > 0 if self.judged and abs(difference) > self.resolved(a, b) else None

    def below(self, a: Any, b: Any) -> bool | None:
        """Whether the loss of `a` is lower (True) or higher (False) than of `b`; None within the noise."""
        return self.above(b, a)

    def difference(self, a: Any, b: Any) -> str:
        """'+0.123', or '+0.012 (not resolved)': the loss of `a` less that of `b`."""
        told = f"{self.loss[a] - self.loss[b]:+.3f}"
        return told + (" (not resolved)" if self.judged and self.above(a, b) is None else "")

    def told(self, key: Any) -> str:
        """'3.412 ± 0.008 (3)'."""
        return plus_minus(self.losses[key])

    def verdict(self, holds: bool | None) -> str:
        """As the function."""
        return verdict(holds, judged=self.judged)

    def unharmed(self, *pairs: tuple[Any, Any]) -> str:
        """The verdict on a claim that the first of each pair loses nothing to the second: borne out where none does."""
        told = [self.above(*pair) for pair in pairs]
        hidden = self.judged and all(t is None for t in told)
        return self.verdict(True not in told) + (" within the noise" if hidden else "")


def write(
    table: pd.DataFrame, path: Path, *, title: str, shown: pd.DataFrame | None = None, notes: Sequence[str] = ()
) -> None:
    """Write `path`.csv (plain columns) and `path`.md: title, `shown` or the table, and notes as a list."""
    table.to_csv(path.with_suffix(".csv"), index=False, float_format="%.6g", lineterminator="\n")
    body = [f"### {title}", "", markdown(table if shown is None else shown), ""]
    path.with_suffix(".md").write_text("\n".join(body + [f"- {n}" for n in notes]).rstrip() + "\n")
