"""Streaming DiLoCo: fragments, turns, overlap, mixing."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lowcomm
from lowcomm.comm.start import run_threads
from lowcomm.comm.transport import CommError
from lowcomm.comm.world import World
from lowcomm.experiment.run_folder import read_metrics
from lowcomm.experiment.train import train, train_in_threads
from lowcomm.experiment.trainer import Trainer
from lowcomm.methods.config import MethodConfig
from lowcomm.methods.outer_state import flatten
from lowcomm.methods.plan import Plan
from lowcomm.methods.streaming import Schedule, layer_fragments, layer_of
from lowcomm.model.accounting import parameter_shapes
from lowcomm.model.config import stage_layers
from lowcomm.model.decoder import Decoder
from lowcomm.settings import ConfigError
from tests.conftest import command_line, small_run
from tests.harness import Crash, train_in_processes


@pytest.mark.parametrize("pattern", ["sequential", "strided"])
@pytest.mark.parametrize(("layers", "size"), [(1, 1), (4, 1), (4, 2), (7, 3), (24, 3), (108, 3), (5, 9)])
def test_fragments_are_disjoint_and_cover_the_layers(pattern: str, layers: int, size: int) -> None:
    fragments = layer_fragments(layers, size, pattern)
    assert sorted(itertools.chain(*fragments)) == list(range(layers))
    assert len(fragments) == -(-layers // size)
    assert max(map(len, fragments)) <= size
    assert min(map(len, fragments)) >= 1


def test_patterns_are_those_of_figure_2() -> None:
    assert layer_fragments(6, 2, "sequential") == ((0, 1), (2, 3), (4, 5))
    assert layer_fragments(6, 2, "strided") == ((0, 3), (1, 4), (2, 5))


def _method(fragments: str, size: int = 3, **settings: Any) -> MethodConfig:
    layered = {"layers_per_fragment": size} if fragments in ("strided", "sequential") else {}
    sliced = {"trainable": "slice", "slices": 4, "sliced": ("mlp",)} if fragments == "slices" else {}
    return MethodConfig("parameters", sync_every_steps=20, fragments=fragments, **layered, **sliced, **settings)


def _names(plan: Plan) -> list[list[str]]:
    """The parameters of each fragment, in their order."""
    return [[piece.parameter for piece in fragment.pieces] for fragment in plan.fragments]


@pytest.mark.parametrize("fragments", ["whole", "slices", "strided", "sequential"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_fragments_are_as_many_as_they_are_counted(fragments: str, size: int) -> None:
    """They are counted of a whole model, and of its first, middle and last stage."""
    config = dataclasses.replace(small_run("diloco_m2").model, layers=5)
    for stages in (1, 3):
        for stage in range(stages):
            model = Decoder(config).cut(stage, stages)
            layers = len(stage_layers(5, stages, stage))
            shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
            found = Plan(shapes, _method(fragments, size), 4, layers=5).fragments
            rest = stage in (0, stages - 1)
            expected = {"whole": 1, "slices": 4 + 1}.get(fragments, -(-layers // size) + rest)
            assert len(found) == expected
            assert sum(f.numel for f in found) == sum(p.numel() for p in model.parameters())
            assert all(f.numel == sum(numel for numel, _ in f.sections) for f in found)


@pytest.mark.parametrize(
    ("method", "stages"),
    [
        ({"fragments": "strided", "layers_per_fragment": 1}, 1),
        ({"fragments": "strided", "layers_per_fragment": 1}, 2),
        ({"fragments": "whole"}, 1),
        ({"fragments": "slices", "trainable": "slice", "slices": 2, "sliced": ["mlp"]}, 1),
    ],
)
@pytest.mark.parametrize("close", [False, True])
def test_turns_of_a_run_are_those_of_the_engine_and_at_its_end_where_the_last_round_is_closed(
    method: dict[str, Any], stages: int, close: bool, corpus: Path, tmp_path: Path
) -> None:
    method = {"sync_every_steps": 7, "close_last_round": close} | method
    config = small_run("diloco_m2", train={"steps": 20}, method=method, stages=stages)
    last: dict[int, dict[int, int]] = {stage: {} for stage in range(stages)}
    had: dict[tuple[int, int], int] = {}

    def keep(trainer: Trainer, row: dict) -> None:
        stage = trainer.world.stage
        if trainer.world.replica == 0:
            for index, fragment in enumerate(trainer.engine.fragments):
                if fragment.turns > had.get((stage, index), 0):
                    had[stage, index], last[stage][index] = fragment.turns, row["step"]

    train_in_threads(config, corpus, tmp_path, on_row=keep)
    for stage, of_engine in last.items():
        plan = config.plan(stage)
        assert [plan.turns_in(i, 20) for i in range(len(plan.fragments))] == [had[stage, i] for i in of_engine]
        assert set(of_engine.values()) == {20} or not close


def test_turns_are_those_that_the_paper_names() -> None:
    two = Schedule(2, 100)
    assert [t for t in range(1, 351) if two.turns(t)] == [100, 150, 200, 250, 300, 350]
    assert [two.turns(t) for t in (50, 100, 150, 200)] == [[], [0], [1], [0]]
    for layers, every in ((24, 11), (48, 5), (108, 2)):  # and the embedding
        schedule = Schedule(len(layer_fragments(layers, 3, "strided")) + 1, 100)
        assert schedule.offset(1) == every
        for p in range(schedule.fragments):
            assert [t for t in range(1, 400) if p in schedule.turns(t)] == [
                schedule.offset(p) + h for h in (100, 200, 300) if schedule.offset(p) + h < 400
            ]


def test_a_setting_of_another_kind_is_refused_after_its_equal_was_accepted() -> None:
    """True equals 1 and hashes alike, so that a method must not be known by equality."""
    shapes = {"w": (2, 2)}
    Plan(shapes, MethodConfig("parameters", sync_every_steps=1), 2)
    with pytest.raises(ConfigError, match="method.sync_every_steps = True must be a number"):
        Plan(shapes, MethodConfig("parameters", sync_every_steps=True), 2)


def test_more_fragments_than_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="5 fragments cannot take turns in rounds of 4 steps"):
        Schedule(5, 4)


@pytest.mark.parametrize("pattern", ["whole", "sequential", "strided"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_parameter_fragments_are_disjoint_and_cover_the_model(pattern: str, size: int) -> None:
    config = small_run(model={"layers": 5}).model
    names = [n for n, _ in Decoder(config).named_parameters()]
    fragments = _names(Plan(parameter_shapes(config), _method(pattern, size), 2))
    assert sorted(itertools.chain(*fragments)) == sorted(names)
    if pattern != "whole":
        assert fragments[-1] == ["embedding.weight", "norm.weight", "head.weight"]
        assert len(fragments) == -(-5 // size) + 1
        for layers, found in zip(layer_fragments(5, size, pattern), fragments, strict=False):
            assert found == [n for n in names if n.startswith(tuple(f"blocks.{i}." for i in layers))]


# Models of others, by the names of their parameters


def _llama(layers: int, first: int = 0) -> dict[str, tuple[int, ...]]:
    """Names and shapes as of Hugging Face's Llama; layers from `first` on."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (50, 8)}
    for i in range(first, first + layers):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{m}_proj.weight": (8, 8) for m in "qkvo"}
        shapes |= {f"{layer}.mlp.{m}_proj.weight": (16, 8) for m in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (8, 16), f"{layer}.input_layernorm.weight": (8,)}
    return shapes | {"model.norm.weight": (8,), "lm_head.weight": (50, 8)}


