"""Engines: what a training loop calls so that replicas come to agree; here those that keep no outer state.

    for batch in loader:
        loss(model, batch).backward()
        engine.average_gradients()      what data-parallel training needs; with others it does nothing
        optimizer.step(); optimizer.zero_grad()
        engine.step()
    engine.finish()

Data-parallel training averages gradients at every step, before clipping and the inner optimizer. Independent replicas
exchange nothing. Local updates (DiLoCo and all that follows from it) are in `local_updates`, sharded models in `fsdp`.

To add an engine, write a file in this folder with a class that derives from `Engine` and has `names`: the values of
`MethodConfig.exchange`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from lowcomm.choices import Choice
from lowcomm.comm.shares import mean_bytes
from lowcomm.comm.world import World
from lowcomm.methods.config import MethodConfig
from lowcomm.methods.outer_state import flatten, unflatten_into
from lowcomm.settings import ConfigError, brief, nearest

#: What parameters may be of: what is agreed is kept in fp32, which holds all their values.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: What may be evaluated: the parameters last agreed, the first replica's own, the mean of all replicas' own.
Evaluated = Literal["agreed", "first_replica", "replica_average"]
#: Values of parameters, or of parts of them in their shapes, with the parameters' names: to be changed in place.
Values = Iterable[tuple[str, Tensor]]
Change = Callable[[Values], None]


def named_parameters(model: nn.Module | Mapping[str, Tensor], *, trained: bool = True) -> dict[str, Tensor]:
    """Parameters by name, of a module or as given; with `trained`, those that want a gradient alone.

    Raises ConfigError for what is neither, where there are none, and for values that fp32 does not hold.
    """
    if not isinstance(model, nn.Module | Mapping):
        raise ConfigError(f"a model is a module, or its parameters by name, not {brief(model)}")
    named = dict(model.named_parameters() if isinstance(model, nn.Module) else model)
    found = {name: p for name, p in named.items() if p.requires_grad or not trained}
    if not found:
        raise ConfigError(f"there is nothing to exchange: none of {len(named)} parameters wants a gradient")
    for name, p in found.items():
        if p.requires_grad and p.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ConfigError(f"parameter {name} is of {str(p.dtype).removeprefix('torch.')}; exchanged are {known}")
    return found


def check_ranks(world: World) -> None:
    """Raise ConfigError for what are no ranks."""
    if not isinstance(world, World):
        raise ConfigError(f"an engine takes the ranks, as lowcomm.world() gives them, not {brief(world)}")


def broadcast_weights(model: nn.Module | Mapping[str, Tensor], world: World) -> None:
    """Overwrite all parameters and buffers by those of replica 0, as DistributedDataParallel does when it is made."""
    tensors = named_parameters(model, trained=False)
    if isinstance(model, nn.Module):
        tensors |= {f"buffer {name}": b for name, b in model.named_buffers()}
    for tensor in tensors.values():
        packed = tensor.detach().contiguous().view(-1).view(torch.uint8).clone()
        received = world.broadcast(packed, purpose="initial weights")
        with torch.no_grad():
            tensor.copy_(received.view(tensor.dtype).view(tensor.shape))


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
    """The first replica's own parameters, or the mean of all replicas', flat. Raises ConfigError for another choice."""
    if which not in get_args(Evaluated):
        raise ConfigError(f"there are no parameters named {which!r} to evaluate{nearest(which, get_args(Evaluated))}")
    own = flatten(parameters)
    if which == "first_replica":
        return world.broadcast(own, purpose="analysis")
    return world.mean(own.float(), purpose="analysis")


class Engine(Choice, ABC):
    """The interface that a training loop calls; the loop knows no method by name.

    Attributes:
        one_model: whether replicas evaluate one model, or each its own.
    """

    one_model: bool = True
    #: Whether replicas keep parameters of their own between exchanges.
    local: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def of(cls, model: nn.Module, world: World, method: MethodConfig, **known: Any) -> Engine:
        """The engine of a method, for a trainer whose replicas begin with equal weights: nothing is broadcast.

        `known`: seed, steps, constrain and layers, as for `LocalUpdates`; an engine may have no use for them.
        """

    @classmethod
    def check(cls, method: MethodConfig, replicas: int) -> None:
        """Raise ConfigError for settings of a method that mean nothing to an engine without local updates."""
        default = MethodConfig(method.exchange, route=method.route, boundary=method.boundary)
        for field in dataclasses.fields(method):
            if getattr(method, field.name) != getattr(default, field.name):
                raise ConfigError(f"method.{field.name} means nothing with method.exchange = {method.exchange}")

    def data_step(self, step: int, tokens: int) -> int:
        """Return the step of whose batch of data a replica takes its own in `step`, where each has so many tokens."""
        return step

    def average_gradients(self) -> None:
        """Between the backward pass and clipping."""

    def step(self, tokens: int = 1) -> dict[str, float]:
        """After an inner step: exchange what is due. Returns what is worth logging.

        `tokens`: how many the replica has trained on in this step, for engines by which they weigh.
        """
        return {}

    def finish(self) -> dict[str, float]:
        """After the last inner step: apply what is under way, and exchange what has changed since. As `step`."""
        return {}

    def evaluated(self, which: Evaluated = "agreed") -> contextlib.AbstractContextManager[None]:
        """Inside, the model holds the parameters to evaluate."""
        return contextlib.nullcontext()

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The parameters to evaluate, whole, by name; the mean of the replicas' own where they have no one model.

        Every rank must ask.
        """

    def map(self, change: Change) -> None:
        """Change in place what the engine keeps of parameters; waits for what travels."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return what to checkpoint beside the model and the inner optimizer, transfers that it waits for included.

        It is this rank's own: every rank saves one, and loads its own.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state_dict` gave."""

    def sent_bytes(self, steps: int) -> dict[str, int]:
        """Closed form of this rank's bytes on the replica axis in `steps` steps, by purpose; {} if none is claimed."""
        return {}


