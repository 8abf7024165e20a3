"""Peer rules: with whom a replica averages.

To add a rule, write a class with `mean_async` and `sent_bytes` here and enter it in `PEERS`;
`method.peers` in params.yaml then accepts its name (list it in `config.MethodConfig.peers`).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lowcomm.accounting import encoded_mean_bytes, mean_bytes
from lowcomm.axis import Handle
from lowcomm.codecs import Codec, refuse_non_finite
from lowcomm.comm import World


class Peers(Protocol):
    """A rule for one exchange of a flat fp32 tensor."""

    def mean_async(self, world: World, x: Tensor, codec: Codec, *, purpose: str, seed: int) -> Handle:
        """Replace `x` [n] fp32 by the mean over this replica's peers; `seed` is the codec's. NaN is refused."""
        ...

    def sent_bytes(self, numel: int, codec: Codec, replicas: int, replica: int) -> int:
        """Closed form of the bytes that `replica` sends in one such mean."""
        ...


class AllReplicas:
    """Everyone with everyone."""

    def mean_async(self, world: World, x: Tensor, codec: Codec, *, purpose: str, seed: int) -> Handle:
        if codec.lossless:
            refuse_non_finite(x, x.abs().max())
            return world.mean_async(x, purpose=purpose)
        return world.encoded_mean_async(x, codec, purpose=purpose, seed=seed)

    def sent_bytes(self, numel: int, codec: Codec, replicas: int, replica: int) -> int:
        if codec.lossless:
            return mean_bytes(numel, 4, replicas, replica)
        return encoded_mean_bytes(numel, codec, replicas, replica)


PEERS: dict[str, Peers] = {"all": AllReplicas()}
