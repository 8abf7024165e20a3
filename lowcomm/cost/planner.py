"""Which method to use: every feasible configuration of a cluster, what it takes and what runs say of its loss.

    lowcomm plan --nodes 8 --memory-gb 24 --mbit-per-s 100 --latency-ms 40 --model partial_updates/1.3b

A configuration is a grid of replicas x stages and a method: gradients exchanged, DeMo, or local updates with any of
streaming (fragments, overlap, 4 bits), pairs and slices, or with sparse messages, an outer momentum that rises, or
GASLoC's; with stages, a dense boundary, a subspace or, with Muon, a projection; AdamW or Muon inside, with Muon also
messages in 2 bits. Where replicas may send nonsense (`--untrusted`), it is local updates among all of them with a
clipped mean. Machines and their links being alike, either all replicas compress between their stages or none does: of
selective compression, sparse messages over a subspace is the case of all. What settings refuse, and what does not fit
into memory, is left out. Time and bytes are `predict`'s, memory is `footprint`'s. The
global batch is rounded to what the replicas can share and pipelines split.

Loss is not predicted: it is what runs measured of each ingredient, ours or a paper's, whichever is nearer
(`ingredients`), turned into the tokens, and so the days, that buy a penalty back. These rank configurations, by their
high end: at one deviation above the likely loss, which grows with the distance to the runs that it comes from. A method
with an ingredient that nothing has measured is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from lowcomm.cost.footprint import node_bytes
from lowcomm.cost.ingredients import Method, Penalties, Penalty
from lowcomm.cost.predict import Links, largest_stage_numel, predict, sent_per_step, stage_flops
from lowcomm.cost.tables import markdown, si_bytes
from lowcomm.experiment.config import DataConfig, RunConfig, TrainConfig
from lowcomm.methods.elastic import least_quorum
from lowcomm.model.accounting import parameters, training_flops
from lowcomm.model.config import ModelConfig
from lowcomm.model.presets import PRESETS
from lowcomm.settings import ConfigError, build, nearest

#: Rounds that a run must have room for; steps, where there are no rounds.
FEWEST_ROUNDS = 10


@dataclass(frozen=True)
class Cluster:
    """The machines of a cluster, and the links between them.

    Machines are equal, but that the last `slow` of them may compute at a share `slow_speed` of the others' speed. They
    may stand in boxes of `per_box` (the GPUs of a server), with a fast link between any two of a box; `links`
    are then those of a box to any other, which its machines share. untrusted: any replica may send nonsense, so that
    only those methods are tried whose mean withstands it. Raises ValueError where a number is out of range.
    """

    nodes: int
    memory_gb: float  # of one machine, in 10^9 bytes
    tflops: float  # TFLOP/s that one machine sustains in training
    links: Links
    price_per_node_hour: float = 0.0
    per_box: int = 1
    inside_mbit_per_s: float = 0.0
    slow: int = 0
    slow_speed: float = 1.0
    untrusted: bool = False

    def __post_init__(self) -> None:
        if self.per_box < 1 or self.nodes % self.per_box:
            raise ValueError(f"per_box must be at least 1 and divide nodes = {self.nodes}, got {self.per_box}")
        if self.per_box > 1 and not 0 < self.inside_mbit_per_s < math.inf:
            raise ValueError(
                f"inside_mbit_per_s must be above 0, and finite, got {self.inside_mbit_per_s}: it is the rate inside of"
                f" boxes of {self.per_box}"
            )
        for name in ("nodes", "memory_gb", "tflops"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, and finite, got {getattr(self, name)}")
        if not 0 <= self.slow < self.nodes or not 0 < self.slow_speed <= 1:
            raise ValueError(
                f"slow must be fewer than nodes = {self.nodes}, at a speed above 0 and at most 1, got {self.slow} at"
                f" {self.slow_speed}"
            )
        if not 0 <= self.price_per_node_hour < math.inf:
            raise ValueError(f"price_per_node_hour must be at least 0, got {self.price_per_node_hour}")

    def speeds(self, replicas: int) -> list[float]:
        """Return each replica's speed, as a share of a fast one's; a slow machine makes all of its replica slow."""
        slow = math.ceil(self.slow / (self.nodes // replicas))
        return [1.0] * (replicas - slow) + [self.slow_speed] * slow

    def links_of(self, width: int, stages: int) -> tuple[Links, list[Links]]:
        """Return the links between replicas and those of the boundaries of one, where a stage has `width` machines.

        Stages stand in boxes in their order. Where a box's last stage is not the last of a replica, its boundary has
        the box's link for itself; where boxes do not begin with the same stage, each boundary has a shard's part of it.
        """
        if self.per_box == 1:
            return self.links, [self.links] * (stages - 1)
        inside = Links(self.inside_mbit_per_s, stragglers=self.links.stragglers)
        shards = self.per_box // width  # of a box, which share its link to the others
        shared = replace(self.links, mbit_per_s=self.links.mbit_per_s / shards)
        if self.nodes == self.per_box:
            return inside, [inside] * (stages - 1)
        if shards % stages and stages % shards:
            return shared, [shared] * (stages - 1)
        return shared, [inside if after % shards else self.links for after in range(1, stages)]


@dataclass(frozen=True)
class Job:
    """The training that is to be done; `global_batch` counts sequences of the model's length, and may be rounded.

    Raises ValueError where a number is out of range, or the tokens are too few for `FEWEST_ROUNDS` steps.
    """

    model: ModelConfig
    tokens: float
    global_batch: int = 256

    def __post_init__(self) -> None:
        for name in ("tokens", "global_batch"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, and finite, got {getattr(self, name)}")
        if self.tokens < (least := FEWEST_ROUNDS * self.global_batch * self.model.seq_len):
            raise ValueError(f"tokens must be {FEWEST_ROUNDS} steps' or more, {least:,}, got {self.tokens:g}")

    def batch(self, replicas: int, stages: int = 1) -> int:
        """Return the multiple of `replicas` that is nearest to `global_batch`, within an eighth of it.

        For pipelines of several stages it is the nearest whose share splits into `FULL` micro-batches per stage or
        more, or into single sequences; where there is none, the nearest that lacks the fewest micro-batches. Raises
        ConfigError where no multiple is within an eighth.
        """
        return _batch(self.global_batch, replicas, stages)


#: Micro-batches per stage from which a pipeline counts as full, and beyond which there is little left to gain.
FULL, MOST = 4, 8


def micro_batches(share: int, stages: int) -> int:
    """Return into how many equal micro-batches a replica splits its share of a batch: as many as it can.

    They are `MOST` per stage of a pipeline at most; one stage alone takes a sequence at a time.
    """
    most = share if stages == 1 else min(share, MOST * stages)
    return next(count for count in range(most, 0, -1) if share % count == 0)


def _shares(asked: int, replicas: int) -> Iterator[int]:
    """Yield the shares of a batch that make it within an eighth of what is asked for, the nearest first."""
    near = round(asked / replicas)
    for off in range(asked // replicas // 8 + 2):
        for share in sorted({near - off, near + off}, key=lambda share: abs(share * replicas - asked)):
            if share >= 1 and abs(share * replicas / asked - 1) <= 1 / 8:
                yield share


@functools.lru_cache(maxsize=256)  # a planner asks it of the same grids for each method
def _batch(asked: int, replicas: int, stages: int) -> int:
    best, least = 0, math.inf  # the share that lacks the fewest micro-batches, and how many it lacks
    for share in _shares(asked, replicas):
        lacking = min(FULL * stages, share) - micro_batches(share, stages) if stages > 1 else 0
        if lacking <= 0:
            return share * replicas
        if lacking < least:
            best, least = share, lacking
    if not best:
        raise ConfigError(
            f"global_batch = {asked} does not split into {replicas} replicas, nor does anything within an eighth of it"
        )
    return best * replicas


#: H, slices, ratios of a subspace and ratio of a projection that are tried.
ROUNDS, SLICES, RATIOS, PROJECTED = (30, 100, 300, 1000), (1, 2, 4, 8), (1, 8, 100), 12
#: Muon's rate to begin tuning with.
MUON_LR = 0.02


def methods(replicas: int, stages: int) -> Iterator[Method]:
    """Yield all methods that a grid of `replicas` x `stages` allows."""
    inside = [Method(ratio=ratio) for ratio in (RATIOS if stages > 1 else (1,))] + [Method(muon=True)]
    inside += [Method(ratio=PROJECTED, muon=True, projection=True)] * (stages > 1)
    for base in inside:
        yield base
        if replicas == 1:
            continue
        for sync_every_steps in ROUNDS:
            local = replace(base, sync_every_steps=sync_every_steps)
            for streaming in (False, True):
                for pairs in (False, True) if replicas > 2 else (False,):
                    for slices in SLICES[:1] if base.muon else SLICES:  # Muon wants whole matrices
                        if (2 if pairs else replicas) % slices == 0:  # each owned in a group
                            yield replace(local, streaming=streaming, pairs=pairs, slices=slices)
                yield replace(local, streaming=streaming, rising_momentum=True)
            yield replace(local, sparse_messages=True)
            if base.muon:
                yield replace(local, two_bits=True)
            if replicas > 2:
                yield replace(local, pairs=True, gossip_momentum=True)
        if base == Method():
            yield Method(1, demo=True)


def withstanding(tried: Iterable[Method], replicas: int) -> Iterator[Method]:
    """Yield those of some methods that can have a clipped mean, with it; three replicas or more own each value."""
    for method in tried:
        among_all = method.sync_every_steps and not method.pairs and not method.demo
        if among_all and replicas // method.slices > 2:
            yield replace(method, clipped_mean=True)


def run_of(
    method: Method, job: Job, replicas: int, stages: int, *, recompute: bool = False, width: int = 1
) -> RunConfig:
    """Return the configuration of the run that does a job by a method, with micro-batches as small as they can be.

    A pipeline has at most `MOST` micro-batches per stage. width: how many machines share the sequences of each of them.
    Raises ConfigError where the job does not divide so, is shorter than `FEWEST_ROUNDS` rounds, or settings clash.
    """
    batch = job.batch(replicas * width, stages)
    steps = max(1, round(job.tokens / (batch * job.model.seq_len)))
    if steps < FEWEST_ROUNDS * method.sync_every_steps:
        raise ConfigError(f"{steps} steps are fewer than {FEWEST_ROUNDS} rounds of {method.sync_every_steps}")
    train = TrainConfig(
        steps=steps,
        global_batch=batch,
        seq_len=job.model.seq_len,
        lr=1e-3,
        warmup_steps=0,
        eval_every=0,
        eval_sequences=replicas,
        accumulation=micro_batches(batch // replicas // width, stages),
        recompute=recompute,
        precision="bf16",
        **({"optimizer": "muon", "muon_lr": MUON_LR} if method.muon else {}),
        **({"optimizer": "sgd", "decay": "constant", "weight_decay": 0.0} if method.demo else {}),
    )
    settings = method.settings(job.model, stages)
    if settings.boundary.update_every_steps >= steps:  # a run too short for its subspace to move
        settings = replace(settings, boundary=replace(settings.boundary, update_every_steps=0, update_lr=0.0))
    return RunConfig(
        name="plan",
        scale="plan",
        seed=0,
        replicas=replicas,
        stages=stages,
        model=job.model,
        data=DataConfig("any", job.model.vocab_size),
        train=train,
        method=settings,
    )


def plan(cluster: Cluster, job: Job, penalties: Penalties) -> pd.DataFrame:
    """Return a table with a row for each configuration that fits into memory, best first.

    Best is what takes the fewest days to the loss of dense data-parallel training, at the high end of these days
    (`days_to_equal_loss_high`), so that what few or distant runs say comes late.

    Columns: method, its ingredients (as `Method`), replicas, stages, width, global_batch, micro_batches, recompute,
    step_seconds, utilisation, bytes_per_token (of all machines, by both axes), memory_gb, quorum (the least of elastic
    replicas, as machines that are not equally fast want; 0 for others), days, cost, loss_percent (the penalty),
    loss_deviation, extrapolated, days_to_equal_loss (and _low, _high), front (`known_front`). The table is empty where
    nothing fits; then `attrs["least"]` has the row that needs least memory. Raises ConfigError where there is no
    configuration at all, whatever the memory.
    """
    rows, least, refused, numel = [], None, ConfigError("no grid of replicas and stages"), parameters(job.model).total
    if cluster.untrusted:
        refused = ConfigError(
            "replicas that are not trusted train by local updates, at least three of them, with a clipped mean, of"
            " which runs have measured what it costs"
        )
    for width, replicas, stages in grids(cluster, job.model.layers):
        tried = methods(replicas, stages)
        too_large: set[Method] = set()  # each a `Method.whatever_rounds`, as in
        held: dict[Method, tuple[bool, float]] = {}  # whether activations are recomputed, and the memory in GB
        for method in withstanding(tried, replicas) if cluster.untrusted else tried:
            whatever_rounds = method.whatever_rounds
            if whatever_rounds in too_large or not penalties.knows(method, stages):
                continue
            try:
                recompute, gb = held.get(whatever_rounds, (False, math.nan))
                config = run_of(method, job, replicas, stages, recompute=recompute, width=width)
                if whatever_rounds not in held:
                    if (gb := _held_gb(config, width)) > cluster.memory_gb:
                        config = run_of(method, job, replicas, stages, recompute=True, width=width)
                        gb = _held_gb(config, width)
                    held[whatever_rounds] = config.train.recompute, gb
                penalty = penalties.of(method, replicas, stages, numel)
                quorum = least_quorum(config.plan(0)) if is_elastic(cluster, method, stages) else 0
            except ConfigError as error:
                refused = error
                continue
            back = penalties.buy_back(penalty, numel, job.tokens)
            if gb <= cluster.memory_gb:
                rows.append(_row(cluster, method, config, gb, quorum, width, penalty, back))
                continue
            too_large.add(whatever_rounds)
            if least is None or gb < least[0]:
                least = gb, (cluster, method, config, gb, quorum, width, penalty, back)
    if least is None and not rows:
        raise ConfigError(f"{cluster.nodes} nodes have no configuration: {refused}")
    table = pd.DataFrame(rows)
    if table.empty:
        table.attrs["least"] = _row(*least[1])
        return table
    table["front"] = known_front(table)
    order = ["days_to_equal_loss_high", "days_to_equal_loss", "days"]
    return table.sort_values(order, kind="stable").reset_index(drop=True)


def is_elastic(cluster: Cluster, method: Method, stages: int) -> bool:
    """Tell whether a row is to be trained by elastic replicas, each of which computes as fast as it can.

    These are whole models that train by local updates on machines that are not equally fast.
    """
    return bool(cluster.slow and method.sync_every_steps and stages == 1)


def grids(cluster: Cluster, layers: int) -> Iterator[tuple[int, int, int]]:
    """Yield all (width, replicas, stages) of a cluster for a model of so many layers.

    A replica's stage is sharded over `width` machines of a box.
    """
    for width in (n for n in range(1, cluster.per_box + 1) if cluster.per_box % n == 0):
        shards = cluster.nodes // width
        for stages in (n for n in range(1, min(shards, layers) + 1) if shards % n == 0):
            yield width, shards // stages, stages


def _held_gb(config: RunConfig, width: int) -> float:
    """Return the memory of a machine in 10^9 bytes: a shard of what it would hold alone, and two gathered layers."""
    gathered = 2 * 4 * parameters(config.model).total / config.model.layers if width > 1 else 0
    return (node_bytes(config) / width + gathered) / 1e9


def _slower(config: RunConfig, compute: Sequence[tuple[float, float]], width: int, mbit_per_s: float) -> float:
    """Return the factor by which sharding lengthens a step's computing, which hides its messages.

    A machine gathers its stage's weights in bf16 for each pass of a micro-batch, and scatters the gradients in fp32.
    The factor is 1 as long as all of that takes less time than computing does.
    """
    if width == 1:
        return 1.0
    passes, longest = config.train.accumulation, max(map(sum, compute))
    numel = largest_stage_numel(config)
    seconds = 8 * (width - 1) / width * numel * (2 * 2 * passes + 4) / (mbit_per_s * 1e6)
    return max(1.0, seconds / (longest * passes))


def _row(
    cluster: Cluster,
    method: Method,
    config: RunConfig,
    memory_gb: float,
    quorum: int,
    width: int,
    penalty: Penalty,
    back: tuple[float, float, float],
) -> dict[str, Any]:
    """Return the row of a configuration in the table of a plan; `back` are the factors of `Penalties.buy_back`."""
    speed = cluster.tflops * 1e12 * width
    compute = [(f / speed, b / speed) for f, b in stage_flops(config)]
    slower = _slower(config, compute, width, cluster.inside_mbit_per_s)
    between, within = cluster.links_of(width, config.stages)
    speeds = cluster.speeds(config.replicas)
    expected = predict(config, [(slower * f, slower * b) for f, b in compute], between, within, speeds)
    seconds = float(expected.step_seconds)
    days = seconds * config.train.steps / 86_400 / expected.trained
    likely, low, high = back
    return {
        "method": method.name,
        **vars(method),
        "replicas": config.replicas,
        "stages": config.stages,
        "width": width,
        "global_batch": config.train.global_batch,
        "micro_batches": config.train.accumulation,
        "recompute": config.train.recompute,
        "step_seconds": seconds,
        "utilisation": float(expected.utilisation) / slower,
        "bytes_per_token": sum(sent_per_step(config)) / (config.train.global_batch * config.train.seq_len),
        "memory_gb": memory_gb,
        "quorum": quorum,
        "days": days,
        "cost": days * 24 * cluster.nodes * cluster.price_per_node_hour,
        "loss_percent": 100 * math.expm1(penalty.log_ratio),
        "loss_deviation": 100 * penalty.deviation,
        "extrapolated": penalty.extrapolated,
        "days_to_equal_loss": days * likely,
        "days_to_equal_loss_low": days * low,
        "days_to_equal_loss_high": days * high,
    }


def overlapped_days(cluster: Cluster, job: Job) -> float:
    """Return the days that data-parallel training takes at least if its gradients travel while it computes.

    They do so in bf16, in a ring of the machines, or of the boxes, during the backward pass, as PyTorch's
    DistributedDataParallel with its hook can send them; neither memory nor latency is considered. Rows of `plan` send
    them in fp32 and after the backward pass, as `lowcomm train` does.
    """
    flops = training_flops(job.model, 1, job.model.seq_len) * job.global_batch
    computing = flops / (cluster.nodes * cluster.tflops * 1e12) / (cluster.slow_speed if cluster.slow else 1.0)
    met, rate = cluster.nodes // cluster.per_box, cluster.links.mbit_per_s
    if met == 1:
        met, rate = cluster.nodes, cluster.inside_mbit_per_s
    sending = 0.0 if met == 1 else 16 * parameters(job.model).total * 2 * (met - 1) / met / (float(rate) * 1e6)
    steps = job.tokens / (job.global_batch * job.model.seq_len)
    return max(computing, computing / 3 + sending) * steps / 86_400


def front(days: Sequence[float], loss: Sequence[float]) -> list[bool]:
    """Tell of each point (days, loss) whether no other is at least as low in both and lower in one."""
    points = list(zip(days, loss, strict=True))
    return [not any((d <= x and v < y) or (d < x and v <= y) for d, v in points) for x, y in points]


def known_front(table: pd.DataFrame) -> pd.Series:
    """Tell of each row of a plan's table whether no other is both faster and better at equal tokens.

    Only those rows count that reach the loss of data-parallel training at one deviation above their likely loss: else
    what is hardly known would stand before what is. Of the others it is false.
    """
    known = table[table.days_to_equal_loss_high < math.inf]
    on = pd.Series(front(list(known.days), list(known.loss_percent)), index=known.index, dtype=bool)
    return on.reindex(table.index, fill_value=False)


#: What the field has added since the four papers, by its column: the name in `Penalties`.
SINCE = {
    "sparse_messages": "sparse messages",
    "muon": "Muon",
    "rising_momentum": "a momentum that rises",
    "gossip_momentum": "GASLoC's momentum",
    "demo": "DeMo",
    "projection": "a projection between stages",
    "two_bits": "messages in 2 bits",
}


#: What of the field has no row of a plan, and why.
NOT_TRIED = """\
Not tried: one replica with an outer optimizer, which sends no less than one without; radial means, balanced fragments
and outer rates that fall, which were measured at the smallest size alone; pipelines of which only some replicas
compress; and, without --untrusted, means that a few replicas cannot push far."""


def moves_front(table: pd.DataFrame) -> list[str]:
    """Return a line for each ingredient that is newer than the four papers: what the best row would be without it.

    Best is what takes the fewest days to equal loss at the high end, as in the table.
    """
    told = []
    for column, name in SINCE.items():
        having, rest = table[table[column]], table[~table[column]]
        if having.empty:
            told.append(f"{name}: in no row (not measured, or refused with all that fits)")
            continue
        count, best = int(having.front.sum()), table.days_to_equal_loss_high.min()
        if not count:
            told.append(f"{name}: not on the front")
            continue
        without = rest.days_to_equal_loss_high.min() if len(rest) else math.inf
        times = "as many" if without == best else f"{without / best:.3g} times the"
        told.append(
            f"{name}: in {count} of {int(table.front.sum())} rows on the front; {times} days to equal loss without it"
        )
    return told


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """Return a plan's table in the form in which it is printed, with a column of costs where a machine has a price."""
    found = pd.DataFrame(
        {
            "method": table.method,
            "replicas x stages": [
                f"{r} x {s}" + f" of {w}" * (w > 1)
                for r, s, w in zip(table.replicas, table.stages, table.width, strict=True)
            ],
            "batch": table.global_batch,
            "s/step": table.step_seconds.map("{:.3g}".format),
            "utilisation": table.utilisation.map("{:.0%}".format),
            "bytes sent per token": table.bytes_per_token.map(si_bytes),
            "GB per node": table.memory_gb.map("{:.1f}".format),
            "days": table.days.map("{:.3g}".format),
            "loss": [f"{p:+.1f} ± {d:.1f} %" for p, d in zip(table.loss_percent, table.loss_deviation, strict=True)],
            "extrapolated": table.extrapolated.map("{:,.1f} x".format),
            "days to equal loss": [
                "{} ({} to {})".format(*("never" if math.isinf(d) else f"{d:.3g}" for d in all_three))
                for all_three in zip(
                    table.days_to_equal_loss, table.days_to_equal_loss_low, table.days_to_equal_loss_high, strict=True
                )
            ],
            "front": ["*" if f else "" for f in table.front],
        }
    )
    if table.cost.any():
        found.insert(list(found).index("days") + 1, "cost", table.cost.map("{:,.0f}".format))
    return found


