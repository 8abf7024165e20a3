"""A decoder-only transformer that covers what the four papers train.

One pre-norm block, with the papers' differences as configuration: RMSNorm or
LayerNorm, rotary positions, optional QK-norm and z-loss (Streaming DiLoCo), a
two-matrix ReLU or GELU MLP (Partial Parameter Updates) or a gated one (NoLoCo,
Protocol Models), tied or untied embeddings, grouped key/value heads.

Shape legend: B batch, T tokens, D model width, F feed-forward width, V vocabulary,
N query heads, K key/value heads, H width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class ModelConfig:
    """Shape and options of a decoder. Every field is a number or a choice of the papers."""

    dim: int  # D, width of the residual stream
    layers: int
    heads: int  # N; must divide into kv_heads
    ffn_dim: int  # F
    vocab_size: int  # V
    seq_len: int  # longest T
    kv_heads: int = 0  # K; 0 means as many as heads
    head_dim: int = 0  # H; 0 means dim / heads
    mlp: Literal["relu", "gelu", "gated"] = "gated"
    norm: Literal["rms", "layer"] = "rms"
    qk_norm: bool = False
    z_loss: float = 0.0  # weight of the mean squared log-partition
    tied: bool = False  # share the embedding with the output head
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "ffn_dim", "vocab_size", "seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("kv_heads", "head_dim", "z_loss"):
            if getattr(self, name) < 0:
                raise ValueError(f"model.{name} must be at least 0, got {getattr(self, name)}")
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
        return self.head_dim or self.dim // self.heads

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads or self.heads


def rotary_tables(seq_len: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, each [T, H/2] fp32 (Su et al., 2021)."""
    freqs_h = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles_th = torch.arange(seq_len, dtype=torch.float32)[:, None] * freqs_h
    return angles_th.cos(), angles_th.sin()


