"""Notes in a store that all ranks reach: short texts by name, which do not travel with payloads.

A store (torchrun's, say) is on one machine, which may be frozen or its link cut; a store's own time-outs do not hold
then. So a thread makes the calls, and whoever waits for an answer goes on without one after a while.
"""

from __future__ import annotations

import atexit
import json
import math
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol


class KeyValueStore(Protocol):
    """The methods of `torch.distributed.Store` that `Notes` needs."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


_Call = Callable[[KeyValueStore], str | None]
_Asked = tuple[Future[str | None], _Call]


#: Seconds after which one that makes a connection is given up for another. It may look up the name of an address first,
#: which takes a while where nobody answers that.
_MADE_WITHIN_S = 30.0

_open: weakref.WeakSet[Notes] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all Notes: a thread that comes back from a store's code while the interpreter ends would abort it."""
    there = list(_open)
    for notes in there:
        notes.close(wait=False)
    for notes in there:
        notes.close()


class Notes:
    """Short texts by name in a store, written and read without waiting long for a store that does not answer.

    Args:
        store: the store, over a connection that nothing else uses, as notes are read while other calls block.
        within_s: for how many seconds an answer is waited for.
        port: the store's port, 0 where it is unknown; kept for callers who tell others of it.
        here: this machine's address on the network by which it reaches the store; kept for callers too.
        connect: makes another connection to the same store. Where it is given, a connection that does not answer is
            left to itself: after a link was down, TCP waits about as long again before it tries an old one. A store
            that was started anew in the place of the first, without its notes, counts as one that does not answer.
    """

    def __init__(
        self,
        store: KeyValueStore,
        within_s: float,
        *,
        port: int = 0,
        here: str = "127.0.0.1",
        connect: Callable[[], KeyValueStore] | None = None,
    ):
        self._within_s, self.port, self.here, self._connect = within_s, port, here, connect
        self._late: Future[str | None] | None = None  # what has not been answered in time
        self._store_is: str | None = None
        self._made: tuple[object, float, float] = (None, 0.0, 0.0)  # whose connection was made last, from when to when
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._is_closed, self._until = False, 0.0
        self._begin(lambda: store)
        _open.add(self)

    def _begin(self, connect: Callable[[], KeyValueStore]) -> None:
        """Start the thread that makes all calls from now on, over the connection that `connect` returns."""
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._answer, args=(connect, self._asked), name="notes", daemon=True)
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
        thread.start()

    def close(self, *, wait: bool = True) -> None:
        """Make no more calls to the store, and wait for those under way, at most a second longer than each may take.

        wait: False to return at once. From now on no note is written, and none has an answer.
        """
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                now = time.monotonic()
                _, begin, end = self._made
                self._until = max(now + self._within_s, begin + _MADE_WITHIN_S if end > now else 0.0) + 1
                self._asked.put(None)
            threads = list(self._threads) if wait else []
        for thread in threads:
            thread.join(max(0.0, self._until - time.monotonic()))

    def _answer(self, connect: Callable[[], KeyValueStore], asked: queue.SimpleQueue[_Asked | None]) -> None:
        store = None
        while (found := asked.get()) is not None:
            future, call = found
            if self._is_closed:
                future.set_result(None)
                continue
            try:
                if store is None:
                    begin = time.monotonic()
                    self._made = (asked, begin, math.inf)
                    made = connect()
                    self._made = (asked, begin, time.monotonic())
                    store = self._known(made)
                future.set_result(call(store))
            except RuntimeError:  # the store's own process is gone, or cannot be reached
                store, connect = None, self._connect or connect
                future.set_result(None)

    def _known(self, store: KeyValueStore) -> KeyValueStore:
        """Return `store` if it is the store of the first call. Raises RuntimeError where another has its address."""
        if self._connect is not None:
            there = store.compare_set("lowcomm/store", "", uuid.uuid4().hex).decode()
            self._store_is = self._store_is or there
            if there != self._store_is:
                raise RuntimeError("this is another store")
        return store

    def _ask(self, call: _Call) -> str | None:
        """Return what `call` returns for the store; None if that takes too long, and it may then still happen later."""
        future: Future[str | None] = Future()
        now = time.monotonic()
        with self._lock:
            if self._is_closed:
                return None
            asked = self._asked
            asked.put((future, call))
        try:
            return future.result(self._within_s)
        except TimeoutError:
            if self._connect is None:
                self._late = future
                return None
            whose, begin, end = self._made
            if whose is asked and end > now and time.monotonic() < begin + _MADE_WITHIN_S:
                return None  # it is the connection that took so long, not the store
            with self._lock:
                if self._asked is asked and not self._is_closed:
                    asked.put(None)
                    self._begin(self._connect)
            return None

    def _is_waiting(self) -> bool:
        return self._late is not None and not self._late.done()

    def write(self, key: str, value: str) -> None:
        """Write a note; where the store does not answer in time, it may be written later, or never."""
        self._ask(lambda store: store.set(f"lowcomm/{key}", value))

    def write_once(self, key: str, value: str) -> str | None:
        """Write a note if there is none yet, and return the one that is there now.

        Return None where the store does not answer; the note may then still be written later.
        """
        if self._is_waiting():
            return None
        return self._ask(lambda store: store.compare_set(f"lowcomm/{key}", "", value).decode())

    def read(self, key: str) -> str | None:
        """Return a note; None where there is none, or the store does not answer."""
        return self.look(key) or None

    def look_all(self, keys: list[str]) -> list[str] | None:
        """Return all notes of `keys`, in that order.

        Return None where one of them is missing, the store does not answer, or it cannot give several at once.
        """
        names = [f"lowcomm/{key}" for key in keys]

        def call(store: KeyValueStore) -> str | None:
            if not hasattr(store, "multi_get") or not store.check(names):
                return None
            return json.dumps([value.decode() for value in store.multi_get(names)])

        found = None if self._is_waiting() else self._ask(call)
        return None if found is None else json.loads(found)

    def look(self, key: str) -> str | None:
        """Return a note; "" where there is none, None where the store does not answer.

        Without `connect`, return None at once while an earlier call is still unanswered.
        """
        if self._is_waiting():
            return None
        name = f"lowcomm/{key}"
        return self._ask(lambda store: store.get(name).decode() if store.check([name]) else "")
