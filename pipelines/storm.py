"""A storm: replicas on few cores that are killed, stopped and cut off, while the run goes on with whoever is there.

    python -m pipelines.storm calm      the run undisturbed, into results/storm/calm.json
    python -m pipelines.storm storm     the same run with faults, into results/storm/storm.json
    python -m pipelines.storm list      what is there

Each replica is a process (`lowcomm train --store --slot`) in a network namespace of its own, the store is in another
(`lowcomm.comm.testbed`: Linux and root). Faults come as a Poisson process of a seed, each at a replica that is well:

    kill    SIGKILL, and another start a few seconds later
    stop    SIGSTOP, and SIGCONT after a while
    cut     its link is down for a while

A watcher folds the log of who takes part, and says of each round when it was committed, by whom, on how many tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowcomm.comm.testbed import Testbed
from lowcomm.experiment.run_folder import read_metrics
from pipelines.links import VOCAB, corpus
from pipelines.project import ROOT

RESULTS = ROOT / "results" / "storm"
SLOTS, QUORUM, PORT = 8, 4, 29400
GRACE_S, TIMEOUT_S = 2.0, 6.0
#: 0.12 million parameters; steps that take half an hour on two cores.
SETTINGS: dict[str, Any] = {
    "replicas": SLOTS,
    "model.dim": 32,
    "model.layers": 4,
    "model.heads": 4,
    "model.ffn_dim": 128,
    "model.vocab_size": VOCAB,
    "model.seq_len": 64,
    "data.vocab_size": VOCAB,
    "data.max_characters": 400_000,
    "data.validation_percent": 5.0,
    "data.tokenizer_characters": 4_000_000,
    "train.seq_len": 64,
    "train.global_batch": 8 * SLOTS,
    "train.eval_every": 200,
    "train.eval_sequences": 64,
    "train.log_every": 10,
    "method.sync_every_steps": 20,
    "checkpoint.every_steps": 40,
}


@dataclass(frozen=True)
class Fault:
    """A fault that happens to a slot: at how many seconds of the run, of which kind, and for how many seconds."""

    at: float
    kind: str
    slot: int
    seconds: float


def faults(seed: int, per_hour: float, seconds: float) -> list[Fault]:
    """Draw the faults of so many seconds; a slot that still has one is spared until it is well again."""
    draw, found, at = random.Random(seed), [], 0.0
    well = [0.0] * SLOTS
    while (at := at + draw.expovariate(per_hour / 3600)) < seconds:
        kind, lasts = draw.choice([("kill", (1, 5)), ("stop", (1, 20)), ("cut", (1, 20))])
        slot, length = draw.randrange(SLOTS), draw.uniform(*lasts)
        if well[slot] <= at:
            found.append(Fault(round(at, 2), kind, slot, round(length, 2)))
            well[slot] = at + length + 10
    return found


class Replicas:
    """The processes of a run over a testbed, and what is done to them."""

    def __init__(self, bed: Testbed, steps: int, data: Path, out: Path):
        self.bed = bed
        words = [f"--set={key}={value}" for key, value in (SETTINGS | {"train.steps": steps}).items()]
        self._words = [sys.executable, "-m", "lowcomm.train", "diloco_m2", "--scale", "smoke", "--data", str(data)]
        self._words += ["--out", str(out), "--store", f"{bed.address(SLOTS)}:{PORT}", "--quorum", str(QUORUM)]
        self._words += ["--grace", str(GRACE_S), "--timeout", str(TIMEOUT_S), *words]
        self.logs = out.with_name("logs")
        self.logs.mkdir()
        self.running = [self.start(slot) for slot in range(SLOTS)]
        self.is_ill = [False] * SLOTS

    def start(self, slot: int) -> subprocess.Popen:
        """Start a slot, for the first time or again."""
        with (self.logs / f"{slot}.log").open("a") as log:
            told = os.environ | {"OMP_NUM_THREADS": "1"}
            words = [*self._words, "--slot", str(slot)]
            return self.bed.start(slot, words, environment=told, stdout=log, stderr=subprocess.STDOUT)

    def suffer(self, fault: Fault) -> bool:
        """Let a fault happen, to its end; False where the slot's process has ended by itself before."""
        child = self.running[fault.slot]
        if child.poll() is not None:
            return False
        self.is_ill[fault.slot] = True
        if fault.kind == "kill":
            child.kill()
            child.wait()
        elif fault.kind == "stop":
            child.send_signal(signal.SIGSTOP)
        else:
            self.bed.cut(fault.slot)
        time.sleep(fault.seconds)
        if fault.kind == "kill":
            self.running[fault.slot] = self.start(fault.slot)
        elif fault.kind == "stop":
            child.send_signal(signal.SIGCONT)
        else:
            self.bed.mend(fault.slot)
        self.is_ill[fault.slot] = False
        return True

    def check(self) -> None:
        """Raise RuntimeError, with what it said, where a process has failed by itself."""
        for slot, child in enumerate(self.running):
            if child.poll() not in (None, 0, -signal.SIGKILL):
                said = (self.logs / f"{slot}.log").read_text()
                raise RuntimeError(f"slot {slot} has ended with {child.poll()}: {said[-1000:]}")

    @property
    def well(self) -> int:
        """How many slots have nothing done to them now."""
        return self.is_ill.count(False)


