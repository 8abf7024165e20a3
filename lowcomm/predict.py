"""Seconds, bytes and memory of a run on machines that one does not have, from its configuration alone.

Nothing here says again what is sent: the parts of a stage that take turns, their owners and their bytes are asked of
the engine (`outer.LocalUpdates`), boundaries' messages of `boundary.Boundary`, both made of a stage without values (on
torch's meta device). FLOPs and memory are `accounting`'s, time is `simulate`'s: a step of the pipeline in GPipe's
order, then the turns of fragments on the link of each stage,

    a step begins       once every stage has what was to be applied after the step before
    step's end          + gradient norm over the stages; where gradients are exchanged, + their mean over replicas
    a turn after step t the fragment goes on its stage's wire, and is awaited after step t + tau
    slow weights        (NoLoCo) go on the wire when a fragment is applied, and are awaited at its next application

A rank has a wire of its own on each axis, as in `wire` and `replay`. Whoever waits for n others waits for the slowest:
messages' latencies and the computing between two meetings are log-normal with means as given, and count as much as the
largest of n (`latency.expected_max`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowcomm.accounting import (
    MemoryCount,
    Section,
    encoded_mean_in_shares,
    forward_flops,
    mean_bytes,
    memory,
    parameters,
    trained_parameters,
    training_flops,
)
from lowcomm.boundary import Boundary
from lowcomm.codecs import Codec, make_codec
from lowcomm.config import BoundaryConfig, MethodConfig, RunConfig, TrainConfig
from lowcomm.latency import expected_max, sigma_of
from lowcomm.model import Decoder, ModelConfig, stage_layers
from lowcomm.outer import LocalUpdates
from lowcomm.simulate import Seconds, Stages, Timeline, gpipe_step
from lowcomm.streaming import Schedule
from lowcomm.subspace import overhead_bytes, overhead_flops


@dataclass(frozen=True)
class Links:
    """What lies between any two machines. Ratios are standard deviation over mean."""

    mbit_per_s: ArrayLike
    latency_ms: float = 0.0
    jitter: float = 0.0  # of a message's latency
    stragglers: float = 0.0  # of the time that a machine computes for a step

    def __post_init__(self) -> None:
        if not np.all(np.asarray(self.mbit_per_s) > 0):
            raise ValueError(f"mbit_per_s must be above 0, got {self.mbit_per_s}")
        for name in ("latency_ms", "jitter", "stragglers"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class Place:
    """Where a rank stands in the grid: what closed forms need of a `World`."""

    replicas: int
    replica: int
    stages: int
    stage: int


class _Unset(TorchFunctionMode):
    """Parameters are not given values, which on the meta device takes seconds (of imports) and changes nothing."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.normal_, Tensor.uniform_, Tensor.fill_):
            return args[0]
        return func(*args, **(kwargs or {}))


@functools.cache
def _stage(model: ModelConfig, stage: int, stages: int) -> Decoder:
    """A stage without values."""
    with torch.device("meta"), _Unset():
        return Decoder(model).cut(stage, stages)


def stage_flops(config: RunConfig) -> list[tuple[float, float]]:
    """FLOPs of a micro-batch at each stage: (forward, backward). Keeping to a subspace is counted with the backward."""
    c, t, m, found = config.model, config.train, config.method, []
    sequences = config.local_batch // t.accumulation
    logits = 2 * sequences * t.seq_len * c.dim * c.vocab_size
    through = {"all": None, "own": 1, "own_and_random": 2}[m.input_gradients]
    for stage in range(config.stages):
        part = dataclasses.replace(c, layers=len(stage_layers(c.layers, config.stages, stage)))
        last = stage == config.stages - 1
        forward = forward_flops(part, sequences, t.seq_len) - (not last) * logits
        whole = training_flops(
            part,
            sequences,
            t.seq_len,
            sliced=m.sliced,
            slices=m.slices,
            through=through,
            recompute=t.recompute,
        )
        found.append((float(forward), float(whole - (not last) * 3 * logits - forward)))
    if m.boundary.kind == "subspace":
        over = overhead_flops(c, m.boundary, sequences, t.seq_len, config.stages)
        often = over["boundaries"] + over["watching"] + over["projection"] / t.accumulation
        if m.boundary.update_every_steps:
            often += over["update"] / m.boundary.update_every_steps / t.accumulation
        found = [(f, b + often / config.stages) for f, b in found]
    return found


def message_bytes(config: RunConfig) -> tuple[int, int]:
    """Bytes of a micro-batch's activations and of their gradients at a boundary."""
    boundary = Boundary(_stage(config.model, 0, config.stages), config.method.boundary, 0)
    tokens = config.local_batch // config.train.accumulation * config.train.seq_len
    return boundary.activation_bytes(tokens), boundary.gradient_bytes(tokens)


@dataclass(frozen=True)
class Turn:
    """Of one fragment: bytes a rank sends (the mean of all replicas), and in how many phases (swaps of messages)."""

    outer: float
    slow_weights: float  # NoLoCo's; 0 elsewhere
    phases: int


def _engine(config: RunConfig, stage: int) -> LocalUpdates:
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
    return LocalUpdates(_stage(model, place.stage, place.stages), place, method, _TRAIN)


