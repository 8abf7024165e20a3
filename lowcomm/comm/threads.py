"""Ranks as threads of one process: a transport without torch.distributed."""

from __future__ import annotations

import queue
import threading

import torch
from torch import Tensor

from lowcomm.comm.transport import CommError, Consume, Expected, Incoming, Outgoing


class ThreadHub:
    """The mailboxes, the notes and the reason of an abort that the ranks of one process share.

    Attributes: `aborted`, the reason of the first abort, "" where there was none.
    """

    def __init__(self, size: int, timeout_s: float):
        self.size, self.timeout_s = size, timeout_s
        self._boxes: dict[tuple[int, int, int], queue.SimpleQueue] = {}
        self._notes: dict[str, str] = {}
        self._lock = threading.Lock()
        self.aborted = ""

    def box(self, src: int, dst: int, channel: int) -> queue.SimpleQueue:
        """Return the mailbox of messages from one rank to another on a channel, which is made if there is none."""
        with self._lock:
            return self._boxes.setdefault((src, dst, channel), queue.SimpleQueue())

    def note(self, key: str, value: str) -> None:
        """Write a note for all ranks."""
        self._notes[key] = value

    def read(self, key: str) -> str | None:
        """Return a note; None where there is none."""
        return self._notes.get(key)

    def abort(self, reason: str) -> None:
        """Make every swap that waits for a message, now or later, raise CommError with the first reason given."""
        with self._lock:
            self.aborted = self.aborted or reason
            boxes = list(self._boxes.values())
        for box in boxes:  # wake everyone who waits
            box.put(None)


class ThreadTransport:
    """The transport of ranks that are threads of one process: for a notebook, a test, many replicas on one GPU."""

    in_one_process = True

    def __init__(self, hub: ThreadHub, rank: int):
        self.hub, self.rank, self.size = hub, rank, hub.size

    def swap(
        self,
        channel: int,
        out: list[Outgoing],
        into: list[Incoming],
        *,
        buffered: bool = False,
        bare: bool = False,
        consume: Consume | None = None,
        direct: bool = False,
        expected: Expected | None = None,
    ) -> None:
        taken = []
        for dst, header, payload in out:
            # A copy, because the sender may change its tensor before the receiver looks.
            copy = payload.clone()
            made = torch.cuda.current_stream(copy.device).record_event() if copy.is_cuda else None
            self.hub.box(self.rank, dst, channel).put((header, copy, made))
        for src, _, accept in into:
            box = self.hub.box(src, self.rank, channel)  # before the check: an abort wakes the boxes it finds
            if self.hub.aborted:
                raise CommError(self.hub.aborted)
            try:
                message = box.get(timeout=self.hub.timeout_s)
            except queue.Empty:
                raise CommError(f"no word from rank {src} in {self.hub.timeout_s:g} s") from None
            if message is None:
                raise CommError(self.hub.aborted)
            header, payload, made = message
            if made is not None:  # each rank's wire has a stream of its own
                stream = torch.cuda.current_stream(payload.device)
                stream.wait_event(made)
                payload.record_stream(stream)
            buffer = accept(None if bare else header)
            if consume:
                taken.append(payload)
            elif buffer.numel():
                buffer.copy_(payload.view(buffer.shape))
        if consume:
            consume(0, taken[0].numel(), taken)

    def expect(
        self, channel: int, into: list[tuple[int, Tensor | None]], *, bare: bool = False, direct: bool = False
    ) -> Expected:
        return None  # memory is near enough

    def note(self, key: str, value: str) -> None:
        self.hub.note(key, value)

    def read(self, key: str) -> str | None:
        return self.hub.read(key)

    def abort(self, reason: str) -> None:
        self.hub.abort(reason)

    def close(self) -> None: ...
