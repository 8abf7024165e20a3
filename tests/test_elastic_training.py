"""Runs of replicas that leave and come back: as without them where nobody leaves, and to the end where some do."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from lowcomm import ConfigError, elastic_store
from lowcomm.comm.elastic import SharedLog
from lowcomm.comm.membership import Close, Done, Entry, Join, Lost, Ready, Roll, Rules
from lowcomm.comm.notes import Notes
from lowcomm.comm.start import run_threads
from lowcomm.comm.world import World
from lowcomm.experiment import stop
from lowcomm.experiment.config import RunConfig
from lowcomm.experiment.elastic import train_elastic
from lowcomm.experiment.run_folder import read_metrics
from lowcomm.experiment.train import train_in_threads
from lowcomm.experiment.trainer import Trainer, is_due
from pipelines.launch import torchrun_command
from tests.conftest import command_line, small_run
from tests.harness import Crash, Group, clean_environment, command, in_threads

PATIENT = Rules(timeout_s=10.0, grace_s=8.0)


def in_slots(config: RunConfig, store: Notes, corpus: Path, folder: Path) -> list[dict[str, Any]]:
    """Train all slots of a run in threads; returns their summaries."""

    def one(slot: int) -> dict[str, Any]:
        return train_elastic(config, elastic_store(f"127.0.0.1:{store.port}"), slot, corpus, folder, rules=PATIENT)

    return in_threads(*(lambda slot=slot: one(slot) for slot in range(config.replicas)))


def pipeline(
    slot: int, config: RunConfig, store: Notes, corpus: Path, folder: Path, rules: Rules = PATIENT
) -> list[dict[str, Any]]:
    """Train a slot in a thread for each of its stages, and return their summaries."""

    def stage(own: World) -> dict[str, Any]:
        notes = elastic_store(f"127.0.0.1:{store.port}")
        return train_elastic(config, notes, slot, corpus, folder, rules=rules, own=own)

    return run_threads(stage, replicas=1, stages=config.stages)


def test_what_is_done_every_so_many_steps_is_done_where_some_are_skipped() -> None:
    steps = [8, 9, 13, 14, 19, 31, 18, 20]  # of one that is slow, and goes back once
    due = [step for before, step in itertools.pairwise(steps) if is_due(10, before, step)]
    assert due == [13, 31, 18, 20]
    assert not is_due(0, 9, 10)


def summaries_of(folder: Path, slots: int) -> list[dict[str, Any]]:
    """Return the summaries of all slots of a run."""
    return [json.loads((folder / f"slot-{slot:03d}/summary.json").read_text()) for slot in range(slots)]


class Run:
    """A run of which slot 0 trains in threads of the test, others are processes, and the log is followed.

    Slot 0 can be held. Where the others want it for a quorum, or have left, the run does not end before it goes on.
    """

    def __init__(self, config: RunConfig, store: Notes, corpus: Path, folder: Path, *, quorum: int):
        self.config, self.store, self.corpus, self.folder, self.quorum = config, store, corpus, folder, quorum
        self.log, self.roll = SharedLog(elastic_store(f"127.0.0.1:{store.port}")), Roll(config.replicas, quorum)
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.first: list[Any] = []
        self.latest: Entry | None = None

    def words(self, slot: int) -> list[str]:
        """Return the words with which `lowcomm.train` trains a slot."""
        words = [*command_line(self.config, self.corpus, self.folder), "--store", f"127.0.0.1:{self.store.port}"]
        return [*words, "--slot", str(slot), "--quorum", str(self.quorum), "--grace", "1", "--timeout", "5"]

    def begin(self) -> None:
        """Begin with slot 0, in a thread for each of its stages."""

        def stage(own: World) -> dict[str, Any]:
            notes, rules = elastic_store(f"127.0.0.1:{self.store.port}"), Rules(timeout_s=5.0, grace_s=1.0)
            more = {"rules": rules, "quorum": self.quorum, "own": own, "on_row": lambda *_: self.goes_on.wait(120)}
            return train_elastic(self.config, notes, 0, self.corpus, self.folder, **more)

        def train() -> None:
            self.first += run_threads(stage, replicas=1, stages=self.config.stages)

        self.thread = threading.Thread(target=train, daemon=True)
        self.thread.start()

    def held_until(self, slot: int) -> None:
        """Hold slot 0 until a process has joined as another."""
        self.goes_on.clear()
        self.follow(lambda: isinstance(self.latest, Join) and self.latest.slot == slot)
        self.goes_on.set()

    def wait_for(self, *slots: int) -> None:
        """Wait for a round of these slots alone, from now on."""
        there = len(self.roll.rounds)
        self.follow(lambda: any(set(r.slots) == set(slots) for r in self.roll.rounds[there:]))

    def follow(self, until: Callable[[], bool]) -> None:
        """Follow the log until something holds."""
        end = time.monotonic() + 120
        while not until():
            assert time.monotonic() < end
            if (entry := self.log.read(self.roll.length)) is not None:
                self.roll.take(entry)
                self.latest = entry
            else:
                assert self.thread.is_alive()
                time.sleep(0.02)

    def end(self) -> list[dict[str, Any]]:
        """Wait for the end of slot 0; returns the summaries of all."""
        self.thread.join(120)
        assert self.first
        return summaries_of(self.folder, self.config.replicas)


#: Runs at which nothing of another replica is asked for, and what makes them small.
RUNS: dict[str, dict[str, Any]] = {
    "diloco_m2": {},
    "streaming_h30": {
        "method": {"sync_every_steps": 6, "record_cosine": False, "close_last_round": True},
        "train": {"evaluate_also": [], "steps": 14},
    },
    "noloco": {
        "replicas": 4,
        "method": {"sync_every_steps": 4},
        "train": {"evaluate_also": [], "record_spread": False},
    },
    "partial": {"replicas": 4, "method": {"sync_every_steps": 4}},
}


def _counted_as_in_rounds(summary: dict[str, Any], steps: int, each: int) -> None:
    """A slot's tokens are those of its rounds, each of so many steps, or of fewer where a busy machine was late."""
    told = [dict(zip(r["slots"], r["tokens"], strict=True)) for r in summary["rounds"]]
    for slot, counted in summary["tokens_of_slots"].items():
        own = [tokens[int(slot)] for tokens in told if int(slot) in tokens]
        assert counted == sum(own)
        assert set(own) <= {each * count for count in range(steps + 1)}
        assert own.count(steps * each) > 0.9 * len(own)


