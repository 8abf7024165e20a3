"""Replicas in virtual time under a schedule of faults that a seed decides and that can be repeated.

Each replica trains a model of four numbers on tokens that are a function of its slot and their index, by the protocol
of `lowcomm.comm.membership`. What it has committed is on its disk. Wires delay, lose and corrupt; replicas die, come
back with or without their disk, stand still, and lose sight of each other or of the log.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

from lowcomm.comm.membership import NO_ANSWER, Exchange, Fetch, Look, Member, Request, Roll, Rules, Say
from lowcomm.comm.transport import CommError

RULES = Rules(timeout_s=3.0, grace_s=1.0, silence_s=3.0)
#: Seconds of a step; between two looks at the log.
STEP_S, LOOK_S = 0.2, 0.05
TOKENS = 5
State = tuple[int, tuple[float, ...], tuple[float, ...]]  # version, parameters last agreed, momentum


@dataclass(frozen=True)
class Fault:
    """A fault that happens at a time.

    kind: "kill" (`slots` die, and are back after `seconds`), "pause", "cut" (`slots` and `others` lose sight of each
    other), "offline" (`slots` lose sight of the log), "slow" (what `slots` send takes as long as others wait, or
    half of that), "corrupt" (some messages after this), "wipe" (disks are lost).
    """

    at: float
    kind: str
    slots: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    seconds: float = 0.0


def schedule(seed: int, slots: int, span: float) -> list[Fault]:
    """Return up to eight faults within a span of seconds."""
    draw = random.Random(seed)
    found = []
    for _ in range(draw.randint(1, 8)):
        at, one = draw.uniform(0, span), draw.randrange(slots)
        kind = draw.choice(["kill", "kill", "pause", "cut", "offline", "slow", "corrupt", "all die", "late", "wipe"])
        if kind == "cut":
            side = [slot for slot in range(slots) if draw.random() < 0.5]
            others = tuple(slot for slot in range(slots) if slot not in side)
            found.append(Fault(at, "cut", tuple(side), others, draw.choice([0.5, 4, 15])))
        elif kind == "all die":
            found += [Fault(at + draw.uniform(0, 0.01), "kill", (s,), (), draw.choice([1, 3])) for s in range(slots)]
        elif kind == "late":
            found.append(Fault(0.11, "kill", (one,), (), draw.choice([5, 20])))
        elif kind == "wipe":
            found += [Fault(at, "wipe", (one,)), Fault(at, "kill", (one,), (), 1)]
        else:
            found.append(Fault(at, kind, (one,), (), draw.choice([0.05, 0.5, 4, 15])))
    return sorted(found, key=lambda fault: fault.at)


class Faulty:
    """The simulation.

    Attributes: `log`; `ended`, the last state of each replica that came to the end; `seen`, of each version all states
    that replicas had of it; `asked`, of all who were asked for the agreed state their version, and the latest; `sent`,
    how many messages there were of each attempt; `trained`, of each version and slot the first token and the one after
    the last; `wrong`, what replicas themselves found not to be as promised.
    """

    def __init__(self, faults: Iterable[Fault], *, slots: int, quorum: int, rounds: int, seed: int = 0):
        self.slots, self.quorum, self.rounds = slots, quorum, rounds
        self.draw = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.log: list = []
        self._lives: dict[str, Generator[float, None, None]] = {}
        self._still: dict[str, float] = {}  # who -> until when
        self._cuts: list[tuple[float, set[str], set[str]]] = []
        self._slow: dict[str, float] = {}  # slot -> until when
        self._corrupt = 0
        self._boxes: dict[tuple, tuple[float, ...] | None] = {}
        self._served: dict[str, State] = {}
        self._disks: dict[int, State] = {}
        self._starts = [0] * slots
        self.ended: dict[str, State] = {}
        self.seen: dict[int, set[State]] = {}
        self.asked: list[tuple[int, int]] = []
        self.sent: Counter[tuple[int, int]] = Counter()
        self.trained: dict[tuple[int, int], tuple[int, int]] = {}
        self.wrong: list[str] = []
        for slot in range(slots):
            self._at(self.draw.uniform(0, 0.1), lambda slot=slot: self._start(slot))
        for fault in faults:
            self._at(fault.at, lambda fault=fault: self._happen(fault))

    def run(self, until: float = 2000.0) -> float:
        """Let all happen, and return when it was over."""
        while self._events and self.now < until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self.now

    def loss(self) -> float:
        """Return what the parameters agreed at the end lose on a token: 0.25, its variance, and their distance squared.

        That is from the mean of all tokens, per number.
        """
        _, agreed, _ = next(iter(self.ended.values()))
        return 0.25 + sum((a - 1) ** 2 for a in agreed) / len(agreed)

    def roll(self) -> Roll:
        """Return the state that the log adds up to at the end."""
        roll = Roll(self.slots, self.quorum, self.rounds)
        for entry in self.log:
            roll.take(entry)
        return roll

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _start(self, slot: int) -> None:
        if not any(who.startswith(f"{slot}.") for who in self._lives):
            who = f"{slot}.{self._starts[slot]}"
            self._starts[slot] += 1
            self._lives[who] = self._life(who, slot)
            self._step(who)

    def _step(self, who: str) -> None:
        if who not in self._lives:
            return
        if self._still.get(who, 0) > self.now:
            self._at(self._still[who], lambda: self._step(who))
            return
        try:
            wait = next(self._lives[who])
        except StopIteration:
            del self._lives[who]
        else:
            self._at(self.now + wait, lambda: self._step(who))

    def _happen(self, fault: Fault) -> None:
        of = [who for who in self._lives if int(who.partition(".")[0]) in fault.slots]
        until = self.now + fault.seconds
        if fault.kind == "kill":
            for who in of:
                del self._lives[who]
                self._served.pop(who, None)
            for slot in fault.slots:
                self._at(until, lambda slot=slot: self._start(slot))
        elif fault.kind == "pause":
            self._still |= {who: max(until, self._still.get(who, 0)) for who in of}
        elif fault.kind == "slow":
            self._slow |= {str(slot): until for slot in fault.slots}
        elif fault.kind == "corrupt":
            self._corrupt += 2
        elif fault.kind == "wipe":
            for slot in fault.slots:
                self._disks.pop(slot, None)
        else:
            others = {"log"} if fault.kind == "offline" else set(map(str, fault.others))
            self._cuts.append((until, set(map(str, fault.slots)), others))

    def _sees(self, a: str, b: str) -> bool:
        a, b = a.partition(".")[0], b.partition(".")[0]
        self._cuts = [cut for cut in self._cuts if cut[0] > self.now]
        return not any((a in x and b in y) or (b in x and a in y) for _, x, y in self._cuts)

    def _delay(self) -> float:
        return self.draw.uniform(0.001, 0.005)

    def _send(self, source: str, to: str, key: tuple[int, int], values: tuple[float, ...]) -> None:
        def arrive() -> None:
            self._boxes[source, to, key] = sent

        sent: tuple[float, ...] | None = values
        if self._corrupt and self.draw.random() < 0.5:
            self._corrupt, sent = self._corrupt - 1, None  # its checksum does not fit
        self.sent[key] += 1
        delay = self._delay()
        if self._slow.get(source.partition(".")[0], 0) > self.now:
            delay += self.draw.choice([0.5, 1.0]) * RULES.silence_s
        if self._sees(source, to):
            self._at(self.now + delay, arrive)

    # A replica; all yield seconds to wait

    def _life(self, who: str, slot: int) -> Generator[float, None, None]:
        try:
            yield from self._until_the_end(who, slot)
        except CommError:  # nothing reaches it, or it reaches nobody; it is started again
            self._at(self.now + 1, lambda: self._start(slot))

    def _until_the_end(self, who: str, slot: int) -> Generator[float, None, None]:
        roll = Roll(self.slots, self.quorum, self.rounds)
        member = Member(who, slot, roll, lambda: self.now, RULES)
        zeros = (0.0,) * 4
        state = self._disks.get(slot, (0, zeros, zeros))
        carried: dict[str, tuple[float, ...] | State] = {}  # what this replica sends; what it took
        yield from self._drive(member, member.join(state[0]), carried)
        while True:
            self._served[who] = state
            if not (yield from self._drive(member, member.catch_up(), carried)):
                return
            state = carried.pop("fetched", state)
            self._served[who] = state
            if roll.is_over:
                self.ended[who] = state
                return
            _, agreed, momentum = state
            begin, theta = roll.tokens(slot), agreed
            for token in range(begin, begin + TOKENS):
                wanted = self._token(slot, token)
                theta = tuple(t - 0.1 * (t - w) for t, w in zip(theta, wanted, strict=True))
                yield STEP_S * self.draw.uniform(0.8, 1.2)
            carried["delta"] = tuple(a - t for a, t in zip(agreed, theta, strict=True))
            if (committed := (yield from self._drive(member, member.meet(TOKENS), carried))) is not None:
                members, mean = carried.get("mean", ((), ()))
                if members != committed.members:
                    self.wrong.append(f"{who} has the mean of {members}, and {committed.members} was committed")
                    return
                self.trained[committed.id, slot] = (begin, begin + TOKENS)
                momentum = tuple(0.5 * m + d for m, d in zip(momentum, mean, strict=True))
                agreed = tuple(a - 0.7 * m for a, m in zip(agreed, momentum, strict=True))
                state = (committed.id, agreed, momentum)
                self.seen.setdefault(committed.id, set()).add(state)
                self._disks[slot] = state

    @staticmethod
    def _token(slot: int, index: int) -> tuple[float, ...]:
        """Return the mean of the 16 tokens of a batch, each of mean 1 and variance 0.25; it counts as one token."""
        draw = random.Random(slot * 1_000_003 + index)
        return tuple(draw.gauss(1.0, 0.5 / 16**0.5) for _ in range(4))

    def _drive(self, member: Member, steps: Generator[Request, object, object], carried: dict) -> Generator:
        answer = None
        while True:
            try:
                request = steps.send(answer)
            except StopIteration as end:
                return end.value
            if isinstance(request, Exchange):
                answer = yield from self._exchange(member, request, carried)
            elif isinstance(request, Fetch):
                answer = yield from self._fetch(member, request.donor, carried)
            else:
                yield LOOK_S if isinstance(request, Look) else self._delay()
                if isinstance(request, Say) and self._sees(member.who, "log"):
                    self.log.append(request.entry)
                answer = self._read(member)

    def _read(self, member: Member) -> bool:
        if not self._sees(member.who, "log"):
            return False
        while member.roll.length < len(self.log):
            member.roll.take(self.log[member.roll.length])
        return True

    def _exchange(self, member: Member, request: Exchange, carried: dict) -> Generator[float, None, str]:
        me, end = member.who, self.now + RULES.timeout_s
        others = [who for who in request.members if who != me]
        taken = {me: carried["delta"]}
        for who in others:
            self._send(me, who, request.key, carried["delta"])
        while (left := [who for who in others if who not in taken]) and self.now < end:
            yield LOOK_S / 5
            for who in left:
                if (who, me, request.key) in self._boxes:
                    if (values := self._boxes.pop((who, me, request.key))) is None:
                        return who
                    taken[who] = values
            self._read(member)
            if member.roll.key != request.key:
                return ""
        if left:
            return left[0]
        tokens = [member.roll.ready[who] for who in request.members]
        columns = zip(*(taken[who] for who in request.members), strict=True)
        mean = tuple(sum(n * v for n, v in zip(tokens, column, strict=True)) / sum(tokens) for column in columns)
        carried["mean"] = (request.members, mean)
        return ""

    def _fetch(self, member: Member, donor: str, carried: dict) -> Generator[float, None, int | None]:
        end, roll, wanted = self.now + RULES.timeout_s, member.roll, member.roll.latest
        self.asked.append((roll.version[donor], wanted))
        yield 2 * self._delay() + self.draw.uniform(0, 0.05)
        while self.now < end:
            if donor in self._served and self._sees(member.who, donor) and self._still.get(donor, 0) <= self.now:
                state = self._served[donor]
                if state[0] >= wanted:
                    if roll.rounds_of(state[0]) > roll.rounds_of(member.version):
                        carried["fetched"] = state
                    return state[0]
            yield LOOK_S
        return NO_ANSWER if donor in self._served and self._sees(member.who, donor) else None
