"""A storm: replicas on few cores that are killed, stopped and cut off, while the run goes on with whoever is there.

    python -m pipelines.storm calm      train the run undisturbed, and write results/storm/calm.json
    python -m pipelines.storm storm     train the same run with faults, and write results/storm/storm.json
    python -m pipelines.storm measure   do both, as far as these files are missing
    python -m pipelines.storm list      print the figures of the storm beside the calm

Each replica is a process (`lowcomm train --store --slot`) in a network namespace of its own, the store is in another
(`lowcomm.comm.testbed`: Linux and root). Faults come as a Poisson process of a seed, each at a replica that is well:

    kill    SIGKILL, and another start a few seconds later
    stop    SIGSTOP, and SIGCONT after a while
    cut     its link is down for a while

A watcher reads the log of who takes part, and writes of each round when it was committed, by whom, on how many tokens.
What processes hold (memory, descriptors, threads) is recorded now and then, so that the calm is a soak test as well.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil

from lowcomm.comm.testbed import Testbed
from lowcomm.experiment.config import CorpusConfig, DataConfig
from lowcomm.experiment.data import prepare
from lowcomm.experiment.project import Project, overrides
from lowcomm.experiment.run_folder import read_metrics
from pipelines.project import ROOT

RESULTS = ROOT / "results" / "storm"
SLOTS, PORT = 8, 29400
GRACE_S, SILENCE_S, TIMEOUT_S = 1.5, 1.5, 6.0
#: Steps of a run, which take half an hour on two cores; faults that are drawn per hour, of which some are spared.
STEPS, PER_HOUR = 22_000, 180.0
#: Seconds between two records of what processes hold; the share of a storm's rounds after which no fault comes.
LOOK_S, CALM_AT_END = 10.0, 0.96
CORPUS = CorpusConfig("python", packages=("sympy", "pandas", "networkx", "matplotlib", "numpy", "torch"))
TEXT = DataConfig("python", 512, max_characters=40_000_000, tokenizer_characters=300_000)
#: A model of 0.12 million parameters, and 8 sequences of 64 tokens for a replica's step.
SETTINGS: dict[str, Any] = {
    "model.dim": 32,
    "model.layers": 4,
    "model.heads": 4,
    "model.ffn_dim": 128,
    "model.vocab_size": TEXT.vocab_size,
    "model.seq_len": 64,
    "model.mlp": "gelu",
    "model.qk_norm": "true",
    "model.z_loss": 1e-4,
    "data.corpus": TEXT.corpus,
    "data.vocab_size": TEXT.vocab_size,
    "data.max_characters": TEXT.max_characters,
    "data.validation_percent": TEXT.validation_percent,
    "data.tokenizer_characters": TEXT.tokenizer_characters,
    "train.seq_len": 64,
    "train.lr": 0.01,
    "train.warmup_steps": 100,
    "train.eval_every": 200,
    "train.eval_sequences": 256,
    "train.log_every": 10,
}
#: DiLoCo in rounds of three seconds, of which more than one passes while what has been sent is on its way.
DILOCO: dict[str, Any] = {
    "method.sync_every_steps": 40,
    "method.overlap_steps": "[15]",
    "method.mixing": 0.5,
    "checkpoint.every_steps": 80,
}


@dataclass(frozen=True)
class Fault:
    """A fault that happens to a slot.

    at: the seconds of the run at which it begins. kind: "kill", "stop" or "cut". slot: from 0. seconds: how long it
    lasts.
    """

    at: float
    kind: str
    slot: int
    seconds: float


def faults(seed: int, per_hour: float, seconds: float) -> list[Fault]:
    """Draw the faults of so many seconds from a seed, in their order.

    per_hour: how many are drawn. A fault of a slot that still has one, or had one within the last 10 seconds, is left
    out.
    """
    draw, found, at = random.Random(seed), [], 0.0
    well = [0.0] * SLOTS
    while (at := at + draw.expovariate(per_hour / 3600)) < seconds:
        kind, lasts = draw.choice([("kill", (1, 5)), ("stop", (1, 20)), ("cut", (1, 20))])
        slot, length = draw.randrange(SLOTS), draw.uniform(*lasts)
        if well[slot] <= at:
            found.append(Fault(round(at, 2), kind, slot, round(length, 2)))
            well[slot] = at + length + 10
    return found


def corpus(folder: Path) -> Path:
    """Prepare the storm's corpus in a folder, and return the folder."""
    prepare(CORPUS, TEXT, folder)
    return folder


