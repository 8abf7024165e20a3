"""The pipeline: the same model however it is cut, gradients along the route, GPipe's bubble."""

from __future__ import annotations

import copy
import json
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from lowcomm.comm.config import CommConfig
from lowcomm.comm.start import run_threads
from lowcomm.comm.world import World
from lowcomm.experiment.batches import TokenData
from lowcomm.experiment.config import RunConfig
from lowcomm.experiment.run_folder import read_metrics
from lowcomm.experiment.train import train_in_threads
from lowcomm.experiment.trainer import Trainer
from lowcomm.methods.boundary import make_boundary
from lowcomm.methods.config import BoundaryConfig
from lowcomm.methods.pipeline import Pipeline, bubble
from lowcomm.model.config import ModelConfig, stage_layers
from lowcomm.model.decoder import Block, Decoder
from lowcomm.settings import ConfigError
from tests.conftest import command_line, small_run
from tests.harness import Crash, OnlyTheLink, train_in_processes

DEEP = {"layers": 4}
#: For bf16, under which torch warns that it finds no fused kernel for the norms of queries and keys.
PLAIN = DEEP | {"qk_norm": False}


def deep_run(run: str = "diloco_m2", **override: Any) -> RunConfig:
    return small_run(run, **({"model": DEEP} | override))


def pipeline_of(stage: Decoder, world: World, **override: Any) -> Pipeline:
    """A dense pipeline in fp32 over fixed routes, of four micro-batches; or what is said instead."""
    usual = {
        "hidden": stage.hidden,
        "head_losses": stage.head_losses,
        "micro_batches": 4,
        "routing": "fixed",
        "seed": 0,
        "autocast": lambda: torch.autocast("cpu", enabled=False),
        "watch": lambda: None,
    }
    return Pipeline(make_boundary(BoundaryConfig(), stage.config, stage), world, **usual | override)


def losses_of(config: RunConfig, corpus: Path, out: Path) -> list[float]:
    """Training losses of the first replica's last stage, and the final validation loss."""
    summary = train_in_threads(config, corpus, out)
    rank = (config.stages - 1) * config.replicas
    return [r["loss"] for r in read_metrics(out / "metrics" / f"rank-{rank:03d}.jsonl")] + [summary["val_loss"]]


