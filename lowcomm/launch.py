"""Start a training run from a notebook or a script, watch it live, and fail when it fails.

`launch` runs `torchrun -m lowcomm.train` as a child, shows a progress bar with the loss as a line while
it trains, and raises with the tail of the log if any rank fails. If the launcher dies, the ranks
notice, write a checkpoint and stop.
"""

from __future__ import annotations

import html
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lowcomm.config import ROOT, RunConfig, data_dir, overrides, run_config, run_dir, source_digest, times_dir
from lowcomm.metrics import clear_run, made_with, strangers
from lowcomm.stop import LAUNCHER_VARIABLE

#: glibc gives large blocks back to the system after each step and faults them in anew; keeping them saves a tenth.
_KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(2**25)}


class LaunchError(RuntimeError):
    """The run failed; the message holds the tail of its log."""


def curve_svg(losses: list[tuple[int, float]], steps: int, width: int = 480, height: int = 90) -> str:
    """The loss so far as a small inline picture."""
    if len(losses) < 2:
        return ""
    low, high = min(v for _, v in losses), max(v for _, v in losses)
    span = (high - low) or 1.0
    points = " ".join(f"{s / steps * width:.1f},{(high - v) / span * (height - 4) + 2:.1f}" for s, v in losses)
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<polyline points="{points}" fill="none" stroke="#0072B2" stroke-width="1.5"/></svg>'
    )


class _Live:
    """Progress of one run: a bar and a curve in a notebook, a bar with the loss in a terminal."""

    def __init__(self, title: str, steps: int):
        self.title, self.steps = title, steps
        self.losses: list[tuple[int, float]] = []
        self._display = None
        try:
            from IPython import get_ipython
            from IPython.display import HTML, display

            if get_ipython() is not None and get_ipython().__class__.__name__ == "ZMQInteractiveShell":
                self._html = HTML
                self._display = display(HTML(html.escape(title)), display_id=True)
        except ImportError:
            pass
        self._bar = tqdm(total=steps, desc=title, disable=self._display is not None, mininterval=1.0)

    def show(self, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        self.losses += [(r["step"], r["loss"]) for r in rows]
        step, loss = self.losses[-1]
        if self._display is None:
            self._bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            self._bar.update(step - self._bar.n)
            return
        stride = max(1, len(self.losses) // 240)
        self._display.update(
            self._html(
                f"<div>{html.escape(self.title)}: step {step} of {self.steps}, loss {loss:.3f}</div>"
                f'<progress value="{step}" max="{self.steps}" style="width:480px"></progress><br>'
                + curve_svg(self.losses[::stride], self.steps)
            )
        )

    def close(self) -> None:
        self._bar.close()


class _Tail:
    """New whole lines of a growing JSON-lines file."""

    def __init__(self, path: Path):
        self.path, self._at = path, 0

    def rows(self) -> list[dict[str, Any]]:
        if not self.path.exists() or self.path.stat().st_size < self._at:
            self._at = 0
            return []
        with self.path.open() as file:
            file.seek(self._at)
            text = file.read()
        end = text.rfind("\n") + 1
        self._at += len(text[:end].encode())
        return [json.loads(line) for line in text[:end].splitlines()]


def command(config: RunConfig, out: Path, times: Path, data: Path, settings: list[str]) -> list[str]:
    """The torchrun command of a run."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(config.replicas)]
    script = ["-m", "lowcomm.train", config.name, "--scale", config.scale, "--seed", str(config.seed)]
    folders = ["--out", str(out), "--times", str(times), "--data", str(data)]
    return torchrun + script + folders + [word for s in settings for word in ("--set", s)]


def _told(lines: list[str]) -> str:
    """The end of what the ranks wrote, without torchrun's own account of their deaths."""
    ends = (i for i, line in enumerate(lines) if "torch/distributed/elastic" in line and "failed (exitcode" in line)
    ranks = [line for line in lines[: next(ends, None)] if "torch/distributed/run.py" not in line]
    return "\n".join((ranks or lines)[-30:])


def launch(
    run: str,
    *,
    seed: int | None = None,
    scale: str | None = None,
    settings: list[str] | None = None,
    out: Path | None = None,
    times: Path | None = None,
    data: Path | None = None,
) -> dict[str, Any]:
    """Train a run of params.yaml under torchrun and return its summary.

    Args:
        run, seed, scale: as in `config.run_config`.
        settings: overrides like "train.steps=60".
        out, times, data: folders; by default the run's own under build/.

    An interrupted run continues from its checkpoint, unless the source has changed since: then it starts
    over and says so. Raises LaunchError with the tail of the log when a rank fails, ConfigError for bad settings.
    """
    settings = settings or []
    config = run_config(run, seed=seed, scale=scale, **overrides(settings))  # refuse bad settings before starting
    out = out or run_dir(run, config.scale, config.seed)
    times = times or times_dir(run, config.scale, config.seed)
    data = data or data_dir(config.data.corpus, config.scale)
    times.mkdir(parents=True, exist_ok=True)
    if found := strangers(out):
        raise LaunchError(f"{out} holds {', '.join(found[:5])}, which no run puts there: choose another folder")
    if made_with(out) != source_digest():
        if (out / "checkpoints").exists():
            print(f"{run}: the source has changed since its checkpoint was written; starting over")
        clear_run(out)
    log_path = times / "log.txt"
    environment = os.environ | _KEEP_MEMORY | {"OMP_NUM_THREADS": "1", LAUNCHER_VARIABLE: str(os.getpid())}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    with log_path.open("w") as log:
        child = subprocess.Popen(
            command(config, out, times, data, settings),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    live = _Live(f"{run}, seed {config.seed}", config.train.steps)
    tail = _Tail(out / "metrics" / "rank-000.jsonl")
    try:
        while child.poll() is None:
            time.sleep(0.2)
            live.show(tail.rows())
        live.show(tail.rows())
    finally:
        live.close()
        if child.poll() is None:  # interrupted: let the ranks write their checkpoint
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
    if child.returncode or not (out / "summary.json").exists():
        raise LaunchError(
            f"{run} failed with exit code {child.returncode}; {log_path}:\n" + _told(log_path.read_text().splitlines())
        )
    return json.loads((out / "summary.json").read_text())
