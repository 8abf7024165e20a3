"""Local updates of replicas that may leave and come back: DiLoCo, Streaming DiLoCo and NoLoCo that outlive workers.

Every turn of a fragment is a round of `lowcomm.comm.membership`: those who are there average, each weighing as the
tokens that it has trained on since that fragment's turn before, and none waits for one that does not answer. A replica
that was killed, cut off or too slow comes back with the parameters last agreed and the outer state of one that has the
latest round, while the others go on.

    store = lowcomm.elastic_store("head:29400")             kept there by `lowcomm store 29400`
    sync = lowcomm.ElasticUpdates(model, store, slot=2, slots=8, steps=10_000, sync_every_steps=30)
    sync.join()
    while sync.is_training:
        batch = data.batch(slot=sync.slot, after=sync.tokens_read)
        loss(model, batch).backward()
        optimizer.step(); optimizer.zero_grad()
        sync.step(tokens=batch.numel())
        if not sync.is_training:
            sync.finish()                                   # after which there may be steps left

Machines need not be equally fast. Where the others have waited for one for half of the grace window, its turn comes at
its next inner step, with what it has trained by then; and it takes fewer inner steps from then on (`pace`), as many as
leave nobody waiting. Its tokens say what its part of a mean weighs. A replica that sees that a round went on without it
comes to where the others are at its next inner step.

One that misses a round as it finishes comes to where the others are too, and may have inner steps left there: so
`finish` is called inside the loop, and does nothing for as long as there are some.

A slot is a share of the data, `tokens_read` how much of it is used, and `steps_done` the step of the run. These go on
where the run is when a replica joins, so a loop needs no other change. The round's mean, the outer step and what
travels are those of `LocalUpdates`: as long as nobody leaves, runs of both agree bit for bit.

With NoLoCo, groups are drawn among those who are there, so nobody's partner is one that is gone. All agree, through the
store, that a round is over, but values travel inside groups alone; slow weights travel with the outer gradients, as the
next group is not known before. A newcomer takes the slow weights of one replica. With Partial Parameter Updates, slot k
trains slice k mod N, and a slice none of whose owners is in a round has an outer gradient of zero there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from lowcomm.codecs import message_seed
from lowcomm.comm.axis import UNBILLED
from lowcomm.comm.elastic import Elastic, Payload, check_place
from lowcomm.comm.membership import Round, Rules
from lowcomm.comm.notes import Notes
from lowcomm.comm.transport import CommError
from lowcomm.comm.worker import Worker
from lowcomm.comm.world import World
from lowcomm.methods.config import MethodConfig
from lowcomm.methods.engine import Change, Engine, Evaluated, named_parameters
from lowcomm.methods.local_updates import (
    LocalUpdates,
    begun_with,
    check_state,
    fragment_states,
    of_fragment,
    showing,
    whole_parameters,
    with_settings,
)
from lowcomm.methods.plan import OUTER, SLOW_WEIGHTS, Plan, Turn, check_mean
from lowcomm.settings import ConfigError, first_difference, whole_number

#: Called with a round and with the slots that it has no more, or has again.
Event = Callable[[Round, tuple[int, ...]], None]


#: Seconds between two looks at whether others wait; the factor by which a slow replica's pace rises where nobody did.
_LOOK_S, _FASTER = 0.1, 1.1


class _Gap:
    """The inner steps of one replica between two turns, or since it has come to where the others are.

    begin: the run's step after which they begin. is_whole: whether they began when the others' did.
    """

    def __init__(self, begin: int, *, is_whole: bool):
        self.begin, self.is_whole = begin, is_whole
        self.taken, self.started, self.was_hurried = 0, time.monotonic(), False

    def after_step(self, end: int, pace: float) -> int:
        """Count an inner step, and return the step of the run that it comes to.

        It comes to `end` once a share (`pace`) of as many steps as lie between has been taken.
        """
        self.taken += 1
        whole = max(1, end - self.begin)
        return self.begin + self.taken * whole // max(1, math.ceil(pace * whole))

    def pace_without(self, waited_s: float, pace: float, end: int) -> float:
        """Return the pace at which nobody would have waited for this replica's turn, which comes now.

        waited_s: for how long others have waited, in seconds. `pace` stays as it is where the gap is not whole.
        """
        self.was_hurried = True
        if not self.is_whole:
            return pace
        passed_s = time.monotonic() - self.started
        return self.taken / max(1, end - self.begin) * max(0.5, 1 - waited_s / passed_s)

    def pace_after(self, pace: float) -> float:
        """Return the pace up to the next turn, as this one has come: a faster one, unless others had to wait for it."""
        return pace if self.was_hurried else min(1.0, _FASTER * pace)


class _Watch:
    """A watch on whether others wait for a replica's turn in round `number`, from 0, or have gone on without it."""

    def __init__(self, elastic: Elastic, number: int, worker: Worker):
        self._elastic, self._number = elastic, number
        self._over = threading.Event()
        self._since: float | None = None
        self.says_hurry = False
        self._looking = worker.submit(self._look)

    def _look(self) -> None:
        """Look at the log until `says_hurry`, or until told to end."""
        elastic, roll = self._elastic, self._elastic.roll
        while not self.says_hurry and not self._over.wait(_LOOK_S):
            elastic.read()
            if len(roll.rounds) == self._number and not roll.members and len(roll.ready) >= roll.quorum:
                self._since = self._since or time.monotonic()
                self.says_hurry = time.monotonic() - self._since > elastic.rules.grace_s / 2
            else:
                self._since, self.says_hurry = None, len(roll.rounds) > self._number

    def end(self) -> float:
        """End the watch, and return for how many seconds others have waited."""
        self._over.set()
        self._looking.result()
        return 0.0 if self._since is None else time.monotonic() - self._since


