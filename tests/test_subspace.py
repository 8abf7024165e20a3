"""Protocol Models: exact boundaries, weights that stay in the subspace, the Grassmann step, resume, refusals."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lowcomm.comm.start import run_threads
from lowcomm.experiment.batches import TokenData
from lowcomm.experiment.config import RunConfig
from lowcomm.experiment.run_folder import read_metrics
from lowcomm.experiment.train import train_in_threads
from lowcomm.experiment.trainer import Trainer
from lowcomm.methods.boundary import Boundary, id_bytes, low_rank, make_boundary, pack_ids, unpack_ids
from lowcomm.methods.config import BoundaryConfig
from lowcomm.methods.partial import pieces, train_slice
from lowcomm.methods.subspace import (
    RowAdamW,
    grassmann_gradient,
    grassmann_step,
    overhead_bytes,
    overhead_flops,
    project,
    share_outside,
)
from lowcomm.model.accounting import parameter_shapes, parameters, trained_parameters, training_flops
from lowcomm.model.config import Constraint, ModelConfig
from lowcomm.model.decoder import Decoder, orthonormal
from lowcomm.model.presets import PRESETS
from lowcomm.settings import ConfigError
from tests.conftest import command_line, small_run
from tests.harness import Crash, train_in_processes

MOVING = {"update_every_steps": 5, "update_lr": 1.0}


def held(run: str = "data_parallel", *, boundary: dict[str, Any] | None = None, **override: Any) -> RunConfig:
    """A small run of four layers that keeps to a subspace of 4 of 16 dimensions.

    Its learning rate is a third of the smoke scale's, at which rounding errors grow tenfold a step.
    """
    override["model"] = {"layers": 4} | override.get("model", {})
    override["train"] = {"lr": 0.003} | override.get("train", {})
    method = {"boundary": {"kind": "subspace", "rank": 4} | (boundary or {})}
    override.setdefault("replicas", 1)
    return small_run(run, **override | {"method": method | override.get("method", {})})


def losses_of(config: RunConfig, corpus: Path, out: Path) -> list[float]:
    summary = train_in_threads(config, corpus, out)
    rank = (config.stages - 1) * config.replicas
    rows = read_metrics(out / "metrics" / f"rank-{rank:03d}.jsonl")
    return [r["loss"] for r in rows] + [summary["val_loss"]]


def relative(a: Tensor, b: Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())


# Boundaries


@pytest.mark.parametrize(("vocab_size", "each"), [(2, 1), (256, 1), (257, 2), (65_536, 2), (65_537, 3), (128_256, 3)])
def test_token_ids_travel_in_as_few_bytes_as_hold_them(vocab_size: int, each: int) -> None:
    ids = torch.tensor([0, 1, vocab_size // 2, vocab_size - 1])
    packed = pack_ids(ids, vocab_size)
    assert id_bytes(vocab_size) == each
    assert packed.numel() == 4 * each
    assert unpack_ids(packed, vocab_size).tolist() == ids.tolist()


def _whole_and_cut(trainer: Trainer, stages: int, tokens: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Gradients of a constrained model as autograd knows them, the same through boundaries, and how well those rebuild.

    Of constrained matrices, the part in the subspace, which is what trains them.
    """
    model, b = trainer.model, trainer.config.method.boundary
    ids, targets = tokens[:, :-1], tokens[:, 1:]
    probe, model.probe = model.probe, None

    def taken() -> dict[str, Tensor]:
        trainer.subspace.project_gradients()
        found = {n: p.grad.clone() for n, p in model.named_parameters()}
        model.zero_grad()
        return found

    model.losses(ids, targets)[0].backward()
    whole = taken()
    boundary, worst = make_boundary(b, model.config, model), 0.0
    layers, norm, head, embedding = dict(model.blocks), model.norm, model.head, model.embedding
    passed, x = [], ids
    for stage in range(stages):
        model.blocks = torch.nn.ModuleDict({n: m for n, m in layers.items() if int(n) * stages // len(layers) == stage})
        model.embedding = embedding if stage == 0 else None
        model.norm, model.head = (norm, head) if stage == stages - 1 else (None, None)
        y = model.losses(x, targets)[0] if stage == stages - 1 else model(x)
        passed.append((x, y))
        if stage < stages - 1:
            x, came = boundary.read_activations(boundary.activations(y, ids), ids.shape)
            assert torch.equal(came, ids)
            worst = max(worst, relative(x, y.detach()))
            x.requires_grad_()
    gradient = None
    for x, y in reversed(passed):
        torch.autograd.backward(y, gradient)
        if x.is_floating_point():
            gradient = boundary.read_gradients(boundary.gradients(x.grad), ids.shape)
    model.blocks, model.norm, model.head, model.embedding = torch.nn.ModuleDict(layers), norm, head, embedding
    model.probe = probe
    return whole, taken(), worst


@pytest.mark.parametrize("mode", ["projected", "reparametrised"])
def test_boundaries_are_exact_over_200_steps_and_through_updates(mode: str, corpus: Path) -> None:
    """Activations rebuilt to 1e-5; gradients upstream of all boundaries, and weights in the subspace, likewise."""
    steps, moving = 200, {"update_every_steps": 40, "update_lr": 1.0, "mode": mode}
    config = held(boundary=moving, train={"steps": steps + 1, "warmup_steps": 10, "weight_decay": 0.01})

    def work(world) -> None:
        t = config.train
        data = TokenData(corpus, seq_len=t.seq_len, global_batch=t.global_batch, seed=0)
        trainer = Trainer(config, world, data)
        begun, losses = trainer.subspace.basis.clone(), []
        for step in range(1, steps + 1):
            losses.append(float(trainer.step(step)["loss"]))
            if step % 20 and step % 40 > 1:
                continue
            whole, cut, worst = _whole_and_cut(trainer, 4, data.batch(step + 1))
            assert worst < 1e-5
            assert relative(*(torch.cat([g.flatten() for g in some.values()]) for some in (cut, whole))) < 1e-5
            for name, gradient in whole.items():  # each, too: some are sums of which little is left
                assert relative(cut[name], gradient) < 1e-4, name
            if mode == "projected":
                for name in trainer.model.constrained():
                    w, dim = trainer.model.get_parameter(name), int(name == "embedding.weight")
                    assert relative(project(w, trainer.subspace.basis, dim), w) < 1e-5, name
        assert relative(trainer.subspace.basis, begun) > 0.1  # it has moved
        assert losses[-1] < losses[0] - 0.5  # and trained

    run_threads(work, replicas=1)


def test_without_the_fixed_embedding_much_would_be_lost() -> None:
    """The stream alone, without its token ids, is of full rank, so that a test of exactness can fail."""
    model = Decoder(ModelConfig(16, 2, 2, 32, 64, 8), Constraint(4)).initialise(0)
    x = model.embed(torch.arange(8)[None])[0]
    assert relative(project(x, model.basis_DR, 1), x) > 0.3


@pytest.mark.parametrize("boundary", [{}, MOVING, MOVING | {"mode": "reparametrised"}, {"second_moment": "mixed"}])
def test_one_two_and_four_stages_give_the_same_losses(boundary: dict, corpus: Path, tmp_path: Path) -> None:
    """To 1e-5 over 12 steps: activations are rebuilt to rounding, which training amplifies."""
    one, *others = (losses_of(held(boundary=boundary, stages=s), corpus, tmp_path / str(s)) for s in (1, 2, 4))
    for other in others:
        assert other == pytest.approx(one, rel=1e-5)


def test_a_subspace_of_all_dimensions_is_the_dense_pipeline(corpus: Path, tmp_path: Path) -> None:
    """k = d, with AdamW as it is: what is fixed and what is trained of the embedding add up to one that is trained."""
    config = held(boundary={"rank": 16, "second_moment": "element"}, stages=2)
    dense = held(boundary={"kind": "dense", "rank": 0}, stages=2)
    losses = losses_of(config, corpus, tmp_path / "subspace")

    def work(world) -> list[float]:
        t = dense.train
        data = TokenData(corpus, seq_len=t.seq_len, global_batch=t.global_batch, seed=0)
        trainer = Trainer(dense, world, data)
        if world.stage == 0:  # the projection of the fixed embedding, which is itself, on top of it
            trainer.model.embedding.weight.data.mul_(2)
        rows = [trainer.step(step) for step in range(1, t.steps + 1)]
        return [float(r["loss"]) for r in rows if "loss" in r] + [trainer.evaluate()]

    assert run_threads(work, replicas=1, stages=2)[1] == pytest.approx(losses, rel=1e-5)


def test_both_modes_begin_with_the_same_model() -> None:
    config, ids = ModelConfig(16, 4, 2, 32, 64, 8), torch.arange(8)[None]
    projected, by_coordinates = (
        Decoder(config, Constraint(4, reparametrised=r)).initialise(3)(ids) for r in (False, True)
    )
    torch.testing.assert_close(by_coordinates, projected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(projected, Decoder(config).initialise(3)(ids))


# AdamW


def _steps_in_subspace(optimizer: torch.optim.Optimizer, w: Tensor, basis: Tensor, count: int) -> float:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        w.grad = basis @ torch.randn(basis.shape[1], w.shape[1], generator=generator)
        optimizer.step()
    return relative(project(w.detach(), basis, 0), w.detach())


def test_rows_keep_weights_in_the_subspace_and_plain_adamw_leaves_it() -> None:
    basis = orthonormal(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))
    weights = [(basis @ torch.ones(4, 48)).requires_grad_() for _ in range(2)]
    rows = RowAdamW([weights[0]], lr=0.01, weight_decay=0.1, mean_dim=0)
    plain = torch.optim.AdamW([weights[1]], lr=0.01, weight_decay=0.1)
    assert _steps_in_subspace(rows, weights[0], basis, 200) < 1e-5
    assert _steps_in_subspace(plain, weights[1], basis, 200) > 0.01


@pytest.mark.parametrize("dim", [0, 1])
def test_the_mean_of_second_moments_is_as_the_paper_takes_it(dim: int) -> None:
    """Eqs. 12 to 14 in fp64, step by step: the second moment entry by entry, and its mean over a row of W_p after."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(6, 5, dtype=torch.float64, generator=generator)
    p = w.clone().requires_grad_()
    lr, decay, (b1, b2), eps = 0.1, 0.2, (0.9, 0.99), 1e-8
    optimizer = RowAdamW([p], lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay, mean_dim=dim)
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t in range(1, 6):
        g = torch.randn(w.shape, dtype=torch.float64, generator=generator)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g.square()
        v_row = (v / (1 - b2**t)).mean(dim, keepdim=True)
        w = w - lr * (m / (1 - b1**t) / (v_row.sqrt() + eps) + decay * w)
        p.grad = g
        optimizer.step()
    torch.testing.assert_close(p.detach(), w)
    assert optimizer.state[p]["exp_avg_sq"].numel() == w.numel() // w.shape[dim]


def test_a_plain_group_is_torchs_own_adamw_bit_for_bit() -> None:
    start, generator = torch.randn(7, 5), torch.Generator().manual_seed(2)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    optimizers = RowAdamW([ours], lr=0.01), torch.optim.AdamW([theirs], lr=0.01, fused=True)
    for _ in range(4):
        ours.grad = theirs.grad = torch.randn(7, 5, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(ours, theirs)


def test_an_optimizer_can_be_saved_and_takes_a_closure() -> None:
    p = torch.randn(4, 3).requires_grad_()
    optimizer = RowAdamW([{"params": [p], "mean_dim": 0}], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    again = RowAdamW([{"params": [p], "mean_dim": 0}], lr=0.1)
    again.load_state_dict(optimizer.state_dict())
    assert again.step(closure).item() < first
    assert again.state[p]["step"] == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr = -1.0 must be at least 0"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] = 1.0 must be at least 0 and below 1"),
        ({"mean_dim": 0}, r"mean_dim = 0 is for matrices, got shape \(4,\)"),
    ],
)
def test_an_optimizer_refuses(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RowAdamW([torch.zeros(4, requires_grad=True)], **settings)


@pytest.mark.parametrize("moment", ["row", "mixed", "element"])
def test_every_rule_keeps_a_trained_model_in_the_subspace(moment: str, corpus: Path) -> None:
    config = held(boundary={"second_moment": moment}, train={"weight_decay": 0.1, "steps": 30})

    def work(world) -> None:
        t = config.train
        trainer = Trainer(config, world, TokenData(corpus, seq_len=t.seq_len, global_batch=t.global_batch, seed=0))
        for step in range(1, 31):
            trainer.step(step)
        for name in trainer.model.constrained():
            w = trainer.model.get_parameter(name)
            assert relative(project(w, trainer.subspace.basis, int(name == "embedding.weight")), w) < 1e-5
        means = {n: trainer.optimizer.state[p]["exp_avg_sq"].shape != p.shape for n, p in trainer.trained.items()}
        rows = {
            n
            for n in trainer.model.constrained()
            if moment == "row" or (moment == "mixed" and not n.endswith("attention.out.weight"))
        }
        assert {n for n, mean in means.items() if mean} == rows

    run_threads(work, replicas=1)


# The Grassmann step


def _gram(dim: int = 12, seed: int = 0) -> Tensor:
    g = torch.randn(50, dim, generator=torch.Generator().manual_seed(seed)) * torch.linspace(2, 0.1, dim)
    return g.T @ g


def test_the_gradient_is_that_of_finite_differences() -> None:
    """To 1e-5, along random tangent directions, the retraction included; in fp64."""
    gram, generator = _gram().double(), torch.Generator().manual_seed(1)
    basis = orthonormal(torch.randn(12, 3, dtype=torch.float64, generator=generator))
    gradient = grassmann_gradient(gram, basis)
    assert (basis.T @ gradient).abs().max() < 1e-12  # tangent
    for _ in range(5):
        direction = torch.randn(12, 3, dtype=torch.float64, generator=generator)
        direction -= basis @ (basis.T @ direction)
        h = 1e-5
        ahead, behind = (share_outside(gram, orthonormal(basis + s * h * direction)) for s in (1, -1))
        assert (ahead - behind) / (2 * h) == pytest.approx(float((gradient * direction).sum()), rel=1e-5)


def test_a_step_lowers_the_energy_outside_and_keeps_the_basis_orthonormal() -> None:
    gram, basis = _gram(), orthonormal(torch.randn(12, 3, generator=torch.Generator().manual_seed(1)))
    shares = [share_outside(gram, basis)]
    for _ in range(200):
        basis = grassmann_step(gram, basis, 0.5)
        shares.append(share_outside(gram, basis))
        assert (basis.T @ basis - torch.eye(3)).abs().max() < 1e-6
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(shares))
    energies = torch.linalg.eigvalsh(gram.double())
    assert shares[-1] == pytest.approx(float(energies[:-3].sum() / energies.sum()), rel=1e-3)  # the best there is


def test_a_small_step_changes_the_basis_little_and_no_gradients_not_at_all() -> None:
    """QR alone may flip signs; weights in coordinates of the basis would flip with them."""
    gram, basis = _gram(), orthonormal(torch.randn(12, 3, generator=torch.Generator().manual_seed(1)))
    assert (grassmann_step(gram, basis, 1e-4) - basis).abs().max() < 1e-3
    assert torch.equal(grassmann_step(torch.zeros(12, 12), basis, 1.0), basis)


def test_what_the_update_sees_is_the_gradient_at_the_last_compressed_layer(corpus: Path) -> None:
    """S = sum of G^T G over micro-batches, in a whole model and at the last stage of a pipeline alike."""
    found = {}
    for stages in (1, 2):
        config = held(boundary={"update_every_steps": 11, "update_lr": 1.0}, stages=stages, train={"accumulation": 2})

        def work(world, config: RunConfig = config) -> Tensor | None:
            t = config.train
            trainer = Trainer(config, world, TokenData(corpus, seq_len=t.seq_len, global_batch=t.global_batch, seed=0))
            trainer.step(1)
            return trainer.subspace.gram

        *others, found[stages] = run_threads(work, replicas=1, stages=stages)
        assert all(g is None for g in others)
    torch.testing.assert_close(found[2], found[1], rtol=1e-5, atol=1e-9)
    config = held(train={"accumulation": 2})
    model = Decoder(config.model, config.constraint).initialise(config.seed)
    t = config.train
    tokens = TokenData(corpus, seq_len=t.seq_len, global_batch=t.global_batch, seed=0).batch(1)
    gram = torch.zeros(16, 16)
    for part in tokens.chunk(2):
        x = model.embed(part[:, :-1])
        T = x.shape[1]
        for name in ("0", "1", "2"):
            x = model.blocks[name](x, model.cos_TC[:T], model.sin_TC[:T])
        x.retain_grad()
        logits = model.head(model.norm(model.blocks["3"](x, model.cos_TC[:T], model.sin_TC[:T])))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
        loss = loss + config.model.z_loss * logits.logsumexp(-1).square().mean()
        (loss / 2).backward()
        gram += x.grad.flatten(0, 1).T @ x.grad.flatten(0, 1)
    torch.testing.assert_close(found[1], gram, rtol=1e-4, atol=1e-12)


def test_replicas_move_the_subspace_by_the_gradients_of_all(corpus: Path, tmp_path: Path) -> None:
    """The gradients of two replicas are those of one batch, so the subspace goes the same way."""
    found = []
    for replicas in (1, 2):
        out = tmp_path / str(replicas)
        summary = train_in_threads(held(boundary=MOVING, replicas=replicas, stages=2), corpus, out)
        rows = read_metrics(out / "metrics" / f"rank-{replicas:03d}.jsonl")
        found.append(
            [summary["val_loss"]] + [r[k] for r in rows if "outside" in r for k in ("outside", "outside_after")]
        )
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert len(found[0]) == 5
    assert all(after < before for before, after in zip(found[0][1::2], found[0][2::2], strict=True))


# Composition


LOCAL = {"steps": 12, "accumulation": 2, "global_batch": 8}


@pytest.mark.parametrize(
    ("run", "method", "boundary"),
    [
        ("diloco_m2", {"sync_every_steps": 4}, MOVING),
        ("diloco_m2", {"sync_every_steps": 4}, MOVING | {"mode": "reparametrised"}),
        ("streaming_h30", {"sync_every_steps": 6, "overlap_steps": [2], "mixing": 0.5}, MOVING),
        ("streaming_h30", {"sync_every_steps": 6, "overlap_steps": [2]}, MOVING | {"mode": "reparametrised"}),
        ("noloco", {"sync_every_steps": 4, "route": "random_micro_batch"}, MOVING | {"codec": "bf16"}),
        ("data_parallel", {"route": "random_step"}, MOVING),
        ("diloco_m2", {"sync_every_steps": 4, "trainable": "slice", "slices": 2, "sliced": ["mlp", "heads"]}, MOVING),
        (
            "diloco_m2",
            {"sync_every_steps": 4, "trainable": "slice", "slices": 2, "sliced": ["mlp", "out"]},
            MOVING | {"mode": "reparametrised"},
        ),
    ],
)
def test_everything_composes_and_resumes_bit_for_bit(
    run: str, method: dict, boundary: dict, corpus: Path, tmp_path: Path
) -> None:
    """Stopped after step 7: after an update, and with a transfer in flight where there is one; weights stay inside."""
    config = held(run, boundary=boundary, method=method, replicas=2, stages=2, train=LOCAL)
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, every_steps=7))
    whole = train_in_threads(config, corpus, tmp_path / "whole")

    def stop(trainer: Trainer, row: dict) -> None:
        if row["step"] == 8:
            raise Crash

    with pytest.raises(Crash):
        train_in_threads(config, corpus, tmp_path / "cut", on_row=stop)
    resumed = train_in_threads(config, corpus, tmp_path / "cut")
    assert resumed == whole
    for name in ("model.safetensors", "metrics/rank-002.jsonl", "metrics/rank-001.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    closed = {k: v for k, v in whole["sent_bytes_closed_form"].items() if v}
    assert closed == {k: v for k, v in whole["sent_bytes"].items() if k in closed}
    if boundary.get("mode") != "reparametrised":
        from safetensors.torch import load_file

        weights = load_file(tmp_path / "whole" / "model.safetensors")
        w = weights["blocks.0.mlp.down.weight"]
        assert relative(project(w, weights["basis_DR"], 0), w) < 1e-5


@pytest.mark.parametrize(
    ("run", "method"),
    [
        ("data_parallel", {}),
        ("diloco_m2", {"sync_every_steps": 4}),
        ("streaming_h30", {"sync_every_steps": 6, "overlap_steps": [2], "mixing": 0.5, "codec": "fp32"}),
        ("noloco", {"sync_every_steps": 4}),
        ("diloco_m2", {"sync_every_steps": 4, "trainable": "slice", "slices": 2, "sliced": ["mlp", "out"]}),
    ],
)
def test_with_sgd_both_modes_are_one_through_updates(run: str, method: dict, corpus: Path, tmp_path: Path) -> None:
    """W = U Z moves as W projected does: so coordinates, outer state and what is under way are all turned rightly."""
    train = LOCAL | {"steps": 16, "optimizer": "sgd", "lr": 0.5}
    found = []
    for mode in ("projected", "reparametrised"):
        config = held(run, boundary=MOVING | {"mode": mode}, method=method, replicas=2, stages=2, train=train)
        found.append(losses_of(config, corpus, tmp_path / mode))
    assert found[1] == pytest.approx(found[0], rel=2e-6)
    assert found[0][-1] < found[0][0] - 0.05  # it has learnt


def test_a_means_projection_is_the_same_before_and_after_it_is_applied(corpus: Path) -> None:
    """Different tau, a lossy codec, an update in between: replicas agree on a fragment that all have applied.

    It is sent at step 12, applied at 12 and at 15; the subspace moves at 14.
    """
    method = {"sync_every_steps": 6, "overlap_steps": [0, 3], "codec": "e3m0"}
    boundary = {"update_every_steps": 7, "update_lr": 1.0}
    config = held("streaming_h30", boundary=boundary, method=method, replicas=2, train={"steps": 24})

    def work(world) -> Tensor:
        t = config.train
        trainer = Trainer(config, world, TokenData(corpus, seq_len=t.seq_len, global_batch=t.global_batch, seed=0))
        for step in range(1, 17):
            trainer.step(step)
        return trainer.engine.state_dict()["0/agreed"]

    assert relative(*run_threads(work, replicas=2)) < 1e-6


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # of norms of queries and keys, on a CPU
@pytest.mark.parametrize("boundary", [{}, MOVING, {"kind": "low_rank", "rank": 3}, {"kind": "projection"}])
def test_boundaries_are_computed_in_fp32_where_the_rest_is_not(boundary: dict, corpus: Path, tmp_path: Path) -> None:
    """bf16 autocast, evaluations included; weights are rounded then, and losses with them."""
    config = held(boundary=boundary, stages=2, train={"precision": "bf16", "eval_every": 6})
    full = dataclasses.replace(config, train=dataclasses.replace(config.train, precision="fp32"))
    half, whole = losses_of(config, corpus, tmp_path / "bf16"), losses_of(full, corpus, tmp_path / "fp32")
    assert half == pytest.approx(whole, rel=0.01)
    assert half != whole


def test_feedback_of_a_subspace_keeps_nothing_that_it_can_never_say() -> None:
    """The part of a gradient outside the subspace is not wanted: only the codec's error is."""
    model = Decoder(ModelConfig(16, 2, 2, 32, 64, 8), Constraint(4)).initialise(0)
    config = BoundaryConfig("subspace", 4, codec="bf16", error_feedback=True)
    boundary = make_boundary(config, model.config, model)
    g = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    for turn in range(50):
        boundary.gradients(g, turn=turn, slot=0)
    assert boundary.errors["gradients/0"].norm() < 0.01 * g.norm()


def test_a_low_rank_message_of_few_tokens_is_of_fewer_ranks() -> None:
    """The last windows of an evaluation may be fewer tokens than the rank."""
    config = held(boundary={"kind": "low_rank", "rank": 12}, stages=2, train={"accumulation": 2, "global_batch": 4})
    boundary = make_boundary(config.method.boundary, config.model, Decoder(config.model))
    x = torch.randn(1, 3, 16)
    message = boundary.activations(x, None)
    assert message.numel() == boundary.activation_bytes(3) == 4 * 3 * (3 + 16)
    torch.testing.assert_close(boundary.read_activations(message, (1, 3))[0], x, rtol=1e-4, atol=1e-5)


def test_the_basis_is_drawn_apart_from_the_embedding() -> None:
    model = Decoder(ModelConfig(64, 1, 2, 32, 64, 8), Constraint(1)).initialise(0)
    assert abs(torch.cosine_similarity(model.basis_DR[:, 0], model.fixed_VD[0], dim=0)) < 0.5


def test_threads_equal_processes(corpus: Path, tmp_path: Path) -> None:
    config = held(boundary=MOVING, replicas=1, stages=2, train=LOCAL)
    threads = train_in_threads(config, corpus, tmp_path / "threads")
    done = train_in_processes(2, *command_line(config, corpus, tmp_path / "processes"))
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "processes" / "summary.json").read_text())
    assert summary["val_loss"] == threads["val_loss"]
    assert summary["sent_bytes"] == threads["sent_bytes"]


