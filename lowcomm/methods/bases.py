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

Both public codes keep as many values of each tile; here a codec takes a share of each 4,096 coordinates as they come,
which is the same for tiles of 64 x 64. Of smaller ones it is the larger of several tiles together.

Each member turns the mean back by itself, so replicas stay equal to the last bit where their machines round alike.

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
    """A change of coordinates that keeps lengths, of parts of parameters one after the other."""

    @abstractmethod
    def into(self, flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> Tensor:
        """Return values [n] in this basis; `shapes` are of the parts, in order."""

    @abstractmethod
    def back(self, flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> Tensor:
        """The inverse of `into`."""


class Values(Basis):
    """Values as they lie."""

    names = ("values",)

    def into(self, flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> Tensor:
        return flat

    def back(self, flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> Tensor:
        return flat


class Tiles(Basis):
    """Tiles of matrices, each in one piece; vectors as they are, in parts as long as a tile's side."""

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
        """The coordinates of tiles [..., n, m], of the same shape."""
        return tiles

    def to_tiles(self, coordinates: Tensor) -> Tensor:
        """The inverse of `of_tiles`."""
        return coordinates


class Cosines(Tiles):
    """The cosine transform of each tile; of vectors, of each part as long as a tile's side."""

    names = ("cosines",)

    def of_tiles(self, tiles: Tensor) -> Tensor:
        rows, columns = (cosines(side, tiles.device) for side in tiles.shape[-2:])
        return rows @ tiles @ columns.T

    def to_tiles(self, coordinates: Tensor) -> Tensor:
        rows, columns = (cosines(side, coordinates.device) for side in coordinates.shape[-2:])
        return rows.T @ coordinates @ columns


@functools.cache
def tile_side(size: int) -> int:
    """Return the greatest divisor of a size that is at most `SIDE`."""
    return max(d for d in range(1, min(size, SIDE) + 1) if size % d == 0)


@functools.lru_cache(maxsize=4 * SIDE)
def cosines(size: int, device: torch.device) -> Tensor:
    """Return the orthonormal matrix [size, size] of the DCT-II."""
    k, j = torch.arange(size, dtype=torch.float64)[:, None], torch.arange(size, dtype=torch.float64)
    matrix = math.sqrt(2 / size) * torch.cos(math.pi * k * (2 * j + 1) / (2 * size))
    matrix[0] /= math.sqrt(2)
    return matrix.float().to(device)


def _parts(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[Tensor, int, int, int, int]]:
    """Yield each part with its tiles: how many lie below each other, of how many rows, and the same of columns.

    A part counts as a matrix with its first dimension's rows, and a vector as one row.
    """
    for part, shape in zip(flat.split([math.prod(shape) for shape in shapes]), shapes, strict=True):
        rows = shape[0] if len(shape) > 1 else 1
        columns = part.numel() // rows
        n, m = tile_side(rows), tile_side(columns)
        yield part, rows // n, n, columns // m, m