def shown_parts(parts: dict[str, Penalty], amounts: dict[str, float]) -> pd.DataFrame:
    """Return a table to print of what the loss of a configuration is made of.

    It has a row for each ingredient: its penalty, the source that measured it, and how far from the configuration.
    """
    rows = [
        {
            "ingredient": name if amounts[name] == 1 else f"{name}, {amounts[name]:g}",
            "loss": f"{100 * math.expm1(part.log_ratio):+.2f} ± {100 * part.deviation:.2f} %",
            "measured by": part.source,
            "from": f"{part.extrapolated:,.1f} x away",
        }
        for name, part in parts.items()
    ]
    return pd.DataFrame(rows)


def measured_penalties() -> Path:
    """Return the path of the table of penalties: that of the checkout around this file, or else the installed one."""
    inner = Path("results/ladder/penalties.csv")
    checkout = Path(__file__).resolve().parents[2] / inner
    return checkout if checkout.exists() else Path(sys.prefix) / "share" / "lowcomm" / inner.name


#: Tokens per parameter of the runs that penalties come from: of the least and of the most (NoLoCo's 6.8B and 125M).
TOKENS_MEASURED = (7.4, 100.0)
LEGEND = """
replicas x stages of n: each stage of each replica is sharded over n machines of a box (FSDP).
batch: sequences per step; what was asked for, rounded to what replicas share and a pipeline splits. utilisation: the
share of a step in which a machine computes. bytes sent per token: by all machines together, between replicas and
between stages.
loss: over data-parallel training's at equal tokens, as runs measured it of each ingredient, added up, ± one deviation:
of seeds, of fits, and of how far such a sum has missed a composed run. extrapolated: the largest factor between what is
asked (replicas, H, slices, share of the stream, parameters) and the run that was nearest. days to equal loss: with the
tokens that make up for that loss, by a law with a floor; "never" where none do; in brackets at one deviation less and
more; rows are sorted by the latter. front: * where nothing else is both faster and better, of rows that reach that loss
at one deviation more. GB per node: pipelines hold the activations of all micro-batches of a step (GPipe).
Beyond the sizes at which a method was trained a gain counts as none, and a loss is that of the nearest size.
Times are lower bounds: packets' headers, TCP's slow start and what is sent again are not counted."""
UNEQUAL = """\
Slow machines: whole models that train by local updates take fewer inner steps of a round there and weigh less in the
mean (`lowcomm train --store`); what that costs in loss no run has measured, so `loss` leaves it out. All else waits for
the slowest."""