# Bytes


def test_the_ratio_at_the_papers_size() -> None:
    """d = 4096, k = 40, fp32, ids counted: about 100 times less."""
    shape = ModelConfig(4096, 1, 32, 64, 32_000, 8)
    dense, subspace = (make_boundary(b, shape) for b in (BoundaryConfig(), BoundaryConfig("subspace", 40)))
    tokens = 1024
    assert dense.activation_bytes(tokens) == dense.gradient_bytes(tokens) == 4 * 4096 * tokens
    assert subspace.activation_bytes(tokens) == (4 * 40 + 2) * tokens
    assert subspace.gradient_bytes(tokens) == 4 * 40 * tokens
    assert dense.activation_bytes(tokens) / subspace.activation_bytes(tokens) == pytest.approx(101.1, abs=0.05)
    both = make_boundary(BoundaryConfig("subspace", 40, codec="int8"), shape)
    assert both.activation_bytes(tokens) == 40 * tokens + 4 * (40 * tokens // 256) + 2 * tokens


BOUNDARIES = [
    {"kind": "dense", "rank": 0},
    {"kind": "dense", "rank": 0, "codec": "topk", "codec_keep": 0.1},
    {"kind": "dense", "rank": 0, "codec": "e2m1"},
    {"kind": "dense", "rank": 0, "codec": "dropout", "codec_keep": 0.2, "error_feedback": True},
    {"kind": "low_rank", "rank": 3},
    {"kind": "low_rank", "rank": 3, "codec": "bf16", "error_feedback": True},
    {"kind": "projection"},
    {"kind": "projection", "codec": "e3m0", "error_feedback": True},
    {"codec": "int8"},
    {"codec": "e3m0", "error_feedback": True},
    {},
]


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_the_ledger_has_the_closed_form_of_every_boundary(boundary: dict, corpus: Path, tmp_path: Path) -> None:
    """And errors that feedback keeps are part of a checkpoint."""
    config = held(boundary=boundary, stages=4, train={"steps": 4, "accumulation": 2}, checkpoint={"every_steps": 2})
    summary = train_in_threads(config, corpus, tmp_path / "run")
    closed = {k: v for k, v in summary["sent_bytes_closed_form"].items() if v}
    assert "route/activations" in closed
    assert closed == {k: v for k, v in summary["sent_bytes"].items() if k in closed}

    def stop(trainer: Trainer, row: dict) -> None:
        if row["step"] == 3:
            raise Crash

    with pytest.raises(Crash):
        train_in_threads(config, corpus, tmp_path / "cut", on_row=stop)
    assert train_in_threads(config, corpus, tmp_path / "cut") == summary


# What is lost


def _stage(**boundary: Any) -> Boundary:
    model = Decoder(ModelConfig(16, 1, 2, 32, 64, 8), None).initialise(0)
    return make_boundary(BoundaryConfig(**boundary), model.config, model)


def test_a_low_rank_message_is_the_best_approximation_where_there_is_one() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator) @ torch.randn(3, 16, generator=generator)
    p, q = low_rank(x, 3)
    torch.testing.assert_close(p @ q.T, x, rtol=1e-4, atol=1e-5)
    p, q = low_rank(noisy := x + 0.01 * torch.randn(40, 16, generator=generator), 3)
    u, s, vh = torch.linalg.svd(noisy, full_matrices=False)
    best = relative(u[:, :3] * s[:3] @ vh[:3], noisy)
    assert relative(p @ q.T, noisy) < 1.01 * best


