"""Which pull holds together replicas that meet in random groups; `noloco` has the theory behind it."""

from __future__ import annotations

import math


def differing(group: int, replicas: float = math.inf) -> float:
    """q: the share of what replicas differ by that differs inside random groups, (R - groups) / (R - 1).

    (n - 1) R / (n (R - 1)) where n divides R, (n - 1) / n for many replicas, 1 for a group of all.
    """
    if not 1 <= group <= replicas:
        raise ValueError(f"groups of {group} among {replicas} replicas: the size must be between 1 and the replicas")
    if math.isinf(replicas):
        return (group - 1) / group
    return (replicas - replicas // group) / (replicas - 1) if replicas > 1 else 0.0


def contraction_bound(momentum: float, group: int, replicas: float = math.inf) -> float:
    """The pull (gamma) from which on replicas that compute nothing no longer come together.

    gamma* = 2 (1 - alpha^2) / (1 + alpha (1 - 2 q)), where the largest eigenvalue of `noloco.second_moments` reaches 1:
    2 (1 - alpha^2) for pairs among many. A group of all: 2 (1 + alpha), as of any heavy ball. For groups of a part of
    the replicas this takes q at its least, that of many replicas, so that the bound holds however many there are and
    where some groups are larger.
    """
    q = 1.0 if group == replicas else differing(group)
    return 2 * (1 - momentum**2) / (1 + momentum * (1 - 2 * q))
