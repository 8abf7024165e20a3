"""Inner optimizers: what a replica takes its own steps with.

    adamw, sgd    of all parameters
    muon          Muon of the matrices inside blocks, AdamW of the rest (`muon`)

With one replica and an outer optimizer, AdamW inside is SNOO (Kallusky et al., 2025, arXiv:2510.15830): an outer
optimizer without other replicas.

To add an inner optimizer, write a file in this folder with a class that derives from `InnerOptimizer` and has `names`.
The settings that it alone needs, such as a rate, are fields of `TrainConfig`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from lowcomm.choices import Choice
from lowcomm.methods.config import MethodConfig
from lowcomm.methods.subspace import RowAdamW


class InnerSettings(Protocol):
    """The settings of `TrainConfig` that inner optimizers read.

    Rates are the peaks, from which `set_learning_rate` makes the rate of each step.
    """

    lr: float
    muon_lr: float
    muon_momentum: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class InnerOptimizer(Choice, ABC):
    """An optimizer of the parameters that a replica trains.

    Attributes:
        moments: how many values it keeps per value of a parameter.
    """

    moments: ClassVar[int] = 2

    @classmethod
    @abstractmethod
    def of(
        cls, trained: Mapping[str, Tensor], t: InnerSettings, mean_dims: Mapping[str, int] | None = None
    ) -> torch.optim.Optimizer:
        """Make the optimizer; weight decay applies to matrices alone.

        Args:
            trained: parameters by name, those inside blocks as a `Decoder` names them.
            t: the settings. Groups with a rate of their own have it as `peak_lr`.
            mean_dims: the `mean_dim` of `subspace.RowAdamW` for each matrix that has one, by name.
        """

    @classmethod
    def check(cls, t: InnerSettings, method: MethodConfig) -> None:
        """Raise ConfigError where the settings or the method do not go with this optimizer."""

    @classmethod
    def fewer_moments(cls, shapes: Mapping[str, Sequence[int]]) -> int:
        """Return how many values the optimizer spares of parameters of these shapes, by name.

        By default it spares none, and keeps `moments` per value of every parameter.
        """
        return 0

    @classmethod
    def step_flops(cls, shapes: Mapping[str, Sequence[int]]) -> int:
        """Return the FLOPs of the matrix products in a step on parameters of these shapes, by name.

        By default there are none: what is done value by value is not counted.
        """
        return 0


class SGD(InnerOptimizer):
    """Stochastic gradient descent without momentum."""

    names = ("sgd",)
    moments = 0

    @classmethod
    def of(
        cls, trained: Mapping[str, Tensor], t: InnerSettings, mean_dims: Mapping[str, int] | None = None
    ) -> torch.optim.Optimizer:
        """Return SGD, whatever the `mean_dims`, as it has no second moment."""
        return torch.optim.SGD(_groups(trained, t), lr=t.lr)


class AdamW(InnerOptimizer):
    """AdamW, fused unless parameters are sharded; matrices with a mean dimension have means as second moments."""

    names = ("adamw",)

    @classmethod
    def of(
        cls, trained: Mapping[str, Tensor], t: InnerSettings, mean_dims: Mapping[str, int] | None = None
    ) -> torch.optim.Optimizer:
        """Return AdamW, or `RowAdamW` where a matrix has a mean dimension."""
        told = {"lr": t.lr, "betas": (t.beta1, t.beta2), "eps": t.eps}
        groups = _groups(trained, t, mean_dims)
        if any("mean_dim" in group for group in groups):
            return RowAdamW(groups, **told)
        fused = not any(hasattr(p, "device_mesh") for p in trained.values())
        return torch.optim.AdamW(groups, fused=fused, **told)


def _groups(
    trained: Mapping[str, Tensor], t: InnerSettings, mean_dims: Mapping[str, int] | None = None
) -> list[dict[str, object]]:
    """Return parameter groups: matrices, vectors, and then those matrices that have a mean dimension, by dimension."""
    matrices: dict[int | None, list[Tensor]] = {None: []}
    for name, p in trained.items():
        if p.dim() >= 2:
            matrices.setdefault((mean_dims or {}).get(name), []).append(p)
    vectors = [p for p in trained.values() if p.dim() < 2]
    plain = {"params": matrices.pop(None), "weight_decay": t.weight_decay}
    means = [{"params": some, "weight_decay": t.weight_decay, "mean_dim": d} for d, some in matrices.items()]
    return [plain, {"params": vectors, "weight_decay": 0.0}, *means]
