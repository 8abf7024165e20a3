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
    """The rule by which an averaged outer gradient is applied to the parameters last agreed.

    Attributes:
        needs_peers: whether it needs the mean of the peers' own outer parameters, which may differ.
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
        """Make the optimizer with the numbers of a method."""

    @classmethod
    def check(cls, method: MethodConfig, replicas: int) -> None:
        """Raise ConfigError for settings, or a number of replicas, with which the optimizer does not work."""

    @abstractmethod
    def buffers(self, agreed: Tensor) -> dict[str, Tensor]:
        """Return the initial state for the parameters `agreed` [n], by name; each tensor has the shape of `agreed`."""

    def message(self, agreed: Tensor, own: Tensor) -> Tensor:
        """Return what a replica sends to be averaged [n], from the parameters last agreed and its own.

        By default this is the outer gradient, agreed minus own, or, with `sends_parameters`, its own parameters. `own`
        is scratch afterwards.
        """
        return own if self.sends_parameters else torch.sub(agreed, own, out=own)

    @abstractmethod
    def step(self, agreed: Tensor, delta: Tensor, buffers: dict[str, Tensor], peers: Tensor | None = None) -> None:
        """Take an outer step, agreed [n] <- OuterOpt(agreed, delta), which changes `agreed` and `buffers` in place.

        `delta` is the mean of the group's messages, and `peers` the mean of the peers' `agreed`; None where that is not
        needed, or is known to equal this one's. Both are scratch afterwards.
        """


class Average(OuterOptimizer):
    """The mean of the parameters themselves, which travel in place of outer gradients: agreed <- mean."""

    names = ("average",)
    sends_parameters = True

    @classmethod
    def of(cls, method: MethodConfig) -> Average:
        """Make the average, which has no numbers."""
        return cls()

    @classmethod
    def check(cls, method: MethodConfig, replicas: int) -> None:
        """Refuse codecs but fp32, learning rates but 1, and momenta, which make sense for differences alone."""
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
    """SGD with Nesterov momentum, the outer optimizer of DiLoCo."""

    names = ("nesterov",)
    nesterov = True


class SignDescent(OuterOptimizer):
    """DeMo's agreed <- agreed - lr sign(delta); its momentum is what messages have not sent yet."""

    names = ("sign",)
    linear = False

    def __init__(self, lr: float):
        self.lr = lr

    @classmethod
    def of(cls, method: MethodConfig) -> SignDescent:
        """Make sign descent with the learning rate of a method."""
        return cls(method.outer_lr)

    @classmethod
    def check(cls, method: MethodConfig, replicas: int) -> None:
        """Refuse a momentum, as sign descent has none."""
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