@pytest.mark.parametrize("run", RUNS)
def test_without_faults_a_run_is_the_same_bit_for_bit(run: str, store: Notes, corpus: Path, tmp_path: Path) -> None:
    config = small_run(run, **RUNS[run])
    whole = train_in_threads(config, corpus, tmp_path / "whole")
    summaries = in_slots(config, store, corpus, tmp_path / "elastic")
    weights = load_file(tmp_path / "whole/model.safetensors")
    slots = [load_file(tmp_path / f"elastic/slot-{slot:03d}/model.safetensors") for slot in range(config.replicas)]
    for name, value in weights.items():
        mean = torch.stack([found[name] for found in slots]).mean(0)
        if run == "noloco":  # whose replicas keep parameters of their own
            torch.testing.assert_close(mean, value, atol=1e-6, rtol=0)
        else:
            assert all(torch.equal(found[name], value) for found in slots)
    for replica, summary in enumerate(summaries):
        rows = read_metrics(tmp_path / f"whole/metrics/rank-{replica:03d}.jsonl")
        ours = read_metrics(tmp_path / f"elastic/slot-{replica:03d}/metrics/rank-000.jsonl")
        assert [row["loss"] for row in ours] == [row["loss"] for row in rows]
        assert summary["tokens"] == whole["tokens"]
        assert summary["participation"] == 1


