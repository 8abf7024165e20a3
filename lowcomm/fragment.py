"""A fragment: parameters that are exchanged together, their outer state, and the optimizer that updates it.

Outer state is flat fp32: the parameters last agreed and the optimizer's buffers. It may live off the accelerator
(Streaming DiLoCo, section 2.5): only what a turn needs is on the device, from shortly before the turn until it is over.
NoLoCo's mean of the next peers' slow weights is received on the device and stays there until its turn.

To add an outer optimizer, write a class with `buffers` and `step` here, enter it in `OUTER`, and list its name in
`config.MethodConfig.outer`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from lowcomm.axis import Handle
from lowcomm.config import MethodConfig


class OuterOptimizer(Protocol):
    """How an averaged outer gradient is applied to the parameters last agreed.

    needs_peers: whether it wants to know the mean of the peers' own outer parameters, which may differ.
    """

    needs_peers: bool

    def buffers(self, agreed: Tensor) -> dict[str, Tensor]:
        """State for parameters [n] as it begins, by name."""
        ...

    def step(self, agreed: Tensor, delta: Tensor, buffers: dict[str, Tensor], peers: Tensor | None) -> None:
        """agreed [n] <- OuterOpt(agreed, delta), and its buffers, in place; `delta` and `peers` are scratch afterwards.

        `peers`: the mean of the peers' `agreed`, where it is needed and not known to equal this one's.
        """
        ...


class Momentum:
    """SGD with heavy-ball or Nesterov momentum, as torch.optim.SGD computes them.

    buffer <- momentum * buffer + delta
    agreed <- agreed - lr * (delta + momentum * buffer)     Nesterov
    agreed <- agreed - lr * buffer                          heavy ball
    """

    needs_peers = False

    def __init__(self, lr: float, momentum: float, *, nesterov: bool):
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov

    def buffers(self, agreed: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(agreed)}

    def step(self, agreed: Tensor, delta: Tensor, buffers: dict[str, Tensor], peers: Tensor | None = None) -> None:
        buffer = buffers["momentum"].mul_(self.momentum).add_(delta)
        agreed.add_(delta.add_(buffer, alpha=self.momentum) if self.nesterov else buffer, alpha=-self.lr)


class Average:
    """agreed <- the mean of the parameters themselves, which travel in place of outer gradients."""

    needs_peers = False

    def buffers(self, agreed: Tensor) -> dict[str, Tensor]:
        return {}

    def step(self, agreed: Tensor, delta: Tensor, buffers: dict[str, Tensor], peers: Tensor | None = None) -> None:
        agreed.copy_(delta)


class PulledMomentum(Momentum):
    """NoLoCo's momentum (arXiv:2506.10911, Eq. 2 and 3): heavy ball, and a pull towards the peers' slow weights.

    With Delta the mean outer gradient of the group (agreed minus own, so its sign is the other way round than Eq. 1's)

        m      <- momentum * m + lr * Delta + pull * (agreed - peers)
        agreed <- agreed - m

    Eq. 2 prints a minus before its beta, where its own Eqs. 32 to 34 and the public code have a plus; so has this.
    The buffer here is m / lr, as of `Momentum`: the pull joins the outer gradient as pull / lr.
    """

    needs_peers = True

    def __init__(self, lr: float, momentum: float, pull: float):
        super().__init__(lr, momentum, nesterov=False)
        self.pull = pull

    def step(self, agreed: Tensor, delta: Tensor, buffers: dict[str, Tensor], peers: Tensor | None = None) -> None:
        if peers is not None:
            delta.add_(torch.sub(agreed, peers, out=peers), alpha=self.pull / self.lr)
        super().step(agreed, delta, buffers)


OUTER = {
    "average": lambda m: Average(),
    "nesterov": lambda m: Momentum(m.outer_lr, m.outer_momentum, nesterov=True),
    "heavy_ball": lambda m: Momentum(m.outer_lr, m.outer_momentum, nesterov=False),
    "noloco": lambda m: PulledMomentum(m.outer_lr, m.outer_momentum, m.outer_pull),
}


def flatten(tensors: list[Tensor]) -> Tensor:
    """One contiguous copy of all values, in order."""
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def unflatten_into(flat: Tensor, tensors: list[Tensor]) -> None:
    """Copy a flat tensor back over `tensors`."""
    parts = flat.to(tensors[0].device).split([t.numel() for t in tensors])
    with torch.no_grad():
        torch._foreach_copy_(tensors, [p.view(t.shape) for p, t in zip(parts, tensors, strict=True)])


@functools.cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    """The stream on which outer state travels: one a GPU, so that what one fragment frees another can use."""
    return torch.cuda.Stream(device)


class OuterState:
    """Named flat tensors at home, on the device or in the CPU's memory, and copies of them where they are used.

    With `offload`, home is the CPU (pinned, for a GPU), copying runs on a stream of its own, and `resident` says what
    is held on the device. A CPU that is the device too keeps copies all the same, so that memory can be counted there.
    """

    def __init__(self, values: dict[str, Tensor], *, offload: bool):
        self.names = tuple(values)
        self.device = values[self.names[0]].device
        on_gpu = self.device.type == "cuda"
        self._stream = _copying(self.device) if offload and on_gpu else None
        self._ready: torch.cuda.Event | None = None
        self._here = values
        if offload:
            self._home = {n: torch.empty_like(v, device="cpu", pin_memory=on_gpu).copy_(v) for n, v in values.items()}
            self._here = {}
        else:
            self._home = self._here

    @property
    def resident(self) -> int:
        """Bytes on the device."""
        return sum(v.numel() * v.element_size() for v in self._here.values())

    def fetch(self, *names: str) -> None:
        """Begin to copy what is not on the device yet."""
        missing = [n for n in names if n not in self._here]
        if not missing:
            return
        with torch.cuda.stream(self._stream):
            for name in missing:
                self._here[name] = torch.empty_like(self._home[name], device=self.device)
                self._here[name].copy_(self._home[name], non_blocking=True)
        if self._stream is not None:
            self._ready = self._stream.record_event()

    def use(self, *names: str) -> list[Tensor]:
        """Tensors on the device, ready for the current stream; valid until `release`."""
        self.fetch(*names)
        if self._ready is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self._ready)
            for name in names:
                self._here[name].record_stream(current)
        return [self._here[n] for n in names]

    def release(self, *, changed: bool) -> None:
        """Let go of the copies on the device, written home if they have `changed`."""
        if self._here is self._home:
            return
        if changed:
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                for name, value in self._here.items():
                    self._home[name].copy_(value, non_blocking=True)
        self._here = {}

    def read(self) -> dict[str, Tensor]:
        """All of it, where it is at home. Not to be written."""
        if self._stream is not None:
            self._stream.synchronize()
        return self._home

    def load(self, values: dict[str, Tensor]) -> None:
        """Overwrite all of it."""
        for name, value in self.read().items():
            value.copy_(values[name])


class Fragment:
    """Parameters that are exchanged together: outer state, optimizer, and what is under way."""

    def __init__(self, named: dict[str, Tensor], method: MethodConfig):
        self.names, self.parameters = list(named), list(named.values())
        self.outer: OuterOptimizer = OUTER[method.outer](method)
        self.sends_parameters = method.outer == "average"
        agreed = flatten(self.parameters).float()
        self.numel = agreed.numel()
        self._state = OuterState({"agreed": agreed} | self.outer.buffers(agreed), offload=method.offload_outer)
        self.under_way: Handle | None = None
        self.due = 0  # the step after which it is applied
        self.turns = 0  # it has had
        self.peers: Handle | None = None  # the mean of the next peers' outer parameters, on its way

    @property
    def agreed(self) -> Tensor:
        """The parameters last agreed, flat, where they are at home."""
        return self._state.read()["agreed"]

    @property
    def resident(self) -> int:
        """Bytes of outer state on the device."""
        return self._state.resident

    def fetch(self, *, whole: bool) -> None:
        """Begin to bring outer state to the device: all of it, or the parameters alone."""
        self._state.fetch(*(self._state.names if whole else ["agreed"]))

    def delta(self) -> Tensor:
        """The outer gradient: agreed minus the replica's own parameters."""
        theta = flatten(self.parameters).float()
        (agreed,) = self._state.use("agreed")
        return torch.sub(agreed, theta, out=theta)

    def message(self) -> Tensor:
        """What is to be averaged: the outer gradient, or the parameters themselves."""
        return flatten(self.parameters).float() if self.sends_parameters else self.delta()

    def apply(self, mean: Tensor, mixing: float, peers: Tensor | None = None) -> None:
        """Take the outer step with the mean of what was sent, then mix: theta <- alpha theta + (1 - alpha) agreed.

        `peers`: as in `OuterOptimizer.step`.
        """
        names = self._state.names
        values = dict(zip(names, self._state.use(*names), strict=True))
        agreed = values.pop("agreed")
        self.outer.step(agreed, mean, values, peers)
        if mixing == 0:
            unflatten_into(agreed, self.parameters)
        else:
            theta = flatten(self.parameters)
            unflatten_into(theta.mul_(mixing).add_(agreed, alpha=1 - mixing), self.parameters)
        self._state.release(changed=True)

    def release(self) -> None:
        """Outer state is not needed until the mean has come."""
        self._state.release(changed=False)

    def values(self, flat: Tensor) -> dict[str, Tensor]:
        """Flat values, as of `agreed`, by the parameters' names and in their shapes."""
        parts = flat.split([p.numel() for p in self.parameters])
        return {n: v.view(p.shape) for n, v, p in zip(self.names, parts, self.parameters, strict=True)}

    def map(self, change: Callable[[dict[str, Tensor]], None]) -> None:
        """Change outer state in place, each of its tensors as values by the parameters' names."""
        names = self._state.names
        for flat in self._state.use(*names):
            change(self.values(flat))
        self._state.release(changed=True)

    def state(self) -> dict[str, Tensor]:
        """Outer state, to checkpoint."""
        return self._state.read()

    def load(self, state: dict[str, Tensor]) -> None:
        """Put back what `state` gave."""
        self._state.load(state)
