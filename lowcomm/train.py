"""The command that trains a run of `params.yaml`.

    torchrun --nproc-per-node 2 -m lowcomm.train diloco_m2     a process for each rank
    lowcomm train diloco_m2                                    a thread for each rank
    lowcomm train --list                                       the runs that there are

SIGTERM, or Ctrl-C, lets all ranks finish the same step and write a checkpoint; the same command goes on from it. To
survive a kill too, add --set checkpoint.every_steps=50. A finished run, or one of other settings, is left as it is
unless --again is said, and a folder has one job at a time.

A run's replicas may be pipelines: `stages: 2` cuts the model in two, `train.accumulation` is then the number of
micro-batches, and `method.route` says whether they keep to their own replica or go through random ones. A run has
replicas x stages ranks.

On several machines ranks are torchrun's too. Each machine needs this folder and the corpus, prepared at the scale of
the run (lowcomm prepare), and --out must be a folder that all machines share. Ranks use the interface by which a
machine reaches the first one, or the one that GLOO_SOCKET_IFNAME names. A machine that was lost may be started anew, by
the same command, as often as --max-restarts says: all go on from the last checkpoint. (Where the first machine's name
does not resolve to the endpoint's address, torchrun needs --rdzv-conf is_host=1 there, and is_host=0 elsewhere.)

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1      # else torchrun waits in vain for a machine that is started anew
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110        # else torchrun kills, 30 s after SIGTERM, who writes a checkpoint
    torchrun --nnodes 4 --nproc-per-node 2 --max-restarts 10 --rdzv-backend c10d --rdzv-endpoint first-machine:29500 \\
        -m lowcomm.train noloco --variant dp4_pp2 --scale gpu --out /shared/noloco --set checkpoint.every_steps=500

Where machines leave and come back, replicas of local updates need no torchrun: each is started by itself, as often as
it has ended, and goes on with whoever is there (`lowcomm.ElasticUpdates`). Each slot has a folder in --out.

    lowcomm store 29400                                            on a machine that stays
    lowcomm train diloco_m2 --store that-machine:29400 --slot 0    and --slot 1 on another

A replica that is a pipeline is a torchrun of its own, which starts all of its stages again when one has failed:

    torchrun --standalone --nproc-per-node 2 --max-restarts 10 -m lowcomm.train diloco_m2 \\
        --set stages=2 --store that-machine:29400 --slot 0

Under SLURM, sbatch of

    #!/bin/bash
    #SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=2 --signal=TERM@120
    export OMP_NUM_THREADS=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110
    srun .venv/bin/torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 2 --rdzv-backend c10d \\
        --rdzv-endpoint "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):29500" \\
        -m lowcomm.train noloco --variant dp4_pp2 --scale gpu --out /shared/noloco

writes a checkpoint two minutes before its time is up; the same job, submitted again, goes on from it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from lowcomm.comm.start import world, world_from_torchrun
from lowcomm.comm.world import World
from lowcomm.experiment.config import RunConfig
from lowcomm.experiment.project import Project, overrides, points
from lowcomm.experiment.run_folder import RunFolder
from lowcomm.experiment.source import source_digest
from lowcomm.experiment.stop import requested, stop_between_runs, stopping_on_signals
from lowcomm.experiment.train import train, train_in_threads
from lowcomm.experiment.trainer import Trainer
from lowcomm.settings import ConfigError

log = logging.getLogger("lowcomm")
_SOURCE = source_digest()  # as it is when it is loaded


class Progress:
    """Logs how far a run is every `every_s` seconds and at each evaluation, on the rank that has replica 0's loss."""

    def __init__(self, config: RunConfig, every_s: float = 5.0):
        self.config, self.every_s = config, every_s
        self._begun: tuple[int, float] | None = None
        self._said = 0.0

    def __call__(self, trainer: Trainer, row: dict[str, Any]) -> None:
        """Take the row of metrics of a step, and log the progress where it is time."""
        now, step, steps = time.monotonic(), row["step"], self.config.train.steps
        if trainer.world.replica or "loss" not in row:
            return
        if self._begun is None:
            self._begun, self._said = (step - 1, now), now
        evaluated = "val_loss" in row
        if now - self._said < self.every_s and not evaluated:
            return
        self._said = now
        rate = (step - self._begun[0]) / max(now - self._begun[1], 1e-9)
        told = f"step {step} of {steps}: loss {float(row['loss']):.3f}"
        told += f", validation loss {row['val_loss']:.3f}" if evaluated else ""
        log.info("%s, %.0f steps/s, %.0f s left", told, rate, (steps - step) / max(rate, 1e-9))


