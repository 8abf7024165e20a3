"""The engine: how replicas come to agree. DiLoCo, plain averaging and data-parallel training.

DiLoCo (Douillard et al., 2023, arXiv:2311.08105; Algorithm 1 of Streaming DiLoCo). Replica m trains
theta_m for H inner steps; phi are the parameters last agreed. Then

    Delta_m = phi - theta_m                 outer gradient (note the sign)
    Delta   = mean_m Delta_m                what travels
    phi     = OuterOpt(phi, Delta)          SGD with Nesterov momentum
    theta_m = alpha theta_m + (1 - alpha) phi

    symbol   name here          symbol   name here
    theta_m  the model's own    phi      `agreed`, flat fp32
    Delta    `delta`            H        `sync_every_steps`
    alpha    `mixing`           tau      `overlap_steps`

DiLoCo exchanges the whole model and takes phi as it is (alpha = 0). Streaming DiLoCo (`streaming`) does this for a
fragment at a time, with tau inner steps between sending Delta_m and applying Delta.

Federated averaging (local SGD) exchanges theta itself and takes its mean. Data-parallel training
exchanges gradients, each step, before clipping and the inner optimizer.

Outer optimizers, and where outer state lives, are in `fragment`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from lowcomm.accounting import mean_bytes
from lowcomm.codecs import make_codec
from lowcomm.comm import World
from lowcomm.config import MethodConfig, TrainConfig
from lowcomm.fragment import Fragment, flatten, unflatten_into
from lowcomm.peers import PEERS
from lowcomm.streaming import Schedule, parameter_fragments

#: What may be evaluated: the parameters last agreed, the first replica's own, the mean of all replicas' own.
Evaluated = Literal["agreed", "first_replica", "replica_average"]


def pairwise_cosine(vectors: list[Tensor]) -> float:
    """Mean cosine similarity over all pairs of flat vectors."""
    stacked = torch.stack([v / v.norm().clamp_min(1e-30) for v in vectors]).double()
    n = len(vectors)
    return float((stacked @ stacked.T).triu(1).sum() / (n * (n - 1) / 2))


class Engine(Protocol):
    """What a trainer calls; it knows no method by name."""

    def before_step(self, step: int) -> None:
        """Before inner step `step` (from 1)."""
        ...

    def average_gradients(self) -> None:
        """Between the backward pass and clipping."""
        ...

    def after_step(self, step: int) -> dict[str, float]:
        """After inner step `step`. Returns what is worth logging."""
        ...

    def evaluated(self, which: Evaluated) -> contextlib.AbstractContextManager[None]:
        """Inside, the model holds the parameters to evaluate."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """The parameters to evaluate, whole, by name; every rank must ask."""
        ...

    def state(self) -> dict[str, Tensor]:
        """State to checkpoint beside the model and the inner optimizer; waits for what is under way."""
        ...

    def load(self, state: dict[str, Tensor]) -> None:
        """Put back what `state` gave."""
        ...

    def sent_bytes(self) -> dict[str, int]:
        """Closed form of this rank's bytes in the whole run, by purpose; {} where none is claimed."""
        ...


class DataParallel:
    """Gradients averaged over replicas at every step."""

    def __init__(self, model: nn.Module, world: World, method: MethodConfig, train: TrainConfig):
        self.named, self.world, self.steps = dict(model.named_parameters()), world, train.steps
        self.parameters = list(self.named.values())

    def before_step(self, step: int) -> None:
        """Nothing to prepare."""

    def average_gradients(self) -> None:
        if self.world.replicas > 1:
            grads = [p.grad for p in self.parameters]
            unflatten_into(self.world.mean(flatten(grads), purpose="gradients"), grads)

    def after_step(self, step: int) -> dict[str, float]:
        return {}

    def evaluated(self, which: Evaluated) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # replicas hold one model

    def weights(self) -> dict[str, Tensor]:
        return self.named

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, state: dict[str, Tensor]) -> None:
        """Nothing was kept."""

    def sent_bytes(self) -> dict[str, int]:
        numel = sum(p.numel() for p in self.parameters)
        once = mean_bytes(numel, 4, self.world.replicas, self.world.replica)
        return {"gradients": self.steps * once}


