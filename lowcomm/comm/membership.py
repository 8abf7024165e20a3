"""Membership: which replicas take part in a round, agreed through one log, while replicas leave and come back.

What replicas must agree on is written to a log, an entry at a time, by any of them. The log (a store with
compare-and-set, or a list between threads) gives entries an order and does nothing else; every replica folds them by
the same rules (`Roll`), so all that have read equally far have the same state. There is no coordinator to be lost.

    Join      a replica takes a slot, or is back in it, and states which round its parameters are of
    Ready     a replica has trained its share of a round and can send its values
    Close     those who are not ready have been waited for long enough
    Done      a member has taken what all other members have sent
    Lost      a replica does not answer, or leaves
    Rollback  nobody is left who has the round that was committed last

A round gathers until all slots that are awaited are ready, or until it is closed with a quorum of them. Then an attempt
begins, of exactly those members, who exchange their values. The round is committed when all of them are done: from
then on each has the same mean, whatever happens to the others. If one is lost before, another attempt begins without
it, with the values of the others. A replica that has missed a round takes the agreed state from a donor, who must have
the latest round; so a newcomer is never a donor, and nothing is averaged that is of another history.

A slot is a share of the data. Tokens count when their round is committed, and a slot's next holder continues from
there: no token of a committed round is counted twice, and what was trained for a round that went on without it, or that
all have gone back on, is named in `Roll.missed`.

`Member` is one replica's part, as generators that yield one request at a time (`Look`, `Say`, `Exchange`, `Fetch`) and
are sent the answer. A driver carries the requests out, over sockets and a store, or in a simulation in which a schedule
of faults can be repeated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from lowcomm.comm.transport import CommError
from lowcomm.settings import ConfigError


@dataclass(frozen=True)
class Join:
    """The entry by which a replica takes a slot, or is back in it.

    version: the id of the round that its parameters are of; 0 for those that all begin with.
    """

    who: str
    slot: int
    version: int


@dataclass(frozen=True)
class Ready:
    """The entry that says that a replica is ready for a round, having trained on so many tokens since the one before.

    weight: that of its values in the mean, by default the tokens. It is another number where the round is of something
    that was exchanged longer ago than in the round before.
    """

    who: str
    round: int
    tokens: int
    weight: int | None = None


@dataclass(frozen=True)
class Close:
    """The entry by which an attempt begins without the replicas that are not ready, if a quorum is."""

    round: int
    attempt: int


@dataclass(frozen=True)
class Done:
    """The entry that says that a member of an attempt has taken what all other members have sent."""

    who: str
    round: int
    attempt: int


@dataclass(frozen=True)
class Lost:
    """The entry that says that a member of an attempt, or a donor, does not answer, or that a replica leaves.

    by: the replica that has noticed it; `who` itself where it leaves.
    """

    who: str
    round: int
    attempt: int
    by: str


@dataclass(frozen=True)
class Rollback:
    """The entry by which all go back to the round of id `to`, as nobody has the latest one."""

    round: int
    to: int


#: What the log consists of. `who` is a replica's name, `round` a round's number, from 0, `attempt` as in `Roll`.
Entry = Join | Ready | Close | Done | Lost | Rollback


@dataclass(frozen=True)
class Round:
    """A committed round: its members, with the slot and the trained tokens of each in the order of `members`.

    id: the length of the log when it was committed, which no other round has. attempt: the one that succeeded.
    """

    id: int
    attempt: int
    members: tuple[str, ...]
    slots: tuple[int, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Round:
        """Return the round with these fields, in which JSON has made lists of the tuples."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})


