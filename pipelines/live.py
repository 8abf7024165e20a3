"""Short runs of params.yaml, trained and traced on the spot: this machine's clock, for `replay` and `predict`."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowcomm.comm.wire import Span
from lowcomm.cost.predict import Links, predict, stage_flops
from lowcomm.cost.replay import Replay, read_traces, replay, window
from lowcomm.experiment.config import RunConfig
from lowcomm.experiment.project import overrides
from pipelines.launch import launch_in_turn, make_job
from pipelines.project import run_config


@dataclass(frozen=True)
class Live:
    """The traces of a run that has just been trained: the spans of all ranks over `steps` steps, of whole rounds."""

    config: RunConfig
    spans: list[list[Span]]
    steps: int

    def replay(self, mbit_per_s: ArrayLike, latency_ms: float = 0.0) -> Replay:
        """Return the time and the utilisation of the same steps over other links.

        mbit_per_s: the rate of a rank's wire on each axis; infinity is free. May be an array. latency_ms: one way.
        """
        return replay(self.spans, np.asarray(mbit_per_s) / 1e3, latency_s=latency_ms / 1e3)

    def step_seconds(self, mbit_per_s: ArrayLike, latency_ms: float = 0.0) -> NDArray[np.float64]:
        """Return the seconds per step over other links; arguments as for `replay`."""
        return self.replay(mbit_per_s, latency_ms).seconds / self.steps

    def computing(self) -> tuple[list[tuple[float, float]], float]:
        """Return what `predict` needs: seconds (forward, backward) of a micro-batch at each stage, and `stragglers`.

        A step's computing is the time between waits, divided into forward and backward as its FLOPs are. Ranks that
        share processors are uneven in a way that no rank sees by itself, so `stragglers` is the number (0 to 4) with
        which a predicted step over a free link is as long as the replayed one: 0 where that is shorter than without.
        """
        c, shares = self.config, []
        each = np.array([_by_step(spans) for spans in self.spans]).reshape(c.stages, c.replicas, -1)
        for stage, (forward, backward) in zip(each, stage_flops(c), strict=True):
            a_flop = float(stage.mean()) / c.train.accumulation / (forward + backward)
            shares.append((forward * a_flop, backward * a_flop))
        wanted, low, high = float(self.step_seconds(math.inf)), 0.0, 4.0
        for _ in range(12):
            middle = (low + high) / 2
            took = float(predict(c, shares, Links(math.inf, stragglers=middle)).step_seconds)
            low, high = (middle, high) if took < wanted else (low, middle)
        return shares, low


def _by_step(spans: Sequence[Span]) -> list[float]:
    """Return the seconds that a rank computes per step, between each step that sends something and the next that does.

    Raises ValueError where fewer than two steps do.
    """
    begun: dict[int, float] = {}
    waited: dict[int, float] = {}
    for s in spans:
        begun[s.step] = min(begun.get(s.step, s.submitted), s.submitted)
        if s.entered_wait < math.inf:
            waited[s.step] = waited.get(s.step, 0.0) + s.left_wait - s.entered_wait
    steps = sorted(begun)
    if len(steps) < 2:
        raise ValueError(f"a trace must have messages of two steps and more, got those of {len(steps)}")
    return [(begun[b] - begun[a] - waited.get(a, 0.0)) / (b - a) for a, b in pairwise(steps)]


def trace_runs(
    names: Sequence[tuple[str, str]], *, scale: str, rounds: int = 3, least: int = 20, settings: Sequence[str] = ()
) -> list[Live]:
    """Train runs of params.yaml over links as fast as they go, one after the other, and return their traces.

    At the beginning one round is left out, or as many as hold a fifth of the steps that count; at the end one is.

    names: (run, variant) of each; all must have equally many ranks. rounds: how many rounds of H steps count, at least;
    for runs without rounds, `least` decides alone. least: how many steps count, at least.
    """
    with tempfile.TemporaryDirectory() as folder:
        jobs, windows = [], []
        for index, (run, variant) in enumerate(names):
            config = run_config(run, variant=variant, scale=scale, **overrides(list(settings)))
            h = config.method.sync_every_steps if config.method.exchange == "parameters" else 1
            counted = h * max(rounds if h > 1 else 1, -(-least // h))
            before = h * -(-max(h, counted // 5) // h)
            steps = before + counted + h
            words = [*settings, f"train.steps={steps}", "train.warmup_steps=2", "train.eval_every=0", "comm.trace=true"]
            words += [f"train.eval_sequences={config.replicas}", "train.record_ranks=false"]
            words.append("train.record_spread=false")
            if config.method.boundary.update_every_steps >= steps:  # a run must have a move: its last step but one
                words.append(f"method.boundary.update_every_steps={steps - 1}")
            out, times = (Path(folder) / f"{kind}-{index}" for kind in ("run", "times"))
            jobs.append(make_job(run, variant=variant, scale=scale, settings=words, out=out, times=times))
            windows.append((config, before + 1, counted))
        launch_in_turn(jobs)
        found = []
        for job, (config, first, counted) in zip(jobs, windows, strict=True):
            spans = window(read_traces(job.folder.times), first, first + counted - 1)
            found.append(Live(config, spans, counted))
    return found