class DataParallel(Engine):
    """Gradients averaged over replicas at every step; parameters without a gradient count as zero.

    Args:
        model: a module or its parameters by name. Those that want no gradient are left alone.
        world: the ranks.
        broadcast: begin with the weights (and buffers) of replica 0. Buffers are each replica's own from then on.
    """

    names = ("gradients",)

    def __init__(self, model: nn.Module | Mapping[str, Tensor], world: World, *, broadcast: bool = True):
        check_ranks(world)
        self.named, self.world, self._is_averaged = named_parameters(model), world, False
        if broadcast and world.replicas > 1:
            broadcast_weights(model, world)

    @classmethod
    def of(cls, model: nn.Module, world: World, method: MethodConfig, **known: Any) -> DataParallel:
        """Data-parallel training; a method has nothing else to say of it."""
        return cls(model, world, broadcast=False)

    def average_gradients(self) -> None:
        """Replace gradients by their mean over replicas."""
        self._is_averaged = True
        if self.world.replicas == 1:
            return
        for p in self.named.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        grads = [p.grad for p in self.named.values()]
        unflatten_into(self.world.mean(flatten(grads).float(), purpose="gradients"), grads)

    def step(self, tokens: int = 1) -> dict[str, float]:
        """After an inner step. Raises ConfigError where its gradients were not averaged, so that replicas part."""
        if not self._is_averaged:
            raise ConfigError(
                "data-parallel training averages gradients: call average_gradients() after each backward pass, before"
                " the optimizer's step"
            )
        self._is_averaged = False
        return {}

    def weights(self) -> dict[str, Tensor]:
        """The parameters, which all replicas share."""
        return self.named

    def sent_bytes(self, steps: int) -> dict[str, int]:
        """Return the bytes of `steps` means of all gradients in fp32."""
        numel = sum(p.numel() for p in self.named.values())
        return {"gradients": steps * mean_bytes(numel, 4, self.world.replicas, self.world.replica)}


class Independent(Engine):
    """Replicas never exchange anything; but where routes are random, stages train on what other replicas computed."""

    names = ("none",)
    one_model = False
    local = True

    def __init__(self, model: nn.Module | Mapping[str, Tensor], world: World):
        self.named, self.world = named_parameters(model), world
        self.parameters = list(self.named.values())

    @classmethod
    def of(cls, model: nn.Module, world: World, method: MethodConfig, **known: Any) -> Independent:
        """Independent replicas; a method has nothing else to say of them."""
        return cls(model, world)

    def evaluated(self, which: Evaluated = "agreed") -> contextlib.AbstractContextManager[None]:
        """Each replica's own parameters ("agreed"), or those of the first or their mean."""
        if which == "agreed":
            return contextlib.nullcontext()
        return holding(self.parameters, of_replicas(self.world, self.parameters, which))

    def weights(self) -> dict[str, Tensor]:
        """The mean of the replicas' parameters."""
        mean = of_replicas(self.world, self.parameters, "replica_average").split([p.numel() for p in self.parameters])
        return {n: v.view(p.shape) for (n, p), v in zip(self.named.items(), mean, strict=True)}
