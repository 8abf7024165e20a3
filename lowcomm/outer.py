"""Local updates: replicas train alone for a while, then come to agree. DiLoCo and what follows from it.

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

Federated averaging (local SGD) exchanges theta itself and takes its mean.

NoLoCo (`noloco`) takes the mean over a random group. Then nothing is agreed by all: each replica has a phi of its own,
its slow weights, and the outer optimizer also wants the mean of the group's. As this group is known in advance, slow
weights travel to the next one as soon as they have been updated, while the inner steps go on (section 3.2).

Outer optimizers, and where outer state lives, are in `fragment`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from lowcomm.accounting import Section
from lowcomm.codecs import make_codec, message_seed
from lowcomm.comm import World
from lowcomm.config import MethodConfig, TrainConfig
from lowcomm.engine import Engine, Evaluated, holding, of_replicas
from lowcomm.fragment import Fragment
from lowcomm.partial import pieces
from lowcomm.peers import make_peers
from lowcomm.streaming import Schedule, parameter_fragments


def pairwise_cosine(vectors: list[Tensor]) -> float:
    """Mean cosine similarity over all pairs of flat vectors."""
    stacked = torch.stack([v / v.norm().clamp_min(1e-30) for v in vectors]).double()
    n = len(vectors)
    return float((stacked @ stacked.T).triu(1).sum() / (n * (n - 1) / 2))


class LocalUpdates(Engine):
    """Replicas train alone and meet for a fragment at its turn: DiLoCo, Streaming DiLoCo, federated averaging, NoLoCo.

    What is under way when a run ends is applied; with `close_last_round`, every fragment is then exchanged once more,
    so that no inner step is lost. With `trainable = next_fragment` all fragments but the next to be exchanged are
    frozen (FedPart): no gradient is computed for them, and their inner optimizer state rests.
    """

    def __init__(self, model: nn.Module, world: World, method: MethodConfig, train: TrainConfig, *, seed: int = 0):
        self.world, self.method, self.steps, self.seed = world, method, train.steps, seed
        self.peers, self.codec = make_peers(method, seed), make_codec(method.codec, method.codec_keep)
        self.one_model = method.peers == "all"
        self.named = dict(model.named_parameters())
        parts = pieces(model, model.config.layers, method.sliced, method.slices)
        self.pieces = {piece.name: piece for piece in parts}
        groups = parameter_fragments(list(self.pieces), method.fragments, method.layers_per_fragment)
        self.fragments, self.sections = [], []
        for names in groups:
            names.sort(key=lambda n: -1 if self.pieces[n].owner is None else self.pieces[n].owner)
            self.fragments.append(Fragment({n: self._piece(self.named, n) for n in names}, method))
            self.sections.append(self._owners(names))
        self.schedule = Schedule(len(groups), method.sync_every_steps)
        self.overlap = method.overlap_steps[world.replica % len(method.overlap_steps)]
        #: Changes in place the means that arrive, by parameter; set where a constraint must hold that they break.
        self.keep: Callable[[dict[str, Tensor]], None] | None = None

    def _piece(self, of: dict[str, Tensor], name: str) -> Tensor:
        piece = self.pieces[name]
        return piece.of(of[piece.parameter])

    def _owners(self, names: list[str]) -> list[Section]:
        """Of the parameters of a fragment, in order: how many each slice has, and which replicas train it."""
        replicas, slices, found = range(self.world.replicas), self.method.slices, []
        for owner, some in itertools.groupby(names, lambda n: self.pieces[n].owner):
            numel = sum(self._piece(self.named, n).numel() for n in some)
            found.append((numel, replicas if owner is None else replicas[owner::slices]))
        return found

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

    def after_step(self, step: int) -> dict[str, float]:
        logged: dict[str, float] = {}
        for index in self.schedule.turns(step):
            self._send(index, step, logged)
        last = step == self.steps
        for index, fragment in enumerate(self.fragments):
            if fragment.under_way is not None and (last or fragment.due <= step):
                self._apply(index)
        if last and self.method.close_last_round:
            left = [i for i in range(len(self.fragments)) if i not in self.schedule.turns(step)]
            for index in left:
                self._send(index, step, logged)
            for index in left:
                self._apply(index)
        return logged

    def _send(self, index: int, step: int, logged: dict[str, float]) -> None:
        fragment = self.fragments[index]
        sent = fragment.message()
        if self.method.record_cosine and self.world.replicas > 1:
            deltas = self.world.exchange(fragment.delta(), purpose="analysis")
            logged["cosine" if len(self.fragments) == 1 else f"cosine_{index}"] = pairwise_cosine(deltas)
        seed = message_seed(self.seed, step, index, self.world.replica)
        which = (index, fragment.turns)
        sections = self.sections[index] if self.method.trainable == "slice" else None
        fragment.under_way = self.peers.mean_async(
            self.world, sent, self.codec, which, purpose="outer", seed=seed, sections=sections
        )
        fragment.turns += 1
        fragment.due = step + self.overlap
        if self.overlap:
            fragment.release()

    def _apply(self, index: int) -> None:
        fragment = self.fragments[index]
        mean = fragment.under_way.wait()
        fragment.under_way = None
        peers = None if fragment.peers is None else fragment.peers.wait()
        if self.keep is not None:
            self.keep(fragment.values(mean))
        fragment.apply(mean, self.method.mixing, peers)
        fragment.peers = None
        if fragment.outer.needs_peers and fragment.turns < self._turns(index):
            slow = fragment.agreed.to(self.world.device, copy=True)
            which = (index, fragment.turns)  # its next
            fragment.peers = self.peers.mean_async(
                self.world, slow, make_codec("fp32"), which, purpose="slow weights", ahead=True
            )

    def _turns(self, index: int) -> int:
        """Turns of a fragment in the whole run."""
        closing = self.method.close_last_round and index not in self.schedule.turns(self.steps)
        return self.schedule.turns_of(index, self.steps) + closing

    @contextlib.contextmanager
    def evaluated(self, which: Evaluated) -> Iterator[None]:
        """The outer parameters (Streaming DiLoCo, Table 3), whatever the replica holds in between; or inner ones.

        Where replicas have different tau, one may apply a fragment's mean before another does: until then, each shows
        its own outer parameters, and a loss over the windows of all is the mean of both.
        """
        with contextlib.ExitStack() as stack:
            for f in self.fragments:
                shown = f.agreed if which == "agreed" else of_replicas(self.world, f.parameters, which)
                stack.enter_context(holding(f.parameters, shown))
            yield

    def weights(self) -> dict[str, Tensor]:
        values = {}
        for f in self.fragments:
            agreed = f.agreed
            if not self.one_model:
                agreed = self.world.mean(agreed.to(self.world.device, copy=True), purpose="analysis")
            values |= f.values(agreed)
        whole = {n: torch.empty(p.shape, dtype=torch.float32, device=agreed.device) for n, p in self.named.items()}
        for name, value in values.items():
            self._piece(whole, name).copy_(value)
        return whole

    def map(self, change: Callable[[dict[str, Tensor]], None]) -> None:
        for fragment in self.fragments:
            fragment.map(change)
            for name, arrived in self._arrived(fragment).items():
                if name == "under_way" and self.keep is not None:
                    self.keep(fragment.values(arrived))
                change(fragment.values(arrived))

    def _arrived(self, fragment: Fragment) -> dict[str, Tensor]:
        """What was under way to a fragment, waited for."""
        found = {}
        for name in ("under_way", "peers"):
            if (handle := getattr(fragment, name)) is not None:
                found[name] = handle.wait()
                setattr(fragment, name, self.world.done(found[name]))
        return found

    def state(self) -> dict[str, Tensor]:
        state = {}
        for index, fragment in enumerate(self.fragments):
            state |= {f"{index}/{name}": b for name, b in fragment.state().items()}
            state |= {f"{index}/{name}": b for name, b in self._arrived(fragment).items()}
            state |= {f"{index}/due": torch.tensor(fragment.due), f"{index}/turns": torch.tensor(fragment.turns)}
        return state

    def load(self, state: dict[str, Tensor]) -> None:
        for index, fragment in enumerate(self.fragments):
            fragment.load({name: state[f"{index}/{name}"] for name in fragment.state()})
            if (mean := state.get(f"{index}/under_way")) is not None:
                fragment.under_way = self.world.done(mean.to(self.world.device))
            if (peers := state.get(f"{index}/peers")) is not None:
                fragment.peers = self.world.done(peers.to(self.world.device))
            fragment.due, fragment.turns = int(state[f"{index}/due"]), int(state[f"{index}/turns"])

    def sent_bytes(self) -> dict[str, int]:
        world, found = self.world, {"outer": 0}
        for index, fragment in enumerate(self.fragments):
            for turn in range(self._turns(index)):
                met = (index, turn), world.replicas, world.replica
                found["outer"] += self.peers.sent_bytes(self.sections[index], self.codec, *met)
                if fragment.outer.needs_peers and turn:
                    everyone = [(fragment.numel, range(world.replicas))]
                    slow = self.peers.sent_bytes(everyone, make_codec("fp32"), *met)
                    found["slow weights"] = found.get("slow weights", 0) + slow
        return found
