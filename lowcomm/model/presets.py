"""The sizes that the four papers train, as their tables print them."""

from __future__ import annotations

from lowcomm.model.config import ModelConfig


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
    # Protocol Models: 2B and its 16-layer variant (24 heads, as the base model is said to have, do not divide 4096, and
    # 16 are named where time and memory are measured: here 32 of 128 dimensions, as Llama 3 has), and Llama 3 8B.
    # Feed-forward width and vocabulary of the first two are inferred.
    "protocol_models/2b": ModelConfig(4096, 8, 32, 14_336, 32_000, 1024),
    "protocol_models/3.5b": ModelConfig(4096, 16, 32, 14_336, 32_000, 1024),
    "protocol_models/8b": ModelConfig(4096, 32, 32, 14_336, 128_256, 4096, kv_heads=8, rope_theta=500_000.0),
}
