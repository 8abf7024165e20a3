"""Partial Parameter Updates (arXiv:2509.22418): a replica trains one slice of some matrices, and all of the others.

Of R replicas, replica k trains slice k mod N (section 2.2.1; the index is inferred, any balanced one will do):

    mlp      rows of W_up (and of the gate), and the columns of W_down that go with them
    heads    rows of W_Q, W_K and W_V: whole heads
    out      the columns of W_O that go with those heads (appendix A.2)
    layers   the MLPs of some layers, whole (appendix A.2)

The forward pass uses everything. The backward pass computes gradients with respect to inputs through everything, and
with respect to weights for the slice alone (appendix C.1):

    dX = W^T dY,   dW[slice] = dY[slice] X^T (rows)   or   dY X[slice]^T (columns)

each as one product. The whole weight exists once; its trained slice is a view, a contiguous one, so that a fused
optimizer's step on the view is a step on the weight (a matrix sliced by columns is stored transposed for that). What is
frozen has no gradient and no optimizer state.

`detach` also cuts the other slices out of the MLPs' dX (appendix D): all but the replica's own, or all but its own and
a random one, drawn anew each step.

    symbol  name here     symbol  name here
    N       `slices`      m[i]    the number of replicas that train a parameter: `Piece.owner` says which
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowcomm.model import MLP, Decoder, recomputing

Sliced = Literal["mlp", "heads", "out", "layers"]
#: The dimension that is sliced, by the end of a parameter's name.
_DIMENSION: dict[str, dict[str, int]] = {
    "mlp": {"mlp.up.weight": 0, "mlp.gate.weight": 0, "mlp.down.weight": 1},
    "heads": {"attention.q.weight": 0, "attention.k.weight": 0, "attention.v.weight": 0},
    "out": {"attention.out.weight": 1},
}


@dataclass(frozen=True)
class Piece:
    """A part of a parameter: [begin, end) along `dim`, trained by the replicas of slice `owner` (None: by all)."""

    parameter: str
    owner: int | None
    dim: int
    begin: int
    end: int

    @property
    def name(self) -> str:
        return self.parameter if self.owner is None else f"{self.parameter}[{self.owner}]"

    def of(self, p: Tensor) -> Tensor:
        """This part of the parameter, a view; the parameter itself where it is all of it."""
        if (self.begin, self.end) == (0, p.shape[self.dim]):
            return p
        return p.narrow(self.dim, self.begin, self.end - self.begin)


def pieces(model: nn.Module, layers: int, sliced: Sequence[Sliced], slices: int) -> list[Piece]:
    """The parts of all parameters of a decoder (or of a stage of one), in the order of its parameters.

    layers: of the whole decoder. Raises ValueError where slices would be unequal.
    """
    dimension = {end: dim for s in sliced if s != "layers" for end, dim in _DIMENSION[s].items()}
    found = []
    for name, p in model.named_parameters():
        dim = next((d for end, d in dimension.items() if name.endswith(end)), None)
        if dim is not None:
            size, rest = divmod(p.shape[dim], slices)
            if rest:
                raise ValueError(f"{slices} slices do not divide {name} of shape {tuple(p.shape)} along {dim}")
            found += [Piece(name, i, dim, i * size, (i + 1) * size) for i in range(slices)]
        elif "layers" in sliced and ".mlp." in name:
            owner = int(name.split(".")[1]) * slices // layers
            found.append(Piece(name, owner, 0, 0, p.shape[0]))
        else:
            found.append(Piece(name, None, 0, 0, p.shape[0]))
    return found


#: [begin, end) of hidden units.
Range = tuple[int, int]


class _Product(torch.autograd.Function):
    """y = W x; the gradient with respect to one slice of W, and to x through W or through some slices of it."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        active: Tensor,
        dim: int,
        own: Range,
        through: tuple[Range, ...],
        wanted: bool,
    ):
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        ctx.dtypes = x.dtype, active.dtype
        x, weight = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(x, weight)
        ctx.dim, ctx.own, ctx.through = dim, own, through
        return F.linear(x, weight) if wanted else x.new_empty(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight = ctx.saved_tensors
        (begin, end), dim = ctx.own, ctx.dim
        rows_dy, rows_x = dy.flatten(0, -2), x.flatten(0, -2)
        if dim == 0:
            d_active = rows_dy[:, begin:end].t() @ rows_x
        else:
            d_active = rows_x[:, begin:end].t() @ rows_dy
        dx = None
        if ctx.needs_input_grad[0]:
            if not ctx.through:
                dx = rows_dy @ weight
            elif dim == 0:
                dx = sum(rows_dy[:, b:e] @ weight[b:e] for b, e in ctx.through)
            else:
                dx = torch.zeros_like(rows_x)
                for b, e in ctx.through:
                    dx[:, b:e] = rows_dy @ weight[:, b:e]
            dx = dx.view(x.shape).to(ctx.dtypes[0])
        return dx, None, d_active.to(ctx.dtypes[1]), None, None, None, None


class SlicedLinear(nn.Module):
    """A linear layer without bias, of whose weight [out, in] rows (dim 0) or columns (dim 1) [begin, end) are trained.

    Attributes:
        weight: all of it, without a gradient.
        active: the slice, a leaf of the graph that shares the weight's memory: [end - begin, in] or, transposed,
            [end - begin, out]. It is what the inner optimizer gets.
        through: ranges along `dim` through which the gradient with respect to the input passes; () for all.
        last: whether it is the last product of a block, whose result nobody needs when the block is recomputed. (Of
            its own products torch knows that by itself.)
    """

    def __init__(self, linear: nn.Linear, piece: Piece):
        super().__init__()
        self.dim, self.own, self.through = piece.dim, (piece.begin, piece.end), ()
        self.last = piece.parameter.endswith("mlp.down.weight")
        weight = linear.weight.detach()
        stored = (weight.t() if self.dim else weight).contiguous()
        self.weight = nn.Parameter(stored.t() if self.dim else stored, requires_grad=False)
        self.active = stored[piece.begin : piece.end].requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        wanted = not (self.last and recomputing())
        return _Product.apply(x, self.weight, self.active, self.dim, self.own, self.through, wanted)


def train_slice(model: Decoder, parts: Sequence[Piece], own: int) -> dict[str, Tensor]:
    """Freeze what is not of slice `own`, and return what is trained, by the names of the parameters.

    Matrices that are sliced become `SlicedLinear`, which keep name and shape. The model must be on its device already.
    """
    trained = {}
    for piece in parts:
        where = piece.parameter.rpartition(".")[0]
        parameter = model.get_parameter(piece.parameter)
        if piece.of(parameter) is parameter:  # all of it, or nothing
            mine = piece.owner in (None, own)
            parameter.requires_grad_(mine)
            if mine:
                trained[piece.parameter] = parameter
        elif piece.owner == own:
            layer = SlicedLinear(model.get_submodule(where), piece)
            model.set_submodule(where, layer)
            trained[piece.parameter] = layer.active
    return trained


def detach_others(model: Decoder, kept: Sequence[int], slices: int) -> None:
    """Let input gradients of sliced MLPs pass through the slices `kept` alone (appendix D)."""
    for block in model.blocks.values():
        mlp: MLP = block.mlp
        for layer in (mlp.up, mlp.gate, mlp.down):
            if layer is not None:
                size = layer.weight.shape[layer.dim] // slices
                layer.through = tuple((i * size, (i + 1) * size) for i in kept)
