"""The shape and the options of a decoder, which `decoder` builds."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModelConfig:
    """Shape and options of a decoder. Every field is a number or a choice of the papers."""

    dim: int  # D, width of the residual stream
    layers: int
    heads: int  # N, a multiple of kv_heads
    ffn_dim: int  # F
    vocab_size: int  # V
    seq_len: int  # the longest T, in tokens
    kv_heads: int = 0  # K; 0 means as many as heads
    head_dim: int = 0  # C; 0 means dim / heads
    mlp: Literal["relu", "gelu", "gated"] = "gated"
    norm: Literal["rms", "layer"] = "rms"
    qk_norm: bool = False
    z_loss: float = 0.0  # weight of the mean squared log-partition
    tied: bool = False  # share the embedding with the output head
    rope_theta: float = 10_000.0
    #: Standard deviation of the embedding as it begins. With a constraint this is how much of the stream lies outside
    #: the subspace: both public codes of Protocol Models draw theirs with a deviation of 1.
    embedding_std: float = 0.02
    norm_eps: float = 1e-6  # added to the mean square (or variance) under a norm's root

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "ffn_dim", "vocab_size", "seq_len", "kv_heads", "head_dim"):
            if not isinstance(getattr(self, name), numbers.Integral):
                raise ValueError(f"model.{name} must be a whole number, got {getattr(self, name)!r}")
        for name in ("dim", "layers", "heads", "ffn_dim", "vocab_size", "seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("kv_heads", "head_dim", "z_loss"):
            if getattr(self, name) < 0:
                raise ValueError(f"model.{name} must be at least 0, got {getattr(self, name)}")
        if not self.embedding_std > 0:
            raise ValueError(f"model.embedding_std must be above 0, got {self.embedding_std}")
        if not self.norm_eps > 0:
            raise ValueError(f"model.norm_eps must be above 0, got {self.norm_eps}")
        if not self.rope_theta > 0:
            raise ValueError(f"model.rope_theta must be above 0, got {self.rope_theta}")
        if self.head_dim == 0 and self.dim % self.heads:
            raise ValueError(
                f"model.heads = {self.heads} does not divide model.dim = {self.dim}; set model.head_dim or change one"
            )
        if self.heads % self.key_value_heads:
            raise ValueError(f"model.kv_heads = {self.kv_heads} does not divide model.heads = {self.heads}")
        if self.width_of_head % 2:
            raise ValueError(f"rotary positions need an even head width, got {self.width_of_head}")

    @property
    def width_of_head(self) -> int:
        """Return C, the width of a head."""
        return self.head_dim or self.dim // self.heads

    @property
    def key_value_heads(self) -> int:
        """Return K, the number of key/value heads."""
        return self.kv_heads or self.heads


@dataclass(frozen=True)
class Constraint:
    """A subspace of rank R that attention and MLPs write to, and the trainable part of the embedding (Protocol Models).

    The token embedding is then a fixed table of full rank, drawn with the weights, plus the trainable one; the
    residual stream less the fixed table's rows lies in the subspace. Its basis U [D, R] has orthonormal columns.

    rank: R. dense_layers: how many of the last layers are free. reparametrised: matrices are W = U Z with Z trained
    (the stream is written by U), so that no weight can leave; else they have their full shape, and whoever trains them
    keeps them there (`subspace`). basis: of random directions, or of the first R coordinates. table: what the trainable
    embedding begins as, the fixed one's projection or zero. stages: where above 0, no weight is held to the subspace
    (`dense_layers` then means nothing); instead the stream is projected on it between so many stages of a pipeline, and
    by a whole model at the same places (`projection`).
    """

    rank: int
    dense_layers: int = 1
    reparametrised: bool = False
    basis: Literal["gaussian", "coordinates"] = "gaussian"
    table: Literal["projection", "zero"] = "projection"
    stages: int = 0

    @property
    def free(self) -> bool:
        """Tell whether weights are free, and the stream is projected instead."""
        return self.stages > 0


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """Return the layers of a stage of a pipeline: neighbours, and as many as in any other stage, or one more or less.

    Raises ValueError where there are more stages than layers, or fewer than 1.
    """
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot form {stages} stages: each needs one at least")
    return range(layers * stage // stages, layers * (stage + 1) // stages)
