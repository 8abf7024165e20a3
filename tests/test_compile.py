"""Compiled and captured steps: what is done at once of every custom product trains as it does one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowcomm.experiment import trainer
from lowcomm.experiment.run_folder import RunFolder, read_metrics
from lowcomm.experiment.train import train_in_threads
from lowcomm.methods import captured
from tests.conftest import small_run

SLICED = {"sync_every_steps": 3, "trainable": "slice", "slices": 2, "sliced": ["mlp", "heads"]}
SUBSPACE = {"boundary": {"kind": "subspace", "rank": 4, "update_every_steps": 2, "update_lr": 1.0}}
BY_COORDINATES = {"boundary": SUBSPACE["boundary"] | {"mode": "reparametrised"}}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own capture does
@pytest.mark.parametrize(
    ("run", "method", "stages", "recompute"),
    [
        ("data_parallel", {}, 1, False),
        ("data_parallel", {}, 1, True),
        ("data_parallel", SUBSPACE, 1, False),
        ("data_parallel", BY_COORDINATES, 1, True),
        ("diloco_m2", SLICED, 1, True),
        ("data_parallel", {}, 2, False),
        ("data_parallel", SUBSPACE, 2, True),
    ],
    ids=[
        "dense",
        "dense, recomputed",
        "projected",
        "reparametrised, recomputed",
        "sliced, recomputed",
        "pipeline",
        "projected pipeline, recomputed",
    ],
)
def test_a_compiled_run_is_the_run(
    run: str,
    method: dict[str, Any],
    stages: int,
    recompute: bool,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Captured and differentiated ahead of time, then run as it is (aot_eager): no C++ compiler is needed for that."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    found = []
    for compiled in (False, True):
        replicas = 2 if run.startswith("diloco") else 1
        train = {"steps": 6, "compile": compiled, "recompute": recompute, "lr": 0.003, "accumulation": stages}
        config = small_run(run, replicas=replicas, stages=stages, train=train, method=method)
        folder = RunFolder.beside(tmp_path / str(compiled))
        train_in_threads(config, corpus, folder)
        rows = read_metrics(folder.losses(config.to_dict()))
        found.append([r["loss"] for r in rows] + [rows[-1]["val_loss"]])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_every_rank_on_threads_is_compiled(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To train and to evaluate; torch counts what all ranks compile of a function, and gives up beyond a limit."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    config = small_run("diloco_m2", replicas=6, train={"steps": 6, "compile": True, "global_batch": 6})
    train_in_threads(config, corpus, RunFolder.beside(tmp_path))
    assert len(graphs) == 2 * 6


class Replayed:
    """A stand-in for a CUDA graph on the CPU, whose replay writes what its passes find into the first ones' memory."""

    def __init__(self, passes: Callable[[], Tensor], leaves: Sequence[Tensor]):
        self.passes, self.leaves = passes, leaves
        self.memory = [leaf.data_ptr() for leaf in leaves]
        self.result = self._anew().clone()
        self.gradients = [(leaf, leaf.grad) for leaf in leaves if leaf.grad is not None]

    def _anew(self) -> Tensor:
        for leaf in self.leaves:
            leaf.grad = None
        return self.passes()

    def replay(self) -> None:
        assert self.memory == [leaf.data_ptr() for leaf in self.leaves]
        self.result.copy_(self._anew())
        for leaf, gradient in self.gradients:
            gradient.copy_(leaf.grad)
        for leaf in self.leaves:
            leaf.grad = None


@pytest.mark.parametrize(
    ("run", "method", "optimizer"),
    [
        ("data_parallel", {}, "muon"),
        ("data_parallel", SUBSPACE, "adamw"),
        ("diloco_m2", SLICED, "adamw"),
        ("diloco_m2", {"sync_every_steps": 3, "overlap_steps": [1], "mixing": 0.5, "codec": "e3m0"}, "adamw"),
    ],
    ids=["muon", "projected", "sliced", "overlapped"],
)
def test_a_captured_run_is_the_run(
    run: str,
    method: dict[str, Any],
    optimizer: str,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, as the same kernels run on other memory; the graph is one of the CPU's."""

    def on_cpu(passes: Callable[[], Tensor], leaves: Sequence[Tensor], device: torch.device) -> captured.Captured:
        graph = Replayed(passes, leaves)
        return captured.Captured(graph, graph.result, graph.gradients)

    monkeypatch.setattr(captured, "capture", on_cpu)
    replicas = 2 if run.startswith("diloco") else 1
    train = {"steps": 7, "lr": 0.003, "optimizer": optimizer} | ({"muon_lr": 0.01} if optimizer == "muon" else {})
    config = small_run(run, replicas=replicas, train=train, method=method)
    assert not trainer.may_be_captured(config, torch.device("cpu"))
    assert trainer.may_be_captured(config, torch.device("cuda"))
    found = []
    for is_captured in (False, True):
        monkeypatch.setattr(trainer, "may_be_captured", lambda *_, now=is_captured: now)
        folder = RunFolder.beside(tmp_path / str(is_captured))
        train_in_threads(config, corpus, folder)
        found.append([row | {"seconds": 0} for row in read_metrics(folder.losses(config.to_dict()))])
    assert found[1] == found[0]


def test_what_changes_from_step_to_step_is_not_captured() -> None:
    gpu = torch.device("cuda")
    for train, method in (
        ({"recompute": True}, {}),
        ({"accumulation": 2}, {}),
        ({"cuda_graph": False}, {}),
        ({}, {"trainable": "next_fragment", "fragments": "strided", "layers_per_fragment": 1}),
        ({}, SLICED | {"input_gradients": "own_and_random"}),
    ):
        assert not trainer.may_be_captured(small_run("diloco_m2", replicas=2, train=train, method=method), gpu)
