"""Means: the rules by which a group combines the messages of its members.

An ordinary mean lets a single replica that sends nonsense decide. The robust ones bound what a few can do: the
coordinate-wise median and trimmed mean (Yin et al., 2018, arXiv:1803.01498), and clipping to the median norm, as
Covenant-72B has it for outer gradients. Members that move in unlike directions have a mean that is shorter than they
are, unless lengths and directions are averaged apart. Sparse messages raise a question of their own: whether a member
that has sent nothing at a place counts as zero there (SparseLoCo's Algorithm 1) or not at all (its public code, and
DeMo's).

Each member computes norms by itself, so with a mean that depends on them replicas stay equal to the last bit where
their machines round alike.

To add one, write a file in this folder with a class that derives from `Mean` and has `names`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lowcomm.choices import Choice
from lowcomm.comm.encoded import weighted_mean
from lowcomm.methods.config import MethodConfig
from lowcomm.settings import ConfigError


class Mean(Choice, ABC):
    """A rule by which the values of several members become one.

    Attributes:
        is_ordinary: whether it is the mean that `World.mean` computes.
        by_coordinate: whether each value depends on the members' values in its place alone, so that each member can
            compute a share of the values; else each member needs all messages whole.
        at_once: whether the values of all members are held at once, or one member's after the other's.
    """

    is_ordinary: ClassVar[bool] = False
    by_coordinate: ClassVar[bool] = True
    at_once: ClassVar[bool] = True

    @classmethod
    def of(cls, method: MethodConfig) -> Mean:
        """Make the mean with the settings of a method."""
        return cls()

    @classmethod
    def check(cls, method: MethodConfig, members: int) -> None:
        """Raise ConfigError for settings with which the mean does not work; `members` is how many own a value."""

    @abstractmethod
    def over(self, parts: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
        """Return the mean [n] of the values [n] of the members, which are scratch afterwards.

        weights: one for each member, 0 or above, of which one is above 0; for replicas that come and go, the numbers of
            their tokens.
        """


class Ordinary(Mean):
    """The weighted mean of all members."""

    names = ("mean",)
    is_ordinary = True
    at_once = False

    def over(self, parts: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
        return weighted_mean(parts, weights)


class OfSenders(Mean):
    """The mean, at each place, of those members that have sent a value there: those whose value is not zero.

    Codecs that send all values round some to zero; these count as not sent.
    """

    names = ("senders",)
    at_once = False

    def over(self, parts: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
        total = sent = None
        for part, weight in zip(parts, weights, strict=True):
            there = (part != 0).to(part.dtype).mul_(weight)
            sent = there if sent is None else sent.add_(there)
            total = part * weight if total is None else total.add_(part, alpha=weight)
        return total.div_(sent.where(sent > 0, 1.0))


class Median(Mean):
    """The median at each place; of an even number of members, the mean of the middle two. All members weigh alike."""

    names = ("median",)

    @classmethod
    def check(cls, method: MethodConfig, members: int) -> None:
        """Refuse groups of one or two members, whose median is their mean."""
        if members < 3:
            raise ConfigError(f"method.mean = median needs 3 members or more: of {members} it is the mean")

    def over(self, parts: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
        messages = list(parts)
        return _middle(messages, (len(messages) - 1) // 2)


class Trimmed(Mean):
    """The mean, at each place, without the largest and the smallest values. All values that are left weigh alike.

    share: the share of the members that is left out at each end; their number is rounded down, and never so large that
        no value is left.
    """

    names = ("trimmed",)
    settings = ("mean_trim",)

    def __init__(self, share: float):
        self.share = share

    @classmethod
    def of(cls, method: MethodConfig) -> Trimmed:
        return cls(method.mean_trim)

    @classmethod
    def check(cls, method: MethodConfig, members: int) -> None:
        """Refuse a share that leaves out no member, or all of them."""
        if not 1 <= _count(method.mean_trim, members) <= (members - 1) / 2:
            raise ConfigError(
                f"method.mean_trim = {method.mean_trim} of {members} members must leave out one at each end, and leave"
                " one or more"
            )

    def over(self, parts: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
        messages = list(parts)
        return _middle(messages, min(_count(self.share, len(messages)), (len(messages) - 1) // 2))


class Clipped(Mean):
    """The mean of the messages, of which those with a norm above the median norm are scaled down to it first.

    It bounds how far one member can push, not in which direction. All members weigh alike, as what they say that they
    have trained on cannot be checked, and a message with a value that is not finite counts as zero. The norm is of what
    is reduced at a time: of a fragment; where replicas train slices, of a slice of one; and with a codec that encodes
    parameters by themselves, of one parameter.
    """

    names = ("clipped",)
    by_coordinate = False

    @classmethod
    def check(cls, method: MethodConfig, members: int) -> None:
        """Refuse groups of one or two members, whose median norm grows with the larger one."""
        if members < 3:
            raise ConfigError(f"method.mean = clipped needs 3 members or more: of {members} it bounds nothing")

    def over(self, parts: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
        messages = list(parts)
        norms = torch.stack(torch._foreach_norm(messages))
        there = norms.isfinite()
        norms = norms.where(there, 0.0)
        factors = (norms.quantile(0.5) / norms.clamp_min(1e-30)).clamp(max=1.0)
        clipped = ((m * f).where(ok, 0.0) for m, f, ok in zip(messages, factors, there, strict=True))
        return weighted_mean(clipped, [1] * len(messages))


class Radial(Mean):
    """The mean direction of the messages, scaled to their mean length: lengths and directions are averaged apart.

        u = sum_m w_m x_m / |x_m|,   mean = (u / |u|) sum_m w_m |x_m| / sum_m w_m

    Decoupled DiLoCo (arXiv:2604.21428) averages fragments radially; the formula is inferred from that word. The norm is
    of what is reduced at a time, as for `Clipped`. Messages that cancel have a mean as long as they are, in whatever
    direction is left of them; so it suits replicas that see much of the same text.
    """

    names = ("radial",)
    by_coordinate = False

    def over(self, parts: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
        messages = list(parts)
        norms = torch.stack(torch._foreach_norm(messages))
        length = torch.dot(norms, norms.new_tensor(weights)) / sum(weights)
        direction = weighted_mean((m / n for m, n in zip(messages, norms.clamp_min(1e-30), strict=True)), weights)
        return direction.mul_(length / direction.norm().clamp_min(1e-30))


def _count(share: float, members: int) -> int:
    """Return a share of the members as a number of them, rounded down, but for the rounding of the share itself."""
    return int(share * members + 1e-9)


#: Values of each member that are sorted at a time: sorting takes several times as much memory as they do.
_AT_ONCE = 1 << 20


def _middle(messages: list[Tensor], cut: int) -> Tensor:
    """Return the mean at each place [n] without the `cut` largest and the `cut` smallest values."""
    found = torch.empty_like(messages[0])
    for out, *some in zip(found.split(_AT_ONCE), *(m.split(_AT_ONCE) for m in messages), strict=True):
        ordered = torch.stack(some).sort(0).values
        torch.mean(ordered[cut : len(messages) - cut], 0, out=out)
    return found
