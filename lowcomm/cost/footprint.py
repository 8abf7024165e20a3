"""The memory that a machine needs for a run, from its configuration alone.

Everything is counted in fp32, as `trainer` keeps it; under bf16 autocast activations take less, and weights are held
once more in bf16 (`cast_bytes`).

Activations are counted at the worst moment of a step in GPipe's order: all micro-batches have gone forward, and none
has come back. The count is close, not exact: tests hold it within a fifth of what autograd saves.
"""

from __future__ import annotations

import collections
import functools
import math

import torch

from lowcomm.choices import choose
from lowcomm.comm.shares import encoded_mean_in_shares
from lowcomm.cost.predict import kinds_of_stage, message_bytes, stage_model, stage_numel
from lowcomm.experiment.config import RunConfig
from lowcomm.methods.boundary import make_boundary
from lowcomm.methods.config import BoundaryConfig
from lowcomm.methods.inner import InnerOptimizer
from lowcomm.methods.partial import pieces
from lowcomm.methods.plan import Plan
from lowcomm.methods.streaming import layer_of
from lowcomm.methods.subspace import moments_in_means, overhead_bytes
from lowcomm.model.accounting import MemoryCount, memory, parameter_shapes, parameters, trained_parameters
from lowcomm.model.config import ModelConfig


def stage_memory(config: RunConfig, stage: int) -> MemoryCount:
    """Count the bytes that a stage's machine holds, without activations.

    Where outer state is offloaded, NoLoCo's mean of the next peers' slow weights is still on the device.
    """
    m, numel = config.method, stage_numel(config, stage)
    buffers, fetched = 0, None
    if config.exchanges_parameters:
        plan = config.plan(stage)
        waiting = plan.outer.needs_peers
        stepped, said = 1 + len(plan.outer.buffers(torch.empty(0))), 1 + (m.error_feedback > 0)
        buffers = stepped + said - 1 + waiting
        if m.offload_outer:
            fetched = _most_fetched(plan, max(m.overlap_steps), stepped, said) + waiting * numel
    inner = choose(InnerOptimizer, config.train.optimizer, "train.optimizer")
    in_means = config.constraint is not None and not m.boundary.replicas  # else some replicas have none
    untrained, fewer = _spared(
        config.model, stage, config.stages, m.sliced, m.slices, inner, m.boundary if in_means else None
    )
    return memory(
        numel,
        moments=inner.moments,
        outer_buffers=buffers,
        fetched=fetched,
        trained=numel - untrained,
        fewer=fewer,
    )


@functools.lru_cache(maxsize=256)  # a planner asks it of the same stages for each method
def _spared(
    c: ModelConfig,
    stage: int,
    stages: int,
    sliced: tuple[str, ...],
    slices: int,
    inner: type[InnerOptimizer],
    boundary: BoundaryConfig | None,
) -> tuple[int, int]:
    """Return the number of a stage's values that a replica does not train, and of moments that it does not keep.

    sliced, slices: the parts that are sliced, and into how many. inner: the inner optimizer. boundary: the settings of
    a subspace whose second moments are means, None where there are no means.
    """
    part, shapes = stage_model(c, stage, stages), parameter_shapes(c, stage=stage, stages=stages)
    fewer = inner.fewer_moments(shapes)
    if inner.moments > 1 and boundary is not None:
        mine = (piece for piece in pieces(shapes, sliced, slices, c.layers) if piece.owner in (None, 0))
        fewer += moments_in_means(c, boundary, ((piece.parameter, piece.numel) for piece in mine))
    return parameters(part).total - trained_parameters(part, sliced, slices).total, fewer


def _most_fetched(plan: Plan, tau: int, stepped: int, said: int) -> int:
    """Return the number of values of outer state on the device at the worst step of a round.

    They are those of fragments that are applied at the step, and of others that are sent. A fragment that is sent needs
    the parameters last agreed, and its residual if it has one: `said` tensors of its size. One that is applied, `tau`
    steps later, needs the parameters last agreed and the outer optimizer's buffers: `stepped` tensors.
    """
    held, h = collections.Counter(), plan.method.sync_every_steps  # of the steps of a round
    for fragment in plan.fragments:
        held[(fragment.offset + tau) % h] += stepped * fragment.numel
        held[fragment.offset % h] += (said if tau else said - 1) * fragment.numel
    return max(held.values())


