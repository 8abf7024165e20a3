"""Parameters, FLOPs, memory and bytes in closed form; tests hold each against the real thing.

A multiply-add counts as two FLOPs. Counted: every matrix product, attention at its full
(dense, not causal) size. Not counted: norms, activations, softmax, rotary positions, the
embedding lookup, the optimizer. This is what `torch.utils.flop_counter.FlopCounterMode` counts.

Legend: B sequences, T tokens, D width, F feed-forward width, V vocabulary, L layers,
N heads, K key/value heads, H head width, P parameters, R replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from lowcomm.shape import Constraint, ModelConfig


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by part of the model."""

    embedding: int
    attention: int
    mlp: int
    norms: int
    head: int  # 0 when tied

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.mlp + self.norms + self.head

    @property
    def non_embedding(self) -> int:
        return self.attention + self.mlp + self.norms


def _written(c: ModelConfig, constraint: Constraint | None) -> tuple[int, int]:
    """(D or k summed over layers: how wide what they write is, layers of which it is k)."""
    if constraint is None or not constraint.reparametrised:
        return c.layers * c.dim, 0
    narrow = max(0, c.layers - constraint.dense_layers)
    return narrow * constraint.rank + (c.layers - narrow) * c.dim, narrow


def parameters(c: ModelConfig, constraint: Constraint | None = None) -> ParameterCount:
    """Parameter count of a decoder; of a constrained one, without the fixed embedding."""
    q, kv = c.heads * c.width_of_head, c.key_value_heads * c.width_of_head
    norm_terms = 1 if c.norm == "rms" else 2  # gain, and bias for LayerNorm
    qk_norms = 2 * c.width_of_head if c.qk_norm else 0
    written, _ = _written(c, constraint)
    return ParameterCount(
        embedding=c.vocab_size * (constraint.rank if constraint is not None and constraint.reparametrised else c.dim),
        attention=c.layers * c.dim * (q + 2 * kv) + written * q,
        mlp=c.layers * c.dim * c.ffn_dim * (2 if c.mlp == "gated" else 1) + written * c.ffn_dim,
        norms=norm_terms * (c.layers * (2 * c.dim + qk_norms) + c.dim),
        head=0 if c.tied else c.vocab_size * c.dim,
    )


