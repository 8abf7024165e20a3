"""The base class of codecs, which turn fp32 values into packed bytes and back.

To add one, write a class that derives from `Codec`, has `names` and defines `encode`, `decode` and `nbytes`: in a file
here, or in a script or a notebook of your own. Settings then accept it, and means, pipelines, closed forms and the
planner use it; one with a file here is held to its sizes by the tests of all codecs.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from torch import Tensor

from lowcomm.choices import Choice, choose
from lowcomm.settings import ConfigError


class Codec(Choice, ABC):
    """fp32 [n] -> uint8 [nbytes(n)] and back.

    Attributes:
        name: what the members of a mean must agree on; settings that change the encoding are part of it. By default the
            first of its names.
        lossless: whether decode(encode(x)) equals x bit for bit.
        block: shares that begin at multiples of it may be encoded one by one, with the same values; 0 if they may not.
        sparse: whether it leaves values out, so that the setting `codec_keep` says how many are sent.
        amplifies: whether it decodes values that are larger than what was encoded; errors that are kept would grow.
    """

    name: str
    lossless: bool = False
    block: int = 0
    sparse: ClassVar[bool] = False
    amplifies: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__dict__.get("names") and "name" not in cls.__dict__:
            cls.name = cls.names[0]

    @classmethod
    def of(cls, name: str, keep: float) -> Codec:
        """The codec of one of the class' names; `keep` is the share of the values that a sparse one sends."""
        return cls()

    @abstractmethod
    def encode(self, x: Tensor, seed: int = 0) -> Tensor:
        """Pack x [n]; `seed` decides random choices. Raises ValueError for NaN and infinities."""

    @abstractmethod
    def decode(self, packed: Tensor, numel: int) -> Tensor:
        """Unpack what `encode` made of `numel` values, as fp32."""

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Bytes of `numel` encoded values."""


def make_codec(name: str, keep: float = 1.0, *, where: str = "codec") -> Codec:
    """The codec of a name. `keep`: the share of the values that a sparse one sends, above 0 and at most 1.

    Raises ConfigError for an unknown name, and for a share that means nothing; `where` names the setting in it.
    """
    cls = choose(Codec, name, where)
    if keep != 1.0 and not cls.sparse:
        raise ConfigError(f"{where}_keep means nothing with {where} = {name}: it sends all values")
    if not 0 < keep <= 1:
        raise ConfigError(f"{where}_keep = {keep} is a share of the values: above 0 and at most 1")
    return _made(cls, name, keep)


@functools.lru_cache(maxsize=64)
def _made(cls: type[Codec], name: str, keep: float) -> Codec:
    """Return the one codec of these settings: it has no state of a message."""
    return cls.of(name, keep)


def check_feedback(name: str, keep: float, where: str) -> None:
    """Raise ConfigError for a codec whose errors would grow without bound if they were kept for the next message.

    where: the section of the settings `codec` and `error_feedback`.
    """
    if make_codec(name, keep, where=f"{where}.codec").amplifies:
        raise ConfigError(
            f"{where}.error_feedback with {where}.codec = {name} grows without bound: it scales what it keeps; use"
            " dropout"
        )


def in_one_piece(codec: Codec) -> Codec:
    """Return the same codec for messages of which no shares may be cut, whatever the encoding allows."""
    found = copy.copy(codec)
    found.block = 0
    return found


def message_seed(*key: int) -> int:
    """The seed, of 62 bits, of a message's random choices: `key` (whole numbers from 0) says which message it is."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 2)
