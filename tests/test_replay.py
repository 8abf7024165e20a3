"""Replays of traces: by hand, and against runs over the link that they pretend."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowcomm.comm import world as worlds
from lowcomm.comm.config import CommConfig
from lowcomm.comm.start import run_threads
from lowcomm.comm.wire import Span
from lowcomm.comm.world import World
from lowcomm.cost.replay import hidden, read_traces, recorded, replay, window
from lowcomm.experiment.run_folder import RunFolder
from lowcomm.experiment.train import train_in_threads
from lowcomm.experiment.trainer import Trainer
from tests.conftest import small_run
from tests.harness import OnlyTheLink


def _span(rank: int, number: int, submitted: float, finished: float, entered: float, **other: Any) -> Span:
    left = max(entered, finished)
    known = {"axis": "replica", "ranks": (0, 1), "verb": f"mean #{number}", "nbytes": 125_000_000, "phases": 2}
    known |= {"taken": 125_000_000, "step": 0}
    return Span(
        rank=rank, purpose="outer", submitted=submitted, finished=finished, entered_wait=entered,
        left_wait=left, **known | other
    )  # fmt: skip


def test_a_window_says_what_was_waited_for_inside_it() -> None:
    """Two messages of step 0 and one of step 1; what is awaited after the first step is no wait of a window of it."""
    traces = [
        [_span(r, 0, 1.0, 2.0, 2.0), _span(r, 0, 2.0, 3.0, 6.0), _span(r, 0, 5.0, 6.0, 6.0, step=1)] for r in (0, 1)
    ]
    inside = window(traces, 0, 0)
    same = recorded(inside)
    assert 0 <= same.utilisation <= 1
    assert hidden(inside, "outer") <= 1


def test_two_ranks_by_hand() -> None:
    """Both compute 1 s, send 1 Gbit, compute 3 s (rank 1: 4 s) and wait; at 1 Gbit/s it is there after 1 s."""
    traces = [[_span(0, 0, 1.0, 2.0, 4.0)], [_span(1, 0, 1.0, 2.0, 5.0)]]
    # The first event of the traces is their beginning.
    same = recorded(traces)
    assert (same.seconds, same.utilisation) == (4.0, 1.0)
    slow = replay(traces, [1.0, 0.2, 0.1])  # there after 1, 5 and 10 s; from the submission on, 3 and 4 s are hidden
    assert np.allclose(slow.seconds, [4, 5, 10])
    assert np.allclose(slow.utilisation, [1, 1 - (2 + 1) / 2 / 5, 1 - (7 + 6) / 2 / 10])
    late = replay(traces, [1.0], latency_s=3.0)  # two phases
    assert np.allclose(late.seconds, [7])
    dragging = replay(traces, [1.0], slowdown=[1.0, 2.0])
    assert np.allclose(dragging.seconds, [8])


def test_who_only_takes_is_as_long_at_it() -> None:
    """Rank 1 sends nothing of a broadcast of 1 Gbit."""
    traces = [[_span(0, 0, 0.0, 1.0, 0.0, taken=0)], [_span(1, 0, 0.0, 1.0, 0.0, nbytes=0)]]
    assert np.allclose(replay(traces, [1.0, 0.5]).utilisation, 0)
    assert np.allclose(replay(traces, [1.0, 0.5]).seconds, [1, 2])


def test_a_wire_serves_in_order_and_a_verb_waits_for_all() -> None:
    """Rank 0 submits at 0 and 1, rank 1 at 2 and 3: the first is there at 2 + 4, the second at 6 + 4."""
    traces = [
        [_span(0, 0, 0.0, 0.0, 1.5), _span(0, 1, 1.0, 0.0, 5.0)],
        [_span(1, 0, 2.0, 0.0, 3.5), _span(1, 1, 3.0, 0.0, 3.6)],
    ]
    assert np.allclose(replay(traces, 0.25).seconds, 10)
    free = [[_span(s.rank, i, s.submitted, 0.0, s.entered_wait, axis="world") for i, s in enumerate(t)] for t in traces]
    assert np.allclose(replay(free, 0.25).seconds, 5.5)


def test_traces_are_read_in_the_order_of_ranks(tmp_path: Path) -> None:
    ranks = (0, 999, 1000, 1001, 2, 10_000)  # beyond three digits, names are not in the order of numbers
    for rank in ranks:
        row = dataclasses.asdict(_span(rank, 0, 0.0, 0.0, 0.0))
        RunFolder(tmp_path, tmp_path).trace(rank).write_text(json.dumps(row))
    assert [span.rank for (span,) in read_traces(tmp_path)] == sorted(ranks)


def test_traces_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no trace in .*: train with comm.trace = true"):
        read_traces(tmp_path)
    twice = [_span(0, 0, 0.0, 1.0, 2.0), _span(0, 0, 1.0, 2.0, 3.0)]
    with pytest.raises(ValueError, match="rank 0 has more than one 'mean #0' on axis replica: these are traces of sev"):
        replay([twice, []], 1.0)
    with pytest.raises(ValueError, match="1 slowdowns for 2 ranks"):
        replay([[], []], 1.0, slowdown=[1.0])
    crossed = [
        [_span(0, 0, 0.0, 1.0, 0.5), _span(0, 1, 2.0, 3.0, 2.5)],
        [_span(1, 1, 0.0, 1.0, 0.5), _span(1, 0, 2.0, 3.0, 2.5)],
    ]
    with pytest.raises(ValueError, match=r"the traces wait for each other: {0: 'mean #0', 1: 'mean #1'}"):
        replay(crossed, 1.0)


def _traced(corpus: Path, out: Path, monkeypatch: pytest.MonkeyPatch, step_s: float, **method: Any) -> list[list[Span]]:
    """Streaming over an emulated link of 80 Mbit/s, each step taking `step_s` at least."""
    comm = {"link_mbit_per_s": 80, "link_latency_ms": 1, "trace": True}
    streaming = {"fragments": "strided", "layers_per_fragment": 1, "sync_every_steps": 6, "close_last_round": False}
    model = {"dim": 128, "ffn_dim": 512, "heads": 4}
    config = small_run("diloco_m2", comm=comm, method=streaming | method, model=model, train={"steps": 30})
    inner = Trainer._clip

    def steady(self: Trainer) -> Any:
        time.sleep(step_s)
        return inner(self)

    monkeypatch.setattr(Trainer, "_clip", steady)
    train_in_threads(config, corpus, RunFolder(out / "run", out / "times"))
    return read_traces(out / "times")


def test_overlap_hides_the_transfer_over_a_real_link(corpus: Path, tmp_path: Path, monkeypatch) -> None:
    """Fragments of 100,000 parameters take 80 ms at 80 Mbit/s in 8 bits; a step takes 50 ms at least."""
    apart = _traced(corpus, tmp_path / "0", monkeypatch, 0.05, overlap_steps=[0], codec="int8")
    together = _traced(corpus, tmp_path / "4", monkeypatch, 0.05, overlap_steps=[4], codec="int8")
    assert hidden(apart, "outer") < 0.2
    # What is under way when a run ends is waited for, whatever the overlap.
    assert hidden([[s for s in t if s.step <= 26] for t in together], "outer") > 0.9
    for traces in (apart, together):
        again = replay(traces, 0.08, latency_s=0.001)
        assert float(again.utilisation) == pytest.approx(float(recorded(traces).utilisation), rel=0.1)
    assert float(recorded(together).utilisation) > float(recorded(apart).utilisation)


def test_a_replay_at_another_rate_is_a_run_at_that_rate() -> None:
    """On clocks on which computing takes what is counted, so that two runs compute alike."""

    def work(world: World) -> list[Span]:
        world.clock = OnlyTheLink()
        x = np.ones(1)
        for step in range(6):
            world.step = step
            handle = world.mean_async(tensor(250_000), purpose="outer")
            world.clock.time += 0.02 * (1 + world.rank)
            x += handle.wait()[0].item()
            world.clock.time += 0.01
        return world.trace.spans

    def tensor(n: int):
        import torch

        return torch.ones(n)

    def over(mbit_per_s: float) -> list[list[Span]]:
        comm = CommConfig(link_mbit_per_s=mbit_per_s, link_latency_ms=2, clock="virtual", trace=True)
        return run_threads(work, replicas=2, comm=comm)

    fast, slow = over(1000), over(100)
    for traces, gbit_per_s, truth in ((fast, 1.0, fast), (slow, 0.1, slow), (fast, 0.1, slow), (slow, 1.0, fast)):
        again = replay(traces, gbit_per_s, latency_s=0.002)
        assert float(again.seconds) == pytest.approx(float(recorded(truth).seconds))
        assert float(again.utilisation) == pytest.approx(float(recorded(truth).utilisation))


def test_messages_by_hand() -> None:
    """Two of 1 Gbit at 1 Gbit/s, sent at 1 and 1.5 s: there after 2 and 3 s, whenever they are expected."""
    names = [{"verb": f"message #{k} 0 to 1", "phases": 1, "axis": "route"} for k in (0, 1)]
    sender = [_span(0, 0, 1.0, 1.0, 1.0, **names[0]), _span(0, 1, 1.5, 1.5, 1.5, **names[1])]
    receiver = [_span(1, k, 0.0, 1.0, 1.0 + k, nbytes=0, **names[k]) for k in (0, 1)]
    again = replay([sender, receiver], [1.0, 0.5])
    assert np.allclose(again.seconds, [3, 5])
    assert np.allclose(replay([sender, receiver], [1.0], latency_s=0.5).seconds, [3.5])


def test_a_pipeline_is_replayed_at_another_rate(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NoLoCo over a randomly routed pipeline: messages, pairs and the norm's sum, from one trace to another link."""
    method = {"peers": "group", "outer": "noloco", "outer_lr": 0.7, "outer_momentum": 0.5, "outer_pull": 0.7}
    inner = Trainer._clip

    def steady(self: Trainer) -> Any:
        self.world.clock.time += 0.03
        return inner(self)

    monkeypatch.setattr(Trainer, "_clip", steady)
    monkeypatch.setattr(worlds, "VirtualClock", OnlyTheLink)
    found = {}
    for mbit_per_s in (200, 20):
        config = small_run(
            "diloco_m2",
            stages=2,
            model={"dim": 64, "ffn_dim": 256, "heads": 4},
            method=method | {"route": "random_micro_batch"},
            train={"accumulation": 2},
            comm={"link_mbit_per_s": mbit_per_s, "link_latency_ms": 2, "clock": "virtual", "trace": True},
        )
        out = tmp_path / str(mbit_per_s)
        train_in_threads(config, corpus, RunFolder(out / "run", out / "times"))
        found[mbit_per_s] = read_traces(out / "times")
    truth, other = recorded(found[20]), recorded(found[200])
    again = replay(found[200], 0.02, latency_s=0.002)
    assert float(truth.seconds) > 1.3 * float(other.seconds)
    assert float(again.seconds) == pytest.approx(float(truth.seconds), rel=1e-3)
    assert float(again.utilisation) == pytest.approx(float(truth.utilisation), rel=1e-3)
