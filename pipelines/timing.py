"""Timing of calls on a device, which take turns, so that a machine whose speed drifts slows all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def wait(device: torch.device) -> None:
    """Wait until a GPU has done all work that is queued on it; return at once for another device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that a call takes on a device, from an empty queue until the queue is empty again."""
    wait(device)
    begin = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - begin


def in_turns(calls: list[Callable[[], object]], times: int, device: torch.device) -> list[tuple[float, ...]]:
    """Make some calls one after the other, `times` times, and return the seconds of each call in each turn.

    Two turns more go before, which warm up and are not returned.
    """
    turns = [tuple(seconds(call, device) for call in calls) for _ in range(times + 2)]
    return turns[2:]