class Starts(Protocol):
    """The interface by which a storm starts commands on nodes; `Testbed` implements it.

    `start` runs `words` on the node of a number, and returns the process. Faults that cut a link need the methods `cut`
    and `mend` as well.
    """

    def start(self, node: int, words: Sequence[str], **popen: Any) -> subprocess.Popen: ...


def training(run: Sequence[str], settings: Mapping[str, Any], *, replicas: int, data: Path, out: Path) -> list[str]:
    """Return the words that `lowcomm train` is given to train a run of params.yaml at scale smoke.

    run: the name of the run, and "--variant" with the name of a variant if it has any. settings: those that differ, by
    names such as "train.steps".
    """
    words = [*run, "--scale", "smoke", "--data", str(data), "--out", str(out)]
    return words + [f"--set={entry}" for entry in _entries(settings, replicas)]


def _entries(settings: Mapping[str, Any], replicas: int) -> list[str]:
    return [f"{key}={value}" for key, value in ({"replicas": replicas} | dict(settings)).items()]


def rounds_in(run: Sequence[str], settings: Mapping[str, Any], *, replicas: int) -> int:
    """Return how many rounds the run of `training` has: one for each turn of each of its fragments."""
    name, *more = run
    variant = dict(zip(more[::2], more[1::2], strict=True)).get("--variant", "")
    override = overrides(_entries(settings, replicas))
    config = Project(ROOT).run_config(name, variant=variant, scale="smoke", **override)
    return len(config.plan().all_turns(config.train.steps))


class Replicas:
    """The processes of an elastic run, one per slot, and what is done to them.

    Args:
        nodes: starts each slot's process on the node of its number.
        run: the run of params.yaml, as words of the command line, which is trained at scale smoke with `settings`.
        slots: how many processes there are.
        store: "host:port" of the store.
        data: the folder of the corpus.
        out: the folder of the run; what processes print goes into the folder `logs` beside it, which is made.
    """

    def __init__(
        self,
        nodes: Starts,
        run: Sequence[str],
        settings: Mapping[str, Any],
        *,
        slots: int,
        store: str,
        data: Path,
        out: Path,
    ):
        self.nodes = nodes
        self._words = [sys.executable, "-m", "lowcomm.train", "--store", store]
        self._words += training(run, settings, replicas=slots, data=data, out=out)
        self._words += ["--grace", str(GRACE_S), "--silence", str(SILENCE_S), "--timeout", str(TIMEOUT_S)]
        self.logs = out.with_name("logs")
        self.logs.mkdir()
        self.running = [self.start(slot) for slot in range(slots)]
        self.is_ill = [False] * slots

    def start(self, slot: int) -> subprocess.Popen:
        """Start the process of a slot, for the first time or again, and return it."""
        with (self.logs / f"{slot}.log").open("a") as log:
            told = os.environ | {"OMP_NUM_THREADS": "1"}
            words = [*self._words, "--slot", str(slot)]
            return self.nodes.start(slot, words, environment=told, stdout=log, stderr=subprocess.STDOUT)

    def suffer(self, fault: Fault) -> bool:
        """Let a fault happen to its end, and tell whether it did: False where the slot's process has ended before."""
        child = self.running[fault.slot]
        if child.poll() is not None:
            return False
        begin, over = {
            "kill": (lambda: (child.kill(), child.wait()), lambda: self.start_again(fault.slot)),
            "stop": (lambda: child.send_signal(signal.SIGSTOP), lambda: child.send_signal(signal.SIGCONT)),
            "cut": (lambda: self.nodes.cut(fault.slot), lambda: self.nodes.mend(fault.slot)),
        }[fault.kind]
        self.is_ill[fault.slot] = True
        try:
            begin()
            time.sleep(fault.seconds)
            over()
        finally:
            self.is_ill[fault.slot] = False
        return True

    def start_again(self, slot: int) -> None:
        """Start the process of a slot again, in place of the one that has ended."""
        self.running[slot] = self.start(slot)

    def check(self) -> None:
        """Raise RuntimeError, with the end of what it printed, where a process has failed by itself."""
        for slot, child in enumerate(self.running):
            if child.poll() not in (None, 0, -signal.SIGKILL):
                said = (self.logs / f"{slot}.log").read_text()
                raise RuntimeError(f"slot {slot} has ended with {child.poll()}: {said[-1000:]}")

    @property
    def are_training(self) -> bool:
        """Tell whether any process has not come to its end yet, or has a fault that is under way."""
        return any(child.poll() is None for child in self.running) or any(self.is_ill)

    def held(self) -> list[dict[str, int]]:
        """Return what the processes of slots without a fault hold, a row for each.

        Columns: slot, pid, rss_bytes, descriptors, threads.
        """
        found = []
        for slot, child in enumerate(self.running):
            if not self.is_ill[slot]:
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(child.pid)
                    row = {"slot": slot, "pid": child.pid, "rss_bytes": process.memory_info().rss}
                    found.append(row | {"descriptors": process.num_fds(), "threads": process.num_threads()})
        return found


