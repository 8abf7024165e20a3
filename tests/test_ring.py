"""Ring attention: attention and gradients of whole sequences, whoever holds which segment."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowcomm.comm.start import run_threads
from lowcomm.comm.world import World
from lowcomm.methods.ring import in_segments, ring_attention, ring_bytes
from lowcomm.model.config import Constraint, ModelConfig
from lowcomm.model.decoder import Decoder

SMALL = ModelConfig(16, 2, 4, 32, 64, 24, kv_heads=2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_and_its_gradients_are_those_of_the_whole(ranks: int, kv_heads: int) -> None:
    g = torch.Generator().manual_seed(0)
    q, dy = (torch.randn(2, 4, 12, 8, generator=g, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, kv_heads, 12, 8, generator=g, dtype=torch.float64) for _ in range(2))
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    y = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    y.backward(dy)

    def work(world: World) -> tuple[list[Tensor], int]:
        part = slice(12 // ranks * world.replica, 12 // ranks * (world.replica + 1))
        own = [t[:, :, part].clone().requires_grad_() for t in (q, k, v)]
        out = ring_attention(*own, world)
        out.backward(dy[:, :, part])
        return [out.detach(), *(t.grad for t in own)], world.ledger.total(axis="replica")

    results = run_threads(work, replicas=ranks)
    for i, expected in enumerate([y.detach(), *(t.grad for t in whole)]):
        torch.testing.assert_close(torch.cat([r[0][i] for r in results], 2), expected)
    assert {nbytes for _, nbytes in results} == {2 * ring_bytes(ranks, 2 * 4 * 12 // ranks * 8)}  # in fp64


@pytest.mark.parametrize("constraint", [None, Constraint(4)], ids=["dense", "subspace"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_segments_train_as_whole_sequences_do(ranks: int, constraint: Constraint | None) -> None:
    tokens = torch.randint(0, 64, (2, 25), generator=torch.Generator().manual_seed(0))
    whole = Decoder(SMALL, constraint).initialise(0)
    loss = whole.losses(tokens[:, :-1], tokens[:, 1:])[0]
    loss.backward()

    def work(world: World) -> tuple[float, dict[str, Tensor]]:
        model = Decoder(SMALL, constraint).initialise(0)
        own = model.losses(*in_segments(model, world, tokens))[0]
        own.backward()
        grads = {n: world.mean(p.grad, purpose="gradients") for n, p in model.named_parameters()}
        return float(world.mean(own.detach().reshape(1), purpose="loss")), grads

    for found, grads in run_threads(work, replicas=ranks):
        assert found == pytest.approx(loss.item(), rel=1e-6)
        for name, p in whole.named_parameters():
            torch.testing.assert_close(grads[name], p.grad, rtol=1e-4, atol=1e-7)


def test_segments_must_be_equal() -> None:
    model = Decoder(dataclasses.replace(SMALL, seq_len=30)).initialise(0)
    tokens = torch.zeros(1, 26, dtype=torch.long)
    with pytest.raises(ValueError, match="25 tokens do not split into 2 segments"):
        run_threads(lambda world: in_segments(model, world, tokens), replicas=2)
