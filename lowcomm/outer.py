"""The engine: how replicas come to agree. DiLoCo, plain averaging and data-parallel training.

DiLoCo (Douillard et al., 2023, arXiv:2311.08105; Algorithm 1 of Streaming DiLoCo). Replica m trains
theta_m for H inner steps from the parameters phi last agreed, then

    Delta_m = phi - theta_m                 outer gradient (note the sign)
    Delta   = mean_m Delta_m                what travels
    phi     = OuterOpt(phi, Delta)          SGD with Nesterov momentum
    theta_m = phi

    symbol   name here          symbol   name here
    theta_m  the model's own    phi      `agreed`, flat fp32
    Delta    `delta`            H        `sync_every_steps`

Federated averaging (local SGD) exchanges theta itself and takes its mean. Data-parallel training
exchanges gradients, each step, before clipping and the inner optimizer.

To add an outer optimizer, write a class with `step` and `buffers` here and enter it in `OUTER`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from lowcomm.accounting import rounds
from lowcomm.codecs import CODECS
from lowcomm.comm import World
from lowcomm.config import MethodConfig, TrainConfig
from lowcomm.peers import PEERS


class OuterOptimizer(Protocol):
    """How an averaged outer gradient is applied to the parameters last agreed."""

    def step(self, agreed: Tensor, delta: Tensor) -> None:
        """agreed [n] <- OuterOpt(agreed, delta), in place; `delta` is scratch afterwards."""
        ...

    def buffers(self) -> dict[str, Tensor]:
        """State to checkpoint, by name."""
        ...


class Momentum:
    """SGD with heavy-ball or Nesterov momentum, as torch.optim.SGD computes them.

    buffer <- momentum * buffer + delta
    agreed <- agreed - lr * (delta + momentum * buffer)     Nesterov
    agreed <- agreed - lr * buffer                          heavy ball
    """

    def __init__(self, like: Tensor, lr: float, momentum: float, *, nesterov: bool):
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self.buffer = torch.zeros_like(like)

    def step(self, agreed: Tensor, delta: Tensor) -> None:
        self.buffer.mul_(self.momentum).add_(delta)
        agreed.add_(delta.add_(self.buffer, alpha=self.momentum) if self.nesterov else self.buffer, alpha=-self.lr)

    def buffers(self) -> dict[str, Tensor]:
        return {"momentum": self.buffer}


OUTER = {
    "nesterov": lambda like, m: Momentum(like, m.outer_lr, m.outer_momentum, nesterov=True),
    "heavy_ball": lambda like, m: Momentum(like, m.outer_lr, m.outer_momentum, nesterov=False),
}


def flatten(tensors: list[Tensor]) -> Tensor:
    """One contiguous copy of all values, in order."""
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def unflatten_into(flat: Tensor, tensors: list[Tensor]) -> None:
    """Copy a flat tensor back over `tensors`."""
    parts = flat.to(tensors[0].device).split([t.numel() for t in tensors])
    with torch.no_grad():
        torch._foreach_copy_(tensors, [p.view(t.shape) for p, t in zip(parts, tensors, strict=True)])


def pairwise_cosine(vectors: list[Tensor]) -> float:
    """Mean cosine similarity over all pairs of flat vectors."""
    stacked = torch.stack([v / v.norm().clamp_min(1e-30) for v in vectors]).double()
    n = len(vectors)
    return float((stacked @ stacked.T).triu(1).sum() / (n * (n - 1) / 2))


class Engine(Protocol):
    """What a trainer calls; it knows no method by name."""

    def average_gradients(self) -> None:
        """Between the backward pass and clipping."""
        ...

    def after_step(self, step: int) -> dict[str, float]:
        """After inner step `step` (from 1). Returns what is worth logging."""
        ...

    def evaluated(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model holds the parameters to evaluate."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """The parameters to evaluate, whole, by name; every rank must ask."""
        ...

    def buffers(self) -> dict[str, Tensor]:
        """State to checkpoint beside the model and the inner optimizer."""
        ...

    def sent_bytes(self) -> dict[str, int]:
        """Closed form of this rank's bytes in the whole run, by purpose; {} where none is claimed."""
        ...


