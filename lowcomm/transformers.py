"""A callback with which transformers.Trainer trains by any of the methods. It is started by torchrun.

    import lowcomm.transformers

    world = lowcomm.world()
    lowcomm.transformers.alone()                       from here on, the Trainer takes this process for the only one
    args = TrainingArguments(output_dir=f"out/{world.replica}", ...)
    sync = lowcomm.transformers.SyncCallback(lowcomm.StreamingDiLoCo, world, sync_every_steps=30)
    trainer = Trainer(model, args, train_dataset=dataset.shard(world.replicas, world.replica), callbacks=[sync])
    trainer.train()                                    the model then holds the agreed parameters
    world.close()

What the user has to see to:

    data          each replica is given its own shard, of equal length (or `max_steps`), as nothing is divided here
    output_dir    each replica has a folder of its own where checkpoints are written; equal ones are refused
    GPUs          `torchrun --virtual-local-rank` shows each process its own, as a Trainer that sees several uses all
    messages      each process logs for itself: `disable_tqdm=world.replica > 0` leaves one progress bar
    stopping      what ends training early (EarlyStoppingCallback) must end it after the same step on all replicas

H counts steps of the optimizer; gradient accumulation, clipping, precision and schedules are the Trainer's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

try:
    import transformers
except ImportError:
    raise ImportError(
        "lowcomm.transformers needs transformers and accelerate: pip install lowcomm[transformers]"
    ) from None

from lowcomm.comm.world import World
from lowcomm.methods.config import MethodConfig
from lowcomm.methods.engine import Change, named_parameters
from lowcomm.methods.local_updates import LocalUpdates, with_settings
from lowcomm.methods.plan import Plan, check_method
from lowcomm.settings import ConfigError

#: What accelerate and transformers take for a sign of several processes: torchrun's variables, and those of MPI.
_SIGNS = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def alone() -> None:
    """Hide the other processes from the Trainer, for good, so that it takes this one for the only one.

    Call it after `lowcomm.world()` and before TrainingArguments are made. Otherwise accelerate, which reads torchrun's
    variables, would wrap the model in DistributedDataParallel, which averages gradients at every step; and
    transformers, which calls `torch.distributed.is_initialized`, would save no model but that of rank 0. So the
    variables are removed (but RANK, which neither reads), and `is_initialized` returns False from then on. In a process
    that no launcher has started there is nothing to hide.

    Raises ConfigError where torchrun has started this process and `lowcomm.world()` has not been called yet.
    """
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ and not torch.distributed.is_initialized():
        raise ConfigError("lowcomm.transformers.alone() hides what lowcomm.world() reads: call lowcomm.world() first")
    for name in _SIGNS:
        os.environ.pop(name, None)
    if torch.distributed.is_initialized():
        torch.distributed.is_initialized = _not_initialized  # torch's own functions, which worlds call, do not ask it


def _not_initialized() -> bool:
    return False


class SyncCallback(transformers.TrainerCallback):
    """A callback that makes the replica that a Trainer trains agree with the others, by local updates.

    Evaluations, and whatever else calls the model in eval mode between two steps, see the agreed parameters; training
    goes on with the replica's own. The agreed ones are left in the model at the end, for `trainer.save_model` and the
    like. The values that `engine.step` and `engine.finish` return are added to the Trainer's `state.log_history`.

    A checkpoint of the Trainer holds the replica's own parameters, and beside them lowcomm-rank-000.safetensors (with
    the rank's number) has the engine's state, transfers under way included. `trainer.train(resume_from_checkpoint=...)`
    then goes on bit for bit; every replica resumes from a checkpoint of its own after the same step.

    Args:
        kind: `LocalUpdates` or a class derived from it (`lowcomm.DiLoCo`, ...).
        world: the ranks.
        method, seed, constrain, layers, settings: as for `LocalUpdates`.
        resume_from_checkpoint: the folder that the Trainer resumes from, where that is not in its output_dir.

    Attributes: `engine`, which is None until training begins; `method`, with `settings` in it.

    Raises ConfigError, before training begins, for settings that do not go together or that the Trainer cannot follow.
    """

    engine: LocalUpdates | None = None

    def __init__(
        self,
        kind: type[LocalUpdates],
        world: World,
        method: MethodConfig | None = None,
        *,
        seed: int = 0,
        constrain: Change | None = None,
        layers: int | None = None,
        resume_from_checkpoint: str | os.PathLike[str] | None = None,
        **settings: Any,
    ):
        if not (isinstance(kind, type) and issubclass(kind, LocalUpdates)):
            raise ConfigError(f"SyncCallback takes lowcomm.LocalUpdates or a class derived from it, got {kind!r}")
        if world.stages > 1:
            raise ConfigError(f"a Trainer trains whole models: world.stages = {world.stages} must be 1")
        if world.replicas > 1 and world.transport.in_one_process:
            raise ConfigError(
                "Trainers in threads of one process skip each other's steps, as accelerate keeps one state a process:"
                " start a process for each replica with torchrun, not with run_threads"
            )
        self.kind, self.world, self.seed = kind, world, seed
        self.method = with_settings(method or kind.default, settings)
        check_method(self.method, world.replicas)
        if self.method.trainable == "slice":
            raise ConfigError("method.trainable = slice needs a loop of its own: a Trainer clears no slice's gradient")
        self.constrain, self.layers = constrain, layers
        self._resumed = resume_from_checkpoint
        self._hooks: list[Any] = []
        self._shown: contextlib.AbstractContextManager[None] | None = None
        self._between_steps = False

    # What the Trainer calls

    def on_init_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        """Raise ConfigError where the Trainer's arguments or its model do not go with the replicas or the method."""
        _check_arguments(args)
        shapes = {name: tuple(p.shape) for name, p in named_parameters(model).items()}
        Plan(shapes, self.method, self.world.replicas, seed=self.seed, layers=self.layers)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        """Make the engine, and load its state from the checkpoint where the Trainer resumes.

        Raises ConfigError where the replicas' Trainers do not go together, or the checkpoint is not of this run.
        """
        _check_arguments(args)
        if state.is_hyper_param_search:
            raise ConfigError("SyncCallback follows no search for hyperparameters: train each trial on its own")
        _check_device(model, self.world)
        self._agree(args, state)
        self._let_go()
        resumes = state.global_step > 0
        self.engine = self.kind(
            model,
            self.world,
            self.method,
            seed=self.seed,
            steps=state.max_steps,
            broadcast=not resumes,
            constrain=self.constrain,
            layers=self.layers,
        )
        if resumes:
            folder = Path(self._resumed) if self._resumed else _checkpoint(args, state)
            self.engine.load_state_dict(self._read(folder / self._file))
        self._hooks = [
            model.register_forward_pre_hook(torch.compiler.disable(self._before_forward)),
            model.register_state_dict_pre_hook(lambda *_: self._hide()),
        ]
        self._between_steps = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put back the replica's own parameters, which the model holds until the step is over."""
        self._hide()
        self._between_steps = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Send the parameters whose turn it is, and apply the means that are due."""
        self._log(state, self.engine.step())
        self._between_steps = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put back the replica's own parameters, as the evaluation is over."""
        self._hide()

    on_predict = on_evaluate

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the engine's state beside the model, unless `args.save_only_model` is set."""
        if args.save_only_model:
            return
        file = _checkpoint(args, state) / self._file
        partial = file.with_suffix(".partial")
        save_file(self.engine.state_dict(), partial, metadata={"lowcomm": json.dumps(self._identity())})
        os.replace(partial, file)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Apply what is under way, exchange what has changed since, and leave the agreed parameters in the model."""
        self._let_go()
        self._log(state, self.engine.finish())
        for fragment in self.engine.fragments:
            fragment.begin_from_agreed()

    # What evaluations see

    def _before_forward(self, model: nn.Module, _: Any) -> None:
        """Let the model hold the agreed parameters where it is called in eval mode between two steps."""
        if self._between_steps and self._shown is None and not model.training:
            self._shown = self.engine.evaluated()
            self._shown.__enter__()

    def _hide(self) -> None:
        """Put back the replica's own parameters, if the model does not hold them."""
        if self._shown is not None:
            self._shown.__exit__(None, None, None)
            self._shown = None

    def _let_go(self) -> None:
        """Put back the replica's own parameters, and remove the hooks from the model."""
        self._hide()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._between_steps = [], False

    @staticmethod
    def _log(state: Any, logged: dict[str, float]) -> None:
        if logged:
            state.log_history.append({**logged, "epoch": state.epoch, "step": state.global_step})

    # Replicas among each other, and with their checkpoints

    def _agree(self, args: Any, state: Any) -> None:
        """Raise ConfigError, on all replicas, where their Trainers do not go together."""
        own = {
            "max_steps": state.max_steps,
            "steps taken": state.global_step,
            "method": repr(self.method),
            "seed": self.seed,
            "output_dir": os.path.realpath(args.output_dir),
            "saves": args.save_strategy != "no",
        }
        all_ = self.world.tell(own)
        for key in ("max_steps", "steps taken", "method", "seed", "saves"):
            if len({other[key] for other in all_}) > 1:
                hint = "; set max_steps, or give shards of equal length" if key == "max_steps" else ""
                raise ConfigError(f"{key} must be the same on all replicas, got {[o[key] for o in all_]}{hint}")
        folders = [other["output_dir"] for other in all_]
        if own["saves"] and len(set(folders)) < len(folders):
            raise ConfigError(
                f"output_dir = {args.output_dir!r} is that of several replicas, whose checkpoints would overwrite each"
                ' other: use one for each, such as f"out/{world.replica}", or save_strategy = "no"'
            )

    @property
    def _file(self) -> str:
        return f"lowcomm-rank-{self.world.rank:03d}.safetensors"

    def _identity(self) -> dict[str, Any]:
        """Return what the engine's state belongs to: the method, the replicas, and the replica's own parameters."""
        method = {f"method.{key}": value for key, value in dataclasses.asdict(self.method).items()}
        own = {"replicas": self.world.replicas, "seed": self.seed, "parameters": _digest(self.engine.named)}
        return json.loads(json.dumps(method | own))

    def _read(self, file: Path) -> dict[str, Tensor]:
        """Return the engine's state of a checkpoint.

        Raises ConfigError where the file is missing, damaged or of another run.
        """
        if not file.is_file():
            raise ConfigError(
                f"{file} is missing: to resume from another folder than output_dir's, give SyncCallback too its"
                " resume_from_checkpoint; to begin anew from its weights, load them into the model"
            )
        try:
            with safe_open(file, framework="pt") as tensors:
                saved = json.loads((tensors.metadata() or {}).get("lowcomm", "{}"))
                state = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 (no dictionary)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} is no readable safetensors file: {error}") from None
        for key, value in self._identity().items():
            if saved.get(key) != value:
                if key == "parameters":
                    raise ConfigError(f"{file} was saved with other parameters than those that the Trainer has resumed")
                raise ConfigError(f"{file} was saved with {key} = {saved.get(key)!r}, and this run has {value!r}")
        return state


