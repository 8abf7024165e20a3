"""Run one case on both transports: as threads here, or as processes.

A case is a function `case(world, folder) -> JSON` in `tests/cases.py`.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from lowcomm.comm.config import CommConfig
from lowcomm.comm.start import run_threads, world_from_torchrun
from lowcomm.comm.testbed import Testbed
from lowcomm.comm.wire import VirtualClock
from lowcomm.settings import ConfigError
from pipelines.ladder.plan import Ladder
from pipelines.launch import environment, process_context
from pipelines.project import ROOT, write_whole


class Crash(RuntimeError):
    """The error that tests raise in the midst of a run, which they then resume."""


def as_threads(case: str, replicas: int, folder: Path, *, stages: int = 1, **comm: Any) -> list[Any]:
    """Return the results of a case in rank order, each of which has been through JSON."""
    from tests import cases

    work = getattr(cases, case)
    results = run_threads(lambda w: work(w, folder), replicas=replicas, stages=stages, comm=CommConfig(**comm))
    return json.loads(json.dumps(results))


def train_in_processes(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `lowcomm.train` to its end, a process for each rank; keep its output, and leave its exit status unchecked."""
    return Group(command, *words, ranks=ranks).wait()


def command(*words: str) -> None:
    """Do what `python -m lowcomm.train` does with these words."""
    from lowcomm.train import main

    sys.exit(main(list(words)))


def _context() -> BaseContext:
    """Return how the tests' processes start: with an environment that has nothing of pytest's."""
    with environment(clean_environment()):
        return process_context("lowcomm.train", "torch._dynamo", "pipelines.ladder.positions", "tests.cases")


