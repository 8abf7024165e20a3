"""A boundary that projects: training is that of the model with the projection in it, whose weights are free."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowcomm.comm.start import run_threads
from lowcomm.comm.world import World
from lowcomm.experiment.batches import TokenData
from lowcomm.experiment.train import train_in_threads
from lowcomm.experiment.trainer import initial_model, saved_model
from lowcomm.methods.boundary import make_boundary
from lowcomm.methods.config import BoundaryConfig
from lowcomm.methods.subspace import overhead_bytes, overhead_flops
from lowcomm.model.config import Constraint, ModelConfig
from lowcomm.model.decoder import Decoder
from lowcomm.model.huggingface import load_folder, save_folder
from lowcomm.settings import ConfigError
from tests.conftest import small_run
from tests.test_pipeline import pipeline_of

SHAPE = ModelConfig(16, 4, 2, 32, 512, 32)


def through(first: Decoder, second: Decoder, ids: Tensor, targets: Tensor) -> Tensor:
    """The loss of one model whose stream is projected after two of four layers: x' = F + (x - F) U U^T."""
    x = first.embedding(ids) + first.fixed_VD[ids]
    cos, sin = first.cos_TC[: ids.shape[1]], first.sin_TC[: ids.shape[1]]
    for name in ("0", "1"):
        x = first.blocks[name](x, cos, sin, first.basis_DR)
    fixed, u = second.fixed_VD[ids], second.basis_DR
    x = fixed + (x - fixed) @ u @ u.T
    for name in ("2", "3"):
        x = second.blocks[name](x, cos, sin, second.basis_DR)
    return second.head_losses(x, targets)[0]


@pytest.mark.parametrize("rank", [3, 16])
@pytest.mark.parametrize("route", ["fixed", "random_micro_batch"])
def test_gradients_are_those_of_the_model_with_the_projection_in_it(route: str, rank: int, corpus: Path) -> None:
    """Replicas have weights of their own, and over any route a stage draws the ids of the tokens that come by."""
    boundary, count = BoundaryConfig("projection", rank), 2
    data = TokenData(corpus, seq_len=32, global_batch=8, seed=0)
    models = []
    for seed in (1, 2):
        model = Decoder(SHAPE, boundary.constraint(2)).initialise(0)
        for p in model.parameters():
            p.data += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
        models.append(model)

    def work(world: World) -> tuple[list, dict[str, Tensor]]:
        stage = copy.deepcopy(models[world.replica]).cut(world.stage, 2)
        pipeline = pipeline_of(stage, world, micro_batches=count, routing=route, seed=5)
        pipeline.boundary = make_boundary(boundary, SHAPE, stage)
        pipeline.train(3, lambda replica: data.batch(3, replica, 2))
        return pipeline.routes(3), {n: p.grad for n, p in stage.named_parameters()}

    found = run_threads(work, replicas=2, stages=2)
    expected = copy.deepcopy(models)
    for m, way in enumerate(found[0][0]):
        for first in (0, 1):
            part = data.batch(3, first, 2).chunk(count)[m]
            (through(expected[first], expected[way.after(0, first)], part[:, :-1], part[:, 1:]) / count).backward()
    for rank_, (_, gradients) in enumerate(found):
        for name, gradient in gradients.items():
            wanted = expected[rank_ % 2].get_parameter(name).grad
            assert torch.allclose(gradient, wanted, rtol=1e-4, atol=1e-6), (rank_, name)


def test_the_trainable_embedding_begins_at_zero_and_both_together_are_what_dense_training_draws() -> None:
    free, dense = Decoder(SHAPE, Constraint(4, table="zero", stages=1)).initialise(0), Decoder(SHAPE).initialise(0)
    assert not free.embedding.weight.any()
    assert not free.constrained()
    assert not free.constrained_layers
    ids = torch.arange(32)[None]
    assert torch.equal(free(ids), dense(ids))
    for name, p in dense.named_parameters():
        assert torch.equal(free.whole(name), p), name
    free.put("embedding.weight", 2 * free.fixed_VD)
    assert torch.equal(free.whole("embedding.weight"), 2 * dense.embedding.weight)


def run(boundary: dict[str, Any], **override: Any) -> Any:
    usual = {"replicas": 1, "stages": 2, "model": {"layers": 4}}
    kind = {"kind": "projection", "rank": 4} | boundary
    method = {"boundary": kind} | override.pop("method", {})
    return small_run(override.pop("run", "data_parallel"), **usual | override | {"method": method})


