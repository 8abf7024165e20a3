"""Seconds and bytes of a run on machines that one does not have, from its configuration alone.

Nothing here says again what is sent: the parts of a stage that take turns, their owners and their bytes are asked of
the engine (`outer.LocalUpdates`), boundaries' messages of `boundary.Boundary`, both made without values (`blank`).
FLOPs are `accounting`'s, time is `simulate`'s: a step of the pipeline in GPipe's order, then the turns of fragments on
the link of each stage,

    a step begins       once every stage has what was to be applied after the step before
    step's end          + gradient norm over the stages; where gradients are exchanged, + their mean over replicas
    a turn after step t the fragment goes on its stage's wire, and is awaited after step t + tau
    slow weights        (NoLoCo) go on the wire when a fragment is applied, and are awaited at its next application

A rank has a wire of its own on each axis, as in `wire` and `replay`. Machines that are uneven make a step's computing
longer, by as much as `latency.uneven` draws; messages' latencies count as much as the largest of those that are waited
for (`latency.expected_max`). What a machine must hold is `footprint`'s.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowcomm.accounting import Section, encoded_mean_in_shares, forward_flops, mean_bytes, training_flops
from lowcomm.blank import blank_engine, blank_stage, kinds_of_stage, layers_of, stage_numel
from lowcomm.boundary import Boundary
from lowcomm.codecs import Codec, make_codec
from lowcomm.config import MethodConfig, RunConfig
from lowcomm.latency import expected_max, sigma_of, uneven
from lowcomm.outer import LocalUpdates
from lowcomm.simulate import Seconds, Stages, Timeline, gpipe_step
from lowcomm.streaming import Schedule
from lowcomm.subspace import move_bytes, overhead_flops


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
        for name, most in (("latency_ms", 1e6), ("jitter", 100), ("stragglers", 100)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be from 0 to {most:g}, got {getattr(self, name)}")


def stage_flops(config: RunConfig) -> list[tuple[float, float]]:
    """FLOPs of a micro-batch at each stage: (forward, backward). Keeping to a subspace is counted with the backward.

    At a pipeline's last stage the way back through the head is among the forward passes, as `pipeline` has it. Raises
    ValueError for re-parametrised models, which are none that `blank` knows.
    """
    if config.method.boundary.mode == "reparametrised":
        raise ValueError("re-parametrised models are not predicted: method.boundary.mode = reparametrised")
    c, t, m, found = config.model, config.train, config.method, []
    sequences = config.local_batch // t.accumulation
    logits = 2 * sequences * t.seq_len * c.dim * c.vocab_size
    through = {"all": None, "own": 1, "own_and_random": 2}[m.input_gradients]
    for stage in range(config.stages):
        part = dataclasses.replace(c, layers=layers_of(config, stage))
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
        whole -= (not last) * 3 * logits
        if last and config.stages > 1:
            forward += 2 * logits
        found.append((float(forward), float(whole - forward)))
    if m.boundary.kind == "subspace":
        over = overhead_flops(c, m.boundary, sequences, t.seq_len, config.stages)
        often = over["boundaries"] + over["watching"] + over["projection"] / t.accumulation
        if m.boundary.update_every_steps:
            often += over["update"] / m.boundary.update_every_steps / t.accumulation
        found = [(f, b + often / config.stages) for f, b in found]
    return found


def message_bytes(config: RunConfig) -> tuple[int, int]:
    """Bytes of a micro-batch's activations and of their gradients at a boundary."""
    boundary = Boundary(blank_stage(config.model, 0, config.stages), config.method.boundary, 0)
    tokens = config.local_batch // config.train.accumulation * config.train.seq_len
    return boundary.activation_bytes(tokens), boundary.gradient_bytes(tokens)


@dataclass(frozen=True)
class Turn:
    """Of one fragment: bytes that a rank sends, in the mean of all replicas and at most, and in how many phases."""

    outer: float
    outer_most: int
    outer_phases: int  # swaps of messages, one after the other
    slow_weights: float = 0.0  # NoLoCo's, as the three above
    slow_most: int = 0
    slow_phases: int = 0


