"""GASLoC: DiLoCo on the complete graph, and for any graph in the mean over replicas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lowcomm import LocalUpdates, run_threads
from lowcomm.comm.world import World
from lowcomm.methods.config import MethodConfig
from lowcomm.methods.gasloc import momentum_bound, second_moments
from lowcomm.methods.noloco import differing
from lowcomm.methods.plan import Plan
from lowcomm.settings import ConfigError

NUMEL, TURNS = 300, 7
RATES = {"outer_lr": 0.7, "outer_momentum": 0.6, "sync_every_steps": 1}
GOSSIP = RATES | {"outer": "gasloc"}
PAIRS = {"peers": "group", "group_size": 2}


def moves(replica: int, turn: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * replica + turn))


def begun(world: World, **method: object) -> list[Tensor]:
    """Return where a replica begins its inner steps after each turn, if these move it by `moves` wherever it is."""
    x = nn.Parameter(torch.ones(NUMEL))
    sync, found = LocalUpdates({"x": x}, world, steps=TURNS, **method), []
    for turn in range(TURNS):
        with torch.no_grad():
            x.add_(moves(world.replica, turn))
        sync.step()
        found.append(x.detach().clone())
    assert world.ledger.by_purpose()["replica/outer"] == sync.sent_bytes(TURNS)["outer"]
    return found


def test_on_the_complete_graph_it_is_diloco() -> None:
    gossip = run_threads(lambda w: begun(w, **GOSSIP), replicas=3)
    diloco = run_threads(lambda w: begun(w, **RATES, outer="nesterov"), replicas=3)
    for ours, theirs in zip(gossip, diloco, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(gossip[0], gossip[2], strict=True))


@pytest.mark.parametrize("replicas", [4, 6])
def test_over_pairs_the_mean_over_replicas_is_diloco(replicas: int) -> None:
    gossip = run_threads(lambda w: begun(w, **GOSSIP, **PAIRS), replicas=replicas)
    diloco = run_threads(lambda w: begun(w, **RATES, outer="nesterov"), replicas=replicas)
    for turn in range(TURNS):
        mean = torch.stack([ours[turn] for ours in gossip]).mean(0)
        assert torch.allclose(mean, diloco[0][turn], rtol=0, atol=1e-5)
    assert any(not torch.equal(ours[-1], gossip[0][-1]) for ours in gossip)


@pytest.mark.parametrize("replicas", [4, 8])
def test_without_momentum_it_is_nolocos_pairs_as_they_come_to_their_mean(replicas: int) -> None:
    """At full rates both put the mean of a pair's parameters in their place; with a momentum they part."""

    def run(method: dict[str, object]) -> list[list[Tensor]]:
        return run_threads(lambda world: begun(world, **PAIRS, sync_every_steps=1, **method), replicas=replicas)

    rates = {"outer_lr": 1.0, "outer_momentum": 0.0}
    ours, theirs = run({"outer": "gasloc"} | rates), run({"outer": "noloco", "outer_pull": 1.0} | rates)
    for one, other in zip(ours, theirs, strict=True):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one, other, strict=True))
    rates["outer_momentum"] = 0.3
    ours, theirs = run({"outer": "gasloc"} | rates), run({"outer": "noloco", "outer_pull": 1.0} | rates)
    assert not torch.allclose(ours[0][-1], theirs[0][-1], atol=0.1)


def test_over_pairs_by_hand() -> None:
    """The paper's two lines, with the weights of the pairs that are drawn."""
    replicas = 4
    found = run_threads(lambda w: begun(w, **GOSSIP, **PAIRS), replicas=replicas)
    plan = Plan({"x": (NUMEL,)}, MethodConfig("parameters", **GOSSIP, **PAIRS), replicas)
    theta, x = [torch.ones(replicas, NUMEL).double() for _ in range(2)]
    for turn in range(TURNS):
        weights = torch.zeros(replicas, replicas, dtype=torch.float64)
        for i in range(replicas):
            weights[i, plan.group(0, turn, i)] = 0.5
        moved = torch.stack([moves(i, turn) for i in range(replicas)]).double()
        following = weights @ (theta + 0.7 * moved)
        theta, x = following + 0.6 * (following - x), following
        for i in range(replicas):
            assert torch.allclose(found[i][turn].double(), theta[i], rtol=0, atol=1e-5)


def test_parameters_are_sent_as_they_are() -> None:
    with pytest.raises(ConfigError, match=r"method.outer = gasloc sends parameters, so method.codec must be fp32"):
        Plan({"x": (4,)}, MethodConfig("parameters", codec="e3m0", **GOSSIP), 2)


def spread(momentum: float, replicas: int, turns: int = 60) -> float:
    """Return how many times further apart replicas that compute nothing are after so many turns in pairs."""
    rng, dims = np.random.default_rng(0), 2000
    theta = rng.standard_normal((replicas, dims))
    x, begin = theta.copy(), theta.std(0).mean()
    for _ in range(turns):
        pairs = rng.permutation(replicas).reshape(-1, 2)
        following = np.empty_like(theta)
        following[pairs] = theta[pairs].mean(1, keepdims=True)
        theta, x = following + momentum * (following - x), following
    return float(theta.std(0).mean() / begin)


@pytest.mark.parametrize(("replicas", "expected"), [(8, 0.859), (16, 0.815), (10_000, 0.781)])
def test_beyond_a_momentum_pairs_drift_apart(replicas: int, expected: float) -> None:
    bound = momentum_bound(2, replicas)
    assert bound == pytest.approx(expected, abs=1e-3)

    def largest(momentum: float) -> float:
        return float(np.abs(np.linalg.eigvals(second_moments(momentum, 1 - differing(2, replicas)))).max())

    assert largest(bound - 0.01) < 1 < largest(bound + 0.01)
    if replicas < 100:
        assert spread(bound - 0.2, replicas) < 0.2
        assert spread(bound + 0.1, replicas) > 2
    with pytest.raises(ConfigError, match=r"method.outer_momentum \(gamma\) = 0.9 must be below"):
        Plan({"x": (4,)}, MethodConfig("parameters", **(GOSSIP | PAIRS | {"outer_momentum": 0.9})), replicas)


def test_owners_of_a_slice_must_meet_and_come_together() -> None:
    """A group of as many replicas as there are slices has one owner of each, who never meets another.

    In larger groups the bound on the momentum is that of the owners of a slice, who are fewer than the replicas.
    """
    sliced = {"trainable": "slice", "sliced": ["up:0"], "slices": 2}

    def plan(replicas: int, **settings: Any) -> Plan:
        return Plan({"up": (4, 2)}, MethodConfig("parameters", **(GOSSIP | PAIRS | sliced | settings)), replicas)

    for outer in ({}, {"outer": "average", "outer_lr": 1.0, "outer_momentum": 0.0}):
        with pytest.raises(ConfigError, match=r"method.group_size = 2 must be at least twice method.slices = 2"):
            plan(8, **outer)
        plan(8, group_size=4, **outer)
        plan(2, **outer)
    with pytest.raises(ConfigError, match=r"below 0.8587: in groups of 2 of 8 the owners of a slice drift apart"):
        plan(16, group_size=4, outer_momentum=0.9)


def test_four_in_pairs_larger_groups_and_everyone_stay_together_at_any_momentum() -> None:
    assert momentum_bound(2, 4) == pytest.approx(1.0)
    assert momentum_bound(3) == pytest.approx(1.0)
    assert momentum_bound(4, 8) > 1
    assert math.isinf(momentum_bound(5, 5))