@pytest.mark.fault(
    "one of three is killed and one told to stop (SIGTERM)",
    "the others go on; both come back by the same command; no token is counted twice or lost",
)
@pytest.mark.longest
@pytest.mark.skipif(sys.platform != "linux", reason="sends signals")
def test_a_run_outlives_a_kill_and_one_that_leaves(store: Notes, corpus: Path, tmp_path: Path) -> None:
    """One of three is killed and one told to stop; both come back by the same command, and nothing is lost."""
    config = small_run(replicas=3, train={"steps": 300, "global_batch": 6}, checkpoint={"every_steps": 20})
    run = Run(config, store, corpus, tmp_path / "run", quorum=2)
    run.begin()
    children = {slot: Group(command, *run.words(slot)) for slot in (1, 2)}
    run.wait_for(0, 1, 2)
    children[1].kill(*children[1].processes)
    run.wait_for(0, 2)
    children[1] = Group(command, *run.words(1))
    run.held_until(1)
    run.wait_for(0, 1, 2)
    os.kill(children[2].processes[0].pid, signal.SIGTERM)
    done = children[2].wait(60)
    assert done.returncode == 0, done.stdout
    assert "the same command comes back" in done.stdout
    children[2] = Group(command, *run.words(2))
    run.held_until(2)
    for child in children.values():
        done = child.wait(120)
        assert done.returncode == 0, done.stdout
    summaries = run.end()
    assert [s["rounds"] for s in summaries] == [summaries[0]["rounds"]] * 3
    assert len({s["val_loss"] for s in summaries}) == 1
    rounds = summaries[0]["rounds"]
    assert [r["step"] for r in rounds] == list(range(4, 301, 4))
    assert {tuple(r["slots"]) for r in rounds} >= {(0, 1, 2), (0, 2)}
    each = config.local_batch * config.train.seq_len
    _counted_as_in_rounds(summaries[0], 4, each)
    assert summaries[0]["participation"] == sum(len(r["slots"]) for r in rounds) / len(rounds) / 3


@pytest.mark.parametrize("boundary", [{}, {"kind": "projection", "rank": 4}], ids=["dense", "projection"])
def test_without_faults_a_run_of_pipelines_is_the_same_bit_for_bit(
    boundary: dict[str, Any], store: Notes, corpus: Path, tmp_path: Path
) -> None:
    config = small_run(stages=2, train={"accumulation": 2}, method={"boundary": boundary})
    train_in_threads(config, corpus, tmp_path / "whole")
    where = config, store, corpus, tmp_path / "run"
    summaries = [stages[0] for stages in in_threads(lambda: pipeline(0, *where), lambda: pipeline(1, *where))]
    weights = load_file(tmp_path / "whole/model.safetensors")
    for number, summary in enumerate(summaries):
        own = load_file(tmp_path / f"run/slot-{number:03d}/model.safetensors")
        assert own.keys() == weights.keys()
        assert all(torch.equal(own[name], value) for name, value in weights.items())
        assert summary["participation"] == 1


@pytest.mark.fault(
    "a stage of a replica that is a pipeline is killed (SIGKILL)",
    "the replica leaves as a whole; torchrun starts its stages again, which come to where the others are",
)
@pytest.mark.longest
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_pipeline_leaves_as_a_whole_and_comes_back(store: Notes, corpus: Path, tmp_path: Path) -> None:
    config = small_run(stages=2, train={"steps": 300, "accumulation": 2}, checkpoint={"every_steps": 20})
    run = Run(config, store, corpus, tmp_path / "run", quorum=1)
    words = torchrun_command(2, "lowcomm.train", *run.words(1))
    words.insert(words.index("lowcomm.train") - 1, "--max-restarts=1")
    run.begin()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(words, env=clean_environment(), **pipes) as child:
        try:
            run.held_until(1)
            run.wait_for(0, 1)
            stages = psutil.Process(child.pid).children()
            next(stage for stage in stages if stage.environ()["RANK"] == "1").kill()
            run.wait_for(0)
            run.held_until(1)
            run.wait_for(0, 1)
            said, _ = child.communicate(timeout=120)
            assert child.returncode == 0, said
        finally:
            child.terminate()
    summaries = run.end()
    assert summaries[0]["rounds"] == summaries[1]["rounds"]
    assert len({s["val_loss"] for s in summaries}) == 1
    first, second = (load_file(tmp_path / f"run/slot-{slot:03d}/model.safetensors") for slot in range(2))
    assert all(torch.equal(first[name], value) for name, value in second.items())
    each = config.local_batch * config.train.seq_len
    _counted_as_in_rounds(summaries[0], 4, each)


