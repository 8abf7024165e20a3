"""Notes in a store that all ranks reach: short texts by name, which do not travel with payloads.

A store (torchrun's, say) is on one machine, which may be frozen or its link cut; a store's own time-outs do not hold
then. So a thread asks it, and whoever waits for the answer goes on without one after a while.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol


class KeyValueStore(Protocol):
    """What `torch.distributed.Store` has of what is needed here."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class Notes:
    """Notes in a store.

    Args:
        store: with a connection of its own, as notes are read while other calls block.
        within_s: how long an answer is waited for, in seconds.
        port: of the store, for whoever is to tell others of it.
        here: this machine's address on the network by which it reaches the store.
    """

    def __init__(self, store: KeyValueStore, within_s: float, *, port: int = 0, here: str = "127.0.0.1"):
        self._store, self._within_s, self.port, self.here = store, within_s, port, here
        self._asked: queue.SimpleQueue[tuple[Future[str | None], Callable[[], str | None]]] = queue.SimpleQueue()
        self._last: Future[str | None] | None = None
        threading.Thread(target=self._answer, name="notes", daemon=True).start()

    def _answer(self) -> None:
        while True:
            future, call = self._asked.get()
            try:
                future.set_result(call())
            except RuntimeError:  # the store's own process is gone
                future.set_result(None)

    def _ask(self, call: Callable[[], str | None]) -> str | None:
        """What the call returns; None where that takes too long. It is carried out even so, when the store is back."""
        self._last = future = Future()
        self._asked.put((future, call))
        try:
            return future.result(self._within_s)
        except TimeoutError:
            return None

    def _is_waiting(self) -> bool:
        return self._last is not None and not self._last.done()

    def write(self, key: str, value: str) -> None:
        """Leave a note."""
        self._ask(lambda: self._store.set(f"lowcomm/{key}", value))

    def write_once(self, key: str, value: str) -> str | None:
        """Leave a note where there is none yet, and return the one that is there now; None where nobody answers."""
        if self._is_waiting():
            return None
        return self._ask(lambda: self._store.compare_set(f"lowcomm/{key}", "", value).decode())

    def read(self, key: str) -> str | None:
        """A note; None where there is none, or no answer, for which nobody waits twice."""
        return self.look(key) or None

    def look(self, key: str) -> str | None:
        """A note; "" where there is none, None where nobody answers."""
        if self._is_waiting():
            return None
        name = f"lowcomm/{key}"
        return self._ask(lambda: self._store.get(name).decode() if self._store.check([name]) else "")
