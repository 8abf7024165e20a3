"""Peer rules: which replicas average with each other at a turn.

To add one, write a file in this folder with a class that derives from `Peers` and has `names`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from lowcomm.choices import Choice
from lowcomm.methods.config import MethodConfig
from lowcomm.methods.routing import groups
from lowcomm.settings import ConfigError

#: Of which exchange: fragment, and how many turns it has had before.
Turn = tuple[int, int]


class Peers(Choice, ABC):
    """The rule that says which replicas average together; every replica evaluates it by itself, with the same result.

    one_model: whether all replicas agree on one model; else each has outer parameters of its own.
    """

    one_model: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def of(cls, method: MethodConfig, seed: int) -> Peers:
        """Make the rule with the settings of a method; `seed` decides its random choices."""

    @classmethod
    def check(cls, method: MethodConfig, replicas: int) -> None:
        """Raise ConfigError for settings, or a number of replicas, with which the rule does not work."""

    @abstractmethod
    def members(self, turn: Turn, replicas: int, replica: int) -> list[int]:
        """Return the replicas with which `replica` averages at a turn, itself among them, in ascending order."""

    def among(self, turn: Turn, replicas: int, replica: int, present: Sequence[int]) -> list[int]:
        """Return what `members` does where only the replicas `present`, in ascending order, are there.

        By default these are taken for all replicas; `replica` must be among them.
        """
        return [present[i] for i in self.members(turn, len(present), present.index(replica))]

    @abstractmethod
    def most(self, replicas: int) -> int:
        """Return the number of replicas in the largest group."""


class AllReplicas(Peers):
    """One group of all replicas, so that all agree on one model."""

    names = ("all",)
    one_model = True

    @classmethod
    def of(cls, method: MethodConfig, seed: int) -> AllReplicas:
        return cls()

    def members(self, turn: Turn, replicas: int, replica: int) -> list[int]:
        return list(range(replicas))

    def most(self, replicas: int) -> int:
        return replicas


class RandomGroup(Peers):
    """A random group of `size` replicas or more (`routing.groups`), drawn anew at each turn.

    No other replica takes part in the group's mean. Where replicas train slices, each group holds as many owners of one
    slice as of any other, as a slice that nobody in a group trains would not move at that turn.
    """

    names = ("group",)
    settings = ("group_size",)

    def __init__(self, size: int, seed: int, slices: int = 1):
        self.size, self.seed, self.slices = size, seed, slices

    @classmethod
    def of(cls, method: MethodConfig, seed: int) -> RandomGroup:
        return cls(method.group_size, seed, method.slices)

    @classmethod
    def check(cls, method: MethodConfig, replicas: int) -> None:
        """Refuse groups of more replicas than there are, and groups that cannot hold as many owners of each slice."""
        if method.group_size > replicas:
            raise ConfigError(f"method.group_size = {method.group_size} is more than {replicas} replicas")
        if method.group_size % method.slices:
            raise ConfigError(
                f"method.slices = {method.slices} does not divide method.group_size = {method.group_size}: each group"
                " must hold owners of every slice"
            )

    def members(self, turn: Turn, replicas: int, replica: int) -> list[int]:
        return self.among(turn, replicas, replica, range(replicas))

    def among(self, turn: Turn, replicas: int, replica: int, present: Sequence[int]) -> list[int]:
        drawn = groups(self.seed, turn, replicas, self.size, self.slices, present=present)
        return next(group for group in drawn if replica in group)

    def most(self, replicas: int) -> int:
        return self.slices * -(-(replicas // self.slices) // (replicas // self.size))