def entries(port: int) -> Iterator[Entry]:
    """Yield the entries of a store's log, waiting for each as it is written."""
    log, until = SharedLog(elastic_store(f"127.0.0.1:{port}")), time.monotonic() + 60
    for index in itertools.count():
        while (entry := log.read(index)) is None:
            assert time.monotonic() < until
            time.sleep(0.02)
        yield entry


def stopped_when(port: int, seen: Callable[[Entry], bool], run: Callable[[], Any]) -> Any:
    """Ask a run to stop as soon as an entry is in the log, while it waits for others, and return what the run does."""

    def ask() -> None:
        next(entry for entry in entries(port) if seen(entry))
        stop.requested.set()

    try:
        return in_threads(run, ask)[0]
    finally:
        stop.requested.clear()


@pytest.mark.fault(
    "a replica is told to stop (SIGTERM) while it waits for others in a round", "it keeps what it has, and comes back"
)
def test_one_that_waits_in_a_round_stops_when_told(store: Notes, corpus: Path, tmp_path: Path) -> None:
    where = small_run(stages=2, train={"accumulation": 2}), store, corpus, tmp_path / "run"
    patient = Rules(timeout_s=60.0, grace_s=60.0)
    told = stopped_when(store.port, lambda entry: isinstance(entry, Ready), lambda: pipeline(0, *where, patient))
    assert told == [{"complete": False, "step": 4}] * 2
    assert (tmp_path / "run/slot-000/checkpoints/step-00000004").exists()
    slots = in_threads(lambda: pipeline(0, *where), lambda: pipeline(1, *where))
    assert [summary["participation"] for stages in slots for summary in stages] == [1] * 4


@pytest.mark.fault("a replica is told to stop (SIGTERM) while it joins", "it ends, as it came")
def test_one_that_waits_to_join_stops_when_told(store: Notes, corpus: Path, tmp_path: Path) -> None:
    """The replica waits for the latest round, which only one has that cannot be reached any more."""
    log = SharedLog(store)
    for entry in (Join("1.gone", 1, 0), Ready("1.gone", 0, 8), Close(0, 0), Done("1.gone", 0, 1)):
        log.append(entry)

    def alone() -> dict[str, Any]:
        return train_elastic(small_run(), store, 0, corpus, tmp_path / "run", rules=PATIENT)

    told = stopped_when(store.port, lambda entry: isinstance(entry, Lost) and entry.who == "1.gone", alone)
    assert told == {"complete": False, "step": 0}


