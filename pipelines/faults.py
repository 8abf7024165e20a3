"""The table of faults: what is done to runs, what should come of it, and what did. Each row is a test.

    python -m pipelines.faults          run the tests that are marked `fault`, and write results/storm/faults.json

A test says by `@pytest.mark.fault(injected, expected)` what it does to a run, and what it then checks.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from pipelines.project import ROOT
from pipelines.storm import RESULTS


class Seen:
    """A pytest plugin that counts the outcomes of the marked tests: a row for each, however many cases it has."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the report of a marked test's case to its row: of its call, or of a skip or failure before or after."""
        fault = dict(report.user_properties).get("fault")
        if fault is None or (report.when != "call" and report.passed):
            return
        name = report.nodeid.partition("[")[0]
        injected, expected = fault
        row = self.rows.setdefault(
            name,
            {"test": name, "injected": injected, "expected": expected, "passed": 0, "failed": 0, "skipped": 0}
            | {"seconds": 0.0},
        )
        row[report.outcome] += 1
        row["seconds"] = round(row["seconds"] + report.duration, 2)


def rows() -> list[dict[str, Any]]:
    """Return the rows of the table as the last run of the tests has written them."""
    return json.loads((RESULTS / "faults.json").read_text())


def main() -> int:
    """Run the marked tests, write the table to `faults.json`, and return pytest's exit status."""
    seen = Seen()
    status = pytest.main(["-q", "-m", "fault", "-n", "auto", "--rootdir", str(ROOT), str(ROOT / "tests")], [seen])
    RESULTS.mkdir(parents=True, exist_ok=True)
    found = sorted(seen.rows.values(), key=lambda row: row["test"])
    (RESULTS / "faults.json").write_text(json.dumps(found, indent=1) + "\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
