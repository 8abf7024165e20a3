"""The papers' methods by name: `LocalUpdates` with each paper's choices, any of which may be set otherwise.

    sync = StreamingDiLoCo(model, world, sync_every_steps=30, codec="fp32")

They are told apart by their defaults alone, so a combination of two is `LocalUpdates` with the settings of both.
"""

from __future__ import annotations

from lowcomm.methods.config import MethodConfig
from lowcomm.methods.local_updates import LocalUpdates


class FederatedAveraging(LocalUpdates):
    """Local SGD: replicas take the mean of their parameters every H steps, and keep no outer state but that mean."""

    default = MethodConfig("parameters", outer="average", sync_every_steps=30)


class DiLoCo(LocalUpdates):
    """DiLoCo (arXiv:2311.08105): outer gradients averaged every H steps, applied with Nesterov momentum.

    Its paper trains with H = 500, an outer learning rate of 0.7 and a momentum of 0.9: the defaults, but for H. With
    few rounds a momentum of 0.9 lags, and a smaller one is better.
    """

    default = MethodConfig("parameters", outer="nesterov", outer_lr=0.7, outer_momentum=0.9, sync_every_steps=30)


class StreamingDiLoCo(LocalUpdates):
    """Streaming DiLoCo (arXiv:2501.18512): DiLoCo a fragment at a time, in 4 bits, while the inner steps go on.

    Strided fragments of three layers, H = 100, E3M0, tau = 1, alpha = 0.5 and an outer learning rate of 0.4, as in its
    section 3; the momentum of 0.9 is inferred, as the paper does not print it.
    """

    default = MethodConfig(
        "parameters",
        outer="nesterov",
        outer_lr=0.4,
        outer_momentum=0.9,
        sync_every_steps=100,
        fragments="strided",
        overlap_steps=(1,),
        mixing=0.5,
        codec="e3m0",
    )


class NoLoCo(LocalUpdates):
    """NoLoCo (arXiv:2506.10911): random pairs in place of all replicas, and a momentum that pulls pairs together.

    Alpha = 0.5, beta = 0.7, H = 50, and gamma = 0.7 as in its public code, as the paper does not print it. There is no
    one model: `evaluated` shows each replica's own slow weights, `weights` their mean.
    """

    default = MethodConfig(
        "parameters",
        outer="noloco",
        outer_lr=0.7,
        outer_momentum=0.5,
        outer_pull=0.7,
        peers="group",
        sync_every_steps=50,
    )
