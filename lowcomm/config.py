"""Configuration: typed, frozen dataclasses, and the rules that their values keep.

`params` makes them from `params.yaml`.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lowcomm.contraction import contraction_bound
from lowcomm.model import Constraint, ModelConfig, stage_layers
from lowcomm.settings import ConfigError

#: Root of the checkout: nothing relies on the working directory.
ROOT = Path(__file__).resolve().parent.parent
#: Everything heavy: corpora, shards, runs, executed notebooks. DVC tracks it, git ignores it.
BUILD = ROOT / "build"


_SPARSE = ("topk", "dropout", "dare")
#: Names of `codecs.make_codec`: dtypes, small floats of up to 8 bits, and the sparse ones.
CODECS = (
    *("fp32", "fp16", "bf16", "int8", "sign"),
    *(f"e{e}m{m}" for e in range(2, 6) for m in range(8 - e)),
    *_SPARSE,
)


@dataclass(frozen=True)
class CorpusConfig:
    """Where documents come from. `source` decides which other fields matter."""

    source: Literal["docstrings", "python", "hub", "json", "text", "parquet"]
    path: str = ""  # Hub name, or a file, folder or glob for local sources, from the root of the checkout
    name: str = ""  # Hub configuration
    split: str = "train"  # Hub split
    revision: str = ""  # Hub revision; required for the Hub, so that a run stays what it was
    field: str = "text"  # column that holds the text
    streaming: bool = True  # Hub: read documents as they arrive
    licence: str = ""
    packages: tuple[str, ...] = ()  # docstrings and python: read these beside the standard library


@dataclass(frozen=True)
class DataConfig:
    """How a corpus becomes token shards."""

    corpus: str
    vocab_size: int
    max_characters: int = 0  # 0: the whole corpus
    validation_percent: float = 5.0  # by document hash
    tokenizer_characters: int = 4_000_000  # of the training split
    shard_tokens: int = 100_000_000


@dataclass(frozen=True)
class TrainConfig:
    """The inner optimization. Batches count sequences over all replicas."""

    steps: int
    global_batch: int
    seq_len: int
    lr: float
    warmup_steps: int
    eval_every: int  # 0: only at the end
    eval_sequences: int
    optimizer: Literal["adamw", "sgd"] = "adamw"
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    final_lr_fraction: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0  # 0: no clipping
    accumulation: int = 1  # micro-batches a step
    recompute: bool = False  # activations of a block in the backward pass, from its input alone
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: autocast over fp32 weights
    compile: bool = False
    log_every: int = 1
    #: Evaluate these too at the end (Streaming DiLoCo, Table 3), beside the parameters last agreed.
    evaluate_also: tuple[Literal["first_replica", "replica_average"], ...] = ()
    record_ranks: bool = False  # log stable ranks of projection matrices and of their gradients at each evaluation
    record_spread: bool = False  # log the spread of the replicas' weights at each evaluation; billed as analysis


@dataclass(frozen=True)
class BoundaryConfig:
    """What crosses the boundaries of a pipeline's stages, and what the model is held to for it."""

    kind: Literal["dense", "subspace", "low_rank"] = "dense"
    rank: int = 0  # k of subspace, r of low_rank
    codec: Literal[CODECS] = "fp32"  # of what crosses
    codec_keep: float = 1.0  # as method.codec_keep
    error_feedback: bool = False
    # From here on: only for kind = subspace, with one stage too.
    dense_layers: int = 1  # the last ones, which are free
    mode: Literal["projected", "reparametrised"] = "projected"
    #: One for each row of all constrained matrices, of all but attention's (whose weights are projected each step), of
    #: none (all are projected); only for mode = projected.
    second_moment: Literal["row", "mixed", "element"] = "row"
    basis: Literal["gaussian", "coordinates"] = "gaussian"  # as it begins
    table: Literal["projection", "zero"] = "projection"  # the trainable embedding as it begins
    update_every_steps: int = 0  # 0: the subspace stays as it is
    update_lr: float = 0.0  # eta of the Grassmann step

    @property
    def constraint(self) -> Constraint | None:
        """What the model is made with."""
        if self.kind != "subspace":
            return None
        return Constraint(self.rank, self.dense_layers, self.mode == "reparametrised", self.basis, self.table)