@pytest.mark.parametrize("run", ["diloco_m2", "data_parallel"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_one_two_and_four_stages_give_the_same_losses(
    run: str, accumulation: int, corpus: Path, tmp_path: Path
) -> None:
    """To 2e-6: the norm of the gradients, by which they are scaled, is summed stage by stage, in another order.

    Each of 12 steps then rounds weights differently in their last bit (6e-8); all else is the same arithmetic.
    """
    train = {"accumulation": accumulation}
    one, two, four = (
        losses_of(deep_run(run, stages=s, train=train), corpus, tmp_path / str(s)) for s in (1, 2, 4)
    )  # fmt: skip
    assert two == pytest.approx(one, rel=2e-6)
    assert four == pytest.approx(one, rel=2e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_clipping_stages_change_nothing_at_all(precision: str, corpus: Path, tmp_path: Path) -> None:
    """No norm, so no other order of summing: bit for bit."""
    train = {"clip_norm": 0, "accumulation": 2, "precision": precision}
    model = DEEP if precision == "fp32" else PLAIN
    one, three = (losses_of(deep_run(stages=s, train=train, model=model), corpus, tmp_path / str(s)) for s in (1, 3))
    assert one == three


def test_micro_batches_share_each_weights_cast(corpus: Path) -> None:
    """Under bf16 autocast a waiting micro-batch keeps its activations, and no copy of the weights of its own.

    (Threads share torch's cache of casts, which the first stage empties when it is done, so the last may cast twice.)
    """
    config = deep_run(replicas=1, model=PLAIN, train={"accumulation": 4, "global_batch": 8})
    data = TokenData(corpus, seq_len=config.train.seq_len, global_batch=8, seed=0)

    def work(world: World) -> int:
        stage, kept = Decoder(config.model).initialise(1).cut(world.stage, 2), {}
        shapes = {p.shape for p in stage.parameters() if p.dim() == 2}
        shapes |= {torch.Size(reversed(s)) for s in shapes}

        def save(x: torch.Tensor) -> torch.Tensor:
            if x.dtype == torch.bfloat16 and x.shape in shapes:
                kept[x.untyped_storage().data_ptr()] = x
            return x

        def hidden(x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
                return stage.hidden(x)

        pipeline = pipeline_of(stage, world, hidden=hidden, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
        pipeline.train(1, lambda replica: data.batch(1, replica, 1))
        return len(kept)

    matrices = config.model.layers // 2 * (7 if config.model.mlp == "gated" else 6)
    first, last = run_threads(work, replicas=1, stages=2)
    assert first == matrices
    assert matrices <= last <= 2 * matrices


@pytest.mark.parametrize(("replicas", "stages"), [(2, 1), (4, 1), (2, 2), (4, 4)])
def test_data_parallel_losses_do_not_depend_on_the_grid(
    replicas: int, stages: int, corpus: Path, tmp_path: Path
) -> None:
    """To 2e-6: gradients of replicas are summed in another order than those of one batch."""
    alone = train_in_threads(deep_run("data_parallel", replicas=1), corpus, tmp_path / "alone")
    grid = train_in_threads(deep_run("data_parallel", replicas=replicas, stages=stages), corpus, tmp_path / "grid")
    assert grid["val_loss"] == pytest.approx(alone["val_loss"], rel=2e-6)
    assert grid["train_loss"] == pytest.approx(alone["train_loss"], rel=2e-6)


def test_random_routing_with_one_replica_is_fixed_routing(corpus: Path, tmp_path: Path) -> None:
    found = [
        losses_of(
            deep_run(replicas=1, stages=2, method={"route": route}, train={"accumulation": 2}), corpus, tmp_path / route
        )
        for route in ("fixed", "random_step", "random_micro_batch")
    ]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("stages", [1, 2])
def test_recomputation_changes_nothing(stages: int, corpus: Path, tmp_path: Path) -> None:
    kept, again = (
        losses_of(deep_run(stages=stages, train={"recompute": r}), corpus, tmp_path / str(r)) for r in (False, True)
    )
    assert kept == again


def test_recomputation_keeps_less() -> None:
    """With recomputation, autograd saves the inputs of four blocks alone, besides those of the head."""
    config = ModelConfig(dim=64, layers=4, heads=4, ffn_dim=256, vocab_size=64, seq_len=64)
    tokens = torch.randint(0, 64, (4, 65))
    saved = {}
    for recompute in (False, True):
        model = Decoder(config).initialise(0)
        model.recompute = recompute
        seen: dict[int, int] = {}

        def keep(x: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = model.losses(tokens[:, :-1], tokens[:, 1:])[0]
        loss.backward()
        saved[recompute] = sum(seen.values()) - sum(p.numel() * 4 for p in model.parameters())
    assert saved[True] < 0.35 * saved[False]


def test_the_last_stage_keeps_nothing_of_its_head_while_it_waits(corpus: Path) -> None:
    """Tensors that autograd saved at the head are gone by the time that the next micro-batch reaches it."""
    config = deep_run(replicas=1, train={"accumulation": 4, "global_batch": 8})
    data = TokenData(corpus, seq_len=config.train.seq_len, global_batch=8, seed=0)

    class Saved:
        def __init__(self, x: torch.Tensor):
            self.x = x

    def work(world: World) -> list[int]:
        stage, alive, held = Decoder(config.model).initialise(1).cut(world.stage, 2), weakref.WeakSet(), []

        def save(x: torch.Tensor) -> Saved:
            alive.add(saved := Saved(x))
            return saved

        def head_losses(x: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            held.append(len(alive))
            with torch.autograd.graph.saved_tensors_hooks(save, lambda saved: saved.x):
                losses = stage.head_losses(x, targets)
            assert alive
            return losses

        pipeline = pipeline_of(stage, world, head_losses=head_losses)
        pipeline.train(1, lambda replica: data.batch(1, replica, 1))
        return held

    assert run_threads(work, replicas=1, stages=2) == [[], [0, 0, 0, 0]]


@pytest.mark.parametrize("route", ["fixed", "random_step", "random_micro_batch"])
def test_gradients_are_those_of_the_stages_along_the_route(route: str, corpus: Path) -> None:
    """Replicas with weights of their own: each path is a model, whose gradients autograd knows."""
    config, count = deep_run(replicas=2, train={"accumulation": 2, "global_batch": 8}), 2
    data = TokenData(corpus, seq_len=config.train.seq_len, global_batch=8, seed=0)
    models = [Decoder(config.model).initialise(seed) for seed in (1, 2)]

    def work(world: World) -> tuple[list, dict[str, torch.Tensor]]:
        stage = copy.deepcopy(models[world.replica]).cut(world.stage, 2)
        pipeline = pipeline_of(stage, world, micro_batches=count, routing=route, seed=5)
        pipeline.train(3, lambda replica: data.batch(3, replica, 2))
        return pipeline.routes(3), {n: p.grad for n, p in stage.named_parameters()}

    found = run_threads(work, replicas=2, stages=2)
    expected: list[dict[str, torch.Tensor]] = [{}, {}, {}, {}]
    for m, way in enumerate(found[0][0]):
        for first in (0, 1):
            second = way.after(0, first)
            whole = copy.deepcopy(models[first])
            for name in ("2", "3"):
                whole.blocks[name] = copy.deepcopy(models[second].blocks[name])
            whole.norm, whole.head = copy.deepcopy(models[second].norm), copy.deepcopy(models[second].head)
            part = data.batch(3, first, 2).chunk(count)[m]
            (whole.losses(part[:, :-1], part[:, 1:])[0] / count).backward()
            for name, p in whole.named_parameters():
                late = name.startswith(("blocks.2", "blocks.3", "norm", "head"))
                rank = 2 + second if late else first
                expected[rank][name] = expected[rank].get(name, 0) + p.grad
    for rank in range(4):
        assert found[rank][1].keys() == expected[rank].keys()
        for name, grad in found[rank][1].items():
            assert torch.allclose(grad, expected[rank][name], rtol=1e-5, atol=1e-7), (rank, name)


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["dense", "subspace"])
def test_values_that_are_not_finite_are_refused_at_the_boundary(kind: str, codec: str) -> None:
    """Whatever the codec: by which value it is, and in both directions."""
    shape = ModelConfig(16, 2, 4, 32, 64, 8)
    config = BoundaryConfig(kind, 4 if kind == "subspace" else 0, codec)
    boundary = make_boundary(config, shape, Decoder(shape, config.constraint(2)).initialise(0).cut(0, 2))
    ids = torch.zeros(1, 8, dtype=torch.long)
    for bad in (torch.nan, torch.inf):
        x = torch.ones(1, 8, 16)
        x[0, 3, 5] = bad
        # The value itself, or the first of its token's coordinates.
        at, values, said = (53, 128, str(bad)) if kind == "dense" else (12, 32, r"(nan|-?inf)")
        message = rf"value {at} of {values} is {said}; only finite values can be sent"
        with pytest.raises(ValueError, match=message):
            boundary.activations(x, ids)
        with pytest.raises(ValueError, match=message):
            boundary.gradients(x)


def test_a_stage_whose_activations_are_not_finite_ends_the_step(corpus: Path) -> None:
    config = deep_run(replicas=1, train={"accumulation": 4, "global_batch": 8})
    data = TokenData(corpus, seq_len=config.train.seq_len, global_batch=8, seed=0)

    def work(world: World) -> None:
        stage = Decoder(config.model).initialise(1).cut(world.stage, 2)
        pipeline_of(stage, world, hidden=lambda x: stage.hidden(x) * torch.nan).train(1, lambda r: data.batch(1, r, 1))

    with pytest.raises(ValueError, match=r"value 0 of \d+ is nan; only finite values can be sent"):
        run_threads(work, replicas=1, stages=2)


@pytest.mark.parametrize("routing", ["fixed", "random_micro_batch"])
def test_threads_and_processes_give_the_same_pipeline(routing: str, corpus: Path, tmp_path: Path) -> None:
    config = deep_run(stages=2, train={"accumulation": 2}, method={"route": routing})
    train_in_threads(config, corpus, tmp_path / "threads")
    done = train_in_processes(4, *command_line(config, corpus, tmp_path / "processes"))
    assert done.returncode == 0, done.stderr
    for name in (*(f"metrics/rank-00{r}.jsonl" for r in range(4)), "model.safetensors"):
        assert (tmp_path / "threads" / name).read_bytes() == (tmp_path / "processes" / name).read_bytes()


def test_the_saved_model_is_whole(corpus: Path, tmp_path: Path) -> None:
    """The same weights, names and order however many stages trained them (no clipping: see above)."""
    for stages in (1, 2):
        train_in_threads(deep_run(stages=stages, train={"clip_norm": 0}), corpus, tmp_path / str(stages))
    a, b = ((tmp_path / s / "model.safetensors").read_bytes() for s in ("1", "2"))
    assert a == b


@pytest.mark.parametrize("stop_at", [2, 5, 6])
def test_a_pipeline_resumes_exactly(stop_at: int, corpus: Path, tmp_path: Path) -> None:
    change = {"stages": 2, "method": {"route": "random_micro_batch"}, "train": {"accumulation": 2}}
    train_in_threads(deep_run(**change), corpus, tmp_path / "plain")
    config = deep_run(**change, checkpoint={"every_steps": 2})

    def crash(trainer: Trainer, row: dict) -> None:
        if row["step"] == stop_at + 1 and trainer.world.rank == 3:
            raise Crash

    with pytest.raises((Crash, RuntimeError)):
        train_in_threads(config, corpus, tmp_path / "run", on_row=crash)
    train_in_threads(config, corpus, tmp_path / "run")
    for name in (*(f"metrics/rank-00{r}.jsonl" for r in range(4)), "model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_bytes_between_stages_are_the_closed_form(corpus: Path, tmp_path: Path) -> None:
    config = deep_run(replicas=2, stages=3, train={"accumulation": 2}, method={"route": "random_step"})

    def work(world: World) -> tuple[dict, dict]:
        from lowcomm.experiment.train import train

        summary = train(config, world, corpus, tmp_path)
        return summary["sent_bytes"], summary["sent_bytes_closed_form"]

    t = config.train
    once = 4 * t.steps * config.local_batch * t.seq_len * config.model.dim
    for rank, (sent, closed) in enumerate(run_threads(work, replicas=2, stages=3)):
        assert {k: n for k, n in sent.items() if k in closed} == {k: n for k, n in closed.items() if n}
        assert closed["route/activations"] == (0 if rank >= 4 else once)
        assert closed["route/activation gradients"] == (0 if rank < 2 else once)


def test_bubble_formula_by_hand() -> None:
    """Two stages, one micro-batch: one of them always stands still. Four and four: 3 of 7 slots."""
    assert bubble(2, 1) == 0.5
    assert bubble(4, 4) == pytest.approx(3 / 7)
    assert bubble(1, 8) == 0


@pytest.mark.parametrize(("stages", "count"), [(2, 1), (2, 4), (4, 4)])
def test_the_bubble_is_gpipes(stages: int, count: int, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes (M + S - 1) / (M S) of what it takes in one stage, which accumulates as many micro-batches.

    This is exact, as the clock is one that blocks alone advance, by 1 s forward and 2 s backward.
    """
    config = deep_run(replicas=1, train={"accumulation": count, "global_batch": 4, "clip_norm": 0})
    data = TokenData(corpus, seq_len=config.train.seq_len, global_batch=4, seed=0)

    rank = threading.local()  # the clock of the rank that is this thread

    class Paced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            rank.clock.time += 1.0
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            rank.clock.time += 2.0
            return grad

    plain = Block.forward
    monkeypatch.setattr(Block, "forward", lambda *a: Paced.apply(plain(*a)))

    def seconds(stages: int) -> float:
        run = deep_run(replicas=1, stages=stages, train=vars(config.train))

        def work(world: World) -> float:
            world.clock = rank.clock = OnlyTheLink()
            Trainer(run, world, data).step(1)
            return world.clock.now()

        return max(run_threads(work, replicas=1, stages=stages, comm=CommConfig(clock="virtual")))

    expected = (count + stages - 1) / (count * stages)
    assert seconds(stages) / seconds(1) == pytest.approx(expected)
    assert expected == pytest.approx(1 / stages / (1 - bubble(stages, count)))


def test_layers_of_stages() -> None:
    assert [list(stage_layers(5, 2, s)) for s in range(2)] == [[0, 1], [2, 3, 4]]
    with pytest.raises(ValueError, match="2 layers cannot form 3 stages"):
        stage_layers(2, 3, 0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"stages": 5}, "4 layers cannot form stages = 5"),
        ({"stages": 2, "model": DEEP | {"tied": True}}, "model.tied must be false where stages > 1"),
        ({"method": {"route": "random_step"}}, "method.route = random_step means nothing with one stage"),
        (
            {"run": "data_parallel", "method": {"exchange": "fsdp"}, "stages": 2},
            "do not go with method.exchange = fsdp",
        ),
    ],
)
def test_pipelines_that_cannot_be_are_refused(override: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deep_run(**override)


def test_a_world_of_other_stages_is_refused(corpus: Path) -> None:
    config = deep_run(stages=2)
    with pytest.raises(ConfigError, match="run diloco_m2 has 2 stages, the world has 1"):
        run_threads(lambda w: Trainer(config, w, TokenData(corpus, seq_len=32, global_batch=4, seed=0)), replicas=2)


def test_the_metrics_of_every_stage_have_what_it_knows(corpus: Path, tmp_path: Path) -> None:
    train_in_threads(deep_run(stages=2), corpus, tmp_path)
    rows = [json.loads((tmp_path / "metrics" / f"rank-00{r}.jsonl").read_text().splitlines()[-1]) for r in range(4)]
    assert ["loss" in r for r in rows] == [False, False, True, True]
    assert len({r["val_loss"] for r in rows}) == 1
    assert rows[0]["grad_norm"] == rows[2]["grad_norm"]
