"""The mean of encoded values over the members of a group, section by section.

A section is a run of values that is encoded by itself, with its owners (`shares.Section`): only they send values of it,
and all members get the mean. Each section is gathered whole, or reduced in shares whose sums travel as fp32, whichever
sends fewer bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lowcomm.codecs import Codec
from lowcomm.comm.axis import Op, rotation
from lowcomm.comm.shares import Section, block_shares, encoded_mean_in_shares

#: Takes the values of each member, [n] and scratch afterwards, and their weights; returns the result, [n].
Reduce = Callable[[Iterable[Tensor], Sequence[float]], Tensor]


def weighted_mean(parts: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of tensors [n], summed in the order of `parts`, which may be overwritten."""
    first, *others = weights
    left = iter(parts)
    total = next(left)
    if first != 1:
        total = total * first
    for part, weight in zip(left, others, strict=True):
        total = torch.add(total, part, alpha=weight, out=part)
    return torch.div(total, sum(weights))


class EncodedMean:
    """The mean of encoded values over the members of a group, as one of them computes it.

    Args:
        x: this rank's values, flat fp32, which the mean replaces.
        codec, seed: how the values are encoded; section i, from 0, has the seed `seed` + i.
        sections: the sections of `x` in order, with their owners as indices on the axis.
        members: the members of the group, as indices on the axis.
        me: this rank's index on the axis.
        weights: the members' weights, in the order of `members`; by default they are equal.
        packed: the sections as `encoded` has returned them, where that has been called; sections that are reduced in
            shares are encoded anew.
        reduce: the reduction that makes one result of the members' values. One that needs each member's values whole
            needs a codec whose `block` is 0.

    Raises ValueError where the sections do not add up to `x`.
    """

    def __init__(
        self,
        x: Tensor,
        codec: Codec,
        seed: int,
        sections: Sequence[Section],
        members: Sequence[int],
        me: int,
        weights: Sequence[float] | None = None,
        packed: Sequence[Tensor] | None = None,
        reduce: Reduce = weighted_mean,
    ):
        held = sum(numel for numel, _ in sections)
        if held != x.numel():
            raise ValueError(f"sections hold {held} values, x {x.numel()}")
        self.x, self.members, self.me = x, list(members), me
        parts = x.split([numel for numel, _ in sections])
        weight = dict(zip(members, weights or [1] * len(members), strict=True))
        self.parts = [
            _Part(part, codec, {i: weight[i] for i in members if i in owners}, len(members), seed + index, reduce)
            for index, (part, (_, owners)) in enumerate(zip(parts, sections, strict=True))
        ]
        for part, whole in zip(self.parts, packed or (), strict=packed is not None):
            part.whole = whole

    def alone(self) -> Tensor:
        """Compute the mean of a group of which this rank is the only member, from its own values encoded and decoded.

        Return `x`, which holds it; sections that this rank does not own become 0.
        """
        for part in self.parts:
            part.reduce(self.me, [part.packed(self.me)] if part.owners else [])
        return self.x

    def over(self, op: Op) -> Tensor:
        """Compute the mean with the other members and return `x`, which holds it.

        Encoded values are exchanged first, then, for sections that are reduced in shares, the shares' sums.
        op: swaps tensors with members by their index on the axis (`Op.swap`).
        """
        me, members, parts = self.me, self.members, self.parts
        to, source = rotation(members, me)
        packed = {i: [part.packed(i) for part in parts if part.meet(me, i)] for i in members}
        sizes = {i: [part.nbytes(me) for part in parts if part.meet(i, me)] for i in members}
        from_ = [i for i in source if sizes[i]]
        places = [(i, torch.empty(sum(sizes[i]), dtype=torch.uint8, device=self.x.device)) for i in from_]
        taken = op.swap([(i, _joined(packed[i])) for i in to if packed[i]], places)
        arrived = {me: iter(packed[me])}
        for i, message in zip(from_, taken, strict=True):
            arrived[i] = iter(message.split(sizes[i]))
        for part in parts:
            part.reduce(me, [next(arrived[i]) for i in part.owners if part.meet(i, me)])
        shared = {i: [part.share(i) for part in parts if part.in_shares and i in part.owners] for i in members}
        if any(shared.values()):
            from_ = [i for i in source if shared[i]]
            # One share is received in its place, several together.
            into = [(i, _joined(shared[i])) for i in from_]
            # Who owns nothing of a section has met nobody yet.
            met = all(len(part.owners) == len(members) for part in parts if part.in_shares)
            op.swap([(i, _joined(shared[me])) for i in to if shared[me]], into, agreed=met)
            for i, message in into:
                if len(shared[i]) > 1:
                    torch._foreach_copy_(shared[i], message.split([s.numel() for s in shared[i]]))
        return self.x


def encoded(x: Tensor, codec: Codec, seed: int, sections: Sequence[Section] | None = None) -> list[Tensor]:
    """Return one member's values as `EncodedMean` encodes them, section by section; by default `x` is one section."""
    return [codec.encode(part, seed + index) for index, part in enumerate(_parts(x, sections))]


def read_back(x: Tensor, packed: Sequence[Tensor], codec: Codec, sections: Sequence[Section] | None = None) -> Tensor:
    """Return the values that other members decode from `packed`, which `encoded` has made of `x`; shaped as `x`."""
    both = zip(packed, _parts(x, sections), strict=True)
    return torch.cat([codec.decode(message, part.numel()) for message, part in both])


def _parts(x: Tensor, sections: Sequence[Section] | None) -> Sequence[Tensor]:
    return [x] if sections is None else x.split([numel for numel, _ in sections])


class _Part:
    """One section of an encoded mean: its values `x`, and the members that own them, with their weights."""

    def __init__(self, x: Tensor, codec: Codec, owners: dict[int, float], members: int, seed: int, reduce: Reduce):
        self.x, self.codec, self.owners, self.seed, self._reduce = x, codec, list(owners), seed, reduce
        weights = list(owners.values())
        self._weights = weights if len(set(weights)) > 1 else [1] * len(weights)
        self.in_shares = encoded_mean_in_shares(x.numel(), codec, members, len(owners))
        bounds = block_shares(x.numel(), codec.block, len(owners)) if self.in_shares else []
        self._bounds = dict(zip(owners, bounds, strict=False))
        self.whole: Tensor | None = None  # encoded

    def meet(self, sender: int, receiver: int) -> bool:
        """Tell whether `sender` sends encoded values of this section to `receiver`."""
        return sender in self.owners and (receiver in self.owners or not self.in_shares)

    def share(self, i: int) -> Tensor:
        """Return the part of `x` that member `i` reduces: its share, or all where each member reduces all."""
        return self.x[slice(*self._bounds[i])] if self.in_shares else self.x

    def packed(self, i: int) -> Tensor:
        """Return this rank's values of the part that member `i` reduces, encoded."""
        if self.in_shares:
            return self.codec.encode(self.share(i), self.seed)
        if self.whole is None:
            self.whole = self.codec.encode(self.x, self.seed)
        return self.whole

    def nbytes(self, me: int) -> int:
        """Return the number of bytes of each message that this rank, `me`, receives of this section."""
        return self.codec.nbytes(self.share(me).numel())

    def reduce(self, me: int, messages: list[Tensor]) -> None:
        """Replace the part of `x` that this rank reduces by the reduction of the owners' messages, in their order.

        Where the section has no owner among the members, it becomes 0.
        """
        if not self.owners:
            self.x.zero_()
        if not messages:
            return
        own = self.share(me)
        own.copy_(self._reduce((self.codec.decode(m, own.numel()) for m in messages), self._weights))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
