"""What public code makes of drawn tensors: `public_code.npz`, to which the tests hold our DeMo and SparseLoCo.

    git clone https://github.com/bloc97/DeMo && git -C DeMo checkout cab4606
    git clone https://github.com/tplr-y/CCLoco && git -C CCLoco checkout 214aa7d
    pip install einops
    python -m tests.golden.public_code DeMo/demo.py CCLoco/src/tplr/ccloco.py

Both optimizers run as they are, on three ranks of gloo, on one matrix of 128 x 192.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

FILE = Path(__file__).with_suffix(".npz")
RANKS, STEPS, SHAPE = 3, 6, (128, 192)
#: The arguments of each, as its authors have them for what we call by the same name.
DEMO = {"lr": 0.01, "compression_decay": 0.999, "compression_topk": 32, "compression_chunk": 64}
CCLOCO = {"lr": 1.0, "error_decay": 0.95, "top_k": 64, "chunk_size": 64}
CCLOCO |= {"use_quantization": True, "quantization_bins": 4, "quantization_range": 6}


def drawn(rank: int, step: int) -> Tensor:
    """Return what a rank has as its gradient in a step: values of many magnitudes."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 * rank + step)).pow(3)


def _module(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _work(rank: int, demo: Path, ccloco: Path, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    found = {}
    for name, optimizer, told in (("demo", _module(demo).DeMo, DEMO), ("ccloco", _module(ccloco).CCLoco, CCLOCO)):
        x = nn.Parameter(torch.zeros(SHAPE))
        steps = optimizer([x], **told)
        for step in range(STEPS):
            x.grad = drawn(rank, step)
            steps.step()
        found[name] = x.detach().numpy()
    if rank == 0:
        np.savez_compressed(FILE, **found)
    dist.destroy_process_group()


def main() -> None:
    """Write the file, from the two files of public code."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (*map(Path, sys.argv[1:3]), Path(folder)), nprocs=RANKS)
    print(f"{FILE}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
