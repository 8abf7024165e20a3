"""What public code makes of drawn tensors: `public_code.npz`, to which the tests hold our DeMo and SparseLoCo.

    git clone https://github.com/bloc97/DeMo && git -C DeMo checkout cab4606
    git clone https://github.com/tplr-y/CCLoco && git -C CCLoco checkout 214aa7d
    pip install einops
    python -m tests.golden.public_code DeMo/demo.py CCLoco/src/tplr/ccloco.py

Both optimizers run as they are, on three ranks of gloo, on parameters whose values are of unlike size.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from lowcomm.methods.engine import Engine

FILE = Path(__file__).with_suffix(".npz")
RANKS, STEPS = 3, 6
#: Shapes of parameters, whose sides are whole tiles', each with the size of its values.
SHAPES = {"wide": ((128, 192), 1.0), "norm": ((64,), 1e-2), "square": ((64, 64), 1e2)}
#: The arguments of each, as its authors have them for what we call by the same name.
DEMO = {"lr": 0.01, "compression_decay": 0.999, "compression_topk": 32, "compression_chunk": 64}
CCLOCO = {"lr": 1.0, "error_decay": 0.95, "top_k": 64, "chunk_size": 64}
CCLOCO |= {"use_quantization": True, "quantization_bins": 4, "quantization_range": 6}


def drawn(rank: int, step: int) -> dict[str, Tensor]:
    """Return what a rank has as its gradients in a step, by name: values of many magnitudes."""
    draw = torch.Generator().manual_seed(100 * rank + step)
    return {name: size * torch.randn(shape, generator=draw).pow(3) for name, (shape, size) in SHAPES.items()}


def expected(name: str) -> dict[str, Tensor]:
    """Return where the optimizer of this name, "demo" or "ccloco", has moved each parameter from zero."""
    found = np.load(FILE)
    return {key: torch.from_numpy(found[f"{name}/{key}"]) for key in SHAPES}


def moved(sync: Callable[[dict[str, Tensor]], Engine], lr: float, rank: int) -> dict[str, Tensor]:
    """Return where an engine of ours moves the parameters from zero, whose turns' inner steps move by -lr gradient."""
    named = {name: nn.Parameter(torch.zeros(shape)) for name, (shape, _) in SHAPES.items()}
    engine = sync(named)
    for step in range(STEPS):
        with torch.no_grad():
            for name, gradient in drawn(rank, step).items():
                named[name].sub_(lr * gradient)
        engine.step()
    engine.finish()
    return {name: x.detach().clone() for name, x in named.items()}


def _module(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _work(rank: int, demo: Path, ccloco: Path, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    found = {}
    for name, optimizer, told in (("demo", _module(demo).DeMo, DEMO), ("ccloco", _module(ccloco).CCLoco, CCLOCO)):
        named = {key: nn.Parameter(torch.zeros(shape)) for key, (shape, _) in SHAPES.items()}
        steps = optimizer([*named.values()], **told)
        for step in range(STEPS):
            for key, gradient in drawn(rank, step).items():
                named[key].grad = gradient
            steps.step()
        found |= {f"{name}/{key}": x.detach().numpy() for key, x in named.items()}
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