def watch(address: str, out: Path) -> None:
    """Fold the log as it grows, and write a line for each round: when it was committed, its slots and its tokens."""
    from lowcomm.comm.elastic import SharedLog
    from lowcomm.comm.membership import Roll
    from lowcomm.comm.processes import elastic_store
    from lowcomm.comm.transport import CommError

    log, roll, told = SharedLog(elastic_store(address)), Roll(SLOTS, QUORUM), 0
    with out.open("w") as file:
        while True:
            try:
                entry = log.read(roll.length)
            except CommError:
                return
            if entry is None:
                time.sleep(0.02)
                continue
            roll.take(entry)
            if len(roll.rounds) > told:
                told, last = len(roll.rounds), roll.rounds[-1]
                row = {"at": time.monotonic(), "slots": sorted(last.slots), "tokens": sum(last.tokens)}
                file.write(json.dumps(row | {"attempt": last.attempt}) + "\n")
                file.flush()


def run(steps: int, schedule: list[Fault], work: Path) -> dict[str, Any]:
    """Train the run to its end while faults happen, and return what was seen."""
    data, out, rounds_file = corpus(work / "data"), work / "run", work / "rounds.jsonl"
    happened: list[dict[str, Any]] = []
    with Testbed(SLOTS + 1) as bed:
        store = bed.start(SLOTS, [sys.executable, "-m", "lowcomm", "store", str(PORT)], stdout=subprocess.PIPE)
        store.stdout.readline()
        words = [sys.executable, "-m", "pipelines.storm", "watch", f"127.0.0.1:{PORT}", str(rounds_file)]
        bed.start(SLOTS, words)
        replicas = Replicas(bed, steps, data, out)
        while not rounds_file.exists() or not rounds_file.read_text():  # all have begun
            replicas.check()
            time.sleep(0.1)
        begin = time.monotonic()

        def one(fault: Fault) -> None:
            time.sleep(max(0.0, begin + fault.at - time.monotonic()))
            if replicas.suffer(fault):
                happened.append(dataclasses.asdict(fault))

        threads = [threading.Thread(target=one, args=(fault,), daemon=True) for fault in schedule]
        for thread in threads:
            thread.start()
        while any(child.poll() is None for child in replicas.running) or replicas.well < SLOTS:
            replicas.check()
            time.sleep(0.1)
    rows = [json.loads(line) for line in rounds_file.read_text().splitlines()]
    rounds = [row | {"at": round(row["at"] - begin, 2)} for row in rows]
    files = [out / f"slot-{slot:03d}" / "summary.json" for slot in range(SLOTS)]
    summaries = [json.loads(file.read_text()) for file in files if file.exists()]
    curve = [
        [row["step"], row["rounds"], round(row["val_loss"], 4)]
        for slot in range(SLOTS)
        for row in read_metrics(out / f"slot-{slot:03d}" / "metrics" / "rank-000.jsonl")
        if "val_loss" in row
    ]
    return {
        "steps": steps,
        "faults": sorted(happened, key=lambda f: f["at"]),
        "rounds": rounds,
        "val_loss": [s["val_loss"] for s in summaries],
        "tokens": summaries[0]["tokens"] if summaries else 0,
        "tokens_lost": summaries[0]["tokens_lost"] if summaries else 0,
        "curve": sorted(curve),
    }


