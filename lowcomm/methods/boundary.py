"""Boundaries between two stages of a pipeline, which activations cross one way and their gradients the other.

    dense      x as it is
    subspace   (x - T_fixed[ids]) U, and the token ids, from which the next stage rebuilds x (Protocol Models, Eq. 8);
               of gradients g U (Eq. 9). Exact in fp32, for a model that keeps to the subspace: see `subspace`
    projection the same coordinates, without the ids, of a model that does not keep to it; lossy (`projection`)
    low_rank   P Q^T, the best approximation of rank r that two power iterations find; lossy

What is sent of x is encoded by a codec, which may be lossy too: sparse or quantised activations. With error feedback,
what a message has lost is added to the next one of the same micro-batch and direction.

Some replicas may have fast links between their stages and compress nothing (`replicas`), as Obeidi et al. (2026,
arXiv:2601.02360) propose. The parameters last agreed then leave the subspace, and replicas that compress train their
projection on it; how the two meet is inferred (`local_updates`).

To add a boundary, write a file in this folder with a class that derives from `Boundary` and has `names`.

All of it is computed in fp32, whatever the rest of the step is in. A message is bytes: the encoded values, then token
ids in as few bytes each as hold the vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowcomm.choices import Choice, check_settings, choose
from lowcomm.codecs import check_feedback, make_codec, message_seed
from lowcomm.methods.config import BoundaryConfig
from lowcomm.model.config import ModelConfig
from lowcomm.model.decoder import Decoder
from lowcomm.settings import ConfigError, check_bounds


def id_bytes(vocab_size: int) -> int:
    """Return the number of bytes of a packed token id: as few as can hold any id of the vocabulary."""
    return max(1, -(-(vocab_size - 1).bit_length() // 8))


def pack_ids(ids: Tensor, vocab_size: int) -> Tensor:
    """Return token ids (int64, of any shape) as bytes [n], uint8: `id_bytes` per id, the lowest byte first."""
    return ids.reshape(-1, 1).contiguous().view(torch.uint8)[:, : id_bytes(vocab_size)].reshape(-1).contiguous()


def unpack_ids(packed: Tensor, vocab_size: int) -> Tensor:
    """Return the token ids [n], int64, that `pack_ids` has packed."""
    each = packed.view(-1, id_bytes(vocab_size))
    whole = each.new_zeros(len(each), 8)
    whole[:, : each.shape[1]] = each
    return whole.view(torch.int64)[:, 0]


def low_rank(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return P [n, r] with orthonormal columns and Q [D, r] such that P Q^T is near x [n, D].

    They are found by two power iterations, which begin from the same random columns each time. r is `rank`, or n or D
    where that is less.
    """
    generator, rank = torch.Generator().manual_seed(0), min(rank, *x.shape)
    q = torch.empty(x.shape[1], rank).normal_(generator=generator).to(x.device)
    for _ in range(2):
        p = torch.linalg.qr(x @ q).Q
        q = x.T @ p
    return p, q