def _told(config: RunConfig, folder: RunFolder, summary: dict[str, Any]) -> str:
    """Return a line that says what a run found, and in which folder it is."""
    if not summary["complete"]:
        return f"{config.title} was stopped after step {summary['step']}: the same command continues ({folder.out})"
    if "slot" in summary:
        return (
            f"{config.title}, slot {summary['slot']}: validation loss {summary['val_loss']:.4f} after"
            f" {summary['tokens']:,} tokens in {len(summary['rounds'])} rounds, of which each had"
            f" {summary['participation']:.1%} of the replicas in the mean; {folder.out}"
        )
    sent = max(a + b for a, b in zip(summary["sent_bytes_per_rank"], summary["routed_bytes_per_rank"], strict=True))
    return (
        f"{config.title}: validation loss {summary['val_loss']:.4f} (perplexity {summary['val_perplexity']:.4g}) after"
        f" {summary['tokens']:,} tokens; {sent:,} bytes sent to other replicas and"
        f" stages by the busiest rank, evaluation included; {folder.out}"
    )


#: What is to be trained: its configuration, folder and corpus, and whether it replaces what is there (`--again`).
_Job = tuple[RunConfig, RunFolder, Path, bool]
#: What is said of one replica of those that come and go, beside its store.
_OF_A_SLOT = ("slot", "host", "quorum", "grace", "silence", "timeout")


def _said(args: argparse.Namespace) -> list[str]:
    """Return the options, as "--NAME", that a command line sets to other values than their defaults."""
    default = _parser().get_default
    return [f"--{name}" for name, value in vars(args).items() if name != "run" and value != default(name)]


def _jobs(args: argparse.Namespace) -> list[_Job]:
    """Return the jobs that a command line names. Raises ConfigError where they cannot be run one after the other."""
    if args.jobs:
        jobs = [job for words in _read_jobs(args.jobs) for job in _points(_job(args.jobs, words))]
    else:
        jobs = _points(args)
    if len({(config.comm.backend, config.comm.timeout_s) for config, *_ in jobs}) > 1:
        raise ConfigError("runs in turn share a transport: comm.backend and comm.timeout_s must be equal")
    ranks = os.environ.get("WORLD_SIZE")
    several = os.environ.get("LOCAL_WORLD_SIZE", ranks) != ranks
    if several and len(stages := {config.stages for config, *_ in jobs}) > 1:
        raise ConfigError(
            "runs in turn on several machines must have equally many stages, as each rank has one place, got"
            f" {sorted(stages)}"
        )
    return jobs


def _job(path: Path, words: list[str]) -> argparse.Namespace:
    """Parse the words of one job of a file. Raises ConfigError where they name no run, or have an option of no job."""
    job = _parser().parse_args(words)
    foreign = {"--list", "--jobs", "--store", *(f"--{name}" for name in _OF_A_SLOT)}
    if job.run is None or foreign.intersection(_said(job)):
        raise ConfigError(
            f"{path}: a job names a run and none of {', '.join(sorted(foreign))}, got {' '.join(words)!r}"
        )
    return job


def _read_jobs(path: Path) -> list[list[str]]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} must be a JSON list of lists of words: {error}") from None
    lists = isinstance(found, list) and all(isinstance(words, list) for words in found)
    if not lists or not all(isinstance(word, str) for words in found for word in words):
        raise ConfigError(f"{path} must be a JSON list of lists of words, got {str(found)[:50]}")
    return found