def _gpt2(layers: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (50, 8), "transformer.wpe.weight": (16, 8)}
    for i in range(layers):
        layer = f"transformer.h.{i}"
        shapes |= {f"{layer}.ln_1.weight": (8,), f"{layer}.ln_1.bias": (8,)}
        shapes |= {f"{layer}.attn.c_attn.weight": (8, 24), f"{layer}.attn.c_attn.bias": (24,)}
        shapes |= {f"{layer}.mlp.c_fc.weight": (8, 32), f"{layer}.mlp.c_proj.weight": (32, 8)}
    return shapes | {"transformer.ln_f.weight": (8,)}


def _experts(layers: int) -> dict[str, tuple[int, ...]]:
    """Numbers within layers, and a smaller numbered container before them."""
    stem = {f"stem.{i}.weight": (8, 8) for i in range(3)}
    names = itertools.product(range(layers), range(4))
    return stem | {f"model.layers.{i}.mlp.experts.{e}.weight": (16, 8) for i, e in names}


def _sequential(layers: int) -> dict[str, tuple[int, ...]]:
    return {f"{2 * i}.{what}": shape for i in range(layers) for what, shape in (("weight", (8, 8)), ("bias", (8,)))}


FOREIGN = {
    "llama": (_llama(12), "model.layers.{}.", range(12)),
    "llama, layers 4 to 8": (_llama(5, first=4), "model.layers.{}.", range(4, 9)),
    "gpt2": (_gpt2(11), "transformer.h.{}.", range(11)),
    "experts": (_experts(6), "model.layers.{}.", range(6)),
    "nn.Sequential": (_sequential(4), "{}.", range(0, 8, 2)),
}


