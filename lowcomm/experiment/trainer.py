"""The inner training of one rank: its model or stage, data, inner optimizer and engine, and their state."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from lowcomm.choices import choose
from lowcomm.comm.world import World
from lowcomm.experiment.batches import TokenData, differences, prepare_command
from lowcomm.experiment.config import RunConfig
from lowcomm.experiment.inner import inner_optimizer, set_learning_rate
from lowcomm.methods.boundary import make_boundary
from lowcomm.methods.captured import CapturedModel
from lowcomm.methods.config import BoundaryConfig
from lowcomm.methods.elastic import ElasticUpdates
from lowcomm.methods.engine import Engine, Evaluated, weight_spread
from lowcomm.methods.partial import detach_others, pieces, train_slice
from lowcomm.methods.pipeline import Pipeline, WholeModel
from lowcomm.methods.routing import random_slice
from lowcomm.methods.subspace import Subspace, Unconstrained
from lowcomm.model.accounting import parameter_shapes
from lowcomm.model.config import ModelConfig
from lowcomm.model.decoder import Decoder
from lowcomm.model.huggingface import load_folder
from lowcomm.model.spectrum import stable_ranks
from lowcomm.settings import ConfigError


def is_due(every: int, before: int, step: int) -> bool:
    """Tell whether what is done every `every` steps (0: never) is due after `step`, where the last step was `before`.

    The steps of a slow replica skip some: it is due where they pass a multiple of `every`, or go back behind one.
    """
    return bool(every) and step // every != before // every


def initial_model(config: RunConfig) -> Decoder:
    """Return the whole model as training begins: drawn from the seed, or with the weights of a Hugging Face folder.

    Raises ConfigError where the folder cannot be read, or holds another model than the configuration says.
    """
    if not config.train.weights:
        return Decoder(config.model, config.constraint).initialise(config.seed)
    model = load_folder(Path(config.train.weights), constraint=config.constraint, seed=config.seed)
    there, wanted = (_as_public(c) for c in (model.config, config.model))
    for key in wanted:
        if there[key] != wanted[key]:
            raise ConfigError(
                f"model.{key} = {wanted[key]}, but train.weights = {config.train.weights} has {there[key]}"
            )
    model.config = dataclasses.replace(model.config, z_loss=config.model.z_loss)
    return model


def _as_public(config: ModelConfig) -> dict[str, Any]:
    """Return the settings that two configurations of one Hugging Face folder have in common.

    Those of training alone are left out; counts and widths that may be left at 0 have the values that 0 stands for.
    """
    plain = {"kv_heads": config.key_value_heads, "head_dim": config.width_of_head}
    beside = {"seq_len", "embedding_std", "z_loss"}
    return {key: value for key, value in (dataclasses.asdict(config) | plain).items() if key not in beside}


@torch.no_grad()
def saved_model(config: RunConfig, weights: Path) -> Decoder:
    """Return the whole model that a run has saved in the file `weights`.

    In a subspace it has the basis and the fixed embedding with which the run ended.

    Raises ConfigError where the file holds another model than the configuration says.
    """
    model = Decoder(config.model, config.constraint)
    wanted = dict(model.named_parameters()) | model.tables()
    there = load_file(weights)
    for name in sorted(wanted.keys() | there.keys()):
        shapes = [list(tensors[name].shape) if name in tensors else "missing" for tensors in (there, wanted)]
        if shapes[0] != shapes[1]:
            raise ConfigError(f"{weights}: {name} is {shapes[0]}, but {shapes[1]} in the model of the configuration")
        wanted[name].copy_(there[name])
    return model


def may_be_captured(config: RunConfig, device: torch.device) -> bool:
    """Tell whether the passes of a step are captured as a CUDA graph: each must do the same on the same memory."""
    t, m = config.train, config.method
    changes = m.trainable == "next_fragment" or m.input_gradients != "all" or m.exchange == "fsdp" or t.recompute
    return device.type == "cuda" and t.cuda_graph and t.accumulation == 1 and not changes


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, by the rest of their names."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _local(x: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, or the tensor itself where it is whole."""
    return x.to_local() if hasattr(x, "to_local") else x