def _points(args: argparse.Namespace) -> list[_Job]:
    """Return the jobs of a command line that names one run: one of its points, or with --all those left to train."""
    project, override = Project.find(args.project), overrides(args.set)
    if args.all:
        if args.variant or args.seed is not None or args.times:
            raise ConfigError("--all trains every variant and seed: --variant, --seed and --times mean nothing with it")
        configs = project.run_points(args.run, scale=args.scale, **override)
        if "WORLD_SIZE" in os.environ:
            ranks = int(os.environ["WORLD_SIZE"])
            some = [c for c in configs if c.ranks == ranks]
            if not some:
                raise ConfigError(f"no point of run {args.run} has {ranks} ranks (replicas x stages)")
            configs = some
    else:
        configs = [project.run_config(args.run, variant=args.variant, seed=args.seed, scale=args.scale, **override)]
    jobs = []
    for config in configs:
        folder = project.run_folder(config, args.out) if args.all or not args.out else RunFolder.beside(args.out)
        if args.times:
            folder = RunFolder(folder.out, args.times)
        if args.all and not args.again and folder.is_complete(config.to_dict(), _SOURCE):
            log.info("%s is complete", folder.out)
        else:
            data = args.data or project.data_dir(config.data.corpus, config.scale)
            jobs.append((config, folder, data, args.again))
    return jobs


