"""The trainer: the same function under torchrun, alone, and in threads from a notebook.

    torchrun --nproc-per-node 2 -m lowcomm.train diloco_m2     one process a rank
    python -m lowcomm.train diloco_m2                          one thread a rank

A run folder holds what the run determined and nothing that depends on the machine's mood, so that two
runs of one configuration are equal byte for byte: `metrics/rank-000.jsonl` (a row a step),
`summary.json`, `model.safetensors` (the evaluated parameters), and `checkpoints/` until the run is complete.
Times go to a folder of their own.

On SIGTERM (or Ctrl-C) to any rank all finish the same step, write a checkpoint and exit 0. (torchrun itself, when it is
the one told, passes the signal on and then reports it as its own exit status.)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import os
import platform
import re
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lowcomm import params
from lowcomm.accounting import parameters as count_parameters
from lowcomm.accounting import training_flops
from lowcomm.batches import TokenData
from lowcomm.checkpoint import Checkpoints, save_tensors
from lowcomm.comm import World
from lowcomm.config import RunConfig
from lowcomm.metrics import MADE_WITH, Metrics, clear_run, complete, read_metrics
from lowcomm.ranks import run_threads, world_from_torchrun
from lowcomm.settings import ConfigError
from lowcomm.source import source_digest
from lowcomm.stop import StopAgreement, requested, stop_between_runs, stopping_on_signals
from lowcomm.trainer import Trainer

log = logging.getLogger("lowcomm")
_SOURCE = source_digest()  # as it is when it is loaded


def train(
    config: RunConfig,
    world: World,
    data_folder: Path,
    out: Path,
    times: Path | None = None,
    *,
    on_row: Callable[[Trainer, dict], None] | None = None,
) -> dict[str, Any]:
    """Train one rank of `config` and return the run's summary (`sent_bytes` are this rank's; rank 0's is written).

    Continues from the newest checkpoint in `out` if there is one. `times` gets what depends on the
    machine (default: beside `out`). `on_row` sees each metrics row, for a notebook. A stopped run's
    summary has `complete = False`. Raises ConfigError and CommError.
    """
    times = times or _beside(out)
    try:
        for folder in (out, times):
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(f"no permission to write {folder}")
    except OSError as error:
        raise ConfigError(f"output folder {out} cannot be written: {error}") from None
    t = config.train
    data = TokenData(data_folder, seq_len=t.seq_len, global_batch=t.global_batch, seed=config.seed)
    trainer = Trainer(config, world, data)
    run = config.identity() | {"tokenizer": data.card["tokenizer_sha256"]}
    checkpoints = Checkpoints(out / "checkpoints", world, config.checkpoint.keep)
    found = checkpoints.newest(run)
    start, elapsed = 0, 0.0
    if found is not None:
        start, tensors, meta = found
        trainer.load(tensors)
        world.ledger.load(meta["ledger"])
        log.info("resuming %s at step %d", config.name, start)
        clock_file = times / f"elapsed-{start}.json"
        elapsed = json.loads(clock_file.read_text()) if clock_file.exists() else 0.0
    else:
        if world.rank == 0:
            clear_run(out)
            (out / MADE_WITH).write_text(_SOURCE)
            for old in times.glob("trace-*.jsonl"):
                old.unlink()
        world.barrier()
        if (epochs := t.steps / data.epoch_steps()) > 1 and world.rank == 0:
            log.info("%s sees its training windows %.1f times", config.name, epochs)
    if t.warmup_steps >= t.steps and world.rank == 0:
        log.warning("%s warms up for %d steps and ends after %d", config.name, t.warmup_steps, t.steps)
    metrics = Metrics(out / "metrics" / f"rank-{world.rank:03d}.jsonl", start)
    clock = Metrics(times / f"rank-{world.rank:03d}.jsonl", start)
    stop = StopAgreement(world)
    world.clock.start(elapsed)
    step = start
    try:
        while step < t.steps and not stop.before(step + 1):
            step += 1
            row = trainer.step(step)
            row |= trainer.evaluations(step)
            metrics.add(row)
            clock.add({"step": step, "seconds": world.clock.elapsed()})
            if on_row is not None:
                on_row(trainer, row)
            if step % t.log_every == 0:
                metrics.write()
                clock.write()
            if step < t.steps and config.checkpoint.every_steps and step % config.checkpoint.every_steps == 0:
                _save(trainer, checkpoints, metrics, clock, step, run, times)
        if step < t.steps:
            _save(trainer, checkpoints, metrics, clock, step, run, times)
            log.info("stopped %s after step %d; the same command continues", config.name, step)
            return {"complete": False, "step": step}
        metrics.write()
        clock.write()
        return _finish(trainer, checkpoints, out, times)
    finally:
        stop.close()
        metrics.close()
        clock.close()


def train_in_threads(
    config: RunConfig,
    data_folder: Path,
    out: Path,
    times: Path | None = None,
    *,
    on_row: Callable[[Trainer, dict], None] | None = None,
) -> dict[str, Any]:
    """`train` on a thread a rank; returns rank 0's summary."""
    return run_threads(
        lambda world: train(config, world, data_folder, out, times, on_row=on_row),
        replicas=config.replicas,
        stages=config.stages,
        comm=config.comm,
    )[0]