@dataclass(frozen=True)
class MethodConfig:
    """One point in the space of independent choices."""

    exchange: Literal["gradients", "fsdp", "parameters", "none"]
    #: next_fragment: the others are frozen, as in FedPart. slice: a part of some matrices, another on each replica.
    trainable: Literal["all", "next_fragment", "slice"] = "all"
    slices: int = 1  # N; only for trainable = slice, as the next two
    sliced: tuple[Literal["mlp", "heads", "out", "layers"], ...] = ()
    #: Through which slices of an MLP gradients reach its input: all, the replica's own, or that and a random one.
    input_gradients: Literal["all", "own", "own_and_random"] = "all"
    sync_every_steps: int = 1  # H; only for exchange = parameters
    peers: Literal["all", "group"] = "all"
    group_size: int = 2  # n; only for peers = group
    codec: Literal[CODECS] = "fp32"
    codec_keep: float = 1.0  # topk, dropout, dare: share of the values that is sent
    outer: Literal["average", "nesterov", "heavy_ball", "noloco"] = "average"
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    outer_pull: float = 0.0  # gamma, towards the peers' slow weights; only for outer = noloco
    fragments: Literal["whole", "sequential", "strided", "slices"] = "whole"
    layers_per_fragment: int = 3
    overlap_steps: tuple[int, ...] = (0,)  # tau: of all replicas, or one for each
    mixing: float = 0.0  # alpha, weight of the replica's own parameters
    close_last_round: bool = True  # exchange all once more at the end of the run
    offload_outer: bool = False  # outer state on the CPU
    record_cosine: bool = False  # also exchange outer gradients to log their cosine; billed as analysis
    route: Literal["fixed", "random_step", "random_micro_batch"] = "fixed"  # through the stages of a pipeline
    boundary: BoundaryConfig = BoundaryConfig()


