"""NoLoCo: one step by hand, the identities of its momentum, what replicas do without each other, and the theory."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lowcomm.comm.start import run_threads
from lowcomm.comm.world import World
from lowcomm.experiment.config import RunConfig
from lowcomm.experiment.run_folder import read_metrics
from lowcomm.experiment.train import train, train_in_threads
from lowcomm.experiment.trainer import Trainer
from lowcomm.methods.engine import weight_spread
from lowcomm.methods.local_updates import LocalUpdates
from lowcomm.methods.noloco import (
    PulledMomentum,
    Quadratic,
    contraction_bound,
    differing,
    driven_bounds,
    growth,
    idle_growth,
    paper_bounds,
    second_moments,
)
from lowcomm.methods.outer_state import flatten
from lowcomm.methods.routing import groups
from lowcomm.settings import ConfigError
from tests.conftest import command_line, small_run
from tests.harness import Crash, train_in_processes

NOLOCO = {"peers": "group", "outer": "noloco", "outer_lr": 0.7, "outer_momentum": 0.5, "outer_pull": 0.6}
FULL = NOLOCO | {"fragments": "strided", "layers_per_fragment": 1, "sync_every_steps": 6, "codec": "e3m0"}


def noloco_run(**override: Any) -> RunConfig:
    method = NOLOCO | override.pop("method", {})
    return small_run("diloco_m2", **({"replicas": 4} | override), method=method)


# One step by hand


@pytest.mark.parametrize(
    ("slow", "fast", "momentum", "expected_m", "expected_slow"),
    [
        # n = 2; alpha 0.5, beta 0.25, gamma 0.5. theta - phi = 2, 4, mean 3; mean phi = 4.
        # m_1 = 0.5 * 1 + 0.25 * 3 + 0.5 * (4 - 2) = 2.25,  m_2 = 0.5 * -1 + 0.75 + 0.5 * (4 - 6) = -0.75
        ([2.0, 6.0], [4.0, 10.0], [1.0, -1.0], [2.25, -0.75], [4.25, 5.25]),
        # n = 4. theta - phi = 1, -1, 2, 6, mean 2; mean phi = 3.
        # m = 0.5 m + 0.25 * 2 + 0.5 * (3 - phi): 0.5 + 0.5 + 1, 0 + 0.5 + 0.5, -1 + 0.5 + 0, 2 + 0.5 - 1.5
        ([1.0, 2.0, 3.0, 6.0], [2.0, 1.0, 5.0, 12.0], [1.0, 0.0, -2.0, 4.0],
         [2.0, 1.0, -0.5, 1.0], [3.0, 3.0, 2.5, 7.0]),
    ],
)  # fmt: skip
def test_one_outer_step_by_hand(
    slow: list[float], fast: list[float], momentum: list[float], expected_m: list[float], expected_slow: list[float]
) -> None:
    """Eq. 1 to 3 with +beta: replicas move towards where their inner steps went, and towards each other."""
    n = len(slow)
    optimizer = PulledMomentum(0.25, 0.5, 0.5)
    for i in range(n):
        agreed = torch.tensor([slow[i]])
        buffers = {"momentum": torch.tensor([-momentum[i] / 0.25])}  # of outer gradients, whose sign is the other
        delta = torch.tensor([sum(p - t for p, t in zip(slow, fast, strict=True)) / n])
        optimizer.step(agreed, delta, buffers, torch.tensor([sum(slow) / n]))
        assert agreed.item() == expected_slow[i]
        assert -0.25 * buffers["momentum"].item() == expected_m[i]


@pytest.mark.parametrize(("n", "pull"), [(2, 0.6), (4, 0.6), (2, 0.7), (4, 0.7)])
def test_a_run_takes_the_steps_of_equation_2(
    n: int, pull: float, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replica's slow weights, recomputed in float64 from the fast weights that the run shows.

    With a pull of 0.7, the learning rate, parameters alone travel; else outer gradients and slow weights.
    """
    config = noloco_run(method={"group_size": n, "outer_pull": pull})
    fast: dict[tuple[int, int], torch.Tensor] = {}
    slow: dict[tuple[int, int], torch.Tensor] = {}
    plain_step, plain_finish = LocalUpdates.step, LocalUpdates.finish

    def show(self: LocalUpdates) -> None:
        (fragment,) = self.fragments
        slow[self.world.replica, self.steps_done] = fragment.agreed.double().clone()

    def step(self: LocalUpdates, tokens: int) -> dict[str, float]:
        (fragment,) = self.fragments
        fast[self.world.replica, self.steps_done + 1] = flatten(fragment.parameters).double()
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
    start = slow[0, 1]
    m = {r: torch.zeros_like(start) for r in range(4)}
    phi = {r: start.clone() for r in range(4)}
    for turn, step in enumerate((4, 8, 12)):
        moved = {r: fast[r, step] - phi[r] for r in range(4)}
        before = {r: phi[r].clone() for r in range(4)}
        for group in groups(config.seed, (0, turn), 4, n):
            mean_moved = sum(moved[r] for r in group) / len(group)
            mean_slow = sum(before[r] for r in group) / len(group)
            for r in group:
                m[r] = 0.5 * m[r] + 0.7 * mean_moved + pull * (mean_slow - before[r])
                phi[r] = before[r] + m[r]
        for r in range(4):
            assert torch.allclose(slow[r, step], phi[r], rtol=0, atol=1e-6)
            phi[r] = slow[r, step]
    apart = max((phi[0] - phi[r]).abs().max().item() for r in (1, 2, 3))
    assert (apart == 0) == (n == 4)  # a group of all agrees