@pytest.mark.parametrize(("shapes", "prefix", "numbers"), FOREIGN.values(), ids=FOREIGN.keys())
@pytest.mark.parametrize("pattern", ["sequential", "strided"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_layers_of_any_model_are_found_by_name(
    shapes: dict[str, tuple[int, ...]], prefix: str, numbers: range, pattern: str, size: int
) -> None:
    """Numbered containers, the largest of them; what is in none comes last, and everything once."""
    layers = {n: i for i in numbers for n in shapes if n.startswith(prefix.format(i))}
    assert layer_of(shapes) == layers
    plan = Plan(shapes, _method(pattern, size), 2)
    expected = [
        [n for n in shapes if n in layers and numbers.index(layers[n]) in group]
        for group in layer_fragments(len(numbers), size, pattern)
    ]
    rest = [n for n in shapes if n not in layers]
    assert _names(plan) == expected + [rest] * bool(rest)
    for fragment, names in zip(plan.fragments, _names(plan), strict=True):
        assert fragment.numel == sum(math.prod(shapes[n]) for n in names)
        assert [piece.shape for piece in fragment.pieces] == [shapes[n] for n in names]
        assert [list(owners) for _, owners in fragment.sections] == [[0, 1]]
    schedule = Schedule(len(plan.fragments), 20)
    assert [plan.turns(t) for t in range(1, 60)] == [schedule.turns(t) for t in range(1, 60)]


@pytest.mark.parametrize("shapes", [_llama(4), _gpt2(3)], ids=["llama", "gpt2"])
def test_a_whole_model_of_others_is_one_fragment(shapes: dict[str, tuple[int, ...]]) -> None:
    assert _names(Plan(shapes, _method("whole"), 2)) == [list(shapes)]


def test_fragments_by_patterns_of_names() -> None:
    """A parameter is of the first pattern that it matches; what matches none comes last, if there is any."""
    shapes = _llama(3)

    def names(*patterns: str) -> list[list[str]]:
        return _names(Plan(shapes, _method("patterns", fragment_patterns=patterns), 2))

    attention = [n for n in shapes if ".self_attn." in n]
    mlp = [n for n in shapes if ".mlp." in n]
    others = [n for n in shapes if n not in attention + mlp]
    assert names("*.self_attn.*", "*.mlp.*") == [attention, mlp, others]
    assert names("*.mlp.*", "*.layers.*", "*") == [
        mlp,
        [n for n in shapes if ".layers." in n and n not in mlp],
        ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"],
    ]
    assert names("*") == [list(shapes)]
    head = ["lm_head.weight"]
    assert names("lm_head.*") == [head, [n for n in shapes if n not in head]]
    assert names("model.layers.[02].*")[0] == [
        n for n in shapes if n.startswith(("model.layers.0.", "model.layers.2."))
    ]
    one_model = Plan(parameter_shapes(small_run().model), _method("patterns", fragment_patterns=("blocks.*",)), 2)
    assert _names(one_model)[1] == ["embedding.weight", "norm.weight", "head.weight"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fragments": "strided"}, "method.fragments = strided needs layers in a numbered container .* no parameter's"),
        (
            {"fragments": "patterns"},
            "method.fragments = patterns needs method.fragment_patterns: one for each fragment",
        ),
        ({"fragments": "patterns", "fragment_patterns": ("*", "b*")}, r"fragment 'b\*' holds no parameter"),
        ({"fragment_patterns": ("*",)}, "method.fragment_patterns means nothing with method.fragments = whole"),
        (
            {"fragments": "patterns", "fragment_patterns": ("*",), "layers_per_fragment": 1},
            "method.layers_per_fragment means nothing with method.fragments = patterns",
        ),
        (
            {"fragments": "patterns", "fragment_patterns": ("w*",), "sync_every_steps": 1},
            "method.sync_every_steps = 1 is too short for 2 fragments",
        ),
    ],
)
def test_fragments_that_names_do_not_give_are_refused(settings: dict[str, Any], message: str) -> None:
    method = MethodConfig("parameters", **{"sync_every_steps": 20} | settings)
    with pytest.raises(ConfigError, match=message):
        Plan({"weight": (3, 4), "bias": (3,)}, method, 2)


@pytest.mark.parametrize(("fragments", "h", "steps"), [(1, 4, 12), (1, 5, 12), (3, 4, 12), (3, 5, 23), (4, 4, 3)])
def test_turns_are_counted(fragments: int, h: int, steps: int) -> None:
    schedule = Schedule(fragments, h)
    for p in range(fragments):
        assert schedule.turns_of(p, steps) == sum(p in schedule.turns(t) for t in range(1, steps + 1))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_balanced_fragments_hold_all_and_about_as_much(count: int) -> None:
    shapes = {f"layers.{i}.{n}": s for i in range(4) for n, s in (("a", (64, 64)), ("b", (64, 168)), ("n", (64,)))}
    shapes["head"] = (64, 512)
    method = MethodConfig(
        "parameters", outer="nesterov", fragments="balanced", fragment_count=count, sync_every_steps=9
    )
    plan = Plan(shapes, method, 2)
    names = [piece.parameter for fragment in plan.fragments for piece in fragment.pieces]
    assert sorted(names) == sorted(shapes)
    total = sum(fragment.numel for fragment in plan.fragments)
    largest = max(fragment.numel for fragment in plan.fragments)
    assert largest <= 4 / 3 * max(total / count, 64 * 512)
    with pytest.raises(ConfigError, match="method.fragment_count = 99 is more than the 13 parts of parameters"):
        Plan(shapes, dataclasses.replace(method, fragment_count=99, sync_every_steps=99), 2)
    with pytest.raises(ConfigError, match="method.fragment_count means nothing with method.fragments = whole"):
        Plan(shapes, dataclasses.replace(method, fragments="whole", fragment_count=2), 2)


# Training

STREAMING = {"fragments": "strided", "layers_per_fragment": 1, "sync_every_steps": 5, "close_last_round": False}
FULL = STREAMING | {"overlap_steps": [2], "mixing": 0.5, "codec": "e3m0"}


def _losses(out: Path, rank: int = 0) -> list[float]:
    return [r["loss"] for r in read_metrics(out / "metrics" / f"rank-{rank:03d}.jsonl")]


def _weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def test_fragments_of_one_round_closed_together_are_diloco_bit_for_bit(corpus: Path, tmp_path: Path) -> None:
    """Up to the end of the first round no fragment has been exchanged; if all are exchanged there, it is DiLoCo."""
    short = {"steps": 6}
    divided = {"sync_every_steps": 6, "fragments": "sequential", "layers_per_fragment": 1}
    train_in_threads(small_run("diloco_m2", train=short, method={"sync_every_steps": 6}), corpus, tmp_path / "diloco")
    train_in_threads(small_run("diloco_m2", train=short, method=divided), corpus, tmp_path / "divided")
    assert _losses(tmp_path / "diloco") == _losses(tmp_path / "divided")
    ours, theirs = _weights(tmp_path / "divided"), _weights(tmp_path / "diloco")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_a_fragment_is_equal_on_all_replicas_from_its_turn_and_only_that(corpus: Path, tmp_path: Path) -> None:
    config = small_run("diloco_m2", method=STREAMING)  # two layers and the embedding: turns at 5, 6, 7, 10, ...
    seen: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def keep(trainer: Trainer, row: dict) -> None:
        seen[trainer.world.rank, row["step"]] = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}

    train_in_threads(config, corpus, tmp_path, on_row=keep)
    for step in range(1, 13):
        same = {n for n in seen[0, step] if torch.equal(seen[0, step][n], seen[1, step][n])}
        turn = {5: "blocks.0.", 6: "blocks.1.", 7: "embedding", 10: "blocks.0.", 11: "blocks.1.", 12: "embedding"}
        expected = {n for n in seen[0, step] if step in turn and n.startswith(turn[step])}
        if step in (7, 12):
            expected |= {"norm.weight", "head.weight"}
        assert same == expected