class Enduring(Protocol):
    """A run to which faults can happen, as they can to `Replicas`, which says what these methods do."""

    def suffer(self, fault: Fault) -> bool: ...
    def check(self) -> None: ...
    @property
    def are_training(self) -> bool: ...


def endure(
    run: Enduring,
    schedule: Sequence[Fault],
    begin: float,
    look: Callable[[], object],
    is_spared: Callable[[], bool] = lambda: False,
) -> list[dict[str, Any]]:
    """Let faults happen to a run until it has ended, and return those that did, as dictionaries, in their order.

    What a fault or the run's `check` raises is raised.

    Args:
        run: the run, whose processes have been started.
        schedule: the faults.
        begin: the time, by the monotonic clock, from which the seconds of faults count.
        look: called ten times per second while the run trains, and once more at its end.
        is_spared: tells at a fault's time whether it is left out.
    """
    happened, failed, over = [], [], threading.Event()

    def one(fault: Fault) -> None:
        try:
            if not over.wait(max(0.0, begin + fault.at - time.monotonic())) and not is_spared() and run.suffer(fault):
                happened.append(dataclasses.asdict(fault))
        except Exception as error:  # what it leaves is no fault that was meant
            failed.append(error)

    threads = [threading.Thread(target=one, args=(fault,), daemon=True) for fault in schedule]
    for thread in threads:
        thread.start()
    try:
        while run.are_training and not failed:
            run.check()
            look()
            time.sleep(0.1)
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    if failed:
        raise failed[0]
    run.check()  # as the last to end may have failed since it was looked at
    look()
    return sorted(happened, key=lambda fault: fault["at"])