def activation_bytes(config: RunConfig, stage: int) -> int:
    """Count the bytes of activations, and of their gradients, that a stage holds at the worst moment of a step.

    The forward passes leave the input of every block for the backward passes with `train.recompute`, and without it the
    intermediate results of every block: of one micro-batch, or of all where there are several stages. Then there is
    also room, for each micro-batch, for the gradients that come back, or at the last stage for those of the residual
    stream. A backward pass adds, of one micro-batch, the larger of what the head has at the last stage (logits,
    log-probabilities and their gradient) and, with `train.recompute`, the intermediate results of a block.
    """
    c, t = config.model, config.train
    micro_batches = t.accumulation if config.stages > 1 else 1
    layers = stage_model(c, stage, config.stages).layers
    q, kv = c.heads * c.width_of_head, c.key_value_heads * c.width_of_head
    inside = 4 * c.dim + 3 * q + 2 * kv + (4 if c.mlp == "gated" else 2) * c.ffn_dim
    waiting = layers * (c.dim if t.recompute else inside)
    last = stage == config.stages - 1
    at_once = max(last * 3 * c.vocab_size, t.recompute * inside)
    gradients = 0
    if config.stages > 1:
        wide = max(message_bytes(config, replica)[1] for replica in (0, config.method.boundary.replicas))
        gradients = 4 * config.micro_batch_tokens * c.dim if last else wide
    return 4 * config.micro_batch_tokens * (micro_batches * waiting + at_once) + micro_batches * gradients


def kept_of_messages(config: RunConfig, stage: int) -> int:
    """Count the bytes of the errors that a stage keeps for error feedback at its boundaries; 0 without it.

    There is one error for each micro-batch and direction: all stages but the last send activations, and all but the
    first send gradients.
    """
    each = make_boundary(config.method.boundary, config.model).kept_bytes(config.micro_batch_tokens)
    return config.train.accumulation * each * ((stage < config.stages - 1) + (stage > 0))


def cast_bytes(config: RunConfig, stage: int) -> int:
    """Count the bytes of the weights in bf16 that a step under autocast holds at a stage; 0 without autocast.

    They are the weights of all matrices, once for each micro-batch whose backward pass is still to come; with
    `train.recompute` they are those of one block, or of the head, at a time.
    """
    t = config.train
    if t.precision != "bf16":
        return 0
    largest, whole = _matrices(config.model, stage, config.stages)
    return 2 * (largest if t.recompute else whole * (t.accumulation if config.stages > 1 else 1))


@functools.lru_cache(maxsize=256)
def _matrices(c: ModelConfig, stage: int, stages: int) -> tuple[int, int]:
    """Return the number of values in a stage's matrices, as (the most in a block or in the head, all).

    The embedding is not counted.
    """
    shapes = parameter_shapes(c, stage=stage, stages=stages)
    layers, parts = layer_of(shapes), collections.Counter[int | None]()
    for name, shape in shapes.items():
        if len(shape) == 2 and not name.startswith("embedding."):
            parts[layers.get(name)] += math.prod(shape)
    return max(parts.values()), parts.total()


def _held_for_mean(plan: Plan, fragment: int) -> int:
    """Return the bytes of the decoded messages that a mean needs at once; a fragment has so many bytes in fp32.

    Where a mean is reduced in shares, a member has its share of each.
    """
    members = plan.peers.most(plan.replicas)
    if not plan.mean.at_once:
        return 0
    in_shares = plan.mean.by_coordinate and encoded_mean_in_shares(fragment // 4, plan.codec, members)
    return fragment if in_shares else members * fragment


def node_bytes(config: RunConfig) -> int:
    """Return the memory, in bytes, of the machine of a run that holds most.

    It is the sum of weights, gradients, optimizer and outer state; the largest of activations, the copy of all
    gradients that is averaged, and what an exchange that is waited for holds (a message of a fragment and the mean that
    comes back, and with a mean that needs them at once the messages of all members); a fragment on its way, with these
    messages, where exchanges overlap with training; weights in bf16; errors of messages that are kept; and a subspace's
    tables.
    """
    most, m = 0, config.method
    for stage in kinds_of_stage(config):
        numel, waited, under_way = stage_numel(config, stage), 0, 0
        if config.exchanges_parameters:
            plan = config.plan(stage)
            fragment = 4 * max(f.numel for f in plan.fragments)
            whole = _held_for_mean(plan, fragment)
            waited, under_way = (0, fragment + whole) if max(m.overlap_steps) > 0 else (2 * fragment + whole, 0)
        copy = 4 * numel * (m.exchange == "gradients" and config.replicas > 1)
        held = stage_memory(config, stage).on_device + max(activation_bytes(config, stage), copy, waited) + under_way
        held += kept_of_messages(config, stage) + cast_bytes(config, stage)
        most = max(most, held)
    if config.constraint is not None:
        tables = overhead_bytes(config.model, m.boundary)
        most += sum(nbytes for what, nbytes in tables.items() if what != "second_moment")
    return most
