"""Measure what a GPU has to show, in less than ten minutes per call and with nothing to install.

    make gpu-pack             where the ladder's corpus is: pack what the GPU's machine lacks into build/gpu (13 MB)
    make gpu                  on that machine, with build/gpu: do every part that its GPU has not done, one by one
    python3 -m pipelines.gpu --parts points --minutes 9       some parts, in so many minutes
    python3 -m pipelines.gpu --parts points --rungs 3.69M --rows diloco/m2,noloco/m4       points of some rungs and rows

Each part adds its figures to results/gpu/<device>.json as soon as it is done. Where one fails, its error is printed,
and the others are done all the same. The parts are

codecs    the fused kernels give the CPU's bytes and values, bit for bit; their speed as a share of a memory copy's
offload   outer state in the CPU's memory, copied on a stream of its own: the same losses, the memory and the time
graph     passes of a small model launched kernel by kernel, and replayed as a graph: the same losses, and the time
ranks     two replicas as threads, as processes that share this GPU, and NCCL, with a single replica on a single GPU
speed     training steps in fp32 and bf16, eager and compiled: tokens/s, and FLOP/s as a share of those of the device's
          matrix products
tuning    trials of the ladder, at those of the chosen rungs that are tuned themselves
points    points of the ladder that two cores would take days for: by default of the rungs that plan.yaml has for a GPU,
          and of all rows that have been tuned (and predicted, where a rung takes what was tuned at another)

Several trials or points share the GPU, as a single one would leave it idle. What is not finished when time is up goes
on from its checkpoint in the next call.

It needs Python 3.11, torch 2.9, numpy, pandas, PyYAML, tqdm and safetensors, these or later versions, but no tokenizer
and no data library. Without a GPU it runs on the CPU, at the sizes of --small, which is how it is tested.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from lowcomm.codecs import make_codec
from lowcomm.comm.start import default_device
from lowcomm.cost.tables import markdown, si_bytes
from lowcomm.experiment.config import RunConfig
from lowcomm.experiment.project import pick
from lowcomm.experiment.run_folder import RunFolder
from lowcomm.experiment.train import train_in_threads
from lowcomm.experiment.trainer import Trainer
from lowcomm.model.accounting import parameters, training_flops
from lowcomm.settings import ConfigError
from pipelines.ladder.__main__ import link_rungs, train
from pipelines.ladder.plan import LADDER, Ladder
from pipelines.ladder.tune import tune
from pipelines.ladder.workers import Stopped, Workers
from pipelines.launch import environment, torchrun_command
from pipelines.probes import SCALE
from pipelines.project import BUILD, ROOT
from pipelines.timing import in_turns, wait

#: The archive that travels to the GPU's machine, and the folder in which results are kept.
PACKED, RESULTS = BUILD / "gpu" / "ladder.tar.xz", ROOT / "results" / "gpu"


@dataclasses.dataclass(frozen=True)
class Speed:
    """A model whose training steps are timed, their precision, and whether they are compiled."""

    layers: int
    dim: int
    heads: int
    precision: str = "bf16"
    compiled: bool = False


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much each part does.

    Attributes:
        values: how many fp32 values a codec turns into bytes and back. calls: how often it does, and how often two
            matrices are multiplied.
        product: the rows and columns of these matrices, whose product says how fast the device is.
        rung: the rung of the ladder whose model the parts offload and ranks train. steps: for how many steps.
        small: the rung whose model the part graph trains. small_steps: for how many steps.
        speeds: the models of the part speed. speed_steps: for how many steps each is trained. batch, seq_len: the
            number of sequences of such a step, and of the tokens of a sequence.
    """

    values: int
    calls: int
    product: int
    rung: str
    steps: int
    small: str
    small_steps: int
    speeds: tuple[Speed, ...]
    speed_steps: int
    batch: int
    seq_len: int


FULL = Sizes(
    values=2**27,
    calls=20,
    product=8192,
    rung="35M",
    steps=60,
    small="1.05M",
    small_steps=200,
    speeds=(
        Speed(6, 512, 8, "fp32"),
        Speed(6, 512, 8),
        Speed(6, 512, 8, compiled=True),
        Speed(12, 1024, 16),
        Speed(12, 1024, 16, compiled=True),
        Speed(12, 2048, 16, compiled=True),
    ),
    speed_steps=24,
    batch=16,
    seq_len=1024,
)
SMALL = Sizes(
    values=2**12,
    calls=3,
    product=64,
    rung="smoke",
    steps=12,
    small="smoke",
    small_steps=12,
    speeds=(Speed(2, 32, 2, "fp32"), Speed(2, 32, 2)),
    speed_steps=12,
    batch=4,
    seq_len=32,
)

