"""Starting ranks: as threads of this process, as the processes of a torchrun, or as this process alone."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from lowcomm.comm.config import CommConfig
from lowcomm.comm.processes import ProcessTransport
from lowcomm.comm.threads import ThreadHub, ThreadTransport
from lowcomm.comm.world import World
from lowcomm.settings import ConfigError, whole_number


def default_device() -> torch.device:
    """Return the CPU where there is no GPU; else the GPU that LOCAL_RANK (0 where unset) gives, modulo their number.

    So ranks share GPUs where they outnumber them.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def _check_grid(replicas: int, stages: int) -> None:
    for name, count in (("replicas", replicas), ("stages", stages)):
        if isinstance(count, int) and count < 1:
            raise ConfigError(f"{name} must be at least 1, got {count}")
        whole_number(name, count)


def run_threads(
    work: Callable[[World], Any], *, replicas: int, stages: int = 1, comm: CommConfig | None = None
) -> list[Any]:
    """Run `work(world)` on replicas x stages ranks, each a thread of this process; return the results in rank order.

    All share one GPU where there is one, and torch's global random generator: where `work` draws from that, as the
    initialisation of a model does, the order of the threads decides which rank gets what. So make the model before, or
    under a lock, or give it a generator; engines begin with the weights of replica 0 in any case.

    If a rank fails, the others are woken with its reason, and its own error is raised here. An interrupt asks
    training to stop (it finishes its step and writes a checkpoint); a second one ends all verbs at once.

    Raises ConfigError where `comm` is for processes, and for numbers of replicas or stages below 1.
    """
    comm = comm or CommConfig()
    if comm.backend != "auto":
        raise ConfigError(f"comm.backend = {comm.backend} is for processes (torchrun); threads have none")
    _check_grid(replicas, stages)
    ranks = replicas * stages
    hub = ThreadHub(ranks, comm.timeout_s)
    results: list[Any] = [None] * ranks
    errors: list[BaseException | None] = [None] * ranks
    order: list[int] = []
    # Thread.join, interrupted once, takes a thread that still runs for one that has ended.
    ended = [threading.Event() for _ in range(ranks)]

    def body(rank: int) -> None:
        world = None
        try:
            world = World(
                ThreadTransport(hub, rank), replicas=replicas, stages=stages, comm=comm, device=default_device()
            )
            results[rank] = work(world)
            world.close()
        except BaseException as error:
            errors[rank] = error
            order.append(rank)
            hub.abort(f"rank {rank} failed: {type(error).__name__}: {error}")
            if world is not None:
                world.stop()
        finally:
            ended[rank].set()

    def wait() -> None:
        for t, event in zip(threads, ended, strict=True):
            if t.ident is not None:  # else it could not be started
                event.wait()
                t.join()

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as under torchrun: losses must not depend on the transport
    # MKL's vector functions set themselves up on first use, and not safely: of two threads that both come first,
    # one may get cosines that are off in the fourth digit. So the first use of each is here, alone.
    for function in (torch.cos, torch.sin, torch.exp, torch.log, torch.tanh):
        function(torch.ones(1))
    threads = [threading.Thread(target=body, args=(r,), name=f"rank-{r}", daemon=True) for r in range(ranks)]
    try:
        for t in threads:
            t.start()
        wait()
    except BaseException as error:
        try:
            hub.note("stop", "interrupted")
            wait()
        finally:
            hub.abort(f"interrupted: {type(error).__name__}")
        raise
    finally:
        torch.set_num_threads(before)
    if order:
        raise errors[order[0]]
    return results


def world_from_torchrun(
    *, replicas: int, stages: int = 1, comm: CommConfig | None = None, transport: ProcessTransport | None = None
) -> World:
    """Return the World of this torchrun process: on its own GPU with NCCL, else on a shared GPU or the CPU.

    It sets the number of computing threads to 1, as under `run_threads`. `transport`: that of an earlier World which
    has left it; by default a new one. Raises ConfigError where the ranks do not form replicas x stages, and for a link
    in real time between machines; CommError where the ranks cannot find each other.
    """
    comm = comm or CommConfig()
    shared_clock = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if (comm.link_mbit_per_s or comm.link_latency_ms) and comm.clock == "real" and not shared_clock:
        raise ConfigError(
            "a link in real time is emulated by the clock that ranks of one machine share, and these are on several:"
            " use comm.clock = virtual, or no link"
        )
    torch.set_num_threads(1)
    transport = transport or ProcessTransport(comm.backend, comm.timeout_s, stages)
    device = torch.device("cuda", torch.cuda.current_device()) if transport.uses_nccl else default_device()
    return World(transport, replicas=replicas, stages=stages, comm=comm, device=device)


def world(*, replicas: int | None = None, stages: int = 1, comm: CommConfig | None = None) -> World:
    """Return the World of the ranks that torchrun has started; without torchrun, of this process alone.

    Args:
        replicas: the number of replicas; by default the number of ranks divided by that of the stages.
        stages: the number of stages of each replica's pipeline.
        comm: the settings of the communication.

    Unlike `world_from_torchrun`, it leaves the number of computing threads as it is. Raises ConfigError where the ranks
    do not form replicas x stages, CommError where torchrun's settings are incomplete.
    """
    threads = torch.get_num_threads()
    ranks = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else 1
    _check_grid(1 if replicas is None else replicas, stages)
    if ranks % stages:
        raise ConfigError(f"{ranks} ranks do not form pipelines of {stages} stages: start a multiple of {stages}")
    comm = comm or CommConfig()
    grid = {"replicas": ranks // stages if replicas is None else replicas, "stages": stages, "comm": comm}
    if "RANK" not in os.environ:
        return World(ThreadTransport(ThreadHub(1, comm.timeout_s), 0), device=default_device(), **grid)
    found = world_from_torchrun(**grid)
    torch.set_num_threads(threads)
    return found
