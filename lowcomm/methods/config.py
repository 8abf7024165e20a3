"""Settings of a method: one point in the space of independent choices.

Each class that is a value of a choice declares its name, the settings that mean something with it, and what it requires
of them (`lowcomm.choices`); what an exchange requires as a whole, `plan.Plan` checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowcomm.model.config import Constraint
from lowcomm.settings import number


@dataclass(frozen=True)
class BoundaryConfig:
    """Settings of the boundaries between a pipeline's stages, and of the constraint on the model that they need."""

    kind: str = "dense"  # a `boundary.Boundary` by name: dense, subspace, projection, low_rank
    rank: int = number(0, at_least=0)  # R of subspace and projection (k in the paper), r of low_rank
    codec: str = "fp32"  # of the values that cross, a `codecs.Codec` by name
    codec_keep: float = 1.0  # as method.codec_keep
    error_feedback: bool = False  # add what a message has lost to the next one of its micro-batch
    #: How many replicas, the first ones, compress what crosses; 0: all. The others, whose links are fast, do not.
    replicas: int = number(0, at_least=0)
    # The rest is for kind = subspace alone, also with a single stage; `basis` is for projection too.
    dense_layers: int = number(1, at_least=0)  # how many layers, the last ones, are not held to the subspace
    mode: Literal["projected", "reparametrised"] = "projected"
    #: AdamW's second moment of constrained matrices: one per row of all of them (row); one per row of all but
    #: attention's, whose weights are projected after each step (mixed); or one per element, with all weights projected
    #: (element). Only for mode = projected.
    second_moment: Literal["row", "mixed", "element"] = "row"
    basis: Literal["gaussian", "coordinates"] = "gaussian"  # U as training begins
    table: Literal["projection", "zero"] = "projection"  # the trainable embedding as training begins
    update_every_steps: int = number(0, at_least=0)  # steps between updates of U; 0: it stays as it is
    update_lr: float = number(0.0, at_least=0)  # eta of the Grassmann step

    def constraint(self, stages: int) -> Constraint | None:
        """Return the constraint on the model of a pipeline of so many stages; None if there is none."""
        if self.kind == "projection":
            return Constraint(self.rank, basis=self.basis, table="zero", stages=stages)
        if self.kind != "subspace":
            return None
        return Constraint(self.rank, self.dense_layers, self.mode == "reparametrised", self.basis, self.table)

    def of_replica(self, replica: int) -> BoundaryConfig:
        """Return the settings of one replica's boundaries: these, or dense ones where it does not compress."""
        return self if not self.replicas or replica < self.replicas else BoundaryConfig()


@dataclass(frozen=True)
class MethodConfig:
    """Settings of a method: a value for each of the independent choices that make it up."""

    exchange: str  # an `engine.Engine` by name: gradients, fsdp, parameters (local updates), none
    #: next_fragment: only the fragment that is exchanged next, as in FedPart. slice: one slice of some matrices
    #: (replica k trains slice k mod slices) and all of the others.
    trainable: Literal["all", "next_fragment", "slice"] = "all"
    slices: int = number(1, at_least=1)  # N; only for trainable = slice, as are the next two settings
    #: What is sliced: mlp, heads, out or layers of a `Decoder`, or "PATTERN:DIMENSION" of any parameters' names.
    sliced: tuple[str, ...] = ()
    #: Through which slices of an MLP gradients reach its input: all, the replica's own, or that and a random one.
    input_gradients: Literal["all", "own", "own_and_random"] = "all"
    sync_every_steps: int = number(1, at_least=1)  # H, inner steps per round; only for exchange = parameters
    peers: str = "all"  # a `peers.Peers` by name: all, group
    group_size: int = number(2, at_least=2)  # n, the fewest replicas in a group; only for peers = group
    codec: str = "fp32"  # a `codecs.Codec` by name
    codec_keep: float = number(1.0, above=0)  # the share of the values that a sparse codec sends
    error_feedback: float = number(0.0, at_least=0, at_most=1)  # beta: share of a message's error that joins the next
    basis: str = "values"  # in which outer gradients are encoded, a `bases.Basis` by name: values, tiles, cosines
    #: What a group makes of its messages, a `means.Mean` by name: mean, senders, median, trimmed, clipped, radial.
    mean: str = "mean"
    mean_trim: float = number(0.0, at_least=0, below=0.5)  # share left out at each end; only for mean = trimmed
    byzantine: int = number(0, at_least=0)  # how many replicas, the last ones, send nonsense
    byzantine_factor: float = -1.0  # what such a replica multiplies its outer gradient by
    outer: str = "average"  # an `outer.OuterOptimizer` by name: average, nesterov, heavy_ball, sign, noloco, gasloc
    outer_lr: float = number(1.0, at_least=0)
    outer_momentum: float = number(0.0, at_least=0, below=1)
    #: Points of the run, "VALUE@SHARE" each (`schedule.Points`): factors of outer_lr, and momenta in the place of
    #: outer_momentum.
    outer_lr_shape: tuple[str, ...] = ()
    outer_momentum_points: tuple[str, ...] = ()
    outer_pull: float = number(0.0, at_least=0)  # gamma, towards the peers' slow weights; only for outer = noloco
    #: What is exchanged together; "patterns": the parameters that each of `fragment_patterns` matches, then the rest;
    #: "balanced": parts of parameters, in `fragment_count` fragments of about as many values.
    fragments: Literal["whole", "sequential", "strided", "slices", "patterns", "balanced"] = "whole"
    fragment_count: int = number(1, at_least=1)
    layers_per_fragment: int = number(3, at_least=1)
    fragment_patterns: tuple[str, ...] = ()  # shell patterns of names; only for fragments = patterns
    overlap_steps: tuple[int, ...] = (0,)  # tau, inner steps from sending to applying: of all replicas, or one for each
    mixing: float = number(0.0, at_least=0, below=1)  # alpha, weight of a replica's own parameters as it takes over
    close_last_round: bool = True  # exchange every fragment at the end of the run, whether or not it is its turn
    offload_outer: bool = False  # keep outer state in the CPU's memory
    record_cosine: bool = False  # also exchange outer gradients to log their cosine; billed as analysis
    route: Literal["fixed", "random_step", "random_micro_batch"] = "fixed"  # through the stages of a pipeline
    boundary: BoundaryConfig = BoundaryConfig()

    @property
    def reached_slices(self) -> int | None:
        """The number of slices of an MLP through which gradients reach its input; None where they do through all."""
        return {"all": None, "own": 1, "own_and_random": 2}[self.input_gradients]