#: Settings of the short runs: a learning rate that suits all sizes, and no evaluation before the end.
SHORT = {"lr": 0.001, "warmup_steps": 1, "eval_every": 0}
#: Seconds that are kept for writing the checkpoints of points when time is up.
STOPPING_S = 30
#: Small floats that have fused kernels.
CODECS = ("e3m0", "e2m1", "e4m3", "e5m2")


@dataclasses.dataclass(frozen=True)
class Bench:
    """Everything that a part is given to work with.

    It holds the sizes, the ladder, the rungs and rows to tune or train (where no rows are named, all rows of a rung
    are meant), and the moment at which time is up.
    """

    sizes: Sizes
    ladder: Ladder
    rungs: Sequence[str]
    rows: Sequence[str]
    until: float  # in seconds of time.monotonic

    @property
    def device(self) -> torch.device:
        """The device that is measured: a GPU where there is one, else the CPU."""
        return default_device()

    @property
    def data(self) -> Path:
        """The folder of the ladder's corpus."""
        return self.ladder.project.data_dir(next(iter(self.ladder.params["corpora"])), self.sizes.rung)

    def run(self, name: str, *, rung: str = "", **override: Any) -> RunConfig:
        """Return the configuration of a run of the ladder ("diloco/m2"), made short (`sizes.steps`, `SHORT`).

        rung: the scale of its model and batch, by default `sizes.rung`. override: sections, as in `Project.run_config`.
        """
        run, _, variant = name.partition("/")
        train = {"steps": self.sizes.steps, **SHORT} | override.pop("train", {})
        scale = rung or self.sizes.rung
        return self.ladder.project.run_config(run, variant=variant, scale=scale, train=train, **override)


def codecs(bench: Bench) -> dict[str, Any]:
    """Compare the codecs on this device with those on the CPU, and time them beside a copy of the same fp32 values.

    Returns, by codec, whether bytes and values are equal bit for bit, and the median speeds as shares of the copy's.
    """
    found: dict[str, Any] = {}
    draw = torch.Generator().manual_seed(0)
    wide = torch.randn(100_003, generator=draw) * 10 ** (torch.rand(100_003, generator=draw) * 60 - 30)
    zeros = torch.where(torch.rand(100_003, generator=draw) < 0.9, 0.0, wide)
    x = torch.randn(bench.sizes.values, generator=draw).to(bench.device)
    there = torch.empty_like(x)
    for name in CODECS:
        codec = make_codec(name)
        same = True
        for some in (wide, zeros, wide[:255], wide[:1], torch.zeros(513)):
            packed = codec.encode(some)
            away = codec.encode(some.to(bench.device))
            values = codec.decode(away, some.numel()).cpu()
            same &= torch.equal(away.cpu(), packed)
            same &= torch.equal(values.view(torch.int32), codec.decode(packed, some.numel()).view(torch.int32))
        packed = codec.encode(x)
        ways = {"encode": lambda c=codec: c.encode(x), "decode": lambda c=codec, p=packed: c.decode(p, x.numel())}
        shares = {}
        for way, call in ways.items():
            turns = in_turns([lambda: there.copy_(x), call], bench.sizes.calls, bench.device)
            shares[way] = statistics.median(copy / own for copy, own in turns)
        found[name] = {"bit_equal": same, "encode_over_copy": shares["encode"], "decode_over_copy": shares["decode"]}
    return found


