"""FSDP2 as a baseline: torch's `fully_shard`, its collectives carried and billed by World.

Parameters, gradients and optimizer state are sharded over replicas by dimension 0; each block is
gathered before its forward and its backward pass and its gradients are reduce-scattered after.
Because World adds in rank order, the gradients are those of `engine.DataParallel`, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowcomm.comm.world import World
from lowcomm.methods.config import MethodConfig
from lowcomm.methods.engine import Engine
from lowcomm.model.decoder import Decoder
from lowcomm.settings import ConfigError


class _Allocate:
    """The part of FSDP2's interface of collectives that allocates their buffers."""

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Allocate):
    """FSDP2's all-gather, as an exchange of `World` among replicas."""

    def __init__(self, world: World):
        self.world = world

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group, async_op: bool = False) -> None:
        # FSDP2 hands over a view into `output_tensor`; what travels must not be overwritten meanwhile.
        parts = self.world.exchange(input_tensor.clone(), purpose="fsdp gather")
        output_tensor.copy_(torch.cat(parts))


class _ReduceScatter(_Allocate):
    """FSDP2's reduce-scatter, as that of `World` over replicas."""

    def __init__(self, world: World):
        self.world = world

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group, op, async_op: bool = False) -> None:
        # FSDP2 passes AVG (or a sum pre-scaled by itself); the shares are equal by its padding.
        share = self.world.reduce_scatter(input_tensor, purpose="fsdp scatter")
        output_tensor.copy_(share)
        if "AVG" in str(op):
            output_tensor.div_(self.world.replicas)


class FullySharded(Engine):
    """The engine of `exchange = fsdp`: everything happens inside the model's hooks.

    It claims no closed form of its bytes, as padding and prefetch are FSDP2's own; the ledger has what was sent. Raises
    ConfigError where ranks are threads of one process.
    """

    names = ("fsdp",)

    def __init__(self, model: Decoder, world: World):
        if world.transport.in_one_process:
            raise ConfigError("method.exchange = fsdp needs processes (torchrun); threads share one set of hooks")
        # A second or so, which nobody else need wait for.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.model = model
        mesh = init_device_mesh(world.device.type, (world.replicas,))
        for module in [*model.blocks.values(), model]:
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
            module.set_custom_all_gather(_AllGather(world))
            module.set_custom_reduce_scatter(_ReduceScatter(world))

    @classmethod
    def of(cls, model: Decoder, world: World, method: MethodConfig, **known: Any) -> FullySharded:
        """Return the engine that shards `model` in place; no setting of the method has a part in that."""
        return cls(model, world)

    def weights(self) -> dict[str, Tensor]:
        """Return copies of all parameters, gathered whole, by name; every rank must call it."""
        modules = [*self.model.blocks.values(), self.model]
        for module in modules:
            module.unshard()
        whole = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for module in modules:
            module.reshard()
        return whole