@pytest.mark.fault(
    "the store of the membership is started anew, and a replica from its checkpoint",
    "refused, by the checkpoint's name: its rounds are of the earlier store's log",
)
def test_a_checkpoint_of_another_stores_log_is_refused(store: Notes, corpus: Path, tmp_path: Path) -> None:
    config = small_run(replicas=1, checkpoint={"every_steps": 4})

    def crash(trainer: Trainer, row: dict[str, Any]) -> None:
        if row["step"] == 6:
            trainer.world.ledger.bill("stage", "activations", 6, 10)
            trainer.engine.elastic.ledger.bill("replica", "state", 6, 20)
        if row["step"] == 10:
            raise Crash

    with pytest.raises(Crash):
        train_elastic(config, store, 0, corpus, tmp_path / "run", on_row=crash)
    other = elastic_store("127.0.0.1:0", hosts=True)
    with pytest.raises(ConfigError, match=r"checkpoint of step 8 in .*/slot-000/checkpoints .* another store's log"):
        train_elastic(config, other, 0, corpus, tmp_path / "run")
    summary = train_elastic(config, store, 0, corpus, tmp_path / "run")
    assert summary["complete"]
    assert summary["sent_bytes"] == {"replica/state": 20, "stage/activations": 10}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"replicas": 1}, "slot 1 is none of the 1 of run diloco_m2: they count from 0"),
        ({"method": {"record_cosine": True}}, "method.record_cosine asks for what other replicas have"),
        ({"train": {"record_spread": True}}, "train.record_spread asks for what other replicas have"),
        ({"stages": 2}, "1 ranks do not form pipelines of 2 stages: start a multiple of 2"),
        (
            {"stages": 2, "method": {"route": "random_step"}},
            "elastic replicas are pipelines of their own, not method.route = random_step",
        ),
    ],
)
def test_what_no_elastic_run_can_do_is_refused(
    override: dict[str, Any], message: str, store: Notes, corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train_elastic(small_run(**override), store, 1, corpus, tmp_path / "run")
    with pytest.raises(ConfigError, match="need local updates, not method.exchange = gradients"):
        train_elastic(small_run("data_parallel"), store, 1, corpus, tmp_path / "run")


@pytest.mark.fault(
    "a replica joins with another learning rate",
    "it is refused, by the name of the setting; the others go on",
)
def test_slots_of_other_settings_are_refused(store: Notes, corpus: Path, tmp_path: Path) -> None:
    """By whoever comes second, before it has trained anything; the first goes on to the end."""
    config, said = small_run(), []

    def other() -> None:
        while not (tmp_path / "run/slot-000/metrics").exists():
            time.sleep(0.02)
        with pytest.raises(ConfigError, match=r"replicas were started differently: train.lr is .* there and 0.5 here"):
            train_elastic(
                small_run(train={"lr": 0.5}), elastic_store(f"127.0.0.1:{store.port}"), 1, corpus, tmp_path / "run"
            )
        said.append("refused")

    rules = Rules(timeout_s=5.0, grace_s=0.5)
    in_threads(lambda: train_elastic(config, store, 0, corpus, tmp_path / "run", rules=rules, quorum=1), other)
    assert said == ["refused"]


@pytest.mark.fault(
    "a replica is killed before its first checkpoint, and starts with another store", "it begins the run anew"
)
def test_what_was_trained_with_another_store_does_not_stand_before_what_is(
    store: Notes, corpus: Path, tmp_path: Path
) -> None:
    config = small_run(replicas=1)

    def crash(trainer: Trainer, row: dict[str, Any]) -> None:
        if row["step"] == 10:
            raise Crash

    with pytest.raises(Crash):
        train_elastic(config, store, 0, corpus, tmp_path / "run", on_row=crash)
    rows = tmp_path / "run" / "slot-000" / "metrics" / "rank-000.jsonl"
    assert rows.read_text()
    for name in ("run", "plain"):
        train_elastic(config, elastic_store("127.0.0.1:0", hosts=True), 0, corpus, tmp_path / name)
    assert rows.read_text() == (tmp_path / "plain" / "slot-000" / "metrics" / "rank-000.jsonl").read_text()


def test_results_are_not_given_up_for_a_run_that_cannot_begin(store: Notes, corpus: Path, tmp_path: Path) -> None:
    config, out = small_run(replicas=1), tmp_path / "run"
    train_elastic(config, store, 0, corpus, out)
    summary = (out / "slot-000" / "summary.json").read_bytes()
    with pytest.raises(ConfigError, match="the run of this store is over, and .*slot-000 has its results"):
        train_elastic(config, store, 0, corpus, out, again=True)
    other = elastic_store("127.0.0.1:0", hosts=True)
    with pytest.raises(ConfigError, match="host = 192.0.2.1 is no address of this machine"):
        train_elastic(config, other, 0, corpus, out, again=True, host="192.0.2.1")
    assert (out / "slot-000" / "summary.json").read_bytes() == summary
    assert train_elastic(config, other, 0, corpus, out, again=True)["complete"]


def test_the_end_is_kept_where_it_cannot_be_written(
    store: Notes, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*told: Any) -> None:
        raise Crash

    config = small_run(replicas=1)
    with monkeypatch.context() as patch:
        patch.setattr("lowcomm.experiment.elastic.write_results", full)
        with pytest.raises(Crash):
            train_elastic(config, store, 0, corpus, tmp_path / "run")
    assert train_elastic(config, store, 0, corpus, tmp_path / "run")["complete"]
