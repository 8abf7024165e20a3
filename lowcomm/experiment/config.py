"""The configuration of one training run, and the rules that its settings keep.

Typed, frozen dataclasses: a combination that cannot work is refused when the configuration is made, before anything is
started, with the values and the reason. The rules of a method's own settings are in `methods.plan` and
`methods.boundary`; here are those that training adds.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, field, fields
from types import SimpleNamespace
from typing import Any, Literal

from lowcomm.choices import check_settings, choose
from lowcomm.comm.config import CommConfig
from lowcomm.methods.boundary import check_boundary
from lowcomm.methods.config import BoundaryConfig, MethodConfig
from lowcomm.methods.engine import Engine
from lowcomm.methods.inner import InnerOptimizer
from lowcomm.methods.outer import OuterOptimizer
from lowcomm.methods.partial import PARTS
from lowcomm.methods.peers import Peers
from lowcomm.methods.plan import Plan
from lowcomm.model.accounting import parameter_shapes
from lowcomm.model.config import Constraint, ModelConfig, stage_layers
from lowcomm.settings import ConfigError, check_bounds, number


@dataclass(frozen=True)
class CorpusConfig:
    """Where the documents of a corpus come from. `source` decides which other fields matter."""

    source: Literal["docstrings", "python", "hub", "json", "text", "parquet"]
    path: str = ""  # Hub name, or a file, folder or glob for local sources, from the root of the project
    name: str = ""  # Hub configuration
    split: str = "train"  # Hub split
    revision: str = ""  # Hub revision; required for the Hub, so that a run stays what it was
    field: str = "text"  # column that holds the text
    streaming: bool = True  # Hub: read documents as they arrive
    licence: str = ""
    packages: tuple[str, ...] = ()  # docstrings and python: what is read beside the standard library


@dataclass(frozen=True)
class DataConfig:
    """How a corpus becomes token shards."""

    corpus: str
    vocab_size: int
    max_characters: int = number(0, at_least=0)  # 0: the whole corpus
    validation_percent: float = number(5.0, above=0, below=100)  # of the documents, chosen by their hash
    tuning_percent: float = number(0.0, at_least=0, below=100)  # held out too, for choosing settings
    tokenizer_characters: int = number(4_000_000, at_least=1)  # of the training split, to train the tokenizer on
    shard_tokens: int = number(100_000_000, at_least=1)


@dataclass(frozen=True)
class TrainConfig:
    """The inner optimization. Batches count sequences over all replicas."""

    steps: int = number(at_least=1)
    global_batch: int = number(at_least=1)
    seq_len: int = number(at_least=1)
    lr: float = number(at_least=0)
    warmup_steps: int = number(at_least=0)
    eval_every: int = number(at_least=0)  # 0: only at the end
    eval_sequences: int = number(at_least=1)
    #: The split that is evaluated. Settings are chosen on the tuning split, so that no table reports what has chosen
    #: them.
    eval_split: Literal["validation", "tuning"] = "validation"
    weights: str = ""  # a Hugging Face folder of a Llama or Qwen3 to begin with; "": drawn from the seed
    optimizer: str = "adamw"  # a `methods.inner.InnerOptimizer` by name: adamw, sgd, muon
    #: The peak rate of matrices inside blocks; only for optimizer = muon, as the next field.
    muon_lr: float = number(0.0, at_least=0)
    muon_momentum: float = number(0.95, at_least=0, below=1)
    #: Share of the windows that are dealt to all lanes alike; of the rest each lane has one part of the corpus, so that
    #: replicas train on unlike text.
    alike: float = number(1.0, at_least=0, at_most=1)
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    final_lr_fraction: float = number(0.05, at_least=0)
    beta1: float = number(0.9, at_least=0, below=1)
    beta2: float = number(0.99, at_least=0, below=1)
    eps: float = number(1e-8, at_least=0)
    weight_decay: float = number(0.0, at_least=0)
    clip_norm: float = number(1.0, at_least=0)  # 0: no clipping
    accumulation: int = number(1, at_least=1)  # micro-batches per step
    recompute: bool = False  # compute a block's activations again in the backward pass, from its input alone
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: autocast over fp32 weights
    compile: bool = False
    cuda_graph: bool = True  # on a GPU: replay the passes of a step as one graph, where that can be (`captured`)
    log_every: int = number(1, at_least=1)
    #: Evaluate these too (Streaming DiLoCo, Table 3), beside the parameters last agreed: at the end, and at each
    #: evaluation where replicas have one model.
    evaluate_also: tuple[Literal["first_replica", "replica_average"], ...] = ()
    record_ranks: bool = False  # log stable ranks of projection matrices and of their gradients at each evaluation
    record_spread: bool = False  # log the spread of the replicas' weights at each evaluation; billed as analysis


@dataclass(frozen=True)
class CheckpointConfig:
    """When state is written, and how many checkpoints are kept."""

    every_steps: int = number(0, at_least=0)  # 0: only when stopped
    keep: int = number(2, at_least=1)


@dataclass(frozen=True)
class RunConfig:
    """The configuration of one training run. Raises ConfigError where its settings do not go together."""

    name: str
    scale: str
    seed: int = number(at_least=0, below=1 << 63)
    replicas: int = number(at_least=1)
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    method: MethodConfig
    stages: int = number(1, at_least=1)  # of each replica's pipeline
    variant: str = ""  # of a run that is a sweep; "" where it is none
    comm: CommConfig = field(default_factory=CommConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        _check(self)

    @property
    def title(self) -> str:
        """The name, the variant if there is one, and the seed, as in 'diloco_m2, seed 0'."""
        return ", ".join([self.name, *([self.variant] if self.variant else []), f"seed {self.seed}"])

    @property
    def ranks(self) -> int:
        """The number of ranks: replicas x stages."""
        return self.replicas * self.stages

    @property
    def local_batch(self) -> int:
        """The number of sequences that each replica trains on per step."""
        return self.train.global_batch // self.replicas

    @property
    def micro_batch_tokens(self) -> int:
        """The number of tokens of a replica's micro-batch."""
        return self.local_batch // self.train.accumulation * self.train.seq_len

    @property
    def constraint(self) -> Constraint | None:
        """The constraint that the method's boundary puts on the model, or None."""
        return self.method.boundary.constraint(self.stages)

    @property
    def exchanges_parameters(self) -> bool:
        """Tell whether the engine is one of local updates, so that there is a plan."""
        return self.method.exchange == "parameters"

    def plan(self, stage: int = 0) -> Plan:
        """Return the plan of what the replicas exchange of a stage (from 0); it is for local updates alone.

        Raises ConfigError where the method's settings do not go together, or not with the model.
        """
        return _plan(self.model, self.constraint, self.method, self.replicas, self.stages, stage, self.seed)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as nested dictionaries of what JSON holds (lists in place of tuples)."""
        return json.loads(json.dumps(asdict(self)))

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide the losses, as {"section.key": value}."""
        beside = ("comm", "checkpoint", "scale", "name", "variant")
        decisive = {key: value for key, value in self.flat().items() if key.partition(".")[0] not in beside}
        return decisive | {"comm.reduction": self.comm.reduction}

    def flat(self) -> dict[str, Any]:
        """Return all settings, as {"section.key": value}."""
        flat = {}
        for key, value in self.to_dict().items():
            for k, v in value.items() if isinstance(value, dict) else [(None, value)]:
                flat[key if k is None else f"{key}.{k}"] = v
        return flat


