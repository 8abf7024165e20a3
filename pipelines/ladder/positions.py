"""Where in a sequence a trained model has its loss: early tokens are predicted from little context, late from much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from lowcomm.experiment.batches import TokenData
from lowcomm.experiment.config import RunConfig
from lowcomm.experiment.trainer import saved_model
from pipelines.ladder.plan import Ladder, base_of

#: The number of equal parts of a sequence.
PARTS = 8


def has_positions(config: RunConfig) -> bool:
    """Tell whether `loss_by_position` is defined: where sequences have equal parts, and the run is no pipeline.

    A pipeline evaluates with what has crossed its boundaries, which a saved model does not.
    """
    return config.stages == 1 and config.train.seq_len % PARTS == 0


@torch.no_grad()
def loss_by_position(config: RunConfig, data: Path, weights: Path) -> list[float]:
    """Return the mean cross-entropy, in nats per token, in each of `PARTS` parts of the sequences that a run evaluates.

    It is computed in fp32. Where replicas keep parameters of their own, the saved model is their mean, and the mean
    over parts is not the run's `val_loss`.

    Args:
        config: that of the run, for which `has_positions`.
        data: the folder of its corpus.
        weights: the file of the model that it has saved.
    """
    model, t = saved_model(config, weights), config.train
    tokens = TokenData(data, seq_len=t.seq_len, global_batch=t.global_batch, seed=config.seed)
    windows = tokens.held_out(t.eval_sequences, t.eval_split)
    sums = torch.zeros(t.seq_len, dtype=torch.float64)
    for some in windows.split(64):
        logits = model(some[:, :-1])
        entropies = F.cross_entropy(logits.flatten(0, 1), some[:, 1:].flatten(), reduction="none")
        sums += entropies.view(len(some), -1).sum(0, dtype=torch.float64)
    return [round(mean, 5) for mean in (sums / len(windows)).view(PARTS, -1).mean(1).tolist()]


#: The columns of losses by position.
POSITION_COLUMNS = ["rung", "row", "seed", "to_token", "loss", "base_loss"]


def read_positions(ladder: Ladder) -> list[dict[str, Any]]:
    """Return the losses by position of all points that have them: a row for each point and part of a sequence.

    Columns (`POSITION_COLUMNS`): rung, row, seed, to_token (the last token of the part, from 1), loss, and base_loss,
    that of data-parallel training (`plan.base_of`) with the same seed in the same part; None where its point has none,
    as the oldest points.
    """
    found = []
    for rung in ladder.plan.rungs.values():
        configs = ladder.configs(rung.name)
        told = {
            (row, point["seed"]): point["loss_by_position"]
            for row in rung.rows
            for point in ladder.outcomes(rung.name, row)
            if "loss_by_position" in point
        }
        for (row, seed), losses in told.items():
            base = told.get((base_of(row, configs), seed), [None] * PARTS)
            for part, (loss, other) in enumerate(zip(losses, base, strict=True)):
                end = configs[row].train.seq_len * (part + 1) // PARTS
                place = {"rung": rung.name, "row": row, "seed": seed, "to_token": end}
                found.append(place | {"loss": loss, "base_loss": other})
    return found
