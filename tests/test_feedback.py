"""Error feedback: what a message loses joins the next one. Identities first, then SparseLoCo's steps by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lowcomm import DiLoCo, LocalUpdates, SparseLoCo, run_threads
from lowcomm.choices import options
from lowcomm.codecs import Codec, make_codec
from lowcomm.codecs.sparse import ChunkTopK
from lowcomm.comm.world import World
from lowcomm.experiment.run_folder import read_metrics
from lowcomm.experiment.train import train_in_threads
from lowcomm.methods.config import MethodConfig
from lowcomm.methods.local_updates import RESIDUAL
from lowcomm.methods.plan import Plan
from lowcomm.settings import ConfigError
from tests.conftest import small_run
from tests.golden import public_code

LOSSY = [n for n in options(Codec) if n != "dare" and not make_codec(n).lossless]
NUMEL, ROUNDS = 5000, 6
SPARSE = {key: getattr(SparseLoCo.default, key) for key in ("codec", "codec_keep", "error_feedback")}


def drawn(replica: int, turn: int) -> Tensor:
    """Draw what a replica's inner steps have moved in a turn, as values of many magnitudes."""
    generator = torch.Generator().manual_seed(100 * replica + turn)
    x = torch.randn(NUMEL, generator=generator)
    return 1e-3 * x * torch.exp(torch.randn(NUMEL, generator=generator))


