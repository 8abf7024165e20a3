"""Run one case on both transports: as threads here, or as processes.

A case is a function `case(world, folder) -> JSON` in `tests/cases.py`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from lowcomm.comm.config import CommConfig
from lowcomm.comm.start import run_threads, world_from_torchrun
from lowcomm.comm.wire import VirtualClock
from pipelines.project import ROOT


class Crash(RuntimeError):
    """What tests raise in the midst of a run, to resume it."""


def as_threads(case: str, replicas: int, folder: Path, *, stages: int = 1, **comm: Any) -> list[Any]:
    """Results of a case in rank order, each having been through JSON."""
    from tests import cases

    work = getattr(cases, case)
    results = run_threads(lambda w: work(w, folder), replicas=replicas, stages=stages, comm=CommConfig(**comm))
    return json.loads(json.dumps(results))


def train_in_processes(ranks: int, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`lowcomm.train` to its end; output is captured, the exit status not checked."""
    return subprocess.run(forked_command(ranks, *words), env=clean_environment(**environment), **_CAPTURE)


_CAPTURE: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 240, "check": False}


class OnlyTheLink(VirtualClock):
    """A virtual clock on which computing takes no time but what a test adds to `time`, so that tests can be exact."""

    def __init__(self) -> None:
        self.time = 0.0
        super().__init__()

    def now(self) -> float:
        return self.time

    def settle(self, entered: float, finished: float) -> None:
        self.time = max(entered, finished)


def forked_command(ranks: int, *words: str) -> list[str]:
    return [sys.executable, "-m", "pipelines.forked", str(ranks), *words]


def torchrun_command(ranks: int, *words: str) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*torchrun, "-m", "lowcomm.train", *words]


def clean_environment(**more: str) -> dict[str, str]:
    """This environment without PYTHONWARNINGS=error and the like, so that children see only what is theirs."""
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | more


def as_processes(case: str, replicas: int, folder: Path, *, stages: int = 1, **comm: Any) -> list[Any]:
    """As `as_threads`, in processes; if one fails, all that they wrote is raised.

    Nobody ends the others when one fails, as torchrun would, so each has the time to say what it noticed.
    """
    ranks = replicas * stages
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    words = [sys.executable, "-m", "tests.harness", case, str(replicas), str(stages), str(folder), json.dumps(comm)]
    group = subprocess.Popen(
        words,
        env=clean_environment(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), **meeting),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = group.communicate(timeout=240)[0]
    except BaseException:  # too late, or interrupted: no rank is left behind
        os.killpg(group.pid, signal.SIGKILL)
        raise
    if group.returncode:
        raise RuntimeError(said)
    return [json.loads((folder / f"{case}-{r}.json").read_text()) for r in range(ranks)]


def _rank(case: str, replicas: str, stages: str, folder: str, comm: str) -> None:
    """One rank of `as_processes`."""
    from tests import cases

    world = world_from_torchrun(replicas=int(replicas), stages=int(stages), comm=CommConfig(**json.loads(comm)))
    try:
        result = getattr(cases, case)(world, Path(folder))
    except Exception as error:
        print(f"rank {world.rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        world.transport.abort(str(error))
        os._exit(3)
    (Path(folder) / f"{case}-{world.rank}.json").write_text(json.dumps(result))
    world.close()


def _forked(words: list[str]) -> int:
    """All ranks, forked from this process, which has imported torch already; nonzero if one fails."""
    context = multiprocessing.get_context("spawn" if torch.cuda.device_count() else "fork")
    started = []
    for rank in range(int(os.environ["WORLD_SIZE"])):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(context.Process(target=_rank, args=words))
        started[-1].start()
    for process in started:
        process.join()
    return int(any(p.exitcode for p in started))


if __name__ == "__main__":
    sys.exit(_forked(sys.argv[1:]))
