"""The papers' methods by name: `LocalUpdates` with each paper's choices, any of which may be set otherwise.

    sync = StreamingDiLoCo(model, world, sync_every_steps=30, codec="fp32")

They differ in their defaults alone, so a combination of two is `LocalUpdates` with the settings of both.
"""

from __future__ import annotations

from lowcomm.methods.config import MethodConfig
from lowcomm.methods.local_updates import LocalUpdates


class FederatedAveraging(LocalUpdates):
    """Local SGD: replicas take the mean of their parameters every H steps, and keep no outer state but that mean."""

    default = MethodConfig("parameters", outer="average", sync_every_steps=30)


class DiLoCo(LocalUpdates):
    """DiLoCo (arXiv:2311.08105): outer gradients are averaged every H steps and applied with Nesterov momentum.

    Its paper trains with H = 500, an outer learning rate of 0.7 and a momentum of 0.9, which are the defaults, but for
    H. With few rounds a momentum of 0.9 lags, and a smaller one is better. They are those of `LocalUpdates` too.
    """


class StreamingDiLoCo(LocalUpdates):
    """Streaming DiLoCo (arXiv:2501.18512): DiLoCo a fragment at a time, in 4 bits, while the inner steps go on.

    The defaults are strided fragments of three layers, H = 100, E3M0, tau = 1, alpha = 0.5 and an outer learning rate
    of 0.4, as in its section 3; the momentum of 0.9 is inferred, as the paper does not print it.
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

    The defaults are alpha = 0.5, beta = 0.7, H = 50, and gamma = 0.7 as in its public code, as the paper does not print
    it. There is no single model: `evaluated` shows each replica's own slow weights, and `weights` returns their mean.
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


class SparseLoCo(LocalUpdates):
    """SparseLoCo (arXiv:2508.15706): the largest 64 of 4,096 values in 2 bits, with error feedback and no momentum.

    A message is 146 times shorter than in fp32. H = 15, beta = 0.95 and an outer learning rate of 1 are those of its
    public code, whose mean is over those that have sent a value (`mean = "senders"`); its Algorithm 1 has the mean over
    all.
    """

    default = MethodConfig(
        "parameters",
        outer="heavy_ball",
        outer_lr=1.0,
        sync_every_steps=15,
        codec="chunk_topk_2bit",
        codec_keep=64 / 4096,
        basis="tiles",
        error_feedback=0.95,
        mean="senders",
    )


class DeMo(LocalUpdates):
    """DeMo (arXiv:2411.19870): sign descent along the largest 32 of 64 x 64 cosines of what has not been sent yet.

    Replicas exchange at each step. The decay is 0.999, as in its public code. The inner optimizer must be plain SGD at
    a constant rate, which then cancels: an outer gradient is a gradient times that rate, and only the sign of the mean
    is used. The outer rate is what AdamW's would be, and may follow a schedule (`outer_lr_shape`).
    """

    default = MethodConfig(
        "parameters",
        outer="sign",
        outer_lr=0.001,
        sync_every_steps=1,
        codec="chunk_topk",
        codec_keep=32 / 4096,
        basis="cosines",
        error_feedback=0.999,
        mean="senders",
    )


class GASLoC(LocalUpdates):
    """GASLoC (arXiv:2606.11081): DiLoCo's momentum over random pairs; each replica has a momentum of its own.

    With `peers = "all"` it is DiLoCo. H = 30, eta = 0.7 and gamma = 0.6 are this library's choice. There is no single
    model: `evaluated` shows what each replica begins its inner steps with, and `weights` returns the mean of that.
    """

    default = MethodConfig(
        "parameters",
        outer="gasloc",
        outer_lr=0.7,
        outer_momentum=0.6,
        peers="group",
        sync_every_steps=30,
    )