def model_of(asked: str, seq_len: int = 0) -> ModelConfig:
    """Return the model that `asked` names: a preset, a folder with a Hugging Face config.json, or "dim=512,layers=8".

    seq_len: the length of training sequences in tokens; 0 means that of the preset or of the shape, or of the folder's
    model, at most 4,096. Raises ConfigError where there is no such model.
    """
    if asked in PRESETS:
        model = PRESETS[asked]
    elif "=" in asked:
        entries = [entry.partition("=") for entry in asked.split(",")]
        known = {"seq_len": seq_len} if seq_len else {}
        try:
            given = {key.strip(): yaml.safe_load(value) for key, _, value in entries}
            model = build(ModelConfig, known | given, "model")
        except yaml.YAMLError as error:
            raise ConfigError(f"--model {asked!r} is no list of KEY=VALUE: {str(error).splitlines()[0]}") from None
    elif (path := Path(asked)).exists():
        from lowcomm.model.huggingface import read_config  # with torch, which the rest does without

        model = read_config(path if path.is_dir() else path.parent)
        model = replace(model, seq_len=min(model.seq_len, 4096))
    else:
        alike = sorted(name for name in PRESETS if asked in name)
        hint = f"; did you mean {' or '.join(map(repr, alike))}?" if alike else nearest(asked, PRESETS)
        raise ConfigError(f"no preset named {asked!r}{hint}")
    return replace(model, seq_len=seq_len) if seq_len else model