def _beside(out: Path) -> Path:
    return out.with_name(f"{out.name}-times")


def _save(
    trainer: Trainer, checkpoints: Checkpoints, metrics: Metrics, clock: Metrics, step: int, run: dict, times: Path
) -> None:
    metrics.write()
    clock.write()
    if trainer.world.rank == 0:
        for old in times.glob("elapsed-*.json"):
            if int(old.stem.split("-")[1]) not in checkpoints.steps():
                old.unlink()
        (times / f"elapsed-{step}.json").write_text(json.dumps(trainer.world.clock.elapsed()))
    checkpoints.save(step, trainer.tensors(), {"ledger": trainer.world.ledger.state()}, run)


def _finish(trainer: Trainer, checkpoints: Checkpoints, out: Path, times: Path) -> dict[str, Any]:
    config, world, t = trainer.config, trainer.world, trainer.config.train
    seconds = world.clock.elapsed()
    sent = world.ledger.by_purpose()
    rows = read_metrics(out / "metrics" / f"rank-{world.rank:03d}.jsonl")
    last = [r["loss"] for r in rows[-max(1, len(rows) // 20) :] if "loss" in r]
    sent_bytes = [world.ledger.total(axis=axis) for axis in ("replica", "route")]
    peak_bytes = world.ledger.peak_step_bytes("replica")
    own = torch.tensor([sum(last), len(last), *sent_bytes, peak_bytes], dtype=torch.float64)
    everyone = torch.stack(world.exchange(own, purpose="summary", axis="world"))
    train_loss = (everyone[:, 0].sum() / everyone[:, 1].sum()).item()
    val_loss = rows[-1]["val_loss"]
    tokens = t.steps * t.global_batch * t.seq_len
    m = config.method
    flops = training_flops(
        config.model,
        t.steps * t.global_batch,
        t.seq_len,
        sliced=m.sliced,
        slices=m.slices,
        through={"all": None, "own": 1, "own_and_random": 2}[m.input_gradients],
        recompute=t.recompute,
        constraint=m.boundary.constraint,
    )
    summary = {
        "complete": True,
        "run": config.to_dict(),
        "val_loss": val_loss,
        "val_perplexity": math.exp(val_loss) if val_loss < 709 else math.inf,
        **{key: value for key, value in rows[-1].items() if key.startswith("val_loss_") or key == "weight_spread"},
        "train_loss": train_loss,
        "tokens": tokens,
        "parameters": count_parameters(config.model, m.boundary.constraint).total,
        "training_flops": flops,
        "sent_bytes": sent,
        "sent_bytes_closed_form": trainer.sent_bytes(),
        "sent_bytes_per_rank": everyone[:, 2].long().tolist(),
        "routed_bytes_per_rank": everyone[:, 3].long().tolist(),
        "peak_step_bytes": int(everyone[:, 4].max()),
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else platform.machine(),
            "transport": type(world.transport).__name__,
            "reduction": world.reduction,
        },
    }
    weights = trainer.whole(trainer.engine.weights())
    if world.trace is not None:
        lines = [json.dumps(dataclasses.asdict(span)) + "\n" for span in world.trace.spans]
        (times / f"trace-{world.rank:03d}.jsonl").write_text("".join(lines))
    if world.rank == 0:
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        peak = torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else resident
        done = {"seconds": seconds, "tokens_per_s": tokens / seconds, "peak_memory_bytes": peak}
        if world.trace is not None:
            done["utilisation"] = world.trace.utilisation(world.clock.started, world.clock.now())
        (times / "times.json").write_text(json.dumps(done, indent=1) + "\n")
        for old in times.glob("elapsed-*.json"):
            old.unlink()
        save_tensors(weights, out / "model.safetensors")
        (out / "summary.tmp").write_text(json.dumps(summary, indent=1) + "\n")
        (out / "summary.tmp").rename(out / "summary.json")  # there only when the run is complete
    checkpoints.clear()
    return summary


def _part(text: str) -> tuple[int, int]:
    """(I, N) of "I/N"."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not int(found[1]) < int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no part I/N, with I from 0 to N - 1")
    return int(found[1]), int(found[2])


def _jobs(args: argparse.Namespace) -> list[tuple[RunConfig, Path, Path, Path]]:
    """(configuration, run folder, folder for times, corpus) of everything that the command line asks for."""
    override = params.overrides(args.set)
    if args.part and not args.all:
        raise ConfigError("--part means nothing without --all")
    if args.all:
        if args.variant or args.seed is not None or args.times:
            raise ConfigError("--all trains every variant and seed: --variant, --seed and --times mean nothing with it")
        configs = params.run_points(args.run, scale=args.scale, **override)
        if "WORLD_SIZE" in os.environ:
            ranks = int(os.environ["WORLD_SIZE"])
            some = [c for c in configs if c.ranks == ranks]
            if not some:
                raise ConfigError(f"no point of run {args.run} has {ranks} ranks (replicas x stages)")
            configs = some
        index, parts = args.part or (0, 1)
        configs = configs[index::parts]
    else:
        configs = [
            params.run_config(args.run, variant=args.variant, seed=args.seed, scale=args.scale, **override),
        ]
    jobs = []
    for run in configs:
        out = params.run_dir(run, args.out) if args.all or not args.out else args.out
        if args.out:
            beside = _beside(args.out)
            times = params.times_dir(run, beside) if args.all else beside
        else:
            times = params.times_dir(run)
        if args.all and complete(out, run, _SOURCE):
            log.info("%s is complete", out)
        else:
            jobs.append((run, out, args.times or times, args.data or params.data_dir(run.data.corpus, run.scale)))
    if len({(run.comm.backend, run.comm.timeout_s) for run, *_ in jobs}) > 1:
        raise ConfigError(
            f"the variants of {args.run} share a transport: comm.backend and comm.timeout_s must be equal"
        )
    return jobs


def main(argv: list[str] | None = None) -> int:
    """Command line; see `--help`."""
    parser = argparse.ArgumentParser(prog="python -m lowcomm.train", description=__doc__.split("\n")[0])
    parser.add_argument("run", help="a run of params.yaml")
    parser.add_argument("--all", action="store_true", help="all variants and seeds that are not complete yet")
    parser.add_argument("--part", type=_part, metavar="I/N", help="of --all, every N-th from the I-th (from 0) only")
    parser.add_argument("--variant", default="", help="of a run that is a sweep")
    parser.add_argument("--scale", help="smoke, laptop, gpu or paper (default: params.yaml's)")
    parser.add_argument("--seed", type=int, help="default: the run's first")
    parser.add_argument("--out", type=Path, help="run folder (default: build/runs/SCALE/RUN/[VARIANT/]seedN)")
    parser.add_argument("--times", type=Path, help="folder for times (default: build/times/..., or beside --out)")
    parser.add_argument("--data", type=Path, help="prepared corpus (default: build/data/SCALE/CORPUS)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with stopping_on_signals():
        _train_all(args)
    return 0


def _train_all(args: argparse.Namespace) -> None:
    """Train what the command line asks for; where that fails, tell the other ranks and end this process."""
    world: World | None = None
    try:
        processes = "TORCHELASTIC_RUN_ID" in os.environ or "RANK" in os.environ
        for run, out, times, data in _jobs(args):
            if processes:
                transport = None if world is None else world.transport
                world = world_from_torchrun(
                    replicas=run.replicas, stages=run.stages, comm=run.comm, transport=transport
                )
                train(run, world, data, out, times)
                stop = stop_between_runs(world)
                world.leave()
            else:
                train_in_threads(run, data, out, times)
                stop = requested.is_set()
            if stop:
                break
        if world is not None:
            world.transport.close()
    except Exception as error:
        rank = os.environ.get("RANK", "0")
        if isinstance(error, ValueError | RuntimeError):
            log.error("rank %s: %s: %s", rank, type(error).__name__, error)
        else:
            traceback.print_exc()
        if world is not None:
            world.transport.abort(f"rank {rank} failed: {type(error).__name__}: {error}")
        sys.stderr.flush()
        os._exit(1)  # wires may still wait for peers; nothing here is worth waiting for


if __name__ == "__main__":
    sys.exit(main())
