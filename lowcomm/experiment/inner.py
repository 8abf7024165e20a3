"""The inner optimizer of a run, and its learning rate.

    adamw, sgd    of all parameters
    muon          Muon of the matrices inside blocks, AdamW of embedding, head and vectors

Muon moves a matrix by its momentum's nearest orthogonal one (Jordan et al., 2024), as `torch.optim.Muon` computes it.
Inside DiLoCo it is MuLoCo (Thérien et al., 2025, arXiv:2505.23725), whose public code has no Nesterov momentum there
and scales the rate of a matrix [out, in] by sqrt(out / in); so has this. With one replica that is their MuLoCo-1, and
with AdamW inside SNOO (Kallusky et al., 2025, arXiv:2510.15830): an outer optimizer without anybody else.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowcomm.experiment.config import TrainConfig
from lowcomm.methods.subspace import RowAdamW


def learning_rate(step: int, t: TrainConfig, peak: float | None = None) -> float:
    """The inner learning rate of step 1..steps: linear warm-up, then decay to final_lr_fraction of the peak.

    peak: by default `train.lr`.
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
    """Give all parameters the rate of a step; returns that of `train.lr`."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, t, group.get("peak_lr"))
    return learning_rate(step, t)


def inner_optimizer(
    trained: dict[str, Tensor], t: TrainConfig, mean_dims: dict[str, int] | None = None
) -> torch.optim.Optimizer:
    """The optimizer of a run; weight decay on matrices alone.

    Args:
        trained: parameters by name, those inside blocks as a `Decoder` names them.
        t: the settings.
        mean_dims: see `subspace.RowAdamW`, by the parameters' names.
    """
    if t.optimizer == "muon":
        return MuonAndAdamW(trained, t)
    matrices: dict[int | None, list[Tensor]] = {None: []}
    for name, p in trained.items():
        if p.dim() >= 2:
            matrices.setdefault((mean_dims or {}).get(name), []).append(p)
    vectors = [p for p in trained.values() if p.dim() < 2]
    groups = [{"params": matrices.pop(None), "weight_decay": t.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if t.optimizer == "sgd":
        groups[0]["params"] += itertools.chain(*matrices.values())
        return torch.optim.SGD(groups, lr=t.lr)
    if matrices:
        groups += [{"params": some, "weight_decay": t.weight_decay, "mean_dim": d} for d, some in matrices.items()]
        return RowAdamW(groups, lr=t.lr, betas=(t.beta1, t.beta2), eps=t.eps)
    fused = not any(hasattr(p, "device_mesh") for p in trained.values())
    return torch.optim.AdamW(groups, lr=t.lr, betas=(t.beta1, t.beta2), eps=t.eps, fused=fused)


def is_inside_blocks(name: str, dims: int) -> bool:
    """Tell whether a `Decoder`'s parameter of so many dimensions is one of the matrices that Muon takes."""
    return name.startswith("blocks.") and dims == 2


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon of the matrices inside blocks and AdamW of the rest, as one optimizer with one state.

    Groups that Muon takes have a `peak_lr` of their own: `train.muon_lr` times min(1, sqrt(out / in)), as torch itself
    scales by max(1, sqrt(out / in)).
    """

    def __init__(self, trained: dict[str, Tensor], t: TrainConfig):
        of_shape: dict[torch.Size, list[Tensor]] = {}
        rest = {}
        for name, p in trained.items():
            if is_inside_blocks(name, p.dim()):
                of_shape.setdefault(p.shape, []).append(p)
            else:
                rest[name] = p
        groups = [self._group(shape, some, t) for shape, some in of_shape.items()]
        muon = torch.optim.Muon(groups, momentum=t.muon_momentum, nesterov=False, adjust_lr_fn="original")
        adamw = inner_optimizer(rest, dataclasses.replace(t, optimizer="adamw"))
        self._parts = muon, adamw
        super().__init__([*muon.param_groups, *adamw.param_groups], {"fused": True})
        self._share()

    def _share(self) -> None:
        """Give both optimizers the groups and the state that this one has."""
        count = len(self._parts[0].param_groups)
        for part, groups in zip(self._parts, (self.param_groups[:count], self.param_groups[count:]), strict=True):
            part.param_groups, part.state = groups, self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave."""
        super().load_state_dict(state_dict)
        self._share()

    @staticmethod
    def _group(shape: torch.Size, some: list[Tensor], t: TrainConfig) -> dict[str, Any]:
        """The group of matrices of one shape [out, in]; torch scales by sqrt(max(1, out / in)) itself."""
        ratio = min(1.0, math.sqrt(shape[0] / shape[1]))
        peak = t.muon_lr * ratio
        return {"params": some, "lr": peak, "peak_lr": peak, "weight_decay": t.weight_decay / ratio}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what `closure` (run with gradients) does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss
