"""Prepare, tune, predict and train the points of the ladder, and say what is done.

    python -m pipelines.ladder prepare        prepare the corpora, and train the probes; with "headline" after it, those
                                              of the headline's rows alone
    python -m pipelines.ladder tune 0.12M     tune all rows of a rung, or those that are named after it
    python -m pipelines.ladder train 0.12M    train its results with what tuning found, or those of the rows named
    python -m pipelines.ladder predict 1.05M  register what is expected of a rung, or of the rows named, before they
                                              have a point there
    python -m pipelines.ladder predict published    register what is expected at the papers' smallest sizes
    python -m pipelines.ladder list           say what is done
    python -m pipelines.ladder headline       train the headline's points anew, into build/ladder/headline

What is done is kept in results/ladder/, and not done again. SIGTERM, or Ctrl-C, writes checkpoints; the same command
continues.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Collection

from lowcomm.settings import ConfigError
from pipelines.ladder.headline import headline_points, retrain
from pipelines.ladder.origin import keep_origin
from pipelines.ladder.plan import LADDER, PUBLISHED, Ladder, Row, Rung
from pipelines.ladder.tune import tune
from pipelines.ladder.workers import Workers, one_by_one
from pipelines.probes import SCALE, write_digests
from pipelines.project import load_params, locked, record_seconds, write_whole


def prepare(ladder: Ladder, *, headline: bool = False) -> None:
    """Prepare the corpora and train the probes, as far as that has not been done; other commands of a checkout wait.

    Where points in git are of this code, on whatever machine, only the probes of rows that are new are trained
    (`origin`). headline: train the probes of the headline's rows alone, and write what its points are made from into
    headline-made-from.json of the build folder.
    """
    with locked(ladder.build / "prepare.lock"):
        _prepare(ladder, headline)


def _prepare(ladder: Ladder, headline: bool) -> None:
    from lowcomm.experiment.data import prepared  # with the tokenizer, which training does without

    points = headline_points(ladder) if headline else []
    wanted = {(point.row.run, point.row.variant) for point in points} or None
    origin = ladder.origin
    write_digests(ladder.project, wanted, origin.digests if origin and origin.is_of_this_code else {})
    for corpus in ladder.params["corpora"]:
        prepared(ladder.project, corpus, ladder.first_rung)
    link_rungs(ladder)
    if headline:
        told = {point.row.name: point.made_from() for point in points}
        write_whole(ladder.build / "headline-made-from.json", json.dumps(told, indent=1) + "\n")
    else:
        keep_origin(ladder)


def link_rungs(ladder: Ladder) -> None:
    """Link the corpora of all rungs to those of the first, whose shards all of them read.

    A link is relative, so that the folder may be moved or copied as a whole. Raises ConfigError where the settings of
    their corpora differ, or where a folder stands in the place of a link.
    """
    for corpus in ladder.params["corpora"]:
        first, others = ladder.first_rung, ladder.params["scales"].keys() - {SCALE, ladder.first_rung}
        folder, config = ladder.project.data_dir(corpus, first), ladder.project.corpus_configs(corpus, scale=first)
        for scale in sorted(others):
            if ladder.project.corpus_configs(corpus, scale=scale) != config:
                raise ConfigError(f"scales.{scale}.data differs from scales.{first}.data: all rungs share one corpus")
            link = ladder.project.data_dir(corpus, scale)
            link.parent.mkdir(parents=True, exist_ok=True)
            to = os.path.relpath(folder, link.parent)
            if link.is_symlink() and os.readlink(link) != to:
                link.unlink()
            elif link.exists() and not link.is_symlink():
                raise ConfigError(f"{link} must be a link to the corpus of {first}: all rungs share one; remove it")
            if not link.is_symlink():
                link.symlink_to(to)


def train(ladder: Ladder, rung: str, workers: Workers, rows: Collection[str] = ()) -> None:
    """Train the results of a rung that are not done, the headline's rows first; remove those that the plan has not.

    rows: those to train, by default all; where some are named, nothing is removed. Raises ConfigError for a row that
    must be predicted or tuned first, and RuntimeError where a point fails or the workers are told to stop.
    """
    ladder.check_registered(rung, rows)
    points = ladder.results_at(rung, rows)
    first = ladder.plan.headline[1]
    todo = sorted((p for p in points if p.read() is None), key=lambda p: p.row.name not in first)
    print(f"{rung}: {len(points) - len(todo)} of {len(points)} points are done", flush=True)
    one_by_one(todo, workers)
    if rows:
        return
    folder = ladder.results / "points" / rung
    for file in sorted(set(folder.rglob("*.json")) - {point.file for point in points}):
        print(f"{file.relative_to(folder)} is no point of the plan any more: removed")
        file.unlink()


def overview(ladder: Ladder) -> str:
    """Return what is done as a table of text, with a line for each rung and row.

    A line has the number of trials, the number of points, and the mean loss of these.
    """
    lines = [f"{'rung':8}{'row':30}{'trials':>7}{'points':>9}   mean loss"]
    rows = ladder.plan.rows
    lines += [_line(ladder, rung, rows[name]) for rung in ladder.plan.rungs.values() for name in rung.rows]
    return "\n".join(lines)


def _line(ladder: Ladder, rung: Rung, row: Row) -> str:
    name = row.name
    trials = len(list((ladder.results / "tuning" / rung.name / name).glob("*.json")))
    losses = [outcome["val_loss"] for outcome in ladder.outcomes(rung.name, name)]
    mean = f"   {sum(losses) / len(losses):.4f}" if losses else ""
    return f"{rung.name:8}{name:30}{trials:7}{f'{len(losses)} of {rung.seeds_of(row)}':>9}{mean}"


def main(argv: list[str] | None = None, ladder: Ladder = LADDER) -> int:
    """Run the command line `argv`, by default the process's own, and return its exit status; see `--help`."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.ladder", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("prepare", "tune", "train", "predict", "list", "headline"))
    parser.add_argument("rung", nargs="?", help="of plan.yaml, for tune, train and predict")
    parser.add_argument("rows", nargs="*", metavar="row", help="some rows of the rung; all by default")
    args = parser.parse_args(argv)
    headline = args.what == "headline" or (args.what, args.rung) == ("prepare", "headline")
    rung = None if headline else args.rung
    if (rung is None) == (args.what in ("tune", "train", "predict")):
        parser.error(f"{args.what} {'needs' if rung is None else 'takes no'} rung")
    if headline and (args.rows or (args.what == "headline" and args.rung)):
        parser.error("headline takes no rung and no rows: plan.yaml names them")
    try:
        if args.what == "list":
            print(overview(ladder))
            return 0
        if rung is not None and (args.what, rung) != ("predict", PUBLISHED):
            ladder.plan.check(rung, args.rows)
        if args.what == "predict":
            from pipelines.ladder.fits import register  # with what draws tables, which training does without

            told = "registered" if register(ladder, rung, args.rows) else "they stand as they were registered before"
            print(f"predictions of {rung}: {told}")
            return 0
        begin = time.perf_counter()
        prepare(ladder, headline=headline)
        with Workers(compiled=not headline) as workers:  # its losses are held to those in git
            if rung is not None:
                {"tune": tune, "train": train}[args.what](ladder, rung, workers, args.rows)
            elif args.what == "headline":
                retrain(ladder, workers)
        if ladder is LADDER and headline:
            stage = "headline" if args.what == "headline" else "headline_probes"
            record_seconds(stage, load_params()["scale"], time.perf_counter() - begin)
    except (ConfigError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
