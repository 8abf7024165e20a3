"""The public API, as a stranger uses it: their model, their optimizer, their loop."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowcomm
from pipelines.launch import torchrun_command
from tests.harness import clean_environment, refused


def digest(tensors: list[Tensor]) -> str:
    """SHA-256 of tensors' bytes."""
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def llama(seed: int) -> nn.Module:
    """A small Llama with weights drawn from a seed (threads share torch's own generator)."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, vocab_size=64
    )
    model, generator = transformers.LlamaForCausalLM(config), torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data.copy_(torch.empty(p.shape).normal_(0.0, 0.1, generator=generator))
    return model


def train_llama(world: lowcomm.World, steps: int = 14) -> dict[str, Any]:
    """A Llama by Streaming DiLoCo in 4 bits with overlap; its losses, bytes and final weights."""
    model = llama(seed=world.replica)  # replicas begin unlike, but for the broadcast
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = lowcomm.StreamingDiLoCo(model, world, sync_every_steps=6, overlap_steps=1, codec="e3m0", steps=steps)
    generator, losses = torch.Generator().manual_seed(world.replica), []
    for _ in range(steps):
        ids = torch.randint(64, (2, 8), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step()
        losses.append(loss.item())
    sync.finish()
    with sync.evaluated():
        agreed = digest(list(model.parameters()))
    sent = world.ledger.total(purpose="outer")
    return {"losses": losses, "agreed": agreed, "sent": sent, "planned": sync.sent_bytes(steps)["outer"]}


def test_a_llama_trains_alike_in_threads_and_under_torchrun(tmp_path: Path) -> None:
    found = lowcomm.run_threads(train_llama, replicas=2)
    command = torchrun_command(2, "tests.test_api", str(tmp_path))
    subprocess.run(command, env=clean_environment(), check=True, timeout=240)
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == found
    first, second = found
    assert first["agreed"] == second["agreed"]
    assert first["losses"] != second["losses"]  # each has data of its own
    assert first["sent"] == first["planned"] > 0


class ConvNet(nn.Module):
    """Convolutions with batch norm, whose layers are a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        blocks = (nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3))
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean((2, 3)))


