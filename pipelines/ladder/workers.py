"""Workers of the ladder: processes that train one point after the other, with its ranks as threads.

There is one for each core, or there are several that share a GPU. What is done is written at once (`Point.file`), so
that a kill at any moment costs no finished point; what is under way goes on from its last checkpoint, on the same
machine. A worker that is told to stop (by SIGTERM or Ctrl-C, or as its parent is gone) writes a checkpoint first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import time
from collections.abc import Generator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from lowcomm.codecs.bits import NotFinite
from lowcomm.comm.start import default_device
from lowcomm.experiment import LAUNCHER_VARIABLE, SAVING_S
from lowcomm.experiment.claim import clear
from lowcomm.experiment.run_folder import RunFolder
from lowcomm.experiment.source import source_digest
from pipelines.ladder.plan import Point
from pipelines.launch import KEEP_MEMORY, cores, environment, keep_to_core, process_context
from pipelines.project import write_whole

#: A generator that yields points one by one, is sent their outcomes, and returns the tasks that can begin after it.
Task = Generator[Point, dict[str, Any], list[Any]]


#: The most processes that NVIDIA's multi-process service lets share a GPU of any kind.
MOST_ON_GPU = 16


class Stopped(RuntimeError):
    """Raised where the workers are told to stop; what is done is kept."""


class Failed(RuntimeError):
    """Raised where points fail, once all others are done."""


def folder_of(point: Point) -> RunFolder:
    """Return the folder of a point's run, which is there until the point is done."""
    inner = point.ladder.results.name / point.file.relative_to(point.ladder.results).with_suffix("")
    return RunFolder(point.ladder.build / "runs" / inner, point.ladder.build / "times" / inner)


def can_compile() -> bool:
    """Tell whether torch finds a compiler: with a GPU it brings its own, else it takes that of CXX, by default g++."""
    return default_device().type == "cuda" or shutil.which(os.environ.get("CXX", "g++")) is not None


def train_point(point: Point, *, compiled: bool = True) -> dict[str, Any] | None:
    """Train a point in this process, write its outcome and return it; None if it was told to stop before its end.

    A trial whose values are not finite any more has the loss None, and "diverged" says where. Raises NotFinite where a
    result diverges, and ConfigError where the corpus here is not that of the points.

    compiled: whether what its settings say is compiled, where there is a compiler (`can_compile`); that changes how the
    run rounds, as another device does.
    """
    from lowcomm.experiment.train import train_in_threads
    from pipelines.ladder.positions import has_positions, loss_by_position

    if origin := point.ladder.origin:
        origin.check(point.ladder, point.config.data.corpus)
    config = point.config
    if config.train.compile and not (compiled and can_compile()):
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, compile=False))
    folder, begin, made_from = folder_of(point), time.perf_counter(), point.made_from()
    if folder.made_with != source_digest():
        clear(folder)
    outcome: dict[str, Any] = {"row": point.row.name, "rung": point.rung, "seed": point.seed}
    outcome |= {"values": dict(point.values), "made_from": made_from}
    try:
        summary = train_in_threads(config, point.data, folder, again=True)
    except NotFinite as error:
        if not point.is_trial:
            raise
        outcome |= {"val_loss": None, "diverged": str(error)}
    else:
        if not summary["complete"]:
            return None
        loss = summary["val_loss"]
        outcome["val_loss"] = loss if math.isfinite(loss) else None
        kept = ("train_loss", "tokens", "parameters", "sent_bytes", "peak_step_bytes", "environment")
        outcome |= {key: summary[key] for key in kept}
        if config.train.compile:
            outcome["environment"] |= {"compiled": True}
        if not point.is_trial:
            outcome["curve"] = curve(folder.read()["rows"])
            if has_positions(point.config):
                outcome["loss_by_position"] = loss_by_position(point.config, point.data, folder.model)
    times = folder.times / "times.json"  # which a run that has been stopped, and goes on, carries on
    seconds = json.loads(times.read_text())["seconds"] if times.exists() else time.perf_counter() - begin
    outcome["seconds"] = round(seconds, 1)
    write_whole(point.file, json.dumps(outcome, indent=1) + "\n")  # before what it was made of goes
    shutil.rmtree(folder.out, ignore_errors=True)
    shutil.rmtree(folder.times, ignore_errors=True)
    return outcome


