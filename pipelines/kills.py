"""Measure the time to a target loss under three kills: what a method pays for a worker that dies.

    python -m pipelines.kills measure       measure all methods that results/storm/kills/ does not have yet
    python -m pipelines.kills list          print what is there

Each method trains twice on four workers: undisturbed, and with a SIGKILL to one of them at a quarter, a half and three
quarters of the time that the undisturbed run took to the target; `REPLACED_S` seconds after each another takes its
place. The target is the lowest validation loss of the undisturbed run up to the first evaluation after `SHARE` of its
steps.

    data_parallel    ends with its worker: all are started again when there is another, from the last checkpoint
    others           go on with three (`lowcomm train --store --slot`), and the fourth comes back to where they are
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from lowcomm.comm.processes import elastic_store
from pipelines.launch import Tail, torchrun_command
from pipelines.storm import RESULTS as STORM
from pipelines.storm import SETTINGS, Fault, Replicas, corpus, endure, training

RESULTS = STORM / "kills"
WORKERS, SHARE, REPLACED_S = 4, 0.75, 10.0
#: The worker that each kill hits, and when: as a share of the time that the undisturbed run took to the target.
KILLS = ((3, 0.25), (1, 0.5), (0, 0.75))
#: The steps of a run, which take four minutes on two cores, and those between checkpoints, which take ten seconds.
STEPS, CHECKPOINT_EVERY = 6000, 250
_LOCAL = {"method.sync_every_steps": 40, "checkpoint.every_steps": CHECKPOINT_EVERY}
#: By method: its run of params.yaml in words of the command line, and the settings that it has beside those of all.
METHODS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "data_parallel": (("data_parallel",), {"checkpoint.every_steps": CHECKPOINT_EVERY}),
    "diloco": (("diloco_m2",), _LOCAL),
    "streaming": (
        ("streaming_h30",),
        _LOCAL
        | {
            "method.overlap_steps": "[5]",
            "method.record_cosine": "false",
            "method.close_last_round": "true",
            "train.evaluate_also": "[]",
        },
    ),
    "noloco": (
        ("noloco", "--variant", "dp8_pp1"),
        _LOCAL | {"train.record_spread": "false", "train.evaluate_also": "[]"},
    ),
}


class Here:
    """A stand-in for a testbed that starts the processes of `Replicas` on this machine, whatever their node."""

    @staticmethod
    def start(node: int, words: list[str], *, environment: Mapping[str, str], **popen: Any) -> subprocess.Popen:
        """Start a command with this environment and return its process; all nodes are this machine."""
        return subprocess.Popen(words, env=dict(environment), **popen)


class DataParallel:
    """The processes of a data-parallel run under torchrun, which `storm.endure` disturbs as it does `Replicas`."""

    def __init__(self, settings: Mapping[str, Any], data: Path, out: Path):
        words = training(METHODS["data_parallel"][0], settings, replicas=WORKERS, data=data, out=out)
        self._command = torchrun_command(WORKERS, "lowcomm.train", *words)
        self._log = out.with_name("log")
        self._is_ill = False
        self._agent = self._start()

    def _start(self) -> subprocess.Popen:
        told = os.environ | {"OMP_NUM_THREADS": "1"}
        with self._log.open("a") as log:
            return subprocess.Popen(self._command, env=told, stdout=log, stderr=subprocess.STDOUT)

    def suffer(self, fault: Fault) -> bool:
        """Kill the rank `fault.slot`, let the job end, and start it again; return False where it had ended before.

        It is started `fault.seconds` after the kill, or when it has ended, if that takes longer.
        """
        if self._agent.poll() is not None:
            return False
        self._is_ill = True
        try:
            until = time.monotonic() + fault.seconds
            for process in psutil.Process(self._agent.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if process.environ().get("RANK") == str(fault.slot):
                        process.send_signal(signal.SIGKILL)
            self._agent.wait(60)
            time.sleep(max(0.0, until - time.monotonic()))
            self._agent = self._start()
        finally:
            self._is_ill = False
        return True

    def check(self) -> None:
        """Raise RuntimeError, with the end of its log, where the job has failed by itself."""
        if not self._is_ill and self._agent.poll() not in (None, 0):
            raise RuntimeError(f"data-parallel training has ended: {self._log.read_text()[-1000:]}")

    @property
    def are_training(self) -> bool:
        """Tell whether the job is running, or is about to be started again."""
        return self._is_ill or self._agent.poll() is None

    def stop(self) -> None:
        """Kill the processes of the job that still run."""
        if self._agent.poll() is None:
            for process in [*psutil.Process(self._agent.pid).children(recursive=True), self._agent]:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            self._agent.wait()


@contextlib.contextmanager
def workers(method: str, steps: int, data: Path, out: Path, settings: Mapping[str, Any]) -> Iterator[Any]:
    """Start the workers of a method, as a `DataParallel` job or as `Replicas`; they are killed when the context ends.

    settings: those of all methods, which those of the method override.
    """
    run, own = METHODS[method]
    told = dict(settings) | own | {"train.steps": steps, "train.global_batch": 8 * WORKERS}
    if method == "data_parallel":
        job = DataParallel(told, data, out)
        try:
            yield job
        finally:
            job.stop()
        return
    store = elastic_store("127.0.0.1:0", hosts=True)
    replicas = Replicas(Here(), run, told, slots=WORKERS, store=f"127.0.0.1:{store.port}", data=data, out=out)
    try:
        yield replicas
    finally:
        for child in replicas.running:
            child.kill()
            child.wait()


class Curve:
    """The validation losses of a run that is under way, each with the time at which it was seen.

    out: the run's folder. every: its `train.eval_every`. Attributes: `begin`, from which seconds count, by
    time.monotonic; `last`, the last step that a worker has written down, from 1 (0: none has).
    """

    def __init__(self, out: Path, every: int):
        self._out, self._every, self.begin, self.last = out, every, time.monotonic(), 0
        self._tails: dict[Path, Tail] = {}
        self._seen: dict[tuple[Path, int], tuple[float, float]] = {}

    def look(self) -> int:
        """Read what the files of metrics have gained, and return `last`."""
        for file in self._out.rglob("metrics/rank-*.jsonl"):
            for row in self._tails.setdefault(file, Tail(file)).rows():
                self.last = max(self.last, row["step"])
                if "val_loss" in row:
                    at = round(time.monotonic() - self.begin, 2)
                    self._seen.setdefault((file, row["step"]), (at, row["val_loss"]))
        return self.last

    def points(self) -> list[list[float]]:
        """Return [step, seconds, loss] for each evaluation: the mean loss of the replicas, when the last was seen.

        Replicas evaluate at the first of their steps from a multiple of `train.eval_every` on; the multiple is the step
        here.
        """
        steps: dict[int, list[tuple[float, float]]] = {}
        for (_, step), found in self._seen.items():
            steps.setdefault(step - step % self._every, []).append(found)
        return [[s, max(at for at, _ in v), statistics.mean(x for _, x in v)] for s, v in sorted(steps.items())]


def train(
    method: str, steps: int, data: Path, work: Path, settings: Mapping[str, Any], kills: list[Fault]
) -> dict[str, Any]:
    """Train a method to its end while workers are killed; return the faults, the `Curve.points` and the seconds.

    Seconds count from when its first metrics are seen. work: a folder that is made.
    """
    work.mkdir()
    with workers(method, steps, data, work / "run", settings) as some:
        curve = Curve(work / "run", settings["train.eval_every"])
        while not curve.look():
            some.check()
            time.sleep(0.1)
        curve.begin = time.monotonic()
        faults = endure(some, kills, curve.begin, curve.look)
    return {"faults": faults, "curve": curve.points(), "seconds": round(time.monotonic() - curve.begin, 2)}


def time_to(curve: list[list[float]], target: float) -> float:
    """Return the seconds after which a loss of a curve was at the target or below; infinity where it never was."""
    return min((at for _, at, loss in curve if loss <= target), default=float("inf"))


def point(method: str, data: Path, work: Path) -> dict[str, Any]:
    """Train a method undisturbed and under the three `KILLS`, and return its point: both times and both curves."""
    calm = train(method, STEPS, data, work / "calm", SETTINGS, [])
    reached = next(row for row in calm["curve"] if row[0] >= SHARE * STEPS)
    target = min(loss for step, _, loss in calm["curve"] if step <= reached[0])
    took = time_to(calm["curve"], target)
    faults = [Fault(round(share * took, 2), "kill", worker, REPLACED_S) for worker, share in KILLS]
    killed = train(method, STEPS, data, work / "killed", SETTINGS, faults)
    return {
        "method": method,
        "steps": STEPS,
        "workers": WORKERS,
        "checkpoint_every_steps": CHECKPOINT_EVERY,
        "replaced_s": REPLACED_S,
        "target": target,
        "calm_s": took,
        "killed_s": time_to(killed["curve"], target),
        "calm": calm,
        "killed": killed,
        "device": f"{os.cpu_count()} cores, {platform.machine()}",
    }


def told(p: dict[str, Any]) -> str:
    """Return the result of a point as a line of text."""
    return (
        f"{p['method']:14} to {p['target']:.4f}: {p['calm_s']:6.1f} s undisturbed, {p['killed_s']:6.1f} s under"
        f" {len(p['killed']['faults'])} kills: {p['killed_s'] / p['calm_s']:.2f} times"
    )


def clock_apart(p: dict[str, Any]) -> float:
    """Return by which share a point's second run is later than its first at their last evaluation before any kill.

    Until then both do the same. It is NaN where there is no such evaluation.
    """
    calm = {step: at for step, at, _ in p["calm"]["curve"]}
    first = min(fault["at"] for fault in p["killed"]["faults"])
    before = [at / calm[step] - 1 for step, at, _ in p["killed"]["curve"] if at < first and step in calm]
    return before[-1] if before else math.nan


def points() -> list[dict[str, Any]]:
    """Return the points that have been measured, in the order of `METHODS`."""
    files = [RESULTS / f"{method}.json" for method in METHODS]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def measure() -> None:
    """Measure all methods that have not been measured yet, and write and print each as soon as it is done."""
    with tempfile.TemporaryDirectory() as folder:
        data = corpus(Path(folder) / "data")
        for method in METHODS:
            if not (file := RESULTS / f"{method}.json").exists():
                (work := Path(folder) / method).mkdir()
                found = point(method, data, work)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(found) + "\n")
                print(told(found), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv`, by default the process's own, and return 0; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.kills", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("measure", "list"))
    if parser.parse_args(argv).what == "list":
        print("\n".join(map(told, points())))
    else:
        measure()
    return 0


if __name__ == "__main__":
    sys.exit(main())
