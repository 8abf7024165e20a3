"""NoLoCo (arXiv:2506.10911): its momentum, and what that does to replicas that meet in random groups.

A replica has slow weights phi_i and, after its inner steps, theta_i; in an outer step, with means over its group,

    m_i   <- alpha m_i + beta mean(theta - phi) + gamma (mean(phi) - phi_i)         Eq. 2, its sign mended
    phi_i <- phi_i + m_i                                                             Eq. 3

Groups are drawn anew each time. In the subspace of what replicas differ by, taking the group's mean is a random
projection P, and 1 - P another, Q; with M replicas in groups of n

    E[Q] = q 1,   q = (M - groups) / (M - 1)          `differing`

so second moments follow a linear map of three numbers, exactly, for any M. The paper neglects correlations to get its
Eq. 74; this does not.

    symbol  name here         symbol  name here
    alpha   `momentum`        n       `group`
    beta    `lr`              M       `replicas`
    gamma   `pull`
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowcomm.codecs import make_codec
from lowcomm.methods.config import MethodConfig
from lowcomm.methods.outer import HeavyBall
from lowcomm.settings import ConfigError


class PulledMomentum(HeavyBall):
    """NoLoCo's momentum (Eq. 2 and 3): heavy ball, and a pull towards the peers' slow weights.

    With Delta the mean outer gradient of the group (agreed minus own, so its sign is the other way round than Eq. 1's)

        m      <- momentum * m + lr * Delta + pull * (agreed - peers)
        agreed <- agreed - m

    Eq. 2 prints a minus before its beta, where its own Eqs. 32 to 34 and the public code have a plus, as here. The
    buffer holds m / lr, as that of `Momentum` does, so the pull is added to the outer gradient as pull / lr.

    Where pull = lr, as in the public code, the peers' slow weights cancel: lr * Delta + pull * (agreed - peers) is
    lr * (agreed - theta), with theta the mean of the group's fast weights. So with `one_message` the parameters
    themselves travel, in half the bytes of outer gradients and slow weights. (This needs a lossless codec, as errors of
    parameters would be errors of all that has been learnt, replicas that all train every parameter, and an ordinary
    mean.)

    Raises ValueError where `one_message` is set and pull is not lr.
    """

    names = ("noloco",)
    settings = ("outer_pull",)

    def __init__(self, lr: float, momentum: float, pull: float, *, one_message: bool = False):
        if one_message and pull != lr:
            raise ValueError(f"one message needs a pull that equals the learning rate, got {pull} and {lr}")
        super().__init__(lr, momentum)
        self.pull, self.sends_parameters, self.needs_peers = pull, one_message, not one_message

    @classmethod
    def of(cls, method: MethodConfig) -> PulledMomentum:
        """Make the momentum with alpha, beta and gamma of a method, in one message where that gives the same."""
        lossless = make_codec(method.codec, method.codec_keep, where="method.codec").lossless
        plain = lossless and method.trainable != "slice" and method.mean == "mean"
        one_message = plain and method.outer_pull == method.outer_lr
        return cls(method.outer_lr, method.outer_momentum, method.outer_pull, one_message=one_message)

    @classmethod
    def check(cls, method: MethodConfig, replicas: int) -> None:
        """Refuse a pull with which replicas drift apart, peers that all agree, and settings that clash with a pull."""
        if method.peers == "all":
            raise ConfigError(
                "method.outer = noloco needs method.peers = group: replicas that all agree have equal slow weights,"
                " and its momentum is heavy_ball's"
            )
        if method.outer_lr == 0:
            raise ConfigError("method.outer_lr must be above 0 with method.outer = noloco")
        if method.outer_lr_shape:
            raise ConfigError(
                "method.outer_lr_shape does not go with method.outer = noloco: its momentum has the pull in it, which a"
                " rate that falls would leave too large"
            )
        if len(set(method.overlap_steps)) > 1:
            raise ConfigError(
                f"method.overlap_steps = {list(method.overlap_steps)} must be one value with method.outer = noloco:"
                " slow weights are sent when a fragment is applied, which partners must do at the same step"
            )
        bound = contraction_bound(method.outer_momentum, method.group_size, replicas)
        if method.outer_pull >= bound:
            raise ConfigError(
                f"method.outer_pull (gamma) = {method.outer_pull} must be below {bound:.4g}: with outer_momentum"
                f" (alpha) = {method.outer_momentum} and groups of {method.group_size} the replicas drift apart"
                " (noloco.contraction_bound)"
            )

    def step(self, agreed: Tensor, delta: Tensor, buffers: dict[str, Tensor], peers: Tensor | None = None) -> None:
        if self.sends_parameters:
            torch.sub(agreed, delta, out=delta)
        elif peers is not None:
            delta.add_(torch.sub(agreed, peers, out=peers), alpha=self.pull / self.lr)
        super().step(agreed, delta, buffers)


def differing(group: int, replicas: float = math.inf) -> float:
    """Return q, the share of what replicas differ by that differs inside random groups: (M - groups) / (M - 1).

    It is (n - 1) M / (n (M - 1)) where n divides M, (n - 1) / n for infinitely many replicas, and 1 for a group of all
    (0 where there is one replica). Raises ValueError where `group` is not from 1 to `replicas`.
    """
    if not 1 <= group <= replicas:
        raise ValueError(f"groups of {group} among {replicas} replicas: the size must be between 1 and the replicas")
    if math.isinf(replicas):
        return (group - 1) / group
    return (replicas - replicas // group) / (replicas - 1) if replicas > 1 else 0.0


def contraction_bound(momentum: float, group: int, replicas: float = math.inf) -> float:
    """Return the pull (gamma) from which on replicas that compute nothing no longer come together.

    It is gamma* = 2 (1 - alpha^2) / (1 + alpha (1 - 2 q)), where the largest eigenvalue of `second_moments` reaches 1:
    2 (1 - alpha^2) for pairs among many replicas, and 2 (1 + alpha) for a group of all, as for any heavy ball. For
    groups of a part of the replicas q is taken at its least, that of many replicas, so that the bound holds however
    many there are and where some groups are larger.
    """
    q = 1.0 if group == replicas else differing(group)
    return 2 * (1 - momentum**2) / (1 + momentum * (1 - 2 * q))


def paper_bounds(momentum: float, group: int) -> tuple[float, float]:
    """Return the (lower, upper) bounds of Eq. 74 on the pull gamma.

    They are sqrt(n / (2 (n - 1))) alpha < gamma < sqrt(n / (2 (n - 1)) (2 + alpha^2)), with n the size of a group.
    Raises ValueError where n is below 2.
    """
    if group < 2:
        raise ValueError(f"Eq. 74 is for groups of 2 and more, got {group}")
    ratio = group / (2 * (group - 1))
    return math.sqrt(ratio) * momentum, math.sqrt(ratio * (2 + momentum**2))


def driven_bounds(momentum: float, lr: float, group: int) -> tuple[float, float]:
    """Return the pulls (lowest, highest) with which replicas stay together on a quadratic whose optimum they reach.

    This is Eq. 74 without its approximation: the paper's case of inner steps that forget where they began
    (drive = lr), for many replicas. Pulls below 4 are tried in steps of 0.001; (nan, nan) where none will do.
    """
    pulls = np.arange(0.001, 4, 0.001)
    q = differing(group)
    inside = pulls[growth(np.stack([second_moments(momentum, g, q, drive=lr) for g in pulls])) < 1]
    return (float(inside[0]), float(inside[-1])) if len(inside) else (math.nan, math.nan)


def second_moments(momentum: float, pull: float, q: float, *, drive: float = 0.0) -> NDArray[np.float64]:
    """Return the linear map [3, 3] of (E phi^2, E phi m, E m^2), of what replicas differ by, in one outer step.

    drive: beta (1 - b^H), the outer step towards the optimum of a quadratic that H inner steps contract by b each;
    zero where replicas compute nothing. With P + Q = 1 and P Q = 0

        m' = alpha m - (drive P + gamma Q) phi,   phi' = phi + m'
    """
    first = drive * (1 - q) + pull * q  # E of drive P + gamma Q
    second = drive**2 * (1 - q) + pull**2 * q  # and of its square
    moved = np.array([second, -2 * momentum * first, momentum**2])  # E m'^2
    across = np.array([-first, momentum, 0.0])  # E phi m'
    stayed = np.array([1.0, 0.0, 0.0])
    return np.stack([stayed + 2 * across + moved, across + moved, moved])


def growth(moments: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the factor [...] by which the differences between replicas grow in an outer step.

    It is the square root of the magnitude of the map's largest eigenvalue. `moments` is one map of `second_moments` or
    many, [..., 3, 3].
    """
    return np.sqrt(np.abs(np.linalg.eigvals(moments)).max(-1))


@dataclass(frozen=True)
class Quadratic:
    """The loss 1/2 a (theta - c)^2 of one weight, where c has mean 0 and variance `noise` (Eq. 8).

    Inner SGD takes H steps theta <- theta - omega a (theta - c), beginning at phi, and c is drawn anew at each. Raises
    ValueError where omega a is not above 0 and at most 1.
    """

    curvature: float  # a
    noise: float  # variance of c
    inner_lr: float  # omega
    inner_steps: int  # H, per outer step

    def __post_init__(self) -> None:
        if not 0 < self.inner_lr * self.curvature <= 1:
            raise ValueError(
                f"inner_lr x curvature = {self.inner_lr * self.curvature:g} must be above 0 and at most 1 (section A.2)"
            )

    @property
    def kept(self) -> float:
        """The factor b^H that H inner steps leave of phi (Eq. 18), with b = 1 - omega a."""
        return (1 - self.inner_lr * self.curvature) ** self.inner_steps

    @property
    def inner_variance(self) -> float:
        """The variance that H inner steps add: (omega a)^2 noise (1 - b^2H) / (1 - b^2)."""
        step = self.inner_lr * self.curvature
        return step**2 * self.noise * sum((1 - step) ** (2 * k) for k in range(self.inner_steps))

    def stationary(self, *, momentum: float, lr: float, pull: float, group: int, replicas: int) -> tuple[float, float]:
        """Return the variances of slow weights in the long run: of the mean over replicas, and of a replica about it.

        Raises ValueError where either grows without end.
        """
        drive, noise = lr * (1 - self.kept), lr**2 * self.inner_variance
        q = differing(group, replicas)
        found = []
        for share, fed in ((0.0, noise / replicas), (q, noise * (1 - q))):
            move = second_moments(momentum, pull, share, drive=drive)
            if (factor := growth(move)) >= 1:
                raise ValueError(f"no stationary variance: second moments grow by {factor**2:.4g} an outer step")
            found.append(float(np.linalg.solve(np.eye(3) - move, np.full(3, fed))[0]))
        mean, apart = found
        return mean, apart * (replicas - 1) / replicas

    def simulate(
        self,
        *,
        momentum: float,
        lr: float,
        pull: float,
        group: int,
        replicas: int,
        turns: int,
        weights: int = 256,
        start: float = 1.0,
        seed: int = 0,
    ) -> NDArray[np.float64]:
        """Simulate outer steps, and return slow weights [turns + 1, replicas, weights] at first and after each step.

        At first all are equal to `start`. Each of the `weights` is a problem of its own, independent of the others.
        Raises ValueError where `group` does not divide the replicas.
        """
        rng = np.random.default_rng(seed)
        phi = np.full((replicas, weights), start)
        m, seen = np.zeros_like(phi), [phi]
        for _ in range(turns):
            theta = phi
            for _ in range(self.inner_steps):
                c = rng.normal(0.0, math.sqrt(self.noise), phi.shape)
                theta = theta - self.inner_lr * self.curvature * (theta - c)
            met = _draw(rng, replicas, group)
            phi, m = _outer_step(phi, m, met, momentum, pull, towards=lr * _mean(theta - phi, met))
            seen.append(phi)
        return np.stack(seen)


def _draw(rng: np.random.Generator, replicas: int, group: int) -> NDArray[np.int64]:
    """Draw random groups of replicas, [M / n, n]."""
    if replicas % group:
        raise ValueError(f"groups of {group} must divide {replicas} replicas here")
    return rng.permutation(replicas).reshape(-1, group)


def _mean(x: NDArray[np.float64], met: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return for each replica of x [M, ...] the mean over its group; `met` holds the groups [M / n, n]."""
    out = np.empty_like(x)
    out[met] = x[met].mean(1, keepdims=True)
    return out


def _outer_step(
    phi: NDArray[np.float64],
    m: NDArray[np.float64],
    met: NDArray[np.int64],
    momentum: float,
    pull: float,
    *,
    towards: NDArray[np.float64] | float = 0.0,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (phi, m) of all replicas after Eqs. 2 and 3; `towards` is beta times the mean move of inner steps."""
    m = momentum * m + towards + pull * (_mean(phi, met) - phi)
    return phi + m, m


def idle_growth(
    momentum: float, pull: float, group: int, *, replicas: int = 512, turns: int = 400, weights: int = 32, seed: int = 0
) -> float:
    """Return the factor by which the spread of replicas that compute nothing grows in an outer step, by simulation.

    It is the geometric mean over the second half of the turns; in theory it is `growth` of `second_moments`. Raises
    ValueError where `group` does not divide the replicas.
    """
    rng = np.random.default_rng(seed)
    phi = rng.standard_normal((replicas, weights))
    phi -= phi.mean(0)
    m, logs = np.zeros_like(phi), []
    for _ in range(turns):
        phi, m = _outer_step(phi, m, _draw(rng, replicas, group), momentum, pull)
        phi, m = phi - phi.mean(0), m - m.mean(0)  # zero but for rounding, which would outlast all the rest
        size = math.sqrt((phi**2).mean() + (m**2).mean())
        phi, m = phi / size, m / size
        logs.append(math.log(size))
    return math.exp(np.mean(logs[turns // 2 :]))
