"""GASLoC: DiLoCo on the complete graph, and for any graph in the mean over replicas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowcomm import LocalUpdates, run_threads
from lowcomm.comm.world import World
from lowcomm.methods.config import MethodConfig
from lowcomm.methods.plan import Plan
from lowcomm.settings import ConfigError

NUMEL, TURNS = 300, 7
RATES = {"outer_lr": 0.7, "outer_momentum": 0.6, "sync_every_steps": 1}
GOSSIP = RATES | {"outer": "gasloc"}
PAIRS = {"peers": "group", "group_size": 2}


def moves(replica: int, turn: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * replica + turn))


def begun(world: World, **method: object) -> list[Tensor]:
    """Where a replica begins its inner steps after each turn, if these move it by `moves` wherever it is."""
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
