"""The passes of a step as a CUDA graph, so that small models do not wait for Python between kernels.

In a model of few parameters a kernel takes less time than its launch, and replicas in threads share one interpreter.
Captured once and replayed at each step, the kernels of the forward and the backward pass follow each other without it.
What comes after them (exchange of gradients, clipping, the inner optimizer, the engine) is as it was, so that all
methods and optimizers are served. Losses and gradients are those of the same kernels launched one by one.

A graph reads and writes the same memory in each step: tokens are copied into its own, parameters are changed in place
(by all that is here), and gradients, which the optimizer lets go of, are put back where they are looked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowcomm.methods.pipeline import WholeModel

#: A process may capture one graph at a time.
_CAPTURING = threading.Lock()
#: How often the passes run before they are captured, so that kernels are compiled, loaded and chosen by then.
_WARM_UP = 3


class Captured(NamedTuple):
    """A CUDA graph, and the memory that each replay fills anew.

    `result` is what the passes return; `gradients` pairs each leaf that has a gradient with that gradient.
    """

    graph: torch.cuda.CUDAGraph
    result: Tensor
    gradients: list[tuple[Tensor, Tensor]]


def capture(passes: Callable[[], Tensor], leaves: Sequence[Tensor], device: torch.device) -> Captured:
    """Capture forward and backward passes on a GPU, after `_WARM_UP` calls that are not captured.

    The gradients of `leaves` are those of the captured passes alone: whatever was in `.grad` before is dropped.
    """

    def forget() -> None:
        for leaf in leaves:
            leaf.grad = None

    with torch.cuda.device(device):
        # Streams of this priority are another set than those that messages and outer state travel on.
        stream, current = torch.cuda.Stream(priority=-1), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                forget()
                passes()
            forget()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # The backward pass is on a thread of autograd's own.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            result = passes()
    return Captured(graph, result, [(leaf, leaf.grad) for leaf in leaves if leaf.grad is not None])


class CapturedModel(WholeModel):
    """A replica of one stage, with one micro-batch per step, whose passes are captured at its first step.

    Replicas in threads of one process capture one after the other, and none trains before all have done so, as nobody
    else may use a GPU meanwhile.

    Args:
        leaves: all tensors whose gradients are read after the passes.
        args, more: as for `WholeModel`.
    """

    _captured: Captured | None = None

    def __init__(self, *args: Any, leaves: Sequence[Tensor], **more: Any):
        super().__init__(*args, **more)
        self.leaves = leaves

    def train(self, step: int, batch: Callable[[int], Tensor]) -> list[Tensor]:
        """Run the forward and backward passes of one step, as `Pipeline.train` does; the first call captures them."""
        tokens = batch(self.world.replica)
        if self._captured is None:
            self._tokens = tokens.clone()
            self._meet()
            with _CAPTURING:
                self._captured = capture(lambda: self.both_passes(self._tokens), self.leaves, tokens.device)
            self._meet()
        self._tokens.copy_(tokens)
        self._captured.graph.replay()
        for leaf, gradient in self._captured.gradients:
            leaf.grad = gradient
        self.watch()
        return [self._captured.result.clone()]

    def _meet(self) -> None:
        if self.world.transport.in_one_process:
            self.world.tell("")