def question(cluster: Cluster, job: Job, name: str) -> str:
    """Return a description in words of what is planned: the machines, their links, the model and its training."""
    links = cluster.links
    one = cluster.nodes == 1
    count, verb = ("1 machine", "sustains") if one else (f"{cluster.nodes} machines", "sustain")
    machines = f"{count} of {cluster.memory_gb:g} GB that {verb} {cluster.tflops:g} TFLOP/s"
    between = f"{links.mbit_per_s:,g} Mbit/s and {links.latency_ms:g} ms between any two"
    if cluster.per_box > 1:
        between += f" boxes of {cluster.per_box}, {cluster.inside_mbit_per_s:,g} Mbit/s within one"
    uneven = [f"the last {cluster.slow} at {cluster.slow_speed:g} of that speed"] if cluster.slow else []
    uneven += [
        f"{value:g} of {what}" for what, value in (("jitter", links.jitter), ("straggling", links.stragglers)) if value
    ]
    size = parameters(job.model).total
    told = f"{size / 1e9:.3g} billion" if size >= 1e8 else f"{size / 1e6:.3g} million"
    model = f"{name}, {told} parameters, on {job.tokens:.3g} tokens"
    untrusted = " Any of them may send nonsense." * cluster.untrusted
    return (
        f"{machines}, {', '.join([between, *uneven])}.{untrusted}\n{model}, about {job.global_batch} sequences of"
        f" {job.model.seq_len:,} tokens per step."
    )


