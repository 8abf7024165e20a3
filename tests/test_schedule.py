"""Outer rates and momenta that follow points of a run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowcomm import LocalUpdates, run_threads
from lowcomm.comm.world import World
from lowcomm.methods.config import MethodConfig
from lowcomm.methods.plan import Plan
from lowcomm.methods.schedule import Points
from lowcomm.settings import ConfigError

STEPS = 12


def test_lines_between_points_and_flat_ends() -> None:
    points = Points(["1@0.25", "2@0.5", "0@1"], "x")
    assert [points.at(s) for s in (0, 0.25, 0.375, 0.5, 0.75, 1)] == [1, 1, 1.5, 2, 1, 0]
    assert Points(["3@0.5"], "x").at(0.9) == 3


@pytest.mark.parametrize(("overlap", "replicas"), [(0, 1), (2, 2)])
def test_each_turn_has_the_numbers_of_its_step(overlap: int, replicas: int) -> None:
    """Nesterov's momentum by hand, with the rate and the momentum of the step after which a turn was sent."""
    shape, momenta = ["0@0", "2@0.5", "0.4@1"], ["0.9@0", "0.3@1"]

    def work(world: World) -> list[Tensor]:
        x = nn.Parameter(torch.zeros(5))
        sync = LocalUpdates(
            {"x": x},
            world,
            steps=STEPS,
            sync_every_steps=3,
            overlap_steps=overlap,
            outer_lr=0.5,
            outer_lr_shape=shape,
            outer_momentum_points=momenta,
        )
        agreed = []
        for _ in range(STEPS):
            with torch.no_grad():
                x.add_(1.0)
            sync.step()
            agreed.append(sync.fragments[0].agreed.clone())
        sync.finish()
        return [*agreed, sync.fragments[0].agreed.clone()]

    (found, *_) = run_threads(work, replicas=replicas)
    phi, buffer, theta = 0.0, 0.0, 0.0
    expected: dict[int, float] = {}
    pending: list[tuple[int, float, float]] = []
    for step in range(1, STEPS + 1):
        theta += 1
        if step % 3 == 0:
            pending.append((step + overlap, phi - theta, step / STEPS))
        if pending and (pending[0][0] <= step or step == STEPS):
            _, delta, share = pending.pop(0)
            lr = 2 * share if share <= 0.5 else 1 - 1.6 * (share - 0.5)
            momentum = 0.9 - 0.6 * share
            buffer = momentum * buffer + delta
            phi = phi - lr * (delta + momentum * buffer)
            theta = phi
        expected[step] = phi
    assert found[-1][0].item() == pytest.approx(expected[STEPS], rel=1e-5)
    for step in range(1, STEPS):
        assert found[step - 1][0].item() == pytest.approx(expected[step], rel=1e-5)


def test_what_is_no_schedule_is_refused() -> None:
    def plan(**settings: object) -> Plan:
        return Plan({"x": (4,)}, MethodConfig("parameters", outer="nesterov", **settings), 2)

    with pytest.raises(ConfigError, match=r"method.outer_lr_shape: '0.1' is no point of a run, as \"0.7@0.1\" is"):
        plan(outer_lr_shape=("0.1",))
    with pytest.raises(ConfigError, match="shares of a run go from 0 to 1, each above the one before"):
        plan(outer_lr_shape=("1@0.5", "1@0.1"))
    with pytest.raises(
        ConfigError, match="method.outer_momentum_points: method.outer_momentum must be below 1, got 1.5"
    ):
        plan(outer_momentum_points=("0.9@0", "1.5@1"))
    with pytest.raises(ConfigError, match=r"method.outer_lr_shape needs the steps of the whole run"):
        plan(outer_lr_shape=("1@0",)).outer_at(3, None)
    with pytest.raises(ConfigError, match="values must be finite"):
        plan(outer_lr_shape=("inf@0",))
    pairs = {"peers": "group", "outer": "noloco", "outer_lr": 0.7, "outer_pull": 0.4, "outer_lr_shape": ("1@0",)}
    with pytest.raises(ConfigError, match="method.outer_lr_shape does not go with method.outer = noloco"):
        Plan({"x": (4,)}, MethodConfig("parameters", **pairs), 4)


def test_rates_that_follow_points_hold_where_parameters_travel() -> None:
    """At a rate of 0 nothing moves."""

    def work(world: World) -> Tensor:
        x = nn.Parameter(torch.ones(5))
        pairs = {"peers": "group", "group_size": 2, "outer": "gasloc", "outer_lr_shape": ["0@0"], "outer_momentum": 0.0}
        sync = LocalUpdates({"x": x}, world, steps=4, sync_every_steps=2, outer_lr=0.7, **pairs)
        for _ in range(4):
            with torch.no_grad():
                x.add_(1.0 + world.replica)
            sync.step()
        sync.finish()
        return sync.fragments[0].agreed.clone()

    for agreed in run_threads(work, replicas=2):
        assert torch.allclose(agreed, torch.ones(5), rtol=0, atol=1e-6)
