"""A decoder-only transformer that covers what the four papers train.

One pre-norm block, with the papers' differences as configuration: RMSNorm or
LayerNorm, rotary positions, optional QK-norm and z-loss (Streaming DiLoCo), a
two-matrix ReLU or GELU MLP (Partial Parameter Updates) or a gated one (NoLoCo,
Protocol Models), tied or untied embeddings, grouped key/value heads.

What writes into the residual stream may be held to a subspace, or the stream be projected on it (`Constraint`). Keys
and values of tokens that were read may be kept (`KeyValues`), so that one token at a time can be read after them.

Shape legend: B batch, T tokens, D model width, F feed-forward width, V vocabulary,
N query heads, K key/value heads, C width of a head, R rank of the subspace.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowcomm.model.config import Constraint, ModelConfig, stage_layers


def orthonormal(x: Tensor) -> Tensor:
    """Return an orthonormal basis [D, R] of the columns of x [D, R].

    It is Q of the QR decomposition, with the signs that make it continuous in x.
    """
    q, r = torch.linalg.qr(x)
    return (q * torch.where(r.diagonal() < 0, -1.0, 1.0)).contiguous()


class KeyValues:
    """The keys and values of one layer for a batch of sequences, of the `length` tokens that have been read so far.

    There is room for `capacity` tokens.
    """

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        self._both: list[Tensor] = []

    def add(self, k_BKTC: Tensor, v_BKTC: Tensor) -> list[Tensor]:
        """Append the keys and values of T new tokens, and return those of all read so far, [B, K, length, C] each."""
        B, K, T, C = k_BKTC.shape
        self._both = self._both or [k_BKTC.new_empty(B, K, self.capacity, C) for _ in range(2)]
        begin, self.length = self.length, self.length + T
        for whole, new in zip(self._both, (k_BKTC, v_BKTC), strict=True):
            whole[:, :, begin : self.length] = new
        return [whole[:, :, : self.length] for whole in self._both]


def rotary_tables(seq_len: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary angles, fp32 [T, C] each; the first half of sin is negated (Su et al., 2021)."""
    freqs_h = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles_th = torch.arange(seq_len, dtype=torch.float32)[:, None] * freqs_h
    cos_th, sin_th = angles_th.cos(), angles_th.sin()
    return torch.cat((cos_th, cos_th), dim=1), torch.cat((-sin_th, sin_th), dim=1)