class LocalUpdates:
    """Replicas train alone and agree on a fragment at its turn: DiLoCo, Streaming DiLoCo, federated averaging.

    What is under way when a run ends is applied; with `close_last_round`, every fragment is then exchanged once more,
    so that no inner step is lost. With `trainable = next_fragment` all fragments but the next to be exchanged are
    frozen (FedPart): no gradient is computed for them, and their inner optimizer state rests.
    """

    def __init__(self, model: nn.Module, world: World, method: MethodConfig, train: TrainConfig, *, seed: int = 0):
        self.world, self.method, self.steps, self.seed = world, method, train.steps, seed
        self.peers, self.codec = PEERS[method.peers], make_codec(method.codec, method.codec_keep)
        named = dict(model.named_parameters())
        groups = parameter_fragments(list(named), method.fragments, method.layers_per_fragment)
        self.fragments = [Fragment({n: named[n] for n in names}, method) for names in groups]
        self.schedule = Schedule(len(groups), method.sync_every_steps)
        self.overlap = method.overlap_steps[world.replica % len(method.overlap_steps)]
        self.order = list(named)

    def before_step(self, step: int) -> None:
        """Begin to fetch the outer state that this step's turns need; freeze and thaw."""
        for index in self.schedule.turns(step):
            self.fragments[index].fetch(whole=False)
        for fragment in self.fragments:
            if fragment.under_way is not None and fragment.due <= step:
                fragment.fetch(whole=True)
        if self.method.trainable == "next_fragment":
            following = next(turns[0] for s in itertools.count(step) if (turns := self.schedule.turns(s)))
            for index, fragment in enumerate(self.fragments):
                for p in fragment.parameters:
                    p.requires_grad_(index == following)

    def average_gradients(self) -> None:
        """Replicas keep their own gradients."""

    def after_step(self, step: int) -> dict[str, float]:
        logged: dict[str, float] = {}
        for index in self.schedule.turns(step):
            self._send(index, step, logged)
        last = step == self.steps
        for fragment in self.fragments:
            if fragment.under_way is not None and (last or fragment.due <= step):
                self._apply(fragment)
        if last and self.method.close_last_round:
            left = [i for i in range(len(self.fragments)) if i not in self.schedule.turns(step)]
            for index in left:
                self._send(index, step, logged)
            for index in left:
                self._apply(self.fragments[index])
        return logged

    def _send(self, index: int, step: int, logged: dict[str, float]) -> None:
        fragment = self.fragments[index]
        sent = fragment.message()
        if self.method.record_cosine and self.world.replicas > 1:
            deltas = self.world.exchange(fragment.delta(), purpose="analysis")
            logged["cosine" if len(self.fragments) == 1 else f"cosine_{index}"] = pairwise_cosine(deltas)
        turn = (step * len(self.fragments) + index) * self.world.replicas + self.world.replica
        seed = self.seed << 40 | turn  # of the codec's random choices: others at each turn of each replica
        fragment.under_way = self.peers.mean_async(self.world, sent, self.codec, purpose="outer", seed=seed)
        fragment.due = step + self.overlap
        if self.overlap:
            fragment.release()

    def _apply(self, fragment: Fragment) -> None:
        mean = fragment.under_way.wait()
        fragment.under_way = None
        fragment.apply(mean, self.method.mixing)

    @contextlib.contextmanager
    def evaluated(self, which: Evaluated) -> Iterator[None]:
        """The outer parameters (Streaming DiLoCo, Table 3), whatever the replica holds in between; or inner ones.

        Where replicas have different tau, one may apply a fragment's mean before another does: until then, each shows
        its own outer parameters, and a loss over the windows of all is the mean of both.
        """
        inner = [flatten(f.parameters) for f in self.fragments]
        for fragment, own in zip(self.fragments, inner, strict=True):
            if which == "agreed":
                shown = fragment.agreed
            elif which == "first_replica":
                shown = self.world.broadcast(own.clone(), purpose="analysis")
            else:
                shown = self.world.mean(own.clone().float(), purpose="analysis")
            unflatten_into(shown, fragment.parameters)
        try:
            yield
        finally:
            for fragment, values in zip(self.fragments, inner, strict=True):
                unflatten_into(values, fragment.parameters)

    def weights(self) -> dict[str, Tensor]:
        values = {n: v for f in self.fragments for n, v in f.values().items()}
        return {n: values[n] for n in self.order}

    def state(self) -> dict[str, Tensor]:
        state = {}
        for index, fragment in enumerate(self.fragments):
            state |= {f"{index}/{name}": b for name, b in fragment.state().items()}
            if fragment.under_way is not None:
                mean = fragment.under_way.wait()
                fragment.under_way = self.world.done(mean)
                state |= {f"{index}/under_way": mean, f"{index}/due": torch.tensor(fragment.due)}
        return state

    def load(self, state: dict[str, Tensor]) -> None:
        for index, fragment in enumerate(self.fragments):
            fragment.load({name: state[f"{index}/{name}"] for name in fragment.state()})
            if (mean := state.get(f"{index}/under_way")) is not None:
                fragment.under_way = self.world.done(mean.to(self.world.device))
                fragment.due = int(state[f"{index}/due"])

    def sent_bytes(self) -> dict[str, int]:
        total = 0
        for index, fragment in enumerate(self.fragments):
            turns = self.schedule.turns_of(index, self.steps)
            if self.method.close_last_round and index not in self.schedule.turns(self.steps):
                turns += 1
            total += turns * self.peers.sent_bytes(fragment.numel, self.codec, self.world.replicas, self.world.replica)
        return {"outer": total}
