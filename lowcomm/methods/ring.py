"""Ring attention (Liu et al., 2023): a sequence is cut into segments, one per rank, whose keys and values go round.

Rank i of G has tokens [i T, (i + 1) T). In G turns it meets the keys and values of every segment, its own first, while
they travel on to the next rank; those of later segments it only hands on, as attention is causal. Softmax is taken
block by block with a running maximum. In the backward pass they go round once more, and their gradients with them,
which are home after the last turn.

It serves context parallelism alone here (Protocol Models, section 8.9): `in_segments` makes a decoder read its segment,
and the gradients of the ranks, averaged like those of replicas, are those of whole sequences.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowcomm.comm.axis import Handle
from lowcomm.comm.world import World
from lowcomm.model.decoder import Decoder
from lowcomm.settings import ConfigError

PURPOSE = "ring"


class _Ring:
    """This rank's place in the ring, and its messages to the next rank."""

    def __init__(self, world: World):
        self.world, self.size, self.index = world, world.replicas, world.replica

    def pass_on(self, *tensors: Tensor) -> tuple[Handle, Handle]:
        """Begin to send tensors to the next rank as one message, and to receive as many values from the one before."""
        message = torch.cat([t.reshape(-1) for t in tensors])
        there = self.world.send_async(message, (self.index + 1) % self.size, purpose=PURPOSE, axis="replica")
        source = (self.index - 1) % self.size
        like = torch.empty_like(message)
        return there, self.world.recv_async(source, purpose=PURPOSE, axis="replica", like=like)

    def segment(self, turn: int) -> int:
        """Return the index of the segment whose keys and values are here in a turn."""
        return (self.index - turn) % self.size


def _scores(q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -torch.inf)
    return s


def _taken(handle: Handle, like: tuple[Tensor, ...]) -> list[Tensor]:
    parts = handle.wait().split([t.numel() for t in like])
    return [p.view(t.shape) for p, t in zip(parts, like, strict=True)]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> Tensor:
        """Return the attention [B, N, T, C] of this rank's segment, whose q, k and v are [B, N, T, C] each."""
        kt, vt, sent = k, v, []
        top = torch.full_like(q[..., :1], -torch.inf)
        total, y = torch.zeros_like(top), torch.zeros_like(q)
        for turn in range(ring.size):
            if turn < ring.size - 1:
                there, arriving = ring.pass_on(kt, vt)
                sent.append(there)
            if ring.segment(turn) <= ring.index:
                s = _scores(q, kt, causal=turn == 0)
                new = torch.maximum(top, s.amax(-1, keepdim=True))
                p, scale = (s - new).exp(), (top - new).exp()
                total, y, top = total * scale + p.sum(-1, keepdim=True), y * scale + p @ vt, new
            if turn < ring.size - 1:
                kt, vt = _taken(arriving, (k, v))
        for handle in sent:
            handle.wait()
        y = y / total
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, y, top + total.log())
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        q, k, v, y, log_sum = ctx.saved_tensors
        ring, scale = ctx.ring, 1 / math.sqrt(q.shape[-1])
        inner = (dy * y).sum(-1, keepdim=True)
        dq = torch.zeros_like(q)
        kt, vt, dk, dv = k, v, torch.zeros_like(k), torch.zeros_like(v)
        sent = []
        for turn in range(ring.size):
            if turn < ring.size - 1:
                there, arriving = ring.pass_on(kt, vt)
                sent.append(there)
            if ring.segment(turn) <= ring.index:
                p = (_scores(q, kt, causal=turn == 0) - log_sum).exp()
                ds = p * (dy @ vt.transpose(-1, -2) - inner) * scale
                dq += ds @ kt
                dk, dv = dk + ds.transpose(-1, -2) @ q, dv + p.transpose(-1, -2) @ dy
            if ring.size > 1:
                there, gradients = ring.pass_on(dk, dv)
                sent.append(there)
            if turn < ring.size - 1:
                kt, vt = _taken(arriving, (k, v))
            if ring.size > 1:
                dk, dv = _taken(gradients, (k, v))
        for handle in sent:
            handle.wait()
        return dq, dk, dv, None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, world: World) -> Tensor:
    """Return the causal attention of this rank's segment, q [B, N, T, C], over all tokens up to its own.

    k and v are [B, K, T, C], where K divides N. Replicas stand for segments, in order, and every replica must call it.
    It is computed in fp32 at least, whatever the type of q, which the result has. Raises ConfigError for ranks in
    threads that share a GPU: autograd has one thread for it, in which the backward pass of one rank would wait for
    another's.
    """
    if q.is_cuda and world.replicas > 1 and world.transport.in_one_process:
        raise ConfigError("ring attention on a GPU needs processes (torchrun): its backward pass waits for other ranks")
    groups, dtype = q.shape[1] // k.shape[1], torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        k, v = (t.to(dtype).repeat_interleave(groups, 1) for t in (k, v))
        return _Attention.apply(q.to(dtype), k, v, _Ring(world)).to(q.dtype)


def ring_bytes(ranks: int, elements: int) -> int:
    """Return the bytes that a rank sends in a forward and a backward pass of one call of `ring_attention`.

    elements: the number of values of k or of v, [B, N, T, C], which are sent in fp32.
    """
    return 4 * 2 * elements * (2 * (ranks - 1) + (ranks if ranks > 1 else 0))


def in_segments(model: Decoder, world: World, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Make `model` read this rank's segment of sequences, and return its (ids, targets), [B, T / G] each.

    They are cut from the tokens [B, T + 1]; the model is changed in place. Raises ValueError where the number of
    replicas, G, does not divide T.
    """
    T = tokens.shape[1] - 1
    if T % world.replicas:
        raise ValueError(f"{T} tokens do not split into {world.replicas} segments: their number must be a multiple")
    size = T // world.replicas
    begin = size * world.replica
    model.offset = begin
    for block in model.blocks.values():
        block.attention.attend = lambda q, k, v: ring_attention(q, k, v, world)
    return tokens[:, begin : begin + size], tokens[:, begin + 1 : begin + size + 1]