# Identities


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_group_of_all_is_heavy_ball_diloco(replicas: int, corpus: Path, tmp_path: Path) -> None:
    """Slow weights stay equal, the pull is zero, and the rest is heavy ball: bit for bit."""
    method = {"group_size": replicas, "outer_pull": 0.9}
    train_in_threads(noloco_run(replicas=replicas, method=method), corpus, tmp_path / "group")
    heavy = {"outer": "heavy_ball", "outer_lr": 0.7, "outer_momentum": 0.5}
    train_in_threads(small_run("diloco_m2", replicas=replicas, method=heavy), corpus, tmp_path / "diloco")
    for r in range(replicas):
        a, b = (read_metrics(tmp_path / n / "metrics" / f"rank-00{r}.jsonl") for n in ("group", "diloco"))
        assert [row["loss"] for row in a] == [row["loss"] for row in b]
    a, b = (load_file(tmp_path / n / "model.safetensors") for n in ("group", "diloco"))
    assert all(torch.equal(a[k], b[k]) for k in b)


def test_the_pull_conserves_the_mean_over_replicas() -> None:
    """Replicas that compute nothing: their mean stays where it was while they come together."""
    generator = torch.Generator().manual_seed(0)
    phi = torch.randn(5, 100, generator=generator, dtype=torch.float64)
    mean, spread = phi.mean(0), phi.std(0).mean()
    optimizer = PulledMomentum(0.7, 0.5, 0.7)
    buffers = [{"momentum": torch.zeros(100, dtype=torch.float64)} for _ in range(5)]
    for turn in range(60):
        for group in groups(0, (0, turn), 5, 2):
            peers = phi[group].mean(0)
            for r in group:
                optimizer.step(phi[r], torch.zeros(100, dtype=torch.float64), buffers[r], peers.clone())
        assert torch.allclose(phi.mean(0), mean, atol=1e-12)
    assert phi.std(0).mean() < 1e-3 * spread


