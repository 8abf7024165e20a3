"""What tables say of differences: which are told from the noise of the seeds, and the words for it."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from pipelines.report import Claim, Comparison, every, read_claims, student, write


def compared(**losses: list[float]) -> Comparison:
    return Comparison({key: [{"val_loss": v} for v in values] for key, values in losses.items()})


@pytest.mark.parametrize(
    ("freedom", "level", "expected"),
    [(1, 0.95, 12.706), (2, 0.95, 4.303), (3, 0.95, 3.182), (4, 0.95, 2.776), (9, 0.99, 3.250), (30, 0.95, 2.042)],
)
def test_students_t_is_that_of_the_tables(freedom: int, level: float, expected: float) -> None:
    assert student(freedom, level) == pytest.approx(expected, abs=5e-4)


def test_students_t_goes_to_the_normal_distribution() -> None:
    assert student(100_000) == pytest.approx(1.95996, abs=1e-4)


@pytest.mark.parametrize(("freedom", "level"), [(0, 0.95), (3, 0.0), (3, 1.0)])
def test_a_distribution_that_does_not_exist_is_refused(freedom: int, level: float) -> None:
    with pytest.raises(ValueError, match="degrees of freedom"):
        student(freedom, level)


def test_noise_is_pooled_by_degrees_of_freedom() -> None:
    c = compared(a=[1.0, 1.2], b=[2.0, 2.1, 2.2, 2.3, 2.4], c=[3.0])
    assert (c.judged, c.freedom) == (True, 5)
    assert c.noise == pytest.approx(math.sqrt((0.02 + 0.1) / 5))
    assert c.resolved("a", "c") == pytest.approx(2.5706 * c.noise * math.sqrt(1 / 2 + 1), rel=1e-4)


def test_a_difference_is_resolved_beyond_the_noise_alone() -> None:
    c = compared(base=[1.0, 1.1, 1.2], near=[1.3], far=[2.0])
    assert c.resolved("base", "near") == pytest.approx(4.3027 * 0.1 * math.sqrt(4 / 3), rel=1e-4)
    assert (c.above("near", "base"), c.above("far", "base"), c.below("far", "base")) == (None, True, False)
    assert c.difference("near", "base") == "+0.200 (not resolved)"
    assert c.difference("far", "base") == "+0.900"
    told = [c.claim("it is so", holds, "it is").verdict for holds in (True, False, None)]
    assert told == ["Borne out", "Not borne out", "Not resolved"]
    assert c.unharmed(("near", "base")) is None
    assert c.unharmed(("near", "base"), ("far", "base")) is False
    assert c.unharmed(("base", "far")) is True
    assert c.unharmed(("base", "far"), ("near", "base")) is None


def test_one_seed_judges_nothing() -> None:
    c = compared(a=[1.0], b=[2.0])
    assert not c.judged
    assert math.isnan(c.noise)
    assert math.isnan(c.resolved("a", "b"))
    assert (c.above("b", "a"), c.difference("b", "a")) == (None, "+1.000")
    assert c.claim("it is so", True, "it is").verdict == "Not judged (one seed)"


def test_all_hold_unless_one_does_not() -> None:
    assert every([True, True]) is True
    assert every([True, None]) is None
    assert every([None, False, True]) is False


def test_claims_are_told_and_read_back(tmp_path: Path) -> None:
    c = compared(a=[1.0, 1.1], b=[9.0])
    claims = [c.claim("a beats b (by 8)", c.below("a", "b"), "1.05 ± 0.07", "it is resolved")]
    claims.append(Claim("its weights do, too", None, "nothing", unjudged="no public checkpoint"))
    assert str(claims[0]) == "Claim: a beats b (by 8). Borne out: 1.05 ± 0.07. Called borne out if it is resolved."
    assert str(claims[1]) == "Claim: its weights do, too. Not judged (no public checkpoint): nothing."
    write(pd.DataFrame({"x": [1, None]}), tmp_path / "table", title="Of x", claims=claims, notes=["a note"])
    assert read_claims(tmp_path / "table.md") == claims
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[0] == "### Of x"
    assert lines[-3:] == [f"- {claims[0]}", f"- {claims[1]}", "- a note"]
    write(pd.DataFrame({"x": [1]}), tmp_path / "bare", title="Of x")
    assert read_claims(tmp_path / "bare.md") == []