def images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noise, brighter for higher labels."""
    labels = torch.randint(10, (16,), generator=generator)
    return torch.randn(16, 1, 8, 8, generator=generator) + labels[:, None, None, None] / 3, labels


def test_a_convolutional_network_learns_by_noloco_on_four_replicas() -> None:
    def work(world: lowcomm.World) -> tuple[list[float], int, int]:
        model = ConvNet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        sync = lowcomm.NoLoCo(model, world, sync_every_steps=5, fragments="sequential", layers_per_fragment=1, steps=60)
        generator, losses = torch.Generator().manual_seed(world.replica), []
        for _ in range(60):
            x, labels = images(generator)
            loss = F.cross_entropy(model(x), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sync.step()
            losses.append(loss.item())
        sync.finish()
        sent = sum(world.ledger.total(purpose=purpose) for purpose in ("outer", "slow weights"))
        return losses, sent, sum(sync.sent_bytes(60).values())

    for losses, sent, planned in lowcomm.run_threads(work, replicas=4):
        assert sum(losses[-20:]) / 20 < 0.85 * sum(losses[:5]) / 5
        assert sent == planned


def test_data_parallel_training_wants_its_gradients_averaged() -> None:
    def work(world: lowcomm.World) -> Tensor:
        model = nn.Linear(3, 1, bias=False)
        optimizer, sync = torch.optim.SGD(model.parameters(), lr=0.1), lowcomm.DataParallel(model, world)
        for step in range(3):
            model(torch.full((1, 3), float(world.replica + step))).sum().backward()
            sync.average_gradients()
            optimizer.step()
            optimizer.zero_grad()
            sync.step()
        with pytest.raises(lowcomm.ConfigError, match=r"call average_gradients\(\) after each backward pass"):
            sync.step()
        return model.weight.detach()

    first, second = lowcomm.run_threads(work, replicas=2)
    assert torch.equal(first, second)


def test_what_is_no_model_no_ranks_or_no_method_is_refused_by_one_line() -> None:
    model, world = nn.Linear(3, 1), lowcomm.world()
    for wrong, told in {
        (model, None): "takes the ranks, as lowcomm.world.. gives them, not None",
        (world, model): "takes the ranks, .* not Linear",
        (5, world): "a model is a module, or its parameters by name, not 5",
        (model, world, "noloco"): "a method is a MethodConfig, not 'noloco'",
    }.items():
        with pytest.raises(lowcomm.ConfigError, match=told):
            lowcomm.DiLoCo(*wrong)
    with pytest.raises(lowcomm.ConfigError, match=r"method.boundary is of the pipelines of `lowcomm train`"):
        lowcomm.DiLoCo(model, world, boundary={"kind": "subspace", "rank": 2})
    sync = lowcomm.DiLoCo(model, world)
    with pytest.raises(lowcomm.ConfigError, match="no state of a method of 1 fragments: it lacks 0/agreed"):
        sync.load_state_dict({})
    state = sync.state_dict()
    for wrong, told in (
        (lowcomm.DeMo(model, world).state_dict(), "it lacks 0/momentum"),
        (lowcomm.SparseLoCo(model, world).state_dict(), "it has 0/residual"),
        (state | {"1/agreed": torch.zeros(4)}, "it has 1/agreed"),
        (state | {"0/under_way": torch.zeros(1)}, r"0/under_way has the shape \[1\], not \[4\]"),
        (state | {"0/momentum": torch.zeros(1)}, r"0/momentum has the shape \[1\], not \[4\]"),
        ({name: value for name, value in state.items() if name != "closed_after"}, "it lacks closed_after"),
    ):
        with pytest.raises(lowcomm.ConfigError, match=f"no state of a method of 1 fragments.*{told}"):
            sync.load_state_dict(wrong)
        assert all(torch.equal(value, sync.state_dict()[name]) for name, value in state.items())
    with (
        pytest.raises(lowcomm.ConfigError, match="no parameters named 'frist_replica' .* did you mean 'first_replica'"),
        sync.evaluated("frist_replica"),
    ):
        pass
    with pytest.raises(lowcomm.ConfigError, match="comm.clock = 'fast' is not a valid choice"):
        lowcomm.world(comm=lowcomm.CommConfig(clock="fast"))
    with pytest.raises(lowcomm.ConfigError, match="replicas must be a whole number"):
        lowcomm.run_threads(print, replicas=2.5)


def test_muon_trains_inside_diloco() -> None:
    torch.manual_seed(0)
    begun = nn.Sequential(nn.Linear(8, 32, bias=False), nn.Tanh(), nn.Linear(32, 1, bias=False))

    def work(world: lowcomm.World) -> tuple[float, float, str]:
        model = copy.deepcopy(begun)
        optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
        sync = lowcomm.DiLoCo(model, world, sync_every_steps=5, outer_lr=0.5, outer_momentum=0.3)
        generator, losses = torch.Generator().manual_seed(world.replica), []
        for _ in range(40):
            x = torch.randn(32, 8, generator=generator)
            loss = F.mse_loss(model(x), x.sum(1, keepdim=True) / 3)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sync.step()
            losses.append(loss.item())
        sync.finish()
        return losses[0], losses[-1], digest(list(model.parameters()))

    first, second = lowcomm.run_threads(work, replicas=2)
    assert first[1] < 0.3 * first[0]
    assert first[2] == second[2]


def linear_steps(model: nn.Module, optimizer: torch.optim.Optimizer, sync: lowcomm.LocalUpdates, steps: range) -> None:
    """Steps of a regression whose data are a function of step and replica."""
    for step in steps:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + sync.world.replica))
        F.mse_loss(model(x), x[:, :1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step()


def test_a_killed_loop_resumes_with_a_transfer_in_flight_bit_for_bit() -> None:
    def begin(world: lowcomm.World) -> tuple[nn.Module, torch.optim.Optimizer, lowcomm.LocalUpdates]:
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        settings = {"sync_every_steps": 6, "overlap_steps": 3, "mixing": 0.5, "codec": "e3m0", "layers_per_fragment": 1}
        sync = lowcomm.StreamingDiLoCo(model, world, **settings)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01), sync

    def uninterrupted(world: lowcomm.World) -> tuple[str, dict[str, Any]]:
        model, optimizer, sync = begin(world)
        linear_steps(model, optimizer, sync, range(7))
        assert any(f.under_way is not None for f in sync.fragments)  # sent after step 6, due after step 9
        saved = {"model": model.state_dict(), "inner": optimizer.state_dict(), "sync": sync.state_dict()}
        saved = torch.load(_through_bytes(saved), weights_only=True)
        linear_steps(model, optimizer, sync, range(7, 20))
        sync.finish()
        return digest(list(model.parameters())), saved

    def resumed(world: lowcomm.World) -> list[str]:
        model, optimizer, sync = begin(world)
        state, ends = found[world.replica][1], []
        for _ in range(2):  # the state that was loaded is the caller's, and can be loaded again
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(copy.deepcopy(state["inner"]))
            sync.load_state_dict(state["sync"])
            linear_steps(model, optimizer, sync, range(7, 20))
            sync.finish()
            ends.append(digest(list(model.parameters())))
        return ends

    found = lowcomm.run_threads(uninterrupted, replicas=2)
    assert lowcomm.run_threads(resumed, replicas=2) == [[weights] * 2 for weights, _ in found]


def test_what_was_frozen_for_a_while_is_trained_by_whoever_comes_next() -> None:
    def work(world: lowcomm.World) -> list[bool]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        settings = {"trainable": "next_fragment", "fragments": "sequential", "layers_per_fragment": 1}
        sync = lowcomm.LocalUpdates(model, world, sync_every_steps=4, **settings)
        frozen = [p.requires_grad for p in model.parameters()]
        sync.finish()
        return frozen + [p.requires_grad for p in model.parameters()]

    assert lowcomm.run_threads(work, replicas=1) == [[True, True, False, False] + [True] * 4]


def _through_bytes(saved: dict[str, Any]) -> Any:
    import io

    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return file


def test_replicas_begin_with_the_weights_and_buffers_of_the_first() -> None:
    def work(world: lowcomm.World) -> tuple[str, str]:
        model = ConvNet()
        with torch.no_grad():
            model.layers[0][1].running_mean.fill_(world.replica)
        before = digest([*model.parameters(), *model.buffers()])
        lowcomm.DiLoCo(model, world)
        return before, digest([*model.parameters(), *model.buffers()])

    (own, first), (other, second) = lowcomm.run_threads(work, replicas=2)
    assert own == first != other
    assert second == first


def test_what_wants_no_gradient_is_neither_sent_nor_billed() -> None:
    def work(world: lowcomm.World) -> int:
        model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 2))
        model[0].requires_grad_(False)
        sync = lowcomm.DiLoCo(model, world, sync_every_steps=1, broadcast=False)
        sync.step()
        return world.ledger.total(axis="replica")

    assert lowcomm.run_threads(work, replicas=2) == [22 * 4, 22 * 4]


def test_slices_of_any_mlp_by_pattern() -> None:
    sliced = ["*.up.weight:0", "*.down.weight:1"]

    def work(world: lowcomm.World) -> tuple[dict[str, tuple[int, ...]], str]:
        model = nn.Module()
        model.up, model.down = nn.Linear(6, 8), nn.Linear(8, 6)
        model = nn.ModuleDict({"mlp": model})
        trained = lowcomm.slice_parameters(model, world.replica, sliced, 2)
        optimizer = torch.optim.AdamW(trained.values(), lr=0.01)
        sync = lowcomm.LocalUpdates(
            model, world, sync_every_steps=4, trainable="slice", sliced=sliced, slices=2, broadcast=True
        )
        for step in range(8):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + world.replica))
            F.mse_loss(model["mlp"].down(F.relu(model["mlp"].up(x))), x).backward()
            optimizer.step()
            optimizer.zero_grad()
            sync.step()
        return {n: tuple(p.shape) for n, p in trained.items()}, digest(list(model.parameters()))

    torch.manual_seed(0)
    (shapes, first), (_, second) = lowcomm.run_threads(work, replicas=2)
    assert shapes["mlp.up.weight"] == (4, 6)
    assert shapes["mlp.down.weight"] == (4, 6)  # stored transposed
    assert shapes["mlp.up.bias"] == (8,)
    assert first == second


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sync_every": 30}, "no setting of a method is named 'sync_every'; did you mean 'sync_every_steps'"),
        ({"codec": "e3mo"}, "method.codec = 'e3mo' is not a valid choice; did you mean 'e3m4'"),
        ({"outer": "adam"}, "method.outer = 'adam' is not a valid choice"),
        ({"fragments": "stridded"}, "method.fragments = 'stridded' is not a valid choice; did you mean 'strided'"),
        ({"trainable": "next_fragments"}, "method.trainable = 'next_fragments' is not a valid choice"),
        ({"boundary": {"mode": "reparametrized"}}, "method.boundary.mode = 'reparametrized' is not a valid choice"),
        ({"overlap_steps": 1.5}, "method.overlap_steps = 1.5 must be a list"),
        ({"sync_every_steps": "often"}, "method.sync_every_steps = 'often' must be a number"),
        ({"method": lowcomm.MethodConfig("parameters", fragments="stridded")}, "method.fragments = 'stridded' is not"),
        ({"outer_momentum": 1.0}, "method.outer_momentum must be below 1, got 1.0"),
        ({"peers": "group", "outer": "noloco", "outer_pull": 9.0}, r"outer_pull \(gamma\) = 9.0 must be below"),
        ({"overlap_steps": 30}, "method.overlap_steps = 30 must be at least 0 and below sync_every_steps = 30"),
        ({"fragments": "strided"}, "no parameter's name has a number"),
        ({"fragments": "patterns", "fragment_patterns": ["x.*"]}, "fragment 'x.*' holds no parameter"),
        ({"sync_every_steps": 1, "fragments": "patterns", "fragment_patterns": ["w*"]}, "too short for 2 fragments"),
        ({"outer_pull": 0.5}, "method.outer_pull means nothing with method.outer = nesterov"),
        ({"route": "random_step"}, "method.route is for the passes of `lowcomm train`"),
        ({"input_gradients": "own"}, "method.input_gradients is for the passes of `lowcomm train`"),
        ({"seed": -1}, "seed must be a whole number from 0 on, got -1"),
        ({"seed": 0.5}, "seed must be a whole number from 0 on, got 0.5"),
        ({"seed": True}, "seed must be a whole number from 0 on, got True"),
        ({"steps": 0}, "steps must be a whole number from 1 on, got 0"),
    ],
)
def test_clashing_choices_are_refused_at_once(settings: dict[str, Any], message: str) -> None:
    def work(world: lowcomm.World) -> None:
        named = {"weight": torch.zeros(3, 3, requires_grad=True), "bias": torch.zeros(3, requires_grad=True)}
        lowcomm.LocalUpdates(named, world, **settings)

    with pytest.raises(lowcomm.ConfigError, match=message):
        lowcomm.run_threads(work, replicas=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_values_that_fp32_does_not_hold_are_refused(dtype: torch.dtype) -> None:
    named = {"weight": torch.zeros(3, dtype=dtype, requires_grad=True)}
    for engine in (lowcomm.DiLoCo, lowcomm.DataParallel):
        told = f"parameter weight is of {str(dtype).removeprefix('torch.')}; exchanged are float32, bfloat16, float16"
        assert told in refused(engine, named, lowcomm.world())


def test_a_fragment_of_no_values_is_refused_by_its_name() -> None:
    named = {"a.w": torch.zeros(0, requires_grad=True), "b.w": torch.zeros(2, requires_grad=True)}
    settings = {"fragments": "patterns", "fragment_patterns": ["a.*"], "sync_every_steps": 4}
    with pytest.raises(lowcomm.ConfigError, match=r"fragment 0 has nothing to exchange: it has a\.w, of no values"):
        lowcomm.LocalUpdates(named, lowcomm.world(), **settings)


@pytest.mark.parametrize(("grid", "told"), [({"replicas": 0}, "replicas"), ({"replicas": 2, "stages": -1}, "stages")])
def test_a_grid_without_ranks_is_refused(grid: dict[str, int], told: str) -> None:
    with pytest.raises(lowcomm.ConfigError, match=f"{told} must be at least 1, got"):
        lowcomm.run_threads(lambda world: None, **grid)
    with pytest.raises(lowcomm.ConfigError, match=f"{told} must be at least 1, got"):
        lowcomm.world(**grid)


@pytest.mark.parametrize("mixing", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_progress_below_the_precision_of_parameters_is_kept(dtype: torch.dtype, mixing: float) -> None:
    """One of four replicas moves by one unit in the last place of bf16 in each of 16 rounds: all of them by a quarter.

    With mixing too, where replicas begin a round at a mixture that bf16 cannot hold.
    """
    unit, rounds = 2.0**-8, 16  # of numbers from 1/2 to 1

    def work(world: lowcomm.World) -> float:
        named = {"weight": torch.full((1,), 0.75, dtype=dtype, requires_grad=True)}
        told = {"outer": "heavy_ball", "outer_lr": 1.0, "outer_momentum": 0.0, "sync_every_steps": 1}
        sync = lowcomm.LocalUpdates(named, world, mixing=mixing, **told)
        for _ in range(rounds):
            if world.replica == 0:
                with torch.no_grad():
                    named["weight"].sub_(unit)
            sync.step()
        return (0.75 - sync.fragments[0].agreed.item()) / unit

    assert lowcomm.run_threads(work, replicas=4) == [rounds / 4] * 4


def test_an_engine_that_derives_from_local_updates_is_made_as_itself() -> None:
    class Counting(lowcomm.LocalUpdates):
        taken = 0

        def step(self, tokens: int = 1) -> dict[str, float]:
            self.taken += 1
            return super().step(tokens)

    method = lowcomm.MethodConfig("parameters", sync_every_steps=2)
    engine = Counting.of(nn.Linear(3, 1), lowcomm.world(), method)
    engine.step()
    assert engine.taken == 1


def test_a_second_finish_exchanges_nothing() -> None:
    def work(world: lowcomm.World) -> list[str]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        sync, found = lowcomm.DiLoCo(model, world, sync_every_steps=30), []
        for step in range(40):
            with torch.no_grad():
                model.weight.add_(0.01 * (1 + world.replica) * (step + 1))
            sync.step()
        for _ in range(2):
            sync.finish()
            found.append(digest([*model.parameters(), *sync.state_dict().values()]))
        again = lowcomm.DiLoCo(model, world, sync_every_steps=30, broadcast=False)
        again.load_state_dict(sync.state_dict())
        again.finish()
        return [*found, digest([*model.parameters(), *again.state_dict().values()])]

    for found in lowcomm.run_threads(work, replicas=2):
        assert len(set(found)) == 1


def test_alone_it_is_plain_training() -> None:
    world = lowcomm.world()
    assert (world.replicas, world.stages) == (1, 1)
    found = []
    for is_synced in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        sync = lowcomm.FederatedAveraging(model, world, sync_every_steps=2) if is_synced else None
        for _ in range(5):
            model(torch.ones(3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if sync is not None:
                sync.step()
        if sync is not None:
            sync.finish()
        found.append(digest(list(model.parameters())))
    assert found[0] == found[1]
    assert world.ledger.total() == 0


def test_the_readme_shows_a_loop_that_runs() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    code = readme.split("```python\n")[1].split("```")[0]
    generator, evaluated = torch.Generator().manual_seed(0), []
    model = llama(seed=0)
    ids = [torch.randint(64, (2, 8), generator=generator) for _ in range(35)]
    loader = [{"input_ids": x, "labels": x} for x in ids]
    optimizer = torch.optim.AdamW(model.parameters())
    exec(code, {"model": model, "loader": loader, "optimizer": optimizer, "evaluate": evaluated.append})
    assert evaluated == [model]


def test_public_names_are_those_that_are_announced() -> None:
    assert sorted(lowcomm._PUBLIC) == sorted(lowcomm.__all__)
    for name in lowcomm.__all__:
        assert getattr(lowcomm, name).__doc__


if __name__ == "__main__":
    ranks = lowcomm.world()
    (Path(sys.argv[1]) / f"{ranks.rank}.json").write_text(json.dumps(train_llama(ranks)))
    ranks.close()


@pytest.mark.parametrize(
    ("mine", "told"),
    [
        ({"outer_lr": 0.3}, "method.outer_lr is 0.7 on rank 0 and 0.3 on rank 1"),
        ({"sync_every_steps": 4}, "method.sync_every_steps is 30 on rank 0 and 4 on rank 1"),
        ({"seed": 3}, "seed is 0 on rank 0 and 3 on rank 1"),
        ({"width": 5}, r"parameter weight is \[\[2, 3\], 'torch.float32'\] on rank 0 and \[\[5, 3\], .* on rank 1"),
    ],
)
def test_replicas_that_begin_with_different_choices_are_told(mine: dict[str, Any], told: str) -> None:
    def work(world: lowcomm.World) -> str:
        choices = dict(mine) if world.rank == 1 else {}
        model = nn.Linear(3, choices.pop("width", 2))
        return refused(lambda: lowcomm.DiLoCo(model, world, **choices))

    first, second = lowcomm.run_threads(work, replicas=2)
    assert first == second
    assert re.match(f"ranks were started differently: {told}", first)
