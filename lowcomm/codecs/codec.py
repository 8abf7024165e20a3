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
    """An encoding of fp32 values [n] as bytes, uint8 [nbytes(n)], from which values are decoded again.

    Attributes:
        name: what the members of a mean must agree on; settings that change the encoding are part of it. By default the
            first of its names.
        lossless: whether decode(encode(x)) equals x bit for bit.
        block: shares that begin at multiples of it may be encoded one by one, with the same values; 0 if they may not.
        sparse: whether it leaves values out, so that the setting `codec_keep` says how many are sent.
        by_parameter: whether a message of parameters is encoded parameter by parameter, as each has numbers of its own
            in the encoding.
        amplifies: whether it decodes values that are larger than what was encoded; errors that are kept would grow.
    """

    name: str
    lossless: bool = False
    block: int = 0
    sparse: ClassVar[bool] = False
    by_parameter: ClassVar[bool] = False
    amplifies: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__dict__.get("names") and "name" not in cls.__dict__:
            cls.name = cls.names[0]

    @classmethod
    def of(cls, name: str, keep: float) -> Codec:
        """Return the codec for `name`, one of the class's names; a sparse one sends the share `keep` of the values."""
        return cls()

    @abstractmethod
    def encode(self, x: Tensor, seed: int = 0) -> Tensor:
        """Return x, fp32 [n], encoded as uint8 [nbytes(n)]; `seed` decides random choices.

        Raises ValueError where x holds NaN or infinities, or values that are too large for the encoding.
        """

    @abstractmethod
    def decode(self, packed: Tensor, numel: int) -> Tensor:
        """Return the values, fp32 [numel], that `packed`, what `encode` made of `numel` values, stands for."""

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Return the number of bytes that `numel` encoded values take."""


def make_codec(name: str, keep: float = 1.0, *, where: str = "codec") -> Codec:
    """Return the codec of this name. `keep`: the share of the values that a sparse one sends, above 0 and at most 1.

    Raises ConfigError where the name is unknown, where `keep` is out of range, and where it is not 1 and the codec is
    not sparse. `where` is what the error calls the setting.
    """
    cls = choose(Codec, name, where)
    if keep != 1.0 and not cls.sparse:
        raise ConfigError(f"{where}_keep means nothing with {where} = {name}: it sends all values")
    if not 0 < keep <= 1:
        raise ConfigError(f"{where}_keep = {keep} is a share of the values: above 0 and at most 1")
    return _made(cls, name, keep)


@functools.lru_cache(maxsize=64)
def _made(cls: type[Codec], name: str, keep: float) -> Codec:
    """Return the codec of these settings, the same object each time: codecs keep no state between messages."""
    return cls.of(name, keep)


def check_feedback(name: str, keep: float, where: str) -> None:
    """Raise ConfigError where the errors of a codec would grow without bound if they were kept for the next message.

    where: the section of the settings `codec` and `error_feedback`, as the error names it.
    """
    if make_codec(name, keep, where=f"{where}.codec").amplifies:
        raise ConfigError(
            f"{where}.error_feedback with {where}.codec = {name} grows without bound: it scales what it keeps; use"
            " dropout"
        )


def in_one_piece(codec: Codec) -> Codec:
    """Return a copy of the codec for messages that may not be cut into shares, whatever the encoding allows."""
    found = copy.copy(codec)
    found.block = 0
    return found


def message_seed(*key: int) -> int:
    """Return the seed, of 62 bits, of a message's random choices.

    key: whole numbers, 0 or more, that identify the message.
    """
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 2)