def test_error_feedback_says_later_what_was_left_out() -> None:
    """Of equal activations, the mean of what arrives comes to be what was sent; without feedback it never does."""
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    means = {}
    for fed in (False, True):
        boundary = _stage(codec="topk", codec_keep=0.2, error_feedback=fed)
        arrived = [
            boundary.read_activations(boundary.activations(x, None, turn=i, slot=0), (2, 8))[0] for i in range(50)
        ]
        means[fed] = torch.stack(arrived).mean(0)
    assert relative(means[False], x) > 0.3
    assert relative(means[True], x) < 0.1


def test_evaluation_leaves_no_error_behind() -> None:
    boundary = _stage(codec="topk", codec_keep=0.2, error_feedback=True)
    boundary.activations(torch.randn(1, 4, 16), None)
    assert not boundary.errors


# Refusals


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"boundary": {"rank": 0}}, "method.boundary.rank = 0 must be from 1 to 16"),
        ({"boundary": {"rank": 17}}, "method.boundary.rank = 17 must be from 1 to 16"),
        (
            {"boundary": {"kind": "low_rank", "rank": 3}},
            "low_rank in fp32, error_feedback = False means nothing with one",
        ),
        ({"boundary": {"kind": "dense"}}, "method.boundary.rank means nothing with method.boundary.kind = dense"),
        (
            {"boundary": {"kind": "low_rank", "dense_layers": 2}, "stages": 2},
            "method.boundary.dense_layers means nothing with method.boundary.kind = low_rank",
        ),
        (
            {"boundary": {"dense_layers": 2}, "stages": 4},
            "dense_layers = 2 must all be of the last stage, which has 1 of 4",
        ),
        ({"boundary": {"codec_keep": 0.5}, "stages": 2}, "codec_keep means nothing with method.boundary.codec = fp32"),
        ({"boundary": {"codec": "topk", "codec_keep": 2}, "stages": 2}, "method.boundary.codec_keep = 2.0 is a share"),
        ({"boundary": {"error_feedback": True}, "stages": 2}, "error_feedback means nothing where nothing is lost"),
        (
            {"boundary": {"update_every_steps": 12, "update_lr": 1}},
            "update_every_steps = 12 must be below train.steps = 12",
        ),
        (
            {
                "boundary": {"kind": "dense", "rank": 0, "codec": "dare", "codec_keep": 0.5, "error_feedback": True},
                "stages": 2,
            },
            "error_feedback with method.boundary.codec = dare grows without bound",
        ),
        (
            {"method": {"exchange": "fsdp", "boundary": {"kind": "dense", "rank": 0}}, "train": {"record_ranks": True}},
            "record_ranks needs",
        ),
        ({"boundary": {"update_every_steps": 5}}, "update_every_steps = 5 and update_lr = 0.0 must both be above 0"),
        (
            {"boundary": {"mode": "reparametrised", "second_moment": "mixed"}},
            "second_moment means nothing with mode = reparametrised",
        ),
        ({"boundary": {"second_moment": "mixed"}, "train": {"optimizer": "sgd"}}, "nothing with train.optimizer = sgd"),
        ({"model": {"tied": True}}, "model.tied must be false with a subspace"),
        ({"run": "fsdp"}, "method.exchange = fsdp shards the matrices"),
        ({"boundary": {"kind": "subspce"}}, "kind = 'subspce' is not a valid choice; did you mean 'subspace'"),
        ({"boundary": {"rnk": 3}}, r"unknown key data_parallel.method.boundary.rnk; did you mean 'rank'"),
    ],
)
def test_refusals(override: dict, message: str) -> None:
    override = dict(override)
    if run := override.pop("run", None):
        override["method"] = {"exchange": run}
    with pytest.raises(ConfigError, match=message):
        held(**override)


