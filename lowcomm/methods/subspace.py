"""Protocol Models (arXiv:2506.01260): what writes into the residual stream keeps to a subspace of few dimensions.

Then the stream, less the fixed part of the token embedding, lies in the subspace, and so little crosses the boundary of
two stages of a pipeline (`boundary`). A row of the paper's W_p is a column of `nn.Linear.weight`, so here

    W <- U U^T W      for W_p1 (`attention.out`) and W_p2 (`mlp.down`), of shape [D, in], of all but the dense layers
    T <- T U U^T      for the trainable embedding T_S, of shape [V, D]

Gradients with respect to the stream have parts outside the subspace (through norms, attention and activations), which
reach no weight but through U: those of constrained matrices are projected (appendix A), so that they are the same
however many boundaries there are. (In fp32. Under bf16 autocast weights are rounded as they are used, and what is
written leaves the subspace by as much; a boundary then rounds too.) AdamW would still leave the subspace, as its second
moment scales each entry by another factor; with one second moment for all entries that share a row of W_p (Eqs. 12 to
14) it does not (`RowAdamW`).

Every so many steps the subspace takes a step on the Grassmann manifold (section 4.5), towards the gradients G_t at the
last compressed layer. With S = sum_t G_t^T G_t, the energy outside is tr S - tr(U^T S U); here it is taken as a share
of tr S, so that the step size has no unit (the paper prints neither its scale nor its size):

    grad = -2 (I - U U^T) S U / tr S        Eq. 11
    U   <- orthonormal(U - eta grad)        by QR, with fixed signs

Weights, first moments and outer state, which keep to the old subspace, are projected on the new one.

    symbol  name here          symbol  name here
    U       `basis` [D, R]     S       `gram` [D, D]
    k, R    `rank`             eta     `update_lr`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lowcomm.comm.shares import mean_bytes
from lowcomm.comm.world import World
from lowcomm.methods.boundary import Boundary, make_boundary
from lowcomm.methods.config import BoundaryConfig
from lowcomm.methods.engine import Change, Values
from lowcomm.methods.partial import SlicedLinear
from lowcomm.model.accounting import parameter_shapes
from lowcomm.model.config import ModelConfig
from lowcomm.model.decoder import Decoder, orthonormal


def share_outside(gram: Tensor, basis: Tensor) -> float:
    """Return the share of the gradients' energy outside the subspace: 1 - tr(U^T S U) / tr S; NaN where S is zero."""
    s, u = gram.double(), basis.double()
    return float(1 - torch.einsum("dk,de,ek->", u, s, u) / s.trace())


def grassmann_gradient(gram: Tensor, basis: Tensor) -> Tensor:
    """Return the Riemannian gradient [D, R] of `share_outside` with respect to the basis (Eq. 11), in fp64."""
    s, u = gram.double(), basis.double()
    euclidean = s @ u * (-2 / s.trace())
    return euclidean - u @ (u.T @ euclidean)


def grassmann_step(gram: Tensor, basis: Tensor, lr: float) -> Tensor:
    """Return the basis [D, R] after one step of size `lr` on the Grassmann manifold; a copy where `gram` is zero."""
    if not gram.any():
        return basis.clone()
    return orthonormal(basis.double() - lr * grassmann_gradient(gram, basis)).to(basis.dtype)


def project(x: Tensor, basis: Tensor, dim: int) -> Tensor:
    """Return a matrix x projected on the subspace along `dim` (0 or 1), its dimension of size D."""
    return (x @ basis) @ basis.T if dim else basis @ (basis.T @ x)


class RowAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, 2017), in some groups with one second moment for each row of W_p (Eqs. 12 to 14).

    Such a group names `mean_dim`, the dimension of its matrices over which the second moment is the mean (0 for
    [D, in], 1 for [in, D]); None for plain AdamW, which is torch's own fused one. The mean of the second moments is the
    second moment of the means, so only the means are kept: one value in place of D.

    Raises ValueError for numbers out of range, and for a `mean_dim` of parameters that are not matrices.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        mean_dim: int | None = None,
    ):
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if value < 0:
                raise ValueError(f"{name} = {value} must be at least 0")
        for i, beta in enumerate(betas):
            if not 0 <= beta < 1:
                raise ValueError(f"betas[{i}] = {beta} must be at least 0 and below 1")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "mean_dim": mean_dim}
        super().__init__(params, defaults | {"fused": True})
        for group in self.param_groups:
            if group["mean_dim"] is not None and (bad := [p for p in group["params"] if p.dim() != 2]):
                raise ValueError(f"mean_dim = {group['mean_dim']} is for matrices, got shape {tuple(bad[0].shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, and return the result of `closure`, which is run with gradients; None without one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            some = [p for p in group["params"] if p.grad is not None]
            for p in some:
                if not self.state[p]:
                    self._begin(p, group["mean_dim"])
            if some:
                (self._plain if group["mean_dim"] is None else self._rows)(group, some)
        return loss

    def _begin(self, p: Tensor, mean_dim: int | None) -> None:
        shape = [1 if d == mean_dim else n for d, n in enumerate(p.shape)]
        self.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p) if mean_dim is None else p.new_zeros(shape),
        }

    def _plain(self, group: dict[str, Any], some: list[Tensor]) -> None:
        states = [self.state[p] for p in some]
        beta1, beta2 = group["betas"]
        adamw(
            some,
            [p.grad for p in some],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _rows(self, group: dict[str, Any], some: list[Tensor]) -> None:
        (beta1, beta2), lr, dim = group["betas"], group["lr"], group["mean_dim"]
        states, grads = [self.state[p] for p in some], [p.grad for p in some]
        torch._foreach_add_([s["step"] for s in states], 1)
        torch._foreach_lerp_([s["exp_avg"] for s in states], grads, 1 - beta1)
        torch._foreach_mul_(some, 1 - lr * group["weight_decay"])
        for p, state in zip(some, states, strict=True):
            mean = torch.linalg.vector_norm(p.grad, dim=dim, keepdim=True).square_().div_(p.shape[dim])
            v = state["exp_avg_sq"].lerp_(mean, 1 - beta2)
            t = state["step"].double()
            rate = v.div(1 - beta2**t).sqrt_().add_(group["eps"]).reciprocal_().mul_(lr / (1 - beta1**t))
            p.addcmul_(state["exp_avg"], rate, value=-1)


def _columns(c: ModelConfig, b: BoundaryConfig) -> int:
    """Return the sum of n over the constrained matrices [D, n] of all layers, without the embedding (n = V)."""
    return max(0, c.layers - b.dense_layers) * (c.heads * c.width_of_head + c.ffn_dim)


def overhead_flops(c: ModelConfig, b: BoundaryConfig, sequences: int, tokens: int, stages: int) -> dict[str, int]:
    """Count FLOPs of a pipeline's boundaries and of keeping to the subspace: three kinds per step, one per "update".

    "boundaries": activations and gradients, compressed and rebuilt (`Boundary.flops`, of a subspace 8BTDR), at each of
    the stages - 1 boundaries; "projection": gradients [D, n], 4DRn, and weights that AdamW moves out of it, as much;
    "watching": the gradients at the last compressed layer, 2BTD^2. An "update" takes S U and its projection on the
    tangent, and projects weights and AdamW's first moments, 4DRn each (QR, and outer state, are not counted).
    Re-parametrised, nothing is projected, and an update turns R coordinates, 2R^2 n each. A boundary that is a
    `projection` only compresses and rebuilds, as no weights are kept to a subspace.
    """
    D, R, bt = c.dim, b.rank, sequences * tokens
    n = _columns(c, b) + c.vocab_size
    projected = b.mode == "projected" and b.kind == "subspace"
    moving = b.update_every_steps > 0
    weights = {"row": 0, "mixed": max(0, c.layers - b.dense_layers) * c.heads * c.width_of_head, "element": n}
    carry = 4 * D * R * n if projected else 2 * R * R * n
    return {
        "boundaries": 2 * (stages - 1) * make_boundary(b, c).flops(bt),
        "projection": 4 * D * R * (n + weights[b.second_moment]) if projected else 0,
        "watching": 2 * bt * D * D if moving else 0,
        "update": moving * (2 * D * D * R + 4 * D * R * R + 2 * carry),
    }


def moments_in_means(c: ModelConfig, b: BoundaryConfig, parts: Iterable[tuple[str, int]]) -> int:
    """Count the entries of second moments that are not kept, as means stand for them.

    Args:
        c, b: the model, and the settings of its subspace; 0 with any other boundary.
        parts: parameters, or pieces of them that one replica trains, each as (parameter's name, number of values).
    """
    if b.kind != "subspace" or b.mode != "projected" or b.second_moment == "element":
        return 0
    matrices = ("mlp.down.weight", "attention.out.weight") if b.second_moment == "row" else ("mlp.down.weight",)

    def has_means(name: str) -> bool:
        inside = name.endswith(matrices) and int(name.split(".")[1]) < c.layers - b.dense_layers
        return inside or name == "embedding.weight"

    return sum(values // c.dim * (c.dim - 1) for name, values in parts if has_means(name))


def overhead_bytes(c: ModelConfig, b: BoundaryConfig, itemsize: int = 4) -> dict[str, int]:
    """Return the bytes that a stage holds for the subspace, whatever its sequences, and those that its optimizer saves.

    They are by name: "fixed_embedding" V D `itemsize` (2 in bf16), "basis" 4DR, "gram" 4D^2 (at the last stage, where
    the subspace moves); and "second_moment", at most 0, for the means in place of entries, of the whole model.
    """
    D, R, V = c.dim, b.rank, c.vocab_size
    whole = ((name, math.prod(shape)) for name, shape in parameter_shapes(c).items())
    return {
        "fixed_embedding": V * D * itemsize,
        "basis": 4 * D * R,
        "gram": 4 * D * D if b.update_every_steps else 0,
        "second_moment": -4 * moments_in_means(c, b, whole),
    }


def move_bytes(dim: int, rank: int, replicas: int, stages: int, replica: int = 0) -> tuple[int, int]:
    """Return the bytes that a rank of the last stage sends in one move of the subspace.

    They are (those of S [D, D] among replicas, those of U [D, R] to the other stages), both in fp32.
    """
    return mean_bytes(dim * dim, 4, replicas, replica), (stages - 1) * 4 * dim * rank


class Unconstrained:
    """The null object of `Subspace`, for models without a constraint: its methods do nothing, and return None or {}."""

    def watch(self) -> None:
        """Do nothing; to be called after each backward pass."""

    def mean_dims(self) -> dict[str, int]:
        """Return the dimension of the mean, by name, for the parameters whose second moment is a mean (`RowAdamW`)."""
        return {}

    def project_gradients(self) -> None:
        """Do nothing; to be called between the backward pass and clipping."""

    def project_weights(self) -> None:
        """Do nothing; to be called after the inner optimizer's step."""

    def keep(self, values: Values) -> None:
        """Do nothing; to be called with the values that a lossy exchange has changed, to change them in place."""

    def update(self, step: int, optimizer: torch.optim.Optimizer, carry: Callable[[Change], None]) -> dict[str, float]:
        """Do nothing, and return {}; to be called after every step but the last."""
        return {}

    def sent_bytes(self, steps: int) -> dict[str, int]:
        """Return the bytes that this rank sends in a run of `steps`, by "axis/purpose", in closed form."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Return the state to checkpoint, by name."""
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back a state that `tensors` has returned."""


class Subspace(Unconstrained):
    """One rank's part in the subspace: keeps what it trains to the subspace, and moves the subspace.

    Args:
        model: this rank's stage, made with a constraint.
        config: the settings of the boundary.
        world: the ranks.
        trained: what the inner optimizer updates, by the parameters' names.
        batch: (B, T) of a micro-batch.
        boundary: the boundary between stages, if there are several; a move clears the errors that it has kept.
    """

    def __init__(
        self,
        model: Decoder,
        config: BoundaryConfig,
        world: World,
        trained: dict[str, Tensor],
        batch: tuple[int, int],
        boundary: Boundary | None = None,
    ):
        self.model, self.config, self.world, self.boundary = model, config, world, boundary
        self.basis = model.basis_DR
        self.names = model.constrained()
        self.projected = config.mode == "projected"
        #: What is constrained of what is trained, and its dimension of size D (or R, re-parametrised).
        self.trained = {n: (trained[n], self._dim(n, stored=True)) for n in self.names if n in trained}
        self.gram: Tensor | None = None
        if config.update_every_steps and world.stage == world.stages - 1:
            self.gram = self.basis.new_zeros(len(self.basis), len(self.basis))
            model.probe = self.basis.new_zeros(*batch, len(self.basis), requires_grad=True)

    def _dim(self, name: str, *, stored: bool = False) -> int:
        """Return the dimension of size D of a parameter.

        `stored`: of the tensor that is trained, which may be transposed.
        """
        if name == "embedding.weight":
            return 1
        layer = self.model.get_submodule(name.removesuffix(".weight"))
        return int(stored and isinstance(layer, SlicedLinear) and layer.dim == 1)

    def moves(self, step: int) -> bool:
        """Tell whether the subspace moves after a step (from 1)."""
        every = self.config.update_every_steps
        return every > 0 and step % every == 0

    def watch(self) -> None:
        """Add the gradients at the last compressed layer to S; to be called after each backward pass."""
        if self.gram is not None:
            rows = self.model.probe.grad.flatten(0, -2).float()
            self.gram.addmm_(rows.T, rows)
            self.model.probe.grad = None

    def mean_dims(self) -> dict[str, int]:
        """Return the dimension of the mean, by name, for the parameters whose second moment is a mean (`RowAdamW`)."""
        if not self.projected or self.config.second_moment == "element":
            return {}
        mixed = self.config.second_moment == "mixed"
        return {n: dim for n, (_, dim) in self.trained.items() if not (mixed and n.endswith("attention.out.weight"))}

    @torch.no_grad()
    def project_gradients(self) -> None:
        """Project the constrained gradients in place; to be called between the backward pass and clipping."""
        if self.projected:
            for p, dim in self.trained.values():
                if p.grad is not None:
                    p.grad.copy_(project(p.grad, self.basis, dim))

    @torch.no_grad()
    def project_weights(self) -> None:
        """Project in place the weights that the inner optimizer may have moved out; to be called after its step.

        They are those with one second moment for each entry.
        """
        kept = self.mean_dims()
        for name, (p, dim) in self.trained.items():
            if self.projected and name not in kept:
                p.copy_(project(p, self.basis, dim))

    def keep(self, values: Values) -> None:
        """Project other values of parameters in place, such as means that a lossy codec has moved out of it."""
        if self.projected:
            self._map(values, lambda x, dim: project(x, self.basis, dim))

    def _map(self, values: Values, change: Callable[[Tensor, int], Tensor]) -> None:
        for name, value in values:
            if name in self.names:
                value.copy_(change(value, self._dim(name)))

    @torch.no_grad()
    def update(self, step: int, optimizer: torch.optim.Optimizer, carry: Callable[[Change], None]) -> dict[str, float]:
        """Move the subspace if it is time; every rank must call it after every step but the last.

        carry: applies a change to the values of parameters in outer state (`Engine.map`). Returns what is worth
        logging, on the last stage: the share of the gradients' energy outside the subspace before the move, "outside",
        and after it, "outside_after"; {} elsewhere, and where it is not time.
        """
        if not self.moves(step):
            return {}
        world, new, logged = self.world, self.basis.clone(), {}
        if self.gram is not None:
            world.sum(self.gram, purpose="subspace")
            new = grassmann_step(self.gram, self.basis, self.config.update_lr)
            shares = share_outside(self.gram, self.basis), share_outside(self.gram, new)
            logged = dict(zip(("outside", "outside_after"), shares, strict=True))
            self.gram.zero_()
        if world.stages > 1:
            world.broadcast(new, purpose="subspace", axis="stage", root=world.stages - 1)
        turned = new.T @ self.basis  # coordinates in the old basis -> of the projection, in the new one

        def carried(x: Tensor, dim: int) -> Tensor:
            if self.projected:
                return project(x, new, dim)
            return x @ turned.T if dim else turned @ x

        self._map([(n, self.model.get_parameter(n)) for n in self.names], carried)
        for p, dim in self.trained.values():
            if (moment := optimizer.state.get(p, {}).get("exp_avg")) is not None:
                moment.copy_(carried(moment, dim))
        carry(lambda values: self._map(values, carried))
        self.basis.copy_(new)
        if self.boundary is not None:
            self.boundary.errors.clear()  # they were of the old subspace
        return logged

    def sent_bytes(self, steps: int) -> dict[str, int]:
        """Return the bytes that this rank sends in a run of `steps`, by "axis/purpose", in closed form."""
        every, world = self.config.update_every_steps, self.world
        updates = (steps - 1) // every if every and world.stage == world.stages - 1 else 0
        gram, basis = move_bytes(*self.basis.shape, world.replicas, world.stages, world.replica)
        return {"replica/subspace": updates * gram, "stage/subspace": updates * basis}

    def tensors(self) -> dict[str, Tensor]:
        """Return the state to checkpoint, by name."""
        return {"basis": self.basis} | ({} if self.gram is None else {"gram": self.gram})

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back a state that `tensors` has returned."""
        for name, value in self.tensors().items():
            value.copy_(tensors[name])
