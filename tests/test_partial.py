"""Partial Parameter Updates: gradients of a slice, what is frozen, means over owners, and what it all costs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lowcomm.codecs import make_codec
from lowcomm.comm.shares import Section, mean_bytes, owned_mean_bytes
from lowcomm.comm.start import run_threads
from lowcomm.experiment.config import RunConfig, TrainConfig
from lowcomm.experiment.inner import inner_optimizer
from lowcomm.experiment.run_folder import read_metrics
from lowcomm.experiment.train import train, train_in_threads
from lowcomm.experiment.trainer import Trainer
from lowcomm.methods.local_updates import LocalUpdates
from lowcomm.methods.outer_state import flatten
from lowcomm.methods.partial import SlicedLinear, detach_others, pieces, slice_parameters, train_slice
from lowcomm.methods.routing import random_slice
from lowcomm.model.accounting import memory, parameter_shapes, parameters, trained_parameters, training_flops
from lowcomm.model.config import ModelConfig
from lowcomm.model.decoder import MLP, Decoder
from lowcomm.settings import ConfigError
from tests.conftest import command_line, small_run
from tests.harness import Crash, clean_environment, train_in_processes

SMALL = ModelConfig(dim=32, layers=4, heads=4, ffn_dim=64, vocab_size=96, seq_len=16, mlp="relu")
KINDS = [("mlp",), ("heads",), ("mlp", "heads"), ("mlp", "heads", "out"), ("layers",), ("layers", "heads")]
PARTIAL = {"trainable": "slice", "slices": 2, "sliced": ["mlp", "heads"]}


def sliced_run(**override: Any) -> RunConfig:
    method = PARTIAL | override.pop("method", {})
    return small_run("diloco_m2", **({"replicas": 4} | override), method=method)


def sliced_model(config: ModelConfig, sliced: tuple[str, ...], slices: int, own: int) -> tuple[Decoder, dict, list]:
    model = Decoder(config).initialise(0)
    parts = pieces(parameter_shapes(config), sliced, slices, config.layers)
    return model, train_slice(model, parts, own), parts


def batch(config: ModelConfig) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (3, 12), generator=torch.Generator().manual_seed(1))


def backward(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    loss, _ = model.losses(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss.detach()


# Gradients


@pytest.mark.parametrize("mlp", ["relu", "gelu", "gated"])
@pytest.mark.parametrize("sliced", KINDS, ids="+".join)
@pytest.mark.parametrize("slices", [1, 2, 4])
def test_gradients_of_a_slice_are_those_of_full_training(mlp: str, sliced: tuple[str, ...], slices: int) -> None:
    """Bit for bit: the rows or columns of one product are the rows or columns of the other."""
    config = dataclasses.replace(SMALL, mlp=mlp, kv_heads=4, qk_norm=True)
    tokens = batch(config)
    full = Decoder(config).initialise(0)
    loss = backward(full, tokens)
    for own in range(slices):
        model, trained, parts = sliced_model(config, sliced, slices, own)
        assert backward(model, tokens) == loss
        mine = {p.parameter: p for p in parts if p.owner in (None, own)}
        assert trained.keys() == mine.keys()
        for name, leaf in trained.items():
            expected = mine[name].of(full.get_parameter(name).grad)
            transposed = mine[name].dim == 1 and leaf is not model.get_parameter(name)
            assert torch.equal(leaf.grad.t() if transposed else leaf.grad, expected), name


def test_grouped_heads_are_sliced_together() -> None:
    config = dataclasses.replace(SMALL, heads=8, kv_heads=4, head_dim=4)
    model, trained, _ = sliced_model(config, ("heads",), 2, 1)
    assert trained["blocks.0.attention.q.weight"].shape == (16, 32)
    assert trained["blocks.0.attention.k.weight"].shape == (8, 32)
    backward(model, batch(config))


@pytest.mark.parametrize("sliced", KINDS, ids="+".join)
def test_a_step_updates_the_slice_in_the_whole_and_nothing_else(sliced: tuple[str, ...]) -> None:
    """The slice is a view of the weight; what is frozen has no gradient, no optimizer state, and stays."""
    model, trained, parts = sliced_model(SMALL, sliced, 4, 2)
    optimizer = inner_optimizer(trained, TrainConfig(10, 4, 12, 0.01, 0, 0, 4))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for _ in range(2):
        backward(model, batch(SMALL))
        optimizer.step()
    for piece in parts:
        p = model.get_parameter(piece.parameter)
        changed = not torch.equal(piece.of(p), piece.of(before[piece.parameter]))
        assert changed == (piece.owner in (None, 2)), piece
    count = trained_parameters(SMALL, sliced, 4).total
    assert sum(t.numel() for t in trained.values()) == count
    assert sum(p.grad.numel() for p in [*model.parameters(), *trained.values()] if p.grad is not None) >= count
    states = [s["exp_avg"].numel() for s in optimizer.state.values()]
    assert sum(states) == count
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert frozen
    assert all(p.grad is None for p in frozen)


def test_a_fused_step_on_a_slice_is_a_plain_one() -> None:
    """Fused AdamW goes through memory as it lies, whatever the strides: so slices are contiguous."""
    found = []
    for fused in (True, False):
        model, trained, _ = sliced_model(SMALL, ("mlp", "heads", "out"), 2, 1)
        assert all(t.is_contiguous() for t in trained.values())
        optimizer = torch.optim.AdamW(trained.values(), lr=0.01, fused=fused)
        for _ in range(3):
            backward(model, batch(SMALL))
            optimizer.step()
            optimizer.zero_grad()
        found.append(flatten(list(model.parameters())))
    assert torch.allclose(*found, rtol=0, atol=2e-6)


def test_recomputation_and_bf16_change_slices_as_they_change_the_whole() -> None:
    """With recomputation gradients are the same; in bf16 those of a slice are those of full training in bf16."""
    tokens = batch(SMALL)
    grads = {}
    for recompute in (False, True):
        model, trained, _ = sliced_model(SMALL, ("mlp", "heads"), 2, 0)
        model.recompute = recompute
        backward(model, tokens)
        grads[recompute] = flatten([t.grad for t in trained.values()])
    assert torch.equal(grads[False], grads[True])
    full = Decoder(SMALL).initialise(0)
    model, trained, parts = sliced_model(SMALL, ("mlp", "heads"), 2, 0)
    with torch.autocast("cpu", torch.bfloat16):
        assert backward(full, tokens) == backward(model, tokens)
    mine = {p.parameter: p for p in parts if p.owner in (None, 0)}
    for name, leaf in trained.items():
        expected = mine[name].of(full.get_parameter(name).grad)
        transposed = mine[name].dim == 1 and leaf is not model.get_parameter(name)
        assert leaf.grad.dtype == torch.float32
        assert torch.equal(leaf.grad.t() if transposed else leaf.grad, expected), name


@pytest.mark.parametrize("mlp", ["relu", "gated"])
@pytest.mark.parametrize("kept", [[1], [1, 3]])
def test_detached_slices_pass_no_gradient(mlp: str, kept: list[int]) -> None:
    """Appendix D, against autograd with the other slices' hidden units cut out of the graph."""
    config = dataclasses.replace(SMALL, mlp=mlp)
    model, _, _ = sliced_model(config, ("mlp",), 4, 1)
    detach_others(model, kept, 4)
    layer: MLP = model.blocks["0"].mlp
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = layer(x)
    up, down = (w.weight.detach() for w in (layer.up, layer.down))
    hidden = F.relu(x @ up.t()) if mlp == "relu" else F.silu(x @ layer.gate.weight.detach().t()) * (x @ up.t())
    passes = torch.zeros(64, dtype=torch.bool)
    for i in kept:
        passes[16 * i : 16 * i + 16] = True
    reference = torch.where(passes, hidden, hidden.detach()) @ down.t()
    assert torch.allclose(y, reference, atol=1e-6)
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    (mine,) = torch.autograd.grad(y, x, direction)
    (theirs,) = torch.autograd.grad(reference, x, direction)
    assert torch.allclose(mine, theirs, atol=1e-7)