@pytest.mark.parametrize(("tau", "alpha"), [(0, 0.0), (2, 0.0), (2, 0.25), (0, 0.5)])
def test_overlap_and_mixing_by_definition(tau: int, alpha: float, corpus: Path, tmp_path: Path) -> None:
    """theta(t) <- alpha theta(t) + (1 - alpha) phi', phi' = phi - lr (Delta + mu b'), Delta taken tau steps before."""
    h = 5
    method = {"sync_every_steps": h, "overlap_steps": [tau], "mixing": alpha, "close_last_round": False}
    before: dict[tuple[int, int], torch.Tensor] = {}
    after: dict[tuple[int, int], torch.Tensor] = {}
    outer: dict[int, torch.Tensor] = {}

    def flat(trainer: Trainer) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()])

    inner = Trainer.step

    def step(self: Trainer, number: int) -> dict[str, Any]:
        engine, key = self.engine, (self.world.rank, number)
        exchanges = {"step": engine.step, "finish": engine.finish}  # the second after the last step alone

        def spy(name: str, *tokens: int) -> dict[str, float]:
            before.setdefault(key, flat(self))
            logged = exchanges[name](*tokens)
            after[key] = flat(self)
            outer[number] = engine.fragments[0].agreed.clone()
            return logged

        for name in exchanges:
            setattr(engine, name, functools.partial(spy, name))
        try:
            return inner(self, number)
        finally:
            for name, plain in exchanges.items():
                setattr(engine, name, plain)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        config = small_run("diloco_m2", method=method)
        train_in_threads(config, corpus, tmp_path)
    m = config.method
    phi = Decoder(config.model).initialise(config.seed)
    phi = torch.cat([p.detach().reshape(-1) for p in phi.parameters()])
    momentum = torch.zeros_like(phi)
    for turn in (5, 10):
        delta = phi - (before[0, turn] + before[1, turn]) / 2
        momentum = m.outer_momentum * momentum + delta
        phi = phi - m.outer_lr * (delta + m.outer_momentum * momentum)
        assert torch.allclose(outer[turn + tau], phi, rtol=0, atol=1e-5)
        for rank in (0, 1):
            mixed = alpha * before[rank, turn + tau] + (1 - alpha) * phi
            assert torch.allclose(after[rank, turn + tau], mixed, rtol=0, atol=1e-5)
        phi = outer[turn + tau]
    assert all(
        torch.equal(before[r, n], after[r, n]) for r in (0, 1) for n in range(1, 13) if n not in (5 + tau, 10 + tau)
    )


