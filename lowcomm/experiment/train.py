"""A run from its first step to its summary: the same function under torchrun, alone, and in threads from a notebook.

On SIGTERM (or Ctrl-C) to any rank all finish the same step, write a checkpoint and return. (torchrun itself, when it is
the one told, passes the signal on and then reports it as its own exit status.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowcomm.comm.start import run_threads
from lowcomm.comm.world import World
from lowcomm.experiment.batches import TokenData
from lowcomm.experiment.checkpoint import Checkpoints, flush, save_tensors
from lowcomm.experiment.claim import Claim, is_held
from lowcomm.experiment.config import RunConfig
from lowcomm.experiment.run_folder import Metrics, RunFolder, read_metrics, recorded_steps
from lowcomm.experiment.source import sha256, source_digest
from lowcomm.experiment.stop import StopAgreement
from lowcomm.experiment.trainer import Trainer
from lowcomm.model.accounting import parameters as count_parameters
from lowcomm.model.accounting import training_flops
from lowcomm.settings import ConfigError

log = logging.getLogger("lowcomm")
_SOURCE = source_digest()  # as it is when it is loaded
#: Stands for the digest of the code where a run was made with more than one.
SEVERAL = "several"
#: What one machine writes is seen by all others that share the folder after this long at most.
_SEEN_WITHIN_S = 10.0
#: What a caller sees of each step: the trainer, and the row of metrics.
OnRow = Callable[[Trainer, dict[str, Any]], None]


def train(
    config: RunConfig,
    world: World,
    data_folder: Path,
    folder: RunFolder | Path,
    *,
    on_row: OnRow | None = None,
    again: bool = False,
) -> dict[str, Any]:
    """Train one rank of `config` and return the run's summary (`sent_bytes` are this rank's; rank 0's is written).

    It continues from the newest checkpoint in `folder` if there is one. A stopped run's summary has `complete = False`.

    on_row: called with the trainer and each row of metrics, as for a notebook.
    again: whether to replace a finished run in `folder`, or another one.

    Raises ConfigError where the folder is another's (`claim.Claim`) or ranks were started differently, and CommError
    where another rank has failed or does not answer.
    """
    folder = RunFolder.beside(folder) if isinstance(folder, Path) else folder
    folder.make()
    t = config.train
    data = TokenData(data_folder, seq_len=t.seq_len, global_batch=t.global_batch, seed=config.seed, alike=t.alike)
    world.agree(begun := started_with(config, data))
    trainer = Trainer(config, world, data)
    run = identity(config, begun) | digests(data.card)
    with claimed(folder, world, run, again=again) as claim:
        return _train(trainer, folder, run, claim, on_row)


def started_with(config: RunConfig, data: TokenData) -> dict[str, Any]:
    """Return all that must be the same on every rank, by name: settings, and digests of code, corpus and weights."""
    told = config.flat() | {"source": _SOURCE} | digests(data.card)
    if config.train.weights:  # wherever each machine has them
        files = sorted(Path(config.train.weights).glob("*.safetensors"))
        told["train.weights"] = [sha256(file) for file in files]
    return told


def identity(config: RunConfig, begun: dict[str, Any]) -> dict[str, Any]:
    """Return what decides the losses of a run (`RunConfig.identity`), with the digests of its weights for their path.

    begun: what `started_with` returns.
    """
    return config.identity() | ({"train.weights": begun["train.weights"]} if config.train.weights else {})


def digests(card: dict[str, Any]) -> dict[str, Any]:
    """Return the digests of a corpus' tokenizer and of each split's shards, by name, as its card has them."""
    told = {f"corpus, {split}": [s["sha256"] for s in part["shards"]] for split, part in card["splits"].items()}
    return told | {"tokenizer": card["tokenizer_sha256"]}


def mark_source(folder: RunFolder, *, begins: bool) -> None:
    """Write the digest of the code to the run's folder, or `SEVERAL` where the run began with other code."""
    if begins:
        folder.source.write_text(_SOURCE)
    elif folder.made_with not in (_SOURCE, SEVERAL):
        log.warning("the code is another than the run in %s began with: it counts as no run of either", folder.out)
        folder.source.write_text(SEVERAL)