@functools.lru_cache(maxsize=512)
def _plan(
    model: ModelConfig,
    constraint: Constraint | None,
    method: MethodConfig,
    replicas: int,
    stages: int,
    stage: int,
    seed: int,
) -> Plan:
    shapes = parameter_shapes(model, constraint, stage=stage, stages=stages)
    return Plan(shapes, method, replicas, seed=seed, layers=model.layers)


def _check(config: RunConfig) -> None:
    """Raise ConfigError at the first rule that is broken, with the value and the rule."""
    t, m = config.train, config.method
    for section in ("", "data", "train", "checkpoint"):
        check_bounds(section, getattr(config, section) if section else config)
    parts = config.replicas * t.accumulation
    if t.global_batch % parts:
        raise ConfigError(
            f"train.global_batch = {t.global_batch} does not split into {config.replicas} replicas"
            f" x {t.accumulation} micro-batches; it must be a multiple of {parts}"
        )
    engine = choose(Engine, m.exchange, "method.exchange")
    engine.check(m, config.replicas)
    _check_inner(t, m)
    if config.exchanges_parameters and m.sync_every_steps > t.steps:
        raise ConfigError(
            f"method.sync_every_steps (H) = {m.sync_every_steps} must be between 1 and train.steps = {t.steps}"
        )
    _check_pipeline(config)
    check_boundary(m.boundary, config.model.dim, config.micro_batch_tokens, config.stages)
    if m.boundary.kind == "subspace":
        _check_subspace(config)
    if m.boundary.replicas:
        _check_some_compress(config)
    if config.exchanges_parameters:
        _check_plan(config)
    if t.compile and (m.trainable == "next_fragment" or m.input_gradients == "own_and_random"):
        what = "trainable = next_fragment" if m.trainable == "next_fragment" else "input_gradients = own_and_random"
        raise ConfigError(f"train.compile must be false where {what}: each change compiles anew")
    if t.record_ranks and m.exchange == "fsdp":
        raise ConfigError("train.record_ranks needs whole matrices, which method.exchange = fsdp shards")
    if (t.evaluate_also or t.record_spread) and not engine.local:
        key = "evaluate_also" if t.evaluate_also else "record_spread"
        raise ConfigError(f"train.{key} means nothing with method.exchange = {m.exchange}: replicas hold one model")
    one_model = engine.one_model and choose(Peers, m.peers, "method.peers").one_model
    if not one_model and t.eval_sequences < config.replicas:
        raise ConfigError(
            f"train.eval_sequences = {t.eval_sequences} must be at least {config.replicas}: each of as many replicas"
            " evaluates a model of its own"
        )
    if t.seq_len > config.model.seq_len:
        raise ConfigError(f"train.seq_len = {t.seq_len} is longer than model.seq_len = {config.model.seq_len}")
    if t.eval_split == "tuning" and not config.data.tuning_percent:
        raise ConfigError("train.eval_split = tuning needs data.tuning_percent above 0")
    if config.data.vocab_size != config.model.vocab_size:
        raise ConfigError(
            f"data.vocab_size = {config.data.vocab_size} and model.vocab_size = {config.model.vocab_size} must be equal"
        )


