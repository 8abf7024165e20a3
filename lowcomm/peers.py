"""Peer rules: with whom a replica averages.

To add a rule, write a class with `mean` and `sent_bytes` here and enter it in `PEERS`;
`method.peers` in params.yaml then accepts its name (list it in `config.MethodConfig.peers`).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lowcomm.accounting import gather_bytes, mean_bytes
from lowcomm.codecs import Codec
from lowcomm.comm import World


class Peers(Protocol):
    """A rule for one exchange of a flat fp32 tensor."""

    def mean(self, world: World, x: Tensor, codec: Codec, *, purpose: str) -> Tensor:
        """The mean over this replica's peers; `x` [n] fp32 is scratch afterwards."""
        ...

    def sent_bytes(self, numel: int, codec: Codec, replicas: int, replica: int) -> int:
        """Closed form of the bytes that `replica` sends in one such mean."""
        ...


class AllReplicas:
    """Everyone with everyone.

    Lossless values are reduced in shares, 2 (R-1)/R of the payload a rank. Encoded ones are gathered and
    summed in fp32 in rank order, (R-1) encoded payloads a rank, so that each is rounded once.
    """

    def mean(self, world: World, x: Tensor, codec: Codec, *, purpose: str) -> Tensor:
        if codec.lossless:
            return world.mean(x, purpose=purpose)
        packed = world.exchange(codec.encode(x), purpose=purpose)
        total = codec.decode(packed[0], x.numel())
        for part in packed[1:]:
            total = total.add_(codec.decode(part, x.numel()))
        return total.div_(world.replicas)

    def sent_bytes(self, numel: int, codec: Codec, replicas: int, replica: int) -> int:
        if codec.lossless:
            return mean_bytes(numel, 4, replicas, replica)
        return gather_bytes(codec.nbytes(numel), 1, replicas)


PEERS: dict[str, Peers] = {"all": AllReplicas()}
