"""Partial Parameter Updates (arXiv:2509.22418): a replica trains one slice of some matrices, and all of the others.

Of M replicas, replica k trains slice k mod N (section 2.2.1; the index is inferred, any balanced one will do):

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

import fnmatch
import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowcomm.methods.streaming import layer_of
from lowcomm.model.decoder import MLP, Decoder, recomputing
from lowcomm.settings import ConfigError, whole_number

#: The dimension that is sliced, by the end of a parameter's name.
_DIMENSION: dict[str, dict[str, int]] = {
    "mlp": {"mlp.up.weight": 0, "mlp.gate.weight": 0, "mlp.down.weight": 1},
    "heads": {"attention.q.weight": 0, "attention.k.weight": 0, "attention.v.weight": 0},
    "out": {"attention.out.weight": 1},
}
#: The parts of a `Decoder` that `sliced` may name.
PARTS = (*_DIMENSION, "layers")
#: A parameter of a layer's MLP, with the layer's number: "blocks.3.mlp.up.weight".
_MLP_OF_LAYER = re.compile(r"(?:^|\.)(\d+)\.mlp\.")


@dataclass(frozen=True)
class Piece:
    """A part of a parameter: [begin, end) along `dim`, trained by the replicas of slice `owner` (None: by all).

    `shape` is that of the part, and `whole` says whether the part is all of the parameter.
    """

    parameter: str
    shape: tuple[int, ...]
    owner: int | None = None
    dim: int = 0
    begin: int = 0
    whole: bool = True

    @property
    def numel(self) -> int:
        """The number of values in the part."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """The index along `dim` at which the part ends, exclusive."""
        return self.begin + self.shape[self.dim]

    def of(self, p: Tensor) -> Tensor:
        """Return this part of the parameter `p` as a view, or `p` itself where the part is all of it."""
        return p if self.whole else p.narrow(self.dim, self.begin, self.shape[self.dim])


def dimensions(sliced: Sequence[str], names: Collection[str]) -> dict[str, int]:
    """Return the dimension along which each sliced parameter is cut, by name; `sliced` is as in `MethodConfig`.

    Raises ConfigError for an entry that is neither the name of a part of a `Decoder` nor "PATTERN:DIMENSION", or that
    matches no parameter.
    """
    found: dict[str, int] = {}
    for entry in sliced:
        if entry == "layers":
            continue
        pattern, colon, dim = entry.rpartition(":")
        ends = _DIMENSION.get(entry)
        if ends is None and not (colon and dim in ("0", "1")):
            raise ConfigError(
                f"method.sliced names {entry!r}: it must be one of {', '.join([*_DIMENSION, 'layers'])}, or"
                " PATTERN:DIMENSION with a shell pattern of parameters' names and dimension 0 (rows) or 1 (columns)"
            )
        if ends is None:
            matched = {n: int(dim) for n in names if fnmatch.fnmatchcase(n, pattern)}
        else:
            matched = {n: d for n in names for end, d in ends.items() if n.endswith(end)}
        if not matched:
            raise ConfigError(f"method.sliced names {entry!r}, which matches no parameter")
        found |= matched
    return found


def pieces(
    shapes: Mapping[str, Sequence[int]], sliced: Sequence[str], slices: int, layers: int | None = None
) -> list[Piece]:
    """Return the parts of all parameters of a model (or of a stage of one), in the order of its parameters.

    Args:
        shapes: the shapes of the parameters, by name.
        sliced, slices: as in `MethodConfig`.
        layers: the number of layers of the whole model, where `shapes` are a stage's; only for sliced = layers.

    Raises ConfigError where slices would be unequal, or an entry of `sliced` matches nothing that can be cut.
    """
    layers = layers or max(layer_of(shapes).values(), default=0) + 1
    return list(_pieces(tuple((name, tuple(shape)) for name, shape in shapes.items()), tuple(sliced), slices, layers))


@functools.lru_cache(maxsize=256)
def _pieces(
    shapes: tuple[tuple[str, tuple[int, ...]], ...], sliced: tuple[str, ...], slices: int, layers: int
) -> list[Piece]:
    found, cut = [], dimensions(sliced, [name for name, _ in shapes])
    if "layers" in sliced and not any(_MLP_OF_LAYER.search(name) for name, _ in shapes):
        raise ConfigError("method.sliced names 'layers', which matches no parameter: none is of a layer's `mlp`")
    if "layers" in sliced and layers % slices:
        raise ConfigError(f"method.slices = {slices} does not divide model.layers = {layers}")
    for name, shape in shapes:
        if (dim := cut.get(name)) is not None:
            if dim >= len(shape):
                raise ConfigError(f"method.sliced cuts {name} of shape {shape} along dimension {dim}, which it has not")
            size, rest = divmod(shape[dim], slices)
            if rest:
                raise ConfigError(
                    f"method.slices = {slices} does not divide {name} of shape {shape} along dimension {dim}"
                )
            part = (*shape[:dim], size, *shape[dim + 1 :])
            found += [Piece(name, part, i, dim, i * size, slices == 1) for i in range(slices)]
        elif "layers" in sliced and (layer := _MLP_OF_LAYER.search(name)):
            found.append(Piece(name, shape, int(layer[1]) * slices // layers))
        else:
            found.append(Piece(name, shape))
    return found


#: [begin, end) of hidden units.
Range = tuple[int, int]


class _Product(torch.autograd.Function):
    """The product y = W x, with gradients with respect to one slice of W, and to x through W or some of its slices.

    `active` is the slice `own` of W along `dim`, and `through` holds the slices' ranges; () for all of W. Where y is
    not `wanted` its values are left uninitialised.
    """

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
    """A linear layer that trains only the rows (dim 0) or the columns (dim 1) [begin, end) of its weight [out, in].

    A bias, where there is one, is trained whole.

    Attributes:
        weight: the whole weight, without a gradient.
        active: the slice, a leaf of the graph that shares the weight's memory: [end - begin, in] or, transposed,
            [end - begin, out]. It is what the inner optimizer updates.
        through: ranges along `dim` through which the gradient with respect to the input passes; () for all.
        last: whether it is the last product of a block, whose result is not needed when the block is recomputed. (For
            its own products torch finds that out by itself.)
    """

    def __init__(self, linear: nn.Linear, piece: Piece):
        super().__init__()
        self.dim, self.own, self.through = piece.dim, (piece.begin, piece.end), ()
        self.last = piece.parameter.endswith("mlp.down.weight")
        weight = linear.weight.detach()
        stored = (weight.t() if self.dim else weight).contiguous()
        self.weight = nn.Parameter(stored.t() if self.dim else stored, requires_grad=False)
        self.active = stored[piece.begin : piece.end].requires_grad_()
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        wanted = not (self.last and recomputing())
        y = _Product.apply(x, self.weight, self.active, self.dim, self.own, self.through, wanted)
        return y if self.bias is None else y + self.bias


def train_slice(model: nn.Module, parts: Sequence[Piece], own: int) -> dict[str, Tensor]:
    """Freeze what is not of slice `own`, and return what is trained, by the names of the parameters.

    The model is changed in place: linear layers whose weight is sliced become `SlicedLinear`, in which the parameter
    keeps its name and shape. The model must be on its device already. Raises ConfigError where layers share what is to
    be sliced, or where it is not the weight of an `nn.Linear`; the model is as it was then.
    """
    trained, names = {}, {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for piece in parts:
        if piece.whole:
            continue
        where, _, leaf = piece.parameter.rpartition(".")
        if len(same := names[model.get_parameter(piece.parameter)]) > 1:
            raise ConfigError(f"{' and '.join(same)} are one parameter: what layers share cannot be sliced")
        if not isinstance(linear := model.get_submodule(where), nn.Linear):
            raise ConfigError(f"method.sliced: {where} is a {type(linear).__name__}; only nn.Linear can be sliced")
        if leaf != "weight":
            raise ConfigError(f"method.sliced: {piece.parameter} is no weight, and is trained whole: end it in .weight")
    for piece in parts:
        parameter = model.get_parameter(piece.parameter)
        if piece.whole:
            mine = piece.owner in (None, own)
            parameter.requires_grad_(mine)
            if mine:
                trained[piece.parameter] = parameter
        elif piece.owner == own:
            where = piece.parameter.rpartition(".")[0]
            layer = SlicedLinear(model.get_submodule(where), piece)
            model.set_submodule(where, layer)
            trained[piece.parameter] = layer.active
            if layer.bias is not None:
                trained[f"{where}.bias"] = layer.bias
    return trained


def slice_parameters(model: nn.Module, replica: int, sliced: Sequence[str], slices: int) -> dict[str, Tensor]:
    """Let a replica train one of `slices` slices of some matrices, and all of the rest, in any model.

    replica: its number (`World.replica`, or a slot); replica k trains slice k mod `slices`. sliced: "PATTERN:DIMENSION"
    for each sort of linear layer, e.g. ["*.up_proj.weight:0", "*.down_proj.weight:1"], or the parts of a `Decoder`
    ("mlp"). Returns what is trained, by the names of the parameters: give it to the inner optimizer, and the same
    `sliced` and `slices`, with trainable="slice", to `LocalUpdates`. The model is changed in place, and must be on its
    device already. Raises ConfigError where a dimension does not divide into the slices, where an entry of `sliced`
    matches nothing, where layers share what is to be sliced, or where that is not the weight of an `nn.Linear`.
    """
    whole_number("slices", slices, at_least=1)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return train_slice(model, pieces(shapes, sliced, slices), replica % slices)


def detach_others(model: Decoder, kept: Sequence[int], slices: int) -> None:
    """Let the input gradients of a model's sliced MLPs pass through the slices numbered `kept` alone (appendix D)."""
    for block in model.blocks.values():
        mlp: MLP = block.mlp
        for layer in (mlp.up, mlp.gate, mlp.down):
            if layer is not None:
                size = layer.weight.shape[layer.dim] // slices
                layer.through = tuple((i * size, (i + 1) * size) for i in kept)
