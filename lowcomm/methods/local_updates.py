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
    beta     `error_feedback`   e_m      `residual`

With error feedback, what the codec has lost of a message joins the next one (Seide et al., 2014; with beta < 1,
SparseLoCo, arXiv:2508.15706, Algorithm 1): of the residual e_m, zero at first,

    a_m = Delta_m + beta e_m,   e_m = a_m - decode(encode(a_m)),   Delta = mean_m decode(encode(a_m))

so that nothing is lost where beta = 1 and a replica takes what is agreed as it is. With mixing (alpha below) it keeps a
share of what it has not been able to say, which then joins the next message twice.

DiLoCo exchanges the whole model and takes phi as it is (alpha = 0). Streaming DiLoCo (`streaming`) does this for a
fragment at a time, with tau inner steps between sending Delta_m and applying Delta.

Federated averaging (local SGD) exchanges theta itself and takes its mean.

NoLoCo (`noloco`) takes the mean over a random group. Then nothing is agreed by all: each replica has a phi of its own,
its slow weights, and the outer optimizer also needs the mean of the group's. As this group is known in advance, slow
weights travel to the next one as soon as they have been updated, while the inner steps go on (section 3.2).

Where only some replicas keep their parameters to a subspace (P projects on it; `boundary.replicas`), what is agreed
need not lie in it. Those that do train P phi, and Delta_m = P phi - theta_m: of what lies outside they say nothing.

What is exchanged together, when and with whom is the plan's (`plan`); outer optimizers are in `outer` and in their
papers' files, outer state in `outer_state`. `named` has the papers' methods as classes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowcomm.codecs import Codec, message_seed
from lowcomm.codecs.bits import refuse_non_finite
from lowcomm.comm.axis import Handle
from lowcomm.comm.world import World
from lowcomm.methods.bases import Basis, Values
from lowcomm.methods.config import MethodConfig
from lowcomm.methods.engine import (
    Change,
    Engine,
    Evaluated,
    broadcast_weights,
    check_ranks,
    holding,
    named_parameters,
    of_replicas,
)
from lowcomm.methods.outer import OuterOptimizer
from lowcomm.methods.outer_state import OuterState, flatten, unflatten_into
from lowcomm.methods.partial import Piece
from lowcomm.methods.plan import OUTER, SLOW_WEIGHTS, Plan
from lowcomm.settings import ConfigError, brief, build, nearest, whole_number


def pairwise_cosine(vectors: list[Tensor]) -> float:
    """Return the mean cosine similarity over all pairs of two or more flat vectors."""
    stacked = torch.stack([v / v.norm().clamp_min(1e-30) for v in vectors]).double()
    n = len(vectors)
    return float((stacked @ stacked.T).triu(1).sum() / (n * (n - 1) / 2))


#: Settings of a method that say how a model is run, and mean nothing to an engine.
OF_PASSES = ("input_gradients", "route")
#: The name of the residual in outer state: a replica's own, where the rest is agreed on.
RESIDUAL = "residual"
#: What parameters of less precision than fp32 cannot hold of the mixture that a round began with: the replica's own.
ROUNDING = "rounding"