class DataParallel:
    """Gradients averaged over replicas at every step."""

    def __init__(self, model: nn.Module, world: World, method: MethodConfig, train: TrainConfig):
        self.named, self.world, self.steps = dict(model.named_parameters()), world, train.steps
        self.parameters = list(self.named.values())

    def average_gradients(self) -> None:
        if self.world.replicas > 1:
            grads = [p.grad for p in self.parameters]
            unflatten_into(self.world.mean(flatten(grads), purpose="gradients"), grads)

    def after_step(self, step: int) -> dict[str, float]:
        return {}

    def evaluated(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def weights(self) -> dict[str, Tensor]:
        return self.named

    def buffers(self) -> dict[str, Tensor]:
        return {}

    def sent_bytes(self) -> dict[str, int]:
        numel = sum(p.numel() for p in self.parameters)
        once = PEERS["all"].sent_bytes(numel, CODECS["fp32"], self.world.replicas, self.world.replica)
        return {"gradients": self.steps * once}


class LocalUpdates:
    """Replicas train alone for H steps, then agree: DiLoCo, or federated averaging when outer = average.

    Outer state is flat fp32, on the CPU when `offload_outer` says so. The last round of a run is closed
    even when it is shorter than H.
    """

    def __init__(self, model: nn.Module, world: World, method: MethodConfig, train: TrainConfig):
        self.names, self.parameters = zip(*model.named_parameters(), strict=True)
        self.world, self.method, self.steps = world, method, train.steps
        self.peers, self.codec = PEERS[method.peers], CODECS[method.codec]
        flat = flatten(self.parameters).float()
        self.agreed = flat.cpu() if method.offload_outer else flat
        self.outer = OUTER[method.outer](self.agreed, method) if method.outer != "average" else None

    def average_gradients(self) -> None:
        """Replicas keep their own gradients."""

    def after_step(self, step: int) -> dict[str, float]:
        if step % self.method.sync_every_steps and step != self.steps:
            return {}
        theta = flatten(self.parameters).float()
        logged = {}
        if self.outer is None:
            self._record(logged, lambda: self.agreed.to(theta.device) - theta)
            self.agreed.copy_(self.peers.mean(self.world, theta, self.codec, purpose="outer"))
        else:
            delta = torch.sub(self.agreed.to(theta.device), theta, out=theta)
            self._record(logged, lambda: delta)
            delta = self.peers.mean(self.world, delta, self.codec, purpose="outer")
            self.outer.step(self.agreed, delta.to(self.agreed.device))
        unflatten_into(self.agreed, self.parameters)
        return logged

    def _record(self, logged: dict[str, float], delta) -> None:
        if self.method.record_cosine and self.world.replicas > 1:
            logged["cosine"] = pairwise_cosine(self.world.exchange(delta(), purpose="analysis"))

    @contextlib.contextmanager
    def evaluated(self) -> Iterator[None]:
        """The outer parameters (Streaming DiLoCo, Table 3), whatever the replica holds in between."""
        inner = flatten(self.parameters)
        unflatten_into(self.agreed, self.parameters)
        try:
            yield
        finally:
            unflatten_into(inner, self.parameters)

    def weights(self) -> dict[str, Tensor]:
        parts = self.agreed.split([p.numel() for p in self.parameters])
        return {n: v.view(p.shape) for n, v, p in zip(self.names, parts, self.parameters, strict=True)}

    def buffers(self) -> dict[str, Tensor]:
        return {"agreed": self.agreed} | (self.outer.buffers() if self.outer else {})

    def sent_bytes(self) -> dict[str, int]:
        once = self.peers.sent_bytes(self.agreed.numel(), self.codec, self.world.replicas, self.world.replica)
        return {"outer": rounds(self.steps, self.method.sync_every_steps) * once}