def test_each_replica_applies_after_the_steps_of_its_own_overlap() -> None:
    """Two replicas that overlap 1 and 3 steps (Streaming DiLoCo, Figure 10): what is sent at 5 is due at 6 and 8."""

    def work(world: lowcomm.World) -> list[int]:
        model = torch.nn.Linear(2, 1)
        settings = {"sync_every_steps": 5, "overlap_steps": (1, 3), "steps": 10}
        sync, changed = lowcomm.DiLoCo(model, world, **settings), []
        for step in range(1, 10):
            with torch.no_grad():
                model.weight.add_(world.replica + 1)
            before = model.weight.clone()
            sync.step()
            changed += [step] * (not torch.equal(before, model.weight))
        return changed

    assert lowcomm.run_threads(work, replicas=2) == [[6], [8]]


def test_mixing_close_to_one_leaves_replicas_almost_alone(corpus: Path, tmp_path: Path) -> None:
    alone = small_run("diloco_m2", method={"sync_every_steps": 5, "mixing": 0.999999})
    together = small_run("diloco_m2", method={"sync_every_steps": 5})
    never = small_run("diloco_m2", method={"sync_every_steps": 12})
    for name, config in (("alone", alone), ("together", together), ("never", never)):
        train_in_threads(config, corpus, tmp_path / name)
    assert _losses(tmp_path / "alone") == pytest.approx(_losses(tmp_path / "never"), abs=1e-4)
    assert _losses(tmp_path / "together") != pytest.approx(_losses(tmp_path / "never"), abs=1e-4)


