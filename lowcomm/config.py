"""Configuration: typed, frozen dataclasses. `params` makes them from `params.yaml`, `rules` says what may be set."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lowcomm.rules import SPARSE, check
from lowcomm.shape import Constraint, ModelConfig

#: Names of `codecs.make_codec`: dtypes, small floats of up to 8 bits, and the sparse ones.
CODECS = (
    *("fp32", "fp16", "bf16", "int8", "sign"),
    *(f"e{e}m{m}" for e in range(2, 6) for m in range(8 - e)),
    *SPARSE,
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
    """When state is written, and how many checkpoints are kept."""

    every_steps: int = 0  # 0: only when stopped
    keep: int = 2


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
        check(self)

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