@contextlib.contextmanager
def claimed(folder: RunFolder, world: World, run: dict[str, Any], *, again: bool) -> Iterator[Claim | None]:
    """Hold the run's folder, inside, by the claim of rank 0; other ranks get None.

    Raises ConfigError where rank 0 cannot claim it (`claim.Claim`), and where ranks see different folders.
    """
    claim = Claim(folder, run, again=again) if world.rank == 0 else None
    try:
        token = world.tell(claim.token if claim else "")[0]
        deadline = time.monotonic() + _SEEN_WITHIN_S
        while not (seen := is_held(folder, token)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if blind := [rank for rank, sees in enumerate(world.tell(seen)) if not sees]:
            raise ConfigError(
                f"{folder.out} of rank {blind[0]} is not the folder that rank 0 writes to: it must be one that all"
                " machines share"
            )
        yield claim
    finally:
        if claim:
            claim.release()


def _train(
    trainer: Trainer, folder: RunFolder, run: dict[str, Any], claim: Claim | None, on_row: OnRow | None
) -> dict[str, Any]:
    config, world, data, t = trainer.config, trainer.world, trainer.data, trainer.config.train
    checkpoints = Checkpoints(folder.checkpoints, world, config.checkpoint.keep)
    found = checkpoints.newest(run, recorded_steps(folder.metrics(world.rank)))
    start, elapsed = 0, 0.0
    if found is not None:
        start, tensors, meta = found
        put_back(trainer, start, tensors, folder)
        world.ledger.load(meta["ledger"])
        log.info("resuming %s at step %d", config.name, start)
        if world.rank == 0:
            mark_source(folder, begins=False)
        elapsed = meta["elapsed"]
    else:
        if world.rank == 0:
            claim.begin()
            mark_source(folder, begins=True)
        world.barrier()
        if (epochs := t.steps / data.epoch_steps()) > 1 and world.rank == 0:
            log.info("%s sees its training windows %.1f times", config.name, epochs)
    if t.warmup_steps >= t.steps and world.rank == 0:
        log.warning("%s warms up for %d steps and ends after %d", config.name, t.warmup_steps, t.steps)
    metrics = Metrics(folder.metrics(world.rank), start)
    clock = Metrics(folder.clock(world.rank), start)
    stop = StopAgreement(world, config.comm.timeout_s)
    world.clock.start(elapsed)
    step = saved = start
    try:
        while step < t.steps and not stop.before(step + 1):
            step += 1
            row = trainer.step(step)
            if trainer.is_evaluated(step):
                row |= trainer.evaluations(step)
            metrics.add(row)
            clock.add({"step": step, "seconds": world.clock.elapsed()})
            if on_row is not None:
                on_row(trainer, row)
            if step % t.log_every == 0:
                metrics.write()
                clock.write()
            if step < t.steps and config.checkpoint.every_steps and step % config.checkpoint.every_steps == 0:
                _save(trainer, checkpoints, metrics, clock, step, run)
                saved = step
        if step < t.steps:
            if step > saved or not step:  # to write it again would put what is there aside for a moment
                _save(trainer, checkpoints, metrics, clock, step, run)
            log.info("stopped %s after step %d; the same command continues", config.name, step)
            return {"complete": False, "step": step}
        metrics.write()
        clock.write()
        summary = _finish(trainer, checkpoints, folder)
        if claim:
            claim.done()
        return summary
    finally:
        stop.close()
        metrics.close()
        clock.close()


def put_back(trainer: Trainer, step: int, tensors: dict[str, Tensor], folder: RunFolder) -> None:
    """Load the tensors of the checkpoint of `step` into the trainer.

    Raises ConfigError where they are not those of this code, or the engine cannot resume from them.
    """
    try:
        trainer.load(tensors)
    except ConfigError as error:
        raise ConfigError(f"the checkpoint of step {step} in {folder.checkpoints} cannot be used: {error}") from None
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"the checkpoint of step {step} in {folder.checkpoints} is not of this code: {error}; delete it to go"
            " on from the one before"
        ) from None


def train_in_threads(
    config: RunConfig,
    data_folder: Path,
    folder: RunFolder | Path,
    *,
    on_row: OnRow | None = None,
    again: bool = False,
) -> dict[str, Any]:
    """Run `train` with a thread of this process for each rank, and return rank 0's summary."""
    return run_threads(
        lambda world: train(config, world, data_folder, folder, on_row=on_row, again=again),
        replicas=config.replicas,
        stages=config.stages,
        comm=config.comm,
    )[0]


