"""One rank's inner training: model or stage of it, data, inner optimizer, engine, and their state."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import torch
from torch import Tensor

from lowcomm.batches import TokenData
from lowcomm.boundary import Boundary
from lowcomm.comm import World
from lowcomm.config import RunConfig, TrainConfig
from lowcomm.engine import DataParallel, Engine, Evaluated, Independent, weight_spread
from lowcomm.model import Decoder
from lowcomm.outer import LocalUpdates
from lowcomm.partial import detach_others, pieces, train_slice
from lowcomm.pipeline import Pipeline
from lowcomm.rank import stable_ranks
from lowcomm.routing import random_slice
from lowcomm.settings import ConfigError
from lowcomm.subspace import RowAdamW, Subspace


def learning_rate(step: int, t: TrainConfig) -> float:
    """The inner learning rate of step 1..steps: linear warm-up, then decay to final_lr_fraction of the peak."""
    if step <= t.warmup_steps:
        return t.lr * step / t.warmup_steps
    if t.decay == "constant":
        return t.lr
    done = (step - t.warmup_steps) / max(1, t.steps - t.warmup_steps)
    shape = 1 - done if t.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return t.lr * (t.final_lr_fraction + (1 - t.final_lr_fraction) * shape)


def inner_optimizer(
    trained: dict[str, Tensor], t: TrainConfig, mean_dims: dict[str, int] | None = None
) -> torch.optim.Optimizer:
    """AdamW or SGD; weight decay on matrices alone. `mean_dims`: see `subspace.RowAdamW`, by the parameters' names."""
    matrices: dict[int | None, list[Tensor]] = {None: []}
    for name, p in trained.items():
        if p.dim() >= 2:
            matrices.setdefault((mean_dims or {}).get(name), []).append(p)
    vectors = [p for p in trained.values() if p.dim() < 2]
    groups = [{"params": matrices.pop(None), "weight_decay": t.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if t.optimizer == "sgd":
        groups[0]["params"] += itertools.chain(*matrices.values())
        return torch.optim.SGD(groups, lr=t.lr)
    if matrices:
        groups += [{"params": some, "weight_decay": t.weight_decay, "mean_dim": d} for d, some in matrices.items()]
        return RowAdamW(groups, lr=t.lr, betas=(t.beta1, t.beta2), eps=t.eps)
    fused = not any(hasattr(p, "device_mesh") for p in trained.values())
    return torch.optim.AdamW(groups, lr=t.lr, betas=(t.beta1, t.beta2), eps=t.eps, fused=fused)


def make_engine(model: Decoder, world: World, config: RunConfig) -> Engine:
    """The engine of `method.exchange`."""
    if config.method.exchange == "fsdp":
        from lowcomm.fsdp import FullySharded  # imports torch's distributed tensors, a second or so

        return FullySharded(model, world)
    if config.method.exchange == "gradients":
        return DataParallel(model, world, config.train.steps)
    if config.method.exchange == "none":
        return Independent(model, world)
    return LocalUpdates(model, world, config.method, config.train, seed=config.seed)


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is named below a prefix, by the rest of the name."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _local(x: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, or the tensor."""
    return x.to_local() if hasattr(x, "to_local") else x


class Trainer:
    """One rank of one run. `train.train` is the way in."""

    def __init__(self, config: RunConfig, world: World, data: TokenData):
        for axis in ("replicas", "stages"):
            if (asked := getattr(config, axis)) != (there := getattr(world, axis)):
                raise ConfigError(f"run {config.name} has {asked} {axis}, the world has {there}")
        self.config, self.world, self.data = config, world, data
        for key, value in dataclasses.asdict(config.data).items():
            if (was := data.card.get("settings", {}).get(key)) != value:
                raise ConfigError(
                    f"data.{key} = {value}, but the corpus was prepared with {was}:"
                    f" prepare it again (dvc repro data@{config.data.corpus})"
                )
        if config.train.compile:
            torch.compiler.reset()  # what an earlier run in this process compiled must not decide what this one does
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(world.device)
        m, b = config.method, config.method.boundary
        self.model = Decoder(config.model, b.constraint).initialise(config.seed).cut(world.stage, world.stages)
        self.model.to(world.device)
        self.model.recompute = config.train.recompute
        #: What the inner optimizer updates, by the names of the parameters; slices share the memory of the whole.
        self.trained: dict[str, Tensor] = {}
        self.slice = world.replica % m.slices
        if m.trainable == "slice":
            parts = pieces(self.model, config.model.layers, m.sliced, m.slices)
            self.trained = train_slice(self.model, parts, self.slice)
        self.engine = make_engine(self.model, world, config)
        self.trained = self.trained or dict(self.model.named_parameters())
        self.subspace = None
        if b.constraint is not None:
            batch = config.local_batch // config.train.accumulation, config.train.seq_len
            self.subspace = Subspace(self.model, b, world, self.trained, batch)
        if isinstance(self.engine, LocalUpdates) and not self.engine.codec.lossless:
            self.engine.keep = None if self.subspace is None else self.subspace.keep
        mean_dims = {} if self.subspace is None else self.subspace.mean_dims()
        self.optimizer = inner_optimizer(self.trained, config.train, mean_dims)
        maybe_compiled = torch.compile if config.train.compile else lambda f: f
        self.losses = maybe_compiled(self.model.losses)
        self.pipeline = None
        if world.stages > 1:
            self.pipeline = Pipeline(
                Boundary(self.model, b, config.seed),
                world,
                hidden=maybe_compiled(self.model.hidden),
                head_losses=maybe_compiled(self.model.head_losses),
                autocast=self._autocast,
                micro_batches=config.train.accumulation,
                routing=config.method.route,
                seed=config.seed,
                watch=None if self.subspace is None else self.subspace.watch,
            )

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.config.train.precision == "bf16")

    def step(self, step: int) -> dict[str, Any]:
        """One inner step, and whatever exchange the engine does after it. Returns a metrics row."""
        t, world = self.config.train, self.world
        world.step = step
        lr = learning_rate(step, t)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.engine.before_step(step)
        self._detach(step)

        @functools.cache
        def batch(replica: int) -> Tensor:
            return self.data.batch(step, replica, world.replicas).to(world.device, non_blocking=True)

        entropies = (
            self._accumulate(batch(world.replica)) if self.pipeline is None else self.pipeline.train(step, batch)
        )
        self.engine.average_gradients()
        if self.subspace is not None:
            self.subspace.project_gradients()
        norm = self._clip()
        ranks = {}
        if t.record_ranks and self._is_evaluated(step):
            grads = {n: p.grad for n, p in self.trained.items() if p.grad is not None}
            ranks = stable_ranks(grads, "gradient_stable_rank")
        self.optimizer.step()
        if self.subspace is not None:
            self.subspace.project_weights()
        self.optimizer.zero_grad(set_to_none=True)
        logged = self.engine.after_step(step)
        if self.subspace is not None and step < t.steps:
            logged |= self.subspace.update(step, self.optimizer, self.engine.map)
            if self.pipeline is not None and self.subspace.moves(step):
                self.pipeline.boundary.errors.clear()  # they were of the old subspace
        if t.record_ranks and self._is_evaluated(step):
            ranks |= stable_ranks(dict(self.model.named_parameters()), "stable_rank")
        row = {"step": step, "lr": lr, "grad_norm": norm} | logged | ranks
        if entropies:  # at the last stage
            row["loss"] = torch.stack(entropies).mean() if len(entropies) > 1 else entropies[0]
        return row

    def _detach(self, step: int) -> None:
        """Choose the slices through which gradients pass in this step."""
        m, own = self.config.method, self.slice
        if m.input_gradients == "all":
            return
        kept = {own}
        if m.input_gradients == "own_and_random":
            kept.add(random_slice(self.config.seed, step, self.world.replica, own, m.slices))
        detach_others(self.model, sorted(kept), m.slices)

    def _accumulate(self, tokens: Tensor) -> list[Tensor]:
        """Forward and backward of a whole model, micro-batch by micro-batch; returns the cross-entropy of each."""
        count, entropies = self.config.train.accumulation, []
        for part in tokens.chunk(count):
            with self._autocast():
                loss, entropy = self.losses(part[:, :-1], part[:, 1:])
            (loss / count if count > 1 else loss).backward()
            if self.subspace is not None:
                self.subspace.watch()
            entropies.append(entropy.detach())
        return entropies

    def _clip(self) -> Tensor:
        """Scale gradients to norm clip_norm at most; returns the norm before. Inner gradients only.

        The norm is of the whole model: of a pipeline, of all stages of one replica, whatever the routes.
        """
        grads = [_local(p.grad) for p in self.trained.values() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if self.config.method.exchange == "fsdp":
            norm = self.world.sum(norm.square().reshape(1), purpose="fsdp norm").sqrt()[0]
        if self.pipeline is not None:
            norm = self.world.sum(norm.square().reshape(1), purpose="gradient norm", axis="stage").sqrt()[0]
        if self.config.train.clip_norm:
            torch._foreach_mul_(grads, (self.config.train.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def evaluate(self, which: Evaluated = "agreed", *, together: bool = True) -> float | None:
        """Mean validation cross-entropy (nats per token) of the evaluated parameters.

        `together`: the same on every rank, replicas having shared the windows. Else nobody waits for another replica,
        and each has the mean over its own windows, at the last stage; None elsewhere.
        """
        world, rows = self.world, self.config.local_batch // self.config.train.accumulation
        windows = self.data.validation(self.config.train.eval_sequences)
        if not self.engine.one_model:  # then replicas have as many each
            if len(windows) < world.replicas:
                raise ConfigError(f"{len(windows)} validation windows are too few for {world.replicas} replicas")
            windows = windows[: len(windows) // world.replicas * world.replicas]
        total = torch.zeros(2, dtype=torch.float64)
        with self.engine.evaluated(which), self._autocast():
            for begin in range(0, -(-len(windows) // world.replicas), rows):
                part = windows[world.replica :: world.replicas][begin : begin + rows]
                mine = len(part)
                # A rank without windows runs one for nothing: sharded models need all ranks in each forward.
                part = (part if mine else windows[:1]).to(world.device)
                if self.pipeline is None:
                    entropy = self.losses(part[:, :-1], part[:, 1:])[1]
                elif (entropy := self.pipeline.evaluate(part)) is None:
                    continue
                total += torch.tensor([entropy.item() * mine, mine], dtype=torch.float64)
        if together:
            world.sum(total := total.to(world.device), purpose="evaluation", axis="world")
        loss_sum, count = total.tolist()
        return loss_sum / count if count else None

    def _is_evaluated(self, step: int) -> bool:
        t = self.config.train
        return step == t.steps or bool(t.eval_every and step % t.eval_every == 0)

    def evaluations(self, step: int) -> dict[str, float]:
        """What is logged of the model after `step`, where an evaluation is due."""
        t, last, found = self.config.train, step == self.config.train.steps, {}
        if not self._is_evaluated(step):
            return found
        if (loss := self.evaluate(together=last or self.engine.one_model)) is not None:
            found["val_loss"] = loss
        if last:
            found |= {f"val_loss_{which}": self.evaluate(which) for which in t.evaluate_also}
        if t.record_spread:
            found["weight_spread"] = weight_spread(self.world, list(self.model.parameters()))
        return found

    def whole(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The evaluated parameters of all stages, and the subspace's basis and fixed embedding where there is one.

        On the ranks of replica 0; every rank must ask.
        """
        world = self.world
        fixed = {} if self.subspace is None else {n: getattr(self.model, n) for n in ("basis_DR", "fixed_VD")}
        if world.stages == 1 or world.replica:
            return weights | fixed
        flat = torch.cat([w.detach().reshape(-1).float() for w in weights.values()])
        gathered, found = world.exchange(flat, purpose="summary", axis="stage"), fixed
        for stage, values in enumerate(gathered):
            with torch.device("meta"):
                model = Decoder(self.config.model, self.config.method.boundary.constraint)
                like = dict(model.cut(stage, world.stages).named_parameters())
            parts = values.split([p.numel() for p in like.values()])
            found |= {n: v.view(p.shape) for (n, p), v in zip(like.items(), parts, strict=True)}
        return found

    def sent_bytes(self) -> dict[str, int]:
        """Closed form of what this rank sends in the whole run, by axis and purpose; {} where none is claimed."""
        t = self.config.train
        found = {f"replica/{purpose}": n for purpose, n in self.engine.sent_bytes().items()}
        if self.pipeline is not None:
            sent = self.pipeline.sent_bytes(t.steps, self.config.local_batch, t.seq_len)
            found |= {f"route/{purpose}": n for purpose, n in sent.items()}
        return found | ({} if self.subspace is None else self.subspace.sent_bytes(t.steps))

    def tensors(self) -> dict[str, Tensor]:
        """All state of this rank, by name: model, inner optimizer, engine."""
        named = {f"model/{n}": _local(p) for n, p in self.model.named_parameters()}
        for name, p in self.trained.items():
            for key, value in self.optimizer.state.get(p, {}).items():
                named[f"inner/{name}/{key}"] = _local(value)
        if self.subspace is not None:
            named |= {f"subspace/{n}": b for n, b in self.subspace.tensors().items()}
        if self.pipeline is not None:
            named |= {f"boundary/{n}": b for n, b in self.pipeline.boundary.errors.items()}
        return named | {f"engine/{n}": b for n, b in self.engine.state().items()}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `tensors` gave."""
        for name, p in self.model.named_parameters():
            _local(p).copy_(tensors[f"model/{name}"])
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
        self.engine.load(_below("engine/", tensors))
        if self.subspace is not None:
            self.subspace.load(_below("subspace/", tensors))
        if self.pipeline is not None:
            errors = _below("boundary/", tensors).items()
            self.pipeline.boundary.errors = {n: e.to(self.world.device) for n, e in errors}
