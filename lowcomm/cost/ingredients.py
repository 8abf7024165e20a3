"""The ingredients of methods, and the loss that each was measured to cost.

Measured are runs of params.yaml (`results/<scale>/together/training/penalties.csv`), as logarithms of ratios of losses,
which are added up. An ingredient is taken from the run nearest to it, rounds from the line through the two nearest (in
ln H), beyond the longest too. `extrapolated` says how far it is from there: the largest factor between what is asked
and what was run, of replicas, H, slices or the stream's share; the model's size and the length of training apart.
Loss ~ tokens^-b (also measured) turns a penalty into the tokens that buy it back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lowcomm.methods.config import BoundaryConfig, MethodConfig
from lowcomm.model.config import ModelConfig
from lowcomm.settings import ConfigError


@dataclass(frozen=True)
class Method:
    """Ingredients. `ratio`: D / R of a subspace, 1 for a dense boundary; `sync_every_steps`: H, 0 for gradients."""

    sync_every_steps: int = 0
    streaming: bool = False
    pairs: bool = False
    slices: int = 1
    ratio: int = 1

    @property
    def name(self) -> str:
        parts = ["gradients" if not self.sync_every_steps else f"every {self.sync_every_steps} steps"]
        parts += ["streaming"] * self.streaming + ["pairs"] * self.pairs
        parts += [f"1/{self.slices} of MLPs"] * (self.slices > 1) + [f"subspace 1/{self.ratio}"] * (self.ratio > 1)
        return ", ".join(parts)

    def settings(self, model: ModelConfig, stages: int) -> MethodConfig:
        """Return the settings that `params.yaml` would give; numbers are those of the laptop scale."""
        codec = "bf16" if stages > 1 else "fp32"  # as what is computed
        boundary = BoundaryConfig(codec=codec)
        if self.ratio > 1:
            rank = max(1, model.dim // self.ratio)
            boundary = BoundaryConfig("subspace", rank, codec, update_every_steps=500, update_lr=1.0)
        route = "random_micro_batch" if self.pairs and stages > 1 else "fixed"
        if not self.sync_every_steps:
            return MethodConfig(exchange="gradients", boundary=boundary)
        found: dict[str, Any] = {"outer": "nesterov", "outer_lr": 0.4, "outer_momentum": 0.9}
        if self.pairs:
            found = {"outer": "noloco", "outer_lr": 0.7, "outer_momentum": 0.5, "outer_pull": 0.7, "peers": "group"}
        if self.streaming:
            found |= {"fragments": "strided", "overlap_steps": (1,), "mixing": 0.5, "codec": "e3m0"}
            found |= {"offload_outer": True}
        if self.slices > 1:
            found |= {"trainable": "slice", "slices": self.slices, "sliced": ("mlp",)}
        return MethodConfig(
            "parameters", sync_every_steps=self.sync_every_steps, route=route, boundary=boundary, **found
        )


@dataclass(frozen=True)
class Penalty:
    """ln(loss / data-parallel's): what was measured, its standard deviation, and how far from there it was taken."""

    log_ratio: float
    deviation: float
    extrapolated: float


class Penalties:
    """The penalties that runs measured for each ingredient.

    Args:
        table: columns ingredient, replicas, amount, log_ratio, deviation. "local updates" are at H = 30, "rounds" what
            another H (the amount) adds; the amount of "slices" is their number, of "subspace" D / k; one row is
            "tokens", whose log_ratio is -b of loss ~ tokens^-b.
    """

    def __init__(self, table: pd.DataFrame):
        self.rows = {name: list(some.itertuples()) for name, some in table.groupby("ingredient")}
        slopes = self.rows.get("tokens", [])
        if len(slopes) != 1 or not slopes[0].log_ratio < 0:
            raise ConfigError(f"loss must fall with tokens, in one row: got {[s.log_ratio for s in slopes]}")
        self.exponent, self.exponent_deviation = float(-slopes[0].log_ratio), float(slopes[0].deviation)

    @classmethod
    def read(cls, path: Path) -> Penalties:
        """Read the penalties of a file (`planner.measured_penalties`). Raises ConfigError where there is none."""
        if not path.exists():
            raise ConfigError(f"{path} is missing: `dvc repro together` writes it")
        return cls(pd.read_csv(path))

    def nearest(self, ingredient: str, replicas: float, amount: float) -> Penalty:
        """The run whose replicas and amount are nearest, as logarithms."""
        if ingredient not in self.rows:
            raise ConfigError(f"no run has measured {ingredient}")

        def apart(row: Any) -> tuple[float, float]:
            return abs(math.log(replicas / row.replicas)), abs(math.log(amount / row.amount))

        row = min(self.rows[ingredient], key=lambda row: sum(apart(row)))
        return Penalty(float(row.log_ratio), float(row.deviation), math.exp(max(apart(row))))

    def rounds(self, sync_every_steps: int) -> Penalty:
        """Return what a round of H steps adds, on the line through the runs with the nearest H on either side, in ln H.

        Beyond the longest H that was run the line of the last two goes on, but does not fall, and its deviation grows
        with the distance. Below the shortest H it is the penalty of that one.
        """
        rows = sorted(self.rows.get("rounds", ()), key=lambda row: row.amount)
        longest = rows[-1].amount if rows else math.nan
        if len(rows) < 2 or sync_every_steps <= rows[0].amount:
            return self.nearest("rounds", 1, sync_every_steps)
        after = next((i for i, row in enumerate(rows) if i and sync_every_steps <= row.amount), len(rows) - 1)
        a, b = rows[after - 1], rows[after]
        share = math.log(sync_every_steps / a.amount) / math.log(b.amount / a.amount)
        rise = b.log_ratio - a.log_ratio
        value = a.log_ratio + share * rise if share <= 1 else b.log_ratio + (share - 1) * max(0.0, rise)
        deviation = math.hypot((1 - share) * a.deviation, share * b.deviation)
        return Penalty(value, deviation, max(1.0, sync_every_steps / longest))

    def of(self, method: Method, replicas: int, stages: int) -> Penalty:
        """Add up the penalties of all ingredients; dense data-parallel training has none."""
        parts = []
        if method.sync_every_steps:
            parts += [self.nearest("local updates", replicas, 1), self.rounds(method.sync_every_steps)]
        if method.streaming:
            parts.append(self.nearest("streaming", replicas, 1))
        if method.pairs:
            parts.append(self.nearest("pairs", replicas, 1))
            if stages > 1:
                parts.append(self.nearest("routes", replicas, 1))
        if method.slices > 1:
            parts.append(self.nearest("slices", replicas, method.slices))
        if method.ratio > 1:
            parts.append(self.nearest("subspace", 1, method.ratio))
        return Penalty(
            sum(p.log_ratio for p in parts),
            math.sqrt(sum(p.deviation**2 for p in parts)),
            max((p.extrapolated for p in parts), default=1.0),
        )

    def buy_back(self, penalty: Penalty) -> tuple[float, float, float]:
        """How many times the tokens buy a penalty back: (likely, low, high), one deviation of it and of b each way."""
        p, b = penalty.log_ratio, self.exponent
        off = math.hypot(penalty.deviation / b, p / b * self.exponent_deviation / b)
        return tuple(math.exp(max(0.0, p / b + sign * off)) for sign in (0, -1, 1))
