"""Outer optimizers: how an averaged outer gradient is applied to the parameters last agreed.

To add one, write a file in this folder with a class that derives from `OuterOptimizer` and has `names`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lowcomm.choices import Choice
from lowcomm.methods.config import MethodConfig
from lowcomm.settings import ConfigError


class OuterOptimizer(Choice, ABC):
    """How an averaged outer gradient is applied to the parameters last agreed.

    Attributes:
        needs_peers: whether it wants to know the mean of the peers' own outer parameters, which may differ.
        sends_parameters: whether the parameters themselves are averaged, in place of outer gradients.
            Both may depend on its numbers.
        linear: whether its steps and buffers are linear in the outer gradients, as a momentum is. Only such steps keep
            to a subspace as outer gradients do, and only such buffers can be carried into another; second moments are
            not linear.
    """

    needs_peers: bool = False
    sends_parameters: bool = False
    linear: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def of(cls, method: MethodConfig) -> OuterOptimizer:
        """The optimizer with the numbers of a method."""

    @classmethod
    def check(cls, method: MethodConfig, replicas: int) -> None:
        """Raise ConfigError for settings with which it does not work."""

    @abstractmethod
    def buffers(self, agreed: Tensor) -> dict[str, Tensor]:
        """State for parameters [n] as it begins, by name; each tensor has the shape of `agreed`."""

    def message(self, agreed: Tensor, own: Tensor) -> Tensor:
        """Return what is averaged [n], of the parameters last agreed and a replica's own, which is scratch afterwards.

        By default the outer gradient, agreed minus own, or, with `sends_parameters`, its own parameters.
        """
        return own if self.sends_parameters else torch.sub(agreed, own, out=own)

    @abstractmethod
    def step(self, agreed: Tensor, delta: Tensor, buffers: dict[str, Tensor], peers: Tensor | None = None) -> None:
        """agreed [n] <- OuterOpt(agreed, delta), and its buffers, in place; `delta` and `peers` are scratch afterwards.

        `delta`: the mean of the group's messages.

        `peers`: the mean of the peers' `agreed`, where it is needed and not known to equal this one's.
        """


class Average(OuterOptimizer):
    """agreed <- the mean of the parameters themselves, which travel in place of outer gradients."""

    names = ("average",)
    sends_parameters = True

    @classmethod
    def of(cls, method: MethodConfig) -> Average:
        """The average; it has no numbers."""
        return cls()

    @classmethod
    def check(cls, method: MethodConfig, replicas: int) -> None:
        """Refuse codecs, learning rates and momenta, which mean something for differences alone."""
        if method.codec != "fp32" or method.outer_lr != 1.0 or method.outer_momentum != 0.0:
            raise ConfigError(
                "method.outer = average exchanges the parameters themselves, so codec must be fp32, outer_lr 1 and"
                f" outer_momentum 0 (got {method.codec}, {method.outer_lr}, {method.outer_momentum}); for differences"
                " at lr 1 use outer = heavy_ball with outer_momentum 0"
            )

    def buffers(self, agreed: Tensor) -> dict[str, Tensor]:
        return {}

    def step(self, agreed: Tensor, delta: Tensor, buffers: dict[str, Tensor], peers: Tensor | None = None) -> None:
        agreed.copy_(delta)


class Momentum(OuterOptimizer):
    """SGD with heavy-ball or Nesterov momentum, as torch.optim.SGD computes them.

    buffer <- momentum * buffer + delta
    agreed <- agreed - lr * (delta + momentum * buffer)     Nesterov
    agreed <- agreed - lr * buffer                          heavy ball
    """

    nesterov: ClassVar[bool]

    def __init__(self, lr: float, momentum: float):
        self.lr, self.momentum = lr, momentum

    @classmethod
    def of(cls, method: MethodConfig) -> Momentum:
        return cls(method.outer_lr, method.outer_momentum)

    def buffers(self, agreed: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(agreed)}

    def step(self, agreed: Tensor, delta: Tensor, buffers: dict[str, Tensor], peers: Tensor | None = None) -> None:
        buffer = buffers["momentum"].mul_(self.momentum).add_(delta)
        agreed.add_(delta.add_(buffer, alpha=self.momentum) if self.nesterov else buffer, alpha=-self.lr)


class Nesterov(Momentum):
    """DiLoCo's: SGD with Nesterov momentum."""

    names = ("nesterov",)
    nesterov = True


class SignDescent(OuterOptimizer):
    """agreed <- agreed - lr sign(delta): of DeMo, whose momentum is what its messages have not sent yet."""

    names = ("sign",)
    linear = False

    def __init__(self, lr: float):
        self.lr = lr

    @classmethod
    def of(cls, method: MethodConfig) -> SignDescent:
        """Sign descent with the learning rate of a method."""
        return cls(method.outer_lr)

    @classmethod
    def check(cls, method: MethodConfig, replicas: int) -> None:
        """Refuse a momentum, of which it has none."""
        if method.outer_momentum:
            raise ConfigError(f"method.outer_momentum = {method.outer_momentum} means nothing with method.outer = sign")

    def buffers(self, agreed: Tensor) -> dict[str, Tensor]:
        return {}

    def step(self, agreed: Tensor, delta: Tensor, buffers: dict[str, Tensor], peers: Tensor | None = None) -> None:
        agreed.add_(delta.sign_(), alpha=-self.lr)


class HeavyBall(Momentum):
    """SGD with heavy-ball momentum."""

    names = ("heavy_ball",)
    nesterov = False
