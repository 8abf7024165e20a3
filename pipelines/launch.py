"""Start a training run from a notebook or a script, watch it live, and fail when it fails.

`launch` runs `pipelines.forked` (torchrun's agent) as a child, shows a progress bar and the loss while it trains, and
raises LaunchError with the tail of the log if any rank fails. If the launcher dies, the ranks notice, write a
checkpoint and stop. `launch_all` trains a sweep, as many runs side by side as there are cores for. Pipelines, and runs
of more ranks than there are cores, have a core each and a thread for each rank: they come to the same bits in half to
two thirds of the time that processes take, which would wait for each other.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from lowcomm.experiment import LAUNCHER_VARIABLE, SAVING_S
from lowcomm.experiment.claim import clear
from lowcomm.experiment.project import overrides
from lowcomm.experiment.run_folder import RunFolder
from lowcomm.experiment.source import sha256, source_digest
from lowcomm.settings import ConfigError
from pipelines.project import BUILD, PROJECT, ROOT, data_dir, run_config, run_points, runs_dir

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from multiprocessing.context import BaseContext
    from multiprocessing.sharedctypes import Synchronized

    from lowcomm.experiment.config import RunConfig

#: glibc gives large blocks back to the system after each step and faults them in anew; keeping them saves a tenth.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(2**25)}


@contextlib.contextmanager
def environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process, which children inherit, until the context ends; then restore them."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ |= wanted
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def process_context(*modules: str) -> BaseContext:
    """Return the multiprocessing context whose processes are forked by a server that has imported these modules.

    To import torch takes seconds of a core. The server is started by the first call, with the environment that there is
    then, and is the same for the whole process. Where there are GPUs, processes are started anew instead.
    """
    if shutil.which("nvidia-smi"):
        return multiprocessing.get_context("spawn")
    multiprocessing.set_forkserver_preload(list(modules))
    forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def torchrun_command(ranks: int, module: str, *words: str) -> list[str]:
    """Return the command that runs a module, with `words`, under torchrun: on this machine, a process for each rank."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*torchrun, "-m", module, *words]


class LaunchError(RuntimeError):
    """Raised where a run fails, with the tail of its log, and where jobs or their folders do not allow it to begin."""


def curve_svg(losses: list[tuple[int, float]], steps: int) -> str:
    """Return the losses so far, (step, loss) of a run of `steps`, as a small inline SVG; "" for fewer than two."""
    width, height = 480, 90  # in pixels
    if len(losses) < 2:
        return ""
    low, high = min(v for _, v in losses), max(v for _, v in losses)
    span = (high - low) or 1.0
    points = " ".join(f"{s / steps * width:.1f},{(high - v) / span * (height - 4) + 2:.1f}" for s, v in losses)
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<polyline points="{points}" fill="none" stroke="#0072B2" stroke-width="1.5"/></svg>'
    )