# What it takes


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("mlp", ["gated", "relu"])
@pytest.mark.parametrize("sliced", [(), ("mlp",), ("mlp", "heads", "out")])
@pytest.mark.parametrize("reparametrised", [False, True])
def test_flops_equal_the_counted_ones(recompute: bool, mlp: str, sliced: tuple, reparametrised: bool) -> None:
    config, constraint = ModelConfig(16, 3, 4, 32, 64, 8, mlp=mlp), Constraint(4, reparametrised=reparametrised)
    model = Decoder(config, constraint).initialise(0)
    model.recompute = recompute
    assert sum(p.numel() for p in model.parameters()) == parameters(config, constraint).total
    slices = 2 if sliced else 1
    parts = pieces(parameter_shapes(config, constraint), sliced, slices, 3)
    trained = train_slice(model, parts, 0) if sliced else dict(model.named_parameters())
    assert sum(p.numel() for p in trained.values()) == trained_parameters(config, sliced, slices, constraint).total
    tokens = torch.randint(0, 64, (2, 9))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.losses(tokens[:, :-1], tokens[:, 1:])[0].backward()
    settings = {"sliced": sliced, "slices": slices, "recompute": recompute, "constraint": constraint}
    assert counter.get_total_flops() == training_flops(config, 2, 8, **settings)


