"""GASLoC (Cagnasso et al., 2026, arXiv:2606.11081): an outer momentum over gossip, of which DiLoCo is one case.

A replica begins its inner steps at theta_i and moves by g_i. With W the weights by which neighbours average,

    x_i'     = sum_j W_ij (theta_j + eta g_j)
    theta_i' = x_i' + gamma (x_i' - x_i)

where x_i is x_i' of the turn before, theta_i at first. On the complete graph (`peers = all`) this is Nesterov's
momentum in its other form, and the method is DiLoCo; over random pairs (`peers = group`) it is close to NoLoCo, but
its momentum is of what the group has moved, and not of what the replica itself has. Whatever W is, as long as its
columns sum to one, the mean over replicas moves as DiLoCo's agreed parameters would with the same outer gradients.

The update is inferred from the paper's abstract, which says that it generalises the outer optimizer to gossip, as this
one does up to rounding; no public code is known. A description by others takes the momentum from what a replica has
before the mean is taken; then replicas would differ on the complete graph too, and it would not be DiLoCo there.

What replicas differ by must fade where they compute nothing. Taking the mean over random groups is a projection P of it
with E[P] = p, which is 1 - q of `noloco.differing`, and then, exactly, for any number of replicas,

    (E theta'^2, E theta' x', E x'^2) = M (E theta^2, E theta x, E x^2)         `second_moments`

whose largest eigenvalue reaches 1 at 2 gamma^2 + gamma = 1 / p (`momentum_bound`): at gamma = 0.78 for pairs among
many, and not below 1 for larger groups.

    symbol   name here    symbol   name here
    eta      `lr`         gamma    `momentum`
    theta_i  `agreed`     x_i      the buffer `averaged`
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowcomm.codecs import make_codec
from lowcomm.methods.config import MethodConfig
from lowcomm.methods.noloco import differing
from lowcomm.methods.outer import OuterOptimizer
from lowcomm.settings import ConfigError


class GossipMomentum(OuterOptimizer):
    """GASLoC's momentum of averaged parameters, with one message of parameters per turn, whatever the graph."""

    names = ("gasloc",)
    sends_parameters = True

    def __init__(self, lr: float, momentum: float):
        self.lr, self.momentum = lr, momentum

    @classmethod
    def of(cls, method: MethodConfig) -> GossipMomentum:
        """Return the optimizer with a method's eta (`outer_lr`) and gamma (`outer_momentum`)."""
        return cls(method.outer_lr, method.outer_momentum)

    @classmethod
    def check(cls, method: MethodConfig, replicas: int) -> None:
        """Refuse a momentum with which replicas drift apart, and codecs that lose something.

        Errors of parameters would be errors of all that has been learnt.
        """
        size, count = method.group_size // method.slices, replicas // method.slices  # of those who train a slice
        bound = momentum_bound(size, count) if method.peers == "group" and size < count else math.inf
        if method.outer_momentum >= bound:
            who = "owners of a slice" if method.slices > 1 else "replicas"
            raise ConfigError(
                f"method.outer_momentum (gamma) = {method.outer_momentum} must be below {bound:.4g}: in groups of"
                f" {size} of {count} the {who} drift apart (gasloc.momentum_bound)"
            )
        if not make_codec(method.codec, method.codec_keep, where="method.codec").lossless:
            raise ConfigError(
                f"method.outer = gasloc sends parameters, so method.codec must be fp32, not {method.codec}"
            )

    def buffers(self, agreed: Tensor) -> dict[str, Tensor]:
        return {"averaged": agreed.clone()}

    def message(self, agreed: Tensor, own: Tensor) -> Tensor:
        return torch.lerp(agreed, own, self.lr)

    def step(self, agreed: Tensor, delta: Tensor, buffers: dict[str, Tensor], peers: Tensor | None = None) -> None:
        averaged = buffers["averaged"]
        torch.lerp(averaged, delta, 1 + self.momentum, out=agreed)
        averaged.copy_(delta)


def second_moments(momentum: float, p: float) -> NDArray[np.float64]:
    """Return the matrix [3, 3] by which a turn maps (E theta^2, E theta x, E x^2), where replicas compute nothing.

    These are the second moments of what replicas differ by. `p` is the share of it that the mean over a random group
    keeps, 1 - `noloco.differing`.
    """
    moved = 1 + momentum
    return np.array(
        [
            [p * moved**2, -2 * p * momentum * moved, momentum**2],
            [p * moved, -p * momentum, 0.0],
            [p, 0.0, 0.0],
        ]
    )


def momentum_bound(group: int, replicas: float = math.inf) -> float:
    """Return the momentum (gamma) from which on replicas that compute nothing no longer come together.

    It is (sqrt(1 + 8 / p) - 1) / 4 for groups of `group` among `replicas` (infinity: many), with p as in
    `second_moments`, and infinity where the group is of all.
    """
    p = 1 - differing(group, replicas)
    return math.inf if p <= 0 else (math.sqrt(1 + 8 / p) - 1) / 4