def curve(rows: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return the training loss in up to 32 parts of a run, as (last step of the part, its mean loss) for each."""
    ends = sorted({-(-len(rows) * part // 32) for part in range(1, 33)})
    parts = [rows[begin:end] for begin, end in itertools.pairwise([0, *ends])]
    return [(part[-1]["step"], round(statistics.mean(row["loss"] for row in part), 5)) for part in parts]


def one_by_one(points: Sequence[Point], workers: Workers) -> None:
    """Train points, none of which depends on another. Raises RuntimeError as `Workers.run` does."""

    def one(point: Point) -> Task:
        yield point
        return []

    workers.run([one(point) for point in points])


def _work(pipe: Connection, wanted: dict[str, str], compiled: bool) -> None:
    """Train the points that come through a pipe, until None comes; send back (outcome, error), "" for no error.

    The variables of `wanted` are set first: the server that forks this process has the environment of its own start.
    """
    os.environ |= wanted
    from lowcomm.experiment.stop import requested, stopping_on_signals

    with stopping_on_signals(), contextlib.suppress(EOFError, OSError):
        while not requested.is_set() and (point := pipe.recv()) is not None:
            try:
                pipe.send((train_point(point, compiled=compiled), ""))
            except Exception as error:  # told to the parent, which ends all
                pipe.send((None, f"{type(error).__name__}: {error}"))


class Workers:
    """The processes that train points: one for each core, or for three of four where there is a GPU that they share.

    They are started when the first point is to be trained. Use this in a `with` statement, which ends them.

    stopping_s: the seconds that they have to write checkpoints when that ends. compiled: as in `train_point`.
    """

    def __init__(self, stopping_s: float = SAVING_S, *, compiled: bool = True) -> None:
        self._stopping_s, self._compiled = stopping_s, compiled
        self._pipes: list[Connection] = []
        self._idle: list[Connection] = []
        self._busy: dict[Connection, tuple[Task, Point]] = {}
        self._processes: list[BaseProcess] = []

    def _start(self) -> None:
        count, words = cores(), {"OMP_NUM_THREADS": "1", LAUNCHER_VARIABLE: str(os.getpid())}
        if shutil.which("nvidia-smi"):  # some cores are left for what compiles kernels and for the driver
            count, words = max(1, min(3 * count // 4, MOST_ON_GPU)), words | {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
        with environment(KEEP_MEMORY | words):
            context = process_context("lowcomm.experiment.train", "torch._dynamo", "pipelines.ladder.positions")
            for number in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, words, self._compiled))
                process.start()
                if count == cores():
                    keep_to_core(process.pid, number)
                theirs.close()
                self._pipes.append(ours)
                self._idle.append(ours)
                self._processes.append(process)

    def __enter__(self) -> Workers:
        def stop(*_: Any) -> None:
            raise Stopped("told to stop")

        self._before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for pipe in self._pipes:  # all: it may have been told to stop while a worker was between two points
            with contextlib.suppress(OSError):  # a worker that has died
                pipe.send(None)
        if self._busy or kind is not None:
            for process in self._processes:
                if process.is_alive():
                    process.terminate()  # the worker writes a checkpoint
        until = time.monotonic() + self._stopping_s
        while self._busy and (told := wait(list(self._busy), max(0.0, until - time.monotonic()))):
            for pipe in told:
                _, point = self._busy.pop(pipe)
                with pipe, contextlib.suppress(RuntimeError):  # it was told to stop; or it was done before, and is kept
                    self._tell(point, self._received(pipe, point))
        for pipe in self._busy:
            pipe.close()  # nobody reads what is left in it
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()

    def run(self, tasks: Sequence[Task]) -> None:
        """Do tasks and those that they return, one point of each at a time, as many at once as there are workers.

        The first tasks begin first, and one that has begun goes before one that has not. A point that is done is not
        trained again. Where a point fails, its task ends and the others go on.

        Raises:
            Failed: points have failed; it says which and why, line by line.
            Stopped: the workers are told to stop.
            RuntimeError: a worker has died.
        """
        begun: list[tuple[Task, dict[str, Any]]] = []
        waiting, failures = list(tasks), []
        while begun or waiting or self._busy:
            while (begun or waiting) and (self._idle or not self._processes):
                task, told = begun.pop(0) if begun else (waiting.pop(0), None)
                try:
                    point = task.send(told)
                except StopIteration as end:
                    waiting += end.value
                    continue
                if (known := point.read()) is not None:
                    begun.append((task, known))
                    continue
                if not self._processes:
                    self._start()
                pipe = self._idle.pop()
                self._busy[pipe] = (task, point)
                pipe.send(point)
            for pipe in wait(list(self._busy)) if self._busy else []:
                task, point = self._busy[pipe]
                try:
                    outcome = self._received(pipe, point)
                except Failed as failure:
                    failures.append(str(failure))
                else:
                    self._tell(point, outcome)
                    begun.append((task, outcome))
                del self._busy[pipe]
                self._idle.append(pipe)
        if failures:
            raise Failed("\n".join(failures))

    @staticmethod
    def _tell(point: Point, outcome: dict[str, Any]) -> None:
        loss = "diverged" if outcome["val_loss"] is None else f"{outcome['val_loss']:.4f}"
        print(f"{point.title}: {loss} ({outcome['seconds']:.0f} s)", flush=True)

    @staticmethod
    def _received(pipe: Connection, point: Point) -> dict[str, Any]:
        try:
            outcome, error = pipe.recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError(f"{point.title}: its worker has died") from None
        if error:
            raise Failed(f"{point.title}: {error}")
        if outcome is None:
            raise Stopped(f"{point.title} was told to stop")
        return outcome