@dataclass(frozen=True)
class CommConfig:
    """The wire. None of it may change a loss, but `reduction`: the backend's own adds in its own order."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"  # of processes
    reduction: Literal["ordered", "native"] = "ordered"
    clock: Literal["real", "virtual"] = "real"
    link_mbit_per_s: float = 0.0  # 0: as fast as it goes
    link_latency_ms: float = 0.0
    timeout_s: float = 300.0
    trace: bool = False


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 0  # 0: only when stopped
    keep: int = 2


#: Least values, and what must stay below a bound ("<"); all numbers are finite besides.
_LEAST: dict[str, float] = {
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
    if keep != 1.0 and codec not in _SPARSE:
        raise ConfigError(f"{section}.codec_keep means nothing with codec {codec}: it sends all values")
    if keep > 1.0:
        raise ConfigError(f"{section}.codec_keep = {keep} is a share of the values: at most 1")


@dataclass(frozen=True)
class RunConfig:
    """Everything that one training run is."""

    name: str
    scale: str
    seed: int
    replicas: int
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    method: MethodConfig
    stages: int = 1  # of each replica's pipeline
    variant: str = ""  # of a sweep
    comm: CommConfig = field(default_factory=CommConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        t, m = self.train, self.method
        check_bounds("", self)
        for section in ("data", "train", "method", "comm", "checkpoint"):
            check_bounds(section, getattr(self, section))
        parts = self.replicas * t.accumulation
        if t.global_batch % parts:
            raise ConfigError(
                f"train.global_batch = {t.global_batch} does not split into {self.replicas} replicas"
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
        self._check_pipeline()
        self._check_boundary()
        if m.exchange == "parameters":
            self._check_slices()
            self._check_overlap()
            self._check_group()
        if m.trainable == "next_fragment" and t.compile:
            raise ConfigError("train.compile must be false where trainable = next_fragment: each thaw compiles anew")
        _check_keep("method", m.codec, m.codec_keep)
        if m.exchange != "parameters":
            default = MethodConfig(exchange=m.exchange, route=m.route, boundary=m.boundary)
            for f in dataclasses.fields(MethodConfig):
                if getattr(m, f.name) != getattr(default, f.name):
                    raise ConfigError(f"method.{f.name} means nothing with method.exchange = {m.exchange}")
            if t.record_ranks and m.exchange == "fsdp":
                raise ConfigError("train.record_ranks needs whole matrices, which method.exchange = fsdp shards")
            if (t.evaluate_also or t.record_spread) and m.exchange != "none":
                key = "evaluate_also" if t.evaluate_also else "record_spread"
                raise ConfigError(
                    f"train.{key} means nothing with method.exchange = {m.exchange}: replicas hold one model"
                )
        if (m.exchange == "none" or m.peers == "group") and t.eval_sequences < self.replicas:
            raise ConfigError(
                f"train.eval_sequences = {t.eval_sequences} must be at least {self.replicas}: each of as many replicas"
                " evaluates a model of its own"
            )
        if t.seq_len > self.model.seq_len:
            raise ConfigError(f"train.seq_len = {t.seq_len} is longer than model.seq_len = {self.model.seq_len}")
        if self.data.vocab_size != self.model.vocab_size:
            raise ConfigError(
                f"data.vocab_size = {self.data.vocab_size} and model.vocab_size = {self.model.vocab_size} must be equal"
            )

    def _check_pipeline(self) -> None:
        m = self.method
        if self.stages > self.model.layers:
            raise ConfigError(f"{self.model.layers} layers cannot form stages = {self.stages}: each needs one at least")
        if self.stages > 1 and self.model.tied:
            raise ConfigError("model.tied must be false where stages > 1: the embedding would be of two stages")
        if self.stages > 1 and m.exchange == "fsdp":
            raise ConfigError(
                f"stages = {self.stages} do not go with method.exchange = fsdp, which shards whole models"
            )
        if self.stages == 1 and m.route != "fixed":
            raise ConfigError(f"method.route = {m.route} means nothing with one stage")

    def _check_boundary(self) -> None:
        b = self.method.boundary
        check_bounds("method.boundary", b)
        _check_keep("method.boundary", b.codec, b.codec_keep)
        lossy = b.kind == "low_rank" or b.codec != "fp32"
        if self.stages == 1 and (lossy or b.error_feedback):
            raise ConfigError(
                f"method.boundary = {b.kind} in {b.codec}, error_feedback = {b.error_feedback} means nothing with one"
                " stage"
            )
        if b.error_feedback and not lossy:
            raise ConfigError("method.boundary.error_feedback means nothing where nothing is lost")
        if b.error_feedback and b.codec == "dare":
            raise ConfigError(
                "method.boundary.error_feedback with codec = dare grows without bound: it scales what it keeps; use"
                " dropout"
            )
        if b.kind != "subspace":
            default = BoundaryConfig(b.kind, b.rank, b.codec, b.codec_keep, b.error_feedback)
            for f in dataclasses.fields(BoundaryConfig):
                if getattr(b, f.name) != getattr(default, f.name):
                    raise ConfigError(f"method.boundary.{f.name} means nothing with kind = {b.kind}")
        most = self.model.dim
        if b.kind == "low_rank":
            most = min(most, self.local_batch // self.train.accumulation * self.train.seq_len)
        if b.kind == "dense" and b.rank:
            raise ConfigError("method.boundary.rank means nothing with kind = dense")
        if b.kind != "dense" and not 1 <= b.rank <= most:
            raise ConfigError(
                f"method.boundary.rank = {b.rank} must be from 1 to {most}, the width of the stream or, if fewer, the"
                " tokens of a message"
            )
        if b.kind == "subspace":
            self._check_subspace()

    def _check_subspace(self) -> None:
        m, b, layers = self.method, self.method.boundary, self.model.layers
        if self.model.tied:
            raise ConfigError("model.tied must be false with a subspace, which the embedding keeps to")
        if m.exchange == "fsdp":
            raise ConfigError("method.exchange = fsdp shards the matrices that a subspace boundary projects whole")
        last = stage_layers(layers, self.stages, self.stages - 1)
        if b.dense_layers > len(last):
            raise ConfigError(
                f"method.boundary.dense_layers = {b.dense_layers} must all be of the last stage, which has {len(last)}"
                f" of {layers} layers: what crosses a boundary keeps to the subspace"
            )
        if b.update_every_steps >= self.train.steps:
            raise ConfigError(
                f"method.boundary.update_every_steps = {b.update_every_steps} must be below train.steps ="
                f" {self.train.steps}, or 0: the subspace would never move"
            )
        if b.mode == "reparametrised" and "layers" in m.sliced:
            raise ConfigError(
                "method.sliced = layers does not go with method.boundary.mode = reparametrised: layers are not equal"
            )
        if b.mode == "reparametrised" and b.second_moment != "row":
            raise ConfigError("method.boundary.second_moment means nothing with mode = reparametrised")
        if self.train.optimizer == "sgd" and b.second_moment != "row":
            raise ConfigError("method.boundary.second_moment means nothing with train.optimizer = sgd")
        if bool(b.update_every_steps) != bool(b.update_lr):
            raise ConfigError(
                f"method.boundary.update_every_steps = {b.update_every_steps} and update_lr = {b.update_lr} must both"
                " be above 0, or neither"
            )

    def _check_slices(self) -> None:
        m, c = self.method, self.model
        if m.trainable != "slice":
            for key, default in (("slices", 1), ("sliced", ()), ("input_gradients", "all")):
                if getattr(m, key) != default:
                    raise ConfigError(f"method.{key} means nothing with method.trainable = {m.trainable}")
            if m.fragments == "slices":
                raise ConfigError(f"method.fragments = slices means nothing with method.trainable = {m.trainable}")
            return
        if not m.sliced or len(set(m.sliced)) < len(m.sliced) or {"mlp", "layers"} <= set(m.sliced):
            raise ConfigError(
                f"method.sliced = {list(m.sliced)} must name what is sliced, once: mlp or layers, heads, out"
            )
        counts = {"replicas": self.replicas}
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
        if m.input_gradients == "own_and_random" and self.train.compile:
            raise ConfigError(
                "train.compile must be false where input_gradients = own_and_random: each step is another"
            )

    def _check_group(self) -> None:
        m = self.method
        if m.peers == "group" and m.group_size > self.replicas:
            raise ConfigError(f"method.group_size = {m.group_size} is more than {self.replicas} replicas")
        if m.peers != "group" and m.group_size != MethodConfig.group_size:
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
        bound = contraction_bound(m.outer_momentum, n, self.replicas)
        if m.outer_pull >= bound:
            raise ConfigError(
                f"method.outer_pull (gamma) = {m.outer_pull} must be below {bound:.4g}: with outer_momentum (alpha) ="
                f" {m.outer_momentum} and groups of {n} the replicas drift apart (contraction.contraction_bound)"
            )

    def _check_overlap(self) -> None:
        m = self.method
        if len(m.overlap_steps) not in (1, self.replicas):
            raise ConfigError(
                f"method.overlap_steps = {list(m.overlap_steps)} must hold one value, or one for each of"
                f" {self.replicas} replicas"
            )
        for tau in m.overlap_steps:
            if not 0 <= tau < m.sync_every_steps:
                raise ConfigError(
                    f"method.overlap_steps = {tau} must be at least 0 and below sync_every_steps ="
                    f" {m.sync_every_steps}: a fragment is back before it is sent again"
                )
        counts = [1]
        if m.fragments in ("whole", "slices"):
            if m.layers_per_fragment != MethodConfig.layers_per_fragment:
                raise ConfigError(f"method.layers_per_fragment means nothing with method.fragments = {m.fragments}")
            if m.trainable == "next_fragment":
                raise ConfigError("method.trainable = next_fragment means nothing with method.fragments = whole")
            if m.fragments == "slices":
                counts = [m.slices + 1]
        else:
            counts = [self._fragments(stage) for stage in range(self.stages)]
        h, count = m.sync_every_steps, max(counts)
        if count > h:
            raise ConfigError(
                f"method.sync_every_steps = {h} is too short for {count} fragments (one is of what is in no"
                f" {'slice' if m.fragments == 'slices' else 'layer'}) to take turns"
            )
        first, count = max((h + (p - 1) * (h // p), p) for p in counts)
        if not m.close_last_round and first > self.train.steps:
            raise ConfigError(
                f"train.steps = {self.train.steps} end before the last of {count} fragments has its first turn, at step"
                f" {first}: it would be evaluated as it was initialised"
            )

    def _fragments(self, stage: int) -> int:
        """Fragments of a stage; one is the embedding's, or the norm's and the head's."""
        layers = len(stage_layers(self.model.layers, self.stages, stage))
        return -(-layers // self.method.layers_per_fragment) + (stage in (0, self.stages - 1))

    @property
    def ranks(self) -> int:
        """Replicas x stages."""
        return self.replicas * self.stages

    @property
    def local_batch(self) -> int:
        """Sequences a replica trains on in one step."""
        return self.train.global_batch // self.replicas

    def to_dict(self) -> dict[str, Any]:
        """As JSON would give it back."""
        return json.loads(json.dumps(asdict(self)))

    def identity(self) -> dict[str, Any]:
        """The settings that decide the losses, as {"section.key": value}."""
        flat = {}
        for key, value in self.to_dict().items():
            if key in ("comm", "checkpoint", "scale", "name", "variant"):
                continue
            for k, v in value.items() if isinstance(value, dict) else [(None, value)]:
                flat[key if k is None else f"{key}.{k}"] = v
        return flat | {"comm.reduction": self.comm.reduction}
