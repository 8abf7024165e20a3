"""Parameters, FLOPs, memory and bytes in closed form; tests hold each against the real thing.

A multiply-add counts as two FLOPs. Counted: every matrix product, attention at its full
(dense, not causal) size. Not counted: norms, activations, softmax, rotary positions, the
embedding lookup, the optimizer. This is what `torch.utils.flop_counter.FlopCounterMode` counts.

Legend: B sequences, T tokens, D width, F feed-forward width, V vocabulary, L layers,
N heads, K key/value heads, C head width, R rank of a subspace, P parameters, M replicas.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lowcomm.model.config import Constraint, ModelConfig, stage_layers


@dataclass(frozen=True)
class ParameterCount:
    """The number of parameters in each part of a model."""

    embedding: int
    attention: int
    mlp: int
    norms: int
    head: int  # 0 when tied

    @property
    def total(self) -> int:
        """Return the number of all parameters."""
        return self.embedding + self.attention + self.mlp + self.norms + self.head

    @property
    def non_embedding(self) -> int:
        """Return the number of parameters in neither the embedding nor the head."""
        return self.attention + self.mlp + self.norms


def parameter_shapes(
    c: ModelConfig, constraint: Constraint | None = None, *, stage: int = 0, stages: int = 1
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of a decoder, or of a stage of it, by name and in `Decoder`'s own order."""
    return dict(_parameter_shapes(c, constraint, stage, stages))


@functools.lru_cache(maxsize=256)  # a planner asks it of the same stages for each method
def _parameter_shapes(
    c: ModelConfig, constraint: Constraint | None, stage: int, stages: int
) -> dict[str, tuple[int, ...]]:
    D, F, V, C = c.dim, c.ffn_dim, c.vocab_size, c.width_of_head
    q, kv = c.heads * C, c.key_value_heads * C
    layers = stage_layers(c.layers, stages, stage)
    narrow = range(_written(c, constraint)[1])  # layers whose writing matrices are Z of W = U Z

    def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (width,)} | ({f"{name}.bias": (width,)} if c.norm == "layer" else {})

    found: dict[str, tuple[int, ...]] = {}
    if stage == 0:
        reparametrised = constraint is not None and constraint.reparametrised
        found["embedding.weight"] = (V, constraint.rank if reparametrised else D)
    for i in layers:
        block, width = f"blocks.{i}", constraint.rank if i in narrow else D
        found |= norm(f"{block}.attention_norm", D)
        found |= {f"{block}.attention.{name}.weight": (rows, D) for name, rows in (("q", q), ("k", kv), ("v", kv))}
        found[f"{block}.attention.out.weight"] = (width, q)
        if c.qk_norm:
            found |= norm(f"{block}.attention.q_norm", C) | norm(f"{block}.attention.k_norm", C)
        found |= norm(f"{block}.mlp_norm", D)
        found |= {f"{block}.mlp.{name}.weight": (F, D) for name in ("up", "gate")[: 1 + (c.mlp == "gated")]}
        found[f"{block}.mlp.down.weight"] = (width, F)
    if stage == stages - 1:
        found |= norm("norm", D) | ({} if c.tied else {"head.weight": (V, D)})
    return found


def _written(c: ModelConfig, constraint: Constraint | None) -> tuple[int, int]:
    """Return the sum over layers of the width that they write, D or R, and the number of layers that write R."""
    if constraint is None or not constraint.reparametrised:
        return c.layers * c.dim, 0
    narrow = max(0, c.layers - constraint.dense_layers)
    return narrow * constraint.rank + (c.layers - narrow) * c.dim, narrow


@functools.cache
def parameters(
    c: ModelConfig, constraint: Constraint | None = None, *, stage: int = 0, stages: int = 1
) -> ParameterCount:
    """Count the parameters of a decoder, or of a stage of it; a constrained one's fixed embedding is not counted."""
    found = dict.fromkeys(("embedding", "attention", "mlp", "norms", "head"), 0)
    for name, shape in parameter_shapes(c, constraint, stage=stage, stages=stages).items():
        owner = name.split(".")[-2]
        part = "norms" if owner.endswith("norm") else owner if owner in found else name.split(".")[-3]
        found[part] += math.prod(shape)
    return ParameterCount(**found)


