"""Means that are not ordinary: by hand, in shares and whole, and what each makes of a replica that sends nonsense."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lowcomm import LocalUpdates, run_threads
from lowcomm.choices import choose, options
from lowcomm.comm.world import World
from lowcomm.methods.config import MethodConfig
from lowcomm.methods.means import Mean
from lowcomm.methods.plan import OUTER, Plan
from lowcomm.settings import ConfigError

MEANS = list(options(Mean))
HEAVY = {"outer": "heavy_ball", "outer_lr": 1.0, "outer_momentum": 0.0, "sync_every_steps": 1}


def made(name: str) -> Mean:
    return choose(Mean, name, "mean").of(MethodConfig("parameters", mean=name, mean_trim=0.3))


def members(count: int, numel: int = 600) -> list[Tensor]:
    """Values with zeros among them."""
    draw = torch.Generator().manual_seed(count)
    return [torch.randn(numel, generator=draw) * (torch.rand(numel, generator=draw) > 0.4) for _ in range(count)]


def by_hand(name: str, values: list[Tensor], weights: list[float]) -> Tensor:
    """The same, a place after the other."""
    if name == "clipped":
        norms = sorted(float(v.norm()) for v in values)
        half = len(norms) // 2
        bound = norms[half] if len(norms) % 2 else (norms[half - 1] + norms[half]) / 2
        values, weights = [v * min(1.0, bound / float(v.norm())) for v in values], [1] * len(values)
    if name == "radial":
        norms = [float(v.norm()) for v in values]
        direction = torch.stack([w * v / n for v, w, n in zip(values, weights, norms, strict=True)]).sum(0)
        length = sum(w * n for w, n in zip(weights, norms, strict=True)) / sum(weights)
        return direction / direction.norm() * length
    found = []
    for at in range(values[0].numel()):
        here = [(float(v[at]), w) for v, w in zip(values, weights, strict=True)]
        if name == "senders":
            here = [(v, w) for v, w in here if v != 0] or [(0.0, 1.0)]
        if name in ("median", "trimmed"):
            cut = (len(here) - 1) // 2 if name == "median" else int(0.3 * len(here))
            here = [(v, 1.0) for v, _ in sorted(here)[cut : len(here) - cut]]
        found.append(sum(v * w for v, w in here) / sum(w for _, w in here))
    return torch.tensor(found)


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("count", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("weighted", [False, True])
def test_each_mean_by_hand(name: str, count: int, weighted: bool) -> None:
    values = members(count)
    weights = [1 + (i * 37) % 5 for i in range(count)] if weighted else [1] * count
    expected = by_hand(name, values, weights)
    assert torch.allclose(made(name).over([v.clone() for v in values], weights), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize(("codec", "replicas"), [("fp32", 4), ("e3m0", 4), ("e3m0", 12), ("topk", 4)])
def test_replicas_find_it_together_in_the_bytes_of_the_plan(name: str, codec: str, replicas: int) -> None:
    """Whole or in shares; all end with the same, and it is that of what was decoded."""
    method = HEAVY | {"codec": codec, "codec_keep": 0.3 if codec == "topk" else 1.0, "mean": name}
    method |= {"mean_trim": 0.3} if name == "trimmed" else {}

    def work(world: World) -> tuple[Tensor, int]:
        x = nn.Parameter(torch.zeros(600))
        sync = LocalUpdates({"x": x}, world, steps=1, **method)
        with torch.no_grad():
            x.copy_(members(replicas)[world.replica])
        sync.step()
        sent = world.ledger.by_purpose()[f"replica/{OUTER}"]
        assert sent == sync.sent_bytes(1)[OUTER]
        return x.detach().clone(), sent

    found = run_threads(work, replicas=replicas)
    plan = Plan({"x": (600,)}, MethodConfig("parameters", **method), replicas)
    decoded = [-plan.codec.decode(plan.codec.encode(-v), 600) for v in members(replicas)]
    expected = by_hand(name, decoded, [1] * replicas)
    for x, _ in found:
        assert torch.equal(x, found[0][0])
        assert torch.allclose(x, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["median", "trimmed", "clipped"])
def test_no_robust_mean_is_decided_by_a_weight_or_a_value_that_is_not_finite(name: str) -> None:
    """A replica may say that it has trained on any number of tokens, and it may encode any values."""
    honest, mean = [torch.ones(4) for _ in range(4)], options(Mean)[name]
    mean = mean(0.25) if name == "trimmed" else mean()
    for lie, weight in (([-50.0] * 4, 1e12), ([math.nan, 1, 1, 1], 1.0), ([math.inf] * 4, 1.0), ([-math.inf] * 4, 1e9)):
        messages = [*(one.clone() for one in honest), torch.tensor(lie)]
        found = mean.over(messages, [1.0] * 4 + [weight])
        assert found.isfinite().all()
        assert (found - 1).abs().max() <= 0.4 + 1e-6, lie  # a fifth of the members says the opposite, as loudly


def test_a_share_counts_as_what_it_is_in_decimals() -> None:
    values = [torch.tensor([float(i)]) for i in range(100)]
    values[-29:] = [torch.tensor([1e6])] * 29
    found = options(Mean)["trimmed"](0.29).over(values, [1] * 100)  # 0.29 * 100 is 28.999999999999996
    assert found.item() == pytest.approx(sum(range(29, 71)) / 42)


@pytest.mark.parametrize("name", ["median", "trimmed", "clipped"])
def test_one_that_sends_nonsense_moves_an_ordinary_mean_and_no_robust_one(name: str) -> None:
    def agreed(mean: str, byzantine: int) -> Tensor:
        method = HEAVY | {"mean": mean} | ({"mean_trim": 0.2} if mean == "trimmed" else {})
        method |= {"byzantine": byzantine, "byzantine_factor": -50.0} if byzantine else {}

        def work(world: World) -> Tensor:
            x = nn.Parameter(torch.zeros(1000))
            sync = LocalUpdates({"x": x}, world, steps=1, **method)
            with torch.no_grad():
                x.add_(1.0).add_(0.1 * members(8, 1000)[world.replica])
            sync.step()
            return x.detach().clone()

        return run_threads(work, replicas=8)[0]

    honest = agreed("mean", 0)
    assert (agreed("mean", 1) - honest).abs().max() > 5
    assert (agreed(name, 1) - honest).abs().max() < 0.5


def test_a_radial_mean_is_as_long_as_its_members_are() -> None:
    values = [torch.tensor([3.0, 0.0]), torch.tensor([0.0, 5.0]), torch.zeros(2)]
    found = made("radial").over([v.clone() for v in values[:2]], [1, 1])
    assert torch.allclose(found, torch.tensor([4.0, 4.0]) / 2**0.5)
    assert made("radial").over([values[2].clone(), values[2].clone()], [1, 1]).eq(0).all()


def test_what_means_nothing_is_refused() -> None:
    def plan(replicas: int = 4, **settings: object) -> Plan:
        return Plan({"x": (8,)}, MethodConfig("parameters", **(HEAVY | settings)), replicas)

    refused = [
        ({"mean": "median", "replicas": 2}, "method.mean = median needs 3 members or more: of 2 it is the mean"),
        ({"mean": "clipped", "replicas": 2}, "method.mean = clipped needs 3 members or more: of 2 it bounds nothing"),
        ({"mean": "trimmed", "mean_trim": 0.1}, "method.mean_trim = 0.1 of 4 members must leave out one at each end"),
        ({"mean_trim": 0.3}, "method.mean_trim means nothing with method.mean = mean"),
        ({"mean": "medium"}, "method.mean = 'medium' is not a valid choice; did you mean 'median'"),
        ({"byzantine": 4}, "method.byzantine = 4 must leave one or more of 4 replicas honest"),
        ({"byzantine_factor": 2.0}, "method.byzantine_factor = 2.0 means nothing with byzantine = 0"),
        ({"byzantine": 1, "outer": "average"}, "method.byzantine = 1 is about outer gradients"),
        ({"mean": "clipped", "outer": "gasloc"}, "method.mean = clipped is about outer gradients"),
        ({"mean": "median", "peers": "group", "group_size": 2, "replicas": 5}, "needs 3 members or more: of 2"),
    ]
    for settings, why in refused:
        with pytest.raises(ConfigError, match=why):
            plan(**settings)
