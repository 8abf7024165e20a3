"""The stages of a replica that comes and goes as a whole: the first leads, and the others carry out its orders.

A replica that is a pipeline has one place in `membership`, held by its first stage: that stage reads and writes the log
and decides. Each stage has parameters of its own, which it exchanges with the same stage of the other replicas. So
whatever the first does over the wire is an order to the other stages too, and counts as done when all have done it.
The first stage sends orders to the others one after the other; a stage that does not answer ends the replica, as a
pipeline that lacks a part is of no use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lowcomm.comm.transport import CommError


class Wire(Protocol):
    """A carrier of messages between stages, addressed by name: the part of `lowcomm.comm.elastic.Messenger` used."""

    def send(self, to: str, kind: str, key: tuple[int, ...], payload: bytes) -> None: ...

    def take(
        self, source: str, kind: str, key: tuple[int, ...], *, within_s: float, go_on: Callable[[], bool]
    ) -> bytes: ...


class Stages:
    """One stage of a replica among all of its stages: the first gives orders, the others follow.

    Args:
        wire: carries the orders and the answers.
        names: the names of all stages on the wire, in order.
        stage: the index of this one, from 0.
        within_s: for how many seconds there may be no sign of a stage whose order or answer is awaited.
        go_on: called now and then during such a wait, which ends with CommError where it returns False.
    """

    def __init__(self, wire: Wire, names: Sequence[str], stage: int, *, within_s: float, go_on: Callable[[], bool]):
        self._wire, self._names, self.stage = wire, names, stage
        self._wait = {"within_s": within_s, "go_on": go_on}
        self._count = 0

    @property
    def leads(self) -> bool:
        """Tell whether this is the first stage, which gives the orders."""
        return self.stage == 0

    def order(self, what: str, **told: Any) -> None:
        """Give all other stages the order `what`, with arguments that JSON can hold.

        Raises CommError where a stage does not take it.
        """
        self._count += 1
        for name in self._names[1:]:
            self._wire.send(name, "order", (self._count,), json.dumps([what, told]).encode())

    def answers(self) -> list[Any]:
        """Wait for the other stages' answers to the last order and return them in the stages' order.

        Raises CommError where a stage does not answer.
        """
        return [json.loads(self._wire.take(name, "answer", (self._count,), **self._wait)) for name in self._names[1:]]

    def end(self, value: Any) -> None:
        """End the orders with a result that JSON can hold, which the other stages return from `follow`."""
        self.order("end", value=value)

    def fail(self, why: str) -> None:
        """End the orders with a failure: the other stages' `follow` raises CommError with the reason."""
        self.order("fail", why=why)

    def follow(self, does: Mapping[str, Callable[..., Any]]) -> Any:
        """Carry out the first stage's orders until it ends them, and return the result that it gives.

        does: functions by the names of the orders, called with the orders' arguments; what they return is the answer.
        Raises CommError where the first stage says that it has failed, or says nothing any more.
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