def rotate(x_BNTH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Apply rotary positions to queries or keys; the two halves of a head are the pairs."""
    a, b = x_BNTH.chunk(2, dim=-1)
    cos, sin = cos_TH.to(x_BNTH.dtype), sin_TH.to(x_BNTH.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _norm(config: ModelConfig, width: int) -> nn.Module:
    return nn.RMSNorm(width, eps=1e-6) if config.norm == "rms" else nn.LayerNorm(width, eps=1e-6)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; torch picks the fused kernel."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.key_value_heads, c.width_of_head
        self.q = nn.Linear(c.dim, self.heads * self.head_dim, bias=False)
        self.k = nn.Linear(c.dim, self.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(c.dim, self.kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(self.heads * self.head_dim, c.dim, bias=False)
        self.q_norm = _norm(c, self.head_dim) if c.qk_norm else nn.Identity()
        self.k_norm = _norm(c, self.head_dim) if c.qk_norm else nn.Identity()

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        B, T, _ = x_BTD.shape
        q = self.q_norm(self.q(x_BTD).view(B, T, self.heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k(x_BTD).view(B, T, self.kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v(x_BTD).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos_TH, sin_TH), rotate(k, cos_TH, sin_TH)
        y_BNTH = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads)
        return self.out(y_BNTH.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """W_down act(W_up x), or W_down (silu(W_gate x) * W_up x) when gated."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.kind = c.mlp
        self.up = nn.Linear(c.dim, c.ffn_dim, bias=False)
        self.gate = nn.Linear(c.dim, c.ffn_dim, bias=False) if c.mlp == "gated" else None
        self.down = nn.Linear(c.ffn_dim, c.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTF = self.up(x_BTD)
        if self.gate is not None:
            h_BTF = F.silu(self.gate(x_BTD)) * h_BTF
        else:
            h_BTF = F.relu(h_BTF) if self.kind == "relu" else F.gelu(h_BTF)
        return self.down(h_BTF)


class Block(nn.Module):
    """x + Attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.attention_norm, self.attention = _norm(c, c.dim), Attention(c)
        self.mlp_norm, self.mlp = _norm(c, c.dim), MLP(c)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TH, sin_TH)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """Layers of a stage of a pipeline: neighbours, and as many as in any other, or one more or less."""
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot form {stages} stages: each needs one at least")
    return range(layers * stage // stages, layers * (stage + 1) // stages)


class Decoder(nn.Module):
    """Embedding, blocks, norm and head. `forward` gives logits, `losses` the training loss.

    `recompute`: keep only the inputs of blocks, and compute the rest once more in the backward pass.
    """

    recompute = False

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleDict({str(i): Block(config) for i in range(config.layers)})
        self.norm = _norm(config, config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        cos, sin = rotary_tables(config.seq_len, config.width_of_head, config.rope_theta)
        self.register_buffer("cos_TH", cos, persistent=False)
        self.register_buffer("sin_TH", sin, persistent=False)

    def initialise(self, seed: int) -> Decoder:
        """Draw all weights from `seed` alone, so every replica starts equal without talking.

        Matrices are N(0, 0.02^2); those that write into the residual stream are divided by
        sqrt(2 layers) as in GPT-2; norms start at one.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() < 2:
                continue
            std = 0.02
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                std /= math.sqrt(2 * self.config.layers)
            with torch.no_grad():
                p.copy_(torch.empty(p.shape).normal_(0.0, std, generator=generator))
        return self

    def cut(self, stage: int, stages: int) -> Decoder:
        """Keep what is of one stage of a pipeline: its layers, the embedding (the first), norm and head (the last).

        Parameters keep their names. Raises ValueError for tied embeddings, which would be of two stages.
        """
        kept = stage_layers(self.config.layers, stages, stage)
        if stages > 1 and self.config.tied:
            raise ValueError("tied embeddings would be of the first stage and of the last: untie them, or use one")
        self.blocks = nn.ModuleDict({str(i): self.blocks[str(i)] for i in kept})
        if stage > 0:
            self.embedding = None
        if stage < stages - 1:
            self.norm = self.head = None
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Token ids [B, T] (int64) -> logits [B, T, V]; a stage takes and gives activations [B, T, D] at its cuts."""
        T = x.shape[1]
        if self.config.seq_len < T:
            raise ValueError(f"sequence of {T} tokens is longer than model.seq_len = {self.config.seq_len}")
        cos, sin = self.cos_TH[:T], self.sin_TH[:T]
        x_BTD = x if self.embedding is None else self.embedding(x)
        for block in self.blocks.values():
            if self.recompute and torch.is_grad_enabled():
                x_BTD = checkpoint(block, x_BTD, cos, sin, use_reentrant=False)
            else:
                x_BTD = block(x_BTD, cos, sin)
        return x_BTD if self.head is None else self.head(self.norm(x_BTD))

    def losses(self, x: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """(training loss, cross-entropy) of `forward`'s logits, both means in nats per token.

        The training loss adds z_loss * mean(logsumexp(logits)^2), Chowdhery et al. (2022).
        """
        logits = self(x).flatten(0, 1).float()
        if not self.config.z_loss:
            entropy = F.cross_entropy(logits, targets_BT.flatten())
            return entropy, entropy
        log_z = logits.logsumexp(-1)  # shared: the cross-entropy is log Z minus the target's logit
        entropy = (log_z - logits.gather(1, targets_BT.reshape(-1, 1))[:, 0]).mean()
        return entropy + self.config.z_loss * log_z.square().mean(), entropy


def _streaming(dim: int, layers: int, heads: int) -> ModelConfig:
    # Streaming DiLoCo, Table 2: "hidden dim" is the feed-forward width, 4 x the model width.
    return ModelConfig(
        dim, layers, heads, 4 * dim, 32_000, 1024, mlp="gelu", qk_norm=True, z_loss=1e-4, tied=False, head_dim=64
    )


def _noloco(dim: int, layers: int, heads: int) -> ModelConfig:
    # NoLoCo, Table 1, with the vocabulary and the gated MLP of its public code.
    return ModelConfig(dim, layers, heads, 4 * dim, 128_002, 1024, mlp="gated")


#: Every model size that the four papers train, by `paper/size`.
PRESETS: dict[str, ModelConfig] = {
    "streaming_diloco/35m": _streaming(512, 6, 8),
    "streaming_diloco/100m": _streaming(768, 9, 12),
    "streaming_diloco/200m": _streaming(1024, 12, 16),
    "streaming_diloco/300m": _streaming(1280, 15, 20),
    "streaming_diloco/500m": _streaming(1536, 18, 24),
    "streaming_diloco/1b": _streaming(2048, 24, 32),
    "streaming_diloco/4b": _streaming(3072, 36, 48),
    # DiLoCo (the baseline's own paper), Table 1 there.
    "diloco/60m": ModelConfig(896, 3, 16, 3584, 32_000, 1024, mlp="gelu", head_dim=64),
    "diloco/150m": ModelConfig(896, 12, 16, 3584, 32_000, 1024, mlp="gelu", head_dim=64),
    "diloco/400m": ModelConfig(1536, 12, 12, 6144, 32_000, 1024, mlp="gelu", head_dim=128),
    # NoLoCo prints 16 heads for its small model; 12, as in its public code, gives 64-wide heads.
    "noloco/small": _noloco(768, 12, 12),
    "noloco/medium": _noloco(2048, 24, 32),
    "noloco/large": _noloco(4096, 32, 32),
    # Partial Parameter Updates, GPT-3 XL shape; 16 heads, vocabulary and length are inferred.
    "partial_updates/1.3b": ModelConfig(2048, 24, 16, 8192, 32_000, 1024, mlp="relu"),
    # Protocol Models: 2B and its 16-layer variant (the text's 24 heads do not divide 4096: 32),
    # and Llama 3 8B. Feed-forward width and vocabulary of the first two are inferred.
    "protocol_models/2b": ModelConfig(4096, 8, 32, 14_336, 32_000, 1024),
    "protocol_models/3.5b": ModelConfig(4096, 16, 32, 14_336, 32_000, 1024),
    "protocol_models/8b": ModelConfig(4096, 32, 32, 14_336, 128_256, 4096, kv_heads=8, rope_theta=500_000.0),
}