@pytest.mark.parametrize(
    "method", [FULL, STREAMING | {"overlap_steps": [1, 3]}, STREAMING | {"codec": "dare", "codec_keep": 0.5}]
)
def test_threads_and_processes_stream_alike(method: dict, corpus: Path, tmp_path: Path) -> None:
    config = small_run("diloco_m2", method=method)
    train_in_threads(config, corpus, tmp_path / "threads")
    done = train_in_processes(2, *command_line(config, corpus, tmp_path / "processes"))
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert _losses(tmp_path / "threads", rank) == _losses(tmp_path / "processes", rank)
    ours, theirs = _weights(tmp_path / "threads"), _weights(tmp_path / "processes")
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_frozen_fragments_rest_until_they_are_next(corpus: Path, tmp_path: Path) -> None:
    """FedPart: what is not exchanged next keeps its values, has no gradient and no step of the inner optimizer."""
    method = STREAMING | {"trainable": "next_fragment", "overlap_steps": [0], "mixing": 0.0}
    config = small_run("diloco_m2", method=method)
    copies: dict[int, list[torch.Tensor]] = {0: []}
    steps: list[list[float]] = []

    def keep(trainer: Trainer, row: dict) -> None:
        if trainer.world.rank == 0:
            copies[row["step"]] = [flatten(f.parameters) for f in trainer.engine.fragments]
            state = trainer.optimizer.state
            steps.append(
                [
                    max((float(state[p]["step"]) for p in f.parameters if p in state), default=0.0)
                    for f in trainer.engine.fragments
                ]
            )

    train_in_threads(config, corpus, tmp_path, on_row=keep)
    schedule = Schedule(3, config.method.sync_every_steps)
    following = {s: next(schedule.turns(t)[0] for t in range(s, 100) if schedule.turns(t)) for s in range(1, 13)}
    for step in range(2, 12):  # the last step closes the round of all
        moved = [not torch.equal(a, b) for a, b in zip(copies[step - 1], copies[step], strict=True)]
        assert moved == [p == following[step] for p in range(3)], step
    trained = [sum(following[s] == p for s in range(1, 13)) for p in range(3)]
    assert steps[-1] == trained
    assert len(set(following.values())) == 3


