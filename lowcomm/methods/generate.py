"""Pipelined inference: a prompt is read at once, then token by token, through the boundaries that training uses.

Each stage keeps the keys and values of its layers. The last one chooses the next token and sends it to the first. A
batch in several groups keeps the stages busy: while one group's token is on its way, another's is computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from lowcomm.comm.world import World
from lowcomm.methods.boundary import Boundary, id_bytes, pack_ids, unpack_ids
from lowcomm.model.decoder import Decoder, KeyValues

PREFILL, DECODE, TOKENS = "prefill", "decode", "tokens"


def choose(logits_BV: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Return the next token of each sequence, int64 [B]: the likeliest at temperature 0, else a random one.

    A random one is drawn from softmax(logits / temperature) by `generator`, which is of the CPU.
    """
    if temperature == 0:
        return logits_BV.argmax(-1)
    p = torch.softmax(logits_BV.float() / temperature, -1).cpu()
    return torch.multinomial(p, 1, generator=generator)[:, 0].to(logits_BV.device)


@torch.no_grad()
def generate(
    model: Decoder,
    world: World,
    boundary: Boundary,
    prompts_BT: Tensor,
    new_tokens: int,
    *,
    groups: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Tensor | None:
    """Continue prompts [B, T] by `new_tokens`; every stage of a replica must call it.

    Args:
        model, boundary: this rank's stage, and the format of its messages.
        world: the ranks; each replica generates along its own stages.
        prompts_BT: token ids; stages after the first use their shape alone.
        groups: parts of the batch that are under way at a time; at least as many as stages keep all of them busy.
        temperature, seed: of the choice of tokens; at temperature 0 the likeliest are taken.
        autocast: the context of each forward pass.

    Returns the prompts and what follows them, [B, T + new_tokens], at the first stage, and None elsewhere. Raises
    ValueError where there are no prompts [B, T], where `new_tokens` is below 1, where the T + new_tokens - 1 tokens to
    read are more than `model.seq_len`, for a temperature below 0, and where `groups` is not from 1 to B.
    """
    if prompts_BT.dim() != 2 or not prompts_BT.numel():
        raise ValueError(f"prompts must be token ids [B, T], got shape {tuple(prompts_BT.shape)}")
    B, T = prompts_BT.shape
    if new_tokens < 1 or T + new_tokens - 1 > model.config.seq_len:
        raise ValueError(
            f"new_tokens = {new_tokens} must be from 1 to {model.config.seq_len + 1 - T}: prompts of {T} tokens and"
            f" what is read of theirs must fit model.seq_len = {model.config.seq_len}"
        )
    if temperature < 0:
        raise ValueError(f"temperature = {temperature} must be at least 0")
    if not 1 <= groups <= B:
        raise ValueError(f"groups = {groups} must be from 1 to the {B} prompts")
    boundary = boundary.sending_ids()
    first, last = world.stage == 0, world.stage == world.stages - 1
    vocab_size, me = model.config.vocab_size, world.replica

    def rank_of(stage: int) -> int:
        return stage * world.replicas + me

    def take(rank: int, nbytes: int, purpose: str) -> Tensor:
        like = torch.empty(nbytes, dtype=torch.uint8, device=world.device)
        return world.recv_async(rank, purpose=purpose, axis="route", like=like).wait()

    parts = list(prompts_BT.to(world.device).tensor_split(groups))
    written = [[part] for part in parts]
    kept = [{name: KeyValues(T + new_tokens - 1) for name in model.blocks} for _ in parts]
    generators = [torch.Generator().manual_seed(seed * groups + g) for g in range(groups)]
    sent = []

    def send(message: Tensor, rank: int, purpose: str) -> None:
        sent.append(world.send_async(message, rank, purpose=purpose, axis="route"))

    for position in range(new_tokens + 1):
        purpose = DECODE if position else PREFILL
        for g, part in enumerate(parts):
            shape = (len(part), 1 if position else T)
            x = ids = written[g][-1]
            if first and position and world.stages > 1:
                packed = take(rank_of(world.stages - 1), shape[0] * id_bytes(vocab_size), TOKENS)
                x = ids = unpack_ids(packed, vocab_size).view(shape)
                written[g].append(ids)
            if position == new_tokens:
                continue
            if not first:
                nbytes = boundary.activation_bytes(shape[0] * shape[1])
                x, ids = boundary.read_activations(take(rank_of(world.stage - 1), nbytes, purpose), shape)
            with autocast():
                y = model.hidden(x, kept[g])
                logits = model.head(model.norm(y[:, -1])) if last else None
            if not last:
                send(boundary.activations(y, ids), rank_of(world.stage + 1), purpose)
                continue
            chosen = choose(logits, temperature, generators[g])[:, None]
            if world.stages > 1:
                send(pack_ids(chosen, vocab_size), rank_of(0), TOKENS)
            else:
                written[g].append(chosen)
        while len(sent) > groups:
            sent.pop(0).wait()
    for handle in sent:
        handle.wait()
    return torch.cat([torch.cat(some, 1) for some in written]) if first else None


def generated_bytes(
    boundary: Boundary, stage: int, stages: int, sequences: int, prompt: int, new_tokens: int, groups: int = 1
) -> dict[str, int]:
    """Return the bytes that one stage sends in `generate`, by purpose, in closed form.

    `sequences` are the prompts of `prompt` tokens each, `stage` counts from 0, and the rest is as for `generate`.
    """
    boundary = boundary.sending_ids()
    sizes = [sequences // groups + (g < sequences % groups) for g in range(groups)]
    inner = stage < stages - 1
    each = id_bytes(boundary.vocab_size)
    return {
        PREFILL: inner * sum(boundary.activation_bytes(n * prompt) for n in sizes),
        DECODE: inner * (new_tokens - 1) * sum(boundary.activation_bytes(n) for n in sizes),
        TOKENS: (not inner and stages > 1) * new_tokens * sequences * each,
    }
