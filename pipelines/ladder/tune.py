"""Tuning of rows: downhill along one line after the other, until no neighbour of the best value is better.

A walk yields values to try and is sent their losses. It is a generator, so that the `workers` can have several walks
under way at once, and so that tests can walk over a loss in closed form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Generator, Sequence
from typing import Any

import yaml

from lowcomm.settings import ConfigError
from pipelines.ladder.plan import Ladder, Line, Plan, Point, Row, Values
from pipelines.ladder.workers import Task, Workers
from pipelines.project import locked, write_whole

#: A generator that yields values of lines, is sent their loss, and returns the best values with their loss.
Walk = Generator[dict[str, float], float, tuple[dict[str, float], float]]


def _or_worst(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def walk_line(line: Line, name: str, values: dict[str, float], loss: float) -> Walk:
    """Walk along the line `name` from values whose loss is known. A loss that is not finite is worse than any other.

    Each step is to a neighbour that is better. The walk ends where no neighbour is, and returns those values and their
    loss.
    """
    losses = {values[name]: loss}
    at, ways = values[name], [1, -1]
    while ways:
        beside = line.beside(at, ways[0])
        if beside is None:
            ways.pop(0)
            continue
        if beside not in losses:
            losses[beside] = _or_worst((yield values | {name: beside}))
        if losses[beside] < losses[at]:
            at, ways = beside, [ways[0]]  # on in this way; behind lies what is worse
        else:
            ways.pop(0)
    return values | {name: at}, losses[at]


def walk_row(plan: Plan, row: Row, starts: Sequence[Values]) -> Walk:
    """Walk along all lines of a row from the best of several starts, of which there is at least one.

    A line that a start leaves out begins where the row begins it, or else where the line itself begins.
    """
    begin, tried = {name: plan.lines[name].begin for name in row.lines} | dict(row.begin), []
    for start in starts:
        values = begin | dict(start)
        tried.append((values, _or_worst((yield dict(values)))))
    values, loss = min(tried, key=lambda one: one[1])
    for name in row.lines:
        values, loss = yield from walk_line(plan.lines[name], name, values, loss)
    return values, loss


def _is_allowed(point: Point) -> bool:
    try:
        return point.config is not None
    except ConfigError:
        return False


def _done(point: Point) -> dict[str, Any] | None:
    """Return the outcome of a trial; None where it is not done, or its settings are refused now."""
    return point.read() if _is_allowed(point) else None


def best_trial(ladder: Ladder, row: Row, rung: str) -> list[dict[str, float]]:
    """Return the values of the best of a row's trials that are done at a rung, in a list; empty where none is."""
    files = sorted((ladder.results / "tuning" / rung / row.name).glob("*.json"))
    points = [ladder.trial(row, rung, json.loads(file.read_text())["values"]) for file in files]
    done = [told for point in points if (told := _done(point)) and told["val_loss"] is not None]
    return [min(done, key=lambda told: told["val_loss"])["values"]] if done else []


def still_stands(ladder: Ladder, row: Row, rung: str, entry: dict[str, Any] | None) -> bool:
    """Tell whether what was found of a row, its entry in the tuned values, still holds.

    It does if it has a value for each of the row's lines, and a trial of these values that would be the same today has
    the loss that was found. entry: None where nothing was found.
    """
    if entry is None or "tuning_loss" not in entry or not set(row.lines) <= set(entry["values"]):
        return False
    told = _done(ladder.trial(row, rung, entry["values"]))
    return told is not None and told["val_loss"] == entry["tuning_loss"]


def tune(ladder: Ladder, rung: str, workers: Workers, rows: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Tune the rows of a rung and return what was found: of each row its values, its loss, and how many trials it took.

    What is found of a row is written at once, beside what had been found of others. Where no rows are named, those of
    which what was found still holds (`still_stands`) are left as they are; rows that are named are walked once more.

    A row begins with the best of three: what was found for it at the rung below, what was found for its parent here,
    and its own best trial here so far (which another order of its lines may have come to). A row without lines takes
    its parent's as it is. A value that its line cannot take any more, or whose line is gone, is left out, so that the
    line begins where the plan says. Where a walk comes to settings that are refused (a pull beyond its bound, say) it
    turns back.

    Args:
        ladder: the ladder, with its plan.
        rung: the rung whose rows are tuned.
        workers: the processes that train the trials.
        rows: some rows of the rung, each of which begins from another of them or from one that has been tuned; by
            default all of them.

    Raises:
        ConfigError: the rung takes what was found at another, a row is none of the rung's, its parent has not been
            tuned, or it begins with settings that are refused.
        RuntimeError: a trial fails, or the workers are told to stop.
    """
    plan = ladder.plan
    there = plan.rungs[rung]
    if there.tuned_at != rung:
        raise ConfigError(f"rung {rung} takes what was found at {there.tuned_at}: nothing is tuned at it")
    rung_below = plan.rung_below(rung)
    known = ladder.read_tuned(rung_below) if rung_below else {}
    plan.check(rung, rows)
    starts = {name: plan.rows[name].start for name in rows or there.rows}
    file = ladder.tuned_file(rung)
    before = ladder.read_tuned(rung) if file.exists() else {}
    found: dict[str, dict[str, Any]] = {}
    for name, start in starts.items():
        if start and start not in starts and start not in before:
            raise ConfigError(f"{name} begins from {start}, which has not been tuned at {rung}: name both")

    def children(name: str) -> list[Task]:
        return [walk(plan.rows[child]) for child, start in starts.items() if start == name]

    def keep(row: str) -> None:
        """Write what was found of a row beside what stands of others, which other commands may have found meanwhile."""
        with locked(ladder.build / "tuned.lock"):
            both = (yaml.safe_load(file.read_text()) if file.exists() else {}) | {row: found[row]}
            walked = {name: both[name] for name in there.rows if name in both and plan.rows[name].lines}
            write_whole(file, yaml.safe_dump(walked, sort_keys=False))

    def walk(row: Row) -> Task:
        below, parent = known.get(row.name), found.get(row.start, before.get(row.start))
        if row.lines and row.name not in rows and still_stands(ladder, row, rung, before.get(row.name)):
            found[row.name] = before[row.name]
        elif row.lines:
            begun = [entry["values"] for entry in (below, parent) if entry] + best_trial(ladder, row, rung) or [{}]
            begun = [{k: v for k, v in start.items() if k in plan.lines and plan.lines[k].has(v)} for start in begun]
            steps, files = walk_row(plan, row, begun), set()
            values = next(steps)
            try:
                while True:
                    point = ladder.trial(row, rung, values)
                    if files and not _is_allowed(point):
                        values = steps.send(math.inf)
                        continue
                    files.add(point.file)
                    loss = (yield point)["val_loss"]
                    values = steps.send(math.inf if loss is None else loss)
            except StopIteration as end:
                best, loss = end.value
            found[row.name] = {"values": best, "tuning_loss": loss, "trials": len(files)}
            keep(row.name)
        else:
            found[row.name] = {"values": dict(parent["values"]) if parent else {}, "trials": 0}
        return children(row.name)

    workers.run([walk(plan.rows[name]) for name, start in starts.items() if start not in starts])
    return {name: found[name] for name in there.rows if name in found}