class Roll:
    """The state that the log's entries so far add up to, which is the same for all who have read equally far.

    Args:
        slots: the number of slots; the first round waits for all of them.
        quorum: the least number of members that a round needs.
        end: the number of rounds of the run; None where it is not known. After the last there is no rollback.

    Attributes: `length` of the log so far; `holder` of each slot, and `slot` of each replica; `awaited`, the slots that
    a round waits for; `version` of each replica; `rounds` that are committed; `ready`, the tokens of the replicas that
    are ready for the round under way, and their `weights` in it; `members` of the attempt under way, none while the
    round gathers, and `done`, those of them who have taken all values; `attempt`, how often the round has begun or lost
    a member; `missed`, rows (who, round, tokens) of tokens that count in no round.
    """

    def __init__(self, slots: int, quorum: int, end: int | None = None):
        self.slots, self.quorum, self.end = slots, quorum, end
        self.length = self.attempt = 0
        self.holder: dict[int, str] = {}
        self.slot: dict[str, int] = {}
        self.awaited = set(range(slots))
        self.version: dict[str, int] = {}
        self.rounds: list[Round] = []
        self.ready: dict[str, int] = {}
        self.weights: dict[str, int] = {}
        self.members: tuple[str, ...] = ()
        self.done: set[str] = set()
        self.missed: list[tuple[str, int, int]] = []
        self._settled = 0  # so many of these are of rounds that are over
        self._used: dict[int, int] = {}  # the attempts that a round had before all went back to one before it

    @property
    def key(self) -> tuple[int, int]:
        """The number of the round under way, from 0, and that of its attempt."""
        return len(self.rounds), self.attempt

    @property
    def latest(self) -> int:
        """The id of the round that was committed last; 0 before the first."""
        return self.rounds[-1].id if self.rounds else 0

    @property
    def is_over(self) -> bool:
        """Tell whether all rounds of the run are committed."""
        return len(self.rounds) == self.end

    def rounds_of(self, version: int) -> int:
        """Return how many committed rounds the parameters of a version contain; -1 for those of another history."""
        ids = [0, *(r.id for r in self.rounds)]
        return ids.index(version) if version in ids else -1

    def tokens(self, slot: int) -> int:
        """Return how many tokens of a slot are counted in committed rounds, which is where its holder continues."""
        return sum(t for r in self.rounds for s, t in zip(r.slots, r.tokens, strict=True) if s == slot)

    def holds(self, who: str) -> bool:
        """Tell whether a replica still holds the slot that it took."""
        return who in self.slot and self.holder[self.slot[who]] == who

    def present(self) -> list[str]:
        """Return the replicas for which a round waits, in order of their names."""
        return sorted(who for slot, who in self.holder.items() if slot in self.awaited)

    def donors(self) -> list[str]:
        """Return the replicas that are present and have the latest round, from which the agreed state can be taken."""
        return [who for who in self.present() if self.version[who] == self.latest]

    def take(self, entry: Entry) -> None:
        """Fold the log's next entry into this state.

        One that does not fit what is under way, or comes too late, changes nothing but `length`; the tokens of such a
        `Ready` are noted in `missed`.
        """
        self.length += 1
        getattr(self, f"_take_{type(entry).__name__.lower()}")(entry)

    def _take_join(self, entry: Join) -> None:
        before = self.holder.get(entry.slot)
        if before is not None and before != entry.who:
            self._drop(before)
        self.holder[entry.slot], self.slot[entry.who], self.version[entry.who] = entry.who, entry.slot, entry.version
        self.awaited.add(entry.slot)

    def _take_ready(self, entry: Ready) -> None:
        current = self.holds(entry.who) and self.version[entry.who] == self.latest
        if entry.round == len(self.rounds) and current and not self.members:
            self.ready[entry.who] = entry.tokens
            self.weights[entry.who] = entry.tokens if entry.weight is None else entry.weight
            of_this = self.missed[self._settled :]  # what it trained counts after all
            self.missed[self._settled :] = [row for row in of_this if row[:2] != (entry.who, entry.round)]
            self.awaited.add(self.slot[entry.who])
            self._begin_if_all_are_ready()
        elif not self._counts(entry):
            self.missed.append((entry.who, entry.round, entry.tokens))

    def _counts(self, entry: Ready) -> bool:
        """Tell whether an entry repeats one that was counted, as a replica does when the store seemed not to answer."""
        if entry.round == len(self.rounds):
            return entry.who in self.ready
        return entry.round < len(self.rounds) and entry.who in self.rounds[entry.round].members

    def _take_close(self, entry: Close) -> None:
        if (entry.round, entry.attempt) == self.key and not self.members and len(self.ready) >= self.quorum:
            self.awaited = {self.slot[who] for who in self.ready}
            self._begin_if_all_are_ready()

    def _take_lost(self, entry: Lost) -> None:
        if (entry.round, entry.attempt) == self.key and self.holds(entry.who):
            self._drop(entry.who)
            self._begin_if_all_are_ready()

    def _take_done(self, entry: Done) -> None:
        if (entry.round, entry.attempt) != self.key or entry.who not in self.members:
            return
        self.done.add(entry.who)
        if self.done == set(self.members):
            slots, tokens = (tuple(of[who] for who in self.members) for of in (self.slot, self.ready))
            self.rounds.append(Round(self.length, self.attempt, self.members, slots, tokens))
            for who in self.members:
                self.version[who] = self.latest
            self._gather()

    def _take_rollback(self, entry: Rollback) -> None:
        there = self.present()
        if entry.round != len(self.rounds) or self.donors() or len(there) < self.quorum or self.is_over:
            return
        most = max(self.rounds_of(self.version[who]) for who in there)
        if most >= 1 and self.rounds_of(entry.to) == most:
            self._used |= {number: r.attempt for number, r in enumerate(self.rounds)} | {len(self.rounds): self.attempt}
            for number, gone in enumerate(self.rounds[most:], most):
                self.missed += [(who, number, tokens) for who, tokens in zip(gone.members, gone.tokens, strict=True)]
            del self.rounds[most:]
            self._gather()

    def _gather(self) -> None:
        self.ready, self.weights, self.members, self.done = {}, {}, (), set()
        self.attempt = self._used.get(len(self.rounds), 0)
        self._settled = len(self.missed)

    def _drop(self, who: str) -> None:
        """Wait for a replica no more; an attempt that it is a member of is over, and another begins without it."""
        self.awaited.discard(self.slot[who])
        if who in self.ready:
            self.missed.append((who, len(self.rounds), self.ready.pop(who)))
            self.weights.pop(who, None)
        if who in self.members:
            self.attempt += 1
            self.members, self.done = (), set()
            self._begin_if_all_are_ready()

    def _begin_if_all_are_ready(self) -> None:
        waited_for = {self.holder.get(slot) for slot in self.awaited}
        if not self.members and waited_for <= self.ready.keys() and len(self.ready) >= self.quorum:
            self.attempt += 1
            self.members = tuple(sorted(self.ready))


