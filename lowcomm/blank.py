"""Stages and engines without values, on torch's meta device: what closed forms ask for names, shapes and parts."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch

from lowcomm.config import BoundaryConfig, MethodConfig, RunConfig, TrainConfig
from lowcomm.model import Decoder
from lowcomm.outer import LocalUpdates
from lowcomm.shape import ModelConfig, stage_layers


@dataclass(frozen=True)
class Place:
    """Where a rank stands in the grid: what closed forms need of a `World`."""

    replicas: int
    replica: int
    stages: int
    stage: int


@functools.cache
def blank_stage(model: ModelConfig, stage: int, stages: int) -> Decoder:
    """A stage without values."""
    with torch.device("meta"):
        return Decoder(model).cut(stage, stages)


def blank_engine(config: RunConfig, stage: int) -> LocalUpdates:
    """The engine of the first replica's stage, with what decides the parts that it sends and keeps, and no more."""
    method = dataclasses.replace(
        config.method,
        boundary=BoundaryConfig(),
        route="fixed",
        sync_every_steps=_ANY,
        overlap_steps=(0,),
        mixing=0.0,
        offload_outer=False,
    )
    return _engine_of(config.model, method, Place(config.replicas, 0, config.stages, stage))


#: Steps of a round that no number of fragments is too many for.
_ANY = 1 << 20


@functools.lru_cache(maxsize=64)
def _engine_of(model: ModelConfig, method: MethodConfig, place: Place) -> LocalUpdates:
    return LocalUpdates(blank_stage(model, place.stage, place.stages), place, method, _TRAIN)


#: Of whatever run: engines want to know how many steps there are.
_TRAIN = TrainConfig(_ANY, 1, 1, 0.0, 0, 0, 1)


def stage_numel(config: RunConfig, stage: int) -> int:
    """Parameters of a stage."""
    return _numel(config.model, stage, config.stages)


@functools.cache
def _numel(model: ModelConfig, stage: int, stages: int) -> int:
    return sum(p.numel() for p in blank_stage(model, stage, stages).parameters())


def layers_of(config: RunConfig, stage: int) -> int:
    """Layers of a stage."""
    return len(stage_layers(config.model.layers, config.stages, stage))


def kinds_of_stage(config: RunConfig) -> dict[int, int]:
    """Stages that differ, in whether they are the first or the last and in their layers -> how many are like each."""
    kinds: dict[tuple[bool, bool, int], list[int]] = {}
    for stage in range(config.stages):
        kinds.setdefault((stage == 0, stage == config.stages - 1, layers_of(config, stage)), []).append(stage)
    return {stages[0]: len(stages) for stages in kinds.values()}