def watch(address: str, slots: int, out: Path) -> None:
    """Read the log of an elastic run as it grows, and write a line of JSON for each round that is committed.

    It does not return. address: "host:port" of the store. A line has the time "at", by the monotonic clock, the "slots"
    that took part, the "tokens" of all of them, and the number of the "attempt".
    """
    from lowcomm.comm.elastic import SharedLog
    from lowcomm.comm.membership import Roll
    from lowcomm.comm.processes import elastic_store
    from lowcomm.comm.transport import CommError

    log, roll, told = SharedLog(elastic_store(address)), Roll(slots, max(1, slots // 2)), 0
    with out.open("w") as file:
        while True:
            try:
                entry = log.read(roll.length)
            except CommError:  # it will answer again; else this process ends with the testbed
                continue
            if entry is None:
                time.sleep(0.02)
                continue
            roll.take(entry)
            if len(roll.rounds) > told:
                told, last = len(roll.rounds), roll.rounds[-1]
                row = {"at": time.monotonic(), "slots": sorted(last.slots), "tokens": sum(last.tokens)}
                file.write(json.dumps(row | {"attempt": last.attempt}) + "\n")
                file.flush()


def run(
    steps: int,
    schedule: list[Fault],
    work: Path,
    *,
    slots: int = SLOTS,
    data: Path | None = None,
    name: Sequence[str] = ("diloco_m2",),
    settings: Mapping[str, Any] | None = None,
    mbit_per_s: float = math.inf,
) -> dict[str, Any]:
    """Train a run to its end while faults happen, and return what was seen.

    Faults that would come after the share `CALM_AT_END` of its rounds are left out, as a replica that is away at the
    end has missed it. Raises RuntimeError where a process fails by itself, or the log and the run have other rounds.

    steps: how many the run has. schedule: the faults, from the first committed round on. work: a folder for the corpus
    and the run. data: a prepared corpus, with `settings` that go with it; by default the storm's own. name: the run in
    params.yaml, as words of the command line. mbit_per_s: the rate of each replica's link.
    """
    data, out, rounds_file = data or corpus(work / "data"), work / "run", work / "rounds.jsonl"
    settings = (SETTINGS | DILOCO if settings is None else dict(settings)) | {"train.steps": steps}
    settings.setdefault("train.global_batch", 8 * slots)
    all_rounds = rounds_in(name, settings, replicas=slots)
    held: list[dict[str, float]] = []
    with Testbed(slots + 1, mbit_per_s=mbit_per_s) as bed:
        store = bed.start(slots, [sys.executable, "-m", "lowcomm", "store", str(PORT)], stdout=subprocess.PIPE)
        store.stdout.readline()
        words = [sys.executable, "-m", "pipelines.storm", "watch", f"127.0.0.1:{PORT}", str(slots), str(rounds_file)]
        bed.start(slots, words)
        address = f"{bed.address(slots)}:{PORT}"
        replicas = Replicas(bed, name, settings, slots=slots, store=address, data=data, out=out)
        while not rounds_file.exists() or not rounds_file.read_text():  # all have begun
            replicas.check()
            time.sleep(0.1)
        begin = time.monotonic()

        def look() -> None:
            at = round(time.monotonic() - begin, 1)
            if at > (held[-1]["at"] if held else 0.0) + LOOK_S:
                held.extend({"at": at} | row for row in replicas.held())

        def is_spared() -> bool:
            return len(rounds_file.read_text().splitlines()) >= CALM_AT_END * all_rounds

        happened = endure(replicas, schedule, begin, look, is_spared)
    rows = [json.loads(line) for line in rounds_file.read_text().splitlines()]
    rounds = [row | {"at": round(row["at"] - begin, 2)} for row in rows]
    summaries = [json.loads((out / f"slot-{slot:03d}" / "summary.json").read_text()) for slot in range(slots)]
    if [sorted(r["slots"]) for r in summaries[0]["rounds"]] != [r["slots"] for r in rounds]:
        raise RuntimeError(f"the log has {len(rounds)} rounds, the run {len(summaries[0]['rounds'])}, or other slots")
    curve = [
        [row["step"], row["rounds"], round(row["val_loss"], 4)]
        for slot in range(slots)
        for row in read_metrics(out / f"slot-{slot:03d}" / "metrics" / "rank-000.jsonl")
        if "val_loss" in row
    ]
    return {
        "steps": steps,
        "slots": slots,
        "run": summaries[0]["run"],
        "faults": happened,
        "rounds": rounds,
        "val_loss": [s["val_loss"] for s in summaries],
        "tokens": summaries[0]["tokens"],
        "tokens_lost": summaries[0]["tokens_lost"],
        "curve": sorted(curve),
        "held": held,
        "device": f"{os.cpu_count()} cores, {platform.machine()}",
        "kernel": platform.release(),
    }


def found(name: str, results: Path = RESULTS) -> dict[str, Any]:
    """Return what was seen in the "calm" or in the "storm", as `run` has returned it, from a folder of results."""
    return json.loads((results / f"{name}.json").read_text())


def returns(seen: dict[str, Any], kind: str = "") -> list[float]:
    """Return the seconds from the end of each fault until its slot was in a round again.

    kind: that of the faults, "" for all. A fault whose slot never was in a round again is left out.
    """
    out = []
    for fault in seen["faults"]:
        over = fault["at"] + fault["seconds"]
        there = [r["at"] for r in seen["rounds"] if r["at"] > over and fault["slot"] in r["slots"]]
        if there and kind in ("", fault["kind"]):
            out.append(there[0] - over)
    return out


def present(seen: dict[str, Any]) -> float:
    """Return the share of all replicas that took part in a round, as a mean over rounds."""
    return statistics.mean(len(r["slots"]) for r in seen["rounds"]) / seen["slots"]


def participation(seen: dict[str, Any]) -> float:
    """Return the share of the replicas without a fault that took part in a round, as a mean over rounds."""
    shares = []
    for r in seen["rounds"]:
        ill = {f["slot"] for f in seen["faults"] if f["at"] <= r["at"] <= f["at"] + f["seconds"]}
        shares.append(len(set(r["slots"]) - ill) / (seen["slots"] - len(ill)))
    return statistics.mean(shares)


def throughput(seen: dict[str, Any]) -> float:
    """Return the committed tokens per second, from the end of the first round to that of the last."""
    first, *rest = seen["rounds"]
    return sum(r["tokens"] for r in rest) / (rest[-1]["at"] - first["at"])


def loss_at(seen: dict[str, Any], tokens: float) -> float:
    """Return the validation loss after so many committed tokens, on the line between the two evaluations around it."""
    after = [0, *itertools.accumulate(r["tokens"] for r in seen["rounds"])]
    curve = {after[rounds]: loss for _, rounds, loss in seen["curve"] if rounds} | {
        after[-1]: statistics.mean(seen["val_loss"])
    }
    return float(np.interp(tokens, sorted(curve), [curve[at] for at in sorted(curve)]))


def figures(calm: dict[str, Any], storm: dict[str, Any]) -> dict[str, float]:
    """Return the figures of a storm beside the calm.

    minutes: how long the storm took, to its last round. faults_per_hour: how many happened. at_first_attempt,
    participation, present, recovered (of kills) and tokens_lost: shares from 0 to 1. back_s: the median of the seconds
    from the end of a kill until its slot was in a round again, NaN without any. throughput, loss, loss_at_equal_tokens
    and tokens: those of the storm over those of the calm.
    """
    hours, kills = storm["rounds"][-1]["at"] / 3600, returns(storm, "kill")
    loss, loss_in_calm = (statistics.mean(seen["val_loss"]) for seen in (storm, calm))
    tokens = min(seen["tokens"] for seen in (storm, calm))
    return {
        "minutes": 60 * hours,
        "faults_per_hour": len(storm["faults"]) / hours,
        "throughput": throughput(storm) / throughput(calm),
        "at_first_attempt": statistics.mean(r["attempt"] == 1 for r in storm["rounds"]),
        "participation": participation(storm),
        "present": present(storm),
        "recovered": len(kills) / max(1, sum(fault["kind"] == "kill" for fault in storm["faults"])),
        "back_s": statistics.median(kills) if kills else float("nan"),
        "tokens_lost": storm["tokens_lost"] / (storm["tokens"] + storm["tokens_lost"]),
        "loss": loss / loss_in_calm,
        "loss_at_equal_tokens": loss_at(storm, tokens) / loss_at(calm, tokens),
        "tokens": storm["tokens"] / calm["tokens"],
    }


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv`, by default the process's own, and return its exit status; see `--help`."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.storm", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("calm", "storm", "measure"):
        one = commands.add_parser(name)
        one.add_argument("--steps", type=int, default=STEPS)
        one.add_argument("--out", type=Path, default=RESULTS)
        if name != "calm":
            one.add_argument("--per-hour", type=float, default=PER_HOUR)
            one.add_argument("--seed", type=int, default=0)
    listed = commands.add_parser("list")
    listed.add_argument("--out", type=Path, default=RESULTS)
    watched = commands.add_parser("watch")
    watched.add_argument("address")
    watched.add_argument("slots", type=int)
    watched.add_argument("out", type=Path)
    args = parser.parse_args(argv)
    if args.command == "watch":
        watch(args.address, args.slots, args.out)
        return 0
    if args.command == "list":
        for name, figure in figures(found("calm", args.out), found("storm", args.out)).items():
            print(f"{name:18}{figure:10.4f}")
        return 0
    for name in ("calm", "storm") if args.command == "measure" else (args.command,):
        file = args.out / f"{name}.json"
        if args.command == "measure" and file.exists():
            continue
        with tempfile.TemporaryDirectory() as work:
            seen = run(args.steps, faults(args.seed, args.per_hour, 3600.0) if name == "storm" else [], Path(work))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(seen) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