def trained_parameters(
    c: ModelConfig, sliced: Sequence[str], slices: int, constraint: Constraint | None = None
) -> ParameterCount:
    """Count the parameters that a replica trains if each of `slices` replicas has its own slice of `sliced`.

    `sliced` names parts of the decoder (see `partial`).
    """
    whole = parameters(c, constraint)
    q, kv = c.heads * c.width_of_head, c.key_value_heads * c.width_of_head
    written, _ = _written(c, constraint)
    heads = c.layers * c.dim * ((q - q // slices) + 2 * (kv - kv // slices))
    frozen = ("heads" in sliced) * heads + ("out" in sliced) * written * (q - q // slices)
    mlp = whole.mlp // slices if {"mlp", "layers"} & set(sliced) else whole.mlp
    return dataclasses.replace(whole, attention=whole.attention - frozen, mlp=mlp)


def _writing_flops(c: ModelConfig, tokens: int, constraint: Constraint | None) -> int:
    """Count the FLOPs of one pass of the products with U alone: one of the embedding, and two per constrained layer."""
    if constraint is None or not constraint.reparametrised:
        return 0
    _, narrow = _written(c, constraint)
    return 2 * tokens * constraint.rank * c.dim * (2 * narrow + 1)


def forward_flops(c: ModelConfig, sequences: int, tokens: int, constraint: Constraint | None = None) -> int:
    """Count the FLOPs of one forward pass over `sequences` sequences of `tokens` tokens.

    Per layer 2BTD(2NC + 2KC) projections + 4BT^2 NC attention + 2BTDF per MLP matrix; 2BTDV logits. Where matrices are
    W = U Z (Protocol Models), their products cost 2BTR each way instead, and U's 2BTRD.
    """
    q, kv = c.heads * c.width_of_head, c.key_value_heads * c.width_of_head
    bt = sequences * tokens
    written, _ = _written(c, constraint)
    read = c.layers * c.dim * (q + 2 * kv + c.ffn_dim * (2 if c.mlp == "gated" else 1))
    matrices = 2 * bt * (read + written * (q + c.ffn_dim) + c.dim * c.vocab_size)
    return matrices + c.layers * 4 * bt * tokens * q + _writing_flops(c, bt, constraint)


def training_flops(
    c: ModelConfig,
    sequences: int,
    tokens: int,
    *,
    sliced: Sequence[str] = (),
    slices: int = 1,
    through: int | None = None,
    recompute: bool = False,
    constraint: Constraint | None = None,
) -> int:
    """Count the FLOPs of a forward and a backward pass.

    Each product has two gradients, so they are 3 x forward where all is trained. Where a replica trains a slice
    (Partial Parameter Updates, appendix C.2), gradients with respect to weights take 2BT per trained weight. Those with
    respect to the inputs of MLPs take `through` / `slices` of theirs where they pass through so many slices alone
    (appendix D; None: through all). With `recompute`, blocks are computed forward once more, up to their last product,
    whose result nobody needs. The fixed U of W = U Z has one gradient, not two. What keeping to a subspace takes
    besides is `subspace.overhead_flops`.
    """
    forward, bt = forward_flops(c, sequences, tokens, constraint), sequences * tokens
    whole = parameters(c, constraint)
    trained = trained_parameters(c, sliced, slices, constraint)
    weights = forward - 2 * bt * (whole.attention - trained.attention + whole.mlp - trained.mlp)
    weights -= _writing_flops(c, bt, constraint)
    inputs = forward
    if through is not None:
        inputs -= 2 * bt * (whole.mlp - whole.mlp * through // slices)
    again = 0
    if recompute:
        _, narrow = _written(c, constraint)
        last = (c.layers - narrow) * c.dim * c.ffn_dim
        if narrow:  # U's product, and where W_down is sliced, as it knows what is wanted of it, its own too
            last += narrow * constraint.rank * (c.dim + c.ffn_dim * ("mlp" in sliced and slices > 1))
        embedding = _writing_flops(c, bt, constraint) // (2 * narrow + 1)
        again = forward - 2 * bt * (c.dim * c.vocab_size + last) - embedding
    return forward + inputs + weights + again


@dataclass(frozen=True)
class MemoryCount:
    """The bytes of the tensors that exist throughout a step, without activations."""

    weights: int
    gradients: int
    optimizer: int
    outer: int  # the copy last agreed, the outer momentum, and what else the method keeps of each value
    outer_on_device: int  # the most of `outer` that is on the accelerator at a time

    @property
    def on_device(self) -> int:
        """Return the most bytes that are on the accelerator at a time."""
        return self.weights + self.gradients + self.optimizer + self.outer_on_device


def memory(
    numel: int,
    *,
    outer_buffers: int,
    fetched: int | None = None,
    trained: int | None = None,
    moments: int = 2,
    fewer: int = 0,
    gradient_bytes: int = 4,
) -> MemoryCount:
    """Count the memory of one replica: `numel` parameters in fp32, and outer buffers of the same size.

    DiLoCo has 2, the parameters last agreed and a momentum; NoLoCo 3, with the mean of its next peers' slow weights;
    error feedback adds one, the residual.

    `moments`: values that the inner optimizer keeps of each that is trained, AdamW's two by default (its step counters
    are not counted), less `fewer` in all. `fetched`: values of outer state that are on the accelerator at a time, where
    it is kept elsewhere and fetched for a fragment's turn (Streaming DiLoCo, section 2.5). `trained`: values that this
    replica trains, where it is not all of them; what is frozen has neither gradient nor moments. `gradient_bytes`: 2
    where they are in bf16.
    """
    trained = numel if trained is None else trained
    outer = 4 * numel * outer_buffers
    on_device = outer if fetched is None else 4 * fetched
    return MemoryCount(4 * numel, gradient_bytes * trained, 4 * (moments * trained - fewer), outer, on_device)
