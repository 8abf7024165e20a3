"""Muon of the matrices inside blocks, and AdamW of embedding, head and vectors.

Muon moves a matrix by its momentum's nearest orthogonal one (Jordan et al., 2024), as `torch.optim.Muon` computes it.
Inside DiLoCo it is MuLoCo (Thérien et al., 2025, arXiv:2505.23725), whose public code has no Nesterov momentum there
and scales the rate of a matrix [out, in] by sqrt(out / in), as is done here. With one replica that is their MuLoCo-1.
Their code (facebookresearch/MuLoCo at 15ee278) comes nearer to the orthogonal matrix, as each of its five steps has
coefficients of its own: all but the smallest singular values end within 2 % of 1, where torch's leaves them between 0.7
and 1.2.

torch multiplies in bf16. A processor with AVX2 and no more has no instruction for that, and takes 15 to 20 times as
long as in fp32: there, products of matrices that are rounded to bf16 are computed in fp32 and rounded, which is what
a product in bf16 is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowcomm.methods.config import MethodConfig
from lowcomm.methods.inner import AdamW, InnerOptimizer, InnerSettings
from lowcomm.settings import ConfigError

#: Iterations of Newton and Schulz in a step, as by torch's default.
_STEPS = 5


def _is_muons(name: str, dims: int) -> bool:
    """Tell whether a `Decoder`'s parameter with `dims` dimensions is one of the matrices that Muon takes."""
    return name.startswith("blocks.") and dims == 2


def _bf16_is_slow(p: Tensor) -> bool:
    """Tell whether products in bf16 are far slower than products in fp32 on the parameter's device.

    The processor is what torch takes it to be: where torch is limited to the arithmetic that every processor has, its
    own products are kept.
    """
    return p.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"


def _rounded(x: Tensor) -> Tensor:
    """Return the values rounded to the nearest ones of bf16, in fp32."""
    return x.bfloat16().float()


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return approximately the orthogonal matrix nearest to `matrix` [out, in], in fp32.

    This is torch's Newton-Schulz iteration without products in bf16, run for `steps` steps. coefficients: a, b and c of
    X <- a X + (b A + c A A) X with A = X X^T. eps: the least norm that the matrix is divided by.
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = _rounded(matrix.T if tall else matrix)
    x = _rounded(x / _rounded(x.norm().clamp(min=eps)))
    for _ in range(steps):
        gram = _rounded(x @ x.T)
        update = _rounded(torch.addmm(gram, gram, gram, beta=b, alpha=c))
        x = _rounded(torch.addmm(x, update, x, beta=a))
    return x.T if tall else x


class _Matrices(torch.optim.Muon):
    """`torch.optim.Muon` without Nesterov momentum, which computes its direction by `orthogonal` where bf16 is slow."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step as torch's does, and return the result of `closure`, None without one."""
        if not any(_bf16_is_slow(p) for group in self.param_groups for p in group["params"]):
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "momentum_buffer" not in (state := self.state[p]):
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                moment = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                direction = orthogonal(moment, group["ns_coefficients"], group["ns_steps"], group["eps"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(direction, alpha=-group["lr"] * math.sqrt(max(1.0, p.shape[0] / p.shape[1])))
        return loss


class Muon(InnerOptimizer):
    """Muon: one momentum for each matrix inside blocks, and AdamW's two moments for all other parameters."""

    names = ("muon",)
    settings = ("muon_lr", "muon_momentum")

    @classmethod
    def of(
        cls, trained: Mapping[str, Tensor], t: InnerSettings, mean_dims: Mapping[str, int] | None = None
    ) -> torch.optim.Optimizer:
        """Make the two as one optimizer; `mean_dims` is not used, as `check` refuses what needs it."""
        return MuonAndAdamW(trained, t)

    @classmethod
    def check(cls, t: InnerSettings, method: MethodConfig) -> None:
        """Refuse training without `muon_lr`, on parts of matrices, or on matrices that are held to a subspace."""
        if not t.muon_lr:
            raise ConfigError(
                "train.optimizer = muon needs train.muon_lr above 0: the peak rate of matrices inside blocks"
            )
        apart = {"method.exchange = fsdp": method.exchange == "fsdp"}
        apart |= {"method.trainable = slice": method.trainable == "slice"}
        apart |= {"method.boundary.kind = subspace": method.boundary.kind == "subspace"}
        for what, is_so in apart.items():
            if is_so:
                raise ConfigError(f"train.optimizer = muon makes whole matrices orthogonal, in bf16: not with {what}")

    @classmethod
    def fewer_moments(cls, shapes: Mapping[str, Sequence[int]]) -> int:
        """Count the values of the matrices inside blocks, each of which has one moment in place of two."""
        return sum(math.prod(shape) for name, shape in shapes.items() if _is_muons(name, len(shape)))

    @classmethod
    def step_flops(cls, shapes: Mapping[str, Sequence[int]]) -> int:
        """Return the FLOPs of making the matrices inside blocks orthogonal, in 5 iterations of three products each.

        Of a matrix with the sides m <= n, they are X X^T and its product with X of 2 m^2 n each, and a square of 2 m^3.
        """
        matrices = [sorted(shape) for name, shape in shapes.items() if _is_muons(name, len(shape))]
        return _STEPS * sum(4 * m * m * n + 2 * m**3 for m, n in matrices)


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the matrices inside blocks and AdamW for the rest, as one optimizer with one state.

    Muon's groups have a `peak_lr` of their own: `train.muon_lr` times min(1, sqrt(out / in)), as torch itself scales
    by max(1, sqrt(out / in)).
    """

    def __init__(self, trained: Mapping[str, Tensor], t: InnerSettings):
        of_shape: dict[torch.Size, list[Tensor]] = {}
        rest = {}
        for name, p in trained.items():
            if _is_muons(name, p.dim()):
                of_shape.setdefault(p.shape, []).append(p)
            else:
                rest[name] = p
        groups = [self._group(shape, some, t) for shape, some in of_shape.items()]
        muon = _Matrices(groups, momentum=t.muon_momentum, nesterov=False, ns_steps=_STEPS, adjust_lr_fn="original")
        adamw = AdamW.of(rest, t)
        self._parts = muon, adamw
        super().__init__([*muon.param_groups, *adamw.param_groups], {"fused": True})
        self._share()

    def _share(self) -> None:
        """Let both optimizers use the groups and the state of this one."""
        count = len(self._parts[0].param_groups)
        for part, groups in zip(self._parts, (self.param_groups[:count], self.param_groups[count:]), strict=True):
            part.param_groups, part.state = groups, self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` has returned."""
        super().load_state_dict(state_dict)
        self._share()

    @staticmethod
    def _group(shape: torch.Size, some: list[Tensor], t: InnerSettings) -> dict[str, Any]:
        """Return the group of the matrices of one shape [out, in]; torch scales by sqrt(max(1, out / in)) itself."""
        ratio = min(1.0, math.sqrt(shape[0] / shape[1]))
        peak = t.muon_lr * ratio
        return {"params": some, "lr": peak, "peak_lr": peak, "weight_decay": t.weight_decay / ratio}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, and return the result of `closure`, which is run with gradients; None without one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss
