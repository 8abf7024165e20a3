"""A pipeline: the decoder cut into stages, micro-batches in GPipe's order (Huang et al., 2019) over World's messages.

Each stage runs the forward passes of all micro-batches, then their backward passes. Activations go to the replica of
the next stage that the route names, their gradients come back the same way; both are sent while the next micro-batch
is computed, and received into buffers that were posted at the beginning; the boundary decides what a message holds of
them (`boundary`). The last stage draws the targets of the tokens that come by from the data, which are a pure function
of step and replica, so that no targets travel (nor ids, where a boundary has them drawn too). It goes through
its head and back at once, micro-batch by micro-batch, and keeps the gradient of the residual stream [B, T, D] in place
of logits [B, T, V].

With S equal stages and M micro-batches a step takes (M + S - 1) / M times what its stages compute: the share
(S - 1) / (M + S - 1) of it is the bubble. The head's way back, among the forward passes, puts off the first gradients
but not the last. So a step is no longer for it, unless what gradients meet next (a message, another stage's way back)
takes longer than the last stage's way back without the head.

torch.distributed.pipelining has the same schedule (ScheduleGPipe), between fixed neighbours of a process group. A route
that changes with each micro-batch, ranks in threads, and the ledger's and the link's hold on every message would all
have to go around it; what would be left of it is the loop below.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lowcomm.comm.axis import Handle
from lowcomm.comm.world import World
from lowcomm.methods.boundary import Boundary
from lowcomm.methods.routing import Route, fixed_route, random_route

Routing = Literal["fixed", "random_step", "random_micro_batch"]
ACTIVATIONS, GRADIENTS = "activations", "activation gradients"


def bubble(stages: int, micro_batches: int) -> float:
    """Return the share of a step for which a stage stands still, (S - 1) / (M + S - 1)."""
    return (stages - 1) / (micro_batches + stages - 1)


class WholeModel:
    """The passes of a replica of one stage, which takes its micro-batches one after the other and sends nothing.

    Args:
        losses: the model's `losses`, compiled or not, which returns (loss, cross-entropy) of (ids, targets).
        autocast, micro_batches, watch: as for `Pipeline`.
    """

    def __init__(
        self,
        world: World,
        *,
        losses: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        autocast: Callable[[], contextlib.AbstractContextManager],
        micro_batches: int,
        watch: Callable[[], None],
    ):
        self.world, self.losses, self.autocast = world, losses, autocast
        self.micro_batches, self.watch = micro_batches, watch

    def train(self, step: int, batch: Callable[[int], Tensor]) -> list[Tensor]:
        """Run the forward and backward passes of one step, as `Pipeline.train` does."""
        entropies = []
        for part in batch(self.world.replica).chunk(self.micro_batches):
            entropies.append(self.both_passes(part))
            self.watch()
        return entropies

    def both_passes(self, tokens: Tensor) -> Tensor:
        """Run both passes of a micro-batch of tokens [B, T + 1], and return its cross-entropy in nats per token."""
        with self.autocast():
            loss, entropy = self.losses(tokens[:, :-1], tokens[:, 1:])
        (loss / self.micro_batches if self.micro_batches > 1 else loss).backward()
        return entropy.detach()

    @torch.no_grad()
    def evaluate(self, tokens: Tensor) -> Tensor | None:
        """Return the mean cross-entropy of tokens [B, T + 1], in nats per token."""
        with self.autocast():
            return self.losses(tokens[:, :-1], tokens[:, 1:])[1]

    def sent_bytes(self, steps: int, sequences: int, tokens: int) -> dict[str, int]:
        """Return {}, as a replica of one stage sends nothing; arguments as for `Pipeline.sent_bytes`."""
        return {}

    @property
    def errors(self) -> dict[str, Tensor]:
        """Return {}, as there is no boundary that keeps errors from step to step."""
        return {}


class Pipeline:
    """The passes of this rank's stage of a pipeline.

    Args:
        boundary: writes and reads the messages between stages.
        world: the ranks; its stage and replica are this rank's place.
        hidden: the model's `hidden`, compiled or not, which returns the residual stream at the stage's end.
        head_losses: the model's `head_losses`, compiled or not, which returns (loss, cross-entropy) of that stream at
            the last stage and of the targets.
        autocast: returns the context of the forward passes.
        micro_batches: M, the number of micro-batches that a replica's batch splits into.
        routing: "fixed", or a random route that is drawn anew for each step or for each micro-batch.
        seed: decides random routes.
        watch: called after each backward pass through the stage's layers.
        evaluating: the boundary where the model is evaluated; None: the same as in training.
    """

    def __init__(
        self,
        boundary: Boundary,
        world: World,
        *,
        hidden: Callable[[Tensor], Tensor],
        head_losses: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        autocast: Callable[[], contextlib.AbstractContextManager],
        micro_batches: int,
        routing: Routing,
        seed: int,
        watch: Callable[[], None],
        evaluating: Boundary | None = None,
    ):
        self.watch = watch
        self.boundary, self.evaluating, self.world = boundary, evaluating or boundary, world
        self.hidden, self.head_losses, self.autocast = hidden, head_losses, autocast
        self.micro_batches, self.routing, self.seed = micro_batches, routing, seed
        self.first, self.last = world.stage == 0, world.stage == world.stages - 1

    def routes(self, step: int) -> list[Route]:
        """Return the route of each micro-batch of a step, in order."""
        stages, replicas = self.world.stages, self.world.replicas
        if self.routing == "fixed":
            return [fixed_route(stages, replicas)] * self.micro_batches
        if self.routing == "random_step":
            return [random_route(self.seed, step, 0, stages, replicas)] * self.micro_batches
        return [random_route(self.seed, step, m, stages, replicas) for m in range(self.micro_batches)]

    def _before(self, route: Route) -> int:
        """Return the rank that precedes this one on a route."""
        replicas, stage = self.world.replicas, self.world.stage
        return (stage - 1) * replicas + route.before(stage, self.world.replica)

    def _after(self, route: Route) -> int:
        """Return the rank that follows this one on a route."""
        replicas, stage = self.world.replicas, self.world.stage
        return (stage + 1) * replicas + route.after(stage, self.world.replica)

    def _send(self, rank: int, message: Tensor, purpose: str) -> Handle:
        return self.world.send_async(message, rank, purpose=purpose, axis="route")

    def _expect(self, rank: int, nbytes: int, purpose: str) -> Handle:
        like = torch.empty(nbytes, dtype=torch.uint8, device=self.world.device)
        return self.world.recv_async(rank, purpose=purpose, axis="route", like=like)

    def train(self, step: int, batch: Callable[[int], Tensor]) -> list[Tensor]:
        """Run the passes of one step, and add the gradients of the mean loss of its micro-batches to `.grad`.

        `batch(replica)` gives the tokens [B, T + 1] of a replica. Returns the cross-entropy of each micro-batch at the
        last stage, in nats per token, and [] elsewhere. Every rank must call it.
        """
        me, count, boundary = self.world.replica, self.micro_batches, self.boundary
        routes = self.routes(step)
        here = [part[:, :-1] for part in batch(me).chunk(count)]
        sizes = [boundary.activation_bytes(x.numel()) for x in here]
        arriving = [] if self.first else [
            self._expect(self._before(route), size, ACTIVATIONS) for route, size in zip(routes, sizes, strict=True)
        ]  # fmt: skip
        passed, sent, entropies = [], [], []
        with self.autocast():  # one for all, so that they share each weight's cast
            for m, route in enumerate(routes):
                x = ids = here[m]
                if self.last or (boundary.draws_ids and not self.first):
                    passing = batch(route.origin(self.world.stage, me)).chunk(count)[m]
                if not self.first:
                    drawn = passing[:, :-1] if boundary.draws_ids else None
                    x, ids = boundary.read_activations(arriving[m].wait(), x.shape, drawn)
                    x.requires_grad_()
                    arriving[m] = None
                turn = (step * count + m) * self.world.size + self.world.rank
                y, dy = self.hidden(x), None
                if self.last:
                    dy, entropy = self._through_head(y, passing[:, 1:])
                    entropies.append(entropy)
                else:
                    message = boundary.activations(y, ids, turn=turn, slot=m)
                    sent.append(self._send(self._after(route), message, ACTIVATIONS))
                passed.append((x, get_gradient_edge(y), dy, turn))
        dtype = y.dtype
        del y  # nobody needs it, nor those before it
        returning = [] if self.last else [
            self._expect(self._after(route), boundary.gradient_bytes(x.numel()), GRADIENTS)
            for route, x in zip(routes, here, strict=True)
        ]  # fmt: skip
        for m, route in enumerate(routes):
            x, y, dy, turn = passed[m]
            passed[m] = None  # and with it what autograd keeps
            if not self.last:
                dy = boundary.read_gradients(returning[m].wait(), here[m].shape, dtype)
            torch.autograd.backward(y, dy)
            del y, dy
            self.watch()
            if not self.first:
                sent.append(self._send(self._before(route), boundary.gradients(x.grad, turn=turn, slot=m), GRADIENTS))
        for handle in sent:
            handle.wait()
        return entropies

    def _through_head(self, y: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient [B, T, D] of a step's loss with respect to y, and the cross-entropy.

        The gradients of the head itself are added to `.grad`.
        """
        stream = y.detach().requires_grad_()
        loss, entropy = self.head_losses(stream, targets)
        with torch.autocast(y.device.type, enabled=False):
            (loss / self.micro_batches).backward()
        return stream.grad, entropy.detach()

    @torch.no_grad()
    def evaluate(self, tokens: Tensor) -> Tensor | None:
        """Return the mean cross-entropy of tokens [B, T + 1] at the last stage, in nats per token; None elsewhere.

        Tokens take the fixed route, and every stage of the replica must call it with the same ones.
        """
        route, boundary = fixed_route(self.world.stages, self.world.replicas), self.evaluating
        x = ids = tokens[:, :-1]
        if not self.first:
            nbytes = boundary.activation_bytes(x.numel())
            message = self._expect(self._before(route), nbytes, "evaluation").wait()
            x, ids = boundary.read_activations(message, x.shape, x)
        with self.autocast():
            y = self.hidden(x)
            if self.last:
                return self.head_losses(y, tokens[:, 1:])[1]
        self._send(self._after(route), boundary.activations(y, ids), "evaluation").wait()
        return None

    @property
    def errors(self) -> dict[str, Tensor]:
        """The errors that the boundary keeps for its feedback, by name, to be checkpointed and put back into it."""
        return self.boundary.errors

    def sent_bytes(self, steps: int, sequences: int, tokens: int) -> dict[str, int]:
        """Return the bytes that this rank sends in training for `steps` steps, by purpose, in closed form.

        A replica's batch is `sequences` of `tokens` tokens each per step.
        """
        messages, each = steps * self.micro_batches, sequences // self.micro_batches * tokens
        return {
            ACTIVATIONS: 0 if self.last else messages * self.boundary.activation_bytes(each),
            GRADIENTS: 0 if self.first else messages * self.boundary.gradient_bytes(each),
        }