class Group:
    """Processes that do the same work: one; or one for each of `ranks`, which find what torchrun would have told them.

    Nobody ends the others when one fails, as torchrun would, so each has the time to say what it noticed. `store`: the
    port of a store that is there already.
    """

    def __init__(
        self, work: Callable[..., None], *args: Any, ranks: int | None = None, store: int | None = None, **more: str
    ) -> None:
        self._said = tempfile.NamedTemporaryFile("r")  # noqa: SIM115, as it is read at their end
        self.processes = []
        if ranks is not None:
            if store is None:
                self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                store = self._store.port
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store)}
            more |= meeting | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
            more |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        for rank in range(ranks or 1):
            mine = {} if ranks is None else {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            wanted = clean_environment(**more, **mine)
            self.processes.append(
                _context().Process(target=_begin, args=(self._said.name, wanted, work, args), daemon=True)
            )
            with environment(wanted):  # which a process that starts anew inherits
                self.processes[-1].start()

    @property
    def is_alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def wait(self, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        """Wait for their end; return an exit status that is not 0, if one has it, and all that they wrote.

        Those that have not ended in time are killed.
        """
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
        late = self.is_alive
        self.kill(*self.processes)
        text = self.said()
        assert not late, f"no end in {timeout} s: {text}"
        status = next((p.exitcode for p in self.processes if p.exitcode), 0)
        return subprocess.CompletedProcess([], status, text, text)

    def said(self) -> str:
        """Return what the processes have written since the last call."""
        return self._said.read()

    def kill(self, *processes: BaseProcess) -> None:
        """Send SIGKILL to some of the processes, and wait for their end."""
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _begin(said: str, wanted: dict[str, str], work: Callable[..., None], args: tuple[Any, ...]) -> None:
    """The first that a process does."""
    os.environ |= wanted
    with Path(said).open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    work(*args)


class ForkingTestbed(Testbed):
    """A testbed on which `python -m MODULE` is forked by a server that has imported torch, as the ranks of `Group` are.

    As on any, each node has its own network and its own /sys.
    """

    def _begin(
        self, namespace: str, words: Sequence[str], environment: dict[str, str], **popen: Any
    ) -> subprocess.Popen | _Forked:
        if list(words[:2]) == [sys.executable, "-m"]:
            return _Forked(namespace, environment, words[2:], **popen)
        return super()._begin(namespace, words, environment, **popen)


#: Held by the thread that asks after a forked process: of two that ask at once, one would be told a status of 255.
_asking = threading.Lock()


class _Forked:
    """A module that runs in a process of its own in a namespace, with what is used of a `subprocess.Popen`."""

    stdin = stderr = stdout = None

    def __init__(
        self,
        namespace: str,
        wanted: dict[str, str],
        words: Sequence[str],
        *,
        stdout: Any = None,
        stderr: int | None = None,
        text: bool = False,
        start_new_session: bool = False,
    ) -> None:
        assert stderr in (None, subprocess.STDOUT)
        with tempfile.TemporaryDirectory() as folder:
            said = os.devnull if stdout is None else f"{folder}/said" if stdout == subprocess.PIPE else stdout.name
            if stdout == subprocess.PIPE:
                os.mkfifo(said)
            args = (said, wanted, _run_module, (namespace, words, start_new_session))
            self._process = _context().Process(target=_begin, args=args, daemon=True)
            with _asking:  # as who starts a process asks after all others
                self._process.start()
            if stdout == subprocess.PIPE:
                self.stdout = open(said, "r" if text else "rb")  # noqa: SIM115, as whoever started it closes it
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with _asking:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        wait([self._process.sentinel], timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked module", timeout)
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str | bytes, None]:
        said = self.stdout.read()
        self.wait(timeout)
        return said, None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_CLONE_NEWNS, _MS_SLAVE_AND_BELOW = 0x20000, 0x84000


def _run_module(namespace: str, words: Sequence[str], new_session: bool) -> None:
    """Enter a namespace and run a module with its words there, as `ip netns exec NAMESPACE python -m WORDS` does."""
    if new_session:
        os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as there:
        entered = [libc.setns(there.fileno(), 0), libc.unshare(_CLONE_NEWNS)]
    entered.append(libc.mount(b"none", b"/", None, _MS_SLAVE_AND_BELOW, None))
    entered.append(libc.mount(namespace.encode(), b"/sys", b"sysfs", 0, None))
    if any(entered):
        raise OSError(ctypes.get_errno(), f"no way into the namespace {namespace}: {entered}")
    sys.argv = list(words)
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


class OnlyTheLink(VirtualClock):
    """A virtual clock on which computing takes no time but what a test adds to `time`, so that tests can be exact."""

    def __init__(self) -> None:
        self.time = 0.0
        super().__init__()

    def now(self) -> float:
        return self.time

    def settle(self, entered: float, finished: float) -> None:
        self.time = max(entered, finished)


#: Scales of a small ladder, whose points take a second: the probes' smoke, and the rungs a, b and c, each larger.
SCALES = """
scale: a
corpora:
  rows: {source: json, path: rows.jsonl}
scales:
  smoke: &small
    model: &model {dim: 8, layers: 2, heads: 2, ffn_dim: 16, vocab_size: 300, seq_len: 16}
    data: {vocab_size: 300, validation_percent: 10, tuning_percent: 10}
    train: &train
      {steps: 8, global_batch: 4, seq_len: 16, lr: 0.01, warmup_steps: 2, eval_every: 0, eval_sequences: 8}
    checkpoint: {every_steps: 5}
    sizes: {ladder: {base: {}}}
  a:
    <<: *small
    train: {<<: *train, steps: 12}
  b:
    <<: *small
    model: {<<: *model, dim: 16}
    train: {<<: *train, steps: 16}
  c:
    <<: *small
    model: {<<: *model, dim: 32}
"""


def small_ladder(folder: Path, build: Path, methods: str, plan: str) -> Ladder:
    """Write a ladder with a corpus of its own into an empty folder. methods: of its params.yaml, and the runs."""
    ladder = Ladder(folder / "ladder", build, folder / "results")
    ladder.folder.mkdir()
    rows = [{"text": f"row {i} counts {i * i} things, {i % 7} of them anew, in plain words"} for i in range(600)]
    (ladder.folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (ladder.folder / "params.yaml").write_text(SCALES + methods)
    (ladder.folder / "plan.yaml").write_text(plan)
    return ladder


def as_if_predicted(ladder: Ladder) -> None:
    """Let rungs that take what was tuned at another be trained."""
    told = {name: {"rows": {row: {} for row in rung.rows}} for name, rung in ladder.plan.rungs.items()}
    write_whole(ladder.results / "predictions.yaml", json.dumps(told))


def clean_environment(**more: str) -> dict[str, str]:
    """This environment without PYTHONWARNINGS=error and the like, so that children see only what is theirs."""
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | more


def as_processes(case: str, replicas: int, folder: Path, *, stages: int = 1, **comm: Any) -> list[Any]:
    """As `as_threads`, in processes; if one fails, all that they wrote is raised."""
    ranks = replicas * stages
    done = Group(run_case, case, replicas, stages, folder, comm, ranks=ranks).wait()
    if done.returncode:
        raise RuntimeError(done.stdout)
    return [json.loads((folder / f"{case}-{r}.json").read_text()) for r in range(ranks)]


def run_case(case: str, replicas: int, stages: int, folder: Path, comm: dict[str, Any]) -> None:
    """One rank of `as_processes`."""
    from tests import cases

    world = world_from_torchrun(replicas=replicas, stages=stages, comm=CommConfig(**comm))
    try:
        result = getattr(cases, case)(world, folder)
    except Exception as error:
        print(f"rank {world.rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        world.transport.abort(str(error))
        os._exit(3)
    (folder / f"{case}-{world.rank}.json").write_text(json.dumps(result))
    world.close()


def refused(ask: Callable[..., object], *args: object) -> str:
    """Call a function that must raise a ConfigError, and return the error's message."""
    with pytest.raises(ConfigError) as error:
        ask(*args)
    return str(error.value)


def in_threads(*bodies: Callable[[], object]) -> list:
    """Run some functions at once, each in a thread, and return what they return, within a minute.

    Raises what one of them raises.
    """
    found: list = [None] * len(bodies)
    raised: list[BaseException] = []

    def run(i: int) -> None:
        try:
            found[i] = bodies[i]()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 60
    while any(thread.is_alive() for thread in threads) and not raised and time.monotonic() < end:
        time.sleep(0.01)
    if raised:
        raise raised[0]
    assert not any(thread.is_alive() for thread in threads)
    return found
