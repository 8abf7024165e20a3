"""What public code makes of drawn tensors: `public_code.npz`, to which the tests hold our DeMo, SparseLoCo and MuLoCo.

    git clone https://github.com/bloc97/DeMo && git -C DeMo checkout cab4606
    git clone https://github.com/tplr-y/CCLoco && git -C CCLoco checkout 214aa7d
    git clone https://github.com/facebookresearch/MuLoCo && git -C MuLoCo checkout 15ee278
    pip install einops
    python -m tests.golden.public_code DeMo/demo.py CCLoco/src/tplr/ccloco.py MuLoCo/torchtitan/torchtitan

The optimizers of the first two run as they are, on three ranks of gloo, on parameters whose values are of unlike size.
Of MuLoCo it is what its outer optimizer sends and what it makes of the messages of three workers, and the functions
that its Muon calls one after the other for a matrix.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

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
MULOCO = {"lr": 1.0, "momentum": 0.9, "nesterov": True, "error_decay": 0.9, "quantization_bins": 4}
MULOCO |= {"quantization_range": 6, "compressor_type": "statistical", "simulate_quantization_after_reduce": False}
#: Of Muon: the rate, the momentum and the decay.
MUON = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
MATRICES = ("wide", "square")


def drawn(rank: int, step: int) -> dict[str, Tensor]:
    """Return what a rank has as its gradients in a step, by name: values of many magnitudes."""
    draw = torch.Generator().manual_seed(100 * rank + step)
    return {name: size * torch.randn(shape, generator=draw).pow(3) for name, (shape, size) in SHAPES.items()}


def expected(name: str) -> dict[str, Tensor]:
    """Return where "demo", "ccloco", "muloco" or "muon" has moved each parameter from zero; "muon" the `MATRICES`."""
    found = np.load(FILE)
    return {key: torch.from_numpy(found[f"{name}/{key}"]) for key in SHAPES if f"{name}/{key}" in found}


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


def _module(file: Path, package: str = "") -> Any:
    """Import a file; as part of a package it may import others of it, of which nothing is used."""
    spec = importlib.util.spec_from_file_location(f"{package}.{file.stem}".lstrip("."), file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _muloco(folder: Path) -> dict[str, np.ndarray]:
    """Return where MuLoCo's outer optimizer moves the parameters of three workers, whose inner steps are gradients."""
    outer = _module(folder / "components" / "quantized_outer_sgd.py").QuantizedOuterSGD
    workers = [nn.ParameterDict({key: torch.zeros(shape) for key, (shape, _) in SHAPES.items()}) for _ in range(RANKS)]
    optimizers = [outer([*worker.values()], **MULOCO) for worker in workers]
    for step in range(STEPS):
        before = {key: x.detach().clone() for key, x in workers[0].items()}
        sent: list[dict[str, Tensor]] = [{} for _ in range(RANKS)]
        for rank, (worker, steps) in enumerate(zip(workers, optimizers, strict=True)):
            with torch.no_grad():
                for key, gradient in drawn(rank, step).items():
                    worker[key].sub_(gradient)
            steps._save_grads(sent[rank], before, worker)
        for worker, steps in zip(workers, optimizers, strict=True):
            with torch.no_grad():
                for key, x in worker.items():
                    x.copy_(before[key])
                    x.grad = torch.zeros_like(x)
            steps._set_grads({key: [one[key] for one in sent] for key in sent[0]}, worker)
            steps.step()
    return {f"muloco/{key}": x.detach().numpy() for key, x in workers[0].items()}


def _muon(folder: Path) -> dict[str, np.ndarray]:
    """Return where MuLoCo's Muon moves the matrices of rank 0."""
    package = folder / "experiments" / "dion_optimizer"
    others = ("polar_express_triton", "newton_schulz_triton", "opt_utils", "scalar_opts", "parameter_classification")
    for name in others:
        sys.modules[f"dion.{name}"] = MagicMock()
    sys.modules["dion"] = MagicMock(__path__=[str(package)])
    public, found = _module(package / "muon.py", "dion"), {}
    lr, momentum, decay = (torch.tensor(MUON[key]) for key in ("lr", "momentum", "weight_decay"))
    for key in MATRICES:
        x = torch.zeros(SHAPES[key][0])
        moments = [torch.zeros_like(x)]
        for step in range(STEPS):
            (told,) = public.muon_update_pre_orthogonalize([drawn(0, step)[key]], moments, momentum, nesterov=False)
            direction = public.zeropower_via_newtonschulz5(told)
            scaled = public.adjust_lr_spectral_norm(lr, x.shape)
            public.muon_update_post_orthogonalize([x], [direction], lr, scaled, decay)
        found[f"muon/{key}"] = x.numpy()
    return found


def _work(rank: int, demo: Path, ccloco: Path, muloco: Path, folder: Path) -> None:
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
        np.savez_compressed(FILE, **found, **_muloco(muloco), **_muon(muloco))
    dist.destroy_process_group()


def main() -> None:
    """Write the file, from two files of public code and a folder of it."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (*map(Path, sys.argv[1:4]), Path(folder)), nprocs=RANKS)
    print(f"{FILE}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
