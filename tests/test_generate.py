"""Pipelined inference: the tokens of a whole model that reads everything anew each time."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from lowcomm.comm.start import run_threads
from lowcomm.comm.world import World
from lowcomm.methods.boundary import make_boundary
from lowcomm.methods.config import BoundaryConfig
from lowcomm.methods.generate import choose, generate, generated_bytes
from lowcomm.model.config import ModelConfig
from lowcomm.model.decoder import Decoder, KeyValues

SMALL = ModelConfig(16, 4, 4, 32, 300, 24, kv_heads=2)
DENSE, SUBSPACE = BoundaryConfig(), BoundaryConfig("subspace", 4)
PROJECTED = BoundaryConfig("projection", 4)


def _model(boundary: BoundaryConfig, config: ModelConfig = SMALL, *, stages: int = 1) -> Decoder:
    """Far from its beginning, where every continuation would be the same token."""
    model = Decoder(config, boundary.constraint(stages)).initialise(1)
    with torch.no_grad():
        for block in model.blocks.values():
            for p in (block.attention.out.weight, block.mlp.down.weight):
                p.mul_(20)
    return model


def _prompts() -> Tensor:
    return torch.randint(0, 300, (5, 6), generator=torch.Generator().manual_seed(0))


def test_reading_on_gives_the_logits_of_reading_at_once() -> None:
    model, ids = _model(DENSE), _prompts()
    kept = {name: KeyValues(6) for name in model.blocks}
    with torch.no_grad():
        parts = [model.hidden(ids[:, a:b], kept) for a, b in ((0, 3), (3, 4), (4, 6))]
        torch.testing.assert_close(torch.cat(parts, 1), model.hidden(ids), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("boundary", [DENSE, SUBSPACE, PROJECTED], ids=["dense", "subspace", "projection"])
@pytest.mark.parametrize(("stages", "groups"), [(1, 1), (2, 1), (4, 3), (4, 5)])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_pipeline_writes_what_one_model_writes(
    boundary: BoundaryConfig, stages: int, groups: int, temperature: float
) -> None:
    prompts, new = _prompts(), 7
    expected = []
    with torch.no_grad():
        for g, part in enumerate(prompts.tensor_split(groups)):
            model, generator = _model(boundary, stages=stages), torch.Generator().manual_seed(3 * groups + g)
            for _ in range(new):
                part = torch.cat([part, choose(model(part)[:, -1], temperature, generator)[:, None]], 1)
            expected.append(part)

    def work(world: World) -> tuple[Tensor | None, dict, dict]:
        stage = _model(boundary, stages=stages).cut(world.stage, stages)
        wire = make_boundary(boundary, SMALL, stage)
        own = prompts if world.stage == 0 else torch.zeros_like(prompts)
        written = generate(stage, world, wire, own, new, groups=groups, temperature=temperature, seed=3)
        closed = generated_bytes(wire, world.stage, stages, 5, 6, new, groups)
        return written, closed, world.ledger.by_purpose()

    (written, *_), *others = results = run_threads(work, replicas=1, stages=stages)
    assert torch.equal(written, torch.cat(expected))
    assert len({tuple(row) for row in written[:, 6:].tolist()}) > 1
    assert all(w is None for w, *_ in others)
    for _, closed, sent in results:
        assert {f"route/{k}": v for k, v in closed.items() if v} == sent


@pytest.mark.parametrize("vocab_size", [2, 200, 256, 257, 65_536])
@pytest.mark.parametrize("boundary", [DENSE, SUBSPACE], ids=["dense", "subspace"])
def test_tokens_of_any_vocabulary_travel(boundary: BoundaryConfig, vocab_size: int) -> None:
    """Ids of one byte each, or of two: several prompts at once."""
    config = dataclasses.replace(SMALL, vocab_size=vocab_size)
    prompts = torch.randint(0, vocab_size, (2, 6), generator=torch.Generator().manual_seed(0))

    def written(stages: int) -> list[Tensor | None]:
        def work(world: World) -> Tensor | None:
            stage = _model(boundary, config, stages=stages).cut(world.stage, stages)
            found = generate(stage, world, make_boundary(boundary, config, stage), prompts, 4)
            sent = generated_bytes(make_boundary(boundary, config), world.stage, stages, 2, 6, 4)
            assert {f"route/{k}": v for k, v in sent.items() if v} == world.ledger.by_purpose()
            return found

        return run_threads(work, replicas=1, stages=stages)

    (alone,), (first, last) = written(1), written(2)
    assert torch.equal(first, alone)
    assert last is None


@pytest.mark.parametrize(
    ("prompts", "new", "groups", "message"),
    [
        (torch.zeros(5, dtype=torch.long), 3, 1, r"prompts must be token ids \[B, T\], got shape \(5,\)"),
        (torch.zeros(2, 20, dtype=torch.long), 6, 1, "new_tokens = 6 must be from 1 to 5"),
        (torch.zeros(2, 4, dtype=torch.long), 0, 1, "new_tokens = 0 must be from 1"),
        (torch.zeros(2, 4, dtype=torch.long), 3, 3, "groups = 3 must be from 1 to the 2 prompts"),
    ],
)
def test_refusals(prompts: Tensor, new: int, groups: int, message: str) -> None:
    model = _model(DENSE)

    def work(world: World) -> None:
        generate(model, world, make_boundary(DENSE, SMALL, model), prompts, new, groups=groups)

    with pytest.raises(ValueError, match=message):
        run_threads(work, replicas=1)


def test_a_negative_temperature_is_refused() -> None:
    model, prompts = _model(DENSE), torch.zeros(2, 4, dtype=torch.long)

    def work(world: World) -> None:
        generate(model, world, make_boundary(DENSE, SMALL, model), prompts, 3, temperature=-1.0)

    with pytest.raises(ValueError, match="temperature = -1.0 must be at least 0"):
        run_threads(work, replicas=1)