class _Live:
    """The display of a run's progress: a bar and a curve in a notebook, a bar with the loss in a terminal."""

    def __init__(self, title: str, steps: int):
        self.title, self.steps = title, steps
        self.losses: list[tuple[int, float]] = []
        self._display = None
        try:
            from IPython import get_ipython
            from IPython.display import HTML, display

            if get_ipython() is not None and get_ipython().__class__.__name__ == "ZMQInteractiveShell":
                self._html = HTML
                self._display = display(HTML(html.escape(title)), display_id=True)
        except ImportError:
            pass
        self._bar = tqdm(total=steps, desc=title, disable=self._display is not None, mininterval=1.0)

    def show(self, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        self.losses += [(r["step"], r["loss"]) for r in rows]
        step, loss = self.losses[-1]
        if self._display is None:
            self._bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            self._bar.update(step - self._bar.n)
            return
        stride = max(1, len(self.losses) // 240)
        self._display.update(
            self._html(
                f"<div>{html.escape(self.title)}: step {step} of {self.steps}, loss {loss:.3f}</div>"
                f'<progress value="{step}" max="{self.steps}" style="width:480px"></progress><br>'
                + curve_svg(self.losses[::stride], self.steps)
            )
        )

    def close(self) -> None:
        self._bar.close()


class Tail:
    """A reader of a growing JSON-lines file, which takes each line as soon as it is whole."""

    def __init__(self, path: Path):
        self.path, self._at = path, 0

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows that the file has gained since the last call.

        Where it is missing, or shorter than what was read of it, there are none, and the next call begins anew.
        """
        if not self.path.exists() or self.path.stat().st_size < self._at:
            self._at = 0
            return []
        with self.path.open() as file:
            file.seek(self._at)
            text = file.read()
        end = text.rfind("\n") + 1
        self._at += len(text[:end].encode())
        return [json.loads(line) for line in text[:end].splitlines()]


def _told(lines: list[str]) -> str:
    """Return the last 30 lines that the ranks wrote, without torchrun's own account of their deaths."""
    ends = (i for i, line in enumerate(lines) if "torch/distributed/elastic" in line and "failed (exitcode" in line)
    ranks = [line for line in lines[: next(ends, None)] if "torch/distributed/run.py" not in line]
    return "\n".join((ranks or lines)[-30:])


@dataclass(frozen=True)
class Job:
    """A run to train: its configuration, its folder, its corpus, and the settings that it overrides, "key=value"."""

    config: RunConfig
    folder: RunFolder
    data: Path
    overridden: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run, as they stand in a summary."""
        return self.config.to_dict()

    @property
    def words(self) -> list[str]:
        """Return the words of the command line with which `lowcomm.train` trains it."""
        c = self.config
        words = [c.name, "--scale", c.scale, "--seed", str(c.seed), "--data", str(self.data)]
        words += ["--out", str(self.folder.out), "--times", str(self.folder.times)]
        return (
            words + (["--variant", c.variant] if c.variant else []) + [w for s in self.overridden for w in ("--set", s)]
        )


def make_job(
    run: str,
    *,
    variant: str = "",
    seed: int | None = None,
    scale: str | None = None,
    settings: Sequence[str] = (),
    out: Path | None = None,
    times: Path | None = None,
    data: Path | None = None,
) -> Job:
    """Make the job of one point of a run of params.yaml.

    Args:
        run, variant, seed, scale: as in `Project.run_config`.
        settings: overrides like "train.steps=60".
        out, times, data: the folders of the run, of what depends on the machine, and of the corpus; by default the
            run's own under build/.

    Raises ConfigError for bad settings.
    """
    config = run_config(run, variant=variant, seed=seed, scale=scale, **overrides(list(settings)))
    own = PROJECT.run_folder(config)
    data = data or data_dir(config.data.corpus, config.scale)
    return Job(config, RunFolder(out or own.out, times or own.times), data, tuple(settings))


@dataclass(frozen=True, eq=False)
class _Part:
    """Jobs that one process, or one `pipelines.forked`, trains in turn.

    ranks: the number of processes for each job; 0 where its ranks are threads.
    """

    jobs: list[Job]
    ranks: int
    log_path: Path

    def start(self) -> subprocess.Popen:
        module = ["pipelines.forked", str(self.ranks)] if self.ranks else ["lowcomm.train"]
        jobs = self.log_path.with_suffix(".jobs.json")
        command = [sys.executable, "-m", *module, "--jobs", str(jobs)]
        environment = os.environ | KEEP_MEMORY | {"OMP_NUM_THREADS": "1", LAUNCHER_VARIABLE: str(os.getpid())}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        jobs.write_text(json.dumps([job.words for job in self.jobs]))
        with self.log_path.open("w") as log:
            streams = {"stdout": log, "stderr": subprocess.STDOUT}
            return subprocess.Popen(command, env=environment, start_new_session=True, **streams)

    def check(self, returncode: int) -> None:
        """Raise LaunchError where the process failed, or ended before all of its jobs were trained."""
        missing = [job.config.title for job in self.jobs if not job.folder.summary.exists()]
        if returncode or missing:
            told = _told(self.log_path.read_text().splitlines())
            title = missing[0] if missing else self.jobs[-1].config.title
            what = f"failed with exit code {returncode}" if returncode else "was stopped before its end"
            raise LaunchError(f"{title} {what}; {self.log_path}:\n{told}")


def _train(parts: list[_Part]) -> None:
    """Train all parts side by side, and show the progress of one job at a time.

    Where a part fails, the others write their checkpoints and stop. Raises LaunchError for it.
    """
    children, live = [], None
    try:
        for number, part in enumerate(parts):
            children.append(part.start())
            if not part.ranks:
                keep_to_core(children[-1].pid, number)
        rows = zip_longest(*([(job, child) for job in part.jobs] for part, child in zip(parts, children, strict=True)))
        watched = [pair for row in rows for pair in row if pair is not None]
        for number, (job, child) in enumerate(watched, 1):
            if _failed(children):
                break
            count = f" ({number} of {len(watched)})" if len(watched) > 1 else ""
            live = _Live(job.config.title + count, job.config.train.steps)
            tail = Tail(job.folder.losses(job.settings))
            while child.poll() is None and not job.folder.summary.exists() and not _failed(children):
                time.sleep(0.1)
                live.show(tail.rows())
            live.show(tail.rows())
            live.close()
        while any(child.poll() is None for child in children) and not _failed(children):
            time.sleep(0.1)
        failed = _failed(children)
    finally:
        if live is not None:
            live.close()
        _stop([child for child in children if child.poll() is None])
    for part, child in zip(parts, children, strict=True):
        if child in (failed or children):
            part.check(child.returncode)


def _failed(children: list[subprocess.Popen]) -> list[subprocess.Popen]:
    return [child for child in children if child.poll()]


def _stop(children: list[subprocess.Popen]) -> None:
    """Tell processes to stop, so that their ranks write checkpoints; kill those that take too long."""
    for child in children:
        child.send_signal(signal.SIGTERM)
    for child in children:
        try:
            child.wait(SAVING_S + 10)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_to_core(pid: int, number: int) -> None:
    """Keep a process that has just begun to one of the cores that this one may use: the `number`-th, from 0.

    The first follows the last. pid: 0 for this process. Threads that wake each other at every message do so on one core
    for less than half the price of two. Where the system has no such choice, or the process has ended, nothing is done.
    """
    if hasattr(os, "sched_setaffinity"):
        available = sorted(os.sched_getaffinity(0))
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            os.sched_setaffinity(pid, {available[number % len(available)]})


def _keep_to_next_core(taken: Synchronized) -> None:
    with taken.get_lock():
        number, taken.value = taken.value, taken.value + 1
    keep_to_core(0, number)


def pool_of_cores() -> ProcessPoolExecutor:
    """Return a pool of processes that are started anew: one for each core, to which the process keeps."""
    context = multiprocessing.get_context("spawn")
    taken = context.Value("i", 0)
    return ProcessPoolExecutor(cores(), mp_context=context, initializer=_keep_to_next_core, initargs=(taken,))


def _work(job: Job) -> int:
    """Estimate how long a job takes, counted in steps of all its ranks."""
    return job.config.ranks * job.config.train.steps


def _dealt(jobs: list[Job], sides: int) -> list[list[Job]]:
    """Deal jobs out to so many lists of about equal work: the longest first, each to the list that has the least."""
    dealt: list[list[Job]] = [[] for _ in range(sides)]
    for job in sorted(jobs, key=_work, reverse=True):
        min(dealt, key=lambda side: sum(map(_work, side))).append(job)
    return dealt


def _side_by_side(jobs: list[Job]) -> list[tuple[int, list[list[Job]]]]:
    """Divide jobs into shares, which are trained one after the other, and each share into sides, trained side by side.

    Returns, for each share, the number of processes for each job (0 where its ranks are threads), and the jobs of each
    side, which are trained in turn. A job in threads has one core: those that would leave a core idle are trained as
    processes. Where there are GPUs, one job after the other has them all.
    """
    gpus, available, shares = shutil.which("nvidia-smi"), cores(), []
    waiting = [job for job in jobs if not gpus and (job.config.stages > 1 or job.config.ranks > available)]
    threads = sorted(waiting, key=_work)[: len(waiting) // available * available]
    for ranks in sorted({job.config.ranks for job in jobs if job not in threads}):
        equal = [job for job in jobs if job.config.ranks == ranks and job not in threads]
        shares.append((ranks, _dealt(equal, 1 if gpus else max(1, available // ranks))))
    return [*shares, (0, _dealt(threads, available))] if threads else shares


def _clear(job: Job, source: str, *, keep: bool) -> None:
    """Remove what an earlier run left in a job's folder, unless `keep` is true and code of digest `source` has made it.

    Raises ConfigError where nothing says of which run it is, and LaunchError where there are files of no run.
    """
    job.folder.check_own()
    if found := job.folder.strangers():
        raise LaunchError(f"{job.folder.out} holds {', '.join(found[:5])}, which no run puts there: choose another one")
    if job.folder.made_with != source:
        if job.folder.checkpoints.exists():
            print(f"{job.config.title}: the source has changed since its checkpoint was written; starting over")
        keep = False
    if not keep:
        clear(job.folder)


def launch(run: str, **named: Any) -> dict[str, Any]:
    """Train one point of a run of params.yaml, with a process for each rank, and return its summary.

    Args: those of `make_job`.

    An interrupted run continues from its checkpoint, unless the source has changed since: then it starts over and says
    so. A finished run is trained anew. Raises LaunchError with the tail of the log where a rank fails, ConfigError for
    bad settings.
    """
    return launch_in_turn([make_job(run, **named)])[0]


def launch_in_turn(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Train jobs one after the other, in the same processes, otherwise as `launch` does, and return their summaries.

    Raises as `launch` does, and LaunchError where the jobs have different numbers of ranks.
    """
    if len(ranks := {job.config.ranks for job in jobs}) != 1:
        raise LaunchError(f"what is trained in turn must have equally many ranks, got {sorted(ranks)}")
    source = source_digest()
    for job in jobs:
        _clear(job, source, keep=not job.folder.summary.exists())
    _train([_Part(list(jobs), *ranks, jobs[0].folder.times / "log.txt")])
    return [job.folder.read_summary() for job in jobs]


#: The file in a run's folder for times while `launch_all` trains it: a line per point, of the digests of source, corpus
#: and settings.
_UNFINISHED = "unfinished"


def _digest(config: RunConfig) -> str:
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()


def launch_all(
    run: str,
    *,
    scale: str | None = None,
    settings: Sequence[str] = (),
    out: Path | None = None,
    data: Path | None = None,
) -> list[dict[str, Any]]:
    """Train all variants and seeds of a run, and return their summaries in order.

    As many are trained at once as there are cores for their ranks, each a process; where there are GPUs, one at a time.
    Pipelines, and runs of more ranks than there are cores, have a core each and a thread for each rank, as long as no
    core is idle.

    Args: those of `make_job`; `out` holds a folder for each variant and seed.

    What an earlier call left is trained anew, unless that call was interrupted and source, corpus and the settings of a
    point are the same: then this one goes on where it stopped. Variants and seeds that the run no longer has are
    removed, and named. Raises as `launch` does, and LaunchError where `out` holds other runs.
    """
    points = run_points(run, scale=scale, **overrides(list(settings)))
    scale = points[0].scale
    root = out or runs_dir(run, scale)
    corpus = data or data_dir(points[0].data.corpus, scale)
    jobs = [Job(config, PROJECT.run_folder(config, out), corpus, tuple(settings)) for config in points]
    times = RunFolder.beside(out).times if out else BUILD / "times" / scale / "runs" / run
    _clear_others(root, times, run, {job.folder.out for job in jobs})
    card = corpus / "card.json"
    source = source_digest()
    text = sha256(card) if card.exists() else "no corpus"
    made_from = {job: f"{source} {text} {_digest(job.config)}" for job in jobs}
    marker = times / _UNFINISHED
    begun = set(marker.read_text().splitlines()) if marker.exists() else set()
    for job in jobs:
        usable = job.folder.is_complete(job.settings, source) or not job.folder.summary.exists()
        _clear(job, source, keep=made_from[job] in begun and usable)
    times.mkdir(parents=True, exist_ok=True)
    marker.write_text("".join(f"{line}\n" for line in made_from.values()))
    for processes, sides in _side_by_side(jobs):
        parts = []
        for index, side in enumerate(sides):
            todo = [job for job in side if not job.folder.summary.exists()]
            log = times / f"log-{processes or 'threads'}-{index}.txt"
            if todo:
                parts.append(_Part(todo, processes, log))
        _train(parts)
    marker.unlink()
    return [job.folder.read_summary() for job in jobs]


def _named(folder: RunFolder) -> str | None:
    """Return the name of the run whose summary is in a folder; None where there is no summary, or a damaged one."""
    try:
        summary = folder.read_summary()
    except ConfigError:
        return None
    return None if summary is None else summary["run"].get("name")


def _clear_others(root: Path, times: Path, run: str, own: set[Path]) -> None:
    """Remove the folders of variants and seeds that a run no longer has, and print their names.

    A folder that neither a summary nor a digest of the source shows to be a run's is left alone. Raises LaunchError
    where `root` holds folders of another run.
    """
    begun = {root / mark.parent.relative_to(times) for mark in times.rglob(RunFolder(root, times).source.name)}
    others = (begun | {mark.parent for mark in root.rglob("summary.json")}) - own
    found = {folder: RunFolder(folder, times / folder.relative_to(root)) for folder in others if folder.exists()}
    named = {folder: _named(f) for folder, f in found.items()}
    if foreign := sorted(str(folder.relative_to(root)) for folder, name in named.items() if name not in (run, None)):
        raise LaunchError(f"{root} holds runs that are none of {run}'s: {', '.join(foreign)}; choose another folder")
    for gone, folder in found.items():
        if gone not in begun and named[gone] is None:
            continue
        print(f"{gone.relative_to(root)} is no variant and seed of {run} any more: removed")
        clear(folder)
        for empty in (gone, gone.parent):
            if empty != root and not any(empty.iterdir()):
                empty.rmdir()