def test_the_random_slice_is_another_one_at_each_step() -> None:
    drawn = [random_slice(0, step, 2, 1, 4) for step in range(60)]
    assert set(drawn) == {0, 2, 3}
    assert drawn != [random_slice(0, step, 3, 1, 4) for step in range(60)]
    assert drawn == [random_slice(0, step, 2, 1, 4) for step in range(60)]


# Means over owners


def test_means_over_owners_by_hand() -> None:
    """Four replicas, two slices: all own the first two values, 0 and 2 the next, 1 and 3 the one after, 3 alone one."""
    values = [
        [1.0, 2.0, 3.0, 0.0, 0.0],
        [3.0, 4.0, 0.0, 5.0, 0.0],
        [5.0, 6.0, 7.0, 0.0, 0.0],
        [7.0, 8.0, 0.0, 9.0, 4.0],
    ]
    sections: list[Section] = [(2, range(4)), (1, [0, 2]), (1, [1, 3]), (1, [3])]

    def work(world) -> tuple[list[float], int]:
        x = torch.tensor(values[world.replica])
        mean = world.encoded_mean_async(x, make_codec("fp32"), purpose="x", sections=sections).wait()
        return mean.tolist(), world.ledger.total(axis="replica")

    for rank, (mean, sent) in enumerate(run_threads(work, replicas=4)):
        # m = 4, 2, 2, 1: (1 + 3 + 5 + 7) / 4, (2 + 4 + 6 + 8) / 4, (3 + 7) / 2, (5 + 9) / 2, 4
        assert mean == [4.0, 5.0, 5.0, 7.0, 4.0]
        assert sent == owned_mean_bytes(sections, make_codec("fp32"), 4, rank)


