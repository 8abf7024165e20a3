"""Write what is known of each row of the ladder into a file, on which tables depend in place of all points.

    python -m pipelines.ladder.rows

The file of a row, in build/ladder/rows/, says what each rung has of it: its settings as tuning found them, and digests
of its points. So a new point makes the tables that read its row stale, and no others.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from typing import Any

from pipelines.ladder.plan import LADDER, Ladder, deciding
from pipelines.settings import set_values


def known(ladder: Ladder) -> dict[str, dict[str, Any]]:
    """Return what is known of each row, by its name, at each rung that has points of it.

    It is their "settings", and a SHA-256 of each point, by "seed 0" and so on.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in ladder.plan.rows}
    for name, rung in ladder.plan.rungs.items():
        for point in ladder.points_there(name, rung.rows):
            there = found[point.row.name].setdefault(name, {"settings": deciding(set_values(point.config))})
            there[f"seed {point.seed}"] = hashlib.sha256(point.file.read_bytes()).hexdigest()
    return found


def main() -> None:
    """Remove the files of all rows, and write them anew."""
    folder = LADDER.build / "rows"
    shutil.rmtree(folder, ignore_errors=True)
    for row, rungs in known(LADDER).items():
        file = folder / f"{row}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(rungs, indent=1) + "\n")


if __name__ == "__main__":
    main()
