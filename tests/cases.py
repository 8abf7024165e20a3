"""What ranks do in tests: the same functions on both transports. Each returns plain JSON."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from lowcomm.codecs import make_codec
from lowcomm.comm.processes import PIECE_BYTES, PIECES_AHEAD
from lowcomm.comm.world import World
from lowcomm.settings import ConfigError


def _random(world: World, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * seed + world.rank))


def verbs(world: World, folder: Path) -> dict[str, Any]:
    """Every verb once, on odd sizes, with what the ledger says of it."""
    out: dict[str, Any] = {}
    for numel in (1, 2, 7, 1001):
        world.step = numel
        out[f"mean {numel}"] = world.mean(_random(world, numel), purpose="mean").tolist()
        out[f"sum {numel}"] = world.sum(_random(world, numel).double(), purpose="sum").tolist()
        out[f"scatter {numel}"] = world.reduce_scatter(_random(world, numel), purpose="scatter").tolist()
    mine = torch.full((world.replica + 1,), world.rank, dtype=torch.int32)  # shapes may differ in an exchange
    out["exchange"] = [x.tolist() for x in world.exchange(mine, purpose="exchange")]
    out["empty"] = [x.tolist() for x in world.exchange(torch.empty(0), purpose="exchange")]
    out["broadcast"] = world.broadcast(_random(world, 5), purpose="broadcast", root=1).tolist()
    pair = [world.replica, world.replica ^ 1]
    out["pair"] = [x.tolist() for x in world.exchange(_random(world, 3), purpose="pair", group=sorted(pair))]
    first = world.mean_async(_random(world, 50, seed=1), purpose="async")
    second = world.mean_async(_random(world, 60, seed=2), purpose="async")
    out["async"] = [second.wait().tolist(), first.wait().tolist()]
    if world.replica == 0:
        world.send(torch.arange(6.0).view(2, 3), 1, purpose="message", axis="replica")
    if world.replica == 1:
        out["message"] = world.recv(0, purpose="message", axis="replica").tolist()
    world.barrier()
    out["ledger"] = world.ledger.by_purpose()
    return out


def groups(world: World, folder: Path) -> dict[str, Any]:
    """Means over a group of three of five in shares, and over pairs of them ahead of time, in another order."""
    mine = [0, 2, 4] if world.replica % 2 == 0 else [1, 3]
    codec = make_codec("int8")
    early = [
        world.encoded_mean_async(
            _random(world, 700, seed=s), make_codec("fp32"), purpose="early", group=mine, ahead=True
        )
        for s in (3, 4)
    ]
    now = world.encoded_mean_async(_random(world, 3000, seed=1), codec, purpose="group", group=mine).wait()
    return {
        "now": now.tolist(),
        "early": [h.wait().tolist() for h in reversed(early)],
        "ledger": world.ledger.by_purpose(),
    }


def large(world: World, folder: Path) -> str:
    """The mean of a tensor whose share comes in more pieces than may be on their way at once; as a digest."""
    numel = world.size * PIECE_BYTES // 4 * (PIECES_AHEAD + 2) + 11
    return hashlib.sha256(world.mean(_random(world, numel), purpose="mean").numpy()).hexdigest()


def grid(world: World, folder: Path) -> dict[str, Any]:
    """Each axis adds along its own line of the grid."""
    me = torch.tensor([float(world.rank)])
    return {
        "place": [world.stage, world.replica],
        "replica": world.sum(me.clone(), purpose="x", axis="replica").item(),
        "stage": world.sum(me.clone(), purpose="x", axis="stage").item(),
        "world": world.sum(me.clone(), purpose="x", axis="world").item(),
    }


def native(world: World, folder: Path) -> list[float]:
    return world.mean(_random(world, 1001), purpose="mean").tolist()


def many_messages(world: World, folder: Path) -> list[float]:
    """Each sends the other far more than it takes meanwhile."""
    other = 1 - world.rank
    for k in range(100):
        world.send_async(torch.full((1000,), float(k)), other, purpose="x", axis="route").wait()
    return [world.recv_async(other, purpose="x", axis="route").wait()[0].item() for _ in range(100)]


def of_any_shape_first(world: World, folder: Path) -> list[float]:
    """A message that is awaited without its shape, and one of that very shape behind it."""
    if world.rank == 0:
        for k in (1.0, 2.0):
            world.send_async(torch.full((4,), k), 1, purpose="x", axis="route").wait()
        return []
    first = world.recv_async(0, purpose="x", axis="route")
    second = world.recv_async(0, purpose="x", axis="route", like=torch.empty(4))
    return [first.wait()[0].item(), second.wait()[0].item()]


def shapes_disagree(world: World, folder: Path) -> None:
    world.mean(torch.zeros(4 + world.rank), purpose="outer")


def verbs_disagree(world: World, folder: Path) -> None:
    if world.rank == 0:
        world.mean(torch.zeros(4), purpose="outer")
    else:
        world.exchange(torch.zeros(4), purpose="outer")


def peer_raises(world: World, folder: Path) -> None:
    if world.rank == 1:
        raise ValueError("this rank has had enough")
    world.mean(torch.zeros(4), purpose="outer")


def peer_is_silent(world: World, folder: Path) -> None:
    if world.rank == 1:
        time.sleep(5)
    world.mean(torch.zeros(4), purpose="outer")


def peer_is_killed(world: World, folder: Path) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.mean(torch.zeros(4), purpose="outer")


def store_freezes(world: World, folder: Path) -> None:
    """The store's process stops, and rank 0 with it."""
    world.mean(torch.zeros(4), purpose="outer")
    if world.rank == 0:
        for pid in (int((folder / "store.pid").read_text()), os.getpid()):
            os.kill(pid, signal.SIGSTOP)
    world.mean(torch.zeros(4), purpose="outer")


def started_differently(world: World, folder: Path) -> str:
    settings = {"lr": 0.1, "source": "b" if world.rank == 2 else "a", "corpus": world.rank // 2}
    try:
        world.agree(settings)
    except ConfigError as error:
        world.barrier()
        return str(error)
    raise AssertionError("nobody noticed")
