"""Bases: in which coordinates outer gradients are encoded and averaged.

A sparse codec keeps the largest of what it sees, so it matters in which basis it sees it. DeMo (Peng et al., 2024,
arXiv:2411.19870) cuts matrices into tiles of 64 x 64 and sends the largest coefficients of their cosine transform;
SparseLoCo (arXiv:2508.15706) sends the largest values of such tiles. All bases here are orthonormal, so norms, means
and what a codec loses are the same in each; which values are kept is not.

    n, m        of a matrix' sides the greatest divisors that are at most 64, as in DeMo's public code; of a prime
                above 64 that is 1, and tiles are as thin
    values      as they lie
    tiles       each tile [n, m] in one piece, row by row
    cosines     of each tile T: C_n T C_m^T, with the orthonormal DCT-II
                C_n[k, j] = sqrt(2 / n) cos(pi k (2 j + 1) / 2 n), its first row divided by sqrt(2)

Both public codes keep the same number of values of each tile; here a codec keeps a share of each chunk of 4,096
coordinates of a parameter, which is the same for tiles of 64 x 64. Where tiles are smaller, several of them lie in one
chunk, and the largest values of them all are kept.

Each member transforms the mean back by itself, so replicas stay equal to the last bit where their machines round alike.

To add one, write a file in this folder with a class that derives from `Basis` and has `names`.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lowcomm.choices import Choice

#: The longest side of a tile.
SIDE = 64


class Basis(Choice, ABC):
    """An orthonormal change of coordinates, of the values of parts of parameters that lie one after the other."""

    @abstractmethod
    def into(self, flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> Tensor:
        """Return flat values [n] as coordinates [n] in this basis; `shapes` are those of the parts, in order."""

    @abstractmethod
    def back(self, flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> Tensor:
        """Return the flat values [n] that have the coordinates `flat` [n]: the inverse of `into`."""


class Values(Basis):
    """The basis that changes nothing: values as they lie."""

    names = ("values",)

    def into(self, flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> Tensor:
        return flat

    def back(self, flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> Tensor:
        return flat


class Tiles(Basis):
    """The values of matrices tile by tile, each tile in one piece; those of vectors as they lie."""

    names = ("tiles",)

    def into(self, flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> Tensor:
        found = []
        for part, rows, n, columns, m in _parts(flat, shapes):
            tiles = part.view(rows, n, columns, m).transpose(1, 2)
            found.append(self.of_tiles(tiles).reshape(-1))
        return torch.cat(found)

    def back(self, flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> Tensor:
        found = []
        for part, rows, n, columns, m in _parts(flat, shapes):
            tiles = self.to_tiles(part.view(rows, columns, n, m))
            found.append(tiles.transpose(1, 2).reshape(-1))
        return torch.cat(found)

    def of_tiles(self, tiles: Tensor) -> Tensor:
        """Return the coordinates of tiles [..., n, m], in a tensor of the same shape; here they are the values."""
        return tiles

    def to_tiles(self, coordinates: Tensor) -> Tensor:
        """Return the tiles [..., n, m] that have these coordinates: the inverse of `of_tiles`."""
        return coordinates


class Cosines(Tiles):
    """The cosine transform of each tile of a matrix, and of each part of a vector that is as long as a tile's side."""

    names = ("cosines",)

    def of_tiles(self, tiles: Tensor) -> Tensor:
        rows, columns = (cosines(side, tiles.device) for side in tiles.shape[-2:])
        return rows @ tiles @ columns.T

    def to_tiles(self, coordinates: Tensor) -> Tensor:
        rows, columns = (cosines(side, coordinates.device) for side in coordinates.shape[-2:])
        return rows.T @ coordinates @ columns


@functools.cache
def tile_side(size: int) -> int:
    """Return the greatest divisor of `size` that is at most `SIDE`."""
    return max(d for d in range(1, min(size, SIDE) + 1) if size % d == 0)


@functools.lru_cache(maxsize=4 * SIDE)
def cosines(size: int, device: torch.device) -> Tensor:
    """Return the orthonormal matrix [size, size] of the DCT-II, in fp32 on `device`."""
    k, j = torch.arange(size, dtype=torch.float64)[:, None], torch.arange(size, dtype=torch.float64)
    matrix = math.sqrt(2 / size) * torch.cos(math.pi * k * (2 * j + 1) / (2 * size))
    matrix[0] /= math.sqrt(2)
    return matrix.float().to(device)


def _parts(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[Tensor, int, int, int, int]]:
    """Yield each part with its tiles: how many lie below each other, of how many rows, and the same of columns.

    A matrix has the rows of its first dimension, and a vector is one row.
    """
    for part, shape in zip(flat.split([math.prod(shape) for shape in shapes]), shapes, strict=True):
        if not part.numel():  # which has no tiles
            continue
        rows = shape[0] if len(shape) > 1 else 1
        columns = part.numel() // rows
        n, m = tile_side(rows), tile_side(columns)
        yield part, rows // n, n, columns // m, m
