"""Run `lowcomm.train` on one machine as `torchrun --standalone` does, with ranks that start at once.

    python -m pipelines.forked 8 noloco --all

torchrun starts a Python for each rank, and each of them imports torch: three seconds of a core, so that 16 ranks on two
cores begin after most of a minute. Here torch's elastic agent, which is what torchrun starts too, has them forked by a
server that has imported all of it and has no threads. (The agent has some, and a process that is forked while one of
them holds a lock waits for that lock for ever.) Where there are GPUs, each rank is a Python that is started anew.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import uuid
from typing import Any

from lowcomm.experiment import SAVING_S
from pipelines.launch import process_context


def _pass_on(number: int, _: Any) -> None:
    """Pass the signal `number` on to the ranks, as SIGTERM: they write a checkpoint and return.

    The agent would wait for them in vain, and then kill them. Without ranks, exit with status 128 + `number`.
    """
    ranks = multiprocessing.active_children()
    for rank in ranks:
        os.kill(rank.pid, signal.SIGTERM)
    if not ranks:
        sys.exit(128 + number)


def main(argv: list[str]) -> int:
    """Train with as many ranks as the first word of `argv` says; the others are the command line of `lowcomm.train`.

    Returns the exit status: 1 where a rank fails, 2 where the number of ranks is missing or is none.
    """
    if not argv or not argv[0].isdecimal() or int(argv[0]) < 1:
        said = f"the number of ranks must come first, got {argv[0]!r}" if argv else "the number of ranks is missing"
        print(f"{said}\nusage: python -m pipelines.forked RANKS RUN [as python -m lowcomm.train]", file=sys.stderr)
        return 2
    ranks, *words = argv
    # The server imports torch while this process does; torch.optim imports torch._dynamo late.
    context = process_context("lowcomm.train", "torch._dynamo")
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from lowcomm.train import main as train

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _pass_on)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(ranks),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        shutdown_timeout=SAVING_S,
        signals_to_handle="SIGHUP,SIGQUIT",
        start_method=context.get_start_method(),
    )
    try:
        elastic_launch(config, train)(words)
    except ChildFailedError as error:
        logging.getLogger("lowcomm").error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
