"""A storm of minutes in seconds: replicas over a testbed are killed, stopped and cut off, and the run ends well."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from lowcomm.comm.testbed import missing
from pipelines import kills, links, storm
from pipelines.storm import Fault
from tests.harness import ForkingTestbed

SMALL = storm.SETTINGS | {
    "model.vocab_size": links.TEXT.vocab_size,
    "data.corpus": links.TEXT.corpus,
    "data.vocab_size": links.TEXT.vocab_size,
    "data.max_characters": links.TEXT.max_characters,
    "data.tokenizer_characters": links.TEXT.tokenizer_characters,
    "train.eval_every": 50,
    "train.eval_sequences": 8,
    "method.sync_every_steps": 20,
    "method.overlap_steps": "[8]",
    "method.mixing": 0.5,
    "checkpoint.every_steps": 40,
}


@pytest.fixture(autouse=True)
def quick_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storm, "Testbed", ForkingTestbed)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return links.corpus(tmp_path_factory.mktemp("data") / "docstrings")


@pytest.mark.fault(
    "of three replicas over a testbed one is killed, one stopped and one's link cut, one after the other",
    "rounds go on without; each is back in one; all end with the same loss",
)
@pytest.mark.longest
@pytest.mark.skipif(bool(missing()), reason=f"no testbed here: {missing()}")
def test_a_run_comes_through_a_storm(data: Path, tmp_path: Path) -> None:
    # Faults are so far apart that who comes back from one finds both of the others well.
    schedule = [Fault(1.0, "stop", 2, 5.0), Fault(12.0, "cut", 0, 5.0), Fault(23.0, "kill", 1, 1.0)]
    settings = SMALL | {"method.sync_every_steps": 10, "method.overlap_steps": "[4]", "train.global_batch": 3}
    # Rounds of half a second, by a link, so that a run of few steps is long enough on any machine.
    seen = storm.run(600, schedule, tmp_path, slots=3, data=data, settings=settings, mbit_per_s=10.0)
    assert [f["kind"] for f in seen["faults"]] == ["stop", "cut", "kill"]
    assert len(seen["rounds"]) == 60
    assert len(set(seen["val_loss"])) == 1
    assert len(storm.returns(seen)) == 3
    for fault in seen["faults"]:
        assert any(fault["slot"] not in r["slots"] for r in seen["rounds"])
    assert seen["tokens"] == sum(r["tokens"] for r in seen["rounds"])
    assert 0.5 < storm.participation(seen) <= 1
    assert storm.present(seen) < storm.participation(seen)
    told = storm.figures(seen, seen)
    assert told["throughput"] == told["loss"] == told["tokens"] == 1
    assert told["participation"] == storm.participation(seen)


@pytest.mark.fault(
    "a link that is never free: of DiLoCo, Streaming and NoLoCo one replica is killed while it exchanges",
    "who is slow is not taken for lost; rounds go on without the one, which comes back",
)
@pytest.mark.longest
@pytest.mark.skipif(bool(missing()), reason=f"no testbed here: {missing()}")
@pytest.mark.parametrize("method", ["diloco", "streaming", "noloco"])
def test_a_link_that_is_never_free_loses_nobody(method: str, data: Path, tmp_path: Path) -> None:
    name, own = kills.METHODS[method]
    settings = SMALL | own | {"method.sync_every_steps": 10, "method.overlap_steps": "[0]", "method.mixing": 0.0}
    settings |= {"method.codec": "fp32", "train.global_batch": 4}
    kill = Fault(6.0, "kill", 1, 1.0)
    seen = storm.run(150, [kill], tmp_path, slots=4, data=data, name=name, settings=settings, mbit_per_s=4.0)
    assert all(r["attempt"] == 1 for r in seen["rounds"] if r["at"] < kill.at)  # nobody was lost in an exchange
    assert sum(r["attempt"] > 1 for r in seen["rounds"]) <= 2
    assert any(1 not in r["slots"] for r in seen["rounds"])
    assert len(storm.returns(seen)) == 1
    assert (len(set(seen["val_loss"])) == 1) == (method != "noloco")


def test_rounds_of_a_run_are_the_turns_of_its_fragments() -> None:
    every_10 = SMALL | {"method.sync_every_steps": 10, "method.overlap_steps": "[0]", "train.steps": 150}
    name, own = kills.METHODS["diloco"]
    assert storm.rounds_in(name, own | every_10 | {"train.global_batch": 4}, replicas=4) == 15
    name, own = kills.METHODS["streaming"]
    assert storm.rounds_in(name, own | every_10 | {"train.global_batch": 4, "method.mixing": 0.0}, replicas=4) > 30
    name, own = kills.METHODS["noloco"]
    assert storm.rounds_in(name, own | every_10 | {"train.global_batch": 4, "method.mixing": 0.0}, replicas=4) == 15


def test_faults_are_drawn_of_a_seed_and_spare_who_has_one() -> None:
    drawn = storm.faults(3, 600.0, 3600.0)
    assert drawn == storm.faults(3, 600.0, 3600.0)
    assert {f.kind for f in drawn} == {"kill", "stop", "cut"}
    assert 300 < len(drawn) < 650
    for slot in range(storm.SLOTS):
        own = [f for f in drawn if f.slot == slot]
        assert all(b.at > a.at + a.seconds for a, b in itertools.pairwise(own))


def test_what_is_said_of_a_storm_is_what_happened() -> None:
    fault = {"at": 10.0, "kind": "kill", "slot": 1, "seconds": 2.0}
    rounds = [
        {"at": 5.0, "slots": [0, 1], "tokens": 20, "attempt": 1},
        {"at": 11.0, "slots": [0], "tokens": 10, "attempt": 2},
        {"at": 13.0, "slots": [0], "tokens": 10, "attempt": 1},
        {"at": 15.0, "slots": [0, 1], "tokens": 20, "attempt": 1},
    ]
    seen = {"slots": 2, "faults": [fault], "rounds": rounds}
    assert storm.returns(seen) == [3.0]
    assert storm.returns(seen, "cut") == []
    assert storm.throughput(seen) == 4.0
    assert storm.participation(seen) == (1 + 1 + 0.5 + 1) / 4
    assert storm.present(seen) == 0.75
    seen |= {"curve": [[2, 1, 5.0], [3, 2, 4.0]], "val_loss": [2.0, 2.0]}
    assert [storm.loss_at(seen, tokens) for tokens in (20, 25, 30, 45, 60)] == [5.0, 4.5, 4.0, 3.0, 2.0]


def test_the_time_to_a_loss_is_when_all_have_told(tmp_path: Path) -> None:
    for slot, losses in enumerate([[3.0, 2.0], [3.2, 2.4]]):
        file = tmp_path / f"slot-{slot}" / "metrics" / "rank-000.jsonl"
        file.parent.mkdir(parents=True)
        rows = [f'{{"step": {step}, "val_loss": {loss}}}\n' for step, loss in zip((10 + slot, 20), losses, strict=True)]
        file.write_text("".join(rows) + '{"step": 21, "lo')
    curve = kills.Curve(tmp_path, 10)
    assert curve.look() == 20
    found = curve.points()
    assert [(step, loss) for step, _, loss in found] == [(10, 3.1), (20, pytest.approx(2.2))]
    assert kills.time_to([[10, 4.0, 3.1], [20, 8.0, 2.2], [30, 9.0, 2.3]], 2.3) == 8.0
    assert kills.time_to([[10, 4.0, 3.1]], 2.3) == math.inf
    killed = {"faults": [{"at": 7.0}], "curve": [[10, 3.0, 3.1], [20, 6.0, 2.2], [30, 9.0, 2.3]]}
    assert kills.clock_apart({"calm": {"curve": [[10, 4.0, 3.1], [20, 8.0, 2.2]]}, "killed": killed}) == -0.25
    assert math.isnan(kills.clock_apart({"calm": {"curve": []}, "killed": killed}))
