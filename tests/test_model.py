"""The decoder: sizes in closed form, and the properties that training relies on."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from lowcomm.model.accounting import parameters
from lowcomm.model.config import ModelConfig
from lowcomm.model.decoder import Decoder, rotary_tables, rotate
from lowcomm.model.presets import PRESETS

SMALL = ModelConfig(dim=24, layers=2, heads=4, ffn_dim=40, vocab_size=50, seq_len=16)
VARIANTS = {
    "gated": {},
    "gelu, QK-norm, z-loss": {"mlp": "gelu", "qk_norm": True, "z_loss": 1e-3},
    "relu, tied": {"mlp": "relu", "tied": True},
    "LayerNorm, grouped heads": {"norm": "layer", "kv_heads": 2, "qk_norm": True},
    "wide heads": {"head_dim": 8},
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return dataclasses.replace(SMALL, **request.param)


def test_parameter_count_is_the_closed_form(config: ModelConfig) -> None:
    assert sum(p.numel() for p in Decoder(config).parameters()) == parameters(config).total


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_its_closed_form_size(name: str) -> None:
    with torch.device("meta"):
        model = Decoder(PRESETS[name])
    assert sum(p.numel() for p in model.parameters()) == parameters(PRESETS[name]).total


@pytest.mark.parametrize(
    ("name", "non_embedding", "tolerance"),
    [
        # Sizes that the papers, or the algebra of their shapes, state; labels are rounded.
        ("streaming_diloco/1b", 1.2e9, 0.02),
        ("streaming_diloco/4b", 4.1e9, 0.02),
        ("noloco/small", 113e6, 0.01),
        ("noloco/medium", 1.61e9, 0.01),
        ("noloco/large", 8.59e9, 0.01),
        ("partial_updates/1.3b", 1.208e9, 0.001),
        ("protocol_models/8b", 6.98e9, 0.01),
    ],
)
def test_presets_are_as_large_as_the_papers_say(name: str, non_embedding: float, tolerance: float) -> None:
    assert parameters(PRESETS[name]).non_embedding == pytest.approx(non_embedding, rel=tolerance)


def test_no_token_sees_the_future(config: ModelConfig) -> None:
    model = Decoder(config).initialise(0)
    tokens = torch.randint(0, 50, (1, 12))
    x = model.embedding(tokens).detach().requires_grad_()
    h = x
    for block in model.blocks.values():
        h = block(h, model.cos_TC[:12], model.sin_TC[:12])
    h[0, 5].sum().backward()
    assert torch.count_nonzero(x.grad[0, 6:]) == 0
    assert torch.count_nonzero(x.grad[0, :6]) > 0


def test_rotary_scores_depend_on_distance_alone() -> None:
    cos, sin = rotary_tables(32, 8, 10_000.0)
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    queries, keys = rotate(q.expand(32, 8), cos, sin), rotate(k.expand(32, 8), cos, sin)
    scores = queries @ keys.T
    for distance in range(5):
        diagonal = scores.diagonal(-distance)
        # Angles are fp32, so equal distances differ by their rounding.
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-4)


def test_rotary_positions_turn_pairs_by_their_angles() -> None:
    x = torch.randn(2, 3, 16, 8, dtype=torch.float64)
    angles = torch.arange(16)[:, None] * 100.0 ** -(torch.arange(4) / 4)
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.exp(1j * angles)
    found = rotate(x, *rotary_tables(16, 8, 100.0))
    assert torch.allclose(found, torch.cat((turned.real, turned.imag), dim=-1), atol=1e-5)


def test_z_loss_adds_the_squared_log_partition() -> None:
    tokens = torch.randint(0, 50, (2, 17))
    plain = Decoder(SMALL).initialise(0)
    with_z = Decoder(dataclasses.replace(SMALL, z_loss=0.1)).initialise(0)
    logits = plain(tokens[:, :-1]).flatten(0, 1)
    entropy = F.cross_entropy(logits, tokens[:, 1:].flatten())
    expected = entropy + 0.1 * logits.logsumexp(-1).square().mean()
    loss, reported = with_z.losses(tokens[:, :-1], tokens[:, 1:])
    assert reported.item() == pytest.approx(entropy.item(), rel=1e-6)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    expected.backward()
    loss.backward()
    for ours, theirs in zip(with_z.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-7)


def test_weights_come_from_the_seed_alone() -> None:
    torch.manual_seed(1)
    a = Decoder(SMALL).initialise(7)
    torch.manual_seed(2)
    b, c = Decoder(SMALL).initialise(7), Decoder(SMALL).initialise(8)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.head.weight, c.head.weight)


def test_the_embedding_has_a_deviation_of_its_own() -> None:
    """It scales what is drawn, and touches no other weight; 0 is refused."""
    a, b = (Decoder(dataclasses.replace(SMALL, embedding_std=std)).initialise(7) for std in (0.02, 1.0))
    assert torch.allclose(a.embedding.weight * 50, b.embedding.weight)
    others = [n for n, _ in a.named_parameters() if n != "embedding.weight"]
    assert all(torch.equal(a.get_parameter(n), b.get_parameter(n)) for n in others)
    with pytest.raises(ValueError, match=r"model.embedding_std must be above 0, got 0"):
        dataclasses.replace(SMALL, embedding_std=0.0)


def test_tied_embeddings_share_one_tensor() -> None:
    model = Decoder(dataclasses.replace(SMALL, tied=True))
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "model.heads = 5 does not divide model.dim = 24"),
        ({"kv_heads": 3}, "model.kv_heads = 3 does not divide model.heads = 4"),
        ({"layers": 0}, "model.layers must be at least 1, got 0"),
        ({"head_dim": 7}, "even head width, got 7"),
    ],
)
def test_impossible_shapes_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_a_sequence_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sequence of 17 tokens is longer than model.seq_len = 16"):
        Decoder(SMALL)(torch.zeros(1, 17, dtype=torch.long))
