"""Closed forms against what torch executes and allocates."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lowcomm.comm.shares import mean_bytes, shares
from lowcomm.experiment.config import TrainConfig
from lowcomm.experiment.inner import inner_optimizer
from lowcomm.methods.config import MethodConfig
from lowcomm.methods.local_updates import LocalUpdates
from lowcomm.methods.plan import Plan
from lowcomm.model.accounting import forward_flops, memory, parameter_shapes, training_flops
from lowcomm.model.config import Constraint, ModelConfig
from lowcomm.model.decoder import Decoder
from lowcomm.model.presets import PRESETS
from tests.test_model import SMALL, VARIANTS

TRAIN = TrainConfig(steps=10, global_batch=2, seq_len=16, lr=1e-3, warmup_steps=1, eval_every=0, eval_sequences=2)


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS.keys())
def test_flops_are_what_torch_counts(change: dict) -> None:
    config: ModelConfig = dataclasses.replace(SMALL, **change)
    model = Decoder(config).initialise(0)
    tokens = torch.randint(0, config.vocab_size, (3, 12))
    # The CPU's fused attention has no entry in torch's counter; the plain one is the same arithmetic.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss, _ = model.losses(tokens[:, :-1], tokens[:, 1:])
    assert counter.get_total_flops() == forward_flops(config, 3, 11)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss, _ = model.losses(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
    assert counter.get_total_flops() == training_flops(config, 3, 11)


@pytest.mark.parametrize(
    ("outer", "buffers", "offload"), [("average", 1, False), ("nesterov", 2, False), ("nesterov", 2, True)]
)
@pytest.mark.parametrize("inner", ["adamw", "sgd", "muon"])
def test_memory_is_what_is_allocated(outer: str, buffers: int, offload: bool, inner: str) -> None:
    from lowcomm.comm.start import run_threads

    fragments = {"fragments": "strided", "layers_per_fragment": 1}
    method = MethodConfig(
        "parameters", sync_every_steps=6, outer=outer, offload_outer=offload, overlap_steps=(1,), **fragments
    )
    train = dataclasses.replace(TRAIN, optimizer=inner, muon_lr=0.02 if inner == "muon" else 0.0, steps=12)

    def work(world) -> tuple[int, ...]:
        model = Decoder(SMALL).initialise(0)
        engine = LocalUpdates(model, world, method, steps=train.steps)
        optimizer = inner_optimizer(dict(model.named_parameters()), train)
        tokens = torch.randint(0, 50, (2, 17))
        resident = []
        for _ in range(train.steps):
            optimizer.zero_grad()
            model.losses(tokens[:, :-1], tokens[:, 1:])[0].backward()
            optimizer.step()
            resident.append(sum(f.resident for f in engine.fragments))
            engine.step()
        engine.finish()
        states = [t for s in optimizer.state.values() for k, t in s.items() if k != "step" and t is not None]
        sizes = [
            sum(t.numel() * t.element_size() for t in tensors)
            for tensors in (
                list(model.parameters()),
                [p.grad for p in model.parameters()],
                states,
                [t for t in engine.state_dict().values() if t.dim()],  # counts are numbers
            )
        ]
        return *sizes, max(resident), resident[0]

    (found,) = run_threads(work, replicas=1)
    named = dict(Decoder(SMALL).named_parameters())
    numel = sum(p.numel() for p in named.values())
    inside = sum(p.numel() for name, p in named.items() if name.startswith("blocks.") and p.dim() == 2)
    told = {"moments": 0} if inner == "sgd" else {"fewer": inside} if inner == "muon" else {}
    largest = max(
        SMALL.dim * SMALL.vocab_size * 2 + SMALL.dim,
        (numel - 2 * SMALL.dim * SMALL.vocab_size - SMALL.dim) // SMALL.layers,
    )
    fetched = buffers * largest if offload else None
    expected = memory(numel, outer_buffers=buffers, fetched=fetched, **told)
    assert found[:4] == (expected.weights, expected.gradients, expected.optimizer, expected.outer)
    assert found[4] == expected.outer_on_device
    assert found[5] == (0 if offload else expected.outer)  # between turns nothing is held
    assert expected.on_device == sum(found[:3]) + found[4]


def test_offloading_three_layers_of_a_hundred_billion_costs_two_per_cent() -> None:
    """Streaming DiLoCo, section 2.5: 20 GB more than 1,117 GB (of 2^30 bytes) for 3 of 108 layers."""
    numel = 10**11
    without = memory(numel, outer_buffers=0)
    streamed = memory(numel, outer_buffers=2, fetched=2 * (numel * 3 // 108))
    lasting = without.weights + without.optimizer
    assert int(lasting / 2**30) == 1117
    assert int(streamed.outer_on_device / 2**30) == 20
    assert round(100 * streamed.outer_on_device / lasting) == 2


def test_shares_cover_every_value_once() -> None:
    for numel in (0, 1, 5, 12, 1001):
        for ranks in (1, 2, 3, 8):
            parts = shares(numel, ranks)
            assert [i for begin, end in parts for i in range(begin, end)] == list(range(numel))
            sizes = [end - begin for begin, end in parts]
            assert max(sizes) - min(sizes) <= 1


def test_a_mean_sends_the_bytes_of_a_ring() -> None:
    assert mean_bytes(1000, 4, 1) == 0
    assert mean_bytes(1000, 4, 2) == 4000  # 2 (R-1)/R = 1
    assert mean_bytes(1000, 4, 4) == 6000  # 2 (R-1)/R = 1.5
    for ranks in (2, 3, 5, 8):
        total = sum(mean_bytes(1001, 4, ranks, r) for r in range(ranks))
        assert total == 2 * (ranks - 1) * 1001 * 4  # every value goes to R-1 others and its sum comes back


def test_an_unfinished_last_round_counts() -> None:
    plan = Plan({"weight": (3, 5)}, MethodConfig("parameters", sync_every_steps=30), 2)
    assert [plan.turns_in(0, t) for t in (30, 31, 59, 60, 61)] == [1, 2, 2, 2, 3]


EMBEDDINGS = {
    "untied": (False, None),
    "tied": (True, None),
    "projected": (False, Constraint(4)),
    "reparametrised": (False, Constraint(4, reparametrised=True)),
    "reparametrised, no dense layer": (False, Constraint(4, dense_layers=0, reparametrised=True)),
    "reparametrised, dense layers alone": (False, Constraint(4, dense_layers=5, reparametrised=True)),
}


@pytest.mark.parametrize(("tied", "constraint"), EMBEDDINGS.values(), ids=EMBEDDINGS.keys())
@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "QK-norm"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("mlp", ["relu", "gelu", "gated"])
def test_shapes_of_parameters_are_those_of_a_decoder(
    mlp: str, norm: str, qk_norm: bool, tied: bool, constraint: Constraint | None
) -> None:
    """Names and order agree too, of the whole and of every stage; tied embeddings and a subspace exclude each other."""
    shape = {"layers": 5, "kv_heads": 2, "head_dim": 8}
    config = dataclasses.replace(SMALL, mlp=mlp, norm=norm, qk_norm=qk_norm, tied=tied, **shape)
    for stages in (1,) if tied else (1, 2, 3, 5):
        for stage in range(stages):
            with torch.device("meta"):
                model = Decoder(config, constraint).cut(stage, stages)
            expected = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
            assert list(parameter_shapes(config, constraint, stage=stage, stages=stages).items()) == expected


@pytest.mark.parametrize("name", PRESETS)
def test_shapes_of_parameters_of_every_preset(name: str) -> None:
    with torch.device("meta"):
        model = Decoder(PRESETS[name])
    assert parameter_shapes(PRESETS[name]) == {n: tuple(p.shape) for n, p in model.named_parameters()}