def moved(world: World, **method: object) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Let replicas move one vector by `drawn` between turns; the vector agreed on, the residual, and what was moved."""
    x = nn.Parameter(torch.zeros(NUMEL))
    plain = {"outer": "heavy_ball", "outer_lr": 1.0, "outer_momentum": 0.0, "sync_every_steps": 1}
    sync, moves = LocalUpdates({"x": x}, world, steps=ROUNDS, **(plain | method)), []
    for turn in range(ROUNDS):
        with torch.no_grad():
            moves.append(drawn(world.replica, turn))
            x.add_(moves[-1])
        sync.step()
    sync.finish()
    state = sync.fragments[0].outer_state()
    return state["agreed"].clone(), state[RESIDUAL].clone(), moves


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("replicas", [1, 3])
def test_what_is_agreed_and_the_residuals_are_all_that_was_moved(name: str, replicas: int) -> None:
    """With beta = 1 nothing is lost: agreed = mean over replicas of (sum of moves + residual), the residual's sign
    being that of an outer gradient, agreed minus own.
    """
    keep = {"codec_keep": 0.1} if options(Codec)[name].sparse else {}
    found = run_threads(lambda w: moved(w, codec=name, error_feedback=1.0, **keep), replicas=replicas)
    agreed = found[0][0]
    assert all(torch.equal(a, agreed) for a, _, _ in found)
    kept = torch.stack([torch.stack(moves).sum(0) + residual for _, residual, moves in found]).mean(0)
    assert torch.allclose(agreed, kept, rtol=0, atol=1e-6)
    assert all(residual.abs().max() > 0 for _, residual, _ in found)


def sparse_loco(deltas: list[list[Tensor]], keep: int, beta: float) -> tuple[Tensor, list[Tensor]]:
    """SparseLoCo's Algorithm 1 in plain words, with the levels of tplr-y/CCLoco at 214aa7d: parameters from zero, and
    residuals. With all values of each chunk it is MuLoCo's 2 bits with error feedback, without momentum.
    """
    theta, errors = torch.zeros(NUMEL), [torch.zeros(NUMEL) for _ in deltas[0]]
    for of_turn in deltas:
        sent = []
        for i, delta in enumerate(of_turn):
            a = beta * errors[i] + delta
            places = []
            for begin in range(0, NUMEL, 4096):
                chunk = a[begin : begin + 4096]
                order = sorted(range(len(chunk)), key=lambda j: -abs(float(chunk[j])))
                places += sorted(begin + j for j in order[:keep])
            kept = a[places]
            mean, sigma = kept.mean(), kept.std()
            bins = torch.clamp(torch.round((kept - mean) / (1.5 * sigma) + 2), 0, 3)
            hat = torch.zeros(NUMEL)
            for level in range(4):
                inside = [at for at, b in zip(places, bins.tolist(), strict=True) if b == level]
                if inside:
                    hat[inside] = a[inside].mean()
            errors[i] = a - hat
            sent.append(hat)
        theta = theta - torch.stack(sent).mean(0)
    return theta, errors


def test_sparse_loco_by_hand() -> None:
    found = run_threads(lambda w: moved(w, **SPARSE), replicas=2)
    deltas = [[-moves[turn] for _, _, moves in found] for turn in range(ROUNDS)]
    theta, errors = sparse_loco(deltas, 64, 0.95)
    assert torch.allclose(found[0][0], theta, rtol=0, atol=1e-7)
    for (_, residual, _), error in zip(found, errors, strict=True):
        assert torch.allclose(residual, error, rtol=0, atol=1e-7)


def test_two_bits_with_feedback_by_hand() -> None:
    found = run_threads(lambda w: moved(w, codec="levels", error_feedback=0.9), replicas=2)
    theta, errors = sparse_loco([[-moves[turn] for _, _, moves in found] for turn in range(ROUNDS)], 4096, 0.9)
    assert torch.allclose(found[0][0], theta, rtol=0, atol=1e-7)
    for (_, residual, _), error in zip(found, errors, strict=True):
        assert torch.allclose(residual, error, rtol=0, atol=1e-7)


def test_the_named_method_takes_the_steps_of_the_public_code() -> None:
    """The class puts together tiles, a mean of senders, 2 bits by parameter and feedback.

    Its steps are held to those of tplr-y/CCLoco (`tests/golden/public_code.py`).
    """

    def work(world: World, **changed: float) -> dict[str, Tensor]:
        return public_code.moved(
            lambda named: SparseLoCo(named, world, steps=public_code.STEPS, sync_every_steps=1, **changed),
            1.0,
            world.replica,
        )

    found = run_threads(work, replicas=public_code.RANKS)
    fewer = run_threads(lambda world: work(world, codec_keep=32 / 4096), replicas=public_code.RANKS)
    for name, wanted in public_code.expected("ccloco").items():
        assert all(torch.equal(x[name], found[0][name]) for x in found)
        size = wanted.abs().max()
        assert torch.allclose(found[0][name], wanted, rtol=0, atol=1e-6 * size)
        assert not torch.allclose(fewer[0][name], wanted, rtol=0, atol=1e-3 * size)


def test_diloco_in_two_bits_takes_the_outer_steps_of_mulocos_public_code() -> None:
    """Held to facebookresearch/MuLoCo (`tests/golden/public_code.py`), which quantises a mean a second time if told."""
    told = {"outer_lr": public_code.MULOCO["lr"], "outer_momentum": public_code.MULOCO["momentum"], "codec": "levels"}

    def work(world: World, decay: float) -> dict[str, Tensor]:
        return public_code.moved(
            lambda named: DiLoCo(
                named, world, steps=public_code.STEPS, sync_every_steps=1, error_feedback=decay, **told
            ),
            1.0,
            world.replica,
        )

    found = run_threads(lambda world: work(world, public_code.MULOCO["error_decay"]), replicas=public_code.RANKS)
    other = run_threads(lambda world: work(world, 0.95), replicas=public_code.RANKS)
    expected = public_code.expected("muloco")
    assert list(expected) == list(public_code.SHAPES)
    for name, wanted in expected.items():
        assert all(torch.equal(x[name], found[0][name]) for x in found)
        size = wanted.abs().max()
        assert torch.allclose(found[0][name], wanted, rtol=0, atol=1e-6 * size)
        assert not torch.allclose(other[0][name], wanted, rtol=0, atol=1e-2 * size)


def test_a_message_of_sparse_loco_is_146_times_shorter_than_fp32() -> None:
    codec = make_codec("chunk_topk_2bit", 64 / 4096)
    assert codec.nbytes(4096) == 16 + 64 * 12 // 8 + 64 * 2 // 8  # levels, places, values
    assert 4 * 4096 * 10_000 / codec.nbytes(4096 * 10_000) == pytest.approx(146.3, abs=0.1)


def test_it_means_nothing_where_nothing_is_lost() -> None:
    with pytest.raises(ConfigError, match=r"method.error_feedback = 0.9 means nothing with method.codec = fp32"):
        Plan({"x": (4,)}, MethodConfig("parameters", error_feedback=0.9, outer="nesterov"), 2)
    with pytest.raises(ConfigError, match=r"method.error_feedback must be at most 1, got 1.5"):
        small_run("diloco_m2", method={"codec": "e3m0", "error_feedback": 1.5})
    with pytest.raises(ConfigError, match=r"with method.codec = dare grows without bound"):
        small_run("diloco_m2", method={"codec": "dare", "codec_keep": 0.5, "error_feedback": 0.9})


@pytest.mark.parametrize("offload", [False, True])
def test_a_run_goes_on_with_its_residual(offload: bool, corpus: Path, tmp_path: Path) -> None:
    """Stopped after any step and started anew, it is the run that was never stopped."""
    streaming = {"fragments": "strided", "layers_per_fragment": 1, "sync_every_steps": 4, "overlap_steps": [1]}
    method = streaming | {"offload_outer": offload} | SPARSE
    config = small_run("diloco_m2", method=method, checkpoint={"every_steps": 1})

    def losses(out: Path) -> list[float]:
        return [row["loss"] for row in read_metrics(out / "metrics" / "rank-000.jsonl")]

    train_in_threads(config, corpus, tmp_path / "plain")
    without = small_run("diloco_m2", method=method | {"error_feedback": 0.0})
    train_in_threads(without, corpus, tmp_path / "without")
    assert losses(tmp_path / "plain") != losses(tmp_path / "without")
    for at in (5, 9):

        def crash(trainer: object, row: dict, at: int = at) -> None:
            if row["step"] == at:
                raise RuntimeError("crash")

        with pytest.raises(RuntimeError):
            train_in_threads(config, corpus, tmp_path / f"run{at}", on_row=crash)
        train_in_threads(config, corpus, tmp_path / f"run{at}")
        assert losses(tmp_path / f"run{at}") == losses(tmp_path / "plain")


def test_a_message_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that are sent are those from which the residual was taken, so that no section is encoded again."""
    count, encode = [], ChunkTopK.encode

    def counted(self: ChunkTopK, x: Tensor, seed: int = 0) -> Tensor:
        count.append(len(x))
        return encode(self, x, seed)

    monkeypatch.setattr(ChunkTopK, "encode", counted)
    run_threads(lambda w: moved(w, **SPARSE), replicas=2)
    assert count == [NUMEL] * 2 * ROUNDS