class FragmentState:
    """The state that a replica keeps of one fragment: parameters, outer state and optimizer, and transfers under way.

    Args:
        pieces: the parts of parameters that the fragment is made of. named: the model's parameters.
        outer: the outer optimizer.
        offload: whether outer state is in the CPU's memory.
        feedback: beta of error feedback; 0 for none.
        mixes: whether a replica keeps a share of its own parameters when it takes over what is agreed.
        factor: what the replica multiplies its outer gradient by before others see it: 1 where it is honest.
        basis: the basis in which messages are encoded and averaged; None: of values as they lie.
        keep: the constraint, as a change in place, on this replica's own parameters and outer gradients, where it is
            not on the others'; None where there is none.

    Attributes: `under_way` and `peers` are handles on the means under way (of what was sent, and of the next peers'
    slow weights), None where there are none; `due`, the step after which the first is applied; `turns`, the number of
    turns that the fragment has had; `numel`, its values.
    """

    #: Attributes that a state dictionary has beside outer state: numbers always, means where they are under way.
    numbers, means = ("due", "turns"), ("under_way", "peers")

    def __init__(
        self,
        pieces: Sequence[Piece],
        named: Mapping[str, Tensor],
        outer: OuterOptimizer,
        *,
        offload: bool,
        feedback: float = 0.0,
        mixes: bool = False,
        factor: float = 1.0,
        basis: Basis | None = None,
        keep: Change | None = None,
    ):
        self.pieces, self.outer, self.feedback, self.factor, self._keep = pieces, outer, feedback, factor, keep
        self._basis, self._shapes = basis or Values(), [piece.shape for piece in pieces]
        self.parameters = [piece.of(named[piece.parameter]) for piece in pieces]
        agreed = flatten(self.parameters).float()
        self.numel = agreed.numel()
        self._is_exact = all(p.dtype == torch.float32 for p in self.parameters)
        self._own = (RESIDUAL,) * (feedback > 0) + (ROUNDING,) * (mixes and not self._is_exact)
        own = {name: torch.zeros_like(agreed) for name in self._own}
        self._state = OuterState({"agreed": agreed} | outer.buffers(agreed) | own, offload=offload)
        self._stepped = tuple(name for name in self._state.names if name not in own)
        self._unsaid: Tensor | None = None  # the residual before the message that may have to be taken back
        self.under_way: Handle | None = None
        self.peers: Handle | None = None
        self.due = self.turns = 0

    @property
    def agreed(self) -> Tensor:
        """The parameters last agreed, flat fp32, where they are at home: in the CPU's memory with `offload`."""
        return self._state.read()["agreed"]

    @property
    def resident(self) -> int:
        """The number of bytes of outer state that are on the device now."""
        return self._state.resident

    def fetch(self, *, to_apply: bool) -> None:
        """Begin to copy outer state to the device: what the outer step needs (`to_apply`), or what a message needs."""
        self._state.fetch(*(self._stepped if to_apply else ("agreed", *self._own)))

    def delta(self) -> Tensor:
        """Return the outer gradient, flat fp32, as others see it: agreed minus the replica's own parameters.

        It is held to what the replica keeps to (`keep`), and multiplied by `factor`.
        """
        (agreed,) = self._state.use("agreed")
        theta = self._theta(agreed)
        return self._as_seen(torch.sub(agreed, theta, out=theta))

    def _theta(self, agreed: Tensor) -> Tensor:
        """Return a copy of the replica's own parameters in fp32, as they would be had they begun the round unrounded.

        Parameters of less precision begin a round at a rounded value. An outer gradient is what they have moved from
        there: were the rounding in it, each round would take back what the round before put below their precision.
        """
        theta = flatten(self.parameters).float()
        if ROUNDING in self._own:
            theta.add_(self._state.use(ROUNDING)[0])
        elif not self._is_exact:  # they began at what is agreed
            theta.add_(self._lost(agreed))
        return theta

    def _lost(self, values: Tensor) -> Tensor:
        """Return what of fp32 values, flat, the replica's parameters cannot hold."""
        parts = zip(values.split([piece.numel for piece in self.pieces]), self.parameters, strict=True)
        return torch.cat([part - part.to(p.dtype) for part, p in parts])

    def _as_seen(self, sent: Tensor) -> Tensor:
        """Change in place what is sent, or would be, to what others see of it, and return it."""
        if self._keep is not None:  # less what is agreed outside, of which this replica has nothing to say
            self._keep(self.values(sent))
        return sent if self.factor == 1 else sent.mul_(self.factor)

    def message(
        self,
        outer: OuterOptimizer,
        encode: Callable[[Tensor], tuple[list[Tensor], Tensor]],
        constrain: Change | None = None,
        *,
        may_be_unsaid: bool = False,
    ) -> tuple[Tensor, list[Tensor] | None]:
        """Return what is to be averaged [n], in the basis, and the same as it is sent, by sections.

        It is the outer gradient, or the parameters themselves. With error feedback, what earlier messages have lost is
        added, and what this one loses is kept for the next; without, nothing is encoded here, and the second result is
        None.

        Args:
            outer: the outer optimizer with the numbers of this turn.
            encode: returns a message as it is sent, and what the others decode; called only with error feedback.
            constrain: holds values to what the mean of messages is held to: here the residual, so that nothing is kept
                that can never be sent.
            may_be_unsaid: keep what `unsay` needs, until the message's mean is adopted.
        """
        (agreed,) = self._state.use("agreed")
        sent = self._as_seen(outer.message(agreed, self._theta(agreed)))
        if self.feedback:
            (residual,) = self._state.use(RESIDUAL)
            self._unsaid = residual.clone() if may_be_unsaid else None
            sent.add_(residual, alpha=self.feedback)
            coordinates = self._basis.into(sent, self._shapes)
            packed, heard = encode(coordinates)
            heard = self._basis.back(heard, self._shapes)
            torch.sub(sent, heard, out=residual)
            if constrain is not None:
                constrain(self.values(residual))
            return coordinates, packed
        return self._basis.into(sent, self._shapes), None

    def of_mean(self, mean: Tensor) -> Tensor:
        """Return a mean of messages [n], which is in the basis, as values of parameters [n], in their order."""
        return self._basis.back(mean, self._shapes)

    def change_mean(self, mean: Tensor, change: Change) -> None:
        """Apply `change` in place to a mean of messages, which `change` gets as values of parameters."""
        values = self.of_mean(mean)
        change(self.values(values))
        mean.copy_(self._basis.into(values, self._shapes))

    def unsay(self) -> None:
        """Take back a message whose mean has not been adopted, as nobody has heard it: restore the residual."""
        if self._unsaid is not None:
            self._state.use(RESIDUAL)[0].copy_(self._unsaid)
            self._state.release(changed=(RESIDUAL,))
            self._unsaid = None

    def agreed_state(self) -> dict[str, Tensor]:
        """Return outer state without what is this replica's own, by name. It must not be written to."""
        return {name: self.outer_state()[name] for name in self._stepped}

    def own_state(self, *, heard: bool = False) -> dict[str, Tensor]:
        """Return the part of outer state that is this replica's own, as of messages whose means have been adopted.

        heard: whether the others have heard the last message, though its mean has not been adopted yet.
        """
        state = {name: self.outer_state()[name] for name in self._own}
        return state if heard or self._unsaid is None else state | {RESIDUAL: self._unsaid}

    def apply(self, mean: Tensor, mixing: float, peers: Tensor | None, outer: OuterOptimizer) -> None:
        """Take the outer step with the mean of what was sent, then mix: theta <- alpha theta + (1 - alpha) agreed.

        `peers` is as in `OuterOptimizer.step`; `outer` has the numbers of this turn.
        """
        self._step(self._on_device(), mean, peers, outer)
        self._mix(mixing)

    def after(self, mean: Tensor, peers: Tensor | None, outer: OuterOptimizer) -> dict[str, Tensor]:
        """Return outer state as `apply` would leave it; that of this fragment stays as it is, until `adopt`."""
        state = {name: value.clone() for name, value in self._on_device().items()}
        self._step(state, mean, peers, outer)
        return state

    def adopt(self, state: Mapping[str, Tensor], mixing: float) -> None:
        """Take over outer state that `after` has returned, then mix, as `apply` does."""
        for name, value in self._on_device().items():
            value.copy_(state[name])
        self._unsaid = None
        self._mix(mixing)

    def _on_device(self) -> dict[str, Tensor]:
        return dict(zip(self._stepped, self._state.use(*self._stepped), strict=True))

    def _step(self, state: dict[str, Tensor], mean: Tensor, peers: Tensor | None, outer: OuterOptimizer) -> None:
        buffers = {name: value for name, value in state.items() if name != "agreed"}
        outer.step(state["agreed"], mean, buffers, peers)

    def _mix(self, mixing: float) -> None:
        (agreed,) = self._state.use("agreed")
        if mixing == 0:
            unflatten_into(agreed, self.parameters)
        else:
            theta = self._theta(agreed).mul_(mixing).add_(agreed, alpha=1 - mixing)
            unflatten_into(theta, self.parameters)
            if ROUNDING in self._own:
                self._state.use(ROUNDING)[0].copy_(self._lost(theta))
        if self._keep is not None:
            self._keep([(piece.parameter, p.detach()) for piece, p in zip(self.pieces, self.parameters, strict=True)])
        self._state.release(changed=self._state.names)

    def begin_from_agreed(self) -> None:
        """Set the replica's own parameters to those last agreed, after all outer state has been put back."""
        (agreed,) = self._state.use("agreed")
        unflatten_into(agreed, self.parameters)
        if ROUNDING in self._own:
            self._state.use(ROUNDING)[0].copy_(self._lost(agreed))
        self._state.release(changed=self._own)

    def release(self) -> None:
        """Let go of outer state on the device, which is not needed until the mean has come."""
        self._state.release(changed=self._own)

    def values(self, flat: Tensor) -> list[tuple[str, Tensor]]:
        """Return flat values, as of `agreed`, as views in the shapes of the pieces, with their parameters' names."""
        parts = flat.split([piece.numel for piece in self.pieces])
        return [(piece.parameter, v.view(piece.shape)) for piece, v in zip(self.pieces, parts, strict=True)]

    def arrived(self, world: World) -> dict[str, Tensor]:
        """Wait for the means under way, and return them by name: `under_way` and `peers`, where there are such.

        From then on their handles give them without a wait.
        """
        found = {}
        for name in self.means:
            if (handle := getattr(self, name)) is not None:
                found[name] = handle.wait()
                setattr(self, name, world.done(found[name]))
        return found

    def map(self, change: Change) -> None:
        """Apply `change` in place to all outer state, each tensor as values of parameters."""
        for flat in self._state.use(*self._state.names):
            change(self.values(flat))
        self._state.release(changed=self._state.names)

    def outer_state(self) -> dict[str, Tensor]:
        """Return outer state by name; it must not be written to.

        It is the parameters last agreed, the outer optimizer's buffers, and this replica's residual and rounding where
        it has them.
        """
        return self._state.read()

    def put_outer_state(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite outer state with what `outer_state` returned, of a state that `check_state` has let pass."""
        self._state.load(state)

    def state_dict(self, world: World) -> dict[str, Tensor]:
        """Return outer state, the means under way, which it waits for, and the numbers `due` and `turns`, by name."""
        numbers = {name: torch.tensor(getattr(self, name)) for name in self.numbers}
        return {**self.outer_state(), **self.arrived(world), **numbers}

    def load_state_dict(self, state: Mapping[str, Tensor], world: World) -> None:
        """Restore what `state_dict` returned, which `check_state` has found to be a state of this fragment."""
        self.put_outer_state(state)
        for name in self.means:
            there = state.get(name)
            setattr(self, name, None if there is None else world.done(there.to(world.device, copy=True)))
        for name in self.numbers:
            setattr(self, name, int(state[name]))


def fragment_states(
    plan: Plan, named: Mapping[str, Tensor], replica: int, keep: Change | None = None
) -> list[FragmentState]:
    """Return the state of each of a plan's fragments as a replica begins to train; `keep` is as for `FragmentState`."""
    m = plan.method
    asked = {"offload": m.offload_outer, "feedback": m.error_feedback, "factor": plan.factor(replica)}
    asked |= {"mixes": m.mixing > 0, "basis": plan.basis, "keep": keep}
    return [FragmentState(f.pieces, named, plan.outer, **asked) for f in plan.fragments]


def whole_parameters(
    fragments: Sequence[FragmentState], values: Callable[[FragmentState], Tensor], named: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return whole parameters in fp32, by name, made of the flat values that `values` returns for each fragment."""
    whole = {n: torch.empty(p.shape, dtype=torch.float32, device=p.device) for n, p in named.items()}
    for fragment in fragments:
        for piece, (_, value) in zip(fragment.pieces, fragment.values(values(fragment)), strict=True):
            piece.of(whole[piece.parameter]).copy_(value)
    return whole


@contextlib.contextmanager
def showing(fragments: Sequence[FragmentState], values: Callable[[FragmentState], Tensor]) -> Iterator[None]:
    """Let the parameters of each fragment hold other values inside the context: those that `values` returns, flat."""
    with contextlib.ExitStack() as stack:
        for fragment in fragments:
            stack.enter_context(holding(fragment.parameters, values(fragment)))
        yield


class LocalUpdates(Engine):
    """Replicas train alone and meet for a fragment at its turn: DiLoCo, Streaming DiLoCo, federated averaging, NoLoCo.

    Call `step` after every step of the inner optimizer, whatever it is, and `finish` after the last one: what is under
    way is then applied, and with `close_last_round` every fragment that has trained since its last turn is exchanged
    once more, so that no inner step is lost. With `trainable = next_fragment` all fragments but the one exchanged next
    are frozen (FedPart): no gradient is computed for them, and their inner optimizer state rests.

    Args:
        model: any module, or parameters by name. One that requires no gradient is neither exchanged nor billed, unless
            slices are trained (`partial`). Buffers (of batch norm, say) stay each replica's own.
        world: the ranks; `world.step` counts the inner steps from now on, and the ledger bills to it.
        method: the choices; `settings` replace some of its fields, by default those of DiLoCo.
        seed: of everything random (groups, codecs); the same on all ranks.
        steps: of the whole run; None where they are not known. Where they are, nothing is sent that nobody would need
            after them (NoLoCo sends slow weights ahead for a next turn). Outer settings that follow points of the run
            need them.
        broadcast: begin with the weights and buffers of replica 0, as all replicas must begin alike.
        constrain: changes the means that arrive in place, where a constraint must hold that a lossy codec breaks; where
            only some replicas keep to it (`boundary.replicas`), their own outer gradients and parameters instead.
        layers: as for `Plan`.

    Attributes: `plan` (what is sent), `fragments` (its state), `steps_done`.

    Raises ConfigError for choices that do not go together, or not with this model, and on every replica where they have
    begun with different ones; the message names the values.
    """

    names = ("parameters",)
    local = True
    default = MethodConfig("parameters", outer="nesterov", outer_lr=0.7, outer_momentum=0.9, sync_every_steps=30)

    def __init__(
        self,
        model: nn.Module | Mapping[str, Tensor],
        world: World,
        method: MethodConfig | None = None,
        *,
        seed: int = 0,
        steps: int | None = None,
        broadcast: bool = True,
        constrain: Change | None = None,
        layers: int | None = None,
        **settings: Any,
    ):
        check_ranks(world)
        self.method = method = with_settings(method or self.default, settings)
        if "boundary" in settings and constrain is None:
            raise ConfigError(
                "method.boundary is of the pipelines of `lowcomm train`: an engine compresses nothing between stages"
            )
        seed = whole_number("seed", seed)
        steps = None if steps is None else whole_number("steps", steps, at_least=1)
        self.world, self.seed, self.steps = world, seed, steps
        self.named = named_parameters(model, trained=method.trainable != "slice")
        shapes = {name: tuple(p.shape) for name, p in self.named.items()}
        self.plan = Plan(shapes, method, world.replicas, seed=seed, layers=layers)
        if broadcast and world.replicas > 1:
            told = begun_with(method, self.named, seed=seed, steps=steps, layers=layers)
            world.agree(told, axis="replica")
            broadcast_weights(model, world)
        some = method.boundary.replicas > 0
        self.fragments = fragment_states(self.plan, self.named, world.replica, constrain if some else None)
        self.one_model = self.plan.peers.one_model
        self.overlap = self.plan.overlap(self.world.replica)
        self.constrain = constrain if self.plan.may_leave_subspace and not some else None
        self.plan.outer_at(0, steps)
        self.steps_done, self._closed_after = 0, -1
        self._prepare()

    @classmethod
    def of(cls, model: nn.Module, world: World, method: MethodConfig, **known: Any) -> LocalUpdates:
        """Return local updates of a model whose replicas begin alike already; `known` is as for the constructor."""
        return cls(model, world, method, broadcast=False, **known)

    @classmethod
    def check(cls, method: MethodConfig, replicas: int) -> None:
        """Check nothing, as the plan checks what local updates need."""

    def step(self, tokens: int = 1) -> dict[str, float]:
        """Send the fragments whose turn comes after this inner step, and apply those that are due.

        Returns, with `record_cosine`, the mean cosine of the replicas' outer gradients for each fragment that was sent:
        "cosine", or "cosine_<fragment>" where there are several. All replicas weigh alike, whatever their `tokens`.
        """
        self.steps_done += 1
        self.world.step = step = self.steps_done
        logged: dict[str, float] = {}
        for index in self.plan.turns(step):
            self._send(index, logged)
        for index, fragment in enumerate(self.fragments):
            if fragment.under_way is not None and fragment.due <= step:
                self._apply(index)
        self._prepare()
        return logged

    def finish(self) -> dict[str, float]:
        """Apply what is under way; with `close_last_round`, exchange what has trained since its last turn.

        A second call after the same step exchanges nothing. Parameters that were frozen for a while (`trainable =
        next_fragment`) require a gradient again afterwards. Returns what `step` does.
        """
        logged: dict[str, float] = {}
        for index, fragment in enumerate(self.fragments):
            if fragment.under_way is not None:
                self._apply(index)
        left = [i for i in range(len(self.fragments)) if self.plan.closes(i, self.steps_done)]
        left = [] if self._closed_after == self.steps_done else left
        self._closed_after = self.steps_done
        for index in left:
            self._send(index, logged)
        for index in left:
            self._apply(index)
        if self.method.trainable == "next_fragment":
            for parameter in self.named.values():
                parameter.requires_grad_(True)
        return logged

    def _prepare(self) -> None:
        """Begin to fetch the outer state that the next step needs; with next_fragment, freeze all other fragments."""
        step = self.steps_done + 1
        for index in self.plan.turns(step):
            self.fragments[index].fetch(to_apply=False)
        for fragment in self.fragments:
            if fragment.under_way is not None and fragment.due <= step:
                fragment.fetch(to_apply=True)
        if self.method.trainable == "next_fragment":
            following = next(turns[0] for s in itertools.count(step) if (turns := self.plan.turns(s)))
            for index, fragment in enumerate(self.fragments):
                for p in fragment.parameters:
                    p.requires_grad_(index == following)

    def _mean(
        self,
        x: Tensor,
        index: int,
        codec: Codec,
        *,
        purpose: str,
        seed: int = 0,
        ahead: bool = False,
        packed: list[Tensor] | None = None,
    ) -> Handle:
        """Begin to replace `x` by its mean over this replica's group at a fragment's next turn; return its handle."""
        world, plan = self.world, self.plan
        group = plan.group(index, self.fragments[index].turns, world.replica)
        if plan.is_plain and len(group) == world.replicas and not ahead:
            refuse_non_finite(x, x.abs().max())
            return world.mean_async(x, purpose=purpose)
        of_outer = {"packed": packed, "sections": plan.sections(index), "reduce": plan.mean.over} if not ahead else {}
        return world.encoded_mean_async(x, codec, purpose=purpose, seed=seed, group=group, ahead=ahead, **of_outer)

    def _send(self, index: int, logged: dict[str, float]) -> None:
        fragment, step = self.fragments[index], self.steps_done
        seed = message_seed(self.seed, step, index, self.world.replica)
        outer = self.plan.outer_at(step, self.steps)
        sent, packed = fragment.message(outer, lambda x: self.plan.encoded(index, x, seed), self.constrain)
        if self.method.record_cosine and self.world.replicas > 1:
            deltas = self.world.exchange(fragment.delta(), purpose="analysis")
            logged["cosine" if len(self.fragments) == 1 else f"cosine_{index}"] = pairwise_cosine(deltas)
        fragment.under_way = self._mean(sent, index, self.plan.codec, purpose=OUTER, seed=seed, packed=packed)
        fragment.turns += 1
        fragment.due = step + self.overlap
        if self.overlap:
            fragment.release()

    def _apply(self, index: int) -> None:
        fragment = self.fragments[index]
        mean = fragment.of_mean(fragment.under_way.wait())
        fragment.under_way = None
        peers = None if fragment.peers is None else fragment.peers.wait()
        fragment.peers = None
        if self.constrain is not None:
            self.constrain(fragment.values(mean))
        outer = self.plan.outer_at(fragment.due - self.overlap, self.steps)
        fragment.apply(mean, self.method.mixing, peers, outer)
        if fragment.outer.needs_peers and self._has_turns_left(index):
            slow = fragment.agreed.to(self.world.device, copy=True)
            fragment.peers = self._mean(slow, index, self.plan.fp32, purpose=SLOW_WEIGHTS, ahead=True)

    def _has_turns_left(self, index: int) -> bool:
        """Tell whether a fragment will be exchanged again, as far as is known."""
        if self.steps is None:
            return True
        sent = self.plan.schedule.turns_of(index, self.steps_done)
        sent += self.plan.closes(index, self.steps) and self._closed_after == self.steps
        return sent < self.plan.turns_in(index, self.steps)

    def evaluated(self, which: Evaluated = "agreed") -> contextlib.AbstractContextManager[None]:
        """Return a context inside which the model holds the outer parameters ("agreed"), or inner ones.

        Outer ones (Streaming DiLoCo, Table 3) are shown whatever the replica holds in between. Where replicas have
        different tau, one may apply a fragment's mean before another does: until then, each shows its own outer
        parameters, and a loss over the windows of all is the mean of both.

        Inner ones are those of the first replica, or the mean of all; every replica must enter the context.
        """
        if which == "agreed":
            return showing(self.fragments, lambda f: f.agreed)
        return showing(self.fragments, lambda f: of_replicas(self.world, f.parameters, which))

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters last agreed, in fp32, by name; where replicas have their own, the mean of these.

        Every replica must call it.
        """

        def agreed(fragment: FragmentState) -> Tensor:
            if self.one_model:
                return fragment.agreed
            return self.world.mean(fragment.agreed.to(self.world.device, copy=True), purpose="analysis")

        return whole_parameters(self.fragments, agreed, self.named)

    def map(self, change: Change) -> None:
        """Apply `change` in place to outer state and to the means under way, which are waited for."""
        for fragment in self.fragments:
            fragment.map(change)
            arrived = fragment.arrived(self.world)
            if (mean := arrived.get("under_way")) is not None:
                for each in filter(None, (self.constrain, change)):
                    fragment.change_mean(mean, each)
            if (peers := arrived.get("peers")) is not None:
                change(fragment.values(peers))

    def state_dict(self) -> dict[str, Tensor]:
        """Return outer state, the means under way and how far each fragment is, by name: this rank's own.

        It waits for what is under way.
        """
        state = {"steps_done": torch.tensor(self.steps_done), "closed_after": torch.tensor(self._closed_after)}
        for index, fragment in enumerate(self.fragments):
            state |= {f"{index}/{name}": b for name, b in fragment.state_dict(self.world).items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned; the model's own parameters are left to the caller.

        Raises ConfigError, before anything is restored, where it is not a state of this method and this model.
        """
        check_state(state, self.fragments, {"steps_done": [], "closed_after": []}, transfers=True)
        for index, fragment in enumerate(self.fragments):
            fragment.load_state_dict(of_fragment(state, index), self.world)
        self.steps_done, self._closed_after = int(state["steps_done"]), int(state["closed_after"])
        self.world.step = self.steps_done
        self._prepare()

    def sent_bytes(self, steps: int) -> dict[str, int]:
        """Return the bytes that this replica sends in a run of so many steps, by purpose, in closed form.

        Where the engine was not told its `steps`, NoLoCo sends slow weights ahead after the last turn too, for a turn
        that does not come; these are not counted here.
        """
        return self.plan.total_bytes(steps, self.world.replica)


def begun_with(method: MethodConfig, named: Mapping[str, Tensor], **more: Any) -> dict[str, Any]:
    """Return what all replicas must have begun with, by name: `more`, the method, and parameters' shapes and dtypes."""
    told = more | {f"method.{name}": value for name, value in dataclasses.asdict(method).items()}
    return told | {f"parameter {name}": [list(p.shape), str(p.dtype)] for name, p in named.items()}


def check_state(
    state: Mapping[str, Tensor],
    fragments: Sequence[FragmentState],
    besides: Mapping[str, list[int]],
    *,
    transfers: bool = False,
) -> None:
    """Raise ConfigError where a state dictionary is not one of these fragments.

    It must hold the outer state of each fragment and the tensors that `besides` gives by name, in their shapes; with
    `transfers`, also the numbers of each fragment, and its means where they were under way. It may hold nothing else.
    """
    needed, optional = dict(besides), {}
    for index, fragment in enumerate(fragments):
        needed |= {f"{index}/{name}": list(value.shape) for name, value in fragment.outer_state().items()}
        if transfers:
            needed |= {f"{index}/{name}": [] for name in fragment.numbers}
            optional |= {f"{index}/{name}": [fragment.numel] for name in fragment.means}
    what = f"this is no state of a method of {len(fragments)} fragments"
    if missing := sorted(needed.keys() - state.keys()):
        raise ConfigError(f"{what}: it lacks {missing[0]}")
    known = needed | optional
    if strange := sorted(state.keys() - known.keys()):
        raise ConfigError(f"{what} like these: it has {strange[0]}")
    for name, shape in known.items():
        if name in state and list(state[name].shape) != shape:
            raise ConfigError(f"{what} like these: {name} has the shape {list(state[name].shape)}, not {shape}")


def of_fragment(state: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """Return the part of a state dictionary that is one fragment's, under the names that the fragment gives it."""
    return {name.partition("/")[2]: t for name, t in state.items() if name.startswith(f"{index}/")}


def with_settings(method: MethodConfig, settings: Mapping[str, Any]) -> MethodConfig:
    """Return a method with some fields replaced; a single value may stand where a list belongs.

    Raises ConfigError where `method` is no `MethodConfig`, for a field that does not exist or means nothing to an
    engine, and for a value of another kind than the field's.
    """
    if not isinstance(method, MethodConfig):
        raise ConfigError(f"a method is a MethodConfig, not {brief(method)}; its settings may also be given by name")
    fields = {f.name for f in dataclasses.fields(method)}
    for name in settings:
        if name not in fields:
            raise ConfigError(f"no setting of a method is named {name!r}{nearest(name, fields)}")
        if name in OF_PASSES:
            raise ConfigError(f"method.{name} is for the passes of `lowcomm train`, and means nothing to an engine")
    found = dataclasses.asdict(method) | dict(settings)
    for name, value in found.items():
        if dataclasses.is_dataclass(value):
            found[name] = dataclasses.asdict(value)
        elif isinstance(getattr(method, name), tuple) and isinstance(value, int | str):
            found[name] = (value,)
    return build(MethodConfig, found, "method")
