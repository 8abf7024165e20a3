"""The settings of communication between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowcomm.settings import check_bounds, number


@dataclass(frozen=True)
class CommConfig:
    """The settings of communication between ranks.

    None of them may change a loss but `reduction`: "native" is the backend's own, which adds in an order of its own.
    """

    backend: Literal["auto", "gloo", "nccl"] = "auto"  # of processes; "auto": nccl where each rank has a GPU of its own
    reduction: Literal["ordered", "native"] = "ordered"
    clock: Literal["real", "virtual"] = "real"
    link_mbit_per_s: float = number(0.0, at_least=0)  # 0: unlimited
    link_latency_ms: float = number(0.0, at_least=0)
    timeout_s: float = number(300.0, above=0, at_most=1e6)
    trace: bool = False

    def __post_init__(self) -> None:
        check_bounds("comm", self)
