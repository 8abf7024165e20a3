"""The inner optimizer: Muon beside AdamW, as MuLoCo has them, and an outer optimizer without anybody else."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lowcomm.choices import choose
from lowcomm.cost.footprint import stage_memory
from lowcomm.experiment.config import TrainConfig
from lowcomm.experiment.inner import inner_optimizer, set_learning_rate
from lowcomm.experiment.run_folder import read_metrics
from lowcomm.experiment.train import train_in_threads
from lowcomm.methods import muon
from lowcomm.methods.inner import InnerOptimizer
from lowcomm.model.config import ModelConfig
from lowcomm.model.decoder import Decoder
from lowcomm.settings import ConfigError
from tests.conftest import small_run
from tests.golden import public_code

MODEL = ModelConfig(dim=24, layers=2, heads=2, ffn_dim=64, vocab_size=50, seq_len=16)
TRAIN = TrainConfig(
    steps=20,
    global_batch=2,
    seq_len=16,
    lr=3e-3,
    warmup_steps=4,
    eval_every=0,
    eval_sequences=2,
    optimizer="muon",
    muon_lr=0.05,
    weight_decay=0.1,
)
MUON = {"optimizer": "muon", "muon_lr": 0.02}


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(out / "metrics" / "rank-000.jsonl")]


@pytest.mark.parametrize("slow", [False, True], ids=["bf16", "fp32"])
def test_it_is_muon_of_the_matrices_inside_blocks_and_adamw_of_the_rest(
    slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against two of torch's optimizers, side by side, through warm-up and decay; up to rounding where bf16 is slow."""
    monkeypatch.setattr(muon, "_bf16_is_slow", lambda p: slow)
    ours, theirs = (Decoder(MODEL).initialise(0) for _ in range(2))
    optimizer = inner_optimizer(dict(ours.named_parameters()), TRAIN)
    named = dict(theirs.named_parameters())
    inside = [p for n, p in named.items() if n.startswith("blocks.") and p.dim() == 2]
    assert len(inside) == MODEL.layers * 7
    matrices = [torch.optim.Muon([p], momentum=0.95, nesterov=False, weight_decay=0.0) for p in inside]
    decay = {True: TRAIN.weight_decay, False: 0.0}
    rest = [
        {"params": [p for p in named.values() if (p.dim() == 2) == wide and all(p is not q for q in inside)]}
        | {"weight_decay": decay[wide]}
        for wide in (True, False)
    ]
    plain = torch.optim.AdamW(rest, lr=1.0, betas=(TRAIN.beta1, TRAIN.beta2), eps=TRAIN.eps, fused=True)
    draw = torch.Generator().manual_seed(0)
    for step in range(1, 13):
        rate = set_learning_rate(optimizer, step, TRAIN)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=draw)
            q.grad = p.grad.clone()
        for group in plain.param_groups:
            group["lr"] = rate
        for p, one in zip(inside, matrices, strict=True):
            peak = TRAIN.muon_lr * rate / TRAIN.lr
            with torch.no_grad():
                p.mul_(1 - peak * TRAIN.weight_decay)  # MuLoCo's decay goes with the rate before it is scaled
            one.param_groups[0]["lr"] = peak * min(1.0, math.sqrt(p.shape[0] / p.shape[1]))
            one.step()
        plain.step()
        optimizer.step()
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            if slow and name.startswith("blocks.") and p.dim() == 2:
                assert (p - q).norm() < 0.004 * q.norm()
            else:
                assert torch.allclose(p, q, rtol=0, atol=1e-6)