def test_what_nobody_in_a_group_owns_is_zero() -> None:
    """A pair of four replicas with four slices: each of its members owns one, the other two are missing."""
    sections: list[Section] = [(3, range(4)), *((2, [i]) for i in range(4))]

    def work(world) -> list[float]:
        if world.replica in (1, 3):
            return []
        x = torch.full((11,), 7.0)
        x[3:] = torch.arange(8.0) + 10 * world.replica
        group = [0, 2]
        return (
            world.encoded_mean_async(x, make_codec("fp32"), purpose="x", sections=sections, group=group).wait().tolist()
        )

    found = run_threads(work, replicas=4)
    assert found[0] == found[2] == [7.0, 7.0, 7.0, 0.0, 1.0, 0.0, 0.0, 24.0, 25.0, 0.0, 0.0]


@pytest.mark.parametrize("codec", ["fp32", "bf16", "e3m0", "topk"])
@pytest.mark.parametrize(("replicas", "slices"), [(2, 2), (4, 2), (4, 4), (12, 3), (16, 4)])
def test_frozen_zeros_do_not_travel(codec: str, replicas: int, slices: int) -> None:
    """Means over owners are those of what they encoded, for fewer bytes than zeros would take; closed form = ledger."""
    made = make_codec(codec, 0.5) if codec == "topk" else make_codec(codec)
    numel = 96
    sections: list[Section] = [(50, range(replicas)), *((numel, range(i, replicas, slices)) for i in range(slices))]

    def own(rank: int) -> torch.Tensor:
        x = torch.randn(50 + numel * slices, generator=torch.Generator().manual_seed(rank))
        for i in range(slices):
            if i != rank % slices:
                x[50 + i * numel : 50 + (i + 1) * numel] = 0
        return x

    def work(world) -> tuple[torch.Tensor, int]:
        mean = world.encoded_mean_async(own(world.rank), made, purpose="x", sections=sections).wait()
        return mean, world.ledger.total(axis="replica")

    found = run_threads(work, replicas=replicas)
    begin, expected = 0, []
    for index, (size, owners) in enumerate(sections):
        parts = [own(r)[begin : begin + size] for r in owners]
        begin += size
        said = [made.decode(made.encode(p, index << 32), size) for p in parts]
        if made.block:
            expected.append(torch.stack(said).sum(0) / len(said))
        else:
            expected.append(sum(said[1:], said[0].clone()) / len(said))
    for rank, (mean, sent) in enumerate(found):
        assert torch.equal(mean, found[0][0])
        assert torch.allclose(mean, torch.cat(expected), atol=1e-6)
        assert sent == owned_mean_bytes(sections, made, replicas, rank)
    dense = sum(owned_mean_bytes([(begin, range(replicas))], made, replicas, r) for r in range(replicas))
    assert sum(sent for _, sent in found) < dense


