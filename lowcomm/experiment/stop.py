"""Stopping together: ranks agree on the step after which all of them stop.

Replicas talk rarely, so a rank that is told to stop (SIGTERM, or its launcher is gone) cannot just leave. A
watcher beside each rank sees the request, its own or a peer's note, and publishes the step that its rank
has begun; everybody stops after the latest of those. A rank that waits inside a step for
a peer has begun it, so nobody is left waiting.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import torch

from lowcomm.comm.transport import CommError
from lowcomm.comm.world import World
from lowcomm.experiment import LAUNCHER_VARIABLE

#: Set when this process should stop: by SIGTERM, or by a notebook.
requested = threading.Event()
_POLL_S = 0.1
_OWN_NOTE_S = 10.0  # by when a rank reads its own note, if there is anything that keeps it


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C request a stop, inside; a later Ctrl-C raises KeyboardInterrupt. Main thread only."""

    def interrupted(*_: object) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()

    handlers = {signal.SIGTERM: lambda *_: requested.set(), signal.SIGINT: interrupted}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _launcher_is_gone(parent: int) -> bool:
    """Tell whether the launcher of this rank has ended; `parent`: the process id that the rank's parent had."""
    pid = os.environ.get(LAUNCHER_VARIABLE)
    if pid is None:
        return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != parent
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, PermissionError):  # gone, its number perhaps somebody else's by now
        return True
    return False


class StopAgreement:
    """One rank's part in the agreement on the step after which all ranks stop; it watches from its construction on.

    Args:
        world: the ranks that stop together.
        timeout_s: how long to wait for their answers, in seconds.
        on_request: called once, on the watcher's thread, when there is a request, to end what may keep this rank from
            its next step for long.
    """

    def __init__(self, world: World, timeout_s: float = 60.0, *, on_request: Callable[[], None] = lambda: None):
        self.world, self.timeout_s, self._on_request = world, timeout_s, on_request
        self._begun = 0
        self._published = False
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._parent = os.getppid()
        self._thread = threading.Thread(target=self._watch, name=f"stop-{world.rank}", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        transport = self.world.transport
        while not self._done.wait(_POLL_S):
            if requested.is_set() or _launcher_is_gone(self._parent) or transport.read("stop") is not None:
                transport.note("stop", "requested")
                with self._lock:
                    transport.note(f"stop/{self.world.rank}", str(self._begun))
                    self._published = True
                self._on_request()
                return

    @property
    def is_requested(self) -> bool:
        """Tell whether some rank has been told to stop, as far as this rank can see."""
        return self._published or self.world.transport.read("stop") is not None

    def before(self, step: int) -> bool:
        """Announce that inner step `step` begins, and tell whether the ranks have agreed to stop before it.

        Raises CommError where a stop is requested and some rank does not answer in time.
        """
        with self._lock:
            if not self._published:
                self._begun = step
                return False
        return step > self._last_step()

    def _last_step(self) -> int:
        asked = time.monotonic()
        while True:
            begun = [self.world.transport.read(f"stop/{r}") for r in range(self.world.size)]
            if None not in begun:
                return max(map(int, begun))
            if begun[self.world.rank] is None and time.monotonic() > asked + _OWN_NOTE_S:
                raise CommError(f"rank {self.world.rank} was told to stop, but the store of its launcher is gone")
            if time.monotonic() > asked + self.timeout_s:
                silent = [r for r, b in enumerate(begun) if b is None]
                raise CommError(f"rank {self.world.rank} wants to stop, but ranks {silent} do not answer")
            time.sleep(_POLL_S / 10)

    def close(self) -> None:
        """End the watcher: no request is passed on after this."""
        self._done.set()
        self._thread.join()


def stop_between_runs(world: World) -> bool:
    """Tell whether any rank has been told to stop. Every rank must call it, and all get the same answer."""
    told = requested.is_set() or world.transport.read("stop") is not None
    return bool(world.sum(torch.tensor([float(told)], device=world.device), purpose="stop", axis="world"))
