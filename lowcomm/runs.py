"""The reading of finished runs."""

from __future__ import annotations

import json
from typing import Any

from lowcomm import BUILD
from lowcomm.metrics import loss_metrics, read_metrics
from lowcomm.params import run_dir, run_points
from lowcomm.settings import ConfigError
from lowcomm.shape import stage_layers
from lowcomm.streaming import Schedule, fragment_count


def read_run(run: str, scale: str) -> list[dict[str, Any]]:
    """Summaries of a run's variants and seeds in order, each with "variant", "seed" and metrics rows under "rows".

    Rows are the first replica's, but validation losses: where replicas have models of their own, their mean.
    Raises ConfigError if one is missing.
    """
    found = []
    for config in run_points(run, scale=scale):
        folder = run_dir(config)
        try:
            summary = json.loads((folder / "summary.json").read_text())
        except FileNotFoundError:
            raise ConfigError(
                f"{folder.relative_to(BUILD)} has not been trained: dvc repro train@{run} (scale {scale})"
            ) from None
        files = [read_metrics(loss_metrics(folder, config, r)) for r in range(config.replicas)]
        rows = files[0]
        for row, *others in zip(*files, strict=True):
            if "val_loss" in row:
                row["val_loss"] = sum(r["val_loss"] for r in (row, *others)) / config.replicas
        found.append(summary | {"variant": config.variant, "seed": config.seed, "rows": rows})
    return found


def last_exchanges(run: dict[str, Any]) -> list[int]:
    """The step at which each fragment of the first stage is exchanged last, from a summary's `run`.

    The last step of all where the last round is closed.
    """
    m, steps = run["method"], run["train"]["steps"]
    if m["close_last_round"]:
        return [steps]
    layers = len(stage_layers(run["model"]["layers"], run["stages"], 0))
    count = fragment_count(m["fragments"], layers, m["layers_per_fragment"], m["slices"])
    schedule = Schedule(count, m["sync_every_steps"])
    return [schedule.offset(p) + schedule.turns_of(p, steps) * m["sync_every_steps"] for p in range(count)]
