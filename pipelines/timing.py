"""The seconds that calls take on a device, side by side: each in its turn, so that a drifting machine slows all."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def wait(device: torch.device) -> None:
    """Wait for what has been queued on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that a call takes on a device, from an empty queue to an empty queue."""
    wait(device)
    begin = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - begin


def in_turns(calls: list[Callable[[], object]], times: int, device: torch.device) -> list[tuple[float, ...]]:
    """Make some calls one after the other, `times` times, after two turns that warm up; return each turn's seconds."""
    turns = [tuple(seconds(call, device) for call in calls) for _ in range(times + 2)]
    return turns[2:]
