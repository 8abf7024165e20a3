"""What a machine must hold for a run, from its configuration alone; fp32, as `trainer` has it.

Of activations this says what is alive at the worst moment of a step in GPipe's order: all micro-batches have gone
forward, none has come back. It is close, not exact: tests hold it within a fifth of what autograd saves.
"""

from __future__ import annotations

import dataclasses

from lowcomm.accounting import MemoryCount, memory, parameters, trained_parameters
from lowcomm.blank import blank_engine, kinds_of_stage, layers_of, stage_numel
from lowcomm.config import RunConfig
from lowcomm.predict import message_bytes
from lowcomm.subspace import overhead_bytes


def stage_memory(config: RunConfig, stage: int) -> MemoryCount:
    """What a stage's machine holds, activations apart.

    Where outer state is offloaded, NoLoCo's mean of the next peers' slow weights is still on the device.
    """
    m, numel = config.method, stage_numel(config, stage)
    part = dataclasses.replace(config.model, layers=layers_of(config, stage))
    whole, trained = parameters(part), trained_parameters(part, m.sliced, m.slices)
    buffers, fetched, waiting = 0, None, False
    if m.exchange == "parameters":
        fragments = blank_engine(config, stage).fragments
        waiting = fragments[0].outer.needs_peers
        buffers = len(fragments[0].state()) + waiting
        fetched = max(f.numel for f in fragments) if m.offload_outer else None
    found = memory(
        numel,
        inner=config.train.optimizer,
        outer_buffers=buffers,
        fetched=fetched,
        trained=numel - (whole.total - trained.total),
    )
    if waiting and fetched is not None:
        found = dataclasses.replace(found, outer_on_device=4 * (fetched * (buffers - 1) + numel))
    return found


def activation_bytes(config: RunConfig, stage: int) -> int:
    """What the forward passes of a step leave at a stage for the backward passes, and what one of these takes.

    With `train.recompute` the input of every block and the insides of one, without it the insides of every block; of
    all micro-batches where there are stages, and then their messages too. At the last stage logits, log-probabilities
    and their gradient of one micro-batch, and where there are stages the gradient of the residual stream of all.
    """
    c, t = config.model, config.train
    tokens = config.local_batch // t.accumulation * t.seq_len
    micro_batches = t.accumulation if config.stages > 1 else 1
    layers = layers_of(config, stage)
    q, kv = c.heads * c.width_of_head, c.key_value_heads * c.width_of_head
    inside = 4 * c.dim + 3 * q + 2 * kv + (4 if c.mlp == "gated" else 2) * c.ffn_dim
    waiting = layers * (c.dim if t.recompute else inside)
    values = micro_batches * waiting + (inside if t.recompute else 0)
    messages = 0
    if stage == config.stages - 1:
        values += 3 * c.vocab_size + (config.stages > 1) * micro_batches * c.dim
    if config.stages > 1:
        activations, gradients = message_bytes(config)
        messages = micro_batches * ((stage > 0) * activations + (stage < config.stages - 1) * gradients)
    return 4 * tokens * values + messages


def node_bytes(config: RunConfig) -> int:
    """Memory of the machine that holds most: weights, gradients, optimizer and outer state, and the larger of
    activations and the copy of all gradients that is averaged; and a subspace's tables."""
    most = 0
    for stage in kinds_of_stage(config):
        copy = 4 * stage_numel(config, stage) * (config.method.exchange == "gradients" and config.replicas > 1)
        held = stage_memory(config, stage).on_device + max(activation_bytes(config, stage), copy)
        most = max(most, held)
    if config.method.boundary.kind == "subspace":
        tables = overhead_bytes(config.model, config.method.boundary)
        most += sum(nbytes for nbytes in tables.values() if nbytes > 0)
    return most
