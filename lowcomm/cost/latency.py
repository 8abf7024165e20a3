"""The cost of waiting for others (NoLoCo, section 5.3): trees of messages, and training that blocks.

Messages take a log-normal time t, exp(N(mu, sigma^2)). An all-reduce over a binary tree sums towards the root, each
parent waiting for two children, and then hands the sum down again; averaging in pairs is one such step each way. With L
= log2(workers) levels and T_0 = 0, the time until a parent of level l + 1 has both its children's is

    T_{l+1} = max(T_l + t, T_l' + t')       independent copies

and the same holds from the root down, so the two take 2 E(T_L) and 2 E(T_1). E(T_1) is Eq. 7.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from lowcomm.cost.simulate import Timeline
from lowcomm.methods.routing import groups


def sigma_of(std_over_mean: float) -> float:
    """Return sigma of a log-normal time with this ratio of standard deviation to mean: sqrt(ln(1 + ratio^2))."""
    return math.sqrt(math.log1p(std_over_mean**2))


def pair_seconds(mu: float, sigma: float) -> float:
    """Return E max(t, t') of two log-normal times, Eq. 7: (1 + erf(sigma / 2)) exp(mu + sigma^2 / 2)."""
    return (1 + math.erf(sigma / 2)) * math.exp(mu + sigma**2 / 2)


def expected_max(count: int, sigma: float, *, cells: int = 4096) -> float:
    """Return the expected maximum of `count` independent log-normal times of mean 1; for two, it is `pair_seconds`.

    It is the integral of P(max > t) over t, on a grid of `cells` points in the logarithm of t. Raises ValueError where
    `count` is below 1.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if sigma == 0 or count == 1:
        return 1.0
    z = np.linspace(-8.0, 8.0 + math.sqrt(2 * math.log(count)), cells)
    below = np.array([(1 + math.erf(v / math.sqrt(2))) / 2 for v in z]) ** count
    times = np.exp(sigma * z - sigma**2 / 2)
    return float(np.trapezoid(1 - below, times) + times[0])


def levels(workers: int) -> int:
    """Return the number of levels L of the tree. Raises ValueError where `workers` is not a power of two, 2 or more."""
    if workers < 2 or workers & (workers - 1):
        raise ValueError(f"{workers} workers do not fill a binary tree: use a power of two")
    return workers.bit_length() - 1


def tree_samples(workers: int, sigma: float, samples: int, seed: int = 0) -> NDArray[np.float64]:
    """Draw `samples` values of T_L [samples], message by message over the whole tree; messages take 1 on average.

    Raises ValueError where `workers` is no power of two.
    """
    rng, depth = np.random.default_rng(seed), levels(workers)
    found = []
    at_once = max(1, 4_000_000 // workers)
    for begin in range(0, samples, at_once):
        times = np.zeros((min(at_once, samples - begin), workers))
        for _ in range(depth):
            times = times + rng.lognormal(-(sigma**2) / 2, sigma, times.shape)
            times = times.reshape(len(times), -1, 2).max(2)
        found.append(times[:, 0])
    return np.concatenate(found)


def tree_mean(workers: int, sigma: float, *, cells: int = 1 << 17) -> float:
    """Return E(T_L) by convolving densities on a grid of `cells`, without drawing; messages take 1 on average.

    Raises ValueError where `workers` is no power of two.
    """
    depth = levels(workers)
    if sigma == 0:
        return float(depth)
    # The grid ends where one message in the tree comes with probability below 1e-6.
    end = math.exp(-(sigma**2) / 2 + sigma * math.sqrt(2 * math.log(1e6 * workers))) + 4 * depth
    edges = np.linspace(0, end, cells + 1)
    with np.errstate(divide="ignore"):
        z = (np.log(edges) + sigma**2 / 2) / (sigma * math.sqrt(2))
    message = np.diff((1 + np.array([math.erf(v) for v in z])) / 2)  # probability of each cell
    spectrum = np.fft.rfft(message, 2 * cells)
    ready = np.zeros(cells)
    ready[0] = 1.0
    for level in range(depth):
        total = message if level == 0 else np.fft.irfft(np.fft.rfft(ready, 2 * cells) * spectrum, 2 * cells)[:cells]
        below = np.minimum(np.cumsum(total), 1.0)
        ready = np.diff(below**2, prepend=0.0)
    # A sum of cells lies half a cell later for each message beyond the first.
    middle = (edges[1:] + edges[:-1]) / 2 + (depth - 1) * (edges[1] - edges[0]) / 2
    return float(ready @ middle + (1 - ready.sum()) * end)


def tree_over_pairs(workers: int, std_over_mean: float) -> float:
    """Return the expected time of the tree over that of averaging in pairs (Figure 5A).

    It is log2(workers) where messages take equal times. Raises ValueError where `workers` is no power of two.
    """
    sigma = sigma_of(std_over_mean)
    return tree_mean(workers, sigma) / pair_seconds(-(sigma**2) / 2, sigma)


def blocking(
    workers: int,
    inner_steps: list[int],
    *,
    outer_steps: int,
    mu: float,
    sigma: float,
    group: int | None,
    seed: int = 0,
) -> NDArray[np.float64]:
    """Return the seconds until all workers have done `outer_steps`, one value for each of `inner_steps` (Figure 5B).

    `inner_steps` are numbers of inner steps per outer step. An inner step takes a log-normal time of `mu` and `sigma`;
    after each outer step a worker waits for its group, of `group` workers and drawn anew each time, or for everybody
    (None). Messages take no time. Raises ValueError where a number of inner steps is below 1.
    """
    if min(inner_steps) < 1:
        raise ValueError(f"inner_steps must be at least 1, got {min(inner_steps)}")
    rng, timeline = np.random.default_rng(seed), Timeline()
    longest = max(inner_steps)
    at = np.array(inner_steps) - 1
    for outer in range(outer_steps):
        # The first H of the longest round's draws, for each H.
        spent = np.cumsum(rng.lognormal(mu, sigma, (workers, longest)), axis=1)[:, at]
        ends = [timeline.add(worker, spent[worker]) for worker in range(workers)]
        if group is None:
            met = [list(range(workers))]
        else:
            met = groups(seed, (0, outer), workers, group)
        for members in met:
            together = np.max([ends[i] for i in members], axis=0)
            for worker in members:
                timeline.add(worker, 0.0, [together])
    return np.max([timeline.free(worker) for worker in range(workers)], axis=0)


@functools.lru_cache(maxsize=4096)
def uneven(
    replicas: int,
    std_over_mean: float,
    *,
    stages: int = 1,
    micro_batches: int = 1,
    every: int = 0,
    group: int | None = None,
    overlap: int = 0,
    routed: bool = False,
    seed: int = 0,
) -> float:
    """Return the factor by which machines that are now faster and now slower lengthen a step.

    The time that a machine computes for a step is a log-normal factor times the mean. Stages of a replica end a step
    together: in GPipe's order it takes (sum_s f_s + (M - 1) max_s f_s) / (M + S - 1), over random routes (`routed`)
    with the slowest of all replicas' machines at each stage. Replicas wait for each other after every `every` steps (0:
    never), for what was sent `overlap` steps before: all for all (`group` None), or in random groups of `group`, drawn
    anew each time. The factors are drawn with `seed`.
    """
    if std_over_mean == 0:
        return 1.0
    sigma, turns = sigma_of(std_over_mean), 20
    steps = max(400, turns * every)
    factors = np.random.default_rng(seed).lognormal(-(sigma**2) / 2, sigma, (steps, replicas, stages))
    if routed:
        factors = np.broadcast_to(factors.max(1, keepdims=True), factors.shape)
    took = (factors.sum(-1) + (micro_batches - 1) * factors.max(-1)) / (micro_batches + stages - 1)
    if every == 1 and group is None and overlap == 0:
        return float(took.max(1).mean())
    clocks, coming = np.zeros(replicas), {}
    for step in range(1, steps + 1):
        clocks = clocks + took[step - 1]
        if every and step % every == 0:
            there = np.full(replicas, clocks.max())
            if group is not None:
                for members in groups(seed, (0, step // every), replicas, group):
                    there[members] = clocks[members].max()
            coming[step + overlap] = there
        if step in coming:
            clocks = np.maximum(clocks, coming.pop(step))
    return float(clocks.mean()) / steps
