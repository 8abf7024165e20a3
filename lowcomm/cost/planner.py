"""Which method to use: every feasible configuration of a cluster, what it takes and what our runs say of its loss.

    lowcomm plan --nodes 8 --memory-gb 24 --mbit-per-s 100 --latency-ms 40 --model partial_updates/1.3b

A configuration is a grid of replicas x stages and a method: gradients exchanged, or local updates with any of streaming
(fragments, overlap, 4 bits), pairs, slices; with stages, a dense boundary or a subspace. What settings refuse, and what
does not fit into memory, is left out. Time and bytes are `predict`'s, memory is `footprint`'s.

Loss is not predicted: it is what runs measured of each ingredient (`ingredients`), turned into the tokens, and so the
days, that buy a penalty back: these rank configurations.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lowcomm.cost.footprint import node_bytes
from lowcomm.cost.ingredients import Method, Penalties
from lowcomm.cost.predict import Links, predict, sent_per_step, stage_flops
from lowcomm.cost.tables import markdown, si_bytes
from lowcomm.experiment.config import DataConfig, RunConfig, TrainConfig
from lowcomm.experiment.project import pick
from lowcomm.model.accounting import parameters
from lowcomm.model.config import ModelConfig
from lowcomm.model.presets import PRESETS
from lowcomm.settings import ConfigError


@dataclass(frozen=True)
class Cluster:
    """Equal machines, and what lies between them."""

    nodes: int
    memory_gb: float  # of one, 10^9 bytes
    tflops: float  # that one sustains in training
    links: Links
    price_per_node_hour: float = 0.0

    def __post_init__(self) -> None:
        for name in ("nodes", "memory_gb", "tflops"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, and finite, got {getattr(self, name)}")
        if not 0 <= self.price_per_node_hour < math.inf:
            raise ValueError(f"price_per_node_hour must be at least 0, got {self.price_per_node_hour}")


@dataclass(frozen=True)
class Job:
    """The training that is to be done. global_batch counts sequences of the model's length."""

    model: ModelConfig
    tokens: float
    global_batch: int = 256

    def __post_init__(self) -> None:
        for name in ("tokens", "global_batch"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, and finite, got {getattr(self, name)}")

    @property
    def steps(self) -> int:
        return max(1, round(self.tokens / (self.global_batch * self.model.seq_len)))


#: H, slices and ratios that are tried.
ROUNDS, SLICES, RATIOS = (30, 100), (1, 2, 4, 8), (1, 8, 100)


def methods(replicas: int, stages: int) -> Iterator[Method]:
    """All that a grid allows."""
    for ratio in RATIOS if stages > 1 else (1,):
        yield Method(ratio=ratio)
        if replicas == 1:
            continue
        for sync_every_steps in ROUNDS:
            for streaming in (False, True):
                for pairs in (False, True) if replicas > 2 else (False,):
                    for slices in (n for n in SLICES if (2 if pairs else replicas) % n == 0):  # each owned in a group
                        yield Method(sync_every_steps, streaming, pairs, slices, ratio)


def run_of(method: Method, job: Job, replicas: int, stages: int, *, recompute: bool = False) -> RunConfig:
    """The run it would be, in micro-batches as small as they can be. Raises ConfigError where that cannot work."""
    if job.global_batch % replicas:
        raise ConfigError(f"global_batch = {job.global_batch} does not split into {replicas} replicas")
    mine = job.global_batch // replicas
    most = mine if stages == 1 else 8 * stages  # of a pipeline's bubble there is little left then
    train = TrainConfig(
        steps=job.steps,
        global_batch=job.global_batch,
        seq_len=job.model.seq_len,
        lr=1e-3,
        warmup_steps=0,
        eval_every=0,
        eval_sequences=replicas,
        accumulation=max(n for n in range(1, min(mine, most) + 1) if mine % n == 0),
        recompute=recompute,
        precision="bf16",
    )
    return RunConfig(
        name="plan",
        scale="plan",
        seed=0,
        replicas=replicas,
        stages=stages,
        model=job.model,
        data=DataConfig("any", job.model.vocab_size),
        train=train,
        method=method.settings(job.model, stages),
    )


def plan(cluster: Cluster, job: Job, penalties: Penalties) -> pd.DataFrame:
    """A row for each configuration that fits, best first: fewest days to the loss of dense data-parallel training.

    Columns: method, its ingredients (as `Method`), replicas, stages, micro_batches, recompute, step_seconds,
    utilisation, bytes_per_token (of all machines, by both axes), memory_gb, days, cost, loss_percent (the penalty),
    loss_deviation, extrapolated, days_to_equal_loss (and _low, _high), front (whether no other is both faster and
    better at equal tokens). Empty where nothing fits; raises ConfigError where there is nothing to fit.
    """
    rows, tried, refused = [], False, ConfigError("no grid of replicas and stages")
    for stages in range(1, min(cluster.nodes, job.model.layers) + 1):
        if cluster.nodes % stages:
            continue
        replicas = cluster.nodes // stages
        for method in methods(replicas, stages):
            try:
                runs = [run_of(method, job, replicas, stages, recompute=again) for again in (False, True)]
            except ConfigError as error:
                refused = error
                continue
            tried = True
            held = ((config, node_bytes(config) / 1e9) for config in runs)
            fits = next(((config, gb) for config, gb in held if gb <= cluster.memory_gb), None)
            if fits is not None:
                rows.append(_row(cluster, job, method, *fits, penalties))
    if not tried:
        raise ConfigError(f"{cluster.nodes} nodes have no configuration: {refused}")
    table = pd.DataFrame(rows)
    if table.empty:
        return table
    table["front"] = front(table.days, table.loss_percent)
    return table.sort_values(["days_to_equal_loss", "days"], kind="stable").reset_index(drop=True)


def _row(
    cluster: Cluster, job: Job, method: Method, config: RunConfig, memory_gb: float, penalties: Penalties
) -> dict[str, Any]:
    compute = [(f / cluster.tflops / 1e12, b / cluster.tflops / 1e12) for f, b in stage_flops(config)]
    expected = predict(config, compute, cluster.links)
    seconds = float(expected.step_seconds)
    penalty = penalties.of(method, config.replicas, config.stages)
    days = seconds * job.steps / 86_400
    likely, low, high = penalties.buy_back(penalty)
    return {
        "method": method.name,
        **dataclasses.asdict(method),
        "replicas": config.replicas,
        "stages": config.stages,
        "micro_batches": config.train.accumulation,
        "recompute": config.train.recompute,
        "step_seconds": seconds,
        "utilisation": float(expected.utilisation),
        "bytes_per_token": sum(sent_per_step(config)) / (config.train.global_batch * config.train.seq_len),
        "memory_gb": memory_gb,
        "days": days,
        "cost": days * 24 * cluster.nodes * cluster.price_per_node_hour,
        "loss_percent": 100 * math.expm1(penalty.log_ratio),
        "loss_deviation": 100 * penalty.deviation,
        "extrapolated": penalty.extrapolated,
        "days_to_equal_loss": days * likely,
        "days_to_equal_loss_low": days * low,
        "days_to_equal_loss_high": days * high,
    }


def front(days: Sequence[float], loss: Sequence[float]) -> list[bool]:
    """Tell of each point whether no other is at least as good in both and better in one."""
    points = list(zip(days, loss, strict=True))
    return [not any((d <= x and v < y) or (d < x and v <= y) for d, v in points) for x, y in points]


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """For people."""
    return pd.DataFrame(
        {
            "method": table.method,
            "replicas x stages": [f"{r} x {s}" for r, s in zip(table.replicas, table.stages, strict=True)],
            "s/step": table.step_seconds.map("{:.3g}".format),
            "utilisation": table.utilisation.map("{:.0%}".format),
            "bytes sent per token": table.bytes_per_token.map(si_bytes),
            "GB per node": table.memory_gb.map("{:.1f}".format),
            "days": table.days.map("{:.3g}".format),
            "cost": table.cost.map("{:,.0f}".format),
            "loss": [f"{p:+.1f} ± {d:.1f} %" for p, d in zip(table.loss_percent, table.loss_deviation, strict=True)],
            "extrapolated": table.extrapolated.map("{:.1f} x".format),
            "days to equal loss": [
                f"{d:.3g} ({low:.3g} to {high:.3g})"
                for d, low, high in zip(
                    table.days_to_equal_loss, table.days_to_equal_loss_low, table.days_to_equal_loss_high, strict=True
                )
            ],
            "front": ["*" if f else "" for f in table.front],
        }
    )


def measured_penalties() -> Path:
    """The file of penalties that belongs to this installation: of the checkout around it, or as it was installed."""
    inner = Path("results/laptop/together/training/penalties.csv")
    checkout = Path(__file__).resolve().parents[2] / inner
    return checkout if checkout.exists() else Path(sys.prefix) / "share" / "lowcomm" / inner.name


def main(words: Sequence[str] | None = None) -> int:
    """The command."""
    ask = argparse.ArgumentParser(prog="lowcomm plan", description=__doc__.splitlines()[0])
    number = functools.partial(ask.add_argument, type=float)
    ask.add_argument("--nodes", type=int, required=True)
    number("--memory-gb", required=True, help="of one machine")
    number("--mbit-per-s", required=True, help="between any two machines")
    number("--latency-ms", default=0.0)
    number("--jitter", default=0.0, help="of the latency, standard deviation over mean")
    number("--stragglers", default=0.0, help="of a step's computing, standard deviation over mean")
    number("--tflops", default=60.0, help="that a machine sustains (default: %(default)s)")
    number("--price", default=0.0, help="of a machine's hour")
    ask.add_argument("--model", required=True, help="a preset of lowcomm.model.presets")
    number("--tokens", default=0.0, help="default: 20 a parameter")
    ask.add_argument("--global-batch", type=int, default=256, help="sequences (default: %(default)s)")
    ask.add_argument("--penalties", type=Path, help="what methods cost in loss (default: as measured at laptop scale)")
    ask.add_argument("--rows", type=int, default=12, help="shown besides the front (default: %(default)s)")
    given = ask.parse_args(words)
    try:
        links = Links(given.mbit_per_s, given.latency_ms, given.jitter, given.stragglers)
        cluster = Cluster(given.nodes, given.memory_gb, given.tflops, links, given.price)
        model = pick(PRESETS, given.model, "preset")
        job = Job(model, given.tokens or 20 * parameters(model).total, given.global_batch)
        table = plan(cluster, job, Penalties.read(given.penalties or measured_penalties()))
    except (ConfigError, ValueError) as error:
        ask.exit(2, f"{error}\n")
    if table.empty:
        ask.exit(1, f"nothing fits into {given.memory_gb:g} GB on {given.nodes} nodes\n")
    print(f"{job.tokens:.3g} tokens in {job.steps:,} steps; {len(table)} configurations fit; best first\n")
    print(markdown(shown(table[(table.index < given.rows) | table.front])))
    print("\nTimes are lower bounds: packets' headers, TCP's slow start and what is sent again are not counted.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