def _in_fp32(method: Callable) -> Callable:
    """Let a method of `Boundary` run without gradients and without autocast, which would round what must be rebuilt."""

    @functools.wraps(method)
    def call(self: Boundary, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            return method(self, *args, **kwargs)

    return call


#: The settings that mean something with every kind of boundary.
_OF_ALL = ("kind", "codec", "codec_keep", "error_feedback", "replicas")


class Boundary(Choice, ABC):
    """A format of the messages that cross between two stages of a pipeline, as one rank writes and reads them.

    Args:
        config: the settings.
        shape: the shape of the model; its width and its vocabulary are those of a message.
        model: this rank's stage, which holds the subspace where there is one; None where no message is written or read,
            as for counts of bytes and of FLOPs.
        seed: decides the codec's random choices, together with the turn of a message.

    Attributes:
        wants_ids: whether the reader of activations needs their token ids, to rebuild what is fixed of the embedding.
        sends_ids: whether these travel with activations; else the reader draws them from the data (as the last stage
            draws targets, which never travel).
        lossy: whether something is lost whatever the codec.
        error_of_stream: whether error feedback keeps what was lost of x [n, D], and not of the values sent.
    """

    wants_ids: ClassVar[bool] = False
    sends_ids: bool = True
    lossy: ClassVar[bool] = False
    error_of_stream: ClassVar[bool] = False

    def __init__(self, config: BoundaryConfig, shape: ModelConfig, model: Decoder | None = None, *, seed: int = 0):
        self.rank, self.seed, self.model = config.rank, seed, model
        self.width, self.vocab_size = shape.dim, shape.vocab_size
        self.codec = make_codec(config.codec, config.codec_keep, where="method.boundary.codec")
        self.feedback = config.error_feedback
        #: What messages so far have lost, by direction and micro-batch ("gradients/0"); only with error feedback.
        self.errors: dict[str, Tensor] = {}

    @classmethod
    def check(cls, config: BoundaryConfig, width: int, tokens: int) -> None:
        """Raise ConfigError for settings with which it does not work; `tokens` is the number of tokens in a message."""

    @property
    def device(self) -> torch.device:
        """The device of the stage's tensors; only for a boundary that was made with a `model`."""
        return self.model.cos_TC.device

    @abstractmethod
    def numel(self, tokens: int) -> int:
        """Return the number of values in a message of so many tokens."""

    @abstractmethod
    def values(self, x_TD: Tensor, ids_T: Tensor | None) -> Tensor:
        """Return what is sent of x [T, D], flat; `ids_T` come with activations alone, and only where `wants_ids`."""

    @abstractmethod
    def rebuilt(self, values: Tensor, ids_T: Tensor | None, tokens: int) -> Tensor:
        """Return x [T, D], rebuilt from the values that `values` gave; `ids_T` are as there, `tokens` is T."""

    def activation_bytes(self, tokens: int) -> int:
        """Return the number of bytes in one message of activations, token ids included where they travel."""
        with_ids = self.wants_ids and self.sends_ids
        return self.codec.nbytes(self.numel(tokens)) + with_ids * tokens * id_bytes(self.vocab_size)

    def kept_bytes(self, tokens: int) -> int:
        """Return the number of bytes that error feedback keeps for one micro-batch in one direction; 0 without it."""
        return self.feedback * 4 * (tokens * self.width if self.error_of_stream else self.numel(tokens))

    def flops(self, tokens: int) -> int:
        """Return the FLOPs to write one message and to read it; those of the codec are not counted."""
        return 0

    @property
    def draws_ids(self) -> bool:
        """Tell whether the reader of activations must supply their token ids, as these do not travel with them."""
        return self.wants_ids and not self.sends_ids

    def sending_ids(self) -> Boundary:
        """Return a copy of this boundary whose token ids travel, for tokens that only the first stage has."""
        found = copy.copy(self)
        found.sends_ids = True
        return found

    def gradient_bytes(self, tokens: int) -> int:
        """Return the number of bytes in one message of gradients."""
        return self.codec.nbytes(self.numel(tokens))

    def _encoded(self, x: Tensor, ids: Tensor | None, turn: int, slot: str | None) -> Tensor:
        x = x.detach().reshape(-1, self.width).float()
        feedback = self.feedback and slot is not None
        before = self.errors.get(slot, 0.0) if feedback else 0.0
        if self.error_of_stream:
            x = x + before
            wanted = values = self.values(x, ids)
        else:
            wanted = values = self.values(x, ids) + before
        packed = self.codec.encode(values, message_seed(self.seed, turn))
        if feedback:
            said = self.codec.decode(packed, values.numel())
            if self.error_of_stream:
                wanted, said = x, self.rebuilt(said, ids, len(x))
            self.errors[slot] = wanted - said
        return packed

    @_in_fp32
    def activations(self, x: Tensor, ids: Tensor | None, *, turn: int = 0, slot: int | None = None) -> Tensor:
        """Return the message, uint8, of activations [B, T, D] of token ids [B, T].

        `ids` may be None unless the boundary `wants_ids`. `turn` decides a codec's random choices. `slot`, the number
        of a micro-batch, has errors of its own for error feedback; None: without feedback.
        """
        ids = ids.reshape(-1) if self.wants_ids else None
        packed = self._encoded(x, ids, 2 * turn, None if slot is None else f"activations/{slot}")
        return torch.cat([packed, pack_ids(ids, self.vocab_size)]) if ids is not None and self.sends_ids else packed

    @_in_fp32
    def read_activations(
        self, message: Tensor, shape: tuple[int, int], drawn: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return activations [B, T, D], fp32, from a message, and ids [B, T] where the boundary `wants_ids`, else None.

        `shape` is (B, T). `drawn` are the ids [B, T] from the data, for a boundary that `draws_ids`.
        """
        tokens, ids = shape[0] * shape[1], None
        if self.draws_ids:
            ids = drawn.reshape(-1)
        elif self.wants_ids:
            size = self.codec.nbytes(self.numel(tokens))
            message, packed = message.split([size, message.numel() - size])
            ids = unpack_ids(packed, self.vocab_size)
        x = self.rebuilt(self.codec.decode(message, self.numel(tokens)), ids, tokens)
        return x.view(*shape, self.width), None if ids is None else ids.view(shape)

    @_in_fp32
    def gradients(self, g: Tensor, *, turn: int = 0, slot: int | None = None) -> Tensor:
        """Return the message, uint8, of gradients [B, T, D]; `turn` and `slot` are as for `activations`."""
        return self._encoded(g, None, 2 * turn + 1, None if slot is None else f"gradients/{slot}")

    @_in_fp32
    def read_gradients(self, message: Tensor, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the gradients [B, T, D] of a message, as `dtype`; `shape` is (B, T)."""
        tokens = shape[0] * shape[1]
        x = self.rebuilt(self.codec.decode(message, self.numel(tokens)), None, tokens)
        return x.view(*shape, self.width).to(dtype)


class Dense(Boundary):
    """A boundary whose messages hold x as it is."""

    names = ("dense",)

    def numel(self, tokens: int) -> int:
        return tokens * self.width

    def values(self, x_TD: Tensor, ids_T: Tensor | None) -> Tensor:
        return x_TD.flatten()

    def rebuilt(self, values: Tensor, ids_T: Tensor | None, tokens: int) -> Tensor:
        return values.view(tokens, self.width)


class LowRank(Boundary):
    """A boundary whose messages hold P and Q: P Q^T is the best rank-r approximation of x by two power iterations."""

    names = ("low_rank",)
    settings = ("rank",)
    lossy = True
    error_of_stream = True

    @classmethod
    def check(cls, config: BoundaryConfig, width: int, tokens: int) -> None:
        """Refuse ranks below 1, above the width of the stream, or above the number of tokens in a message."""
        check_rank(config.rank, min(width, tokens))

    def numel(self, tokens: int) -> int:
        return min(self.rank, tokens, self.width) * (tokens + self.width)

    def flops(self, tokens: int) -> int:
        """Return the FLOPs of two power iterations, 8TDr (QR is not counted), and of the product P Q^T, 2TDr."""
        return 10 * tokens * self.width * min(self.rank, tokens, self.width)

    def values(self, x_TD: Tensor, ids_T: Tensor | None) -> Tensor:
        return torch.cat([part.flatten() for part in low_rank(x_TD, self.rank)])

    def rebuilt(self, values: Tensor, ids_T: Tensor | None, tokens: int) -> Tensor:
        rank = min(self.rank, tokens, self.width)
        p, q = values.split([tokens * rank, self.width * rank])
        return p.view(tokens, rank) @ q.view(self.width, rank).T


class InSubspace(Boundary):
    """A boundary whose messages hold coordinates in the subspace that a model keeps to (`subspace`): exact in fp32."""

    names = ("subspace",)
    settings = tuple(f.name for f in dataclasses.fields(BoundaryConfig) if f.name not in _OF_ALL)
    wants_ids = True

    @classmethod
    def check(cls, config: BoundaryConfig, width: int, tokens: int) -> None:
        """Refuse ranks that are not from 1 to the width, and settings of optimizer and updates that clash."""
        check_rank(config.rank, width)
        if config.mode == "reparametrised" and config.second_moment != "row":
            raise ConfigError("method.boundary.second_moment means nothing with mode = reparametrised")
        if bool(config.update_every_steps) != bool(config.update_lr):
            raise ConfigError(
                f"method.boundary.update_every_steps = {config.update_every_steps} and update_lr = {config.update_lr}"
                " must both be above 0, or neither"
            )

    def numel(self, tokens: int) -> int:
        return tokens * self.rank

    def flops(self, tokens: int) -> int:
        """Return the FLOPs of a product with U and of one with its transpose: 4TDR."""
        return 4 * tokens * self.width * self.rank

    def values(self, x_TD: Tensor, ids_T: Tensor | None) -> Tensor:
        moving = x_TD if ids_T is None else x_TD - self.model.fixed_VD[ids_T].float()
        return (moving @ self.model.basis_DR.float()).flatten()

    def rebuilt(self, values: Tensor, ids_T: Tensor | None, tokens: int) -> Tensor:
        x = values.view(tokens, self.rank) @ self.model.basis_DR.float().T
        return x if ids_T is None else x.add_(self.model.fixed_VD[ids_T].float())


def check_rank(rank: int, most: int) -> None:
    """Raise ConfigError for a rank that is not from 1 to `most`."""
    if not 1 <= rank <= most:
        raise ConfigError(
            f"method.boundary.rank = {rank} must be from 1 to {most}, the width of the stream or, if fewer, the tokens"
            " of a message"
        )


def make_boundary(
    config: BoundaryConfig, shape: ModelConfig, model: Decoder | None = None, *, seed: int = 0
) -> Boundary:
    """Return the boundary named `config.kind`; the arguments are as for `Boundary`.

    Raises ConfigError where there is none of that name.
    """
    return choose(Boundary, config.kind, "method.boundary.kind")(config, shape, model, seed=seed)


def check_boundary(config: BoundaryConfig, width: int, tokens: int, stages: int) -> None:
    """Raise ConfigError where the settings of a boundary do not go together, or with the pipeline.

    `width` is that of the residual stream, `tokens` the number in a message, and `stages` that of the pipeline.
    """
    check_bounds("method.boundary", config)
    codec = make_codec(config.codec, config.codec_keep, where="method.boundary.codec")
    kind = choose(Boundary, config.kind, "method.boundary.kind")
    lossy = kind.lossy or not codec.lossless
    if stages == 1 and (lossy or config.error_feedback):
        raise ConfigError(
            f"method.boundary = {config.kind} in {config.codec}, error_feedback = {config.error_feedback} means nothing"
            " with one stage"
        )
    if config.error_feedback and codec.lossless and not kind.error_of_stream:
        raise ConfigError("method.boundary.error_feedback means nothing where nothing is lost")
    if config.error_feedback:
        check_feedback(config.codec, config.codec_keep, "method.boundary")
    check_settings(Boundary, config.kind, "method.boundary.kind", config, BoundaryConfig())
    kind.check(config, width, tokens)
