"""Peer rules: with whom a replica averages.

To add a rule, write a class with `members` here and enter it in `make_peers`;
`method.peers` in params.yaml then accepts its name (list it in `config.MethodConfig.peers`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from lowcomm.accounting import Section, owned_mean_bytes
from lowcomm.axis import Handle
from lowcomm.bits import refuse_non_finite
from lowcomm.codecs import Codec
from lowcomm.comm import World
from lowcomm.config import MethodConfig
from lowcomm.routing import group_of

#: Of which exchange: fragment, and how many turns it has had before.
Turn = tuple[int, int]


class Peers(ABC):
    """A rule for one exchange of a flat fp32 tensor."""

    @abstractmethod
    def members(self, turn: Turn, replicas: int, replica: int) -> list[int]:
        """With whom `replica` averages at a turn, itself among them, in ascending order."""

    def mean_async(
        self,
        world: World,
        x: Tensor,
        codec: Codec,
        turn: Turn,
        *,
        purpose: str,
        seed: int = 0,
        sections: Sequence[Section] | None = None,
        ahead: bool = False,
    ) -> Handle:
        """Replace `x` [n] fp32 by the mean over this replica's peers; `seed` is the codec's. NaN is refused.

        `sections`, `ahead`: as in `World.encoded_mean_async`.
        """
        group = self.members(turn, world.replicas, world.replica)
        if codec.lossless and sections is None and not ahead and len(group) == world.replicas:
            refuse_non_finite(x, x.abs().max())
            return world.mean_async(x, purpose=purpose)
        return world.encoded_mean_async(
            x, codec, purpose=purpose, seed=seed, group=group, sections=sections, ahead=ahead
        )

    def sent_bytes(self, sections: Sequence[Section], codec: Codec, turn: Turn, replicas: int, replica: int) -> int:
        """Closed form of the bytes that `replica` sends in one such mean."""
        group = self.members(turn, replicas, replica)
        among = [(numel, [i for i, r in enumerate(group) if r in owners]) for numel, owners in sections]
        return owned_mean_bytes(among, codec, len(group), group.index(replica))


class AllReplicas(Peers):
    """Everyone with everyone."""

    def members(self, turn: Turn, replicas: int, replica: int) -> list[int]:
        return list(range(replicas))


class RandomGroup(Peers):
    """A random group of `size` replicas or more (`routing.groups`), another at each turn; nobody else takes part."""

    def __init__(self, size: int, seed: int):
        self.size, self.seed = size, seed

    def members(self, turn: Turn, replicas: int, replica: int) -> list[int]:
        return group_of(replica, self.seed, turn, replicas, self.size)


def make_peers(method: MethodConfig, seed: int) -> Peers:
    """The rule of `method.peers`."""
    return RandomGroup(method.group_size, seed) if method.peers == "group" else AllReplicas()
