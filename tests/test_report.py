"""What tables say of runs: pairs of one seed, what the runs were, and claims that are judged where all are known."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pandas as pd
import pytest

from pipelines.index import index, judged, page
from pipelines.report import Comparison, loss_below, read_claims, regime_of, told, write
from pipelines.verdicts import BORNE_OUT, NOT_BORNE_OUT, NOT_RESOLVED, Claim, Evidence, Regime, corrected, fact, judge


def summary(loss: float, seed: int = 0, *, exchange: str = "parameters", steps: int = 300, replicas: int = 2) -> dict:
    train = {"steps": steps, "global_batch": 16, "seq_len": 128}
    run = {"seed": seed, "replicas": replicas, "train": train}
    run["method"] = {"exchange": exchange, "sync_every_steps": 30}
    return {"val_loss": loss, "run": run, "tokens": steps * 16 * 128, "parameters": 10_000}


def compared(**losses: list[float]) -> Comparison:
    return Comparison({key: [summary(v, seed) for seed, v in enumerate(some)] for key, some in losses.items()})


def test_noise_is_pooled_by_degrees_of_freedom() -> None:
    c = compared(a=[1.0, 1.2], b=[2.0, 2.1, 2.2, 2.3, 2.4], c=[3.0])
    assert c.noise == pytest.approx(math.sqrt((0.02 + 0.1) / 5))
    assert math.isnan(compared(a=[1.0], b=[2.0]).noise)


def test_pairs_are_of_one_seed_whatever_their_order() -> None:
    """A difference that seeds share is no noise: each has 3 % between two cells, and 40 % between itself and others."""
    low = {0: 1.0, 1: 1.4, 2: 1.9, 5: 7.0}
    high = {2: 1.9 * 1.031, 0: 1.03, 1: 1.4 * 1.029, 4: 0.1}
    c = Comparison({name: [summary(v, s) for s, v in cell.items()] for name, cell in (("low", low), ("high", high))})
    assert c.pairs("high", "low").seeds == 3
    assert c.pairs("high", "low").mean == pytest.approx(0.03, rel=0.02)
    assert c.lower("low", "high").p_for < 0.01 < 0.99 < c.lower("high", "low").p_for
    assert c.above("high", "low") is True
    assert c.above("low", "high") is False
    assert compared(a=[1.0, 1.2, 1.1], b=[1.1, 1.1, 1.1]).above("a", "b") is None


def test_a_difference_has_the_interval_of_its_pairs() -> None:
    c = compared(a=[2.0, 3.0], b=[2.2, 3.3], c=[2.2, 3.6])
    assert c.difference("b", "a") == "+0.250 (0.250 to 0.250)"
    half = 12.706 * (math.log(1.2) - math.log(1.1)) / 2 * 2.5
    assert c.difference("c", "a") == f"+0.400 ({0.4 - half:.3f} to {0.4 + half:.3f})"
    assert compared(a=[2.0], b=[2.5]).difference("b", "a") == "+0.500"


def test_a_difference_is_of_the_seeds_that_both_have() -> None:
    """Each pair differs by 2.9 to 3.1 %; over all seeds of each, the mean of `high` is a third of that of `low`."""
    low = {0: 2.0, 1: 3.0, 2: 2.5, 7: 30.0}
    high = {2: 2.5 * 1.03, 0: 2.0 * 1.029, 1: 3.0 * 1.031, 9: 0.1}
    c = Comparison({name: [summary(v, s) for s, v in cell.items()] for name, cell in (("low", low), ("high", high))})
    assert c.loss["high"] < c.loss["low"] / 3
    assert c.mean_difference("high", "low") == pytest.approx((0.058 + 0.093 + 0.075) / 3)
    assert c.mean_difference("low", "high") == -c.mean_difference("high", "low")
    pairs = c.pairs("high", "low")
    half = 4.30265 * pairs.deviation / math.sqrt(3) * 2.5
    mean = (0.058 + 0.093 + 0.075) / 3
    assert c.difference("high", "low") == f"{mean:+.3f} ({mean - half:.3f} to {mean + half:.3f})"
    assert math.exp(pairs.mean) == pytest.approx(1.03, abs=1e-5)  # what the percentage says of the same pairs
    with pytest.raises(ValueError, match="no seed is of both sides"):
        Comparison({"a": [summary(1.0, 0)], "b": [summary(1.0, 1)]}).difference("a", "b")


def test_a_gap_in_percent_has_the_interval_of_its_pairs() -> None:
    c = compared(a=[2.0, 3.0, 4.0], b=[2.02, 3.03, 4.04], c=[2.1, 3.15, 4.32])
    assert c.over("b", "a") == "+1.0 (1.0 to 1.0) %"
    d = [math.log(1.05), math.log(1.05), math.log(1.08)]
    half = 4.30265 * statistics.stdev(d) / math.sqrt(3)  # Student's t for two degrees of freedom
    gap, low, high = (100 * math.expm1(statistics.mean(d) + off) for off in (0, -half, half))
    assert c.pairs("c", "a").percent() == pytest.approx((gap, low, high), rel=1e-4)
    assert c.over("c", "a", 2) == f"{gap:+.2f} ({low:.2f} to {high:.2f}) %"
    assert compared(a=[2.0], b=[2.1]).over("b", "a") == "+5.0 %"


def test_published_perplexities_are_compared_as_losses_are() -> None:
    c = compared(a=[math.log(24.0), math.log(24.0)], b=[math.log(30.0), math.log(30.0)])
    assert loss_below(24.0, 30.0) == pytest.approx(c.lower("a", "b").effect)
    assert loss_below(30.0, 24.0) < 0


def test_one_rise_is_less_than_another() -> None:
    c = compared(a=[2.0, 3.0, 2.5], b=[2.02, 3.031, 2.526], c=[2.2, 3.32, 2.74], d=[2.0, 3.0, 2.51])
    assert c.rises_less(("b", "a"), ("c", "d")).p_for < 0.01
    assert c.rises_less(("c", "d"), ("b", "a")).p_against < 0.01
    assert c.rises_less(("b", "a"), ("d", "a"), margin=0.02).p_for < 0.05


def test_what_a_run_shows_by_itself_is_asked_of_every_seed() -> None:
    """It is borne out where all seeds show it, not where none does, and not resolved where some do.

    Where all cells have one seed, nothing is judged.
    """

    def outcome(c: Comparison, below: float, *keys: str) -> str:
        evidence = c.fact(lambda s: s["val_loss"] < below, *keys)
        return judge([Claim("it is so", "it is", evidence, needs=Regime())])[0]

    c = compared(a=[1.0, 2.0, 3.0], b=[5.0, 5.0, 5.0])
    assert [outcome(c, below, "a") for below in (4, 0.5, 2.5)] == [BORNE_OUT, NOT_BORNE_OUT, NOT_RESOLVED]
    assert [outcome(c, below) for below in (6, 4)] == [BORNE_OUT, NOT_BORNE_OUT]
    assert outcome(compared(a=[1.0], b=[1.0]), 4) == "Outside this regime (one seed)"


def test_claims_of_no_loss_are_of_a_margin_either_way_or_upwards_alone() -> None:
    """The margin is 1 % where no other is named; "no worse" may be better by any amount, "equal" may not."""
    near = [1 + off for off in (0.0001, -0.0001, 0.0002, -0.0002, 0.0)]
    base = [2.0, 2.5, 3.0, 2.2, 2.8]

    def outcomes(percent: float, **margin: float) -> list[str]:
        other = [b * n * (1 + percent / 100) for b, n in zip(base, near, strict=True)]
        c = compared(a=other, b=base)
        some = (c.equal("a", "b", **margin), c.no_worse("a", "b", **margin), c.no_worse("b", "a", **margin))
        return [judge([Claim("it is so", "it is", evidence, needs=Regime())])[0] for evidence in some]

    assert outcomes(0.5) == [BORNE_OUT] * 3
    assert outcomes(2.0) == [NOT_BORNE_OUT, NOT_BORNE_OUT, BORNE_OUT]
    assert outcomes(-2.0) == [NOT_BORNE_OUT, BORNE_OUT, NOT_BORNE_OUT]
    assert outcomes(2.0, margin=0.03) == [BORNE_OUT] * 3


def test_other_numbers_of_runs_are_compared_as_losses_are() -> None:
    runs = {"a": [summary(9.0, s) | {"norm": v} for s, v in enumerate((2.0, 3.0, 2.5))]}
    runs["b"] = [summary(9.0, s) | {"norm": v} for s, v in enumerate((24.0, 36.6, 30.1))]
    c = Comparison(runs, of="norm")
    assert c.pairs("b", "a").mean == pytest.approx(math.log(12), rel=0.01)
    assert c.lower("a", "b").regime == Comparison(runs).regime()
    assert c.lower("a", "b", by=math.log(10)).p_for < 0.01
    assert c.lower("a", "b", by=math.log(14)).p_against < 0.01


def test_the_regime_of_a_claim_is_the_least_of_its_runs() -> None:
    """10 rounds of 30 steps; 61 tokens per parameter; 1,024 per replica and step. Without rounds, they are infinite."""
    assert regime_of(summary(1.0)) == Regime(1, 10, 61.44, 1024)
    assert regime_of(summary(1.0, exchange="gradients")).rounds == math.inf
    four = [summary(1.0, seed, replicas=4) for seed in (1, 2, 3)]
    c = Comparison({"two": [summary(1.0, s) for s in (0, 1, 2)], "four": four, "none": [summary(1.0, exchange="none")]})
    assert c.lower("two", "four").regime == Regime(2, 10, 61.44, 512)
    assert c.regime("none", "two") == Regime(1, 10, 61.44, 1024)
    assert c.fact(bool, "none").regime == Regime(1, math.inf, 61.44, 1024)
    about = c.about("two", "four")
    assert about.startswith(
        "Our runs: 10,000 parameters, 61 tokens per parameter, 10 outer rounds, 512 to 1,024 tokens"
    )
    assert "3 seeds. Losses of single runs differ by 0.000" in about


def test_claims_are_judged_with_all_of_their_paper(tmp_path: Path) -> None:
    """Each by itself would be borne out; of twelve, the weaker is not told from luck."""
    runs = {"a": [2.0, 3.0], "b": [2.2, 3.31]}
    c = compared(**runs)
    weak = Claim("a beats b (by 8)", "1.05 ± 0.07", c.lower("a", "b"), criterion="it is lower", needs=Regime(2))
    sure = Claim("it sends less", "100 bytes", fact(True))
    for name, claims in (
        ("one", [weak, sure]),
        ("two", [Claim("its weights do, too", "nothing", apart="no checkpoint")]),
    ):
        write(pd.DataFrame({"x": [1, None]}), tmp_path / name, title="Of x", claims=claims, notes=["a note"])
    tables = [tmp_path / "one.md", tmp_path / "two.md"]
    assert read_claims(tables[0]) == [weak, sure]
    assert tables[0].read_text().splitlines()[0] == "### Of x"
    assert tables[0].read_text().splitlines()[-1] == "- a note"
    assert [outcome for _, outcome in judged(tables)[tables[0]]] == [BORNE_OUT, BORNE_OUT]
    many = [weak] * 12
    write(pd.DataFrame({"x": [1]}), tmp_path / "two", title="Of x", claims=many)
    found = judged(tables)
    assert "Not resolved" in [outcome for _, outcome in found[tables[1]]]
    text = page("All of it", tmp_path, found)
    assert "- Claim: it sends less. Borne out: 100 bytes." in text
    assert "Called borne out if it is lower. (p = " in text
    write(pd.DataFrame({"x": [1]}), tmp_path / "two", title="Of x")
    assert read_claims(tables[1]) == []


def test_what_training_runs_bear_out_is_counted_apart_from_closed_forms() -> None:
    c = compared(a=[1.0, 1.41, 1.9], b=[1.03, 1.45, 1.96])
    of_runs, closed = Claim("a beats b", "1.0", c.lower("a", "b")), Claim("it sends less", "1/30", fact(True))
    claims = [(of_runs, BORNE_OUT), (closed, BORNE_OUT), (closed, BORNE_OUT), (of_runs, NOT_RESOLVED)]
    text = index({("laptop", "noloco"): {Path("results/laptop/noloco/training/table2.md"): claims}})
    assert "| claims | borne out | of these, from training runs | borne out in direction only | not borne out |" in text
    assert "| NoLoCo (arXiv:2506.10911) | 3 | 1 | 0 | 0 | 1 | 0 |" in text
    assert "Of the 3 claims that are borne out, training runs bear out 1; the others are closed forms" in text


def test_a_claim_is_told_with_its_outcome() -> None:
    claim = Claim("it is so", "it is", fact(False), criterion="it must be")
    assert told(claim) == "Claim: it is so. Seen: it is. Called borne out if it must be."
    assert told(claim, NOT_BORNE_OUT) == "Claim: it is so. Not borne out: it is. Called borne out if it must be."
    tested = Claim("it is so", "it is", Evidence(0.01, 0.9))
    assert told(tested) == "Claim: it is so. Seen: it is. (p = 0.01 for it, 0.9 against it, before correction.)"
    first, _, none = corrected([tested, Claim("so", "so", Evidence(0.5, 0.5)), claim])
    assert none is None
    assert told(tested, BORNE_OUT, first).endswith(
        "(p = 0.01 for it, 0.9 against it, and as one of 2 tests 0.02 and 1.)"
    )