@pytest.mark.parametrize(("codec", "tolerance"), [("fp32", 1e-6), ("e3m0", 0.02)])
@pytest.mark.parametrize("stages", [2, 4])
def test_what_is_saved_is_the_model_that_was_trained(
    stages: int, codec: str, tolerance: float, corpus: Path, tmp_path: Path
) -> None:
    """It projects where the stages met, so that it has the pipeline's loss, but for the codec."""
    config = run({"codec": codec}, stages=stages, train={"steps": 60, "lr": 0.02})
    summary = train_in_threads(config, corpus, tmp_path / "run")
    model, begun = saved_model(config, tmp_path / "run" / "model.safetensors"), initial_model(config)
    assert torch.equal(model.fixed_VD, begun.fixed_VD)
    assert torch.equal(model.basis_DR, begun.basis_DR)
    assert model.embedding.weight.any()  # it has been trained
    data = TokenData(corpus, seq_len=config.train.seq_len, global_batch=config.train.eval_sequences, seed=0)
    tokens = data.held_out(config.train.eval_sequences)
    with torch.no_grad():
        whole = float(model.losses(tokens[:, :-1], tokens[:, 1:])[1])
        model.projecting_layers = []
        without = float(model.losses(tokens[:, :-1], tokens[:, 1:])[1])
    assert whole == pytest.approx(summary["val_loss"], rel=tolerance)
    if codec == "fp32":
        assert without != pytest.approx(summary["val_loss"], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["projection", "subspace"])
@torch.no_grad()
def test_a_folder_in_bf16_crosses_a_boundary_in_either_precision(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_folder(Decoder(SHAPE).initialise(0).to(torch.bfloat16), tmp_path)
    config, ids = BoundaryConfig(kind, 16), torch.arange(32)[None]
    model = load_folder(tmp_path, constraint=config.constraint(2), dtype=dtype)
    assert torch.equal(model.embed(ids), load_folder(tmp_path, dtype=dtype).embed(ids))
    first = model.cut(0, 2)
    boundary = make_boundary(config, SHAPE, first).sending_ids()
    x = first.hidden(ids)
    found, there = boundary.read_activations(boundary.activations(x, ids), (1, 32))
    assert torch.equal(there, ids)
    assert torch.allclose(found, x.float(), atol=0.01 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("rank", [2, 16])
def test_muon_goes_with_it_and_a_wider_projection_loses_less(rank: int, corpus: Path, tmp_path: Path) -> None:
    train = {"optimizer": "muon", "muon_lr": 0.02, "steps": 120, "warmup_steps": 5}
    config = run({"rank": rank}, train=train)
    narrow = train_in_threads(config, corpus, tmp_path / "run")
    batch = config.train.global_batch * config.train.seq_len
    sent = narrow["sent_bytes"]["route/activations"]
    assert sent == narrow["sent_bytes_closed_form"]["route/activations"] == 120 * 4 * batch * rank  # and no ids
    dense = run({"kind": "dense", "rank": 0}, train=train)
    lost = narrow["val_loss"] - train_in_threads(dense, corpus, tmp_path / "dense")["val_loss"]
    assert (lost > 0.2) if rank == 2 else (abs(lost) < 0.02)


def test_what_it_takes_is_the_tables_and_the_products_at_the_cut() -> None:
    projection, subspace = BoundaryConfig("projection", 4), BoundaryConfig("subspace", 4)
    ours, theirs = (overhead_flops(SHAPE, b, 8, 32, 2) for b in (projection, subspace))
    assert ours == {"boundaries": theirs["boundaries"], "projection": 0, "watching": 0, "update": 0}
    ours, theirs = (overhead_bytes(SHAPE, b) for b in (projection, subspace))
    assert ours == theirs | {"second_moment": 0}


@pytest.mark.parametrize(
    ("boundary", "override", "message"),
    [
        ({}, {"stages": 1}, "projection in fp32, error_feedback = False means nothing with one stage"),
        ({"rank": 17}, {}, "method.boundary.rank = 17 must be from 1 to 16"),
        ({"error_feedback": True}, {}, "error_feedback means nothing where nothing is lost"),
        ({"second_moment": "mixed"}, {}, "second_moment means nothing with method.boundary.kind = projection"),
        ({"update_every_steps": 4, "update_lr": 1.0}, {}, "update_every_steps means nothing with method.boundary.kind"),
        ({"replicas": 1}, {"run": "diloco_m2", "replicas": 2}, "does not go with method.boundary.kind = projection"),
        ({}, {"model": {"tied": True, "layers": 4}}, "model.tied must be false where stages > 1"),
    ],
)
def test_refusals(boundary: dict, override: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(boundary, **override)
