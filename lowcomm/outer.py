"""The engine: how replicas come to agree. DiLoCo, plain averaging and data-parallel training.

DiLoCo (Douillard et al., 2023, arXiv:2311.08105; Algorithm 1 of Streaming DiLoCo). Replica m trains
theta_m for H inner steps; phi are the parameters last agreed. Then

    Delta_m = phi - theta_m                 outer gradient (note the sign)
    Delta   = mean_m Delta_m                what travels
    phi     = OuterOpt(phi, Delta)          SGD with Nesterov momentum
    theta_m = alpha theta_m + (1 - alpha) phi

    symbol   name here          symbol   name here
    theta_m  the model's own    phi      `agreed`, flat fp32
    Delta    `delta`            H        `sync_every_steps`
    alpha    `mixing`           tau      `overlap_steps`

DiLoCo exchanges the whole model and takes phi as it is (alpha = 0). Streaming DiLoCo (`streaming`) does this for a
fragment at a time, with tau inner steps between sending Delta_m and applying Delta.

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

from lowcomm.accounting import mean_bytes
from lowcomm.axis import Handle
from lowcomm.codecs import make_codec
from lowcomm.comm import World
from lowcomm.config import MethodConfig, TrainConfig
from lowcomm.peers import PEERS
from lowcomm.streaming import Schedule, parameter_fragments


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

    def state(self) -> dict[str, Tensor]:
        """State to checkpoint beside the model and the inner optimizer; waits for what is under way."""
        ...

    def load(self, state: dict[str, Tensor]) -> None:
        """Put back what `state` gave."""
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

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, state: dict[str, Tensor]) -> None:
        """Nothing was kept."""

    def sent_bytes(self) -> dict[str, int]:
        numel = sum(p.numel() for p in self.parameters)
        once = mean_bytes(numel, 4, self.world.replicas, self.world.replica)
        return {"gradients": self.steps * once}


class Fragment:
    """Parameters that are exchanged together: the copy last agreed, its optimizer, and what is under way."""

    def __init__(self, named: dict[str, Tensor], method: MethodConfig):
        self.names, self.parameters = list(named), list(named.values())
        flat = flatten(self.parameters).float()
        self.agreed = flat.cpu() if method.offload_outer else flat
        self.outer = OUTER[method.outer](self.agreed, method) if method.outer != "average" else None
        self.under_way: Handle | None = None
        self.due = 0  # the step after which it is applied

    def values(self) -> dict[str, Tensor]:
        """The agreed parameters by name, in their shapes."""
        parts = self.agreed.split([p.numel() for p in self.parameters])
        return {n: v.view(p.shape) for n, v, p in zip(self.names, parts, self.parameters, strict=True)}

    def buffers(self) -> dict[str, Tensor]:
        return {"agreed": self.agreed} | (self.outer.buffers() if self.outer else {})


class LocalUpdates:
    """Replicas train alone and agree on a fragment at its turn: DiLoCo, Streaming DiLoCo, federated averaging.

    Outer state is flat fp32, on the CPU when `offload_outer` says so. What is under way when a run ends is applied;
    with `close_last_round`, every fragment is then exchanged once more, so that no inner step is lost.
    """

    def __init__(self, model: nn.Module, world: World, method: MethodConfig, train: TrainConfig, *, seed: int = 0):
        self.world, self.method, self.steps, self.seed = world, method, train.steps, seed
        self.peers, self.codec = PEERS[method.peers], make_codec(method.codec, method.codec_keep)
        named = dict(model.named_parameters())
        groups = parameter_fragments(list(named), method.fragments, method.layers_per_fragment)
        self.fragments = [Fragment({n: named[n] for n in names}, method) for names in groups]
        self.schedule = Schedule(len(groups), method.sync_every_steps)
        self.overlap = method.overlap_steps[world.replica % len(method.overlap_steps)]
        self.order = list(named)

    def average_gradients(self) -> None:
        """Replicas keep their own gradients."""

    def after_step(self, step: int) -> dict[str, float]:
        logged: dict[str, float] = {}
        for index in self.schedule.turns(step):
            self._send(index, step, logged)
        last = step == self.steps
        for fragment in self.fragments:
            if fragment.under_way is not None and (last or fragment.due <= step):
                self._apply(fragment)
        if last and self.method.close_last_round:
            left = [i for i in range(len(self.fragments)) if i not in self.schedule.turns(step)]
            for index in left:
                self._send(index, step, logged)
            for index in left:
                self._apply(self.fragments[index])
        return logged

    def _send(self, index: int, step: int, logged: dict[str, float]) -> None:
        fragment = self.fragments[index]
        theta = flatten(fragment.parameters).float()
        agreed = fragment.agreed.to(theta.device)
        if self.method.record_cosine and self.world.replicas > 1:
            deltas = self.world.exchange(agreed - theta, purpose="analysis")
            logged["cosine" if len(self.fragments) == 1 else f"cosine_{index}"] = pairwise_cosine(deltas)
        sent = theta if fragment.outer is None else torch.sub(agreed, theta, out=theta)
        turn = (step * len(self.fragments) + index) * self.world.replicas + self.world.replica
        seed = self.seed << 40 | turn  # of the codec's random choices: others at each turn of each replica
        fragment.under_way = self.peers.mean_async(self.world, sent, self.codec, purpose="outer", seed=seed)
        fragment.due = step + self.overlap

    def _apply(self, fragment: Fragment) -> None:
        mean = fragment.under_way.wait()
        fragment.under_way = None
        if fragment.outer is None:
            fragment.agreed.copy_(mean)
        else:
            fragment.outer.step(fragment.agreed, mean.to(fragment.agreed.device))
        if self.method.mixing == 0:
            unflatten_into(fragment.agreed, fragment.parameters)
            return
        theta = flatten(fragment.parameters)
        new = fragment.agreed.to(theta.device)
        unflatten_into(theta.mul_(self.method.mixing).add_(new, alpha=1 - self.method.mixing), fragment.parameters)

    @contextlib.contextmanager
    def evaluated(self) -> Iterator[None]:
        """The outer parameters (Streaming DiLoCo, Table 3), whatever the replica holds in between.

        Where replicas have different tau, one may apply a fragment's mean before another does: until then, each shows
        its own, and a loss over the windows of all is the mean of both.
        """
        inner = [flatten(f.parameters) for f in self.fragments]
        for fragment in self.fragments:
            unflatten_into(fragment.agreed, fragment.parameters)
        try:
            yield
        finally:
            for fragment, values in zip(self.fragments, inner, strict=True):
                unflatten_into(values, fragment.parameters)

    def weights(self) -> dict[str, Tensor]:
        values = {n: v for f in self.fragments for n, v in f.values().items()}
        return {n: values[n] for n in self.order}

    def state(self) -> dict[str, Tensor]:
        state = {}
        for index, fragment in enumerate(self.fragments):
            state |= {f"{index}/{name}": b for name, b in fragment.buffers().items()}
            if fragment.under_way is not None:
                mean = fragment.under_way.wait()
                fragment.under_way = self.world.done(mean)
                state |= {f"{index}/under_way": mean, f"{index}/due": torch.tensor(fragment.due)}
        return state

    def load(self, state: dict[str, Tensor]) -> None:
        for index, fragment in enumerate(self.fragments):
            for name, buffer in fragment.buffers().items():
                buffer.copy_(state[f"{index}/{name}"])
            if (mean := state.get(f"{index}/under_way")) is not None:
                fragment.under_way = self.world.done(mean.to(self.world.device))
                fragment.due = int(state[f"{index}/due"])

    def sent_bytes(self) -> dict[str, int]:
        total = 0
        for index, fragment in enumerate(self.fragments):
            turns = self.schedule.turns_of(index, self.steps)
            if self.method.close_last_round and index not in self.schedule.turns(self.steps):
                turns += 1
            numel = fragment.agreed.numel()
            total += turns * self.peers.sent_bytes(numel, self.codec, self.world.replicas, self.world.replica)
        return {"outer": total}
