"""Rules that the values of a `config.RunConfig` keep: bounds of each number, and what goes with what.

A combination that cannot work is refused here, before anything is started, with the values and the reason.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from lowcomm.contraction import contraction_bound
from lowcomm.settings import ConfigError
from lowcomm.shape import stage_layers
from lowcomm.streaming import fragment_count

if TYPE_CHECKING:
    from lowcomm.config import RunConfig

#: Codecs that leave values out.
SPARSE = ("topk", "dropout", "dare")

#: Least values, and what must stay below a bound ("<"); all numbers are finite besides.
_LEAST: dict[str, float] = {
    "seed": 0,
    "replicas": 1,
    "stages": 1,
    "train.steps": 1,
    "train.global_batch": 1,
    "train.seq_len": 1,
    "train.accumulation": 1,
    "train.eval_sequences": 1,
    "train.log_every": 1,
    "train.lr": 0,
    "train.warmup_steps": 0,
    "train.eval_every": 0,
    "train.final_lr_fraction": 0,
    "train.beta1": 0,
    "train.beta2": 0,
    "train.eps": 0,
    "train.weight_decay": 0,
    "train.clip_norm": 0,
    "method.slices": 1,
    "method.group_size": 2,
    "method.outer_lr": 0,
    "method.outer_momentum": 0,
    "method.outer_pull": 0,
    "method.layers_per_fragment": 1,
    "method.mixing": 0,
    "method.boundary.rank": 0,
    "method.boundary.dense_layers": 0,
    "method.boundary.update_every_steps": 0,
    "method.boundary.update_lr": 0,
    "comm.link_mbit_per_s": 0,
    "comm.link_latency_ms": 0,
    "checkpoint.every_steps": 0,
    "checkpoint.keep": 1,
    "data.max_characters": 0,
    "data.tokenizer_characters": 1,
    "data.shard_tokens": 1,
}
_BELOW: dict[str, float] = {
    "seed": 1 << 63,
    "train.beta1": 1,
    "train.beta2": 1,
    "method.outer_momentum": 1,
    "method.mixing": 1,
    "data.validation_percent": 100,
}
_ABOVE: dict[str, float] = {
    "data.validation_percent": 0,
    "comm.timeout_s": 0,
    "method.codec_keep": 0,
    "method.boundary.codec_keep": 0,
}


def check_bounds(section: str, values: Any) -> None:
    """Raise ConfigError where a number of a section (a dataclass) is out of its bounds."""
    for f in dataclasses.fields(values):
        name = f"{section}.{f.name}" if section else f.name
        value = getattr(values, f.name)
        if name in _LEAST and value < _LEAST[name]:
            raise ConfigError(f"{name} must be at least {_LEAST[name]}, got {value}")
        if name in _BELOW and value >= _BELOW[name]:
            raise ConfigError(f"{name} must be below {_BELOW[name]}, got {value}")
        if name in _ABOVE and value <= _ABOVE[name]:
            raise ConfigError(f"{name} must be above {_ABOVE[name]}, got {value}")


def _check_keep(section: str, codec: str, keep: float) -> None:
    if keep != 1.0 and codec not in SPARSE:
        raise ConfigError(f"{section}.codec_keep means nothing with codec {codec}: it sends all values")
    if keep > 1.0:
        raise ConfigError(f"{section}.codec_keep = {keep} is a share of the values: at most 1")


def check(config: RunConfig) -> None:
    """Raise ConfigError at the first rule that is broken, with the value and the rule."""
    t, m = config.train, config.method
    check_bounds("", config)
    for section in ("data", "train", "method", "comm", "checkpoint"):
        check_bounds(section, getattr(config, section))
    parts = config.replicas * t.accumulation
    if t.global_batch % parts:
        raise ConfigError(
            f"train.global_batch = {t.global_batch} does not split into {config.replicas} replicas"
            f" x {t.accumulation} micro-batches; it must be a multiple of {parts}"
        )
    if m.exchange == "parameters" and not 1 <= m.sync_every_steps <= t.steps:
        raise ConfigError(
            f"method.sync_every_steps (H) = {m.sync_every_steps} must be between 1 and train.steps = {t.steps}"
        )
    if m.outer == "average" and (m.codec != "fp32" or m.outer_lr != 1.0 or m.outer_momentum != 0.0):
        raise ConfigError(
            "method.outer = average exchanges the parameters themselves, so codec must be fp32, outer_lr 1 and"
            f" outer_momentum 0 (got {m.codec}, {m.outer_lr}, {m.outer_momentum}); for differences at lr 1 use"
            " outer = heavy_ball with outer_momentum 0"
        )
    _pipeline(config)
    _boundary(config)
    if m.exchange == "parameters":
        _slices(config)
        _overlap(config)
        _group(config)
    if m.trainable == "next_fragment" and t.compile:
        raise ConfigError("train.compile must be false where trainable = next_fragment: each thaw compiles anew")
    _check_keep("method", m.codec, m.codec_keep)
    if m.exchange != "parameters":
        default = type(m)(exchange=m.exchange, route=m.route, boundary=m.boundary)
        for f in dataclasses.fields(m):
            if getattr(m, f.name) != getattr(default, f.name):
                raise ConfigError(f"method.{f.name} means nothing with method.exchange = {m.exchange}")
        if t.record_ranks and m.exchange == "fsdp":
            raise ConfigError("train.record_ranks needs whole matrices, which method.exchange = fsdp shards")
        if (t.evaluate_also or t.record_spread) and m.exchange != "none":
            key = "evaluate_also" if t.evaluate_also else "record_spread"
            raise ConfigError(f"train.{key} means nothing with method.exchange = {m.exchange}: replicas hold one model")
    if (m.exchange == "none" or m.peers == "group") and t.eval_sequences < config.replicas:
        raise ConfigError(
            f"train.eval_sequences = {t.eval_sequences} must be at least {config.replicas}: each of as many replicas"
            " evaluates a model of its own"
        )
    if t.seq_len > config.model.seq_len:
        raise ConfigError(f"train.seq_len = {t.seq_len} is longer than model.seq_len = {config.model.seq_len}")
    if config.data.vocab_size != config.model.vocab_size:
        raise ConfigError(
            f"data.vocab_size = {config.data.vocab_size} and model.vocab_size = {config.model.vocab_size} must be equal"
        )


def _pipeline(config: RunConfig) -> None:
    m = config.method
    if config.stages > config.model.layers:
        raise ConfigError(f"{config.model.layers} layers cannot form stages = {config.stages}: each needs one at least")
    if config.stages > 1 and config.model.tied:
        raise ConfigError("model.tied must be false where stages > 1: the embedding would be of two stages")
    if config.stages > 1 and m.exchange == "fsdp":
        raise ConfigError(f"stages = {config.stages} do not go with method.exchange = fsdp, which shards whole models")
    if config.stages == 1 and m.route != "fixed":
        raise ConfigError(f"method.route = {m.route} means nothing with one stage")


def _boundary(config: RunConfig) -> None:
    b = config.method.boundary
    check_bounds("method.boundary", b)
    _check_keep("method.boundary", b.codec, b.codec_keep)
    lossy = b.kind == "low_rank" or b.codec != "fp32"
    if config.stages == 1 and (lossy or b.error_feedback):
        raise ConfigError(
            f"method.boundary = {b.kind} in {b.codec}, error_feedback = {b.error_feedback} means nothing with one stage"
        )
    if b.error_feedback and not lossy:
        raise ConfigError("method.boundary.error_feedback means nothing where nothing is lost")
    if b.error_feedback and b.codec == "dare":
        raise ConfigError(
            "method.boundary.error_feedback with codec = dare grows without bound: it scales what it keeps; use dropout"
        )
    if b.kind != "subspace":
        default = type(b)(b.kind, b.rank, b.codec, b.codec_keep, b.error_feedback)
        for f in dataclasses.fields(b):
            if getattr(b, f.name) != getattr(default, f.name):
                raise ConfigError(f"method.boundary.{f.name} means nothing with kind = {b.kind}")
    most = config.model.dim
    if b.kind == "low_rank":
        most = min(most, config.local_batch // config.train.accumulation * config.train.seq_len)
    if b.kind == "dense" and b.rank:
        raise ConfigError("method.boundary.rank means nothing with kind = dense")
    if b.kind != "dense" and not 1 <= b.rank <= most:
        raise ConfigError(
            f"method.boundary.rank = {b.rank} must be from 1 to {most}, the width of the stream or, if fewer, the"
            " tokens of a message"
        )
    if b.kind == "subspace":
        _subspace(config)


def _subspace(config: RunConfig) -> None:
    m, b, layers = config.method, config.method.boundary, config.model.layers
    if config.model.tied:
        raise ConfigError("model.tied must be false with a subspace, which the embedding keeps to")
    if m.exchange == "fsdp":
        raise ConfigError("method.exchange = fsdp shards the matrices that a subspace boundary projects whole")
    last = stage_layers(layers, config.stages, config.stages - 1)
    if b.dense_layers > len(last):
        raise ConfigError(
            f"method.boundary.dense_layers = {b.dense_layers} must all be of the last stage, which has {len(last)}"
            f" of {layers} layers: what crosses a boundary keeps to the subspace"
        )
    if b.update_every_steps >= config.train.steps:
        raise ConfigError(
            f"method.boundary.update_every_steps = {b.update_every_steps} must be below train.steps ="
            f" {config.train.steps}, or 0: the subspace would never move"
        )
    if b.mode == "reparametrised" and "layers" in m.sliced:
        raise ConfigError(
            "method.sliced = layers does not go with method.boundary.mode = reparametrised: layers are not equal"
        )
    if b.mode == "reparametrised" and b.second_moment != "row":
        raise ConfigError("method.boundary.second_moment means nothing with mode = reparametrised")
    if config.train.optimizer == "sgd" and b.second_moment != "row":
        raise ConfigError("method.boundary.second_moment means nothing with train.optimizer = sgd")
    if bool(b.update_every_steps) != bool(b.update_lr):
        raise ConfigError(
            f"method.boundary.update_every_steps = {b.update_every_steps} and update_lr = {b.update_lr} must both"
            " be above 0, or neither"
        )


def _slices(config: RunConfig) -> None:
    m, c = config.method, config.model
    if m.trainable != "slice":
        for key, default in (("slices", 1), ("sliced", ()), ("input_gradients", "all")):
            if getattr(m, key) != default:
                raise ConfigError(f"method.{key} means nothing with method.trainable = {m.trainable}")
        if m.fragments == "slices":
            raise ConfigError(f"method.fragments = slices means nothing with method.trainable = {m.trainable}")
        return
    if not m.sliced or len(set(m.sliced)) < len(m.sliced) or {"mlp", "layers"} <= set(m.sliced):
        raise ConfigError(f"method.sliced = {list(m.sliced)} must name what is sliced, once: mlp or layers, heads, out")
    counts = {"replicas": config.replicas}
    if "mlp" in m.sliced:
        counts["model.ffn_dim"] = c.ffn_dim
    if "layers" in m.sliced:
        counts["model.layers"] = c.layers
    if {"heads", "out"} & set(m.sliced):
        counts |= {"model.heads": c.heads, "model.kv_heads": c.key_value_heads}
    for key, count in counts.items():
        if count % m.slices:
            raise ConfigError(f"method.slices = {m.slices} does not divide {key} = {count}")
    if m.input_gradients != "all" and "mlp" not in m.sliced:
        raise ConfigError(f"method.input_gradients = {m.input_gradients} needs mlp in method.sliced")
    if m.input_gradients != "all" and m.slices == 1:
        raise ConfigError(f"method.input_gradients = {m.input_gradients} needs two slices or more")
    if m.input_gradients == "own_and_random" and config.train.compile:
        raise ConfigError("train.compile must be false where input_gradients = own_and_random: each step is another")


def _group(config: RunConfig) -> None:
    m = config.method
    if m.peers == "group" and m.group_size > config.replicas:
        raise ConfigError(f"method.group_size = {m.group_size} is more than {config.replicas} replicas")
    if m.peers != "group" and m.group_size != type(m).group_size:
        raise ConfigError(f"method.group_size means nothing with method.peers = {m.peers}")
    if m.outer != "noloco":
        if m.outer_pull:
            raise ConfigError(f"method.outer_pull means nothing with method.outer = {m.outer}")
        return
    if m.peers == "all":
        raise ConfigError(
            "method.outer = noloco needs method.peers = group: replicas that all agree have equal slow weights, and"
            " its momentum is heavy_ball's"
        )
    if m.outer_lr == 0:
        raise ConfigError("method.outer_lr must be above 0 with method.outer = noloco")
    if len(set(m.overlap_steps)) > 1:
        raise ConfigError(
            f"method.overlap_steps = {list(m.overlap_steps)} must be one value with method.outer = noloco: slow"
            " weights are sent when a fragment is applied, which partners must do at the same step"
        )
    n = m.group_size
    bound = contraction_bound(m.outer_momentum, n, config.replicas)
    if m.outer_pull >= bound:
        raise ConfigError(
            f"method.outer_pull (gamma) = {m.outer_pull} must be below {bound:.4g}: with outer_momentum (alpha) ="
            f" {m.outer_momentum} and groups of {n} the replicas drift apart (contraction.contraction_bound)"
        )


def _overlap(config: RunConfig) -> None:
    m = config.method
    if len(m.overlap_steps) not in (1, config.replicas):
        raise ConfigError(
            f"method.overlap_steps = {list(m.overlap_steps)} must hold one value, or one for each of"
            f" {config.replicas} replicas"
        )
    for tau in m.overlap_steps:
        if not 0 <= tau < m.sync_every_steps:
            raise ConfigError(
                f"method.overlap_steps = {tau} must be at least 0 and below sync_every_steps ="
                f" {m.sync_every_steps}: a fragment is back before it is sent again"
            )
    if m.fragments in ("whole", "slices"):
        if m.layers_per_fragment != type(m).layers_per_fragment:
            raise ConfigError(f"method.layers_per_fragment means nothing with method.fragments = {m.fragments}")
        if m.trainable == "next_fragment":
            raise ConfigError("method.trainable = next_fragment means nothing with method.fragments = whole")
    counts = [_count(config, stage) for stage in range(config.stages)]
    h, count = m.sync_every_steps, max(counts)
    if count > h:
        raise ConfigError(
            f"method.sync_every_steps = {h} is too short for {count} fragments (one is of what is in no"
            f" {'slice' if m.fragments == 'slices' else 'layer'}) to take turns"
        )
    first, count = max((h + (p - 1) * (h // p), p) for p in counts)
    if not m.close_last_round and first > config.train.steps:
        raise ConfigError(
            f"train.steps = {config.train.steps} end before the last of {count} fragments has its first turn, at step"
            f" {first}: it would be evaluated as it was initialised"
        )


def _count(config: RunConfig, stage: int) -> int:
    """Fragments of a stage; the first and the last have one of the embedding, or of the norm and the head."""
    m, layers = config.method, len(stage_layers(config.model.layers, config.stages, stage))
    ends = stage in (0, config.stages - 1)
    return fragment_count(m.fragments, layers, m.layers_per_fragment, m.slices, rest=ends)