class Trainer:
    """The inner training of one rank of a run; the loops of `train.train` and `elastic.train_elastic` call it."""

    def __init__(self, config: RunConfig, world: World, data: TokenData, *, elastic: Mapping[str, Any] | None = None):
        """Make the model, the engine and the inner optimizer of this rank.

        elastic: for a replica that may leave and come back, whose world is its own ranks alone, the further arguments
        of `ElasticUpdates`, `notes` and `slot` among them; None for all others.

        Raises ConfigError where the world or the corpus is not that of the configuration.
        """
        grid = {"replicas": config.replicas if elastic is None else 1, "stages": config.stages}
        for axis, asked in grid.items():
            if asked != (there := getattr(world, axis)):
                raise ConfigError(f"run {config.name} has {asked} {axis}, the world has {there}")
        self.config, self.world, self.data = config, world, data
        self.replica = world.replica if elastic is None else elastic["slot"]
        for key, (was, value) in differences(data.card, "settings", config.data).items():
            raise ConfigError(
                f"data.{key} = {value}, but the corpus was prepared with {was}:"
                f" prepare it again ({prepare_command(config.data.corpus, config.scale)})"
            )
        if config.train.compile:
            torch.compiler.reset()  # what an earlier run in this process compiled must not decide what this one does
            # Ranks on threads compile the same functions, each for itself, to train and to evaluate; torch counts them
            # together, and of a function that it has compiled more often than this it runs the rest as it is.
            torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, 4 * config.ranks)
        m, t = config.method, config.train
        self.model = initial_model(config).cut(world.stage, world.stages).to(world.device)
        if world.device.type == "cuda":  # which is in use from here on
            torch.cuda.reset_peak_memory_stats(world.device)
        self.model.recompute = t.recompute
        sliced: dict[str, Tensor] = {}
        self.slice = self.replica % m.slices
        if m.trainable == "slice":
            shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
            sliced = train_slice(self.model, pieces(shapes, m.sliced, m.slices, config.model.layers), self.slice)
        engine = ElasticUpdates if elastic is not None else choose(Engine, m.exchange, "method.exchange")
        self.engine = engine.of(
            self.model,
            world,
            m,
            seed=config.seed,
            steps=t.steps,
            constrain=lambda values: self.subspace.keep(values),
            layers=config.model.layers,
            **(elastic or {}),
        )
        if not self.engine.one_model:  # then replicas evaluate as many windows each
            windows = len(data.held_out(t.eval_sequences, t.eval_split))
            if windows < world.replicas:
                raise ConfigError(f"{windows} validation windows are too few for {world.replicas} replicas")
        #: What the inner optimizer updates, by the names of the parameters; slices share the memory of the whole.
        self.trained: dict[str, Tensor] = sliced or dict(self.model.named_parameters())  # an engine may shard them
        own = m.boundary.of_replica(self.replica)
        boundary = make_boundary(own, config.model, self.model, seed=config.seed) if world.stages > 1 else None
        self.subspace = Unconstrained()
        if own.kind == "subspace":
            batch = config.local_batch // t.accumulation, t.seq_len
            self.subspace = Subspace(self.model, own, world, self.trained, batch, boundary)
        self.optimizer = inner_optimizer(self.trained, t, self.subspace.mean_dims())
        maybe_compiled = torch.compile if t.compile else lambda f: f
        common = {"autocast": self._autocast, "micro_batches": t.accumulation, "watch": self.subspace.watch}
        if boundary is None:
            losses = maybe_compiled(self.model.losses)
            if may_be_captured(config, world.device):
                leaves = [*self.model.parameters(), *self.trained.values(), self.model.probe]
                once = {id(leaf): leaf for leaf in leaves if leaf is not None}
                self.passes = CapturedModel(world, losses=losses, leaves=list(once.values()), **common)
            else:
                self.passes = WholeModel(world, losses=losses, **common)
        else:
            some_compress = m.boundary.replicas > 0  # what is agreed need not keep to what crosses between stages
            self.passes = Pipeline(
                boundary,
                world,
                hidden=maybe_compiled(self.model.hidden),
                head_losses=maybe_compiled(self.model.head_losses),
                routing=m.route,
                seed=config.seed,
                evaluating=make_boundary(BoundaryConfig(), config.model, self.model) if some_compress else None,
                **common,
            )

    def _autocast(self) -> torch.autocast:
        """Return the context of a micro-batch's forward pass.

        It has no cache: no weight is used twice in it, and a cache would keep all weights in bf16 to its end, also
        where blocks are computed again.
        """
        is_on = self.config.train.precision == "bf16"
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=is_on, cache_enabled=False)

    def step(self, step: int, *, before: int | None = None) -> dict[str, Any]:
        """Take inner step `step` (from 1) and the engine's exchange after it, and return the row of metrics.

        The last step of the run finishes the engine too, unless that is of an elastic replica, which has gone back to
        where the others are. The loss is in the rows of the last stage alone.

        before: the step taken last, by default `step - 1`.
        """
        t, world = self.config.train, self.world
        is_ranked = t.record_ranks and self.is_evaluated(step, before)
        world.step = step
        lr = set_learning_rate(self.optimizer, step, t)
        self._detach(step)

        entropies = self.passes.train(step, self._batches(step))
        self.engine.average_gradients()
        self.subspace.project_gradients()
        norm = self._clip()
        ranks = {}
        if is_ranked:
            grads = {n: p.grad for n, p in self.trained.items() if p.grad is not None}
            ranks = stable_ranks(grads, "gradient_stable_rank")
        self.optimizer.step()
        self.subspace.project_weights()
        self.optimizer.zero_grad(set_to_none=True)
        logged = self.engine.step(self.config.local_batch * t.seq_len)
        logged |= (
            self.engine.finish() if step == t.steps else self.subspace.update(step, self.optimizer, self.engine.map)
        )
        if is_ranked:
            ranks |= stable_ranks(dict(self.model.named_parameters()), "stable_rank")
        row = {"step": step, "lr": lr, "grad_norm": norm} | logged | ranks
        if entropies:  # at the last stage
            row["loss"] = torch.stack(entropies).mean() if len(entropies) > 1 else entropies[0]
        return row

    def _batches(self, step: int) -> Callable[[int], Tensor]:
        """Return a function that gives the tokens [B, T + 1] of a step for a replica of the world."""
        of_step = self.engine.data_step(step, self.config.local_batch * self.config.train.seq_len)
        first = self.replica - self.world.replica  # the world of an elastic slot has that slot alone

        @functools.cache
        def batch(replica: int) -> Tensor:
            found = self.data.batch(of_step, first + replica, self.config.replicas)
            return found.to(self.world.device, non_blocking=True)

        return batch

    def _detach(self, step: int) -> None:
        """Choose the slices through which gradients pass in this step."""
        m, own = self.config.method, self.slice
        if m.input_gradients == "all":
            return
        kept = {own}
        if m.input_gradients == "own_and_random":
            kept.add(random_slice(self.config.seed, step, self.replica, own, m.slices))
        detach_others(self.model, sorted(kept), m.slices)

    def _clip(self) -> Tensor:
        """Scale the inner gradients, in place, to a norm of at most `train.clip_norm`, and return the norm before.

        The norm is that of the whole model: in a pipeline, of all stages of one replica, whatever the routes.
        """
        grads = [_local(p.grad) for p in self.trained.values() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if self.config.method.exchange == "fsdp":
            norm = self.world.sum(norm.square().reshape(1), purpose="fsdp norm").sqrt()[0]
        if self.world.stages > 1:
            norm = self.world.sum(norm.square().reshape(1), purpose="gradient norm", axis="stage").sqrt()[0]
        if self.config.train.clip_norm:
            torch._foreach_mul_(grads, (self.config.train.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def evaluate(self, which: Evaluated = "agreed", *, together: bool = True) -> float | None:
        """Return the mean cross-entropy (nats per token) of the evaluated parameters on the split `train.eval_split`.

        The windows are dealt to the replicas. With `together`, every rank gets the mean over all of them. Otherwise no
        replica waits for another: each gets the mean over its own windows at its last stage, and None at the others.
        """
        world, rows = self.world, self.config.local_batch // self.config.train.accumulation
        windows = self.data.held_out(self.config.train.eval_sequences, self.config.train.eval_split)
        if not self.engine.one_model:  # then replicas have as many each
            windows = windows[: len(windows) // world.replicas * world.replicas]
        total = torch.zeros(2, dtype=torch.float64)
        with self.engine.evaluated(which):
            for begin in range(0, -(-len(windows) // world.replicas), rows):
                part = windows[world.replica :: world.replicas][begin : begin + rows]
                mine = len(part)
                # A rank without windows runs one for nothing: sharded models need all ranks in each forward.
                part = (part if mine else windows[:1]).to(world.device)
                if (entropy := self.passes.evaluate(part)) is None:
                    continue
                total += torch.tensor([entropy.item() * mine, mine], dtype=torch.float64)
        if together:
            world.sum(total := total.to(world.device), purpose="evaluation", axis="world")
        loss_sum, count = total.tolist()
        return loss_sum / count if count else None

    def is_evaluated(self, step: int, before: int | None = None) -> bool:
        """Tell whether to evaluate the model after a step, as `train.eval_every` says; `before` as for `step`."""
        t = self.config.train
        return step == t.steps or is_due(t.eval_every, step - 1 if before is None else before, step)

    def evaluations(self, step: int) -> dict[str, float]:
        """Evaluate the model after a step, and return the values to log, by name; every rank must call it."""
        t, found = self.config.train, {}
        together = step == t.steps or self.engine.one_model
        if (loss := self.evaluate(together=together)) is not None:
            found["val_loss"] = loss
        if together:
            found |= {f"val_loss_{which}": self.evaluate(which) for which in t.evaluate_also}
        if t.record_spread:
            found["weight_spread"] = weight_spread(self.world, list(self.model.parameters()))
        return found

    def whole(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the evaluated parameters of all stages, and a subspace's basis and fixed embedding where there is one.

        weights: the evaluated parameters of this rank's stage. Every rank of replica 0 must call it and gets them all;
        the ranks of other replicas get those of their own stage.
        """
        world, fixed = self.world, self.model.tables()
        if world.stages == 1 or world.replica:
            return weights | fixed
        flat = torch.cat([w.detach().reshape(-1).float() for w in weights.values()])
        gathered, found = world.exchange(flat, purpose="summary", axis="stage"), fixed
        for stage, values in enumerate(gathered):
            shapes = parameter_shapes(self.config.model, self.config.constraint, stage=stage, stages=world.stages)
            parts = values.split([math.prod(shape) for shape in shapes.values()])
            found |= {n: v.view(shape) for (n, shape), v in zip(shapes.items(), parts, strict=True)}
        return found

    def sent_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank sends in the whole run, in closed form, as {"axis/purpose": bytes}.

        Exchanges of which no closed form is claimed are left out.
        """
        t = self.config.train
        found = {f"replica/{purpose}": n for purpose, n in self.engine.sent_bytes(t.steps).items()}
        passed = self.passes.sent_bytes(t.steps, self.config.local_batch, t.seq_len)
        return found | {f"route/{purpose}": n for purpose, n in passed.items()} | self.subspace.sent_bytes(t.steps)

    def tensors(self) -> dict[str, Tensor]:
        """Return all state of this rank, by name: of model, inner optimizer, subspace, boundary and engine."""
        named = {f"model/{n}": _local(p) for n, p in self.model.named_parameters()}
        for name, p in self.trained.items():
            for key, value in self.optimizer.state.get(p, {}).items():
                named[f"inner/{name}/{key}"] = _local(value)
        named |= {f"subspace/{n}": b for n, b in self.subspace.tensors().items()}
        named |= {f"boundary/{n}": b for n, b in self.passes.errors.items()}
        return named | {f"engine/{n}": b for n, b in self.engine.state_dict().items()}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Put back, in place, the state that `tensors` has returned.

        Raises KeyError where a tensor of it is missing, ValueError where one has another shape, and ConfigError where
        the engine cannot resume from it.
        """
        for name, p in self.model.named_parameters():
            mine, kept = _local(p), tensors[f"model/{name}"]
            if kept.shape != mine.shape:
                raise ValueError(f"model/{name} has the shape {list(kept.shape)}, not {list(mine.shape)}")
            mine.copy_(kept)
        for name, p in self.trained.items():
            for key, value in _below(f"inner/{name}/", tensors).items():
                if value.dim() == 0:  # the step count; fused kernels read it where the parameters are
                    fused = self.optimizer.defaults.get("fused")
                    self.optimizer.state[p][key] = value.clone().to(p.device if fused else "cpu")
                else:  # of the parameter's shape, or of fewer entries
                    whole = value.shape == _local(p).shape
                    like = torch.zeros_like(p) if whole else torch.empty_like(value, device=p.device)
                    _local(like).copy_(value)
                    self.optimizer.state[p][key] = like
        self.engine.load_state_dict(_below("engine/", tensors))
        self.subspace.load(_below("subspace/", tensors))
        self.passes.errors.update((n, e.to(self.world.device)) for n, e in _below("boundary/", tensors).items())
