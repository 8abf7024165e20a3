"""Bases: orthonormal, tile by tile, and DeMo as a combination of choices, against its public code's steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lowcomm import DeMo, run_threads
from lowcomm.choices import options
from lowcomm.comm.world import World
from lowcomm.methods.bases import Basis, cosines, tile_side
from lowcomm.methods.config import MethodConfig
from lowcomm.methods.plan import Plan
from lowcomm.settings import ConfigError
from tests.golden import public_code

SHAPES = [(128, 192), (96,), (66, 64), (7, 3, 5), (1,)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", options(Basis))
def test_each_basis_keeps_lengths_and_comes_back(name: str) -> None:
    basis = options(Basis)[name]()
    x, y = (drawn(sum(map(math.prod, SHAPES)), seed=seed) for seed in (0, 1))
    one, two = basis.into(x, SHAPES), basis.into(y, SHAPES)
    assert torch.allclose(basis.back(one, SHAPES), x, rtol=0, atol=1e-5)
    assert torch.dot(one, two).item() == pytest.approx(torch.dot(x, y).item(), abs=1e-2)
    assert one.norm().item() == pytest.approx(x.norm().item(), rel=1e-6)


@pytest.mark.parametrize("name", options(Basis))
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,)])
def test_a_parameter_without_values_has_no_tiles(name: str, shape: tuple[int, ...]) -> None:
    basis, shapes = options(Basis)[name](), [(6, 4), shape, (3,)]
    x = drawn(27)
    assert torch.equal(basis.into(x, shapes), basis.into(x, [(6, 4), (3,)]))
    assert torch.allclose(basis.back(basis.into(x, shapes), shapes), x, rtol=0, atol=1e-6)


def test_tiles_lie_one_after_the_other() -> None:
    x = torch.arange(128 * 192, dtype=torch.float32).view(128, 192)
    tiles = options(Basis)["tiles"]().into(x.flatten(), [(128, 192)]).view(-1, 64, 64)
    for index, tile in enumerate(tiles):
        row, column = divmod(index, 3)
        assert torch.equal(tile, x[64 * row : 64 * row + 64, 64 * column : 64 * column + 64])
    assert [tile_side(n) for n in (1, 7, 66, 96, 127, 128)] == [1, 7, 33, 48, 1, 64]


def test_cosines_are_those_of_the_definition() -> None:
    n, x = 8, drawn(8)
    found = cosines(n, x.device) @ x
    for k in range(n):
        scale = math.sqrt((1 if k == 0 else 2) / n)
        by_hand = scale * sum(float(x[j]) * math.cos(math.pi * k * (2 * j + 1) / (2 * n)) for j in range(n))
        assert found[k].item() == pytest.approx(by_hand, abs=1e-6)


def test_a_smooth_tile_needs_few_cosines() -> None:
    ramp = torch.linspace(-1, 1, 64)
    x = (ramp[:, None] + ramp[None, :] ** 2).flatten()
    largest = options(Basis)["cosines"]().into(x, [(64, 64)]).square().sort(descending=True).values
    assert largest[:8].sum() > 0.99 * largest.sum()
    assert x.square().sort(descending=True).values[:8].sum() < 0.05 * x.square().sum()


def test_demo_is_a_combination_of_choices() -> None:
    """Inner SGD at the same rate, every step a turn: its outer gradient is lr times the gradient. Held to the steps of
    bloc97/DeMo (`tests/golden/public_code.py`).
    """
    lr = public_code.DEMO["lr"]

    def work(world: World) -> dict[str, Tensor]:
        return public_code.moved(
            lambda named: DeMo(named, world, steps=public_code.STEPS, outer_lr=lr), lr, world.replica
        )

    found = run_threads(work, replicas=public_code.RANKS)
    for name, wanted in public_code.expected("demo").items():
        assert all(torch.equal(x[name], found[0][name]) for x in found)
        # A sign may differ where a mean is nearly zero.
        assert ((found[0][name] - wanted).abs() < 1e-6).float().mean() > 0.999


def test_it_means_nothing_where_nothing_is_lost() -> None:
    with pytest.raises(ConfigError, match="method.basis = cosines means nothing with method.codec = fp32"):
        Plan({"x": (4,)}, MethodConfig("parameters", outer="nesterov", basis="cosines"), 2)
    with pytest.raises(ConfigError, match="method.outer_momentum = 0.5 means nothing with method.outer = sign"):
        Plan({"x": (4,)}, MethodConfig("parameters", outer="sign", outer_momentum=0.5), 2)