def offload(bench: Bench) -> dict[str, Any]:
    """Train Streaming DiLoCo with its outer state on the device and in the CPU's memory, and return what both took."""
    found = {}
    for name, offloaded in (("on the device", False), ("offloaded", True)):
        period = max(2, bench.sizes.steps // 3)
        words = {"train": {"compile": False}, "method": {"offload_outer": offloaded, "sync_every_steps": period}}
        gc.collect()  # what an earlier run held on the device is not this one's
        found[name] = _trained(bench, bench.run("streaming/h30", **words), memory=True)
    return _compared(found)


def graph(bench: Bench) -> dict[str, Any]:
    """Train two replicas of a small model in threads, its passes launched kernel by kernel and as a CUDA graph.

    On a GPU they are trained compiled too, which rounds in another order and so has a loss of its own.
    """

    def trained(**train: Any) -> dict[str, Any]:
        train |= {"steps": bench.sizes.small_steps}
        return _trained(bench, bench.run("diloco/m2", rung=bench.sizes.small, train=train))

    found = _compared({"kernel by kernel": trained(cuda_graph=False), "as a graph": trained()})
    if bench.device.type == "cuda":
        found["compiled, as a graph"] = trained(compile=True)
    return found


def _compared(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return `found`, runs by name, with "bit_equal": whether all have the same validation loss, bit for bit."""
    return found | {"bit_equal": len({run["val_loss"] for run in found.values()}) == 1}


def _trained(bench: Bench, config: RunConfig, *, memory: bool = False) -> dict[str, Any]:
    """Train a run in threads; return its validation loss, the seconds until its first step ended, and those per step.

    The latter are a median, without the first quarter of the steps. memory: whether to return peak memory, in bytes.
    """
    marks: list[float] = []

    def mark(trainer: Trainer, row: dict[str, Any]) -> None:
        if trainer.world.rank == 0:
            wait(bench.device)
            marks.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as out:
        folder = RunFolder.beside(Path(out) / "run")
        begin = time.perf_counter()
        summary = train_in_threads(config, bench.data, folder, on_row=mark)
        times = json.loads((folder.times / "times.json").read_text())
    steps = [after - before for before, after in itertools.pairwise(marks)]
    return {
        "val_loss": summary["val_loss"],
        "first_step_seconds": marks[0] - begin,
        "step_seconds": statistics.median(steps[len(steps) // 4 :]),  # compiled and warm
    } | ({"peak_memory_bytes": times["peak_memory_bytes"]} if memory else {})


def ranks(bench: Bench) -> dict[str, Any]:
    """Train two replicas of DiLoCo as threads and as processes, and with NCCL a replica for each GPU, at most two.

    Without a GPU, NCCL is left out. The losses of threads and processes are compared, bit for bit.
    """
    words = {"train": {"compile": False}, "method": {"sync_every_steps": 2}}
    found = {"threads": _trained(bench, bench.run("diloco/m2", **words))}
    found["processes"] = _under_torchrun(bench, "diloco", "m2", 2)
    gpus = torch.cuda.device_count()
    if gpus:
        found["nccl"] = _under_torchrun(bench, "diloco", "m2" if gpus > 1 else "m1", min(2, gpus), "nccl")
    return found | {"bit_equal": found["threads"]["val_loss"] == found["processes"]["val_loss"]}


def _under_torchrun(bench: Bench, run: str, variant: str, count: int, backend: str = "gloo") -> dict[str, Any]:
    """Train a run of the ladder with a process for each rank; return the ranks, the validation loss and the seconds.

    Raises RuntimeError, with the last line that it has written, where it fails.
    """
    with tempfile.TemporaryDirectory() as out:
        command = torchrun_command(count, "lowcomm.train", run, "--variant", variant, "--scale", bench.sizes.rung)
        command += ["--project", str(bench.ladder.folder), "--data", str(bench.data), "--out", f"{out}/run"]
        settings = {f"train.{key}": value for key, value in SHORT.items()} | {"train.steps": bench.sizes.steps}
        settings |= {"train.compile": "false", "method.sync_every_steps": 2, "comm.backend": backend}
        command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        begin = time.perf_counter()
        with environment({"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{run} with {backend}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        folder = RunFolder.beside(Path(out) / "run")
        loss = folder.read_summary()["val_loss"]
    return {"ranks": count, "val_loss": loss, "seconds": time.perf_counter() - begin}


def speed(bench: Bench) -> dict[str, Any]:
    """Time training steps of models of several sizes, in fp32 and bf16, eager and compiled.

    Returns the FLOP/s of bf16 matrix products, and for each model the tokens/s and its FLOP/s as a share of those.
    """
    n, device = bench.sizes.product, bench.device
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = statistics.median(taken for (taken,) in in_turns([lambda: a @ b], bench.sizes.calls, device))
    peak = 2 * n**3 / seconds
    found: dict[str, Any] = {"product_flops_per_second": peak, "models": []}
    for timed in bench.sizes.speeds:
        shape = {"layers": timed.layers, "dim": timed.dim, "heads": timed.heads, "ffn_dim": 4 * timed.dim}
        train = {"precision": timed.precision, "compile": timed.compiled, "seq_len": bench.sizes.seq_len}
        train |= {"global_batch": bench.sizes.batch, "eval_sequences": bench.sizes.batch}
        train |= {"steps": bench.sizes.speed_steps, "cuda_graph": False}
        config = bench.run("data_parallel/batch", model=shape | {"seq_len": bench.sizes.seq_len}, train=train)
        run = _trained(bench, config)
        flops = training_flops(config.model, bench.sizes.batch, bench.sizes.seq_len)
        row = {"parameters": parameters(config.model).total}
        row |= {"precision": timed.precision, "compiled": timed.compiled}
        row |= {"tokens_per_second": bench.sizes.batch * bench.sizes.seq_len / run["step_seconds"]}
        row |= {"share_of_product": flops / run["step_seconds"] / peak, **run}
        found["models"].append(row)
    return found


@contextlib.contextmanager
def shared_gpu() -> Iterator[None]:
    """Let processes that are started in this context run kernels at once, by NVIDIA's multi-process service.

    Where the service is missing or does not start, they take turns on the whole GPU, of which a kernel of a small model
    fills a few multiprocessors.
    """
    places = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    with contextlib.ExitStack() as stack:
        if control := shutil.which("nvidia-cuda-mps-control"):
            place = tempfile.mkdtemp()  # left where it is, as the service may still write to it when it ends
            stack.enter_context(environment(dict.fromkeys(places, place)))
            if not _told([control, "-d"]):
                stack.close()  # so that nobody looks for it
            else:
                stack.callback(_told, [control], "quit\n")
        yield


def _told(command: list[str], word: str = "") -> bool:
    """Run a command of NVIDIA's multi-process service with `word` as its input; tell whether it has succeeded.

    Where it has not, the error is printed.
    """
    try:
        subprocess.run(command, input=word, text=True, check=True, capture_output=True, timeout=STOPPING_S)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{error}: processes take turns on the GPU", file=sys.stderr, flush=True)
        return False
    return True


class TimeUp(Stopped):
    """Raised where time is up before all is done; the next call goes on with what is left."""


def _while_there_is_time(bench: Bench, work: Callable[[Workers], None]) -> None:
    """Let workers do some work until `STOPPING_S` seconds before time is up; what they have done is kept.

    Where less time than that is left, nothing is done.
    """
    left = bench.until - time.monotonic() - STOPPING_S

    def ring(*_: object) -> None:
        raise TimeUp("time is up")

    if left > 0:
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, left)
        try:
            with shared_gpu(), Workers(STOPPING_S) as workers:
                work(workers)
        except TimeUp as stopped:
            print(stopped, flush=True)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def tuning(bench: Bench) -> dict[str, Any]:
    """Tune rows of the ladder until time is up, at those of the bench's rungs that are tuned themselves.

    Returns, by rung, how many trials there are, those of earlier calls included.
    """
    ladder = bench.ladder
    rungs = [rung for rung in bench.rungs if ladder.plan.rungs[rung].tuned_at == rung]

    def work(workers: Workers) -> None:
        for rung in rungs:
            tune(ladder, rung, workers, bench.rows)

    if rungs:
        _while_there_is_time(bench, work)
    trials = ladder.results / "tuning"
    return {rung: {"trials": sum(1 for _ in (trials / rung).rglob("*.json"))} for rung in rungs}


def points(bench: Bench) -> dict[str, Any]:
    """Train points of the ladder until time is up, rung after rung; return, by rung, how many are done of how many.

    Where no rows are named, those that are not tuned yet, or not predicted, are left out and printed.
    """
    ladder, rows = bench.ladder, {}
    for rung in bench.rungs:
        there, tuned = ladder.plan.rungs[rung].rows, ladder.read_tuned(ladder.plan.rungs[rung].tuned_at)
        wanting = {name: "tuned" for name in there if name not in tuned}
        wanting |= {name: "predicted" for name in ladder.unregistered(rung) if name in tuned}
        if found := bench.rows or [name for name in there if name not in wanting]:
            rows[rung] = found
        for what in ("tuned", "predicted"):
            if not bench.rows and (left := [name for name, lacks in wanting.items() if lacks == what]):
                print(f"{rung}: not {what} yet: {', '.join(left)}", flush=True)

    def work(workers: Workers) -> None:
        for rung, some in rows.items():
            train(ladder, rung, workers, some)

    _while_there_is_time(bench, work)
    done = {rung: [p.read() is not None for p in ladder.results_at(rung, some)] for rung, some in rows.items()}
    return {rung: {"done": sum(some), "of": len(some)} for rung, some in done.items()}


def _table(rows: list[dict[str, Any]]) -> list[str]:
    return markdown(pd.DataFrame(rows)).splitlines()


def _shown_codecs(found: dict[str, Any]) -> list[str]:
    return _table(
        [
            {
                "codec": name,
                "bytes and values of the CPU": "yes" if row["bit_equal"] else "NO",
                "encode, of a copy's speed": f"{row['encode_over_copy']:.2f}",
                "decode, of a copy's speed": f"{row['decode_over_copy']:.2f}",
            }
            for name, row in found.items()
        ]
    )


def _shown_runs(found: dict[str, Any]) -> list[str]:
    rows = [
        {
            "": name,
            "validation loss": f"{row['val_loss']:.6f}",
            "ms per step": f"{1000 * row['step_seconds']:.4g}" if "step_seconds" in row else "",
        }
        | ({"peak memory": si_bytes(row["peak_memory_bytes"])} if "peak_memory_bytes" in row else {})
        for name, row in found.items()
        if isinstance(row, dict)
    ]
    equal = "yes" if found["bit_equal"] else "no"
    return [*_table(rows), "", f"Losses that are compared are equal bit for bit: {equal}."]


def _shown_speed(found: dict[str, Any]) -> list[str]:
    rows = [
        {
            "parameters": f"{row['parameters']:,}",
            "arithmetic": row["precision"] + (", compiled" if row["compiled"] else ""),
            "tokens/s": f"{row['tokens_per_second']:,.0f}",
            "of the products' speed": f"{row['share_of_product']:.0%}",
        }
        for row in found["models"]
    ]
    return [*_table(rows), "", f"Products of bf16 matrices: {found['product_flops_per_second'] / 1e12:.4g} TFLOP/s."]


def _shown_done(found: dict[str, Any]) -> list[str]:
    return _table([{"rung": rung, "points": f"{row['done']} of {row['of']}"} for rung, row in found.items()])


def _shown_trials(found: dict[str, Any]) -> list[str]:
    return _table([{"rung": rung, "trials": row["trials"]} for rung, row in found.items()])


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of what a GPU has to show.

    `measure` does it and returns what it has found, `about` is what the page says below the part's heading, and `show`
    turns what was found into lines of the page. A part that `goes_on` goes on where the last call has stopped, so it is
    called again even if it has been done.
    """

    measure: Callable[[Bench], dict[str, Any]]
    about: str
    show: Callable[[dict[str, Any]], list[str]]
    goes_on: bool = False


PARTS = {
    "codecs": Part(
        codecs,
        "Fused kernels against a copy of the same fp32 values within the device's memory: the copy's time over theirs.",
        _shown_codecs,
    ),
    "offload": Part(
        offload,
        "Streaming DiLoCo with its outer state on the device and in the CPU's memory.",
        _shown_runs,
    ),
    "graph": Part(
        graph,
        "Two replicas of DiLoCo in threads, their passes launched kernel by kernel and replayed as a CUDA graph, whose"
        " losses are compared; and, in measurements since then, compiled before they are captured.",
        _shown_runs,
    ),
    "ranks": Part(
        ranks,
        "Two replicas of DiLoCo as threads and as processes, whose losses are compared; and NCCL with a rank for each"
        " GPU, which with one GPU is one replica, and is not compared.",
        _shown_runs,
    ),
    "speed": Part(
        speed,
        "Training steps, launched kernel by kernel. Their FLOPs are the closed form's, as a share of the rate at which"
        " this device multiplies large bf16 matrices.",
        _shown_speed,
    ),
    "tuning": Part(
        tuning,
        "Trials of the ladder that there are, at the rungs that the last call was asked for.",
        _shown_trials,
        goes_on=True,
    ),
    "points": Part(
        points,
        "Points of the ladder that are done, of those that the last call was asked for.",
        _shown_done,
        goes_on=True,
    ),
}


def pack(ladder: Ladder, packed: Path) -> None:
    """Pack the ladder's shards and probes, without which no point can be trained, into the archive `packed`.

    Raises ConfigError where one of their folders is missing.
    """
    scales = SCALE, ladder.first_rung
    folders = [ladder.project.data_dir(corpus, s) for corpus in ladder.params["corpora"] for s in scales]
    for folder in (folders := [ladder.build / "probes", *folders]):
        if not folder.exists():
            raise ConfigError(f"{folder} is missing: python -m pipelines.ladder prepare")
    packed.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(packed, "w:xz") as archive:
        for folder in folders:
            archive.add(folder, folder.relative_to(ladder.build))
    print(f"{packed}: {si_bytes(packed.stat().st_size)}")


def unpack(ladder: Ladder, packed: Path) -> None:
    """Unpack the archive `packed` into the ladder's build folder, where its probes are not there yet.

    All rungs are linked to the shards. Raises ConfigError where the archive is needed and missing, and where the rungs'
    settings of data differ.
    """
    if not (ladder.build / "probes").exists():
        if not packed.exists():
            raise ConfigError(f"{packed} is missing: `make gpu-pack` makes it, where the ladder has been prepared")
        with tarfile.open(packed) as archive:
            archive.extractall(ladder.build, filter="data")
    link_rungs(ladder)


def device_name() -> str:
    """Return the name of the GPU that computes here, or the machine's type ("x86_64") where there is none."""
    device = default_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def page(results: Path) -> str:
    """Return the page of all devices whose figures are in the folder `results`, as Markdown."""
    parts = ["# On GPUs", "", "Generated by `python -m pipelines.gpu page` from what `make gpu` has measured.", ""]
    for file in sorted(results.glob("*.json")):
        told = json.loads(file.read_text())
        about = f"Python {told['python']}, torch {told['torch']}" + (", sizes of a test" * told["small"])
        parts += [f"## {told['device']}", "", f"{about}.", ""]
        parts += [
            line
            for name, part in PARTS.items()
            if (found := told["parts"].get(name))
            for line in (f"### {name}", "", part.about, "", *part.show(found), "")
        ]
        if lacking := [name for name, part in PARTS.items() if not part.goes_on and not told["parts"].get(name)]:
            parts += [f"Not measured on it yet: {', '.join(lacking)}.", ""]
    return "\n".join(parts).rstrip() + "\n"


def main(argv: list[str] | None = None, ladder: Ladder = LADDER, packed: Path = PACKED, results: Path = RESULTS) -> int:
    """Run the command line `argv`, by default the process's own, and return its exit status; see `--help`.

    It is 1 where a part fails, and where a ConfigError or a signal ends all of it. ladder, packed, results: by default
    this project's.
    """
    parser = argparse.ArgumentParser(prog="python -m pipelines.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", choices=("run", "pack", "page"), default="run")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--rungs", help="of plan.yaml, to tune or train (default: those for a GPU)")
    parser.add_argument("--rows", help="of all of these rungs, to tune or train (default: all rows)")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all of them (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="sizes that say nothing: that all of it runs")
    args, failed = parser.parse_args(argv), False
    try:
        if args.what == "run":
            asked = args.parts.split(",")
            for name in asked:
                pick(PARTS, name, "part")
            those = [name for name, rung in ladder.plan.rungs.items() if rung.gpu]
            rungs = args.rungs.split(",") if args.rungs else those
            rows = args.rows.split(",") if args.rows else []
            for name in rungs:
                ladder.plan.check(name, rows)
            unpack(ladder, packed)
            sizes = SMALL if args.small or default_device().type == "cpu" else FULL
            bench = Bench(sizes, ladder, rungs, rows, time.monotonic() + 60 * args.minutes)
            failed = _run(asked, bench, results, args.small)
        elif args.what == "pack":
            pack(ladder, packed)
        if args.what != "pack":
            results.mkdir(parents=True, exist_ok=True)
            (results / "README.md").write_text(page(results))
    except (ConfigError, Stopped) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return int(failed)


def _run(asked: list[str], bench: Bench, results: Path, redo: bool) -> bool:
    """Run the parts `asked` that this device has not done, or that go on, and write at once what each has found.

    redo: whether to run those that it has done, too. Returns whether one of them has failed.
    """
    failed = False
    file = results / f"{device_name().replace(' ', '-')}.json"
    told: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"parts": {}}
    told |= {"device": device_name(), "python": platform.python_version(), "torch": torch.__version__}
    told["small"] = bench.sizes is SMALL
    results.mkdir(parents=True, exist_ok=True)
    for name in asked:
        if name in told["parts"] and not PARTS[name].goes_on and not redo:
            print(f"{name}: done before", flush=True)
            continue
        if time.monotonic() > bench.until:
            print(f"{name}: no time is left", flush=True)
            continue
        begin = time.perf_counter()
        try:
            if found := PARTS[name].measure(bench):  # nothing where no rung is the part's
                told["parts"][name] = found
        except Stopped:
            raise
        except Exception as error:  # a device that cannot do one part may do the others
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            failed = True
            continue
        file.write_text(json.dumps(told, indent=1) + "\n")
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