def _check_inner(t: TrainConfig, m: MethodConfig) -> None:
    kind = choose(InnerOptimizer, t.optimizer, "train.optimizer")
    defaults = SimpleNamespace(**{field.name: field.default for field in fields(TrainConfig)})
    check_settings(InnerOptimizer, t.optimizer, "train.optimizer", t, defaults)
    kind.check(t, m)


def _check_pipeline(config: RunConfig) -> None:
    m = config.method
    if config.stages > config.model.layers:
        raise ConfigError(f"{config.model.layers} layers cannot form stages = {config.stages}: each needs one at least")
    if config.stages > 1 and config.model.tied:
        raise ConfigError("model.tied must be false where stages > 1: the embedding would be of two stages")
    if config.stages > 1 and m.exchange == "fsdp":
        raise ConfigError(f"stages = {config.stages} do not go with method.exchange = fsdp, which shards whole models")
    if config.stages == 1 and m.route != "fixed":
        raise ConfigError(f"method.route = {m.route} means nothing with one stage")


def _check_subspace(config: RunConfig) -> None:
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
    if config.train.optimizer == "sgd" and b.second_moment != "row":
        raise ConfigError("method.boundary.second_moment means nothing with train.optimizer = sgd")
    outer = choose(OuterOptimizer, m.outer, "method.outer")
    if config.exchanges_parameters and not outer.linear:
        raise ConfigError(
            f"method.outer = {m.outer} is not linear in outer gradients, so it does not keep to a subspace as they do"
        )


def _check_some_compress(config: RunConfig) -> None:
    m, b, key = config.method, config.method.boundary, f"method.boundary.replicas = {config.method.boundary.replicas}"
    if not b.replicas < config.replicas:
        raise ConfigError(f"{key} must be below replicas = {config.replicas}; 0 where all compress")
    if b == BoundaryConfig(replicas=b.replicas):
        raise ConfigError(f"{key} means nothing where nothing is compressed")
    apart = {
        f"method.exchange = {m.exchange}, but with local updates": not config.exchanges_parameters,
        f"method.route = {m.route}, as routes mix replicas": m.route != "fixed",
        f"method.boundary.kind = {b.kind}, as all have what is fixed of the embedding": b.kind == "projection",
        f"method.boundary.mode = {b.mode}": b.mode != "projected",
        f"method.boundary.update_every_steps = {b.update_every_steps}, as all must know how a subspace moves": bool(
            b.update_every_steps
        ),
    }
    for what, is_so in apart.items():
        if is_so:
            raise ConfigError(f"{key} does not go with {what}")


def _check_plan(config: RunConfig) -> None:
    m, c, steps = config.method, config.model, config.train.steps
    plans = [config.plan(stage) for stage in range(config.stages)]
    for entry in (entry for entry in m.sliced if entry not in PARTS):  # whose FLOPs and memory no closed form knows
        raise ConfigError(f"method.sliced names {entry!r}: a run slices parts of its decoder, {', '.join(PARTS)}")
    if m.trainable == "slice":
        counts = {"model.layers": c.layers} if "layers" in m.sliced else {}
        if {"heads", "out"} & set(m.sliced):
            counts |= {"model.heads": c.heads, "model.kv_heads": c.key_value_heads}
        for key, count in counts.items():
            if count % m.slices:
                raise ConfigError(f"method.slices = {m.slices} does not divide {key} = {count}")
    first, count = max((m.sync_every_steps + p.fragments[-1].offset, len(p.fragments)) for p in plans)
    if not m.close_last_round and first > steps:
        raise ConfigError(
            f"train.steps = {steps} end before the last of {count} fragments has its first turn, at step"
            f" {first}: it would be evaluated as it was initialised"
        )