def test_bytes_of_slices_in_closed_form() -> None:
    """(1 + 1/N - 2/R) of the payload, where zeros would take (2 - 2/R)."""
    numel, replicas, slices = 3200, 32, 8
    sections: list[Section] = [(numel // slices, range(i, replicas, slices)) for i in range(slices)]
    sent = [owned_mean_bytes(sections, make_codec("fp32"), replicas, r) for r in range(replicas)]
    assert sum(sent) / replicas == 4 * numel * (1 + 1 / 8 - 2 / 32)
    assert mean_bytes(numel, 4, replicas) == 4 * numel * (2 - 2 / 32)


# Runs


def test_one_slice_is_diloco(corpus: Path, tmp_path: Path) -> None:
    method = {
        "slices": 1,
        "sliced": ["mlp", "heads", "out"],
        "outer": "nesterov",
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
    }
    train_in_threads(sliced_run(method=method), corpus, tmp_path / "slices")
    plain = {k: v for k, v in method.items() if k.startswith("outer")}
    train_in_threads(small_run("diloco_m2", replicas=4, method=plain), corpus, tmp_path / "diloco")
    for r in range(4):
        a, b = (read_metrics(tmp_path / n / "metrics" / f"rank-00{r}.jsonl") for n in ("slices", "diloco"))
        assert [row["loss"] for row in a] == [row["loss"] for row in b]
    a, b = (load_file(tmp_path / n / "model.safetensors") for n in ("slices", "diloco"))
    assert list(a) == list(b)
    assert all(torch.equal(a[k], b[k]) for k in b)


@pytest.mark.parametrize("sliced", [["mlp", "heads", "out"], ["layers"]])
def test_a_run_takes_the_steps_of_algorithm_1(
    sliced: list[str], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outer parameters, recomputed in float64 from the fast weights that the replicas show."""
    config = sliced_run(method={"sliced": sliced, "outer": "nesterov", "outer_lr": 0.4, "outer_momentum": 0.9})
    fast: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    outer: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    plain_step, plain_finish = LocalUpdates.step, LocalUpdates.finish

    def show(self: LocalUpdates) -> None:
        outer[self.world.replica, self.steps_done] = {n: w.double() for n, w in self.weights().items()}

    def step(self: LocalUpdates, tokens: int) -> dict[str, float]:
        fast[self.world.replica, self.steps_done + 1] = {n: p.detach().double() for n, p in self.named.items()}
        logged = plain_step(self)
        show(self)
        return logged

    def finish(self: LocalUpdates) -> dict[str, float]:
        logged = plain_finish(self)
        show(self)
        return logged

    monkeypatch.setattr(LocalUpdates, "step", step)
    monkeypatch.setattr(LocalUpdates, "finish", finish)
    train_in_threads(config, corpus, tmp_path)
    parts = pieces(parameter_shapes(config.model), sliced, 2, config.model.layers)
    theta = outer[0, 1]
    momentum = {n: torch.zeros_like(v) for n, v in theta.items()}
    for step in (4, 8, 12):
        for piece in parts:
            name, owners = piece.parameter, [k for k in range(4) if piece.owner in (None, k % 2)]
            start, m = piece.of(theta[name]), piece.of(momentum[name])
            moved = [start - piece.of(fast[k, step][name]) for k in owners]
            frozen = [start - piece.of(fast[k, step][name]) for k in range(4) if k not in owners]
            assert all((d.abs() < 1e-12).all() for d in frozen)
            delta = sum(moved) / len(owners)
            m.copy_(0.9 * m + delta)
            start.sub_(0.4 * (delta + 0.9 * m))
        for k in range(4):
            for name, value in theta.items():
                assert torch.allclose(outer[k, step][name], value, rtol=0, atol=1e-6), name
                assert torch.equal(outer[k, step][name], outer[0, step][name])
        theta = {n: v.clone() for n, v in outer[0, step].items()}


COMPOSED = [
    {"fragments": "strided", "layers_per_fragment": 1, "sync_every_steps": 6, "overlap_steps": [1], "codec": "e3m0"},
    {"fragments": "slices", "sync_every_steps": 6, "mixing": 0.5},
    {"peers": "group", "outer": "noloco", "outer_lr": 0.7, "outer_momentum": 0.5, "outer_pull": 0.7},
    {"peers": "group", "slices": 2, "sliced": ["mlp"], "outer": "heavy_ball", "outer_lr": 0.7, "outer_momentum": 0.3},
    {"codec": "dropout", "codec_keep": 0.5, "outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9},
    {"sliced": ["mlp"], "slices": 4, "input_gradients": "own_and_random"},
]


@pytest.mark.parametrize("method", COMPOSED)
def test_bytes_sent_are_the_closed_form(method: dict, corpus: Path, tmp_path: Path) -> None:
    config = sliced_run(method={"outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9} | method)
    found = run_threads(lambda w: train(config, w, corpus, tmp_path), replicas=4)
    for summary in found:
        for key, nbytes in summary["sent_bytes_closed_form"].items():
            assert summary["sent_bytes"][key] == nbytes


@pytest.mark.parametrize("method", COMPOSED)
def test_resume_is_exact(method: dict, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nesterov = {"outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}
    config = sliced_run(method=nesterov | method, checkpoint={"every_steps": 5})
    train_in_threads(config, corpus, tmp_path / "whole")
    plain = Trainer.step

    def step(self: Trainer, number: int) -> dict[str, Any]:
        if number == 8:
            raise Crash
        return plain(self, number)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "step", step)
        with pytest.raises(Crash):
            train_in_threads(config, corpus, tmp_path / "killed")
    train_in_threads(config, corpus, tmp_path / "killed")
    a, b = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "killed"))
    assert all(torch.equal(a[k], b[k]) for k in a)
    rows = [(tmp_path / n / "metrics" / "rank-003.jsonl").read_bytes() for n in ("whole", "killed")]
    assert rows[0] == rows[1]


def test_threads_and_processes_give_the_same_run(corpus: Path, tmp_path: Path) -> None:
    config = sliced_run(replicas=2, stages=2, method={"codec": "e3m0", "outer": "nesterov", "outer_lr": 0.7})
    train_in_threads(config, corpus, tmp_path / "threads")
    done = train_in_processes(4, *command_line(config, corpus, tmp_path / "processes"))
    assert done.returncode == 0, done.stderr
    a, b = (load_file(tmp_path / n / "model.safetensors") for n in ("threads", "processes"))
    assert all(torch.equal(a[k], b[k]) for k in a)


# What it costs


@pytest.mark.parametrize("mlp", ["relu", "gated"])
@pytest.mark.parametrize("sliced", KINDS, ids="+".join)
@pytest.mark.parametrize("recompute", [False, True])
def test_flops_are_what_torch_counts(mlp: str, sliced: tuple[str, ...], recompute: bool) -> None:
    config, tokens = dataclasses.replace(SMALL, mlp=mlp), batch(SMALL)
    for slices in (1, 2, 4):
        model, _, _ = sliced_model(config, sliced, slices, slices - 1)
        model.recompute = recompute
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            backward(model, tokens)
        expected = training_flops(config, 3, 11, sliced=sliced, slices=slices, recompute=recompute)
        assert counter.get_total_flops() == expected


@pytest.mark.parametrize("mlp", ["relu", "gated"])
@pytest.mark.parametrize("kept", [[2], [0, 2]])
def test_flops_with_detached_slices(mlp: str, kept: list[int]) -> None:
    config = dataclasses.replace(SMALL, mlp=mlp)
    model, _, _ = sliced_model(config, ("mlp",), 4, 2)
    detach_others(model, kept, 4)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        backward(model, batch(SMALL))
    assert counter.get_total_flops() == training_flops(config, 3, 11, sliced=["mlp"], slices=4, through=len(kept))


@pytest.mark.parametrize("sliced", KINDS, ids="+".join)
def test_memory_is_what_is_alive_after_a_step(sliced: tuple[str, ...], corpus: Path) -> None:
    config = small_run(
        "diloco_m2",
        replicas=2,
        method={"trainable": "slice", "slices": 2, "sliced": list(sliced), "outer": "nesterov", "outer_momentum": 0.9},
    )

    def work(world) -> list[int]:
        from lowcomm.experiment.batches import TokenData

        t = config.train
        trainer = Trainer(config, world, TokenData(corpus, seq_len=t.seq_len, global_batch=t.global_batch, seed=0))
        trainer.optimizer.zero_grad = lambda **_: None  # so that gradients can be counted
        trainer.step(1)
        leaves = [*trainer.model.parameters(), *trainer.trained.values()]
        grads = {id(p.grad): p.grad for p in leaves if p.grad is not None}
        moments = [v for s in trainer.optimizer.state.values() for k, v in s.items() if k != "step"]
        # Storages, so that a slice that were a copy would be counted.
        alive = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in leaves}
        of = [[t.numel() * t.element_size() for t in some] for some in (grads.values(), moments)]
        return [sum(alive.values()), *map(sum, of)]

    count, trained = (f.total for f in (parameters(config.model), trained_parameters(config.model, sliced, 2)))
    expected = memory(count, outer_buffers=2, trained=trained)
    for found in run_threads(work, replicas=2):
        assert found == [expected.weights, expected.gradients, expected.optimizer]


_PEAK = """
import sys
import torch
from lowcomm.methods.partial import pieces, train_slice
from lowcomm.model.accounting import parameter_shapes
from lowcomm.model.config import ModelConfig
from lowcomm.model.decoder import Decoder
torch.set_num_threads(1)
config = ModelConfig(dim=512, layers=10, heads=8, ffn_dim=4096, vocab_size=64, seq_len=16, mlp="relu")
sliced, slices = sys.argv[1].split("+") if sys.argv[1] else [], int(sys.argv[2])
model = Decoder(config).initialise(0)
trained = train_slice(model, pieces(parameter_shapes(config), sliced, slices, config.layers), 0)
optimizer = torch.optim.AdamW(trained.values(), fused=True)

def resident():
    # Without the pages of libraries, of which the system keeps more or fewer: the peak that it counts has them.
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon:"))

peak = 0
for _ in range(2):
    model.losses(torch.zeros(1, 16, dtype=torch.long), torch.zeros(1, 16, dtype=torch.long))[0].backward()
    peak = max(peak, resident())
    optimizer.step()
    peak = max(peak, resident())
print(peak)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_resident_memory_falls_as_predicted() -> None:
    """Weights of 210 MB, four times that with gradients and moments: what slices save of it, to 5 %."""
    config = ModelConfig(dim=512, layers=10, heads=8, ffn_dim=4096, vocab_size=64, seq_len=16, mlp="relu")

    def peak(sliced: str, slices: int) -> int:
        command = [sys.executable, "-c", _PEAK, sliced, str(slices)]
        done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=True)
        return int(done.stdout)

    whole, numel = peak("", 1), parameters(config).total
    for sliced, slices in (("mlp", 4), ("mlp+heads", 8)):
        trained = trained_parameters(config, sliced.split("+"), slices).total
        held = [memory(numel, outer_buffers=0, trained=n).on_device for n in (numel, trained)]
        assert whole - peak(sliced, slices) == pytest.approx(held[0] - held[1], rel=0.05)


# Refusals


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"method": {"slices": 3}}, "method.slices = 3 does not divide replicas = 4"),
        ({"method": {"slices": 4, "sliced": ["heads"]}}, "method.slices = 4 does not divide model.heads = 2"),
        ({"method": {"slices": 4, "sliced": ["layers"]}}, "method.slices = 4 does not divide model.layers = 2"),
        (
            {"model": {"ffn_dim": 33}},
            r"method.slices = 2 does not divide blocks.0.mlp.up.weight of shape \(33, 16\) along dimension 0",
        ),
        ({"method": {"sliced": []}}, r"method.sliced = \[\] must name what is sliced"),
        ({"method": {"sliced": ["mlp", "layers"]}}, r"must name what is sliced, once: mlp or layers"),
        ({"method": {"trainable": "all"}}, "method.slices means nothing with method.trainable = all"),
        (
            {"method": {"trainable": "all", "slices": 1, "sliced": [], "fragments": "slices"}},
            "method.fragments = slices means nothing with method.trainable = all",
        ),
        ({"method": {"sliced": ["heads"], "input_gradients": "own"}}, "input_gradients = own needs mlp"),
        ({"method": {"slices": 1, "input_gradients": "own"}}, "input_gradients = own needs two slices"),
    ],
)
def test_settings_that_cannot_work_are_refused(override: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sliced_run(**override)


#: Names and shapes of a model of others, four layers of it.
FOREIGN = {
    f"model.layers.{i}.{name}.weight": shape
    for i in range(4)
    for name, shape in (("self_attn.o_proj", (8, 8)), ("mlp.up_proj", (16, 8)), ("mlp.down_proj", (8, 16)))
}


def test_slices_of_other_models_are_named_by_patterns() -> None:
    parts = pieces(FOREIGN, ["*.up_proj.weight:0", "*.down_proj.weight:1"], 4, 4)
    for name, shape in FOREIGN.items():
        found = [p for p in parts if p.parameter == name]
        if ".mlp." not in name:
            assert [(p.shape, p.owner, p.whole) for p in found] == [(shape, None, True)]
            continue
        dim = int("down" in name)
        assert [(p.owner, p.dim, p.begin, p.end) for p in found] == [(i, dim, 4 * i, 4 * i + 4) for i in range(4)]
        x = torch.arange(128.0).view(shape)
        assert torch.equal(torch.cat([p.of(x) for p in found], dim), x)
        assert [p.of(x).shape for p in found] == [p.shape for p in found]


def test_layers_of_other_models_are_slices_too() -> None:
    owners = {p.parameter: p.owner for p in pieces(FOREIGN, ["layers"], 2, 4)}
    assert owners == {n: int(n.split(".")[2]) // 2 if ".mlp." in n else None for n in FOREIGN}


def test_what_two_layers_share_cannot_be_sliced() -> None:
    model = torch.nn.ModuleDict({"one": torch.nn.Linear(4, 4), "other": torch.nn.Linear(4, 4)})
    model["other"].weight = model["one"].weight
    with pytest.raises(ConfigError, match=r"one\.weight and other\.weight are one parameter: what layers share"):
        slice_parameters(model, 0, ["one.weight:0"], 2)


@pytest.mark.parametrize(
    ("sliced", "message"),
    [
        (["*.up_proj.weight"], "method.sliced names '.*up_proj.weight': it must be one of mlp, heads, out, layers"),
        (["*.up_proj.weight:2"], "or PATTERN:DIMENSION with a shell pattern"),
        (["*.upproj.weight:0"], r"method.sliced names '\*.upproj.weight:0', which matches no parameter"),
        (["mlp"], "method.sliced names 'mlp', which matches no parameter"),
        (["layers"], "method.slices = 3 does not divide model.layers = 4"),
        (["*.up_proj.weight:0"], r"slices = 3 does not divide .*0.mlp.up_proj.weight of shape \(16, 8\) along dim"),
    ],
)
def test_slices_that_names_do_not_give_are_refused(sliced: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pieces(FOREIGN, sliced, 3, 4)


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"method.sliced cuts up.bias of shape \(8,\) along dimension 1"):
        pieces({"up.weight": (4, 8), "up.bias": (8,)}, ["up.*:1"], 2)
    with pytest.raises(ConfigError, match="method.sliced names 'layers', which matches no parameter"):
        slice_parameters(torch.nn.Linear(4, 4), 0, ["layers"], 2)
    with pytest.raises(ConfigError, match="slices must be a whole number from 1 on, got 0"):
        slice_parameters(torch.nn.Sequential(torch.nn.Linear(4, 4)), 0, ["0.weight:0"], 0)


def test_a_bias_is_not_sliced_and_the_model_stays_as_it_is() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(
        ConfigError, match="method.sliced: 0.bias is no weight, and is trained whole: end it in .weight"
    ):
        slice_parameters(model, 0, ["0.*:0"], 2)
    assert type(model[0]) is torch.nn.Linear


def test_sliced_layers_keep_name_and_shape() -> None:
    model, _, _ = sliced_model(SMALL, ("mlp", "heads", "out"), 2, 0)
    plain = Decoder(SMALL)
    assert [(n, p.shape) for n, p in model.named_parameters()] == [(n, p.shape) for n, p in plain.named_parameters()]
    assert isinstance(model.blocks["0"].mlp.down, SlicedLinear)
