"""Short pipelines of params.yaml, trained and traced on the spot: this machine's clock, for `replay`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowcomm.comm.wire import Span
from lowcomm.cost.replay import read_traces, replay, window
from pipelines.launch import launch_in_turn, make_job
from pipelines.project import run_config


@dataclass(frozen=True)
class Live:
    """The traces of a run that has just been trained: the spans of all ranks over `steps` steps."""

    spans: list[list[Span]]
    steps: int

    def step_seconds(self, mbit_per_s: ArrayLike) -> NDArray[np.float64]:
        """Return the seconds per step over other links.

        mbit_per_s: the rate of a rank's wire on each axis; infinity is free. May be an array.
        """
        return replay(self.spans, np.asarray(mbit_per_s) / 1e3).seconds / self.steps


def trace_runs(names: Sequence[tuple[str, str]], *, scale: str, counted: int = 20) -> list[Live]:
    """Train runs without rounds over links as fast as they go, one after the other, and return their traces.

    names: (run, variant) of each; all must have equally many ranks. counted: how many steps count; before them a fifth
    as many do not, nor does the last.
    """
    with tempfile.TemporaryDirectory() as folder:
        before = max(1, counted // 5)
        jobs, steps = [], before + counted + 1
        for index, (run, variant) in enumerate(names):
            config = run_config(run, variant=variant, scale=scale)
            words = [f"train.steps={steps}", "train.warmup_steps=2", "train.eval_every=0", "comm.trace=true"]
            words += [f"train.eval_sequences={config.replicas}", "train.record_ranks=false"]
            words.append("train.record_spread=false")
            if config.method.boundary.update_every_steps >= steps:  # a run must have a move: its last step but one
                words.append(f"method.boundary.update_every_steps={steps - 1}")
            out, times = (Path(folder) / f"{kind}-{index}" for kind in ("run", "times"))
            jobs.append(make_job(run, variant=variant, scale=scale, settings=words, out=out, times=times))
        launch_in_turn(jobs)
        traces = [window(read_traces(job.folder.times), before + 1, before + counted) for job in jobs]
    return [Live(spans, counted) for spans in traces]