def test_resume_with_frozen_fragments(corpus: Path, tmp_path: Path) -> None:
    config = small_run("diloco_m2", method=FULL | {"trainable": "next_fragment"}, checkpoint={"every_steps": 1})

    def crash(trainer: Trainer, row: dict) -> None:
        if row["step"] == 8:
            raise Crash

    train_in_threads(config, corpus, tmp_path / "plain")
    with pytest.raises((Crash, RuntimeError)):
        train_in_threads(config, corpus, tmp_path / "run", on_row=crash)
    assert (tmp_path / "run" / "checkpoints" / "step-00000007").exists()
    seen = []
    train_in_threads(config, corpus, tmp_path / "run", on_row=lambda trainer, row: seen.append(row["step"]))
    assert min(seen) == 8
    assert _losses(tmp_path / "run") == _losses(tmp_path / "plain")


def test_what_else_may_be_evaluated(corpus: Path, tmp_path: Path) -> None:
    """The first replica's own parameters and the mean of both, by definition, at each evaluation of a run."""
    also = {"evaluate_also": ["first_replica", "replica_average"], "eval_every": 5}
    evaluated: list[dict] = []
    config = small_run("diloco_m2", method=STREAMING, train=also)
    inner: dict[int, list[torch.Tensor]] = {}
    trainers: dict[int, Trainer] = {}

    def keep(trainer: Trainer, row: dict) -> None:
        inner[trainer.world.rank] = [p.detach().clone() for p in trainer.model.parameters()]
        trainers[trainer.world.rank] = trainer
        if "val_loss" in row and trainer.world.rank == 0:
            evaluated.append(row)

    summary = train_in_threads(config, corpus, tmp_path, on_row=keep)
    assert len(evaluated) > 1
    assert all({"val_loss_first_replica", "val_loss_replica_average"} <= row.keys() for row in evaluated)
    model, data = trainers[0].model, trainers[0].data
    windows = data.held_out(config.train.eval_sequences)

    def loss(values: list[torch.Tensor]) -> float:
        with torch.no_grad():
            for p, v in zip(model.parameters(), values, strict=True):
                p.copy_(v)
            return model.losses(windows[:, :-1], windows[:, 1:])[1].item()

    assert summary["val_loss_first_replica"] == pytest.approx(loss(inner[0]), abs=1e-5)
    average = [(a + b) / 2 for a, b in zip(inner[0], inner[1], strict=True)]
    assert summary["val_loss_replica_average"] == pytest.approx(loss(average), abs=1e-5)
    agreed = load_file(tmp_path / "model.safetensors")
    assert summary["val_loss"] == pytest.approx(loss([agreed[n] for n, _ in model.named_parameters()]), abs=1e-5)
    assert len({round(summary[k], 6) for k in summary if k.startswith("val_loss")}) == 3


@pytest.fixture(scope="module", params=[[2], [1, 4]], ids=str)
def uninterrupted(request: pytest.FixtureRequest, corpus: Path, tmp_path_factory: pytest.TempPathFactory):
    """(method, folder) of a run with fragments under way most of the time."""
    method, out = FULL | {"overlap_steps": request.param}, tmp_path_factory.mktemp("streaming") / "plain"
    train_in_threads(small_run("diloco_m2", method=method), corpus, out)
    return method, out


@pytest.mark.parametrize("stop_at", range(5, 12))
def test_resume_with_fragments_under_way(
    stop_at: int, uninterrupted: tuple[dict, Path], corpus: Path, tmp_path: Path
) -> None:
    """A checkpoint after every step, so that some are written while a fragment travels."""
    method, plain = uninterrupted
    config = small_run("diloco_m2", method=method, checkpoint={"every_steps": 1})

    def crash(trainer: Trainer, row: dict) -> None:
        if row["step"] == stop_at + 1:
            raise Crash

    with pytest.raises((Crash, RuntimeError)):
        train_in_threads(config, corpus, tmp_path / "run", on_row=crash)
    seen = []
    train_in_threads(config, corpus, tmp_path / "run", on_row=lambda trainer, row: seen.append(row["step"]))
    assert min(seen) == stop_at + 1
    for rank in (0, 1):
        assert _losses(tmp_path / "run", rank) == _losses(plain, rank)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    a, b = (json.loads((folder / "summary.json").read_text()) for folder in (tmp_path / "run", plain))
    assert a["sent_bytes"] == b["sent_bytes"]