@pytest.mark.parametrize("method", [{}, {"fragments": "strided", "layers_per_fragment": 1, "overlap_steps": [2]}])
def test_one_message_does_what_two_do_in_half_the_bytes(
    method: dict, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the pull is the learning rate, the weights are the same but for rounding."""
    config = noloco_run(method=method | {"outer_pull": 0.7}, train={"steps": 24})

    def work(world: World) -> dict:
        return train(config, world, corpus, tmp_path / "run", again=True)["sent_bytes"]

    one = run_threads(work, replicas=4)
    weights = load_file(tmp_path / "run" / "model.safetensors")
    monkeypatch.setattr(PulledMomentum, "of", lambda m: PulledMomentum(m.outer_lr, m.outer_momentum, m.outer_pull))
    two = run_threads(work, replicas=4)
    for name, value in load_file(tmp_path / "run" / "model.safetensors").items():
        assert torch.allclose(value, weights[name], rtol=0, atol=1e-5), name
    for ours, theirs in zip(one, two, strict=True):
        assert "replica/slow weights" not in ours
        assert ours["replica/outer"] == theirs["replica/outer"]
        assert theirs["replica/slow weights"] >= 0.6 * theirs["replica/outer"]  # for each turn but the first


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ({}, 1),
        ({"outer_pull": 0.6}, 2),
        ({"codec": "bf16"}, 2),
        ({"trainable": "slice", "slices": 2, "sliced": ["mlp"]}, 2),
    ],
)
def test_one_message_needs_equal_rates_a_lossless_codec_and_whole_replicas(change: dict, messages: int) -> None:
    plan = noloco_run(method={"outer_pull": 0.7} | change).plan()
    assert len(plan.purposes(1)) == messages
    assert plan.outer.sends_parameters == (messages == 1)
    with pytest.raises(ValueError, match="one message needs a pull that equals the learning rate, got 0.6 and 0.7"):
        PulledMomentum(0.7, 0.5, 0.6, one_message=True)


def test_a_run_that_is_closed_early_and_goes_on_keeps_its_pull() -> None:
    """A replica fetches the slow weights of its next group after each turn but the last, also where it closed early."""

    def work(world: World) -> list[bool]:
        x = nn.Parameter(torch.zeros(4))
        sync = LocalUpdates({"x": x}, world, steps=8, **NOLOCO | {"sync_every_steps": 2, "group_size": 2})
        held = []
        for step in range(1, 9):
            with torch.no_grad():
                x.add_(1.0 + world.replica)
            sync.step()
            if step == 3:
                sync.finish()
            held.append(sync.fragments[0].peers is not None)
        return held

    for held in run_threads(work, replicas=2):
        assert held == [False, True, True, True, True, True, True, False]


def test_threads_and_processes_give_the_same_run(corpus: Path, tmp_path: Path) -> None:
    config = noloco_run(stages=2, replicas=2, method={"route": "random_step"}, train={"record_spread": True})
    train_in_threads(config, corpus, tmp_path / "threads")
    done = train_in_processes(4, *command_line(config, corpus, tmp_path / "processes"))
    assert done.returncode == 0, done.stderr
    for name in (*(f"metrics/rank-00{r}.jsonl" for r in range(4)), "model.safetensors"):
        assert (tmp_path / "threads" / name).read_bytes() == (tmp_path / "processes" / name).read_bytes()


@pytest.fixture(scope="module", params=[NOLOCO, FULL | {"overlap_steps": [2]}], ids=["whole", "streaming"])
def uninterrupted(request: pytest.FixtureRequest, corpus: Path, tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("noloco") / "plain"
    train_in_threads(noloco_run(method=request.param), corpus, out)
    return request.param, out


@pytest.mark.parametrize("stop_at", [4, 5, 7, 9, 11])
def test_resume_with_slow_weights_under_way(
    stop_at: int, uninterrupted: tuple[dict, Path], corpus: Path, tmp_path: Path
) -> None:
    """A checkpoint after every step: between turns the next group's slow weights are on their way, or have come."""
    method, plain = uninterrupted
    config = noloco_run(method=method, checkpoint={"every_steps": 1})
    held = []

    def crash(trainer: Trainer, row: dict) -> None:
        if row["step"] == stop_at:
            held.append(any(f.peers is not None for f in trainer.engine.fragments))
        if row["step"] == stop_at + 1:
            raise Crash

    with pytest.raises((Crash, RuntimeError)):
        train_in_threads(config, corpus, tmp_path / "run", on_row=crash)
    if stop_at >= 9 or method == NOLOCO:
        assert held
        assert all(held)
    train_in_threads(config, corpus, tmp_path / "run")
    for name in (*(f"metrics/rank-00{r}.jsonl" for r in range(4)), "model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (plain / name).read_bytes()
    a, b = (json.loads((folder / "summary.json").read_text()) for folder in (tmp_path / "run", plain))
    assert a["sent_bytes"] == b["sent_bytes"]


# Bytes, and who waits for whom


@pytest.mark.parametrize(
    ("replicas", "method"),
    [
        (4, {}),
        (5, {}),
        (5, {"group_size": 4}),
        (4, {"codec": "e3m0"}),
        (5, {"outer_pull": 0.7}),
        (4, {"outer": "heavy_ball", "outer_pull": 0.0}),
        (4, FULL | {"overlap_steps": [2]}),
    ],
)
def test_bytes_sent_are_the_closed_form(replicas: int, method: dict, corpus: Path, tmp_path: Path) -> None:
    train_settings = {"global_batch": replicas, "eval_sequences": 2 * replicas}
    config = noloco_run(replicas=replicas, method=method, train=train_settings)

    def work(world: World) -> tuple[dict, dict]:
        summary = train(config, world, corpus, tmp_path)
        return summary["sent_bytes"], summary["sent_bytes_closed_form"]

    for sent, closed in run_threads(work, replicas=replicas):
        assert {k: sent.get(k, 0) for k in closed} == closed
        assert closed["replica/outer"] > 0
        assert ("replica/slow weights" in closed) == (config.method.outer_pull == 0.6)


def test_no_collective_in_a_run(corpus: Path, tmp_path: Path) -> None:
    """Between the first step and the last no verb names more ranks than a group, evaluations included."""
    config = noloco_run(train={"eval_every": 3}, comm={"trace": True})

    def work(world: World) -> list:
        train(config, world, corpus, tmp_path)
        return world.trace.spans

    for spans in run_threads(work, replicas=4, comm=config.comm):
        inside = [s for s in spans if 0 < s.step < config.train.steps]
        assert {s.purpose for s in inside} == {"outer", "slow weights"}
        assert {len(s.ranks) for s in inside} == {2}
        at_the_end = [s for s in spans if s.step == config.train.steps and s.purpose in ("outer", "slow weights")]
        assert {len(s.ranks) for s in at_the_end} == {2}


def test_a_straggler_delays_its_group_only(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica stops in its second step until the others are past the turn after step 4; its partner is not."""
    config = noloco_run()
    (pair,) = [g for g in groups(config.seed, (0, 0), 4, 2) if 0 in g]
    (partner,) = set(pair) - {0}
    others = set(range(4)) - set(pair)
    past = {r: threading.Event() for r in range(4)}
    clip, seen = Trainer._clip, {}

    def waits(self: Trainer) -> torch.Tensor:
        if self.world.step == 2 and self.world.replica == 0:
            seen["others"] = all(past[r].wait(30.0) for r in others)
            seen["partner"] = past[partner].wait(0.5)
        return clip(self)

    def keep(trainer: Trainer, row: dict) -> None:
        if row["step"] == 4:
            past[trainer.world.replica].set()

    monkeypatch.setattr(Trainer, "_clip", waits)
    train_in_threads(config, corpus, tmp_path, on_row=keep)
    assert seen == {"others": True, "partner": False}
    assert past[partner].is_set()


def test_only_the_outer_gradient_blocks(corpus: Path, tmp_path: Path) -> None:
    """Over a slow virtual link slow weights arrive during the inner steps: their wait is nothing beside the other."""
    config = noloco_run(
        replicas=2,
        train={"steps": 16},
        method={"sync_every_steps": 8},
        model={"dim": 64, "ffn_dim": 256, "heads": 4},
        comm={"trace": True, "clock": "virtual", "link_mbit_per_s": 400},
    )

    def work(world: World) -> list:
        train(config, world, corpus, tmp_path)
        return world.trace.spans

    spans = [s for rank in run_threads(work, replicas=2, comm=config.comm) for s in rank]
    waited = {p: sum(s.left_wait - s.entered_wait for s in spans if s.purpose == p) for p in ("outer", "slow weights")}
    sent = {p: sum(s.nbytes for s in spans if s.purpose == p) for p in waited}
    assert sent["slow weights"] == sent["outer"] / 2  # not before the first turn, and not after the last
    assert waited["slow weights"] < 0.1 * waited["outer"]


# What replaces a single model


def test_evaluations_of_replicas_and_of_their_average(corpus: Path, tmp_path: Path) -> None:
    config = noloco_run(train={"eval_every": 4, "evaluate_also": ["replica_average"], "record_spread": True})
    found: dict[int, dict[str, torch.Tensor]] = {}

    def keep(trainer: Trainer, row: dict) -> None:
        found[trainer.world.replica] = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        windows.setdefault(0, trainer.data.held_out(config.train.eval_sequences))
        models.setdefault(0, trainer.model)

    windows, models = {}, {}
    summary = train_in_threads(config, corpus, tmp_path, on_row=keep)
    rows = [read_metrics(tmp_path / "metrics" / f"rank-00{r}.jsonl") for r in range(4)]
    for step in (4, 8):  # each its own, on its own windows
        assert len({r[step - 1]["val_loss"] for r in rows}) == 4
        assert len({r[step - 1]["weight_spread"] for r in rows}) == 1
    assert len({r[11]["val_loss"] for r in rows}) == 1
    flat = torch.stack([torch.cat([w.view(-1) for w in found[r].values()]) for r in range(4)]).double()
    assert summary["weight_spread"] == pytest.approx(flat.sub(flat.mean(0)).square().mean().sqrt().item(), rel=1e-5)
    average = load_file(tmp_path / "model.safetensors")
    for name, value in average.items():
        assert torch.allclose(value, sum(found[r][name] for r in range(4)) / 4, atol=1e-6)
    model = models[0]
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(average[n])
        loss = model.losses(windows[0][:, :-1], windows[0][:, 1:])[1].item()
    assert summary["val_loss_replica_average"] == pytest.approx(loss, abs=1e-5)


def test_weight_spread_by_hand() -> None:
    """Weights 1, 3 and 2, 6 on two replicas: deviations 1, 1, 2, 2, so sqrt((1 + 1 + 4 + 4) / 4)."""
    values = {0: [1.0, 2.0], 1: [3.0, 6.0]}
    found = run_threads(lambda w: weight_spread(w, [torch.tensor(values[w.replica])]), replicas=2)
    assert found == [pytest.approx(math.sqrt(10 / 4))] * 2


def test_replicas_that_never_meet_are_runs_of_their_own(corpus: Path, tmp_path: Path) -> None:
    """With fixed routes they train as replicas of DiLoCo before they first meet; with random ones they come closer."""
    base = {"replicas": 4, "stages": 2, "train": {"record_spread": True, "steps": 40}}
    once = small_run("diloco_m2", **base, method={"sync_every_steps": 40})
    train_in_threads(once, corpus, tmp_path / "once")
    spread = {}
    for route in ("fixed", "random_step"):
        config = small_run("data_parallel", **base, method={"exchange": "none", "route": route})
        summary = train_in_threads(config, corpus, tmp_path / route)
        assert not any(key.startswith("replica/") and "analysis" not in key for key in summary["sent_bytes"])
        spread[route] = summary["weight_spread"]
    assert spread["random_step"] < spread["fixed"]
    for rank in range(4, 8):
        a, b = (read_metrics(tmp_path / n / "metrics" / f"rank-00{rank}.jsonl") for n in ("fixed", "once"))
        assert [row["loss"] for row in a] == [row["loss"] for row in b]


# Refusals


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"method": {"outer_pull": 1.5}}, r"outer_pull \(gamma\) = 1.5 must be below 1.5: .* \(alpha\) = 0.5 .* of 2 "),
        ({"method": {"group_size": 4, "outer_pull": 3.0}}, r"outer_pull \(gamma\) = 3.0 must be below 3: "),
        ({"method": {"group_size": 5}}, "method.group_size = 5 is more than 4 replicas"),
        ({"method": {"outer": "heavy_ball"}}, "method.outer_pull means nothing with method.outer = heavy_ball"),
        ({"method": {"peers": "all", "group_size": 3}}, "method.group_size means nothing with method.peers = all"),
        ({"method": {"peers": "all"}}, "method.outer = noloco needs method.peers = group"),
        ({"method": {"overlap_steps": [1, 1, 1, 2]}}, r"overlap_steps = \[1, 1, 1, 2\] must be one value with"),
        ({"method": {"outer_lr": 0.0}}, "method.outer_lr must be above 0 with method.outer = noloco"),
        ({"train": {"eval_sequences": 3}}, "train.eval_sequences = 3 must be at least 4"),
    ],
)
def test_settings_that_cannot_work_are_refused(override: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        noloco_run(**override)


# Theory


def test_bounds_by_hand() -> None:
    """Pairs: 2 (1 - alpha^2). A group of all: 2 (1 + alpha), as of any heavy ball."""
    assert contraction_bound(0.5, 2) == 1.5
    assert contraction_bound(0.5, 2, 64) == 1.5
    assert contraction_bound(0.5, 8, 8) == 3.0
    assert contraction_bound(0.0, 4) == 2.0
    assert contraction_bound(0.5, 4) == pytest.approx(2 * 0.75 / (1 + 0.5 * (1 - 1.5)))
    assert paper_bounds(0.5, 2) == (0.5, 1.5)
    assert differing(2, 2) == 1
    assert differing(2, 4) == pytest.approx(2 / 3)
    assert differing(2) == 0.5
    assert differing(2, 5) == 0.75  # a pair and three


@pytest.mark.parametrize("group", [2, 3, 4, 8])
@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 0.9])
def test_the_bound_is_where_second_moments_begin_to_grow(momentum: float, group: int) -> None:
    bound, q = contraction_bound(momentum, group), differing(group)
    for pull, grows in ((0.999 * bound, False), (1.001 * bound, True)):
        assert (growth(second_moments(momentum, pull, q)) > 1) == grows


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 0.7])
def test_idle_pairs_drift_apart_from_the_bound_on(momentum: float) -> None:
    """Simulated with 512 replicas, to 2 % of 2 (1 - alpha^2)."""
    bound = 2 * (1 - momentum**2)
    assert idle_growth(momentum, 0.98 * bound, 2) < 1
    assert idle_growth(momentum, 1.02 * bound, 2) > 1


@pytest.mark.parametrize("group", [2, 4])
def test_idle_growth_is_the_largest_eigenvalue(group: int) -> None:
    for momentum, pull in ((0.5, 0.2), (0.5, 0.7), (0.5, 1.4), (0.3, 1.9), (0.8, 0.5)):
        expected = growth(second_moments(momentum, pull, differing(group, 512)))
        assert idle_growth(momentum, pull, group) == pytest.approx(expected, rel=0.01)


def test_idle_pairs_come_together_with_any_small_pull() -> None:
    """Eq. 74 asks for gamma > alpha; with a tenth of that replicas come together too, only slower."""
    assert idle_growth(0.5, 0.05, 2) < 0.995


def test_driven_pairs_have_other_bounds() -> None:
    """Replicas that reach their optimum each round: at alpha = 0.9 too small a pull will not hold them."""
    assert driven_bounds(0.5, 0.7, 2) == (pytest.approx(0.001), pytest.approx(2.429, abs=0.005))
    low, high = driven_bounds(0.9, 0.7, 2)
    assert (low, high) == (pytest.approx(0.15, abs=0.01), pytest.approx(1.49, abs=0.01))
    problem = Quadratic(curvature=1.0, noise=1.0, inner_lr=0.9, inner_steps=5)
    outer = {"momentum": 0.9, "lr": 0.7, "group": 2, "replicas": 512, "turns": 300, "weights": 4}
    for pull, grows in ((0.9 * low, True), (1.1 * low, False), (0.95 * high, False), (1.05 * high, True)):
        spread = problem.simulate(pull=pull, **outer).std(1).mean(1)
        assert (spread[-1] > 2 * spread[30:60].mean()) == grows


@pytest.mark.parametrize(("group", "replicas"), [(2, 4), (2, 16), (4, 16), (16, 16)])
def test_variances_on_the_quadratic_are_the_closed_form(group: int, replicas: int) -> None:
    problem = Quadratic(curvature=1.0, noise=4.0, inner_lr=0.1, inner_steps=5)
    outer = {"momentum": 0.5, "lr": 0.7, "pull": 0.7, "group": group, "replicas": replicas}
    of_mean, apart = problem.stationary(**outer)
    phi = problem.simulate(**outer, turns=400, weights=400)[100:]
    means = phi.mean(1, keepdims=True)
    assert np.square(means).mean() == pytest.approx(of_mean, rel=0.05)
    assert np.square(phi - means).mean() == pytest.approx(apart, rel=0.05, abs=1e-12)
    assert (apart < 1e-12) == (group == replicas)


def test_the_mean_goes_to_the_optimum() -> None:
    """Theorem 1: E phi -> 0, from a start of 1."""
    problem = Quadratic(curvature=1.0, noise=0.01, inner_lr=0.1, inner_steps=5)
    phi = problem.simulate(momentum=0.5, lr=0.7, pull=0.7, group=2, replicas=8, turns=60, weights=200)
    assert phi[0].mean() == 1
    assert abs(phi[-1].mean()) < 1e-3


def test_the_spread_goes_with_the_square_of_the_inner_learning_rate() -> None:
    """Theorem 1 says so of the variance; so it is of the spread, where inner steps leave most of phi (small H lr).

    The variance of the mean over replicas is proportional to the learning rate itself there.
    """
    outer = {"momentum": 0.5, "lr": 0.7, "pull": 0.7, "group": 2, "replicas": 8}
    small, double = (Quadratic(1.0, 1.0, omega, 5).stationary(**outer) for omega in (0.0005, 0.001))
    assert double[1] / small[1] == pytest.approx(4, rel=0.01)
    assert double[0] / small[0] == pytest.approx(2, rel=0.01)


def test_what_grows_without_end_has_no_variance() -> None:
    with pytest.raises(ValueError, match="no stationary variance: second moments grow by"):
        Quadratic(1.0, 1.0, 0.01, 5).stationary(momentum=0.5, lr=0.7, pull=1.6, group=2, replicas=512)
    with pytest.raises(ValueError, match="inner_lr x curvature = 2 must be above 0 and at most 1"):
        Quadratic(2.0, 1.0, 1.0, 5)
