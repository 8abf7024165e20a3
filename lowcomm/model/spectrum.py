"""How many dimensions a matrix uses: rank collapse and where to find it (Protocol Models, section 4.1, appendix G).

    stable rank      sum_i s_i^2 / max_i s_i^2 of the singular values s (section 4.1): at most the rank, and smooth
    effective rank   exp of the entropy of s_i / sum_j s_j (Roy and Vetterli, 2007)

Both are 1 for a matrix of rank one and n for an orthogonal one of n rows; a Gaussian one of m x n (m <= n) has a stable
rank near n m / (sqrt m + sqrt n)^2, so a quarter of n where it is square: `gaussian_stable_rank`. It is what a matrix
has before it is trained.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lowcomm.model.decoder import Decoder

#: What writes into the residual stream: W_p1 and W_p2, as Llama, Qwen, OLMo and Phi-3 name it, then Phi-1 and 2.
_PUBLIC = {
    "self_attn.o_proj": "attention.out",
    "mlp.down_proj": "mlp.down",
    "self_attn.dense": "attention.out",
    "mlp.fc2": "mlp.down",
}
_NAME = re.compile(rf"(?:^|\.)layers\.(\d+)\.({'|'.join(map(re.escape, _PUBLIC))})\.weight$")
_OWN = re.compile(r"^blocks\.(\d+)\.(attention\.out|mlp\.down)\.weight$")


def singular_values(w: Tensor) -> Tensor:
    """Return the singular values of a matrix in descending order, in fp64.

    They are computed from the eigenvalues of the smaller of w w^T and w^T w.
    """
    w = w.detach().double()
    small = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
    return torch.linalg.eigvalsh(small).clamp_min(0).sqrt().flip(0)


def stable_rank(s: Tensor) -> float:
    """Return the stable rank of a matrix with singular values s; NaN where all of them are zero."""
    return float(s.square().sum() / s.max().square())


def effective_rank(s: Tensor) -> float:
    """Return the effective rank of a matrix with singular values s; NaN where all of them are zero."""
    p = s / s.sum()
    return float(torch.special.entr(p).sum().exp())


def gaussian_stable_rank(rows: int, columns: int) -> float:
    """Return the stable rank of a large Gaussian matrix, n m / (sqrt n + sqrt m)^2.

    Its largest singular value is sqrt n + sqrt m.
    """
    return rows * columns / (math.sqrt(rows) + math.sqrt(columns)) ** 2


def projections(named: dict[str, Tensor]) -> Iterator[tuple[int, str, Tensor]]:
    """Yield (layer, "attention.out" or "mlp.down", matrix) for each matrix that writes into the stream of a `Decoder`.

    named: the decoder's parameters, or their gradients, by name.
    """
    for name, w in named.items():
        if found := _OWN.match(name):
            yield int(found[1]), found[2], w


def stable_ranks(named: dict[str, Tensor], what: str) -> dict[str, float]:
    """Return the stable ranks of the matrices of `projections`, to be logged, by "<what>/<layer>/<matrix>"."""
    return {f"{what}/{layer}/{matrix}": stable_rank(singular_values(w)) for layer, matrix, w in projections(named)}


@torch.no_grad()
def activation_ranks(model: Decoder, ids_BT: Tensor) -> list[dict[str, float]]:
    """Return, for each layer, the stable ranks of its output [B T, D], for token ids [B, T].

    They are those of the output as it is ("activations"), and less the token embedding (Eq. 6, "less_embedding"): with
    a constraint, less the fixed part of the embedding, as the rest lies in the subspace.
    """
    embedding = model.embed(ids_BT) if model.constraint is None else model.fixed_VD[ids_BT]
    return [
        {
            "activations": stable_rank(singular_values(x.flatten(0, 1))),
            "less_embedding": stable_rank(singular_values((x - embedding).flatten(0, 1))),
        }
        for x in _outputs(model, ids_BT)
    ]


@torch.no_grad()
def energy_outside(model: Decoder, ids_BT: Tensor) -> list[float]:
    """Return the share of each layer's output, in squares, that lies outside the model's subspace.

    It is what the fixed part of the embedding adds there (section 4.3.1): where it is next to nothing, the stream has
    no more than the subspace's dimensions, and a layer hardly sees which token it is at.
    """
    basis_DR = model.basis_DR
    return [float((x - x @ basis_DR @ basis_DR.T).square().sum() / x.square().sum()) for x in _outputs(model, ids_BT)]


def _outputs(model: Decoder, ids_BT: Tensor) -> Iterator[Tensor]:
    """Yield the outputs [B, T, D] of all layers, in order."""
    T, x = ids_BT.shape[1], model.embed(ids_BT)
    for name, block in model.blocks.items():
        yield (x := block(model.crossed(int(name), x, ids_BT), model.cos_TC[:T], model.sin_TC[:T], model.basis_DR))


def checkpoint_projections(folder: Path) -> Iterator[tuple[int, str, Tensor]]:
    """Yield (layer, "attention.out" or "mlp.down", matrix) of a checkpoint, with one matrix in memory at a time.

    folder: safetensors as Hugging Face has them, in one file or in many with an index: of a Llama, Qwen, OLMo or Phi
    model, or of our own. Raises ValueError where there is no such matrix, or a file is missing or corrupt.
    """
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else None
    files = sorted(folder / n for n in names) if names else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors: give the folder of a checkpoint")
    found = []
    for file in files:
        if not file.exists():
            raise ValueError(f"{index} names {file.name}, which is missing")
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (no dictionary)
                    if match := _NAME.search(name):
                        found.append((int(match[1]), _PUBLIC[match[2]], file, name))
                    elif match := _OWN.match(name):
                        found.append((int(match[1]), match[2], file, name))
        except SafetensorError as error:
            raise ValueError(f"{file} is no readable safetensors file: {error}") from None
    if not found:
        known = ", ".join([*_PUBLIC, *dict.fromkeys(_PUBLIC.values())])
        raise ValueError(f"{folder} holds no projection matrix of a known name ({known})")
    for layer, matrix, file, name in sorted(found, key=lambda f: f[:2]):
        with safe_open(file, framework="pt") as tensors:
            yield layer, matrix, tensors.get_tensor(name)