def _check_arguments(args: Any) -> None:
    """Raise ConfigError for arguments of a Trainer that do not go with replicas."""
    if args.n_gpu > 1:
        raise ConfigError(
            f"the Trainer would spread one replica over {args.n_gpu} GPUs: start torchrun with --virtual-local-rank, or"
            " show each process one GPU (CUDA_VISIBLE_DEVICES)"
        )
    if args.world_size > 1 or args.parallel_mode.value != "not_parallel" or torch.distributed.is_initialized():
        raise ConfigError(
            f"the Trainer sees the other processes (parallel_mode = {args.parallel_mode.value}, world_size ="
            f" {args.world_size}): call lowcomm.transformers.alone() before TrainingArguments are made"
        )
    for name, why in (
        ("load_best_model_at_end", "a checkpoint holds a replica's own parameters, not those evaluated"),
        ("auto_find_batch_size", "a replica that begins anew would leave the others waiting"),
    ):
        if getattr(args, name):
            raise ConfigError(f"TrainingArguments.{name} does not go with SyncCallback: {why}")


def _check_device(model: nn.Module, world: World) -> None:
    device = next(iter(named_parameters(model).values())).device
    if device.type != world.device.type:
        raise ConfigError(
            f"the Trainer trains on {device} and the world is on {world.device}: both use the GPU where there is one"
            " (to train on the CPU, hide it: CUDA_VISIBLE_DEVICES=)"
        )


def _checkpoint(args: Any, state: Any) -> Path:
    """Return the folder of the Trainer's checkpoint after the step of `state`."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _digest(named: dict[str, Tensor]) -> int:
    """Return a checksum (CRC-32) of the parameters' bits."""
    found = 0
    for p in named.values():
        found = zlib.crc32(p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(), found)
    return found
