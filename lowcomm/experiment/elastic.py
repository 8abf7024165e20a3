"""One replica of a run whose replicas leave and come back: each start trains from where the run is to its end.

    lowcomm store 29400                                      on a machine that stays
    lowcomm train diloco_m8 --store head:29400 --slot 3      on each of eight machines; again, whenever it has ended

A replica that is a pipeline is a torchrun of its own, whose ranks are its stages, and leaves as a whole when one fails:

    torchrun --standalone --nproc-per-node 4 --max-restarts 10 \\
        -m lowcomm.train diloco_m8 --set stages=4 --store head:29400 --slot 3

Each slot has a folder of its own, on its own machine: what it has measured, a checkpoint to come back from when all
others are gone, and at the end a summary that says who took part in each round. A replica that is told to stop
(SIGTERM) leaves, and nobody waits for it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lowcomm.comm.membership import Rules
from lowcomm.comm.notes import Notes
from lowcomm.comm.start import world
from lowcomm.comm.transport import CommError
from lowcomm.comm.wire import Ledger
from lowcomm.comm.world import World
from lowcomm.experiment.batches import TokenData
from lowcomm.experiment.checkpoint import Checkpoints
from lowcomm.experiment.claim import Claim
from lowcomm.experiment.config import RunConfig
from lowcomm.experiment.run_folder import Metrics, RunFolder
from lowcomm.experiment.stop import StopAgreement
from lowcomm.experiment.train import (
    OnRow,
    claimed,
    digests,
    environment,
    identity,
    mark_source,
    perplexity,
    put_back,
    started_with,
    write_results,
)
from lowcomm.experiment.trainer import Trainer, is_due
from lowcomm.methods.elastic import ElasticUpdates
from lowcomm.settings import ConfigError

log = logging.getLogger("lowcomm")


def slot_folder(folder: RunFolder, slot: int) -> RunFolder:
    """Return the folder of one slot (from 0) of a run, which is inside that of the run."""
    name = f"slot-{slot:03d}"
    return RunFolder(folder.out / name, folder.times / name)


def train_elastic(
    config: RunConfig,
    notes: Notes,
    slot: int,
    data_folder: Path,
    folder: RunFolder | Path,
    *,
    rules: Rules | None = None,
    quorum: int | None = None,
    host: str | None = None,
    own: World | None = None,
    on_row: OnRow | None = None,
    again: bool = False,
) -> dict[str, Any]:
    """Train one slot of the run `config`, and return this slot's summary of the run.

    The summary of a replica that was told to stop has `complete = False`.

    Args:
        config: the run's configuration; its replicas are the slots.
        notes: the store by which replicas agree on who takes part (`lowcomm.elastic_store`).
        slot: the share of the data that this replica trains on, from 0.
        data_folder: the prepared corpus.
        folder: the run's folder, in which the slot has one of its own.
        rules, quorum, host: as for `ElasticUpdates`.
        own: the ranks of this slot, the stages of its pipeline; by default those that torchrun has started, or this
            process alone.
        on_row: called with the trainer and each row of metrics.
        again: whether to replace a finished run in the slot's folder, or another one.

    Raises ConfigError where the folder is another's (`claim.Claim`), replicas were started differently, the run cannot
    be elastic, or it is over and nobody is left who has its end; and CommError where the store does not answer, or too
    few others can be reached for too long (`Rules`).
    """
    folder = slot_folder(RunFolder.beside(folder) if isinstance(folder, Path) else folder, slot)
    _check(config, slot)
    own = own or world(replicas=1, stages=config.stages, comm=config.comm)
    folder.make()
    t = config.train
    data = TokenData(data_folder, seq_len=t.seq_len, global_batch=t.global_batch, seed=config.seed, alike=t.alike)
    begun = started_with(config, data)
    run = identity(config, begun) | digests(data.card) | {"slot": slot}
    own.agree(begun)
    told = {"notes": notes, "slot": slot, "slots": config.replicas, "rules": rules, "quorum": quorum, "host": host}
    trainer = Trainer(config, own, data, elastic=told | {"begun": begun})
    try:
        if again and trainer.engine.is_over() and folder.read_summary() is not None:
            raise ConfigError(
                f"the run of this store is over, and {folder.out} has its results: to train it anew, use another store"
            )
        with claimed(folder, own, run, again=again) as claim:
            return _train(trainer, folder, run, claim, on_row)
    finally:
        trainer.engine.close()


def _check(config: RunConfig, slot: int) -> None:
    """Raise ConfigError for a slot that the run does not have, and for settings that do not suit elastic replicas."""
    t = config.train
    if not 0 <= slot < config.replicas:
        raise ConfigError(f"slot {slot} is none of the {config.replicas} of run {config.name}: they count from 0")
    if not config.exchanges_parameters:
        raise ConfigError(f"elastic replicas need local updates, not method.exchange = {config.method.exchange}")
    if config.method.route != "fixed":
        raise ConfigError(f"elastic replicas are pipelines of their own, not method.route = {config.method.route}")
    if config.constraint is not None and config.method.boundary.update_every_steps:
        raise ConfigError("elastic replicas keep their subspace: method.boundary.update_every_steps must be 0")
    for key, value in {"train.evaluate_also": t.evaluate_also, "train.record_spread": t.record_spread}.items():
        if value:
            raise ConfigError(f"{key} asks for what other replicas have, who may be gone where runs are elastic")


def _train(
    trainer: Trainer, folder: RunFolder, run: dict[str, Any], claim: Claim | None, on_row: OnRow | None
) -> dict[str, Any]:
    config, t, engine, own = trainer.config, trainer.config.train, trainer.engine, trainer.world
    assert isinstance(engine, ElasticUpdates)
    checkpoints = Checkpoints(folder.checkpoints, own, config.checkpoint.keep)
    found = checkpoints.newest(run)
    if found is None:
        if claim:
            if not (folder.metrics(0).exists() and engine.was_there()):
                claim.begin()  # else an earlier start in this run was killed before its first checkpoint
            mark_source(folder, begins=True)
        own.barrier()
    else:
        if claim:
            mark_source(folder, begins=False)
        step, tensors, meta = found
        put_back(trainer, step, tensors, folder)
        for ledger, told in zip(_ledgers(trainer), meta["ledgers"], strict=True):
            ledger.load(told)
    metrics, clock = Metrics(folder.metrics(own.rank), None), Metrics(folder.clock(own.rank), None)
    stop = StopAgreement(own, config.comm.timeout_s, on_request=engine.stop)
    try:
        engine.join()
        log.info("slot %d has joined at step %d, after %d rounds", engine.slot, engine.steps_done, engine.rounds_done)
        own.clock.start(0.0)
        engine.finish()  # where it has come back to a run without steps left
        step = saved = engine.steps_done
        taken = 0
        while engine.is_training and not stop.before(taken + 1):
            before, step, taken = step, engine.steps_done + 1, taken + 1
            row = trainer.step(step, before=before)
            # At the end each evaluates, for its summary.
            if step < t.steps and engine.is_spokesman and trainer.is_evaluated(step, before):
                row |= trainer.evaluations(step)
            metrics.add(row | {"tokens": engine.tokens_read, "rounds": engine.rounds_done})
            clock.add({"step": step, "seconds": own.clock.elapsed()})
            if on_row is not None:
                on_row(trainer, row)
            engine.finish()  # which does nothing while there are inner steps left, and may find that there are some
            if is_due(t.log_every, before, step):
                metrics.write()
                clock.write()
            if engine.is_training and is_due(config.checkpoint.every_steps, saved, engine.steps_done):
                saved = engine.steps_done
                _save(trainer, checkpoints, metrics, run)
        if engine.is_training:
            return _leave(trainer, checkpoints, metrics, run)
        metrics.write()
        clock.write()
        _save(trainer, checkpoints, metrics, run)  # as nobody may be left who has the end, if that cannot be written
        summary = _summary(trainer)
        write_results(trainer, folder, summary)
        checkpoints.clear()
        if claim:
            claim.done()
        return summary
    except CommError:
        if not stop.is_requested:
            raise
        return _leave(trainer, checkpoints, metrics, run)  # it has been told to stop while it waited for others
    finally:
        stop.close()
        metrics.close()
        clock.close()


def _leave(trainer: Trainer, checkpoints: Checkpoints, metrics: Metrics, run: dict[str, Any]) -> dict[str, Any]:
    """Write a checkpoint of what this slot has, as it has been told to stop, and return the summary."""
    engine = trainer.engine
    if engine.steps_done:  # else it has nothing but what it began with, or has not joined since it is back
        _save(trainer, checkpoints, metrics, run)
    log.info("slot %d leaves after step %d; the same command comes back", engine.slot, engine.steps_done)
    return {"complete": False, "step": engine.steps_done}


def _save(trainer: Trainer, checkpoints: Checkpoints, metrics: Metrics, run: dict[str, Any]) -> None:
    metrics.keep()
    meta = {"ledgers": [ledger.state() for ledger in _ledgers(trainer)]}
    checkpoints.save(trainer.engine.steps_done, trainer.tensors(), meta, run)


def _ledgers(trainer: Trainer) -> tuple[Ledger, Ledger]:
    """Return the ledgers of what this rank sends to its own stages, and to other replicas."""
    return trainer.world.ledger, trainer.engine.elastic.ledger


def _summary(trainer: Trainer) -> dict[str, Any]:
    """Return what this slot knows of the run at its end; all slots return the same rounds."""
    config, engine = trainer.config, trainer.engine
    loss = trainer.evaluate()
    rounds = engine.told()
    taken = [len(r["slots"]) for r in rounds]
    return {
        "complete": True,
        "run": config.to_dict(),
        "slot": engine.slot,
        "val_loss": loss,
        "val_perplexity": perplexity(loss),
        "tokens": sum(sum(r["tokens"]) for r in rounds),
        "tokens_of_slots": {slot: engine.elastic.roll.tokens(slot) for slot in range(config.replicas)},
        "tokens_lost": sum(tokens for _, _, tokens in engine.elastic.roll.missed),
        "participation": sum(taken) / len(taken) / config.replicas,
        "rounds": rounds,
        "sent_bytes": trainer.world.ledger.by_purpose() | engine.elastic.ledger.by_purpose(),
        "environment": environment(trainer.world),
    }