def rotate(x_BNTC: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """Return queries or keys with rotary positions applied; a pair has one entry in each half of a head."""
    cos, sin = cos_TC.to(x_BNTC.dtype), sin_TC.to(x_BNTC.dtype)
    return torch.addcmul(x_BNTC * cos, x_BNTC.roll(x_BNTC.shape[-1] // 2, dims=-1), sin)


def _norm(config: ModelConfig, width: int) -> nn.Module:
    return (nn.RMSNorm if config.norm == "rms" else nn.LayerNorm)(width, eps=config.norm_eps)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; torch picks the fused kernel. Its result is [B, T, width].

    `attend`: a function of q [B, N, T, C], k and v [B, K, T, C] that takes the kernel's place and returns
    [B, N, T, C]; None for torch's kernel.
    """

    attend: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def __init__(self, c: ModelConfig, width: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.key_value_heads, c.width_of_head
        self.q = nn.Linear(c.dim, self.heads * self.head_dim, bias=False)
        self.k = nn.Linear(c.dim, self.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(c.dim, self.kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(self.heads * self.head_dim, width, bias=False)
        self.q_norm = _norm(c, self.head_dim) if c.qk_norm else nn.Identity()
        self.k_norm = _norm(c, self.head_dim) if c.qk_norm else nn.Identity()

    def forward(self, x_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor, kept: KeyValues | None = None) -> Tensor:
        B, T, _ = x_BTD.shape
        q = self.q_norm(self.q(x_BTD).view(B, T, self.heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k(x_BTD).view(B, T, self.kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v(x_BTD).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos_TC, sin_TC), rotate(k, cos_TC, sin_TC)
        mask, before = None, 0
        if kept is not None:
            before = kept.length
            k, v = kept.add(k, v)
            if before and T > 1:
                mask = torch.ones(T, before + T, dtype=torch.bool, device=x_BTD.device).tril(before)
        if self.attend is not None:
            y_BNTC = self.attend(q, k, v)
        else:
            grouped = self.kv_heads != self.heads
            y_BNTC = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=before == 0, enable_gqa=grouped)
        return self.out(y_BNTC.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """The feed-forward part of a block: W_down act(W_up x), or W_down (silu(W_gate x) * W_up x) when gated.

    Its result is [B, T, width].
    """

    def __init__(self, c: ModelConfig, width: int):
        super().__init__()
        self.kind = c.mlp
        self.up = nn.Linear(c.dim, c.ffn_dim, bias=False)
        self.gate = nn.Linear(c.dim, c.ffn_dim, bias=False) if c.mlp == "gated" else None
        self.down = nn.Linear(c.ffn_dim, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTF = self.up(x_BTD)
        if self.gate is not None:
            h_BTF = F.silu(self.gate(x_BTD)) * h_BTF
        else:
            h_BTF = F.relu(h_BTF) if self.kind == "relu" else F.gelu(h_BTF)
        return self.down(h_BTF)


class Block(nn.Module):
    """A pre-norm block: x + Attention(norm(x)), then x + MLP(norm(x)).

    With a `rank` R, attention and MLP return [B, T, R], which U writes into the stream.
    """

    def __init__(self, c: ModelConfig, rank: int | None = None):
        super().__init__()
        width = rank or c.dim
        self.attention_norm, self.attention = _norm(c, c.dim), Attention(c, width)
        self.mlp_norm, self.mlp = _norm(c, c.dim), MLP(c, width)
        self.written_by_basis = rank is not None

    def forward(
        self,
        x_BTD: Tensor,
        cos_TC: Tensor,
        sin_TC: Tensor,
        basis_DR: Tensor | None = None,
        kept: KeyValues | None = None,
    ) -> Tensor:
        def write(y: Tensor) -> Tensor:
            return F.linear(y, basis_DR) if self.written_by_basis else y

        x_BTD = x_BTD + write(self.attention(self.attention_norm(x_BTD), cos_TC, sin_TC, kept))
        return x_BTD + write(self.mlp(self.mlp_norm(x_BTD)))


_recomputing = threading.local()


def recomputing() -> bool:
    """Tell whether this thread is recomputing a block, for what its backward pass needs and not for its result."""
    return getattr(_recomputing, "now", False)


@contextlib.contextmanager
def _again() -> Iterator[None]:
    _recomputing.now = True
    try:
        yield
    finally:
        _recomputing.now = False


def _computed_twice(block: nn.Module, *inputs: Tensor | None) -> Tensor:
    if torch.compiler.is_compiling():
        return checkpoint(block, *inputs, use_reentrant=False)
    contexts = (contextlib.nullcontext, _again)
    return checkpoint(block, *inputs, use_reentrant=False, context_fn=lambda: tuple(c() for c in contexts))


class Decoder(nn.Module):
    """A decoder: embedding, blocks, norm and head. `forward` gives logits, `losses` the training loss.

    `recompute`: whether only the inputs of blocks are kept, and the rest is computed once more in the backward pass.
    `offset`: the position, from 0, of the first token that is read.
    `probe`: zeros [B, T, D] that are added to the input of the first dense layer where gradients are taken, so that
    its gradient is that of what the constrained layers wrote; None for no probe.
    `projecting_layers`: the layers that read a projection of the stream, with which stages after the first begin.
    With a constraint, each stage has the buffers `basis_DR` (U) and `fixed_VD` (the fixed embedding).

    Raises ValueError where the embedding is tied and there is a constraint.
    """

    recompute = False
    offset = 0
    probe: Tensor | None = None

    def __init__(self, config: ModelConfig, constraint: Constraint | None = None):
        super().__init__()
        self.config, self.constraint = config, constraint
        if constraint is not None and config.tied:
            raise ValueError("model.tied must be false with a constraint: the embedding keeps to the subspace")
        rank = constraint.rank if constraint is not None and constraint.reparametrised else None
        self.embedding = nn.Embedding(config.vocab_size, rank or config.dim)
        ranks = (rank if i in self.constrained_layers else None for i in range(config.layers))
        self.blocks = nn.ModuleDict({str(i): Block(config, r) for i, r in enumerate(ranks)})
        self.norm = _norm(config, config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        cos, sin = rotary_tables(config.seq_len, config.width_of_head, config.rope_theta)
        self.register_buffer("cos_TC", cos, persistent=False)
        self.register_buffer("sin_TC", sin, persistent=False)
        stages = 0 if constraint is None else constraint.stages
        self.projecting_layers = [stage_layers(config.layers, stages, stage).start for stage in range(1, stages)]
        basis = None if constraint is None else torch.empty(config.dim, constraint.rank)
        fixed = None if constraint is None else torch.empty(config.vocab_size, config.dim)
        self.register_buffer("basis_DR", basis, persistent=False)
        self.register_buffer("fixed_VD", fixed, persistent=False)

    @property
    def constrained_layers(self) -> range:
        """Return the layers that write to the subspace alone, of the whole decoder."""
        if self.constraint is None or self.constraint.free:
            return range(0)
        return range(max(0, self.config.layers - self.constraint.dense_layers))

    def tables(self) -> dict[str, Tensor]:
        """Return the tensors that a saved model needs besides its parameters, by name.

        With a constraint they are the basis and the fixed embedding; without one there are none.
        """
        return {} if self.constraint is None else {"basis_DR": self.basis_DR, "fixed_VD": self.fixed_VD}

    def constrained(self) -> list[str]:
        """Return the names of this stage's parameters that write to the subspace, the embedding's first."""
        if self.constraint is None or self.constraint.free:
            return []
        found = [] if self.embedding is None else ["embedding.weight"]
        for i in self.constrained_layers:
            if str(i) in self.blocks:
                found += [f"blocks.{i}.attention.out.weight", f"blocks.{i}.mlp.down.weight"]
        return found

    @torch.no_grad()
    def initialise(self, seed: int) -> Decoder:
        """Draw all weights, in place, from `seed` alone, and return the decoder.

        Every replica and every stage so starts with equal weights, without any communication. Matrices are
        N(0, 0.02^2), but the embedding's deviation is `embedding_std`; those that write into the residual stream are
        divided by sqrt(2 layers) as in GPT-2; norms start at one. With a constraint the same weights are drawn and
        projected on the subspace, whose basis is set by `draw_basis`.
        """
        generator = torch.Generator().manual_seed(seed)
        self.draw_basis(seed)
        for name, p in self.named_parameters():
            if p.dim() < 2:
                continue
            std = self.config.embedding_std if name == "embedding.weight" else 0.02
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                std /= math.sqrt(2 * self.config.layers)
            self.put(name, torch.empty(self.full_shape(name)).normal_(0.0, std, generator=generator))
        return self

    @torch.no_grad()
    def draw_basis(self, seed: int) -> None:
        """Set the subspace's basis, from `seed` alone; do nothing without a constraint.

        It is of isotropic Gaussian columns, made orthonormal, or of the first R coordinates (`Constraint.basis`).
        """
        if self.constraint is None:
            return
        columns = torch.eye(self.config.dim)[:, : self.constraint.rank]
        if self.constraint.basis == "gaussian":
            # Apart from the weights' seed, whose first draws are the embedding; of 32 bits, as torch takes no more.
            own = torch.Generator().manual_seed((seed + 1) * 0x9E3779B1 % 2**32)
            columns = torch.empty(self.basis_DR.shape).normal_(generator=own)
        self.basis_DR.copy_(orthonormal(columns))

    def full_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that a parameter has without a constraint.

        It is [V, D] of the embedding, and [D, n] of matrices that write into the stream.
        """
        shape = tuple(self.get_parameter(name).shape)
        if name not in self.constrained():
            return shape
        return (shape[0], self.config.dim) if name == "embedding.weight" else (self.config.dim, shape[1])

    @torch.no_grad()
    def put(self, name: str, whole: Tensor, *, split: bool = False) -> None:
        """Set a parameter to the projection of `whole`, of its `full_shape`, on the subspace; a free one to `whole`.

        Re-parametrised, it becomes the coordinates of the projection. A trainable embedding that begins at zero
        (`Constraint.table`) becomes zero. The fixed embedding becomes the whole table; with `split` it becomes what the
        trainable one lacks of the table, so that both together are the table, as is right for one that has been
        trained.
        """
        p, table = self.get_parameter(name), name == "embedding.weight"
        if self.constraint is None or not (table or name in self.constrained()):
            p.copy_(whole)
            return
        begin = torch.zeros_like(whole) if table and self.constraint.table == "zero" else whole
        u = self.basis_DR.to(whole.device)
        coordinates = begin @ u if table else u.T @ begin
        p.copy_(coordinates if self.constraint.reparametrised else coordinates @ u.T if table else u @ coordinates)
        if table:
            self.fixed_VD.copy_(whole - coordinates @ u.T if split else whole)

    @torch.no_grad()
    def whole(self, name: str) -> Tensor:
        """Return the weight of `full_shape` that a parameter stands for.

        It is U Z where that writes into the stream, and the sum of both embeddings.
        """
        p, table = self.get_parameter(name).detach(), name == "embedding.weight"
        if self.constraint is None or not (table or name in self.constrained()):
            return p
        if self.constraint.reparametrised:
            p = p @ self.basis_DR.T if table else self.basis_DR @ p
        return p + self.fixed_VD if table else p

    def cut(self, stage: int, stages: int) -> Decoder:
        """Keep the parts of one stage of a pipeline, in place, and return the decoder.

        They are its layers, at the first stage the embedding, and at the last one norm and head; other parts become
        None. Parameters keep their names. What is projected between stages is left to the pipeline's boundaries. Raises
        ValueError for tied embeddings, which would be of two stages.
        """
        kept = stage_layers(self.config.layers, stages, stage)
        if stages > 1 and self.config.tied:
            raise ValueError("tied embeddings would be of the first stage and of the last: untie them, or use one")
        self.blocks = nn.ModuleDict({str(i): self.blocks[str(i)] for i in kept})
        if stages > 1:
            self.projecting_layers = []
        if stage > 0:
            self.embedding = None
        if stage < stages - 1:
            self.norm = self.head = None
        return self

    def crossed(self, layer: int, x_BTD: Tensor, ids_BT: Tensor) -> Tensor:
        """Return what a layer reads of the stream x: T_fixed[ids] + (x - T_fixed[ids]) U U^T if it projects it, else x.

        As at a boundary between two stages, this is computed in fp32.
        """
        if layer not in self.projecting_layers:
            return x_BTD
        with torch.autocast(x_BTD.device.type, enabled=False):
            fixed_BTD, basis_DR = self.fixed_VD[ids_BT].float(), self.basis_DR.float()
            return (fixed_BTD + (x_BTD.float() - fixed_BTD) @ basis_DR @ basis_DR.T).to(x_BTD.dtype)

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Return the residual stream [B, T, D] as it begins, for token ids [B, T]."""
        x_BTD = self.embedding(ids_BT)
        if self.constraint is None:
            return x_BTD
        if self.constraint.reparametrised:
            x_BTD = F.linear(x_BTD, self.basis_DR)
        return x_BTD + self.fixed_VD[ids_BT]

    def hidden(self, x: Tensor, kept: dict[str, KeyValues] | None = None) -> Tensor:
        """Return the residual stream [B, T, D] after the last block of the decoder, or of its stage.

        x: token ids [B, T] (int64), or at a later stage of a pipeline activations [B, T, D]. With `kept`, a `KeyValues`
        for each of its layers, by name, the T tokens come after those read before. Raises ValueError where that is more
        than `seq_len` tokens.
        """
        T, before = x.shape[1], self.offset if kept is None else next(iter(kept.values())).length
        if self.config.seq_len < before + T:
            raise ValueError(f"sequence of {before + T} tokens is longer than model.seq_len = {self.config.seq_len}")
        cos, sin = self.cos_TC[before : before + T], self.sin_TC[before : before + T]
        x_BTD = x if self.embedding is None else self.embed(x)
        probed = None if self.probe is None or not torch.is_grad_enabled() else len(self.constrained_layers)
        for name, block in self.blocks.items():
            if probed == int(name):
                x_BTD = x_BTD + self.probe
            x_BTD = self.crossed(int(name), x_BTD, x)
            if self.recompute and kept is None and torch.is_grad_enabled():
                x_BTD = _computed_twice(block, x_BTD, cos, sin, self.basis_DR)
            else:
                x_BTD = block(x_BTD, cos, sin, self.basis_DR, None if kept is None else kept[name])
        return x_BTD + self.probe if probed == self.config.layers else x_BTD

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [B, T, V] of token ids [B, T] (int64).

        A stage takes activations [B, T, D] unless it is the first, and returns activations unless it is the last.
        """
        x_BTD = self.hidden(x)
        return x_BTD if self.head is None else self.head(self.norm(x_BTD))

    def losses(self, x: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return (training loss, cross-entropy) of `forward`'s logits for targets [B, T], both means in nats per token.

        The training loss adds z_loss * mean(logsumexp(logits)^2), Chowdhery et al. (2022).
        """
        return self._losses_of(self(x), targets_BT)

    def head_losses(self, x_BTD: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `losses` does, from the result of `hidden`: by norm, head and cross-entropy alone."""
        return self._losses_of(self.head(self.norm(x_BTD)), targets_BT)

    def _losses_of(self, logits_BTV: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        logits, targets = logits_BTV.flatten(0, 1).float(), targets_BT.flatten()
        if not self.config.z_loss:
            entropy = F.cross_entropy(logits, targets)
            return entropy, entropy
        entropies = F.cross_entropy(logits, targets, reduction="none")
        log_z = entropies + logits.gather(1, targets[:, None])[:, 0]  # as the cross-entropy is log Z minus that logit
        entropy = entropies.mean()
        return entropy + self.config.z_loss * log_z.square().mean(), entropy