@pytest.mark.parametrize("exactly", [False, True], ids=["torch's direction", "exact direction"])
def test_its_steps_are_those_of_mulocos_public_code(exactly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held to facebookresearch/MuLoCo (`tests/golden/public_code.py`): momentum, decay and the rate of each shape.

    Its orthogonal matrices are nearly exact, but for the smallest singular values of the square one. With exact ones
    ours are its steps; with torch's they point where those do, and are a little shorter.
    """

    def nearest(matrix: Tensor, *told: object) -> Tensor:
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        return u @ v

    if exactly:
        monkeypatch.setattr(muon, "_bf16_is_slow", lambda p: True)
        monkeypatch.setattr(muon, "orthogonal", nearest)
    told = {"muon_lr": public_code.MUON["lr"], "muon_momentum": public_code.MUON["momentum"]}
    t = dataclasses.replace(TRAIN, **told, weight_decay=public_code.MUON["weight_decay"])
    named = {name: torch.zeros(public_code.SHAPES[name][0], requires_grad=True) for name in public_code.MATRICES}
    optimizer = inner_optimizer({f"blocks.0.{name}": x for name, x in named.items()}, t)
    for step in range(public_code.STEPS):
        gradients = public_code.drawn(0, step)
        for name, x in named.items():
            x.grad = gradients[name]
        optimizer.step()
    expected = public_code.expected("muon")
    assert list(expected) == list(named)
    for name, wanted in expected.items():
        x, size = named[name].detach(), wanted.norm()
        if exactly:
            assert (x - wanted).norm() < {"wide": 0.02, "square": 0.05}[name] * size
        else:
            assert (x * wanted).sum() > 0.99 * x.norm() * size
            assert 0.8 * size < x.norm() < size


@pytest.mark.parametrize("shape", [(24, 24), (64, 24), (24, 64)])
def test_without_bf16_it_is_as_near_to_torch_s_as_rounding_lets_it_be(shape: tuple[int, int]) -> None:
    """A sum in another order may be rounded to the next value of bf16, and 15 products let that grow to some 0.5 %."""
    weight = torch.zeros(shape, requires_grad=True)
    weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    theirs = torch.optim.Muon([weight], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0)
    group = theirs.param_groups[0]
    found = muon.orthogonal(weight.grad, group["ns_coefficients"], group["ns_steps"], group["eps"])
    theirs.step()
    wanted = -weight.detach() / math.sqrt(max(1.0, shape[0] / shape[1]))
    assert torch.equal(found, found.bfloat16().float())
    assert (found - wanted).norm() < 0.015 * wanted.norm()


@pytest.mark.parametrize("slow", [False, True], ids=["bf16", "fp32"])
def test_its_products_are_those_that_are_counted(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "_bf16_is_slow", lambda p: slow)
    for name, some in {"muon": True, "adamw": False}.items():
        trained = dict(Decoder(MODEL).initialise(0).named_parameters())
        optimizer = inner_optimizer(trained, dataclasses.replace(TRAIN, optimizer=name, muon_lr=0.05 * some))
        for p in trained.values():
            p.grad = torch.ones_like(p)
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
        shapes = {n: tuple(p.shape) for n, p in trained.items()}
        flops = choose(InnerOptimizer, name, "train.optimizer").step_flops(shapes)
        assert (counter.get_total_flops(), flops > 0) == (flops, some)


@pytest.mark.parametrize("shape", [(24, 24), (64, 24), (24, 64)])
def test_a_step_changes_outputs_by_the_rate_whatever_the_shape(shape: tuple[int, int]) -> None:
    """Scaled by sqrt(out / in), a step of spectral norm about 1 moves the root mean square of an output by the rate."""
    weight = torch.zeros(shape, requires_grad=True)
    t = dataclasses.replace(TRAIN, weight_decay=0.0, muon_lr=1.0)
    optimizer = inner_optimizer({"blocks.0.x.weight": weight}, t)
    u, _, v = torch.linalg.svd(torch.randn(shape, generator=torch.Generator().manual_seed(0)), full_matrices=False)
    weight.grad = u @ torch.diag(torch.linspace(0.2, 1.0, min(shape))) @ v  # none so small that five steps miss it
    optimizer.step()
    singular = torch.linalg.svdvals(weight.detach()) / math.sqrt(shape[0] / shape[1])
    assert 0.6 < singular.min() <= singular.max() < 1.3


def test_what_it_saves_is_loaded_by_both() -> None:
    ours, theirs = (Decoder(MODEL).initialise(0) for _ in range(2))
    optimizers = [inner_optimizer(dict(model.named_parameters()), TRAIN) for model in (ours, theirs)]

    def step(seed: int, *models: Decoder) -> None:
        for model in models:
            draw = torch.Generator().manual_seed(seed)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=draw)

    step(0, ours)
    optimizers[0].step()
    theirs.load_state_dict(ours.state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    step(1, ours, theirs)
    for optimizer in optimizers:
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("replicas", [1, 2])
def test_muloco_trains_and_goes_on_where_it_was_stopped(replicas: int, corpus: Path, tmp_path: Path) -> None:
    config = small_run("diloco_m2", replicas=replicas, train=MUON, checkpoint={"every_steps": 1})
    train_in_threads(config, corpus, tmp_path / "plain")
    found = losses(tmp_path / "plain")
    assert found[-1] < found[0] - 0.3

    def crash(trainer: object, row: dict) -> None:
        if row["step"] == 7:
            raise RuntimeError("crash")

    with pytest.raises(RuntimeError):
        train_in_threads(config, corpus, tmp_path / "run", on_row=crash)
    train_in_threads(config, corpus, tmp_path / "run")
    assert losses(tmp_path / "run") == found


def test_what_muon_does_not_go_with_is_refused() -> None:
    refused = [
        ("diloco_m2", {"train": {"optimizer": "muon"}}, "train.optimizer = muon needs train.muon_lr above 0"),
        ("diloco_m2", {"train": {"muon_lr": 0.1}}, "train.muon_lr means nothing with train.optimizer = adamw"),
        (
            "diloco_m2",
            {"train": MUON, "method": {"trainable": "slice", "slices": 2, "sliced": ["mlp"]}},
            "makes whole matrices orthogonal, in bf16: not with method.trainable = slice",
        ),
    ]
    for name, settings, why in refused:
        with pytest.raises(ConfigError, match=why):
            small_run(name, **settings)


def test_muon_holds_as_many_moments_as_its_closed_form_says() -> None:
    config = small_run("data_parallel", replicas=1, train=MUON)
    model = Decoder(config.model).initialise(0)
    optimizer = inner_optimizer(dict(model.named_parameters()), config.train)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    moments = [v for state in optimizer.state.values() for name, v in state.items() if name != "step"]
    assert stage_memory(config, 0).optimizer == 4 * sum(v.numel() for v in moments)
