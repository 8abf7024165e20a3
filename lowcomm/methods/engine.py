"""Engines: what a training loop calls so that replicas come to agree; here those that keep no outer state.

    for batch in loader:
        loss(model, batch).backward()
        engine.average_gradients()      for data-parallel training; other engines do nothing here
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

#: The dtypes that parameters may have: what is agreed is kept in fp32, which holds all their values.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Which parameters to evaluate: those last agreed, the first replica's own, or the mean of all replicas' own.
Evaluated = Literal["agreed", "first_replica", "replica_average"]
#: Values of parameters, or of parts of them, in their shapes and with the parameters' names, to be changed in place.
Values = Iterable[tuple[str, Tensor]]
Change = Callable[[Values], None]


def named_parameters(model: nn.Module | Mapping[str, Tensor], *, trained: bool = True) -> dict[str, Tensor]:
    """Return parameters by name, of a module or as given; with `trained`, only those that require a gradient.

    Raises ConfigError for what is neither, where there are none, and where one that requires a gradient has none of
    `DTYPES`.
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
    """Raise ConfigError where `world` is not a `World`."""
    if not isinstance(world, World):
        raise ConfigError(f"an engine takes the ranks, as lowcomm.world() gives them, not {brief(world)}")


def broadcast_weights(model: nn.Module | Mapping[str, Tensor], world: World) -> None:
    """Overwrite all parameters and buffers with those of replica 0, as DistributedDataParallel does when it is made."""
    tensors = named_parameters(model, trained=False)
    if isinstance(model, nn.Module):
        tensors |= {f"buffer {name}": b for name, b in model.named_buffers()}
    for tensor in tensors.values():
        packed = tensor.detach().contiguous().view(-1).view(torch.uint8).clone()
        received = world.broadcast(packed, purpose="initial weights")
        with torch.no_grad():
            tensor.copy_(received.view(tensor.dtype).view(tensor.shape))


def weight_spread(world: World, parameters: list[Tensor]) -> float:
    """Return the standard deviation of the replicas' weights, over all stages; every rank must call it.

    It is sqrt(mean over weights and replicas of (theta_m - mean)^2), the same on every rank.
    """
    own = flatten(parameters).float()
    off = own.sub(world.mean(own.clone(), purpose="analysis")).double()
    total = torch.tensor([off.square().sum().item(), off.numel()], dtype=torch.float64, device=world.device)
    squares, count = world.sum(total, purpose="analysis", axis="world").tolist()
    return (squares / count) ** 0.5


@contextlib.contextmanager
def holding(parameters: list[Tensor], values: Tensor) -> Iterator[None]:
    """Let parameters hold other values [n], flat, inside the context; when it ends they get their own back."""
    own = flatten(parameters)
    unflatten_into(values, parameters)
    try:
        yield
    finally:
        unflatten_into(own, parameters)


def of_replicas(world: World, parameters: list[Tensor], which: Evaluated) -> Tensor:
    """Return, flat, the first replica's own parameters or ("replica_average") the mean of all replicas' own, in fp32.

    Every replica must call it. Raises ConfigError where `which` is not one of `Evaluated`.
    """
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
        """Return the engine of a method, for a trainer whose replicas begin with equal weights: nothing is broadcast.

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
        """Return the step, from 1, whose batch of its own data a replica trains on in `step`.

        `tokens` is the number of tokens that a replica trains on per step.
        """
        return step

    def average_gradients(self) -> None:
        """Average gradients over replicas, where the engine does so; called between the backward pass and clipping."""

    def step(self, tokens: int = 1) -> dict[str, float]:
        """Exchange what is due after an inner step, and return what is worth logging, by name.

        `tokens` is the number that the replica has trained on in this step, for engines that weigh replicas by it.
        """
        return {}

    def finish(self) -> dict[str, float]:
        """Apply what is under way after the last inner step, and exchange what has changed since.

        Returns what is worth logging, as `step` does.
        """
        return {}

    def evaluated(self, which: Evaluated = "agreed") -> contextlib.AbstractContextManager[None]:
        """Return a context inside which the model holds the parameters to evaluate."""
        return contextlib.nullcontext()

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Return the parameters to evaluate, whole, by name; the mean of the replicas' own where there is no one model.

        Every rank must call it.
        """

    def map(self, change: Change) -> None:
        """Apply `change` in place to whatever the engine keeps of parameters, once what is under way has arrived."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state to checkpoint beside the model and the inner optimizer, by name.

        Transfers under way are part of it, so it waits for them. It is this rank's own: every rank saves one, and loads
        its own.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state that `state_dict` returned."""

    def sent_bytes(self, steps: int) -> dict[str, int]:
        """Return the bytes that this rank sends on the replica axis in `steps` steps, by purpose, in closed form.

        It is {} where the engine claims none.
        """
        return {}


class DataParallel(Engine):
    """The engine that averages gradients over replicas at every step; a missing gradient counts as zero.

    Args:
        model: a module, or its parameters by name. Those that do not require a gradient are left alone.
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
        """Return the engine of data-parallel training, in which no setting of the method has a part."""
        return cls(model, world, broadcast=False)

    def average_gradients(self) -> None:
        """Replace gradients, in place, by their mean over replicas, which is computed in fp32."""
        self._is_averaged = True
        if self.world.replicas == 1:
            return
        for p in self.named.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        grads = [p.grad for p in self.named.values()]
        unflatten_into(self.world.mean(flatten(grads).float(), purpose="gradients"), grads)

    def step(self, tokens: int = 1) -> dict[str, float]:
        """Check that the gradients of this step were averaged; nothing is left to exchange.

        Raises ConfigError where they were not, as replicas would then drift apart.
        """
        if not self._is_averaged:
            raise ConfigError(
                "data-parallel training averages gradients: call average_gradients() after each backward pass, before"
                " the optimizer's step"
            )
        self._is_averaged = False
        return {}

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters, which all replicas share, by name."""
        return self.named

    def sent_bytes(self, steps: int) -> dict[str, int]:
        """Return the bytes of `steps` means of all gradients in fp32."""
        numel = sum(p.numel() for p in self.named.values())
        return {"gradients": steps * mean_bytes(numel, 4, self.world.replicas, self.world.replica)}


class Independent(Engine):
    """Replicas that never exchange anything.

    Where routes are random, their stages still train on what other replicas have computed.
    """

    names = ("none",)
    one_model = False
    local = True

    def __init__(self, model: nn.Module | Mapping[str, Tensor], world: World):
        self.named, self.world = named_parameters(model), world
        self.parameters = list(self.named.values())

    @classmethod
    def of(cls, model: nn.Module, world: World, method: MethodConfig, **known: Any) -> Independent:
        """Return the engine of independent replicas, in which no setting of the method has a part."""
        return cls(model, world)

    def evaluated(self, which: Evaluated = "agreed") -> contextlib.AbstractContextManager[None]:
        """Return a context with each replica's own parameters ("agreed"), the first one's, or the mean of all."""
        if which == "agreed":
            return contextlib.nullcontext()
        return holding(self.parameters, of_replicas(self.world, self.parameters, which))

    def weights(self) -> dict[str, Tensor]:
        """Return the mean of the replicas' parameters, in fp32, by name."""
        mean = of_replicas(self.world, self.parameters, "replica_average").split([p.numel() for p in self.parameters])
        return {n: v.view(p.shape) for (n, p), v in zip(self.named.items(), mean, strict=True)}