#: Of whatever run: engines want to know how many steps there are.
_TRAIN = TrainConfig(_ANY, 1, 1, 0.0, 0, 0, 1)


def _met(config: RunConfig) -> int:
    """How many replicas wait for each other."""
    m = config.method
    return m.group_size if m.peers == "group" else 1 if m.exchange == "none" else config.replicas


def turns(config: RunConfig, stage: int) -> list[Turn]:
    """What each fragment of a stage sends at a turn."""
    engine, everyone = _engine(config, stage), range(config.replicas)
    group = _met(config)
    found = []
    for index, fragment in enumerate(engine.fragments):
        sections = engine.sections[index]

        def each(sections: Sequence[Section], codec: Codec, index: int = index) -> float:
            sent = (engine.peers.sent_bytes(sections, codec, (index, 1), len(everyone), r) for r in everyone)
            return sum(sent) / len(everyone)

        outer = each(sections, engine.codec)
        slow = each([(fragment.numel, everyone)], make_codec("fp32")) if fragment.outer.needs_peers else 0.0
        shares = engine.codec.lossless and group == config.replicas
        shares = shares or any(encoded_mean_in_shares(n, engine.codec, group) for n, _ in sections)
        found.append(Turn(outer, slow, 2 if shares else 1))
    return found


def sent_per_step(config: RunConfig) -> tuple[float, float]:
    """Bytes that all ranks together send in a step: (between replicas, between stages). Evaluation apart."""
    m, replicas, stages = config.method, config.replicas, config.stages
    activations, gradients = message_bytes(config)
    between = (activations + gradients) * config.train.accumulation * (stages - 1) * replicas
    among = 0.0
    for stage, alike in _kinds_of_stage(stages).items():
        if m.exchange == "gradients":
            numel = _numel(config, stage)
            among += alike * sum(mean_bytes(numel, 4, replicas, r) for r in range(replicas))
        elif m.exchange == "parameters":
            a_turn = sum(turn.outer + turn.slow_weights for turn in turns(config, stage))
            among += alike * replicas * a_turn / m.sync_every_steps
    return among, float(between)


def _kinds_of_stage(stages: int) -> dict[int, int]:
    """Stages that differ -> how many are like them: the first, the last, and one in between."""
    if stages <= 2:
        return dict.fromkeys(range(stages), 1)
    return {0: 1, 1: stages - 2, stages - 1: 1}


@dataclass(frozen=True)
class Prediction:
    """Of one inner step, its share of exchanges included. Arrays where the rate was one.

    step_seconds: from one step to the next. utilisation: share of it that a machine computes, mean over stages.
    waiting: seconds that are neither the pipeline's nor the exchange of gradients: for fragments to arrive.
    """

    step_seconds: NDArray[np.float64]
    utilisation: NDArray[np.float64]
    waiting: NDArray[np.float64]


def predict(config: RunConfig, compute: Sequence[tuple[float, float]], links: Links) -> Prediction:
    """How long a step takes.

    compute: seconds (forward, backward) of a micro-batch at each stage, e.g. `stage_flops` over a machine's FLOP/s.
    Raises ValueError for sharded models, whose traffic is FSDP2's own.
    """
    m, t = config.method, config.train
    if m.exchange == "fsdp":
        raise ValueError("what FSDP2 sends is not predicted: method.exchange = fsdp")
    if len(compute) != config.stages:
        raise ValueError(f"{len(compute)} stages' seconds for {config.stages} stages")
    bits_per_second = np.asarray(links.mbit_per_s, dtype=np.float64) * 1e6
    zero = np.zeros_like(bits_per_second)
    latency = links.latency_ms / 1e3
    met = {"gradients": config.replicas, "none": 1}.get(
        m.exchange, m.group_size if m.peers == "group" else config.replicas
    )
    slowest = _slowest(config, links.stragglers)
    forward, backward = ([seconds * slowest for seconds in way] for way in zip(*compute, strict=True))
    computing = float(np.mean([sum(seconds) for seconds in compute])) * t.accumulation
    if config.stages == 1:
        pipeline = zero + (forward[0] + backward[0]) * t.accumulation
    else:
        activations, gradients = (8 * nbytes / bits_per_second for nbytes in message_bytes(config))
        between = config.stages - 1
        wires = (activations,) * between, (gradients,) * between, (latency,) * between
        pipeline = gpipe_step(Stages(tuple(forward), tuple(backward), *wires), t.accumulation)
        pipeline = pipeline + 2 * latency * expected_max(config.stages, sigma_of(links.jitter))  # the gradient norm
    wait = latency * expected_max(met, sigma_of(links.jitter))
    if m.exchange == "gradients" and config.replicas > 1:
        numel = max(_numel(config, stage) for stage in _kinds_of_stage(config.stages))
        pipeline = pipeline + 8 * mean_bytes(numel, 4, config.replicas) / bits_per_second + 2 * wait
    step = pipeline
    if m.exchange == "parameters":
        step = _with_turns(config, pipeline, bits_per_second, wait)
    return Prediction(step, computing / step, step - pipeline)


