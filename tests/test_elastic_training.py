"""Runs of replicas that leave and come back: as without them where nobody leaves, and to the end where some do."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from lowcomm import ConfigError, elastic_store
from lowcomm.comm.elastic import SharedLog
from lowcomm.comm.membership import Roll, Rules
from lowcomm.comm.notes import Notes
from lowcomm.comm.start import run_threads
from lowcomm.comm.world import World
from lowcomm.experiment.config import RunConfig
from lowcomm.experiment.elastic import train_elastic
from lowcomm.experiment.run_folder import read_metrics
from lowcomm.experiment.train import train_in_threads
from lowcomm.experiment.trainer import is_due
from pipelines.launch import torchrun_command
from tests.conftest import command_line, small_run
from tests.harness import clean_environment, in_threads

PATIENT = Rules(timeout_s=10.0, grace_s=8.0)


def in_slots(config: RunConfig, store: Notes, corpus: Path, folder: Path) -> list[dict[str, Any]]:
    """Train all slots of a run in threads; returns their summaries."""

    def one(slot: int) -> dict[str, Any]:
        return train_elastic(config, elastic_store(f"127.0.0.1:{store.port}"), slot, corpus, folder, rules=PATIENT)

    return in_threads(*(lambda slot=slot: one(slot) for slot in range(config.replicas)))


def test_what_is_done_every_so_many_steps_is_done_where_some_are_skipped() -> None:
    steps = [8, 9, 13, 14, 19, 31, 18, 20]  # of one that is slow, and goes back once
    due = [step for before, step in itertools.pairwise(steps) if is_due(10, before, step)]
    assert due == [13, 31, 18, 20]
    assert not is_due(0, 9, 10)


def begun(command: list[str], store: Notes, slot: int, *more: str) -> subprocess.Popen:
    """Start a slot of a run by its command line, with short waits; what it says can be read."""
    words = ["--store", f"127.0.0.1:{store.port}", "--slot", str(slot), "--grace", "1", "--timeout", "5", *more]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*command, *words], env=clean_environment(), **pipes)


def summaries_of(folder: Path, slots: int) -> list[dict[str, Any]]:
    """Return the summaries of all slots of a run."""
    return [json.loads((folder / f"slot-{slot:03d}/summary.json").read_text()) for slot in range(slots)]


class Watch:
    """Follows the log of a run whose replicas are processes."""

    def __init__(self, store: Notes, *, slots: int, quorum: int, children: list[subprocess.Popen]):
        self.log, self.roll = SharedLog(elastic_store(f"127.0.0.1:{store.port}")), Roll(slots, quorum)
        self.children = children

    def wait_for(self, *slots: int) -> None:
        """Wait for a round of these slots alone, from now on."""
        end, there = time.monotonic() + 120, len(self.roll.rounds)
        while not any(set(r.slots) == set(slots) for r in self.roll.rounds[there:]):
            for child in self.children:
                assert child.poll() in (None, -signal.SIGKILL), child.communicate()[0]
            assert time.monotonic() < end
            if (entry := self.log.read(self.roll.length)) is not None:
                self.roll.take(entry)
            else:
                time.sleep(0.02)


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
    config = small_run(replicas=3, train={"steps": 600, "global_batch": 6}, checkpoint={"every_steps": 20})

    def start(slot: int) -> subprocess.Popen:
        words = [sys.executable, "-m", "lowcomm.train", *command_line(config, corpus, tmp_path / "run")]
        return begun(words, store, slot, "--quorum", "2")

    children = [start(slot) for slot in range(3)]
    watch = Watch(store, slots=3, quorum=2, children=children)
    try:
        watch.wait_for(0, 1, 2)
        children[1].kill()
        watch.wait_for(0, 2)
        children[1].communicate()
        children[1] = start(1)
        watch.wait_for(0, 1, 2)
        children[2].send_signal(signal.SIGTERM)
        said = children[2].communicate(timeout=60)[0]
        assert children[2].returncode == 0
        assert "the same command comes back" in said
        children[2] = start(2)
        for child in children:
            said, _ = child.communicate(timeout=120)
            assert child.returncode == 0, said
    finally:
        for child in children:
            child.kill()
            child.communicate()
    summaries = summaries_of(tmp_path / "run", 3)
    assert [s["rounds"] for s in summaries] == [summaries[0]["rounds"]] * 3
    assert len({s["val_loss"] for s in summaries}) == 1
    rounds = summaries[0]["rounds"]
    assert [r["step"] for r in rounds] == list(range(4, 601, 4))
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

    def slot(number: int) -> list[dict[str, Any]]:
        def stage(own: World) -> dict[str, Any]:
            notes = elastic_store(f"127.0.0.1:{store.port}")
            return train_elastic(config, notes, number, corpus, tmp_path / "run", rules=PATIENT, own=own)

        return run_threads(stage, replicas=1, stages=2)

    summaries = [stages[0] for stages in in_threads(lambda: slot(0), lambda: slot(1))]
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
    config = small_run(stages=2, train={"steps": 1000, "accumulation": 2}, checkpoint={"every_steps": 20})

    def start(slot: int) -> subprocess.Popen:
        command = torchrun_command(2, "lowcomm.train", *command_line(config, corpus, tmp_path / "run"))
        command.insert(command.index("lowcomm.train") - 1, "--max-restarts=1")
        return begun(command, store, slot)

    children = [start(slot) for slot in range(2)]
    watch = Watch(store, slots=2, quorum=1, children=children)
    try:
        watch.wait_for(0, 1)
        stages = psutil.Process(children[1].pid).children()
        next(stage for stage in stages if stage.environ()["RANK"] == "1").kill()
        watch.wait_for(0)
        watch.wait_for(0, 1)
        for child in children:
            said, _ = child.communicate(timeout=120)
            assert child.returncode == 0, said
    finally:
        for child in children:
            child.terminate()
            child.wait()
            child.stdout.close()
    summaries = summaries_of(tmp_path / "run", 2)
    assert summaries[0]["rounds"] == summaries[1]["rounds"]
    assert len({s["val_loss"] for s in summaries}) == 1
    first, second = (load_file(tmp_path / f"run/slot-{slot:03d}/model.safetensors") for slot in range(2))
    assert all(torch.equal(first[name], value) for name, value in second.items())
    each = config.local_batch * config.train.seq_len
    _counted_as_in_rounds(summaries[0], 4, each)


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