def list_runs(project: Project, scale: str | None = None) -> str:
    """Return a table, as text, with a line for each run of a project.

    A line has the run's method, how many of its variants and seeds are trained, and their mean validation loss.
    scale: by default the one that `params.yaml` names.
    """
    params = project.load_params()
    scale = scale or params["scale"]
    lines = [f"{'run':34}{'method':18}{'trained':>10}  validation loss (mean)   scale {scale}"]
    for run, entry in params["runs"].items():
        some = points(run, params, scale)
        found = [project.folder(run, scale, *point).read_summary() for point in some]
        losses = [summary["val_loss"] for summary in found if summary]
        loss = f"{sum(losses) / len(losses):.3f}" if losses else ""
        lines.append(f"{run:34}{entry['method']:18}{f'{len(losses)} of {len(some)}':>10}  {loss}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lowcomm train", description=__doc__.split("\n")[0])
    parser.add_argument("run", nargs="?", help="a run of params.yaml")
    parser.add_argument("--list", action="store_true", help="name the runs, and what is trained of them")
    parser.add_argument("--all", action="store_true", help="all variants and seeds that are not complete yet")
    parser.add_argument("--again", action="store_true", help="replace what is finished, or of other settings")
    parser.add_argument("--variant", default="", help="of a run that is a sweep")
    parser.add_argument("--scale", help="smoke, laptop, gpu or paper (default: params.yaml's)")
    parser.add_argument("--seed", type=int, help="default: the run's first")
    parser.add_argument("--out", type=Path, help="run folder (default: build/runs/SCALE/RUN/[VARIANT/]seedN)")
    parser.add_argument("--times", type=Path, help="folder for times (default: build/times/..., or beside --out)")
    parser.add_argument("--data", type=Path, help="prepared corpus (default: build/data/SCALE/CORPUS)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting")
    parser.add_argument("--project", type=Path, help="folder of params.yaml (default: the working one, or one above)")
    parser.add_argument(
        "--store", metavar="HOST:PORT", help="train one replica of those that come and go, by its store"
    )
    parser.add_argument("--slot", type=int, help="with --store: which replica, from 0")
    parser.add_argument("--host", help="with --store: this machine's address, for the others (default: found out)")
    parser.add_argument(
        "--quorum",
        type=int,
        help="with --store: replicas that a round needs (default: half, rounded down)",
    )
    parser.add_argument("--grace", type=float, metavar="SECONDS", help="with --store: wait so long for those not ready")
    parser.add_argument("--silence", type=float, metavar="SECONDS", help="with --store: wait so long for a sign of one")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="with --store: wait so long for an answer")
    parser.add_argument("--jobs", type=Path, metavar="FILE", help="several runs: a JSON list of what else stands here")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv`, by default the process's own, and return 0; see `--help`.

    Where training fails, the process ends with exit status 1.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.list:
        try:
            print(list_runs(Project.find(args.project), args.scale))
        except ConfigError as error:
            parser.error(str(error))
        return 0
    if (args.run is None) == (args.jobs is None):
        parser.error("name a run, or a file of --jobs, or ask for --list")
    if (args.store is None) != (args.slot is None):
        parser.error("--store and --slot are said together")
    if args.store is not None and (args.all or args.jobs):
        parser.error("--store is for one replica of one run: --all and --jobs mean nothing with it")
    if args.store is None and (left := [f"--{name}" for name in _OF_A_SLOT if getattr(args, name) is not None]):
        parser.error(f"{', '.join(left)}: this means nothing without --store")
    if args.jobs and (left := [said for said in _said(args) if said != "--jobs"]):
        parser.error(f"{', '.join(left)}: this means nothing beside --jobs, whose file has it for each run")
    with stopping_on_signals():
        if args.store is None:
            _train_all(args)
        else:
            _train_slot(args)
    return 0


def _train_slot(args: argparse.Namespace) -> None:
    """Train one replica of those that come and go; where that fails, say why and end this process."""
    from lowcomm.comm.membership import Rules
    from lowcomm.comm.processes import elastic_store
    from lowcomm.experiment.elastic import train_elastic

    own: World | None = None
    try:
        ((config, folder, data, again),) = _points(args)
        own = world(replicas=1, stages=config.stages, comm=config.comm)
        said = {"grace_s": args.grace, "silence_s": args.silence, "timeout_s": args.timeout}
        rules = Rules(**{name: value for name, value in said.items() if value is not None})
        torch.set_num_threads(1)  # as under torchrun
        summary = train_elastic(
            config,
            elastic_store(args.store),
            args.slot,
            data,
            folder,
            rules=rules,
            quorum=args.quorum,
            host=args.host,
            own=own,
            on_row=Progress(config),
            again=again,
        )
        if own.rank == 0:
            print(_told(config, folder, summary), flush=True)
        own.close()
    except Exception as error:
        who = f"slot {args.slot}" + (f", stage {own.stage}" if own is not None and own.stages > 1 else "")
        _say(who, error)
        if own is not None:
            own.transport.abort(f"{who} failed: {type(error).__name__}: {error}")
        os._exit(1)


def _say(who: str, error: Exception) -> None:
    """Say why this process fails: in a line, where it is one of those that are foreseen."""
    if isinstance(error, ValueError | RuntimeError):
        log.error("%s: %s: %s", who, type(error).__name__, error)
    else:
        traceback.print_exc()
    sys.stderr.flush()


def _train_all(args: argparse.Namespace) -> None:
    """Train what the command line asks for; where that fails, tell the other ranks and end this process."""
    world: World | None = None
    try:
        processes = "TORCHELASTIC_RUN_ID" in os.environ or "RANK" in os.environ
        for config, folder, data, again in _jobs(args):
            progress = Progress(config)
            if processes:
                transport = None if world is None else world.transport
                world = world_from_torchrun(
                    replicas=config.replicas, stages=config.stages, comm=config.comm, transport=transport
                )
                summary = train(config, world, data, folder, on_row=progress, again=again)
                stop = stop_between_runs(world)
                world.leave()
            else:
                summary = train_in_threads(config, data, folder, on_row=progress, again=again)
                stop = requested.is_set()
            if not processes or world.rank == 0:
                print(_told(config, folder, summary), flush=True)
            if stop:
                break
        if world is not None:
            world.transport.close()
    except Exception as error:
        rank = os.environ.get("RANK", "0")
        _say(f"rank {rank}", error)
        if world is not None:
            world.transport.abort(f"rank {rank} failed: {type(error).__name__}: {error}")
        os._exit(1)  # wires may still wait for peers; nothing here is worth waiting for


if __name__ == "__main__":
    sys.exit(main())
