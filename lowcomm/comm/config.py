"""Settings of the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CommConfig:
    """The wire. None of it may change a loss, but `reduction`: the backend's own adds in its own order."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"  # of processes
    reduction: Literal["ordered", "native"] = "ordered"
    clock: Literal["real", "virtual"] = "real"
    link_mbit_per_s: float = 0.0  # 0: as fast as it goes
    link_latency_ms: float = 0.0
    timeout_s: float = 300.0
    trace: bool = False