def returns(found: dict[str, Any]) -> list[float]:
    """Return the seconds from the end of each fault until its slot was in a round again."""
    out = []
    for fault in found["faults"]:
        over = fault["at"] + fault["seconds"]
        there = [r["at"] for r in found["rounds"] if r["at"] > over and fault["slot"] in r["slots"]]
        if there:
            out.append(there[0] - over)
    return out


def participation(found: dict[str, Any]) -> float:
    """Return which share of the replicas that were well took part in a round, as a mean over rounds."""
    shares = []
    for r in found["rounds"]:
        ill = {f["slot"] for f in found["faults"] if f["at"] <= r["at"] <= f["at"] + f["seconds"]}
        shares.append(len(set(r["slots"]) - ill) / (SLOTS - len(ill)))
    return statistics.mean(shares)


def throughput(found: dict[str, Any]) -> float:
    """Return the committed tokens per second, from the first round to the last."""
    first, *rest = found["rounds"]
    return sum(r["tokens"] for r in rest) / (rest[-1]["at"] - first["at"])


def told(calm: dict[str, Any], storm: dict[str, Any]) -> str:
    """Set a storm beside the calm, in a few lines."""
    hours = storm["rounds"][-1]["at"] / 3600
    kinds = {kind: sum(f["kind"] == kind for f in storm["faults"]) for kind in ("kill", "stop", "cut")}
    back, lost, tokens = returns(storm), storm["tokens_lost"], storm["tokens"]
    loss, loss_in_calm = storm["val_loss"][0], calm["val_loss"][0]
    count = len(storm["faults"])
    return "\n".join(
        [
            f"{count} faults in {60 * hours:.1f} minutes, {count / hours:.0f} per hour: {kinds}",
            f"throughput: {throughput(storm) / throughput(calm):.3f} of the calm's",
            f"participation of those that were well: {participation(storm):.3f}",
            f"trained for rounds that went on without them: {lost / (tokens + lost):.2%} of tokens",
            f"back in a round after {statistics.median(back):.1f} s (median), {max(back):.1f} s at most",
            f"validation loss {loss:.4f}, in the calm {loss_in_calm:.4f}: {loss / loss_in_calm - 1:+.2%}, on"
            f" {tokens / calm['tokens']:.3f} of its tokens",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.storm", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("calm", "storm"):
        one = commands.add_parser(name)
        one.add_argument("--steps", type=int, default=12_000)
        one.add_argument("--out", type=Path, default=RESULTS)
        if name == "storm":
            one.add_argument("--per-hour", type=float, default=200.0)
            one.add_argument("--seed", type=int, default=0)
    listed = commands.add_parser("list")
    listed.add_argument("--out", type=Path, default=RESULTS)
    seen = commands.add_parser("watch")
    seen.add_argument("address")
    seen.add_argument("out", type=Path)
    args = parser.parse_args(argv)
    if args.command == "watch":
        watch(args.address, args.out)
        return 0
    if args.command == "list":
        print(told(*(json.loads((args.out / f"{name}.json").read_text()) for name in ("calm", "storm"))))
        return 0
    schedule = faults(args.seed, args.per_hour, 3600.0) if args.command == "storm" else []
    with tempfile.TemporaryDirectory() as work:
        found = run(args.steps, schedule, Path(work))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.command}.json").write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
