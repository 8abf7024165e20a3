"""Outer state: flat fp32 tensors beside the model, on the accelerator or in the CPU's memory.

Outer state is the parameters last agreed, the outer optimizer's buffers and, with error feedback, the residual; and
what parameters of less precision than fp32 cannot hold of the mixture that they begin a round with. It may be kept off
the accelerator (Streaming DiLoCo, section 2.5): then only what a turn needs is on the device, from shortly before the
turn until it is over. NoLoCo's mean of the next peers' slow weights is received on the device and stays there until its
turn.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

import torch
from torch import Tensor


def flatten(tensors: list[Tensor]) -> Tensor:
    """Return the values of all tensors, in order, as one contiguous flat copy without a gradient."""
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def unflatten_into(flat: Tensor, tensors: list[Tensor]) -> None:
    """Overwrite `tensors` in place by the values of a flat tensor, in order: the inverse of `flatten`."""
    parts = flat.to(tensors[0].device).split([t.numel() for t in tensors])
    with torch.no_grad():
        torch._foreach_copy_(tensors, [p.view(t.shape) for p, t in zip(parts, tensors, strict=True)])


@functools.cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that copies outer state: one per GPU, so that memory that one fragment frees serves another."""
    return torch.cuda.Stream(device)


class OuterState:
    """Named flat tensors that are kept on the device or, with `offload`, in the CPU's memory and copied when used.

    With `offload` the tensors are at home in the CPU's memory (pinned, for a GPU), a stream of its own copies them, and
    `resident` tells what is held on the device. A CPU that is the device too keeps copies all the same, so that memory
    can be counted there.
    """

    def __init__(self, values: dict[str, Tensor], *, offload: bool):
        self.names = tuple(values)
        self.device = values[self.names[0]].device
        on_gpu = self.device.type == "cuda"
        self._stream = _copying(self.device) if offload and on_gpu else None
        self._ready: torch.cuda.Event | None = None
        self._here = values
        if offload:
            self._home = {n: torch.empty_like(v, device="cpu", pin_memory=on_gpu).copy_(v) for n, v in values.items()}
            self._here = {}
        else:
            self._home = self._here

    @property
    def resident(self) -> int:
        """The number of bytes that are held on the device."""
        return sum(v.numel() * v.element_size() for v in self._here.values())

    def fetch(self, *names: str) -> None:
        """Begin to copy to the device those of the named tensors that are not there yet."""
        missing = [n for n in names if n not in self._here]
        if not missing:
            return
        with torch.cuda.stream(self._stream):
            for name in missing:
                self._here[name] = torch.empty_like(self._home[name], device=self.device)
                self._here[name].copy_(self._home[name], non_blocking=True)
        if self._stream is not None:
            self._ready = self._stream.record_event()

    def use(self, *names: str) -> list[Tensor]:
        """Return the named tensors on the device, ready for the current stream; they are valid until `release`."""
        self.fetch(*names)
        if self._ready is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self._ready)
            for name in names:
                self._here[name].record_stream(current)
        return [self._here[n] for n in names]

    def release(self, *, changed: Collection[str]) -> None:
        """Let go of all copies on the device; those named in `changed` are first written home."""
        if self._here is self._home:
            return
        if changed:
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                for name in self._here.keys() & set(changed):
                    self._home[name].copy_(self._here[name], non_blocking=True)
        self._here = {}

    def read(self) -> dict[str, Tensor]:
        """Return all tensors by name, where they are at home, once copying is over. They must not be changed."""
        if self._stream is not None:
            self._stream.synchronize()
        return self._home

    def load(self, values: dict[str, Tensor]) -> None:
        """Overwrite all tensors by those of the same names in `values`, which must have the same shapes."""
        for name, value in self.read().items():
            value.copy_(values[name])
        if self._here is not self._home:
            self._here = {}
