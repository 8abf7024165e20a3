"""Seconds and bytes of a run on machines that one does not have, from its configuration alone.

Nothing here says again what is sent: turns, groups and bytes are the plan's (`methods.plan`), boundaries' messages
those of `methods.boundary`. FLOPs are `accounting`'s, time is `simulate`'s: a step of the pipeline in GPipe's order,
then the turns of fragments on the link of each stage,

    a step begins       once every stage has what was to be applied after the step before
    step's end          + gradient norm over the stages; where gradients are exchanged, + their mean over replicas
    a turn after step t the fragment goes on its stage's wire, and is awaited after step t + tau
    slow weights        (NoLoCo) go on the wire when a fragment is applied, and are awaited at its next application

A rank has a wire of its own on each axis, as in `wire` and `replay`. Machines that are uneven make a step's computing
longer, by as much as `latency.uneven` draws; messages' latencies count as much as the largest of those that are waited
for (`latency.expected_max`). What a machine must hold is `footprint`'s. Where only some replicas compress between their
stages (`boundary.replicas`), the others have links there that hold nobody up.

Seconds are a lower bound: a link carries nothing but messages, at its full rate from their first byte on. Headers of
packets (5 to 6 % of an Ethernet frame), TCP's slow start and packets sent again all come on top.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowcomm.choices import choose
from lowcomm.comm.shares import mean_bytes
from lowcomm.cost.latency import expected_max, sigma_of, uneven
from lowcomm.cost.simulate import Seconds, Stages, Timeline, gpipe_step
from lowcomm.experiment.config import RunConfig
from lowcomm.methods.boundary import make_boundary
from lowcomm.methods.inner import InnerOptimizer
from lowcomm.methods.plan import OUTER, SLOW_WEIGHTS, Plan
from lowcomm.methods.subspace import move_bytes, overhead_flops
from lowcomm.model.accounting import forward_flops, parameter_shapes, parameters, training_flops
from lowcomm.model.config import Constraint, ModelConfig, stage_layers


@dataclass(frozen=True)
class Links:
    """The link between any two machines; `jitter` and `stragglers` are ratios of standard deviation to mean.

    Raises ValueError where a number is out of range.
    """

    mbit_per_s: ArrayLike
    latency_ms: float = 0.0
    jitter: float = 0.0  # of a message's latency
    stragglers: float = 0.0  # of the time that a machine computes for a step

    def __post_init__(self) -> None:
        if not np.all(np.asarray(self.mbit_per_s) > 0):
            raise ValueError(f"mbit_per_s must be above 0, got {self.mbit_per_s}")
        for name, most in (("latency_ms", 1e6), ("jitter", 100), ("stragglers", 100)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be from 0 to {most:g}, got {getattr(self, name)}")


def stage_flops(config: RunConfig) -> list[tuple[float, float]]:
    """Return the FLOPs (forward, backward) of a micro-batch at each stage.

    Those of compressing messages and of keeping to a subspace are counted with the backward pass, equally at each
    stage, and so are each stage's products in a step of the inner optimizer. At a pipeline's last stage the way back
    through the head is among the forward passes, as `pipeline` has it.
    Raises ValueError for re-parametrised models, whose products with U are not counted stage by stage.
    """
    if config.method.boundary.mode == "reparametrised":
        raise ValueError("re-parametrised models are not predicted: method.boundary.mode = reparametrised")
    c, t, m, found = config.model, config.train, config.method, []
    sequences = config.local_batch // t.accumulation
    logits = 2 * sequences * t.seq_len * c.dim * c.vocab_size
    for stage in range(config.stages):
        part = stage_model(c, stage, config.stages)
        last = stage == config.stages - 1
        forward = forward_flops(part, sequences, t.seq_len) - (not last) * logits
        whole = training_flops(
            part,
            sequences,
            t.seq_len,
            sliced=m.sliced,
            slices=m.slices,
            through=m.reached_slices,
            recompute=t.recompute,
        )
        whole -= (not last) * 3 * logits
        if last and config.stages > 1:
            forward += 2 * logits
        found.append((float(forward), float(whole - forward)))
    over = overhead_flops(c, m.boundary, sequences, t.seq_len, config.stages)
    often = over["boundaries"] + over["watching"] + over["projection"] / t.accumulation
    if m.boundary.update_every_steps:
        often += over["update"] / m.boundary.update_every_steps / t.accumulation
    own = [_step_flops(t.optimizer, c, config.constraint, stage, config.stages) for stage in range(config.stages)]
    return [(f, b + often / config.stages + step / t.accumulation) for (f, b), step in zip(found, own, strict=True)]


@functools.lru_cache(maxsize=256)
def _step_flops(optimizer: str, c: ModelConfig, constraint: Constraint | None, stage: int, stages: int) -> int:
    """Return the FLOPs of the products in a step of the inner optimizer of this name on the parameters of a stage."""
    inner = choose(InnerOptimizer, optimizer, "train.optimizer")
    return inner.step_flops(parameter_shapes(c, constraint, stage=stage, stages=stages))


def message_bytes(config: RunConfig, replica: int = 0) -> tuple[int, int]:
    """Return the bytes of a micro-batch's messages at a boundary of a replica: (activations, gradients).

    They are in the boundary's codec, which is fp32 unless another is set, under bf16 autocast as well.
    """
    boundary = make_boundary(config.method.boundary.of_replica(replica), config.model)
    tokens = config.micro_batch_tokens
    return boundary.activation_bytes(tokens), boundary.gradient_bytes(tokens)


def kinds_of_stage(config: RunConfig) -> dict[int, int]:
    """Return {first stage of a kind: number of stages of that kind}.

    Stages are of one kind where they have equally many layers and are alike in being the first, the last or neither.
    """
    kinds: dict[tuple[bool, bool, int], list[int]] = {}
    for stage in range(config.stages):
        layers = stage_model(config.model, stage, config.stages).layers
        kinds.setdefault((stage == 0, stage == config.stages - 1, layers), []).append(stage)
    return {stages[0]: len(stages) for stages in kinds.values()}


@functools.lru_cache(maxsize=256)  # a planner asks it of the same stages for each method
def stage_model(model: ModelConfig, stage: int, stages: int) -> ModelConfig:
    """Return the model with only as many layers as a stage has; its embedding and its head stay whole."""
    return dataclasses.replace(model, layers=len(stage_layers(model.layers, stages, stage)))


def stage_numel(config: RunConfig, stage: int) -> int:
    """Return the number of parameters of a stage."""
    return parameters(config.model, config.constraint, stage=stage, stages=config.stages).total


def largest_stage_numel(config: RunConfig) -> int:
    """Return the number of parameters of the stage that has most."""
    return max(stage_numel(config, stage) for stage in kinds_of_stage(config))


@dataclass(frozen=True)
class Turn:
    """The bytes that a rank sends for a purpose at a turn of a fragment: the mean over all replicas, and the most."""

    mean: float
    most: int
    phases: int  # swaps of messages, one after the other


def turns(config: RunConfig, stage: int) -> list[dict[str, Turn]]:
    """Return, for each fragment of a stage, what a rank sends at the second turn and at all later ones, by purpose."""
    return _turns(config.plan(stage))


@functools.lru_cache(maxsize=256)
def _turns(plan: Plan) -> list[dict[str, Turn]]:
    settings = tuple(value for key, value in vars(plan.method).items() if key != "sync_every_steps")
    sections = tuple(tuple(fragment.alike.items()) for fragment in plan.fragments)
    return _turns_of(_WhateverRounds(settings, sections, plan.replicas, plan.seed, plan))


@dataclass(frozen=True)
class _WhateverRounds:
    """A plan that equals those with longer or shorter rounds, as what is sent at a turn does not depend on these."""

    settings: tuple[Any, ...]
    sections: tuple[tuple[Any, ...], ...]  # of each fragment
    replicas: int
    seed: int
    plan: Plan = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=256)
def _turns_of(asked: _WhateverRounds) -> list[dict[str, Turn]]:
    plan = asked.plan
    found: dict[Any, dict[str, Turn]] = {}  # where all always meet, once for fragments of the same sections
    keys = [sections if plan.peers.one_model else index for index, sections in enumerate(asked.sections)]
    for index, key in enumerate(keys):
        if key not in found:
            sent = [plan.sent_bytes(index, 1, replica) for replica in range(plan.replicas)]
            phases = plan.phases(index)
            by_purpose = {purpose: [s[purpose] for s in sent] for purpose in sent[0]}
            found[key] = {p: Turn(sum(some) / len(some), max(some), phases[p]) for p, some in by_purpose.items()}
    return [found[key] for key in keys]


def _met(config: RunConfig) -> int:
    """Return how many replicas wait for each other: those of the largest group, where groups differ in size."""
    if config.exchanges_parameters:
        return config.plan().peers.most(config.replicas)
    return 1 if config.method.exchange == "none" else config.replicas


def _moved_bytes(config: RunConfig) -> tuple[float, float]:
    """Return the bytes per step that a rank of the last stage sends to move the subspace, 0.0 where it does not move.

    They are (bytes to the other replicas, bytes to the stages of its own pipeline).
    """
    every = config.method.boundary.update_every_steps
    if not every:
        return 0.0, 0.0
    gram, basis = move_bytes(config.model.dim, config.method.boundary.rank, config.replicas, config.stages)
    return gram / every, basis / every


def sent_per_step(config: RunConfig) -> tuple[float, float]:
    """Return the bytes that all ranks together send per step: (between replicas, between stages).

    Evaluation is not counted, nor the norm of the gradients, which is a single number.
    """
    m, replicas = config.method, config.replicas
    among, between = (replicas * nbytes for nbytes in _moved_bytes(config))
    if config.stages > 1:
        some = m.boundary.replicas or replicas
        nbytes = some * sum(message_bytes(config)) + (replicas - some) * sum(message_bytes(config, some))
        between += nbytes * config.train.accumulation * (config.stages - 1)
    for stage, alike in kinds_of_stage(config).items():
        if m.exchange == "gradients":
            numel = stage_numel(config, stage)
            among += alike * sum(mean_bytes(numel, 4, replicas, r) for r in range(replicas))
        elif config.exchanges_parameters:
            a_turn = sum(part.mean for turn in turns(config, stage) for part in turn.values())
            among += alike * replicas * a_turn / m.sync_every_steps
    return among, between


@dataclass(frozen=True)
class Prediction:
    """The time of one inner step, its share of exchanges included; fields are arrays where the links' rate is one.

    step_seconds: from one step to the next. utilisation: the share of it in which a machine computes, the mean over
    machines, fast and slow ones alike. trained: the share of a step's global batch that is trained on in it, which is
    below 1 where slow replicas take fewer inner steps.
    """

    step_seconds: NDArray[np.float64]
    utilisation: NDArray[np.float64]
    trained: float = 1.0


def predict(
    config: RunConfig,
    compute: Sequence[tuple[float, float]],
    links: Links,
    within: Links | Sequence[Links] | None = None,
    speeds: Sequence[float] | None = None,
) -> Prediction:
    """Return how long a step of a run takes, and how much of that time machines compute.

    compute: seconds (forward, backward) of a micro-batch at each stage, e.g. `stage_flops` over a machine's FLOP/s.
    links: between replicas; and between the stages of one, unless `within` has others, for all boundaries or for each.
    speeds: of each replica, as a share of the speed that `compute` stands for (None: 1). All wait for the slowest, but
    where whole models train by local updates: there each takes as many inner steps from one turn of a fragment to the
    next as leave nobody waiting, and one or more (`lowcomm.methods.elastic`).

    Raises ValueError for sharded models, whose traffic is FSDP2's own; where `compute` or `within` is not as long as
    there are stages or boundaries; and for speeds that are not one for each replica, above 0 and at most 1.
    """
    if speeds is not None:
        if len(speeds) != config.replicas or not all(0 < speed <= 1 for speed in speeds):
            raise ValueError(f"speeds must be {config.replicas}, above 0 and at most 1, got {list(speeds)}")
        apart, taken = 1, [1] * config.replicas
        if config.exchanges_parameters and config.stages == 1:
            apart = config.method.sync_every_steps // len(config.plan().fragments)
            taken = [max(1, math.ceil(speed * apart - 1e-9)) for speed in speeds]
        busy = [steps / (speed * apart) for steps, speed in zip(taken, speeds, strict=True)]
        longest = max(busy)  # of what a fast machine computes in as many steps
        found = predict(config, [(f * longest, b * longest) for f, b in compute], links, within)
        computes = found.utilisation * (sum(busy) / len(busy) / longest)
        return Prediction(found.step_seconds, computes, sum(taken) / (apart * len(taken)))
    m, t, stages = config.method, config.train, config.stages
    if m.exchange == "fsdp":
        raise ValueError("what FSDP2 sends is not predicted: method.exchange = fsdp")
    if len(compute) != stages:
        raise ValueError(f"{len(compute)} stages' seconds for {stages} stages")
    within = [within or links] * (stages - 1) if within is None or isinstance(within, Links) else list(within)
    if len(within) != stages - 1:
        raise ValueError(f"{len(within)} links within a replica for {stages} stages: one for each of its boundaries")
    bits_per_second, bits_within = _numbers(links.mbit_per_s) * 1e6, [_numbers(b.mbit_per_s) * 1e6 for b in within]
    latency, jitter = links.latency_ms / 1e3, sigma_of(links.jitter)
    longer = _uneven(config, links.stragglers)
    forward, backward = (tuple(seconds * longer for seconds in way) for way in zip(*compute, strict=True))
    if stages == 1:
        step: Seconds = _zeros(bits_per_second) + (forward[0] + backward[0]) * t.accumulation
    else:
        activations, gradients = (tuple(8 * nbytes / bits for bits in bits_within) for nbytes in message_bytes(config))
        pipeline = Stages(forward, backward, activations, gradients, tuple(b.latency_ms / 1e3 for b in within))
        is_number = all(isinstance(bits, float) for bits in bits_within)
        step = (_once if is_number else gpipe_step)(pipeline, t.accumulation)
        slowest = max(within, key=lambda b: b.latency_ms)
        step = step + 2 * slowest.latency_ms / 1e3 * expected_max(stages, sigma_of(slowest.jitter))  # the gradient norm
    among, own = _moved_bytes(config)
    step = step + 8 * among / bits_per_second
    if own:
        step = step + 8 * own / functools.reduce(np.minimum, bits_within)
    wait = latency * expected_max(_met(config), jitter)
    if m.exchange == "gradients" and config.replicas > 1:
        numel = largest_stage_numel(config)
        step = step + 8 * mean_bytes(numel, 4, config.replicas) / bits_per_second + 2 * wait
    if config.exchanges_parameters and config.replicas > 1:
        step = _with_turns(config, step, bits_per_second, wait)
    computing = sum(map(sum, compute)) / stages * t.accumulation
    return Prediction(np.asarray(step), np.asarray(computing / step))


#: A pipeline's step does not depend on what its replicas exchange, so that plans of many methods have few such.
_once = functools.lru_cache(maxsize=256)(gpipe_step)


def _numbers(values: ArrayLike) -> Seconds:
    """Return values as an fp64 array, or a single one as a float."""
    found = np.asarray(values, dtype=np.float64)
    return found if found.ndim else float(found)


def _zeros(like: Seconds) -> Seconds:
    """Return 0.0 for a number, and zeros of the same shape for an array, also where `like` is infinite."""
    return 0.0 if isinstance(like, float) else np.zeros_like(like)


def _uneven(config: RunConfig, stragglers: float) -> float:
    """Return the factor by which waiting for slower machines lengthens a step's computing."""
    m, every = config.method, 0
    if m.exchange == "gradients":
        every = 1
    elif config.exchanges_parameters:
        every = max(1, m.sync_every_steps // len(config.plan().fragments))
    return uneven(
        config.replicas,
        stragglers,
        stages=config.stages,
        micro_batches=config.train.accumulation,
        every=every,
        group=m.group_size if m.peers == "group" else None,
        overlap=min(m.overlap_steps),
        routed=m.route != "fixed",
    )


def _with_turns(config: RunConfig, pipeline: Seconds, bits_per_second: Seconds, wait: float) -> Seconds:
    """Return the seconds per step where fragments take turns, as the mean of the third and fourth round.

    By then the time has settled. Stages end a step together, as the norm of their gradients is one. Steps after which
    nothing is sent or awaited are not gone through, so that a long round takes no longer to predict than a short one.
    """
    timeline, stages = Timeline(), list(kinds_of_stage(config))
    parts = {s: turns(config, s) for s in stages}
    h, tau = config.method.sync_every_steps, min(config.method.overlap_steps)  # who overlaps least is waited for
    sent: dict[int, list[tuple[int, int]]] = {}  # step -> (stage, fragment) whose turn is after it
    for s in stages:
        for index, fragment in enumerate(config.plan(s).fragments):
            for step in range(fragment.offset + h, 4 * h + 1, h):
                sent.setdefault(step, []).append((s, index))
    now: Seconds = _zeros(bits_per_second)
    settled: Seconds = now
    coming: dict[tuple[int, int], tuple[int, Seconds]] = {}  # (stage, fragment): the step after which, and when
    slow: dict[tuple[int, int], Seconds] = {}

    def arrived(stage: int, part: Turn) -> Seconds:
        return timeline.add(stage, 8 * part.most / bits_per_second + part.phases * wait, [now])

    before = 0
    for step in sorted({*sent, *(step + tau for step in sent if step + tau <= 4 * h), 2 * h, 4 * h}):
        now = now + (step - before) * pipeline
        before = step
        for s, index in sent.get(step, ()):
            coming[s, index] = step + tau, arrived(s, parts[s][index][OUTER])
        due = [key for key, (when, _) in coming.items() if when <= step]
        for key in due:
            now = np.maximum(now, np.maximum(coming.pop(key)[1], slow.pop(key, 0.0)))
        for s, index in due:
            if SLOW_WEIGHTS in parts[s][index]:
                slow[s, index] = arrived(s, parts[s][index][SLOW_WEIGHTS])
        if step == 2 * h:
            settled = now
    return (now - settled) / (2 * h)