def method_of(row: Any) -> Method:
    """Return the method of a row of a plan."""
    return Method(**{field.name: getattr(row, field.name) for field in dataclasses.fields(Method)})


#: Where the text of a project that is written lies, from its folder; and the learning rate to begin tuning with.
TEXT, LEARNING_RATE = "corpus/*.txt", 1e-3


def write_project(row: Any, job: Job, folder: Path) -> None:
    """Write a params.yaml into `folder`, with one run, "planned": a row of a plan as `lowcomm train` runs it.

    Rows whose stages are sharded (width above 1) need a training loop of one's own. Raises ConfigError where the row is
    such a one, where there is a params.yaml already, and where none can be written.
    """
    file = folder / "params.yaml"
    if row.width > 1:
        raise ConfigError(f"{row.method} on {row.width} machines a stage needs a loop of your own, with FSDP")
    if file.exists():
        raise ConfigError(f"{file} exists already: --write makes a project of its own")
    config = run_of(method_of(row), job, row.replicas, row.stages, recompute=row.recompute)
    steps = config.train.steps
    train = replace(
        config.train,
        lr=LEARNING_RATE,
        warmup_steps=0 if config.train.decay == "constant" else steps // 20,
        eval_every=max(1, steps // 20),
        eval_sequences=row.replicas * max(1, 256 // row.replicas),
        compile=row.stages == 1,
    )
    data = replace(config.data, corpus="text")
    config = replace(config, train=train, data=data).to_dict()
    hourly = {"every_steps": max(1, min(steps, round(3600 / row.step_seconds)))}
    sections = {key: config[key] for key in ("model", "train")} | {"checkpoint": hourly}
    sections |= {"data": {k: v for k, v in config["data"].items() if k != "corpus"}, "sizes": {"planned": {"base": {}}}}
    run = {"method": "planned", "corpus": "text", "replicas": row.replicas, "sizes": "planned", "seeds": [0]}
    project = {
        "scale": "planned",
        "corpora": {"text": {"source": "text", "path": TEXT}},
        "scales": {"planned": sections},
        "methods": {"planned": config["method"]},
        "runs": {"planned": run | {"override": {"stages": row.stages}}},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(project, sort_keys=False))
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from None


def command(row: Any, cluster: Cluster) -> str:
    """Return the command that trains a row, the same on each machine or box, in a project that `write_project` made.

    Where machines are not equally fast and whole models train by local updates, there are two: one starts the store,
    the other is run on each machine, with a slot of its own.
    """
    if row.quorum:
        quorum = f" --quorum {row.quorum}" if row.quorum != max(1, row.replicas // 2) else ""
        gpu = "CUDA_VISIBLE_DEVICES=K " if cluster.per_box > 1 else ""
        where = f"and K from 0 to {cluster.per_box - 1} in each box" if gpu else "on each"
        return (
            "lowcomm store 29400     # on a machine that stays\n"
            f"{gpu}lowcomm train planned --store THAT-MACHINE:29400 --slot N{quorum}"
            f"     # N from 0 to {row.replicas - 1}, {where}"
        )
    boxes = cluster.nodes // cluster.per_box
    where = "--rdzv-backend c10d --rdzv-endpoint FIRST-MACHINE:29500" if boxes > 1 else "--standalone"
    return (
        f"torchrun --nnodes {boxes} --nproc-per-node {cluster.per_box} {where}"
        f" -m lowcomm.train planned --out {'/shared/planned' if boxes > 1 else 'planned'}"
    )


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the arguments of `lowcomm plan`."""
    ask = argparse.ArgumentParser(prog="lowcomm plan", description=__doc__.splitlines()[0])
    number = functools.partial(ask.add_argument, type=float)
    ask.add_argument("--nodes", type=int, required=True, help="machines")
    number("--memory-gb", required=True, help="of one machine")
    number("--mbit-per-s", required=True, help="between any two machines, or boxes")
    ask.add_argument("--per-box", type=int, default=1, help="machines that stand in a box (GPUs of a server)")
    number("--inside-mbit-per-s", default=0.0, help="between two machines of a box")
    number("--latency-ms", default=0.0, help="of a message between any two machines, or boxes (default: %(default)s)")
    number("--jitter", default=0.0, help="of the latency, standard deviation over mean")
    number("--stragglers", default=0.0, help="of a step's computing, standard deviation over mean")
    number("--tflops", default=60.0, help="that a machine sustains (default: %(default)s)")
    ask.add_argument("--slow", type=int, default=0, help="so many of the machines are slower ...")
    number("--slow-speed", default=0.5, help="... at this share of the others' speed (default: %(default)s)")
    ask.add_argument(
        "--untrusted", action="store_true", help="replicas may send nonsense: use means that one cannot decide"
    )
    number("--price", default=0.0, help="of a machine's hour")
    ask.add_argument(
        "--model",
        required=True,
        help="a preset (partial_updates/1.3b), a folder with a Hugging Face config.json, or a shape"
        " (dim=512,layers=8,heads=8,ffn_dim=1408,vocab_size=32000,seq_len=1024)",
    )
    ask.add_argument("--seq-len", type=int, default=0, help="of training sequences (default: the model's)")
    number("--tokens", help="default: 20 per parameter")
    ask.add_argument("--global-batch", type=int, default=256, help="sequences, about (default: %(default)s)")
    ask.add_argument("--penalties", type=Path, help="what methods cost in loss (default: as runs measured it)")
    ask.add_argument("--rows", type=int, default=12, help="shown at most (default: %(default)s)")
    ask.add_argument(
        "--write", type=Path, metavar="FOLDER", help="make a project that trains the first row without shards"
    )
    return ask


def asked_by(given: argparse.Namespace) -> tuple[Cluster, Job]:
    """Return the cluster and the job that the arguments of a command describe.

    Raises ConfigError or ValueError where they describe none.
    """
    links = Links(given.mbit_per_s, given.latency_ms, given.jitter, given.stragglers)
    inside = (given.per_box, given.inside_mbit_per_s)
    cluster = Cluster(
        given.nodes,
        given.memory_gb,
        given.tflops,
        links,
        given.price,
        *inside,
        given.slow,
        given.slow_speed,
        given.untrusted,
    )
    model = model_of(given.model, given.seq_len)
    tokens = 20 * parameters(model).total if given.tokens is None else given.tokens
    return cluster, Job(model, tokens, given.global_batch)


def main(words: Sequence[str] | None = None) -> int:
    """Run `lowcomm plan` with the arguments `words` (None: those of the process), and return its exit status.

    The process exits with status 2 where arguments are invalid, and with status 1 where nothing fits.
    """
    given = (ask := arguments()).parse_args(words)
    if given.rows < 1:
        ask.exit(2, f"--rows must be at least 1, got {given.rows}\n")
    try:
        cluster, job = asked_by(given)
        penalties = Penalties.read(given.penalties or measured_penalties())
        table = plan(cluster, job, penalties)
    except (ConfigError, ValueError) as error:
        ask.exit(2, f"{error}\n")
    print(question(cluster, job, given.model), flush=True)
    if table.empty:
        least = table.attrs["least"]
        ask.exit(
            1,
            f"nothing fits into {given.memory_gb:g} GB: the least is {least['memory_gb']:.3g} GB, of {least['method']}"
            f" on {shown(pd.DataFrame([least | {'front': False}]))['replicas x stages'][0]} (replicas x stages),"
            f" {least['memory_gb'] - given.memory_gb:.3g} GB more{_if_smaller(cluster, job, penalties)}\n",
        )
    best = table.index < given.rows
    hidden = f", {(table.front & ~best).sum()} on the front not shown (--rows)" if (table.front & ~best).any() else ""
    print(f"{len(table)} configurations fit; the best {best.sum()} of them{hidden}:\n")
    print(markdown(shown(table[best])))
    print(LEGEND)
    print(_overlapped(table, overlapped_days(cluster, job)))
    print("\nNewer than the four papers, by days at the high end:")
    print("\n".join(f"- {line}" for line in moves_front(table)))
    print(NOT_TRIED)
    if cluster.slow:
        print(UNEQUAL)
    least, most = TOKENS_MEASURED
    if not least <= (ratio := job.tokens / parameters(job.model).total) <= most:
        print(
            f"{ratio:.3g} tokens per parameter are asked; losses were measured with {least:g} to {most:g},"
            " and nothing here says how they change beyond."
        )
    first = next(table.itertuples())
    asked = method_of(first), first.replicas, first.stages
    if parts := penalties.parts(*asked, parameters(job.model).total):
        print(f"\nWhat the loss of the first row is made of ({first.method}):\n")
        print(markdown(shown_parts(parts, asked[0].ingredients(first.stages))))
        for check in penalties.composed():
            print(check.told())
    return _how_to_run(table, cluster, job, given.write)


def _if_smaller(cluster: Cluster, job: Job, penalties: Penalties) -> str:
    """Say, where nothing fits, whether the smallest batch would; "" where the batch is the smallest already."""
    if job.global_batch <= cluster.nodes:
        return ""
    fits = not plan(cluster, replace(job, global_batch=cluster.nodes), penalties).empty
    return f"; {cluster.nodes} sequences per step {'would fit' if fits else 'would not fit either'} (--global-batch)"


def _overlapped(table: pd.DataFrame, days: float) -> str:
    """Say how many days data-parallel training takes where gradients are sent better than in the rows of a plan."""
    than = "sooner than any row reaches that loss" if days < table.days_to_equal_loss_high.min() else "at least"
    return (
        "Rows of gradients send them in fp32 after the backward pass, as `lowcomm train` does. In bf16 and during the"
        f"\nbackward pass, as PyTorch's DDP can, data-parallel training takes {days:.3g} days, {than}, where it fits."
    )


def _how_to_run(table: pd.DataFrame, cluster: Cluster, job: Job, folder: Path | None) -> int:
    """Print how the first row is run, write its project into `folder` if there is one, and return the exit status.

    A row that shards its stages is no run of `lowcomm train`: that is printed, and the first other row is taken.
    """
    row, which = next(table.itertuples()), "the first row"
    if row.width > 1:
        print(
            f"\nThe first row shards each stage over the {row.width} machines of its box, which wants a training"
            " loop of your own."
        )
        row = next((row for row in table.itertuples() if row.width == 1), None)
        if row is None:
            if folder is not None:
                print(f"{folder} is not written: all rows that fit are sharded", file=sys.stderr)
            return 0 if folder is None else 2
        which = f"the best row that does not ({row.method}, {row.replicas} x {row.stages}, {row.days:.3g} days)"
    if folder is None:
        print(f"\nTo run {which}, add --write FOLDER, and there:\n")
    else:
        try:
            write_project(row, job, folder)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
        print(f"\n{folder / 'params.yaml'} has {which}; its learning rates are to be tuned. To run it, there:\n")
    print(f"lowcomm prepare text    # on each machine, from {TEXT}\n{command(row, cluster)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