@dataclass(frozen=True)
class Look:
    """A request to read on in the log, after a moment. The answer is whether the log could be reached."""


@dataclass(frozen=True)
class Say:
    """A request to append an entry to the log and to read on to it. The answer is as of `Look`."""

    entry: Entry


@dataclass(frozen=True)
class Exchange:
    """A request to send this replica's values to all members of an attempt, and to take theirs.

    The answer is the name of a member that does not answer, "" where all do. The driver gives up when there is no sign
    of a member for `Rules.silence_s`, and as soon as `Roll.key` is not `key` any more.
    """

    key: tuple[int, int]
    members: tuple[str, ...]


@dataclass(frozen=True)
class Fetch:
    """A request to take the agreed state from a donor.

    The answer is the state's version; `NO_ANSWER` where the donor was asked and does not answer, None where it could
    not even be asked.
    """

    donor: str


NO_ANSWER = -1


Request = Look | Say | Exchange | Fetch


@dataclass(frozen=True)
class Rules:
    """For how long a replica waits, in seconds.

    grace_s: for the other replicas, once a quorum is ready. silence_s: in an exchange, for any sign of a member: bytes,
    or the word that it is alive, which each member gives all others several times in that while. timeout_s: for a
    donor's answer, and for an exchange in which nothing moves. alone_s: for the log to answer, for a quorum to come
    together, or for an exchange with others to succeed, before the replica gives up.

    Raises ConfigError for one that is not above 0 and finite.
    """

    timeout_s: float = 30.0
    grace_s: float = 5.0
    silence_s: float = 5.0
    alone_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("timeout_s", "grace_s", "silence_s", "alone_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"rules.{name} = {getattr(self, name)} must be above 0 and finite")


class Member:
    """One replica's part in the agreement, as generators that yield requests (`Request`) and are sent their answers.

    Args:
        who: the replica's name, which no other replica has, nor had an earlier start of it.
        slot: the share of the data that it takes, from 0.
        roll: the state of the log as far as it was read; the driver folds what it reads into this.
        now: returns the time by the replica's clock, in seconds.
        rules: for how long the replica waits.
        heard: returns when, by that clock, there was the last sign of a replica; by default there never was one.

    Attributes: `version`, the id of the round that its parameters are of.
    """

    def __init__(
        self,
        who: str,
        slot: int,
        roll: Roll,
        now: Callable[[], float],
        rules: Rules,
        heard: Callable[[str], float] = lambda who: -math.inf,
    ):
        self.who, self.slot, self.roll, self.now, self.rules, self.heard = who, slot, roll, now, rules, heard
        self.version = 0
        #: Whom this member has called lost since its last round with others, and when.
        self._in_vain: dict[str, float] = {}

    def join(self, version: int) -> Generator[Request, Any, None]:
        """Take the slot, with parameters of a version: 0 for those that all begin with, else a checkpoint's."""
        self.version = version
        yield from self._say(Join(self.who, self.slot, version))

    def catch_up(self) -> Generator[Request, Any, bool]:
        """Take the agreed state from donors until this replica has the latest round.

        Where there has been no donor for three times `Rules.timeout_s`, this replica makes all go back to the latest
        round that somebody has (`Rollback`). Returns True when it has the latest round and is awaited; False where its
        slot has another holder, and where the run is over and nobody is left who has its end. Raises CommError where it
        is this replica that reaches nobody, or that no answer reaches: all of several donors have been asked twice in
        vain, as faults of their own may have befallen all of them once, or a single one has, was called lost for that,
        and has spoken in the log since; one that could not even be asked is then tried for `Rules.timeout_s`.
        """
        roll, alone_since = self.roll, None
        in_vain = Counter[str]()  # how often each donor was asked without an answer
        called_lost: dict[str, float] = {}  # when
        while True:
            while not (yield Look()):
                pass
            if not roll.holds(self.who):
                return False
            is_awaited = self.slot in roll.awaited
            if self.version == roll.latest:
                if is_awaited and roll.version[self.who] == self.version:
                    return True
                yield from self._say(Join(self.who, self.slot, self.version))
                continue
            if donors := [who for who in roll.donors() if who != self.who]:
                alone_since, key = None, roll.key
                least = min(in_vain[who] for who in donors)
                if least >= 2 and len(donors) > 1:
                    raise CommError(f"{self.who} has asked {', '.join(donors)} in vain: can they reach its address?")
                donors = [who for who in donors if in_vain[who] == least]
                donors = [who for who in donors if who not in called_lost] or donors
                donor = donors[(self.slot + roll.length) % len(donors)]
                version = yield Fetch(donor)
                if version == NO_ANSWER and len(roll.donors()) > 1:
                    in_vain[donor] += 1
                    continue
                if version in (None, NO_ANSWER):
                    if donor not in called_lost:
                        called_lost[donor] = self.now()
                        yield from self._say(Lost(donor, *key, self.who))
                    elif version == NO_ANSWER or self.now() - called_lost[donor] > self.rules.timeout_s:
                        raise CommError(f"{self.who} has asked {donor} in vain: can it reach its address?")
                    continue
                in_vain.clear()
                called_lost.clear()
                if roll.rounds_of(version) > roll.rounds_of(self.version):
                    self.version = version
                    yield from self._say(Join(self.who, self.slot, version))
                continue
            if not is_awaited:
                yield from self._say(Join(self.who, self.slot, self.version))
            alone_since = self.now() if alone_since is None else alone_since
            if self.now() - alone_since > 3 * self.rules.timeout_s:
                if roll.is_over:
                    return False
                yield from self._go_back()
                alone_since = None

    def leave(self) -> Generator[Request, Any, None]:
        """Give the slot up, so that nobody waits for this replica."""
        for _ in range(3):  # what is said of an attempt that has just ended is not heard
            if not self.roll.holds(self.who) or self.slot not in self.roll.awaited or self.roll.is_over:
                return
            if not (yield Say(Lost(self.who, *self.roll.key, self.who))):
                return

    def _go_back(self) -> Generator[Request, Any, None]:
        roll = self.roll
        if len(roll.present()) < roll.quorum:
            return
        most = max((roll.rounds_of(roll.version[who]) for who in roll.present()), default=0)
        if most >= 1:
            yield from self._say(Rollback(len(roll.rounds), roll.rounds[most - 1].id))

    def meet(self, tokens: int, weight: int | None = None) -> Generator[Request, Any, Round | None]:
        """Take part in the round under way, having trained on so many tokens; `weight` is as in `Ready`.

        Returns the round as it was committed, whose mean is to be applied; None where it went on without this replica,
        which then has to `catch_up`. Raises CommError where it is this replica that does not reach the others: one that
        it has called lost comes back and again gives it no answer, and there was no round with others for
        `Rules.alone_s`.
        """
        roll, number, me = self.roll, len(self.roll.rounds), self.who
        yield from self._say(Ready(me, number, tokens, weight))
        closing = waiting = None
        looked = self.now()
        while roll.latest == self.version and roll.holds(me):
            key = roll.key
            stood, looked = self.now() - looked, self.now()
            if not roll.members:
                if me not in roll.ready:
                    return None
                enough = len(roll.ready) >= roll.quorum
                closing = None if not enough else self.now() if closing is None else closing
                if closing is not None and self.now() - closing > self.rules.grace_s:
                    closing = None
                    yield from self._say(Close(*key))
                else:
                    yield Look()
                continue
            closing = None
            if waiting is None or waiting[0] != key:
                waiting = key, self.now()
                if me in roll.members:
                    lost = yield Exchange(key, roll.members)
                    if lost and self.now() - self._in_vain.setdefault(lost, self.now()) > self.rules.alone_s:
                        raise CommError(f"{me} has swapped with {lost} in vain: can it reach its address?")
                    if roll.key == key:
                        yield from self._say(Lost(lost, *key, me) if lost else Done(me, *key))
                    looked = self.now()
                    waiting = key, looked
                continue
            if stood > self.rules.silence_s / 2:  # it was this replica that stood still
                waiting = key, self.now()
            # Members report each other soon. An attempt whose members are all gone is ended by one who stands by.
            patience = self.rules.silence_s if me in roll.members else 4 * self.rules.timeout_s
            silent = (who for who in roll.members if who not in roll.done and who != me)
            silent = (who for who in silent if self.now() - max(waiting[1], self.heard(who)) > patience)
            if (gone := next(silent, None)) is not None:
                waiting = key, self.now()
                yield from self._say(Lost(gone, *key, me))
            else:
                yield Look()
        if (kept := roll.rounds_of(self.version)) == number and number < len(roll.rounds):
            committed = roll.rounds[kept]
            if me in committed.members and roll.version[me] == committed.id:
                self.version = committed.id
                if len(committed.members) > 1:
                    self._in_vain.clear()
                return committed
        return None

    def _say(self, entry: Entry) -> Generator[Request, Any, None]:
        while not (yield Say(entry)):
            pass
