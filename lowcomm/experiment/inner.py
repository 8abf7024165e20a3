"""The inner optimizer of a run, by name (`methods.inner`), and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lowcomm.choices import choose
from lowcomm.experiment.config import TrainConfig
from lowcomm.methods.inner import InnerOptimizer


def inner_optimizer(
    trained: Mapping[str, Tensor], t: TrainConfig, mean_dims: Mapping[str, int] | None = None
) -> torch.optim.Optimizer:
    """Make the optimizer of `train.optimizer`; arguments as for `InnerOptimizer.of`."""
    return choose(InnerOptimizer, t.optimizer, "train.optimizer").of(trained, t, mean_dims)


def learning_rate(step: int, t: TrainConfig, peak: float | None = None) -> float:
    """Return the inner learning rate of a step (1 to `train.steps`): linear warm-up, then decay as `train.decay` says.

    Unless that is "constant", it ends at `train.final_lr_fraction` of the peak. peak: by default `train.lr`.
    """
    peak = t.lr if peak is None else peak
    if step <= t.warmup_steps:
        return peak * step / t.warmup_steps
    if t.decay == "constant":
        return peak
    done = (step - t.warmup_steps) / max(1, t.steps - t.warmup_steps)
    shape = 1 - done if t.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return peak * (t.final_lr_fraction + (1 - t.final_lr_fraction) * shape)


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, t: TrainConfig) -> float:
    """Set the learning rate of a step (from 1) in all parameter groups, and return the one whose peak is `train.lr`.

    A group that has a `peak_lr` follows the same shape to and from that peak.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, t, group.get("peak_lr"))
    return learning_rate(step, t)
