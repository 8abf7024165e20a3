"""Ranks: of matrices known, of activations, and of checkpoints of any family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lowcomm.experiment.run_folder import read_metrics
from lowcomm.experiment.train import train_in_threads
from lowcomm.model.config import Constraint, ModelConfig
from lowcomm.model.decoder import Decoder
from lowcomm.model.spectrum import (
    activation_ranks,
    checkpoint_projections,
    effective_rank,
    energy_outside,
    gaussian_stable_rank,
    singular_values,
    stable_rank,
    stable_ranks,
)
from tests.conftest import small_run

SMALL = ModelConfig(16, 3, 2, 32, 64, 8)


def test_ranks_of_matrices_whose_ranks_are_known() -> None:
    for w, rank in (
        (torch.eye(7), 7),
        (torch.ones(3, 5), 1),
        (torch.eye(6)[:, :4] * 2.5, 4),
        (torch.zeros(3, 3), None),
    ):
        s = singular_values(w)
        assert len(s) == min(w.shape)
        if rank is None:
            assert torch.tensor([stable_rank(s), effective_rank(s)]).isnan().all()
        else:
            assert (stable_rank(s), effective_rank(s)) == (pytest.approx(rank), pytest.approx(rank, rel=1e-6))
    s = singular_values(torch.diag(torch.tensor([2.0, 1.0, 1.0])))
    assert stable_rank(s) == pytest.approx(1.5)
    assert effective_rank(s) == pytest.approx(2 * 2**0.5)  # entropy of 1/2, 1/4, 1/4: 3/2 bits


def test_singular_values_are_those_of_an_svd() -> None:
    w = torch.randn(9, 30, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(singular_values(w), torch.linalg.svdvals(w.double()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(300, 300), (200, 800), (800, 200)])
def test_the_stable_rank_of_a_gaussian_matrix(shape: tuple[int, int]) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert stable_rank(singular_values(w)) == pytest.approx(gaussian_stable_rank(*shape), rel=0.03)


def test_activations_less_the_fixed_embedding_have_the_rank_of_the_subspace_until_the_dense_layer() -> None:
    ids = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(0))
    rows = activation_ranks(Decoder(SMALL, Constraint(2)).initialise(0), ids)
    assert [set(r) for r in rows] == [{"activations", "less_embedding"}] * 3
    assert all(r["less_embedding"] <= 2 + 1e-6 < r["activations"] for r in rows[:2])
    assert all(r["activations"] > 2 for r in activation_ranks(Decoder(SMALL).initialise(0), ids))


def test_energy_outside_the_subspace_is_that_of_the_fixed_embedding() -> None:
    ids = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(0))
    model = Decoder(SMALL, Constraint(2)).initialise(0)
    before, outside = model.embed(ids).detach(), model.fixed_VD[ids]
    outside = outside - outside @ model.basis_DR @ model.basis_DR.T
    first, *_ = energy_outside(model, ids)
    assert 0 < first < 1
    model.blocks["0"].mlp.down.weight.data.zero_()
    model.blocks["0"].attention.out.weight.data.zero_()  # now the first layer changes nothing
    assert energy_outside(model, ids)[0] == pytest.approx(float(outside.square().sum() / before.square().sum()))
    model.fixed_VD.zero_()
    assert energy_outside(model, ids)[0] == pytest.approx(0, abs=1e-9)


def test_ranks_are_logged_through_training(corpus: Path, tmp_path: Path) -> None:
    """Each stage logs those of its own weights and of their gradients, at each evaluation."""
    config = small_run(
        "data_parallel", stages=2, replicas=1, train={"record_ranks": True, "eval_every": 6}, model={"layers": 4}
    )
    train_in_threads(config, corpus, tmp_path)
    for stage in (0, 1):
        rows = read_metrics(tmp_path / "metrics" / f"rank-{stage:03d}.jsonl")
        logged = {r["step"]: {k: v for k, v in r.items() if "rank/" in k} for r in rows}
        assert [s for s, found in logged.items() if found] == [6, 12]
        names = {f"{layer}/{m}" for layer in (2 * stage, 2 * stage + 1) for m in ("attention.out", "mlp.down")}
        assert set(logged[6]) == {f"{what}/{n}" for what in ("stable_rank", "gradient_stable_rank") for n in names}
        assert all(1 <= v <= 16 for v in logged[12].values())


def _folder(path: Path, names: dict[str, torch.Tensor], *, files: int = 1) -> Path:
    """A checkpoint as Hugging Face has it."""
    path.mkdir()
    parts = [dict(list(names.items())[i::files]) for i in range(files)]
    if files == 1:
        save_file(parts[0], path / "model.safetensors")
        return path
    where = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        save_file(part, path / file)
        where |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return path


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize(
    ("out", "down"), [("self_attn.o_proj", "mlp.down_proj"), ("self_attn.dense", "mlp.fc2")], ids=["llama", "phi"]
)
def test_checkpoints_of_other_families_are_read(out: str, down: str, files: int, tmp_path: Path) -> None:
    model, names = Decoder(SMALL).initialise(0), {"model.embed_tokens.weight": torch.ones(64, 16)}
    for i, block in model.blocks.items():
        prefix = f"model.layers.{i}"
        names |= {f"{prefix}.{out}.weight": block.attention.out.weight.detach().bfloat16()}
        names |= {f"{prefix}.{down}.weight": block.mlp.down.weight.detach().bfloat16()}
        names |= {f"{prefix}.mlp.up_proj.weight": torch.ones(32, 16)}
    found = list(checkpoint_projections(_folder(tmp_path / "hub", names, files=files)))
    assert [(layer, matrix) for layer, matrix, _ in found] == [
        (i, m) for i in range(3) for m in ("attention.out", "mlp.down")
    ]
    ours = stable_ranks(dict(model.named_parameters()), "stable_rank")
    for layer, matrix, w in found:
        assert stable_rank(singular_values(w)) == pytest.approx(ours[f"stable_rank/{layer}/{matrix}"], rel=0.01)


def test_our_own_model_is_a_checkpoint_too(tmp_path: Path) -> None:
    model = Decoder(SMALL).initialise(0)
    folder = _folder(tmp_path / "own", {n: p.detach().clone() for n, p in model.named_parameters()})
    assert len(list(checkpoint_projections(folder))) == 6


def test_what_is_no_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty holds no \*.safetensors"):
        next(checkpoint_projections(tmp_path / "empty"))
    other = _folder(tmp_path / "other", {"transformer.h.0.attn.weight": torch.ones(2, 2)})
    with pytest.raises(ValueError, match="holds no projection matrix of a known name"):
        next(checkpoint_projections(other))
    (other / "model.safetensors").write_bytes(b"not this")
    with pytest.raises(ValueError, match=r"model.safetensors is no readable safetensors file"):
        next(checkpoint_projections(other))
    cut = _folder(
        tmp_path / "cut", {f"model.layers.{i}.mlp.down_proj.weight": torch.ones(2, 2) for i in range(2)}, files=2
    )
    next(cut.glob("*-00002-*")).unlink()
    with pytest.raises(ValueError, match="names model-00002-of-00002.safetensors, which is missing"):
        next(checkpoint_projections(cut))
