"""The headline: one seed of the main rows, trained anew by `make repro`, to set beside the ladder's points in git.

The ladder's evidence takes hours and is read from git. What `make repro` trains of it is one seed of the rows that
plan.yaml names, at the size that it names: on a machine of the same kind the losses are those in git bit for bit, and
on another machine they differ by what another order of rounding makes of them.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowcomm.settings import ConfigError
from pipelines.ladder.workers import one_by_one
from pipelines.project import ROOT, write_whole

if TYPE_CHECKING:
    from pathlib import Path

    from pipelines.ladder.plan import Ladder, Point
    from pipelines.ladder.workers import Workers


@dataclass(frozen=True)
class Pair:
    """A point of the headline, with its outcome as it was trained anew (`here`) and as it is in git (`there`)."""

    point: Point
    here: dict[str, Any]
    there: dict[str, Any]


def headline_points(ladder: Ladder) -> list[Point]:
    """Return the points of the headline: seed 0 of its rows. Raises ConfigError where a row is not tuned."""
    rung, rows = ladder.plan.headline
    return [point for point in ladder.results_at(rung, rows) if point.seed == 0]


def retrain(ladder: Ladder, workers: Workers) -> None:
    """Train the points that the folder `headline` of the build folder lacks, and remove those that the plan lacks.

    Outcomes are written without seconds and environment, so that the same run makes the same file. Where the text here
    is another than that of the points in git, they say as "python" of which release it is.
    """
    folder, origin = ladder.build / "headline", ladder.origin
    again = dataclasses.replace(ladder, results=folder)
    points = [dataclasses.replace(point, ladder=again) for point in headline_points(ladder)]
    one_by_one(points, workers)
    for file in set(folder.rglob("*.json")) - {point.file for point in points}:
        file.unlink()
    for point in points:  # clock and machine would make another file of the same run
        told = json.loads(point.file.read_text())
        kept = {key: value for key, value in told.items() if key not in ("seconds", "environment", "python")}
        if origin and not origin.is_of_text(ladder, point.config.data.corpus):
            kept["python"] = told.get("python", platform.python_version())
        write_whole(point.file, json.dumps(kept, indent=1) + "\n")


def read_pairs(ladder: Ladder, folder: Path | str = "") -> list[Pair]:
    """Return the headline's points in a folder beside those in git. Raises ConfigError where one of them is missing.

    folder: where `retrain` has written them, relative to the repository; by default the ladder's own, so that each is
    beside itself.
    """
    again = dataclasses.replace(ladder, results=ROOT / folder) if folder else ladder
    pairs = []
    for there in headline_points(ladder):
        here = dataclasses.replace(there, ladder=again)
        for point, how in ((here, "dvc repro headline"), (there, "make ladder")):
            if not point.file.exists():
                raise ConfigError(f"{point.title} is not in {point.file.parent}: {how}")
        pairs.append(Pair(there, *(json.loads(point.file.read_text()) for point in (here, there))))
    return pairs
