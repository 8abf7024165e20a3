"""A thread that makes calls which may wait for long, so that the caller need not."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Worker:
    """A daemon thread that makes calls one after the other; a call that still waits does not keep the process alive.

    (The threads of a `ThreadPoolExecutor` do: an interpreter that ends waits for them.)
    """

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (asked := self._calls.get()) is not None:
            future, call = asked
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del asked, future, call  # and with them what they hold

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Queue the call `function(*args)` after those submitted before, and return the Future of its result."""
        future: Future[T] = Future()
        self._calls.put((future, functools.partial(function, *args)))
        return future

    def end(self, *, wait: bool = True) -> None:
        """Let the thread end after the calls that were submitted, and wait until it has, unless `wait` is False."""
        self._calls.put(None)
        if wait:
            self._thread.join()
