"""Measure methods over links that the kernel shapes: the clock beside replays, the kernel's counters beside the ledger.

    python -m pipelines.links measure       measure all points that results/links/ does not have yet (Linux and root)
    python -m pipelines.links list          print what is there

A point is a method at a link: a short run of two or four ranks, one per network namespace (`lowcomm.comm.testbed`),
traced, beside the same run over a free link, which is as fast as it goes; each several times, in turns, because a
machine's speed drifts. It keeps the seconds of each run from the first verb to the last,

    measured    over the link, by the clock
    own         by a replay of the run's own trace over such a link: the computing is the same, so only the link differs
    free        by a replay, over such a link, of the trace of a run over the free link
    plain       as "own", without what TCP and gloo add (`lowcomm.cost.tcp`)
    unshaped    over the free link, by the clock

for how many seconds ranks compute over the free link, and the bytes of a rank's interface and of its ledger between two
steps of the run. Each point is a small file in git.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowcomm.comm.start import world_from_torchrun
from lowcomm.comm.testbed import Testbed
from lowcomm.comm.transport import HEADER_BYTES
from lowcomm.comm.wire import Span
from lowcomm.cost.replay import read_traces, recorded, replay, window
from lowcomm.cost.tcp import FRAMING, SEGMENT
from lowcomm.experiment.config import CorpusConfig, DataConfig, RunConfig
from lowcomm.experiment.data import prepare
from lowcomm.experiment.project import overrides
from lowcomm.experiment.run_folder import RunFolder, read_metrics
from lowcomm.experiment.train import train
from lowcomm.experiment.trainer import Trainer
from lowcomm.settings import ConfigError
from pipelines.project import ROOT, run_config

RESULTS = ROOT / "results" / "links"
#: By name: the rate of each link in Mbit/s, and its latency, one way, in milliseconds.
LINKS = {
    "20": (20.0, 0.0),
    "80": (80.0, 0.0),
    "200": (200.0, 0.0),
    "1000": (1000.0, 0.0),
    "80-40ms": (80.0, 40.0),
}
VOCAB, TIMES = 344, 3
#: Bytes are counted from the end of this step, when ranks have found each other, to this many steps before the last.
_FIRST, _LAST = 3, 1
#: The text of all runs.
TEXT = DataConfig("docstrings", VOCAB, max_characters=400_000)
#: Settings of all runs: a third of a million parameters, and batches that take as long as a message over the faster
#: links.
SHAPE: dict[str, Any] = {
    "model.dim": 64,
    "model.layers": 4,
    "model.heads": 4,
    "model.ffn_dim": 256,
    "model.vocab_size": VOCAB,
    "model.seq_len": 128,
    "data.vocab_size": TEXT.vocab_size,
    "data.max_characters": TEXT.max_characters,
    "train.seq_len": 128,
    "train.global_batch": 16,
    "train.warmup_steps": 1,
    "train.eval_every": 0,
    "train.eval_sequences": 4,
    "train.record_ranks": "false",
    "train.record_spread": "false",
    "train.evaluate_also": "[]",
    "comm.trace": "true",
}
_STREAMING = {"method.sync_every_steps": 12, "method.record_cosine": "false"}


@dataclass(frozen=True)
class Method:
    """A run of params.yaml that is made short: it has `steps` steps, and `settings` beside those of `SHAPE`."""

    run: str
    steps: int
    settings: dict[str, Any]
    variant: str = ""
    replicas: int = 2
    stages: int = 1

    @property
    def config(self) -> RunConfig:
        """The configuration of the run, made short."""
        grid = {"replicas": self.replicas, "stages": self.stages, "train.steps": self.steps}
        words = [f"{key}={value}" for key, value in (SHAPE | grid | self.settings).items()]
        return run_config(self.run, variant=self.variant, scale="laptop", **overrides(words))


METHODS = {
    "data_parallel": Method("data_parallel", 24, {}),
    "diloco": Method("diloco_m2", 40, {"method.sync_every_steps": 10}),
    "streaming": Method("streaming_h30", 40, _STREAMING | {"method.overlap_steps": "[0]"}),
    "overlapped": Method("streaming_h30", 40, _STREAMING | {"method.overlap_steps": "[3]"}),
    "noloco": Method("noloco", 40, {"method.sync_every_steps": 10}, "dp8_pp1", replicas=4),
    "pipelines": Method("diloco_m2", 40, {"method.sync_every_steps": 10}, stages=2),
    "subspace": Method(
        "protocol",
        24,
        {"train.accumulation": 4, "method.boundary.update_every_steps": 0, "method.boundary.update_lr": 0},
        replicas=1,
        stages=2,
    ),
}


@dataclass(frozen=True)
class Run:
    """The measurements of one run over a testbed.

    spans: the traces of its ranks, in rank order. losses: the training losses of the last rank, step by step. counted:
    the number of steps over which rank 0's bytes were counted, the bytes that its interface sent in them, and those
    that its ledger has of them.
    """

    spans: list[list[Span]]
    losses: list[float]
    counted: tuple[int, int, int]


def rank(method: str, data: Path, out: Path) -> None:
    """Train one rank of a method, in its namespace, and write (step, bytes its interface sent, bytes of its ledger).

    They are of each step, sums since the beginning, in `bytes-RRR.json` in the run's folder for times.
    """
    config = METHODS[method].config
    world = world_from_torchrun(replicas=config.replicas, stages=config.stages, comm=config.comm)
    counter, seen = Path("/sys/class/net/eth0/statistics/tx_bytes"), []

    def look(trainer: Trainer, row: dict[str, Any]) -> None:
        seen.append((row["step"], int(counter.read_text()), world.ledger.total()))

    train(config, world, data, out, on_row=look)
    (out.with_name(f"{out.name}-times") / f"bytes-{world.rank:03d}.json").write_text(json.dumps(seen))
    world.close()


def run(method: str, data: Path, *, mbit_per_s: float = math.inf, latency_ms: float = 0.0) -> Run:
    """Train a method over links of this rate (infinity: as fast as they go) and latency, and return what was seen.

    Raises ConfigError where no testbed can be had, and RuntimeError, with the end of what it wrote, where a rank fails.
    """
    config = METHODS[method].config
    with (
        tempfile.TemporaryDirectory() as work,
        Testbed(config.ranks, mbit_per_s=mbit_per_s, latency_ms=latency_ms) as bed,
    ):
        out, told = Path(work) / "run", os.environ | {"OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "pipelines.links", "rank", method, str(data), str(out)]
        pipes = {"environment": told, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks = [bed.start(i, words, rank=i, **pipes) for i in range(config.ranks)]
        said = [child.communicate()[0] for child in ranks]
        for child, text in zip(ranks, said, strict=True):
            if child.returncode:
                raise RuntimeError(f"{method} at {mbit_per_s:g} Mbit/s: {text[-2000:]}")
        folder = RunFolder.beside(out)
        spans = window(read_traces(folder.times), 1, config.train.steps)
        losses = [row["loss"] for row in read_metrics(folder.metrics(config.ranks - 1))]
        seen = json.loads((folder.times / "bytes-000.json").read_text())
        (a, sent, billed), (b, sent_then, billed_then) = seen[_FIRST - 1], seen[-1 - _LAST]
        return Run(spans, losses, (b - a, sent_then - sent, billed_then - billed))


def point(method: str, link: str, data: Path, *, times: int = TIMES) -> dict[str, Any]:
    """Measure a method at a link so many times, in turns with the free link, and return the point."""
    mbit_per_s, latency_ms = LINKS[link]
    turns = [(run(method, data), run(method, data, mbit_per_s=mbit_per_s, latency_ms=latency_ms)) for _ in range(times)]
    at: dict[str, Any] = {"gbit_per_s": mbit_per_s / 1e3, "latency_s": latency_ms / 1e3}

    def middle(values: list[float]) -> float:
        return round(statistics.median(values), 4)

    slow = [s for _, s in turns]
    steps, counter, ledger = slow[0].counted
    return {
        "method": method,
        "mbit_per_s": mbit_per_s,
        "latency_ms": latency_ms,
        "ranks": METHODS[method].config.ranks,
        "steps": METHODS[method].steps,
        "times": times,
        "measured_s": [round(float(recorded(s.spans).seconds), 4) for s in slow],
        "own_s": [round(float(replay(s.spans, **at, tcp=True).seconds), 4) for s in slow],
        "plain_s": [round(float(replay(s.spans, **at).seconds), 4) for s in slow],
        "free_s": [round(float(replay(f.spans, **at, tcp=True).seconds), 4) for f, _ in turns],
        "unshaped_s": [round(float(recorded(f.spans).seconds), 4) for f, _ in turns],
        "computing_s": [round(_computing(f), 4) for f, _ in turns],
        "utilisation": middle([float(recorded(s.spans).utilisation) for s in slow]),
        "replayed_utilisation": middle([float(replay(s.spans, **at, tcp=True).utilisation) for s in slow]),
        "counted_steps": steps,
        "counter_bytes": counter,
        "ledger_bytes": ledger,
        "messages": _messages(slow[0].spans[0], _FIRST, METHODS[method].steps - _LAST),
        "losses_equal": all(r.losses == turns[0][0].losses for pair in turns for r in pair),
        "device": f"{os.cpu_count()} cores, {platform.machine()}",
        "kernel": platform.release(),
    }


def _computing(one: Run) -> float:
    """Return for how many seconds a rank of a run computed, as a mean over its ranks."""
    whole = recorded(one.spans)
    return float(whole.seconds) * float(whole.utilisation)


def _messages(spans: list[Span], first: int, last: int) -> int:
    """Return how many messages a rank sent after step `first`, up to step `last`: one per phase and peer of a verb."""
    return sum(s.phases * (len(s.ranks) - 1) for s in spans if first < s.step <= last and s.nbytes)


def framed_bytes(p: dict[str, Any]) -> tuple[float, float]:
    """Return the least and the most bytes that a point's interface should have counted, given those of its ledger.

    Each segment has headers. Each message has a header of the library, which is a segment by itself, and gloo's 48
    bytes before that and before its payload. For each message that is received in return, two words of 48 bytes, each a
    segment by itself, say that there is a place for its header and for its payload. Acknowledgements travel with what
    goes the other way at the same time, or else by themselves, one for two segments.
    """
    alone = SEGMENT * (FRAMING - 1)
    least = FRAMING * p["ledger_bytes"] + p["messages"] * (HEADER_BYTES + alone + 2 * 48 + 2 * (48 + alone))
    return least, least + p["ledger_bytes"] / SEGMENT / 2 * alone


def corpus(folder: Path) -> Path:
    """Prepare a small corpus in a folder, and return the folder."""
    prepare(CorpusConfig("docstrings"), TEXT, folder)
    return folder


def measure() -> None:
    """Measure all points that have not been measured yet, and write and print each as soon as it is done.

    Raises ConfigError where no testbed can be had.
    """
    with tempfile.TemporaryDirectory() as work:
        data = corpus(Path(work) / "data")
        for method in METHODS:
            for link in LINKS:
                file = RESULTS / method / f"{link}.json"
                if file.exists():
                    continue
                found = point(method, link, data)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(found, indent=1) + "\n")
                print(told(found), flush=True)


def told(p: dict[str, Any]) -> str:
    """Return the result of a point as a line of text."""
    measured, own, free, plain = (statistics.median(p[f"{name}_s"]) for name in ("measured", "own", "free", "plain"))
    least, most = framed_bytes(p)
    return (
        f"{p['method']:14} {p['mbit_per_s']:6g} Mbit/s {p['latency_ms']:4g} ms: {measured:7.3f} s; over its own replay"
        f" {measured / own:.3f} (without TCP {measured / plain:.3f}), over the free link's {measured / free:.3f};"
        f" bytes over the ledger's {p['counter_bytes'] / p['ledger_bytes']:.3f}, of which framing explains"
        f" {least / p['ledger_bytes']:.3f} to {most / p['ledger_bytes']:.3f};"
        f" losses {'equal' if p['losses_equal'] else 'DIFFER'}"
    )


def points() -> list[dict[str, Any]]:
    """Return all points that have been measured, method by method and link by link."""
    files = [RESULTS / method / f"{link}.json" for method in METHODS for link in LINKS]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv`, by default the process's own, and return its exit status.

    It is 2 where no testbed can be had. The module's docstring describes the commands.
    """
    parser = argparse.ArgumentParser(prog="python -m pipelines.links", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("measure")
    commands.add_parser("list")
    one = commands.add_parser("rank")
    one.add_argument("method")
    one.add_argument("data", type=Path)
    one.add_argument("out", type=Path)
    args = parser.parse_args(argv)
    if args.command == "rank":
        rank(args.method, args.data, args.out)
    elif args.command == "list":
        print("\n".join(map(told, points())))
    else:
        try:
            measure()
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