def test_the_peak_of_a_step_falls_by_the_fragments_share(corpus: Path, tmp_path: Path) -> None:
    """Closed form and ledger: no step sends more than the largest fragment, and E3M0 is 4 bits and a byte a block."""
    config = small_run("diloco_m2", model={"layers": 4}, method=STREAMING | {"codec": "e3m0"}, train={"steps": 20})
    summary = train_in_threads(config, corpus, tmp_path)
    ((_, expected),) = summary["sent_bytes_closed_form"].items()
    assert summary["sent_bytes"]["replica/outer"] == expected
    names = {n: p.numel() for n, p in Decoder(config.model).named_parameters()}
    sizes = [sum(size for n, size in names.items() if n.startswith(f"blocks.{i}.")) for i in range(4)]
    sizes.append(sum(names.values()) - sum(sizes))
    assert sizes == [f.numel for f in config.plan().fragments]
    assert summary["peak_step_bytes"] == max(-(-s // 2) + -(-s // 256) for s in sizes)
    turns = [Schedule(5, 5).turns_of(p, 20) for p in range(5)]
    assert expected == sum(t * (-(-s // 2) + -(-s // 256)) for t, s in zip(turns, sizes, strict=True))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"overlap_steps": [4]}, "method.overlap_steps = 4 must be at least 0 and below sync_every_steps = 4"),
        ({"overlap_steps": [1, 1, 1]}, r"method.overlap_steps = \[1, 1, 1\] must hold one value, or one for each of 2"),
        ({"mixing": 1.0}, "method.mixing must be below 1, got 1.0"),
        ({"fragments": "strided", "layers_per_fragment": 1, "sync_every_steps": 2}, "too short for 3 fragments"),
        ({"fragments": "stride"}, "method.fragments = 'stride' is not a valid choice; did you mean 'strided'"),
        ({"codec_keep": 0.5}, "method.codec_keep means nothing with method.codec = fp32"),
        ({"layers_per_fragment": 2}, "method.layers_per_fragment means nothing with method.fragments = whole"),
        ({"outer_lr": -0.1}, "method.outer_lr must be at least 0"),
        (
            {"fragments": "strided", "layers_per_fragment": 1, "sync_every_steps": 9, "close_last_round": False},
            "train.steps = 12 end before the last of 3 fragments has its first turn, at step 15",
        ),
        (
            {"codec": "topk", "codec_keep": 1.5},
            "method.codec_keep = 1.5 is a share of the values: above 0 and at most 1",
        ),
        ({"trainable": "next_fragment"}, "trainable = next_fragment means nothing with method.fragments = whole"),
        ({"codec": "e3m5"}, "method.codec = 'e3m5' is not a valid choice"),
    ],
)
def test_impossible_settings_are_refused(method: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_run("diloco_m2", method=method)


@pytest.mark.parametrize("codec", ["e3m0", "fp32"])
def test_a_replica_that_diverges_is_named_on_every_rank(codec: str, corpus: Path, tmp_path: Path) -> None:
    config = small_run("diloco_m2", method=STREAMING | {"codec": codec})
    told: dict[int, str] = {}

    def diverge(trainer: Trainer, row: dict) -> None:
        if row["step"] == 4 and trainer.world.rank == 1:
            with torch.no_grad():
                trainer.model.blocks["0"].mlp.up.weight[0, 0] = float("nan")

    def work(world: World) -> None:
        try:
            train(config, world, corpus, tmp_path / "run", on_row=diverge)
        except (CommError, ValueError) as error:
            told[world.rank] = f"rank {world.rank}: {error}"
            raise

    with pytest.raises((CommError, ValueError)):
        run_threads(work, replicas=2)
    assert sorted(told) == [0, 1]
    assert all("rank 1" in t and "is nan; only finite values can be sent" in t for t in told.values())