def _met(m: MethodConfig, replicas: int) -> int:
    """How many replicas wait for each other; the most, where groups are not all as large."""
    if m.exchange == "none":
        return 1
    return -(-replicas // (replicas // m.group_size)) if m.peers == "group" else replicas


def turns(config: RunConfig, stage: int) -> list[Turn]:
    """What each fragment of a stage sends at a turn."""
    return _turns(blank_engine(config, stage))


@functools.lru_cache(maxsize=256)
def _turns(engine: LocalUpdates) -> list[Turn]:
    m, everyone = engine.method, range(engine.world.replicas)
    met = _met(m, len(everyone))

    def told(sections: Sequence[Section], codec: Codec, index: int, plain: bool) -> tuple[float, int, int]:
        sent = [engine.peers.sent_bytes(sections, codec, (index, 1), len(everyone), r) for r in everyone]
        shared = (encoded_mean_in_shares(n, codec, met, min(met, len(owners))) for n, owners in sections)
        return sum(sent) / len(sent), max(sent), 2 if plain or any(shared) else 1

    found = []
    for index, fragment in enumerate(engine.fragments):
        plain = engine.codec.lossless and met == len(everyone) and m.trainable != "slice"  # a mean in two phases
        parts = told(engine.sections[index], engine.codec, index, plain)
        if fragment.outer.needs_peers:
            parts += told([(fragment.numel, everyone)], make_codec("fp32"), index, False)
        found.append(Turn(*parts))
    return found


def _moved_bytes(config: RunConfig) -> tuple[float, float]:
    """Bytes a step of moving the subspace: (of a last stage's rank to the others, to its own pipeline's stages)."""
    every = config.method.boundary.update_every_steps
    if not every:
        return 0.0, 0.0
    gram, basis = move_bytes(config.model.dim, config.method.boundary.rank, config.replicas, config.stages)
    return gram / every, basis / every


def sent_per_step(config: RunConfig) -> tuple[float, float]:
    """Bytes that all ranks together send in a step: (between replicas, between stages).

    Apart from evaluation, and from the norm of the gradients, which is a number.
    """
    m, replicas = config.method, config.replicas
    among, between = (replicas * nbytes for nbytes in _moved_bytes(config))
    if config.stages > 1:
        between += sum(message_bytes(config)) * config.train.accumulation * (config.stages - 1) * replicas
    for stage, alike in kinds_of_stage(config).items():
        if m.exchange == "gradients":
            numel = stage_numel(config, stage)
            among += alike * sum(mean_bytes(numel, 4, replicas, r) for r in range(replicas))
        elif m.exchange == "parameters":
            a_turn = sum(turn.outer + turn.slow_weights for turn in turns(config, stage))
            among += alike * replicas * a_turn / m.sync_every_steps
    return among, between


@dataclass(frozen=True)
class Prediction:
    """Of one inner step, its share of exchanges included. Arrays where the rate was one.

    step_seconds: from one step to the next. utilisation: share of it that a machine computes, mean over stages.
    """

    step_seconds: NDArray[np.float64]
    utilisation: NDArray[np.float64]


def predict(config: RunConfig, compute: Sequence[tuple[float, float]], links: Links) -> Prediction:
    """How long a step takes.

    compute: seconds (forward, backward) of a micro-batch at each stage, e.g. `stage_flops` over a machine's FLOP/s.
    Raises ValueError for sharded models, whose traffic is FSDP2's own.
    """
    m, t, stages = config.method, config.train, config.stages
    if m.exchange == "fsdp":
        raise ValueError("what FSDP2 sends is not predicted: method.exchange = fsdp")
    if len(compute) != stages:
        raise ValueError(f"{len(compute)} stages' seconds for {stages} stages")
    bits_per_second = np.asarray(links.mbit_per_s, dtype=np.float64) * 1e6
    latency, jitter = links.latency_ms / 1e3, sigma_of(links.jitter)
    longer = _uneven(config, links.stragglers)
    forward, backward = (tuple(seconds * longer for seconds in way) for way in zip(*compute, strict=True))
    if stages == 1:
        step: Seconds = np.zeros_like(bits_per_second) + (forward[0] + backward[0]) * t.accumulation
    else:
        activations, gradients = (8 * nbytes / bits_per_second for nbytes in message_bytes(config))
        wires = ((seconds,) * (stages - 1) for seconds in (activations, gradients, latency))
        step = gpipe_step(Stages(forward, backward, *wires), t.accumulation)
        step = step + 2 * latency * expected_max(stages, jitter)  # the gradient norm
    step = step + 8 * sum(_moved_bytes(config)) / bits_per_second
    wait = latency * expected_max(_met(m, config.replicas), jitter)
    if m.exchange == "gradients" and config.replicas > 1:
        numel = max(stage_numel(config, stage) for stage in kinds_of_stage(config))
        step = step + 8 * mean_bytes(numel, 4, config.replicas) / bits_per_second + 2 * wait
    if m.exchange == "parameters":
        step = _with_turns(config, step, bits_per_second, wait)
    computing = sum(map(sum, compute)) / stages * t.accumulation
    return Prediction(step, computing / step)


def _uneven(config: RunConfig, stragglers: float) -> float:
    """What waiting for slower machines makes of a step's computing."""
    m, every = config.method, 0
    if m.exchange == "gradients":
        every = 1
    elif m.exchange == "parameters":
        every = max(1, m.sync_every_steps // len(blank_engine(config, 0).fragments))
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


def _with_turns(config: RunConfig, pipeline: Seconds, bits_per_second: NDArray[np.float64], wait: float) -> Seconds:
    """Seconds a step where fragments take turns, once it has settled: the third round and the fourth.

    Stages end a step together, as the norm of their gradients is one.
    """
    m, timeline = config.method, Timeline()
    h, tau = m.sync_every_steps, max(m.overlap_steps)
    stages = {s: turns(config, s) for s in kinds_of_stage(config)}
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
                takes = 8 * part.outer_most / bits_per_second + part.outer_phases * wait
                coming[s, index] = step + tau, timeline.add(s, takes, [now])
        due = [key for key, (when, _) in coming.items() if when <= step]
        for key in due:
            now = np.maximum(now, np.maximum(coming.pop(key)[1], slow.pop(key, 0.0)))
        for s, index in due:
            if nbytes := (part := stages[s][index]).slow_most:
                slow[s, index] = timeline.add(s, 8 * nbytes / bits_per_second + part.slow_phases * wait, [now])
        if step == 2 * h:
            settled = now
    return (now - settled) / (2 * h)