def _numel(config: RunConfig, stage: int) -> int:
    return sum(p.numel() for p in _stage(config.model, stage, config.stages).parameters())


def _slowest(config: RunConfig, stragglers: float) -> float:
    """What waiting for slower machines makes of the time that computing takes.

    Replicas meet at each turn, for which overlap leaves as many steps more; where gradients are exchanged, at each
    step; through random routes, on the way through every stage and back, and what differs by so much over a step
    differs more over its parts.
    """
    found, m = 1.0, config.method
    if m.exchange == "parameters":
        alone = max(1, m.sync_every_steps // len(_engine(config, 0).fragments))
        late = (expected_max(_met(config), sigma_of(stragglers / math.sqrt(alone))) - 1) * alone
        found = 1 + max(0.0, late - min(m.overlap_steps)) / alone
    elif m.exchange == "gradients":
        found = expected_max(config.replicas, sigma_of(stragglers))
    if m.route != "fixed":
        apart = stragglers * math.sqrt(2 * config.stages)
        found = max(found, expected_max(config.replicas, sigma_of(apart)))
    return found


def _with_turns(config: RunConfig, pipeline: Seconds, bits_per_second: NDArray[np.float64], wait: float) -> Seconds:
    """Seconds a step where fragments take turns, once it has settled: the third round and the fourth.

    Stages end a step together, as the norm of their gradients is one.
    """
    m, timeline = config.method, Timeline()
    h, tau = m.sync_every_steps, max(m.overlap_steps)
    stages = {s: turns(config, s) for s in _kinds_of_stage(config.stages)}
    schedules = {s: Schedule(len(parts), h) for s, parts in stages.items()}
    now: Seconds = np.zeros_like(bits_per_second)
    settled: Seconds = now
    coming: dict[tuple[int, int], tuple[int, Seconds]] = {}  # (stage, fragment): the step after which, and when
    slow: dict[tuple[int, int], Seconds] = {}
    for step in range(1, 4 * h + 1):
        now = now + pipeline
        for s, parts in stages.items():
            for index in schedules[s].turns(step):
                part = parts[index]
                takes = 8 * part.outer / bits_per_second + part.phases * wait
                coming[s, index] = step + tau, timeline.add(s, takes, [now])
        due = [key for key, (when, _) in coming.items() if when <= step]
        for key in due:
            now = np.maximum(now, np.maximum(coming.pop(key)[1], slow.pop(key, 0.0)))
        for s, index in due:
            if nbytes := stages[s][index].slow_weights:
                slow[s, index] = timeline.add(s, 8 * nbytes / bits_per_second + wait, [now])
        if step == 2 * h:
            settled = now
    return (now - settled) / (2 * h)


def stage_memory(config: RunConfig) -> MemoryCount:
    """What the fullest stage's machine holds, activations apart; all in fp32, as `trainer` has it."""
    m = config.method
    numel, stage = max((_numel(config, stage), stage) for stage in _kinds_of_stage(config.stages))
    part = dataclasses.replace(config.model, layers=len(stage_layers(config.model.layers, config.stages, stage)))
    whole, trained = parameters(part), trained_parameters(part, m.sliced, m.slices)
    buffers, fetched = 0, None
    if m.exchange == "parameters":
        fragments = _engine(config, stage).fragments
        buffers = len(fragments[0].state()) + fragments[0].outer.needs_peers
        fetched = max(f.numel for f in fragments) if m.offload_outer else None
    return memory(
        numel,
        inner=config.train.optimizer,
        outer_buffers=buffers,
        fetched=fetched,
        trained=numel - (whole.total - trained.total),
    )


def activation_bytes(config: RunConfig, itemsize: int = 4) -> int:
    """What the forward passes of a step leave for the backward passes, and what one of these takes (about).

    With `train.recompute`: the input of every block, of all micro-batches (GPipe's order), the insides of one block,
    and at the last stage logits with their gradients, of one micro-batch. Without it, the insides of every block.
    """
    c, t = config.model, config.train
    tokens = config.local_batch // t.accumulation * t.seq_len
    micro_batches = t.accumulation if config.stages > 1 else 1
    layers = len(stage_layers(c.layers, config.stages, 0))
    q, kv = c.heads * c.width_of_head, c.key_value_heads * c.width_of_head
    mlp = (4 if c.mlp == "gated" else 2) * c.ffn_dim
    inside = 4 * c.dim + 3 * q + 2 * kv + mlp
    kept = layers * c.dim + inside if t.recompute else layers * inside
    waiting = layers * (c.dim if t.recompute else inside)
    logits = (3 if config.stages == 1 else 0) * c.vocab_size  # the first stage of several has none, but waits longest
    return itemsize * tokens * (kept + (micro_batches - 1) * waiting + logits)


def node_bytes(config: RunConfig) -> int:
    """Memory of a machine: weights, gradients, optimizer and outer state, activations, and a subspace's tables."""
    total = stage_memory(config).on_device + activation_bytes(config)
    if config.method.boundary.kind == "subspace":
        total += sum(v for name, v in overhead_bytes(config.model, config.method.boundary).items() if v > 0)
    return total