def check_elastic(plan: Plan, quorum: int, slot: int = 0) -> None:
    """Raise ConfigError for choices that do not go together with replicas that come and go.

    Args:
        plan: what the replicas exchange where all slots are taken.
        quorum: the least number of replicas that a round has.
        slot: the slot of the replica that asks, whose overlap is its own.
    """
    m = plan.method
    if m.trainable == "next_fragment":
        raise ConfigError("elastic replicas do not freeze fragments: not method.trainable = next_fragment")
    if m.record_cosine:
        raise ConfigError("method.record_cosine asks for what other replicas have, who may be gone")
    if m.trainable == "slice" and plan.outer.sends_parameters:
        raise ConfigError(
            f"elastic replicas that train slices send outer gradients: not method.outer = {m.outer}, as nobody may"
            " be there to send the parameters of a slice"
        )
    if m.boundary.replicas:
        raise ConfigError(
            f"elastic replicas all compress between their stages, or none does: not method.boundary.replicas ="
            f" {m.boundary.replicas}"
        )
    fewest = quorum if m.peers == "all" else min(quorum, m.group_size)
    if m.slices > 1:  # those who are there may be of other slices
        fewest = m.slices * max(0, fewest - (plan.replicas - plan.replicas // m.slices))
    check_mean(m, fewest)
    apart = m.sync_every_steps // len(plan.fragments)
    if (tau := plan.overlap(slot)) >= apart:
        raise ConfigError(
            f"method.overlap_steps = {tau} is no less than the {apart} steps between two turns: elastic rounds come"
            " one after the other"
        )


def least_quorum(plan: Plan) -> int:
    """Return the least quorum, from half of the slots on, with which `check_elastic` passes.

    Raises its ConfigError where none does.
    """
    for quorum in range(max(1, plan.replicas // 2), plan.replicas):
        with contextlib.suppress(ConfigError):
            check_elastic(plan, quorum)
            return quorum
    check_elastic(plan, plan.replicas)
    return plan.replicas


class ElasticUpdates(Engine):
    """Local updates of one replica among those that come and go.

    Begin with `join`, after `load_state_dict` where there is a state to resume from.

    Args:
        model: any module, or parameters by name; those that require no gradient are left alone, unless slices are
            trained. All replicas that are there before the first round must begin alike.
        notes: a store that all replicas reach and that outlives them (`elastic_store`).
        slot: this replica's share of the data, from 0. Another start of a replica takes the same slot.
        slots: the number of slots; the first round waits for all of them, if not for longer than the grace window.
        steps: the number of inner steps in the whole run.
        quorum: how many replicas a round needs at least; by default half of the slots, rounded down, but one or more.
        method: the choices; `settings` replace some of its fields, by default those of DiLoCo.
        rules: how long others are waited for.
        seed: of everything random (groups, codecs); the same for all.
        host: the address by which others reach this machine; by default that by which it reaches the store.
        begun: what else all replicas must have been started with, by name.
        world: of a replica that is a pipeline: its own ranks, each with the parameters of its stage
            (`lowcomm.world(stages=...)` under a torchrun of its own). They come and go as one, the first leads
            (`lowcomm.comm.stages`), and all take turns after the same steps.
        on_leave, on_join: called as a round is applied, with the round and the slots that have left, or come back,
            since the round that was applied before.
        constrain, layers: as for `LocalUpdates`.

    Attributes: `plan`; `steps_done`; `tokens_read`, where in its slot's data this replica is: those that rounds have
    counted, and those that it has trained on since; `rounds` that it was a member of; `missed`, how often it has found,
    as it trained, that what it had sent or was to send is in no round (several found at once count as one); `pace`, the
    share of the run's inner steps that it takes between two turns.

    Raises ConfigError for choices that do not go together, and where replicas were started with different ones.
    """

    local = True

    def __init__(
        self,
        model: nn.Module | Mapping[str, Tensor],
        notes: Notes,
        *,
        slot: int,
        slots: int,
        steps: int,
        quorum: int | None = None,
        method: MethodConfig | None = None,
        rules: Rules | None = None,
        seed: int = 0,
        host: str | None = None,
        on_leave: Event | None = None,
        on_join: Event | None = None,
        begun: Mapping[str, Any] | None = None,
        world: World | None = None,
        constrain: Change | None = None,
        layers: int | None = None,
        **settings: Any,
    ):
        self.method = method = with_settings(method or LocalUpdates.default, settings)
        steps, seed = whole_number("steps", steps, at_least=1), whole_number("seed", seed)
        quorum = max(1, slots // 2) if quorum is None else quorum
        check_place(slot, slots, quorum)
        if world is not None and world.replicas > 1:
            raise ConfigError(f"the world of an elastic replica has one replica, itself, not {world.replicas}")
        self.notes, self.rules = notes, rules or Rules()
        self.slot, self.steps, self.seed = slot, steps, seed
        self.world = world if world is not None and world.stages > 1 else None
        self.on_leave, self.on_join = on_leave, on_join
        self.named = named_parameters(model, trained=method.trainable != "slice")
        shapes = {name: tuple(p.shape) for name, p in self.named.items()}
        self.plan = Plan(shapes, method, slots, seed=seed, layers=layers)
        check_elastic(self.plan, quorum, slot)
        self.fragments = fragment_states(self.plan, self.named, slot)
        self.one_model = self.plan.peers.one_model
        self.constrain = constrain if self.plan.may_leave_subspace else None
        self._turns = self.plan.all_turns(steps)
        self.steps_done = self.tokens_read = self.missed = 0
        self._tokens = self._sent_tokens = 0  # since the last turn, and in what is under way
        self._trained, self._sent_weight = [0] * len(self.fragments), 0  # tokens since each fragment's own last turn
        self.rounds: list[Round] = []
        self._next = 0  # of the turns, the one that this replica sends next
        self.pace = 1.0
        self._gap = _Gap(0, is_whole=True)
        self._watch: _Watch | None = None
        self._present = tuple(range(slots))
        # The outer state after the round met last: newcomers have it at once, the model at the step where it is due.
        self._version, self._met = 0, {}
        self._changed = [0] * len(self.fragments)  # the round in which each fragment has changed last
        self._loaded = self._is_finished = False
        self._lock = threading.Condition()
        self._under_way: tuple[int, Future[Round | None]] | None = None
        self._worker = Worker(f"elastic-{slot}")
        stage, stages = (0, 1) if self.world is None else (self.world.stage, self.world.stages)
        if self.world is not None:
            self._check_turns(self.world)
        # What is refused so far leaves no word in the store, which the others would be held to.
        own = {"slots": slots, "steps": steps, "seed": seed, "stages": stages, "quorum": quorum}
        own["rules.silence_s"] = self.rules.silence_s  # by which each times the signs that others wait for
        told = begun_with(method, self.named, **{**(begun or {}), **own})
        self._agree(f"settings/{stage}", told)
        # Which log it is: versions of another mean nothing in it.
        self._log = self._asked("log", uuid.uuid4().hex)
        who = f"{slot}.{uuid.uuid4().hex[:12]}"
        if self.world is not None:
            who = self.world.tell(who, axis="stage")[0]
        self.elastic = Elastic(
            notes,
            who,
            slot,
            slots=slots,
            quorum=quorum,
            end=len(self._turns),
            rules=self.rules,
            host=host,
            serve=self._serve,
            load=self._load,
            stage=stage,
            stages=stages,
        )
        if self.world is not None:
            self.world.tell("", axis="stage")  # by now all can be reached

    @classmethod
    def of(cls, model: nn.Module, world: World, method: MethodConfig, **known: Any) -> ElasticUpdates:
        """Return elastic updates of a model in the world of a replica.

        `known` is as for the constructor, `notes` and `slot` included.
        """
        return cls(model, known.pop("notes"), method=method, world=world, **known)

    def _check_turns(self, world: World) -> None:
        """Raise ConfigError at all stages where they do not take turns after the same steps."""
        after = [turn.step for turn in self._turns]
        told = world.tell([len(self.fragments), hashlib.sha256(repr(after).encode()).hexdigest()], axis="stage")
        for stage, (count, digest) in enumerate(told):
            if digest != told[0][1]:
                raise ConfigError(
                    f"the stages of an elastic replica must take turns after the same steps, but stage {stage} has"
                    f" {count} fragments and the first {told[0][0]}"
                )

    def _says(self, value: float) -> float:
        """Return the `value` that the first stage gives, where there are several; every stage must call it."""
        if self.world is None:
            return value
        told = torch.tensor([value], dtype=torch.float64)  # on the CPU: a GPU would be waited for
        return self.world.broadcast(told, purpose=UNBILLED, axis="stage").item()

    def _digest(self) -> str:
        found = hashlib.sha256()
        for fragment in self.fragments:
            found.update(fragment.agreed.cpu().numpy().tobytes())
        return found.hexdigest()

    def _asked(self, what: str, mine: str) -> str:
        """Write a note to the store where there is none of that name yet, and return the one that is there now.

        Raises CommError where the store does not answer for `Rules.timeout_s`.
        """
        until = time.monotonic() + self.rules.timeout_s
        while (there := self.notes.write_once(f"elastic/{what}", mine)) is None:
            if time.monotonic() >= until:
                raise CommError("the store of the replicas' membership does not answer")
            time.sleep(_LOOK_S)
        return there

    def _agree(self, what: str, mine: dict[str, Any]) -> None:
        """Raise ConfigError where others have left other settings in the store under this name; else leave these."""
        told = json.dumps(mine)
        if differs := first_difference(json.loads(self._asked(what, told)), json.loads(told), "there"):
            raise ConfigError(
                f"replicas were started differently: {differs} (a store is of one run: another run needs another store)"
            )

    def join(self) -> None:
        """Take the slot, and come to where the others are, if they are under way.

        Raises ConfigError where replicas begin with different weights, where the slot has got another holder meanwhile,
        and where the run is over and nobody is left of whom its end could be had. After any error this replica has
        left.
        """
        try:
            self.elastic.read()
            if self._says(not self._version and not self.elastic.roll.rounds):
                self._agree(f"weights/{self.elastic.stage}", {"initial weights": self._digest()})
            self.elastic.join(self._version)
            self._catch_up()
            self._gap = _Gap(self.steps_done, is_whole=self.steps_done == 0)
        except BaseException:
            self.close()
            raise

    @property
    def is_training(self) -> bool:
        """Tell whether there are inner steps left to take."""
        return self.steps_done < self.steps

    def is_over(self) -> bool:
        """Tell whether all rounds of the run are committed, as far as the store's log can be read."""
        self.elastic.read()
        return bool(self._says(self.elastic.roll.is_over))

    def was_there(self) -> bool:
        """Tell whether an earlier start of this slot has joined the run; True, too, where the log cannot be read."""
        return not self.elastic.read() or self.slot in self.elastic.roll.holder

    @property
    def rounds_done(self) -> int:
        """The number of rounds that the parameters last agreed contain, as far as this replica has applied them."""
        return self._next - (self._under_way is not None)

    def data_step(self, step: int, tokens: int) -> int:
        """Return the step, from 1, whose batch of the slot's data comes next; a batch has so many tokens.

        After an absence it is another step than that of the run.
        """
        return self.tokens_read // tokens + 1

    @property
    def is_spokesman(self) -> bool:
        """Tell whether this replica is to report how good the model is.

        Of those that hold one model it is the one with the lowest slot in the round that was applied last; where each
        has a model of its own, each is one.
        """
        return not self.one_model or self.slot == min(self._present)

    def told(self) -> list[dict[str, Any]]:
        """Return who took part in each round of the run, in order, as far as the log has been read.

        A round is {"step", "fragment", "slots", "tokens"}: after which step of the run it was, of which fragment, its
        slots in ascending order, and the tokens that each of them counted.
        """
        found = []
        for turn, done in zip(self._turns, self.elastic.roll.rounds, strict=False):
            slots, tokens = zip(*sorted(zip(done.slots, done.tokens, strict=True)), strict=True)
            found.append({"step": turn.step, "fragment": turn.fragment, "slots": slots, "tokens": tokens})
        return found

    def step(self, tokens: int = 1) -> dict[str, float]:
        """Note an inner step on so many tokens: send the fragment whose turn it is, and apply what is due.

        Where the others have gone on without this replica, the model's parameters, `steps_done` and `tokens_read` are
        from now on as the run has them. Returns {}. Raises ConfigError where the slot has another holder, and CommError
        where the others cannot be reached.
        """
        self._tokens += tokens
        self._trained = [count + tokens for count in self._trained]
        self.tokens_read += tokens
        self.steps_done = self._gap.after_step(self._until, self.pace)
        if self._says(self._watch is not None and self._watch.says_hurry):
            self._hurry()
        while self._is_turn():
            self._send()
        if self._under_way is not None and self._under_way[0] <= self.steps_done:
            self._apply()
        return {}

    def finish(self) -> dict[str, float]:
        """Apply what is under way, exchange what has trained since its last turn, and wait for those who come late.

        Where the others have gone on without this replica, and it has come to where they are, there may be inner steps
        left (`is_training`): then nothing is finished yet, and `finish` is to be called again after them. Returns {}.
        """
        if self._is_finished or self.is_training:
            return {}
        self._end_watch()
        if self._under_way is not None:
            self._apply()
        while self._next < len(self._turns) and not self.is_training:
            self._send()
            if self._under_way is not None:
                self._apply()
        if self.is_training:
            return {}
        self.elastic.wait_for_the_late()
        self._is_finished = True
        return {}

    def stop(self) -> None:
        """Interrupt, from another thread, what this replica waits for: `join`, `step` or `finish` raises CommError.

        What it has is as it was before, and can be kept (`state_dict`). A `finish` that has exchanged everything, and
        waits for those who come late, returns instead. Where there are several stages, it is the first whose `stop`
        counts, and it ends what the others are in too.
        """
        if self.elastic.stage == 0:
            self.elastic.stop()

    def close(self) -> None:
        """Leave the run: nobody waits for this replica any more, and nothing can be fetched from it."""
        self.elastic.stop()
        try:
            self._end_watch()
        finally:
            self._worker.end()
            self.elastic.close()

    def evaluated(self, which: Evaluated = "agreed") -> AbstractContextManager[None]:
        """Return a context inside which the model holds the parameters last agreed, as of the rounds applied here.

        Raises ConfigError for parameters of other replicas, which may be gone.
        """
        if which != "agreed":
            raise ConfigError(f"elastic replicas evaluate the parameters last agreed, not {which}")
        return showing(self.fragments, lambda fragment: fragment.agreed)

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters last agreed, in fp32, by name; where replicas have their own, this one's."""
        return whole_parameters(self.fragments, lambda fragment: fragment.agreed, self.named)

    def _is_turn(self) -> bool:
        """Tell whether a turn is due; those that close the run belong to `finish`."""
        if self._next == len(self._turns):
            return False
        turn = self._turns[self._next]
        return turn.step <= self.steps_done and not turn.is_closing

    @property
    def _until(self) -> int:
        """The step at which this replica's next turn is due, or the run's last."""
        return self._turns[self._next].step if self._next < len(self._turns) else self.steps

    def _hurry(self) -> None:
        """Jump to this replica's turn, as others wait for it, or come to where they are, as they have gone on."""
        waited_s = self._end_watch()
        if self._under_way is not None and not self._apply():
            return  # it has come to where the others are
        self.elastic.read()
        if self._says(len(self.elastic.roll.rounds) > self._next):
            self.missed += 1
            self._catch_up()
        else:
            self.pace = self._says(self._gap.pace_without(waited_s, self.pace, self._until))
            self.steps_done = self._until

    def _begin_watch(self) -> None:
        """Watch, beside the inner steps and at the first stage, whether others wait for this replica's next turn."""
        if self._next < len(self._turns) and self.elastic.stage == 0:
            self._watch = _Watch(self.elastic, self._next, self._worker)

    def _end_watch(self) -> float:
        """End the watch, if there is one, and return for how many seconds the others have waited."""
        watch, self._watch = self._watch, None
        return 0.0 if watch is None else watch.end()

    def _send(self) -> None:
        self._end_watch()
        if self._under_way is not None:
            self._apply()
            return  # and perhaps this replica has come to where the others are
        turn = self._turns[self._next]
        self.pace = self._gap.pace_after(self.pace)
        self._gap = _Gap(self.steps_done, is_whole=True)
        self.elastic.step = turn.step
        weight = self._trained[turn.fragment]
        meeting = self._worker.submit(self._meet, turn, self._payloads(turn), self._tokens, weight)
        self._sent_tokens, self._tokens = self._tokens, 0
        self._sent_weight, self._trained[turn.fragment] = weight, 0
        self._next += 1
        self._under_way = turn.step + (0 if turn.step == self.steps else self.plan.overlap(self.slot)), meeting
        self._begin_watch()

    def _payloads(self, turn: Turn) -> list[Payload]:
        fragment, plan = self.fragments[turn.fragment], self.plan
        seed = message_seed(self.seed, turn.step, turn.fragment, self.slot)
        message, packed = fragment.message(
            plan.outer_at(turn.step, self.steps),
            lambda x: plan.encoded(turn.fragment, x, seed),
            self.constrain,
            may_be_unsaid=True,
        )
        found = [Payload(message, plan.codec, OUTER, seed, plan.sections(turn.fragment), packed, plan.mean.over)]
        if SLOW_WEIGHTS in plan.purposes(turn.number):
            found.append(Payload(fragment.agreed.clone(), plan.fp32, SLOW_WEIGHTS))
        fragment.release()
        return found

    def _meet(self, turn: Turn, payloads: list[Payload], tokens: int, weight: int) -> Round | None:
        """Meet the others in a round, take the outer step with its mean, and return the round; beside the inner steps.

        The result is kept for others to fetch, and adopted by `_apply`. None where the round went on without this
        replica.
        """
        fragment = self.fragments[turn.fragment]

        def group(present: list[int]) -> list[int]:
            return self.plan.group(turn.fragment, turn.number, self.slot, present=present)

        if (met := self.elastic.meet(payloads, tokens, group, weight)) is None:
            return None
        committed, means = met
        mean, peers = (*(value.to(fragment.parameters[0].device) for value in means), None)[:2]
        mean = fragment.of_mean(mean)
        if self.constrain is not None:
            self.constrain(fragment.values(mean))
        state = fragment.after(mean, peers, self.plan.outer_at(turn.step, self.steps))
        with self._lock:
            self._version, self._met = committed.id, {turn.fragment: state}
            self._changed[turn.fragment] = committed.id
            self._lock.notify_all()
        return committed

    def _apply(self) -> bool:
        """Apply the round under way, once it is committed, and return True.

        Return False where it went on without this replica, which then comes to where the others are.
        """
        _, meeting = self._under_way
        self._under_way = None
        if (committed := meeting.result()) is None:
            self.missed += 1
            self._catch_up()
            return False
        with self._lock:
            for index, state in self._met.items():
                self.fragments[index].adopt(state, self.method.mixing)
            self._met = {}
        self.rounds.append(committed)
        self._tell(committed)
        return True

    def _tell(self, committed: Round) -> None:
        before, self._present = self._present, committed.slots
        left = tuple(slot for slot in before if slot not in committed.slots)
        joined = tuple(slot for slot in committed.slots if slot not in before)
        for event, slots in ((self.on_leave, left), (self.on_join, joined)):
            if event is not None and slots:
                event(committed, slots)

    def _catch_up(self) -> None:
        """Come to where the others are: the latest round's parameters, at the step after which it was sent.

        Raises ConfigError where the slot has another holder, or the run is over and nobody is left who has its end.
        """
        self._end_watch()
        for fragment in self.fragments:
            fragment.unsay()
        self._loaded = False
        if (found := self.elastic.catch_up()) is None:
            roll = self.elastic.roll
            if not roll.holds(self.elastic.member.who):
                raise ConfigError(f"slot {self.slot} has another holder, {roll.holder[self.slot]}, which came later")
            raise ConfigError(
                f"the run of this store is over, after {len(roll.rounds)} rounds, and nobody is left who has its end"
            )
        done, tokens = found
        if done <= self._next and not self._loaded:  # the round that this replica trains for, or has sent for, is open
            if done < self._next:
                self._next, self._tokens = done, self._tokens + self._sent_tokens
                self._trained[self._turns[done].fragment] += self._sent_weight
        else:
            self.steps_done = self._turns[done - 1].step if done else 0
            self._next, self._tokens, self.tokens_read = done, 0, tokens
            self._trained = [0] * len(self.fragments)
            self._gap = _Gap(self.steps_done, is_whole=done == 0)
        self._begin_watch()

    def map(self, change: Change) -> None:
        """Raise ConfigError: what is kept of parameters is the others' too, and cannot be changed here alone."""
        raise ConfigError("elastic replicas keep to the subspace that they begin with, as others do")

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state from which another start can resume, by name; this rank's own.

        It is the parameters last agreed, the outer state, the "version", which is the id of the round that they are of,
        and the "log", which names the store's log that has this round. Where there are several stages, all must call
        it; the round is the latest that all of them have.
        """
        with self._lock:
            version = self._version
            if self.world is not None:
                version = min(self.world.tell(version, axis="stage"))
            own = self._own(heard=self._met if version == self._version else ())
            return self._state(version) | {name: value.cpu() for name, value in own.items()}

    def _state(self, version: int, *, since: int = 0) -> dict[str, Tensor]:
        """Return the agreed state as of the round met last, or as of the one before. The lock is held.

        since: a round's id; fragments that have not changed after it are left out, none where it is 0.
        """
        met = self._met if version == self._version else {}
        state = {
            f"{index}/{name}": value.detach().cpu().clone()
            for index, fragment in enumerate(self.fragments)
            if not since or self._changed[index] > since
            for name, value in met.get(index, fragment.agreed_state()).items()
        }
        log = torch.frombuffer(bytearray.fromhex(self._log), dtype=torch.uint8)
        return state | {"version": torch.tensor(version), "log": log}

    def _own(self, heard: Collection[int] = ()) -> dict[str, Tensor]:
        """Return what of outer state is this replica's own; heard: fragments whose round is met, but not applied."""
        own = [fragment.own_state(heard=index in heard) for index, fragment in enumerate(self.fragments)]
        return {f"{index}/{name}": value.clone() for index, some in enumerate(own) for name, value in some.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned; the model's parameters become those last agreed.

        Raises ConfigError, before anything is restored, where it is not a state of this method and this model, and
        where it is of another store's log, in which its round is not to be found.
        """
        check_state(state, self.fragments, {"version": [], "log": [len(self._log) // 2]})
        if bytes(state["log"].tolist()).hex() != self._log:
            raise ConfigError(
                "it is of another store's log, and its round is not in this one: start with the store that it was made"
                " with, or delete it on all replicas to begin the run anew"
            )
        with self._lock:
            for index, fragment in enumerate(self.fragments):
                fragment.put_outer_state(of_fragment(state, index))
                fragment.begin_from_agreed()
            self._version, self._met = int(state["version"]), {}
            self._changed = [self._version] * len(self.fragments)  # or before
            self._lock.notify_all()

    def _serve(self, wanted: int, has: int = 0) -> tuple[int, bytes] | None:
        with self._lock:
            if not self._lock.wait_for(lambda: self._version >= wanted, self.rules.timeout_s):
                return None
            state = self._state(self._version, since=has)
        return int(state["version"]), safetensors.torch.save(state)

    def _load(self, raw: bytes) -> None:
        self._loaded = True
        own, since = self._own(), zip(self._turns, self.elastic.roll.rounds, strict=False)
        said = {turn.fragment for turn, met in since if met.id > self._version and self.slot in met.slots}
        for name, residual in own.items():  # what it kept of these an earlier start of this slot has said since
            if int(name.partition("/")[0]) in said:
                residual.zero_()
        with self._lock:
            state = self._state(self._version)  # of which fragments that have not changed since are not given again
        self.load_state_dict(state | own | safetensors.torch.load(raw))