@pytest.mark.parametrize("moment", ["row", "mixed", "element"])
@pytest.mark.parametrize("mode", ["projected", "reparametrised"])
def test_overhead_equals_the_counted(mode: str, moment: str, corpus: Path) -> None:
    """FLOPs of each part, and bytes of what is alive, over a real step of three stages with an update."""
    if mode == "reparametrised" and moment != "row":
        return  # refused
    moving = {"update_every_steps": 1, "update_lr": 1.0, "mode": mode, "second_moment": moment}
    config = held(boundary=moving, train={"accumulation": 1})
    t, b = config.train, config.method.boundary
    closed = overhead_flops(config.model, b, t.global_batch, t.seq_len, 3)

    def work(world) -> None:
        trainer = Trainer(config, world, TokenData(corpus, seq_len=t.seq_len, global_batch=t.global_batch, seed=0))
        subspace, model = trainer.subspace, trainer.model
        trainer.step(1)
        model.losses(*(torch.zeros(t.global_batch, t.seq_len, dtype=torch.long),) * 2)[0].backward()
        subspace.watch()

        def counted(*calls: Any) -> int:
            with FlopCounterMode(display=False) as counter:
                for call in calls:
                    call()
            return counter.get_total_flops()

        boundary, x = make_boundary(b, config.model, model), torch.randn(t.global_batch, t.seq_len, config.model.dim)
        ids = torch.zeros(x.shape[:2], dtype=torch.long)
        there, back = boundary.activations(x, ids), boundary.gradients(x)
        each = counted(
            lambda: boundary.activations(x, ids),
            lambda: boundary.read_activations(there, ids.shape),
            lambda: boundary.gradients(x),
            lambda: boundary.read_gradients(back, ids.shape),
        )
        assert closed["boundaries"] == 2 * each
        assert closed["projection"] == counted(subspace.project_gradients, subspace.project_weights)
        rows = x.flatten(0, 1)
        assert closed["watching"] == counted(lambda: rows.T @ rows)  # in place, it is not counted
        update = counted(lambda: subspace.update(2, trainer.optimizer, trainer.engine.map))
        logged = 2 * 2 * 16 * 4 * (16 + 4)  # the shares of energy
        assert closed["update"] <= update <= closed["update"] + logged + 2 * 16 * 4 * 4
        held_bytes = overhead_bytes(config.model, b)
        assert model.fixed_VD.nbytes == held_bytes["fixed_embedding"]
        assert (subspace.basis.nbytes, subspace.gram.nbytes) == (held_bytes["basis"], held_bytes["gram"])
        second = sum(4 * p.numel() - trainer.optimizer.state[p]["exp_avg_sq"].nbytes for p in trainer.trained.values())
        assert second == -held_bytes["second_moment"]

    run_threads(work, replicas=1)


def test_the_papers_400_megabytes_are_a_fixed_embedding() -> None:
    """8.8 at d = 4096 in 16 bits: what a vocabulary of 50 thousand takes, whatever the sequences' length (derived)."""
    c = dataclasses.replace(PRESETS["protocol_models/2b"], vocab_size=50_257)
    found = overhead_bytes(c, BoundaryConfig("subspace", 40), itemsize=2)
    assert found["fixed_embedding"] + found["basis"] == pytest.approx(400e6, rel=0.05)
