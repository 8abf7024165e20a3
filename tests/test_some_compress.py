"""Some replicas compress what crosses between their stages, the others have fast links and do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lowcomm import LocalUpdates, run_threads
from lowcomm.comm.world import World
from lowcomm.cost.footprint import activation_bytes
from lowcomm.cost.predict import sent_per_step
from lowcomm.experiment.train import train_in_threads
from lowcomm.experiment.trainer import Trainer
from lowcomm.methods.boundary import make_boundary
from lowcomm.methods.config import BoundaryConfig, MethodConfig
from lowcomm.methods.subspace import project
from lowcomm.settings import ConfigError
from tests.conftest import small_run

SOME = {"kind": "subspace", "rank": 4, "replicas": 1}


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_those_that_compress_train_the_projection_of_what_is_agreed(mixing: float) -> None:
    """By hand: outer gradients are P phi - theta_0 and phi - theta_1; phi leaves the subspace, theta_0 does not."""
    draw = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(6, 2, generator=draw)).Q
    begin = basis @ torch.randn(2, 5, generator=draw)
    moves = torch.randn(3, 2, 6, 5, generator=draw)
    moves[:, 0] = torch.stack([project(x, basis, 0) for x in moves[:, 0]])

    def work(world: World) -> tuple[Tensor, Tensor]:
        w = nn.Parameter(begin.clone())

        def keep(values: list[tuple[str, Tensor]]) -> None:
            if world.replica == 0:
                for _, value in values:
                    value.copy_(project(value, basis, 0))

        boundary = BoundaryConfig("subspace", rank=2, replicas=1)
        method = MethodConfig("parameters", sync_every_steps=1, outer="heavy_ball", outer_lr=0.5, boundary=boundary)
        sync = LocalUpdates({"w": w}, world, method, mixing=mixing, constrain=keep, close_last_round=False)
        for turn in range(3):
            with torch.no_grad():
                w.add_(moves[turn, world.replica])
            sync.step()
        return sync.weights()["w"].clone(), w.detach().clone()

    phi, theta = begin.clone(), [begin.clone(), begin.clone()]
    for turn in range(3):
        theta = [t + moves[turn, i] for i, t in enumerate(theta)]
        phi = phi - 0.5 * ((project(phi, basis, 0) - theta[0]) + (phi - theta[1])) / 2
        theta = [mixing * t + (1 - mixing) * phi for t in theta]
        theta[0] = project(theta[0], basis, 0)
    assert not torch.allclose(phi, project(phi, basis, 0), atol=0.1)
    for replica, (agreed, own) in enumerate(run_threads(work, replicas=2)):
        assert torch.allclose(agreed, phi, atol=1e-6)
        assert torch.allclose(own, theta[replica], atol=1e-6)


def run(stages: int, **boundary: object) -> object:
    """Three replicas, of which the first so many compress."""
    return small_run(
        "diloco_m2",
        replicas=3,
        stages=stages,
        model={"layers": 2},
        train={"global_batch": 6, "accumulation": 2},
        method={"boundary": SOME | boundary},
    )


def test_a_pipeline_is_the_same_computation_and_sends_what_is_predicted(corpus: Path, tmp_path: Path) -> None:
    sent: dict[tuple[int, str], int] = {}

    def note(trainer: Trainer, row: dict) -> None:
        for purpose in ("activations", "activation gradients"):
            sent[trainer.world.rank, purpose] = trainer.world.ledger.by_purpose().get(f"route/{purpose}", 0)

    one = train_in_threads(run(1, replicas=2), corpus, tmp_path / "one")
    two = train_in_threads(run(2, replicas=2), corpus, tmp_path / "two", on_row=note)
    assert two["val_loss"] == pytest.approx(one["val_loss"], abs=1e-4)
    config = run(2, replicas=2)
    tokens = config.local_batch // 2 * config.train.seq_len
    narrow, whole = (
        make_boundary(b, config.model).activation_bytes(tokens) for b in (config.method.boundary, BoundaryConfig())
    )
    messages = 2 * config.train.steps
    assert [sent[rank, "activations"] for rank in range(3)] == [messages * n for n in (narrow, narrow, whole)]
    everything = sum(sent.values()) / config.train.steps
    assert sent_per_step(config)[1] == pytest.approx(everything)
    # A machine that does not compress holds gradients that come back whole.
    assert activation_bytes(config, 0) - activation_bytes(run(2, replicas=0), 0) == 2 * (whole - 4 * tokens * 4)


def test_the_outer_gradients_that_are_logged_are_those_that_others_see() -> None:
    """Of two replicas one compresses and one lies: their cosine is -1 where both have found the same."""
    basis = torch.eye(4)[:, :2]

    def work(world: World) -> list[float]:
        w = nn.Parameter(torch.zeros(4, 3))

        def keep(values: list[tuple[str, Tensor]]) -> None:
            if world.replica == 0:
                for _, value in values:
                    value.copy_(project(value, basis, 0))

        boundary = BoundaryConfig("subspace", rank=2, replicas=1)
        more = {"byzantine": 1, "record_cosine": True, "boundary": boundary, "sync_every_steps": 1}
        sync = LocalUpdates({"w": w}, world, constrain=keep, outer="heavy_ball", outer_momentum=0.0, **more)
        found = []
        for _ in range(2):
            with torch.no_grad():
                sync.fragments[0].agreed.view(4, 3)[2:] = 9.0  # outside, as if others had moved it there
                w.add_(basis @ torch.ones(2, 3))
                w[2:] = 9.0 * world.replica
            found.append(sync.step()["cosine"])
        return found

    for cosines in run_threads(work, replicas=2):
        assert cosines == pytest.approx([-1.0, -1.0])


def test_fragments_overlapped_and_with_error_feedback_keep_to_it(corpus: Path, tmp_path: Path) -> None:
    """The parameters of replicas that compress never leave the subspace, whatever travels; what is agreed does."""
    outside: dict[int, float] = {}
    method = {"boundary": SOME, "fragments": "strided", "layers_per_fragment": 1, "overlap_steps": [2], "mixing": 0.5}
    method |= {"codec": "chunk_topk_2bit", "codec_keep": 0.02, "error_feedback": 0.9, "sync_every_steps": 4}

    def note(trainer: Trainer, row: dict) -> None:
        basis, name = trainer.model.basis_DR, "blocks.0.mlp.down.weight"
        for key, weights in ((0, dict(trainer.model.named_parameters())), (2, trainer.engine.weights())):
            w = weights[name].detach()
            outside[key + trainer.world.replica] = float((w - project(w, basis, 0)).norm() / w.norm())

    train_in_threads(small_run("diloco_m2", model={"layers": 2}, method=method), corpus, tmp_path, on_row=note)
    assert outside[0] < 1e-5
    assert min(outside[1], outside[2], outside[3]) > 1e-3


def test_what_does_not_go_together_is_refused() -> None:
    refused = [
        ({"boundary": SOME | {"replicas": 2}}, "method.boundary.replicas = 2 must be below replicas = 2; 0 where all"),
        ({"boundary": {"replicas": 1}}, "means nothing where nothing is compressed"),
        ({"boundary": SOME | {"update_every_steps": 5, "update_lr": 1.0}}, "must know how a subspace moves"),
        ({"boundary": SOME | {"mode": "reparametrised"}}, "does not go with method.boundary.mode = reparametrised"),
        (
            {"boundary": SOME, "outer": "average", "outer_lr": 1.0, "outer_momentum": 0.0},
            "method.boundary.replicas = 1 is about outer gradients: not with method.outer = average",
        ),
    ]
    for method, why in refused:
        with pytest.raises(ConfigError, match=why):
            small_run("diloco_m2", method=method)
    with pytest.raises(ConfigError, match="does not go with method.exchange = gradients, but with local updates"):
        small_run("data_parallel", replicas=2, method={"boundary": SOME, "exchange": "gradients"})
    with pytest.raises(ConfigError, match="as routes mix replicas"):
        small_run("diloco_m2", stages=2, model={"layers": 2}, method={"boundary": SOME, "route": "random_step"})