def trained_parameters(
    c: ModelConfig, sliced: Sequence[str], slices: int, constraint: Constraint | None = None
) -> ParameterCount:
    """What a replica trains where each of `slices` replicas has its own slice of `sliced` (see `partial`)."""
    whole = parameters(c, constraint)
    q, kv = c.heads * c.width_of_head, c.key_value_heads * c.width_of_head
    written, _ = _written(c, constraint)
    heads = c.layers * c.dim * ((q - q // slices) + 2 * (kv - kv // slices))
    frozen = ("heads" in sliced) * heads + ("out" in sliced) * written * (q - q // slices)
    mlp = whole.mlp // slices if {"mlp", "layers"} & set(sliced) else whole.mlp
    return dataclasses.replace(whole, attention=whole.attention - frozen, mlp=mlp)


def _writing_flops(c: ModelConfig, tokens: int, constraint: Constraint | None) -> int:
    """FLOPs of one pass of the products with U alone: of the embedding, and two a layer."""
    if constraint is None or not constraint.reparametrised:
        return 0
    _, narrow = _written(c, constraint)
    return 2 * tokens * constraint.rank * c.dim * (2 * narrow + 1)


def forward_flops(c: ModelConfig, sequences: int, tokens: int, constraint: Constraint | None = None) -> int:
    """FLOPs of one forward pass over `sequences` sequences of `tokens` tokens.

    Per layer 2BTD(2NH + 2KH) projections + 4BT^2 NH attention + 2BTDF per MLP matrix; 2BTDV logits. Where matrices are
    W = U Z (Protocol Models), their products cost 2BTk each way instead, and U's 2BTkD.
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
    """FLOPs of a forward and a backward pass: each product has two gradients, so 3 x forward where all is trained.

    Where a replica trains a slice (Partial Parameter Updates, appendix C.2), gradients with respect to weights take
    2BT a trained one; with respect to the inputs of MLPs, `through` / `slices` of theirs, where they pass through so
    many slices alone (appendix D). With `recompute`, blocks are computed forward once more, up to their last product,
    whose result nobody needs. The fixed U of W = U Z has one
    gradient, not two. What keeping to a subspace takes besides is `subspace.overhead_flops`.
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


def shares(numel: int, ranks: int) -> list[tuple[int, int]]:
    """[begin, end) of each rank's share of `numel` values; contiguous, sizes differ by at most one."""
    bounds = [numel * r // ranks for r in range(ranks + 1)]
    return list(pairwise(bounds))


def mean_bytes(numel: int, itemsize: int, ranks: int, rank: int = 0) -> int:
    """Bytes that `rank` sends in one mean of `numel` values: every other share, then its own to all.

    numel + (ranks - 2) * share values, so 2 (R-1)/R of the payload when R divides it: the bytes of a ring.
    """
    if ranks == 1:
        return 0
    begin, end = shares(numel, ranks)[rank]
    return (numel + (ranks - 2) * (end - begin)) * itemsize


class Encoding(Protocol):
    """What a codec says of its sizes; see `codecs.Codec`."""

    block: int

    def nbytes(self, numel: int) -> int: ...


def block_shares(numel: int, block: int, ranks: int) -> list[tuple[int, int]]:
    """[begin, end) of each rank's share, in whole blocks but for the end."""
    return [(begin * block, min(end * block, numel)) for begin, end in shares(-(-numel // block), ranks)]


#: A part of what is averaged: how many values, and which members have something to say about them.
Section = tuple[int, Sequence[int]]


def encoded_mean_in_shares(numel: int, codec: Encoding, ranks: int, owners: int | None = None) -> bool:
    """Whether a mean of encoded values sends fewer bytes when each owner sums a share and then shares the sum in fp32.

    With R ranks, O of them owners (default: all), and b bytes a value: gathered, every rank gets every owner's values,
    O (R - 1) b n bytes in all. In shares, each owner sends the other owners their shares, encoded, and then its own sum
    to every rank as fp32: ((O - 1) b + 4 (R - 1)) n. With O = R shares win from R = 9 at 4 bits; with O = 1, never.
    """
    owners = ranks if owners is None else owners
    if codec.block == 0 or owners == 0:
        return False
    encoded = sum(codec.nbytes(end - begin) for begin, end in block_shares(numel, codec.block, owners))
    return (owners - 1) * encoded + 4 * (ranks - 1) * numel < owners * (ranks - 1) * codec.nbytes(numel)


def encoded_mean_bytes(numel: int, codec: Encoding, ranks: int, rank: int = 0) -> int:
    """Bytes that `rank` sends in one mean of `numel` encoded values."""
    return owned_mean_bytes([(numel, range(ranks))], codec, ranks, rank)


def owned_mean_bytes(sections: Sequence[Section], codec: Encoding, ranks: int, rank: int = 0) -> int:
    """Bytes that `rank` sends in one mean of encoded values, of each section over its owners.

    Of n fp32 values in N sections of R/N owners each, (1 + 1/N - 2/R) 4 n; with zeros for what a rank does not own, in
    an ordinary mean, (2 - 2/R) 4 n.
    """
    if ranks == 1:
        return 0
    sent = 0
    for numel, owners in sections:
        if rank not in owners:
            continue
        if encoded_mean_in_shares(numel, codec, ranks, len(owners)):
            sizes = [end - begin for begin, end in block_shares(numel, codec.block, len(owners))]
            mine = list(owners).index(rank)
            sent += sum(codec.nbytes(size) for i, size in enumerate(sizes) if i != mine) + (ranks - 1) * 4 * sizes[mine]
        else:
            sent += (ranks - 1) * codec.nbytes(numel)
    return sent


def rounds(steps: int, sync_every_steps: int) -> int:
    """Exchanges in a run of `steps`: one every H steps, and one for an unfinished last round."""
    return -(-steps // sync_every_steps)


def ring_seconds(payload_bytes: float, ranks: int, bits_per_second: Any, latency_s: float = 0.0) -> Any:
    """Seconds of a mean over a link: 2 (R-1)/R * 8 S / B, and two latencies (one a phase). B may be an array."""
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) / ranks * 8 * payload_bytes / bits_per_second + 2 * latency_s


@dataclass(frozen=True)
class MemoryCount:
    """Bytes of tensors that live through a step, activations apart."""

    weights: int
    gradients: int
    optimizer: int
    outer: int  # the copy last agreed and the outer momentum
    outer_on_device: int  # the most of `outer` that is on the accelerator at a time

    @property
    def on_device(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.outer_on_device


def memory(
    numel: int,
    *,
    inner: str,
    outer_buffers: int,
    fetched: int | None = None,
    trained: int | None = None,
    gradient_bytes: int = 4,
) -> MemoryCount:
    """Memory of one replica: `numel` parameters in fp32, and outer buffers of the same size.

    DiLoCo has 2, the parameters last agreed and a momentum; NoLoCo 3, with the mean of its next peers' slow weights.

    AdamW keeps two moments a parameter, SGD none (its step counters are not counted). `fetched`: values of the largest
    fragment, where outer state is kept off the accelerator and fetched for a fragment's turn (Streaming DiLoCo,
    section 2.5); its turns must not coincide with another's. `trained`: values that this replica trains, where it is
    not all of them; what is frozen has neither gradient nor moments. `gradient_bytes`: 2 where they are in bf16.
    """
    trained = numel if trained is None else trained
    outer = 4 * numel * outer_buffers
    on_device = outer if fetched is None else 4 * fetched * outer_buffers
    return MemoryCount(4 * numel, gradient_bytes * trained, 8 * trained if inner == "adamw" else 0, outer, on_device)
