"""A boundary that projects: what crosses is (x - T_fixed[ids]) U, in a model whose weights are free.

As in Protocol Models (arXiv:2506.01260; see `subspace`) the token embedding has a fixed table T_fixed [V, D], which
every stage draws for itself, and U [D, R] has orthonormal columns. There the weights are held to the subspace, so that
nothing is lost; here they are not. The next stage reads

    x' = T_fixed[ids] + (x - T_fixed[ids]) U U^T

and gradients come back as g U, so g' = g U U^T: exactly those of the model that has this projection in it, which is
what a whole `Decoder` of the run's settings computes. So training is end to end, by any optimizer, Muon too. A subspace
costs all constrained layers their rank; this costs the layers after the boundary what does not reach them. The
trainable table begins at zero.

A bottleneck that is trained with the model, as ResBM puts there (arXiv:2604.11947; described from its abstract), has an
encoder and a decoder in place of U and U^T. The layers on either side can do what these would.

Token ids do not travel in training and evaluation: a stage draws those of the micro-batch that comes by from the data,
as the last one draws targets. Where they are new (`generate`) they are sent.
"""

from __future__ import annotations

from lowcomm.methods.boundary import InSubspace, check_rank
from lowcomm.methods.config import BoundaryConfig


class Projection(InSubspace):
    """A boundary whose messages hold coordinates in the subspace; what lies outside of it is lost."""

    names = ("projection",)
    settings = ("rank", "basis")
    sends_ids = False
    lossy = True

    @classmethod
    def check(cls, config: BoundaryConfig, width: int, tokens: int) -> None:
        """Refuse ranks above the width."""
        check_rank(config.rank, width)
