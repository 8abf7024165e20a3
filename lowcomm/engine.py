"""The engine: what a trainer calls at each step so that replicas come to agree; here those that keep nothing.

Data-parallel training exchanges gradients, each step, before clipping and the inner optimizer. Independent replicas
exchange nothing. Local updates (DiLoCo and all that follows from it) are in `outer`, sharded models in `fsdp`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from lowcomm.accounting import mean_bytes
from lowcomm.comm import World
from lowcomm.fragment import flatten, unflatten_into

#: What may be evaluated: the parameters last agreed, the first replica's own, the mean of all replicas' own.
Evaluated = Literal["agreed", "first_replica", "replica_average"]


def weight_spread(world: World, parameters: list[Tensor]) -> float:
    """Standard deviation of the replicas' weights: sqrt(mean over weights and replicas of (theta_m - mean)^2).

    Over all stages; every rank must ask, and gets the same.
    """
    own = flatten(parameters).float()
    off = own.sub(world.mean(own.clone(), purpose="analysis")).double()
    total = torch.tensor([off.square().sum().item(), off.numel()], dtype=torch.float64, device=world.device)
    squares, count = world.sum(total, purpose="analysis", axis="world").tolist()
    return (squares / count) ** 0.5


@contextlib.contextmanager
def holding(parameters: list[Tensor], values: Tensor) -> Iterator[None]:
    """Inside it, parameters have other values (flat)."""
    own = flatten(parameters)
    unflatten_into(values, parameters)
    try:
        yield
    finally:
        unflatten_into(own, parameters)


def of_replicas(world: World, parameters: list[Tensor], which: Evaluated) -> Tensor:
    """The first replica's own parameters, or the mean of all replicas', flat."""
    own = flatten(parameters)
    if which == "first_replica":
        return world.broadcast(own, purpose="analysis")
    return world.mean(own.float(), purpose="analysis")


class Engine:
    """What a trainer calls; it knows no method by name. This one exchanges nothing and keeps nothing.

    one_model: whether replicas evaluate one model, or each its own.
    """

    one_model = True

    def before_step(self, step: int) -> None:
        """Before inner step `step` (from 1)."""

    def average_gradients(self) -> None:
        """Between the backward pass and clipping."""

    def after_step(self, step: int) -> dict[str, float]:
        """After inner step `step`. Returns what is worth logging."""
        return {}

    def evaluated(self, which: Evaluated) -> contextlib.AbstractContextManager[None]:
        """Inside, the model holds the parameters to evaluate."""
        return contextlib.nullcontext()

    def weights(self) -> dict[str, Tensor]:
        """The parameters to evaluate, whole, by name; the mean of the replicas' own where they have no one model.

        Every rank must ask.
        """
        raise NotImplementedError

    def map(self, change: Callable[[dict[str, Tensor]], None]) -> None:
        """Change in place what the engine keeps of parameters, by name and in their shapes; waits for what travels."""

    def state(self) -> dict[str, Tensor]:
        """State to checkpoint beside the model and the inner optimizer; waits for what is under way."""
        return {}

    def load(self, state: dict[str, Tensor]) -> None:
        """Put back what `state` gave."""

    def sent_bytes(self) -> dict[str, int]:
        """Closed form of this rank's bytes on the replica axis in a whole run, by purpose; {} where none is claimed."""
        return {}


class DataParallel(Engine):
    """Gradients averaged over replicas at every step."""

    def __init__(self, model: nn.Module, world: World, steps: int):
        self.named, self.world, self.steps = dict(model.named_parameters()), world, steps

    def average_gradients(self) -> None:
        if self.world.replicas > 1:
            grads = [p.grad for p in self.named.values()]
            unflatten_into(self.world.mean(flatten(grads), purpose="gradients"), grads)

    def weights(self) -> dict[str, Tensor]:
        return self.named

    def sent_bytes(self) -> dict[str, int]:
        numel = sum(p.numel() for p in self.named.values())
        once = mean_bytes(numel, 4, self.world.replicas, self.world.replica)
        return {"gradients": self.steps * once}


class Independent(Engine):
    """Replicas never exchange anything; but where routes are random, stages train on what other replicas computed."""

    one_model = False

    def __init__(self, model: nn.Module, world: World):
        self.named, self.world = dict(model.named_parameters()), world
        self.parameters = list(self.named.values())

    def evaluated(self, which: Evaluated) -> contextlib.AbstractContextManager[None]:
        if which == "agreed":
            return contextlib.nullcontext()
        return holding(self.parameters, of_replicas(self.world, self.parameters, which))

    def weights(self) -> dict[str, Tensor]:
        mean = of_replicas(self.world, self.parameters, "replica_average").split([p.numel() for p in self.parameters])
        return {n: v.view(p.shape) for (n, p), v in zip(self.named.items(), mean, strict=True)}
