"""The stages of a replica that comes and goes as a whole: the first leads, the others do as it says.

A replica that is a pipeline has one place in `membership`, held by its first stage: that stage reads and writes the log
and decides. Each stage has parameters of its own, which it exchanges with the same stage of the other replicas. So
whatever the first is asked to do over the wire is an order to the other stages too, and counts as done when all have
done it. Orders go from each stage's socket to the next's, one after the other; a stage that does not answer ends the
replica, as nothing can be had of a pipeline that lacks a part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lowcomm.comm.transport import CommError


class Wire(Protocol):
    """Carries messages between stages by their names, as `lowcomm.comm.elastic.Messenger` does."""

    def send(self, to: str, kind: str, key: tuple[int, ...], payload: bytes) -> None: ...

    def take(
        self, source: str, kind: str, key: tuple[int, ...], *, within_s: float, go_on: Callable[[], bool]
    ) -> bytes: ...


class Stages:
    """One stage among those of a replica.

    Args:
        wire: carries orders and answers.
        names: of all stages on the wire, in order.
        stage: this one.
        within_s: how long an order or an answer may take, in seconds.
        go_on: asked now and then while one is waited for; False where this stage has left.
    """

    def __init__(self, wire: Wire, names: Sequence[str], stage: int, *, within_s: float, go_on: Callable[[], bool]):
        self._wire, self._names, self.stage = wire, names, stage
        self._wait = {"within_s": within_s, "go_on": go_on}
        self._count = 0

    @property
    def leads(self) -> bool:
        """Tell whether this is the stage that decides."""
        return self.stage == 0

    def order(self, what: str, **told: Any) -> None:
        """Give an order, with values that JSON can hold, to all other stages. Raises CommError where one takes none."""
        self._count += 1
        for name in self._names[1:]:
            self._wire.send(name, "order", (self._count,), json.dumps([what, told]).encode())

    def answers(self) -> list[Any]:
        """Return what the other stages answer to the order given last. Raises CommError where one does not."""
        return [json.loads(self._wire.take(name, "answer", (self._count,), **self._wait)) for name in self._names[1:]]

    def end(self, value: Any) -> None:
        """Say what has come of it: that is what the other stages return from `follow`."""
        self.order("end", value=value)

    def fail(self, why: str) -> None:
        """Say that nothing comes of it: `follow` raises CommError with the reason."""
        self.order("fail", why=why)

    def follow(self, does: Mapping[str, Callable[..., Any]]) -> Any:
        """Carry out orders, each by the function of its name, until the first stage says what has come of it.

        Raises CommError where it says that nothing has, or nothing any more.
        """
        while True:
            self._count += 1
            what, told = json.loads(self._wire.take(self._names[0], "order", (self._count,), **self._wait))
            if what == "end":
                return told["value"]
            if what == "fail":
                raise CommError(told["why"])
            answer = json.dumps(does[what](**told))
            self._wire.send(self._names[0], "answer", (self._count,), answer.encode())