def _save(
    trainer: Trainer, checkpoints: Checkpoints, metrics: Metrics, clock: Metrics, step: int, run: dict[str, Any]
) -> None:
    metrics.keep()
    clock.write()
    tensors = trainer.tensors()  # waits for what is under way, which the ledger is to count
    meta = {"ledger": trainer.world.ledger.state(), "elapsed": trainer.world.clock.elapsed()}
    checkpoints.save(step, tensors, meta, run)


def _finish(trainer: Trainer, checkpoints: Checkpoints, folder: RunFolder) -> dict[str, Any]:
    """Write the results of the run, of which all steps are done, and return the summary."""
    summary = _summary(trainer, read_metrics(folder.metrics(trainer.world.rank)))
    write_results(trainer, folder, summary)
    checkpoints.clear()
    return summary


def write_results(trainer: Trainer, folder: RunFolder, summary: dict[str, Any]) -> None:
    """Write the trace, the times, the evaluated parameters and, last of all, the summary. Every rank must call it."""
    world, seconds = trainer.world, trainer.world.clock.elapsed()
    weights = trainer.whole(trainer.engine.weights())
    if world.trace is not None:
        lines = [json.dumps(dataclasses.asdict(span)) + "\n" for span in world.trace.spans]
        folder.trace(world.rank).write_text("".join(lines))
    if world.rank == 0:
        (folder.times / "times.json").write_text(json.dumps(_times(world, seconds, summary["tokens"]), indent=1) + "\n")
        save_tensors(weights, folder.model)
        partial = folder.summary.with_suffix(".tmp")
        partial.write_text(json.dumps(summary, indent=1) + "\n")
        flush(partial)
        partial.rename(folder.summary)  # there only when the run is complete
        flush(folder.out)


def perplexity(loss: float) -> float:
    """Return the perplexity of a loss in nats per token, infinity where it is too large for a float."""
    return math.exp(loss) if loss < 709 else math.inf


def _summary(trainer: Trainer, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Gather the results of the run from all ranks, which must all call this; `rows` are this rank's metrics."""
    config, world, t, m = trainer.config, trainer.world, trainer.config.train, trainer.config.method
    sent = world.ledger.by_purpose()
    last = [r["loss"] for r in rows[-max(1, len(rows) // 20) :] if "loss" in r]
    sent_bytes = [world.ledger.total(axis=axis) for axis in ("replica", "route")]
    peak_bytes = world.ledger.peak_step_bytes("replica")
    own = torch.tensor([sum(last), len(last), *sent_bytes, peak_bytes], dtype=torch.float64)
    everyone = torch.stack(world.exchange(own, purpose="summary", axis="world"))
    val_loss = rows[-1]["val_loss"]
    flops = training_flops(
        config.model,
        t.steps * t.global_batch,
        t.seq_len,
        sliced=m.sliced,
        slices=m.slices,
        through=m.reached_slices,
        recompute=t.recompute,
        constraint=config.constraint,
    )
    return {
        "complete": True,
        "run": config.to_dict(),
        "val_loss": val_loss,
        "val_perplexity": perplexity(val_loss),
        **{key: value for key, value in rows[-1].items() if key.startswith("val_loss_") or key == "weight_spread"},
        "train_loss": (everyone[:, 0].sum() / everyone[:, 1].sum()).item(),
        "tokens": t.steps * t.global_batch * t.seq_len,
        "parameters": count_parameters(config.model, config.constraint).total,
        "training_flops": flops,
        "sent_bytes": sent,
        "sent_bytes_closed_form": trainer.sent_bytes(),
        "sent_bytes_per_rank": everyone[:, 2].long().tolist(),
        "routed_bytes_per_rank": everyone[:, 3].long().tolist(),
        "peak_step_bytes": int(everyone[:, 4].max()),
        "environment": environment(world),
    }


def environment(world: World) -> dict[str, str]:
    """Return what may differ from machine to machine: versions, device, transport and order of reduction."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else platform.machine(),
        "transport": type(world.transport).__name__,
        "reduction": world.reduction,
    }


def _times(world: World, seconds: float, tokens: int) -> dict[str, float]:
    """Return the seconds, tokens per second and peak memory (bytes) of the run on this machine."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    peak = torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else resident
    done = {"seconds": seconds, "tokens_per_s": tokens / seconds, "peak_memory_bytes": peak}
    if world.trace is not None:
        done["utilisation"] = world.trace.utilisation(world.clock.started, world.clock.now())
    return done
