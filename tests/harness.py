"""Run one case on both transports: as threads here, or as processes.

A case is a function `case(world, folder) -> JSON` in `tests/cases.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from lowcomm.config import ROOT, CommConfig
from lowcomm.ranks import run_threads, world_from_torchrun


class Crash(RuntimeError):
    """What tests raise in the midst of a run, to resume it."""


def as_threads(case: str, replicas: int, folder: Path, *, stages: int = 1, **comm: Any) -> list[Any]:
    """Results of a case in rank order, each having been through JSON."""
    from tests import cases

    work = getattr(cases, case)
    results = run_threads(lambda w: work(w, folder), replicas=replicas, stages=stages, comm=CommConfig(**comm))
    return json.loads(json.dumps(results))


def torchrun(ranks: int, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `torchrun -m ...` to its end; output is captured, the exit status not checked."""
    return subprocess.run(torchrun_command(ranks, *words), env=clean_environment(**environment), **_CAPTURE)


_CAPTURE: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 240, "check": False}


def torchrun_command(ranks: int, *words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", *words]


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
    count = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    words = [sys.executable, "-m", "tests.harness", case, str(replicas), str(stages), str(folder), json.dumps(comm)]
    started = [
        subprocess.Popen(
            words,
            env=clean_environment(RANK=str(rank), LOCAL_RANK=str(rank), **count, **meeting),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = "".join(p.communicate(timeout=240)[0] for p in started)
    finally:
        for process in started:
            process.kill()
            process.wait()
    if any(p.returncode for p in started):
        raise RuntimeError(said)
    return [json.loads((folder / f"{case}-{r}.json").read_text()) for r in range(ranks)]


if __name__ == "__main__":
    from tests import cases

    name, replicas_, stages_, folder_, comm_ = sys.argv[1:]
    world = world_from_torchrun(replicas=int(replicas_), stages=int(stages_), comm=CommConfig(**json.loads(comm_)))
    try:
        result = getattr(cases, name)(world, Path(folder_))
    except Exception as error:
        print(f"rank {world.rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        world.transport.abort(str(error))
        os._exit(3)
    (Path(folder_) / f"{name}-{world.rank}.json").write_text(json.dumps(result))
    world.close()
