"""Membership under faults: whatever happens, all agree bit for bit, and every token is counted once or named."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

import pytest

from lowcomm.comm import membership
from lowcomm.comm.membership import (
    NO_ANSWER,
    Close,
    Done,
    Exchange,
    Fetch,
    Join,
    Lost,
    Member,
    Ready,
    Roll,
    Rollback,
    Rules,
    Say,
)
from lowcomm.comm.transport import CommError
from tests.faults import TOKENS, Fault, Faulty, schedule

SLOTS, QUORUM, ROUNDS, SPAN = 4, 2, 12, 40.0


@functools.cache
def loss_undisturbed() -> float:
    """The loss of a run without faults."""
    run = Faulty([], slots=SLOTS, quorum=QUORUM, rounds=ROUNDS)
    run.run()
    return run.loss()


def broken(faults: list[Fault], seed: int) -> list[str]:
    """Let faults happen and return which promises do not hold."""
    run = Faulty(faults, slots=SLOTS, quorum=QUORUM, rounds=ROUNDS, seed=seed)
    run.run()
    roll, found = run.roll(), list(run.wrong)
    if len(roll.rounds) < ROUNDS:
        found.append(f"{len(roll.rounds)} of {ROUNDS} rounds")
    if apart := [version for version, states in run.seen.items() if len(states) > 1]:
        found.append(f"versions {apart} are not the same for all")
    if len(set(run.ended.values())) > 1:
        found.append("the ends differ")
    if run.ended and abs(run.loss() / loss_undisturbed() - 1) > 0.01:
        found.append(f"the loss is {run.loss()}, {loss_undisturbed()} without faults")
    if stale := [asked for asked in run.asked if asked[0] != asked[1]]:
        found.append(f"(version of a donor, the latest) were {stale}")
    for number, r in enumerate(roll.rounds):
        if run.sent[number, r.attempt] != len(r.members) * (len(r.members) - 1):
            found.append(f"round {number} took {run.sent[number, r.attempt]} messages among {len(r.members)}")
    for slot in range(SLOTS):  # whoever of a round is dead before it has applied it leaves no word of what it trained
        counted = 0
        for r in roll.rounds:
            if slot in r.slots:
                if run.trained.get((r.id, slot), (counted, 0))[0] != counted:
                    found.append(f"slot {slot} begins round {r.id} at {run.trained[r.id, slot]}, not at {counted}")
                counted += TOKENS
    if any(len(r.members) < QUORUM or len(set(r.slots)) < len(r.slots) for r in roll.rounds):
        found.append("a round of too few, or of a slot twice")
    return found


def shortest(faults: list[Fault], seed: int) -> list[Fault]:
    """Leave out faults, one after the other, until a promise is kept without any one of those that are left."""
    for fault in faults:
        fewer = [f for f in faults if f is not fault]
        if broken(fewer, seed):
            return shortest(fewer, seed)
    return faults


@pytest.mark.fault(
    "1,000 seeded schedules of kills, pauses, cuts, delays, corruption, late joins, lost logs and disks, simulated",
    "members agree bit for bit, no newcomer is a donor, each token counts once, messages are those of the plan,"
    " the loss is within 1 % of the undisturbed one",
)
def test_a_thousand_schedules_of_faults() -> None:
    for seed in range(1000):
        faults = schedule(seed, SLOTS, SPAN)
        if found := broken(faults, seed):
            pytest.fail(f"seed {seed}: {found}; shortest: {shortest(faults, seed)}")


def test_without_faults_all_take_part_in_every_round() -> None:
    run = Faulty([], slots=SLOTS, quorum=QUORUM, rounds=ROUNDS)
    run.run()
    roll = run.roll()
    assert [r.members for r in roll.rounds] == [("0.0", "1.0", "2.0", "3.0")] * ROUNDS
    assert [roll.tokens(slot) for slot in range(SLOTS)] == [ROUNDS * TOKENS] * SLOTS
    assert roll.missed == []
    assert len(run.ended) == SLOTS


def test_the_same_seed_is_the_same_run() -> None:
    logs = []
    for _ in range(2):
        run = Faulty(schedule(5, SLOTS, SPAN), slots=SLOTS, quorum=QUORUM, rounds=ROUNDS, seed=5)
        run.run()
        logs.append(run.log)
    assert logs[0] == logs[1]


def commit_early(roll: Roll, entry: Done) -> None:
    """Wrong: a round is committed when all members but one are done."""
    if (
        (entry.round, entry.attempt) == roll.key
        and entry.who in roll.members
        and len(roll.done) == len(roll.members) - 2
    ):
        roll.done |= set(roll.members) - {entry.who}
    take_done(roll, entry)


def forget_nothing(roll: Roll, who: str) -> None:
    """Wrong: who is lost stays among the ready, and so in the next attempt."""
    ready = dict(roll.ready)
    drop(roll, who)
    roll.ready = ready


def anybody_is_a_donor(roll: Roll) -> list[str]:
    """Wrong: whoever is present is a donor, also one who has just come."""
    return roll.present()


def forget_the_last_round(roll: Roll, slot: int) -> int:
    """Wrong: the next holder of a slot begins with tokens that the last round has counted."""
    return sum(t for r in roll.rounds[:-1] for s, t in zip(r.slots, r.tokens, strict=True) if s == slot)


take_done, drop = Roll._take_done, Roll._drop


@pytest.mark.fault(
    "a rule of the membership is broken on purpose: a newcomer as a donor, a token counted twice, and others",
    "the search for faults finds it, and shrinks the schedule",
)
@pytest.mark.parametrize(
    ("where", "wrong"),
    [
        ("_take_done", commit_early),
        ("_drop", forget_nothing),
        ("donors", anybody_is_a_donor),
        ("tokens", forget_the_last_round),
    ],
)
def test_the_search_finds_what_is_planted(where: str, wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Roll, where, wrong)
    seed = next(seed for seed in range(400) if broken(schedule(seed, SLOTS, SPAN), seed))
    faults = shortest(schedule(seed, SLOTS, SPAN), seed)
    assert broken(faults, seed)
    for fault in faults:
        assert not broken([f for f in faults if f is not fault], seed)


def folded(*entries: membership.Entry, slots: int = 3, quorum: int = 2, end: int | None = None) -> Roll:
    roll = Roll(slots, quorum, end)
    for entry in entries:
        roll.take(entry)
    return roll


JOINED = [Join(who, slot, 0) for slot, who in enumerate("abc")]
READY = [Ready(who, 0, 10 + i) for i, who in enumerate("abc")]


def test_a_round_begins_when_all_are_ready_and_is_committed_when_all_are_done() -> None:
    roll = folded(*JOINED, *READY[:2])
    assert not roll.members
    roll.take(READY[2])
    assert (roll.members, roll.key) == (("a", "b", "c"), (0, 1))
    for who in "ab":
        roll.take(Done(who, 0, 1))
    assert not roll.rounds
    roll.take(Done("c", 0, 1))
    (committed,) = roll.rounds
    assert (committed.members, committed.slots, committed.tokens) == (("a", "b", "c"), (0, 1, 2), (10, 11, 12))
    assert roll.latest == committed.id == roll.length == 9
    assert roll.donors() == ["a", "b", "c"]
    assert roll.key == (1, 0)


def test_a_round_closes_without_the_late_who_are_not_awaited_again_until_they_join() -> None:
    roll = folded(*JOINED, *READY[:2], Close(0, 0))
    assert (roll.members, roll.present()) == (("a", "b"), ["a", "b"])
    roll.take(READY[2])
    assert roll.missed == [("c", 0, 12)]
    for who in "ab":
        roll.take(Done(who, 0, 1))
    assert roll.donors() == ["a", "b"]
    roll.take(Join("c", 2, roll.latest))
    assert roll.present() == ["a", "b", "c"]
    assert not folded(*JOINED, READY[0], Close(0, 0)).members  # no quorum


def test_what_is_said_twice_counts_once() -> None:
    roll = folded(*JOINED, *READY, READY[0])
    assert (roll.members, roll.missed) == (("a", "b", "c"), [])
    for who in "abca":
        roll.take(Done(who, 0, 1))
    roll.take(READY[1])
    assert (len(roll.rounds), roll.tokens(1), roll.ready, roll.missed) == (1, 11, {}, [])


def test_what_counts_after_all_has_not_been_missed() -> None:
    """A member that is lost, and ready again for the same round, which gathers again as the others were too few."""
    roll = folded(*JOINED[:2], *READY[:2], slots=2)
    for entry in [Lost("b", 0, 1, "a"), Join("b", 1, 0)]:
        roll.take(entry)
    assert roll.missed == [("b", 0, 11)]
    roll.take(Ready("b", 0, 11))
    for who in "ab":
        roll.take(Done(who, *roll.key))
    assert (roll.tokens(1), roll.missed) == (11, [])


@pytest.mark.fault("a member is lost while a round is exchanged", "another attempt begins without it")
def test_an_attempt_that_loses_a_member_begins_again_without_it() -> None:
    roll = folded(*JOINED, *READY, Done("a", 0, 1), Lost("c", 0, 1, "b"))
    assert (roll.members, roll.key, roll.done, roll.missed) == (("a", "b"), (0, 3), set(), [("c", 0, 12)])
    roll.take(Done("c", 0, 1))  # too late
    roll.take(Lost("b", 0, 1, "a"))  # of the attempt that is over
    assert (roll.members, roll.rounds) == (("a", "b"), [])
    roll.take(Lost("a", 0, 3, "b"))
    assert (roll.members, roll.ready) == ((), {"b": 11})  # too few: it gathers again


@pytest.mark.fault(
    "a replica is back before the others have missed it",
    "its earlier start is out of the round, and the slot is the new one's",
)
def test_another_start_of_a_replica_takes_its_slot_out_of_the_attempt() -> None:
    roll = folded(*JOINED, *READY, Join("c2", 2, 0))
    assert (roll.members, roll.holds("c"), roll.holds("c2")) == (("a", "b"), False, True)


@pytest.mark.fault(
    "all who had the latest round are gone",
    "the rest goes back to the latest round that somebody has, and only then",
)
def test_all_go_back_only_where_nobody_has_the_latest_round() -> None:
    done = [Done(who, 0, 1) for who in "abc"]
    roll = folded(*JOINED, *READY, *done)
    first = roll.latest
    for entry in [*(Ready(who, 1, 5) for who in "abc"), *(Done(who, 1, 1) for who in "abc")]:
        roll.take(entry)
    roll.take(Rollback(2, first))
    assert len(roll.rounds) == 2  # all have it
    for slot, who in enumerate(["a2", "b2", "c2"]):
        roll.take(Join(who, slot, first))
    roll.take(Rollback(2, 0))
    assert len(roll.rounds) == 2  # not as far as that
    roll.take(Rollback(2, first))
    assert (len(roll.rounds), roll.latest, roll.tokens(0)) == (1, first, 10)
    assert roll.missed == [(who, 1, 5) for who in "abc"]
    assert roll.rounds_of(15) == -1  # of another history now
    for who in ("a2", "b2", "c2"):
        roll.take(Ready(who, 1, 5))
    assert roll.key == (1, 2)  # not (1, 1), of which there may still be words and messages
    roll.take(Done("a2", 1, 1))
    assert not roll.done
    roll.take(Join("a", 0, first))  # has only been away, and is ready for the same round once more
    for entry in [Lost("b2", *roll.key, "c2"), Ready("a", 1, 6)]:
        roll.take(entry)
    assert "a" in roll.members
    assert [row for row in roll.missed if row[0] == "a"] == [("a", 1, 5)]


def asked(member: Member, answers: dict[str, int | None], roll: Roll) -> list[str]:
    """Let a member catch up, donors answering so; returns whom it has asked, and what it has said of whom."""
    steps, answer, found = member.catch_up(), None, []
    for _ in range(20):
        try:
            request = steps.send(answer)
        except StopIteration:
            break
        answer = True
        if isinstance(request, Fetch):
            found.append(request.donor)
            answer = answers[request.donor]
        elif isinstance(request, Say):
            found.append(f"{type(request.entry).__name__} {request.entry.who}")
            roll.take(request.entry)
    return found


@pytest.mark.fault(
    "donors do not answer a newcomer: one that stands still; all, as nothing reaches the newcomer",
    "another is asked, and nobody is called lost for it; the newcomer ends and says why",
)
def test_a_donor_that_does_not_answer_is_passed_over_and_a_newcomer_whom_nothing_reaches_ends() -> None:
    done = [Done(who, 0, 1) for who in "abc"]
    roll = folded(*JOINED, *READY, *done, Join("c2", 2, 0))
    member = Member("c2", 2, roll, lambda: 0.0, Rules())
    order = asked(member, {"a": NO_ANSWER, "b": roll.latest}, roll)
    assert order in (["a", "b", "Join c2"], ["b", "Join c2"])
    roll = folded(*JOINED, *READY, *done, Join("c2", 2, 0))
    member = Member("c2", 2, roll, lambda: 0.0, Rules())
    with pytest.raises(CommError, match="c2 has asked a, b in vain: can they reach its address"):
        asked(member, {"a": NO_ANSWER, "b": NO_ANSWER}, roll)
    assert roll.donors() == ["a", "b"]
    roll = folded(*JOINED, *READY, *done, Lost("b", 1, 0, "a"), Join("c2", 2, 0))
    member = Member("c2", 2, roll, lambda: 0.0, Rules())
    assert asked(member, {"a": NO_ANSWER}, roll)[:2] == ["a", "Lost a"]
    roll = folded(*JOINED, *READY, *done, Lost("b", 1, 0, "a"), Join("c2", 2, 0))
    member = Member("c2", 2, roll, lambda: 0.0, Rules())
    steps = member.catch_up()
    next(steps)
    assert steps.send(True) == Fetch("a")
    assert steps.send(NO_ANSWER) == Say(Lost("a", 1, 0, "c2"))
    for entry in (Lost("a", 1, 0, "c2"), Ready("a", 1, 5)):  # "a" is there, and well
        roll.take(entry)
    steps.send(True)
    assert steps.send(True) == Fetch("a")
    with pytest.raises(CommError, match="c2 has asked a in vain: can it reach its address"):
        steps.send(NO_ANSWER)


def test_donors_to_each_of_whom_something_happened_are_asked_once_more() -> None:
    roll = folded(*JOINED, *READY, *(Done(who, 0, 1) for who in "abc"), Join("c2", 2, 0))
    times = Counter[str]()

    def only_the_second_time(request: Fetch) -> int:
        times[request.donor] += 1
        return roll.latest if times[request.donor] == 2 else NO_ANSWER

    member = Member("c2", 2, roll, lambda: 0.0, Rules())
    assert driven(member.catch_up(), roll, only_the_second_time) is True
    assert sorted(times.values()) == [1, 2]
    assert roll.donors() == ["a", "b", "c2"]


def driven(steps: Generator, roll: Roll, answers: Callable, then: Callable[[], None] = lambda: None) -> Any:
    """Carry out what a member asks for, and return what it returns.

    Who is called lost comes back at once. answers: gives the answer to a `Fetch` or an `Exchange`. then: called after
    each request.
    """
    answer: Any = None
    while True:
        try:
            request = steps.send(answer)
        except StopIteration as end:
            return end.value
        answer = True
        if isinstance(request, Fetch | Exchange):
            answer = answers(request)
        elif isinstance(request, Say):
            roll.take(request.entry)
            if isinstance(request.entry, Lost):
                roll.take(Join(request.entry.who, roll.slot[request.entry.who], roll.latest))
        then()


def test_a_newcomer_that_can_reach_nobody_ends_after_a_time_out() -> None:
    """It must not keep the others from their rounds for ever: whom it calls lost is there, and comes back."""
    time_s = 0.0
    roll = folded(*JOINED, *READY, *(Done(who, 0, 1) for who in "abc"), Join("c2", 2, 0))

    def refused(request: Fetch) -> None:
        nonlocal time_s
        time_s += 0.1

    member = Member("c2", 2, roll, lambda: time_s, Rules(timeout_s=10.0))
    length = roll.length
    with pytest.raises(CommError, match=r"c2 has asked \w in vain: can it reach its address"):
        driven(member.catch_up(), roll, refused)
    assert 10 < time_s < 12
    assert roll.length == length + 4  # each donor was called lost once, and has come back
    assert roll.donors() == ["a", "b"]


def test_a_member_that_can_reach_nobody_gives_up() -> None:
    time_s, roll = 0.0, folded(*JOINED)

    def in_vain(request: Exchange) -> str:
        nonlocal time_s
        time_s += 0.1
        return next(who for who in request.members if who != "a")

    def all_are_ready() -> None:
        for who in roll.ready.keys() ^ {"a", "b", "c"}:
            roll.take(Ready(who, 0, 5))

    member = Member("a", 0, roll, lambda: time_s, Rules(alone_s=30.0))
    with pytest.raises(CommError, match=r"a has swapped with \w in vain: can it reach its address"):
        driven(member.meet(5), roll, in_vain, all_are_ready)
    assert 30 < time_s < 31


def test_a_member_that_loses_somebody_in_each_round_goes_on_with_the_rest() -> None:
    time_s, roll = 0.0, folded(*JOINED)

    def without_b(request: Exchange) -> str:
        nonlocal time_s
        time_s += 20.0
        return "b" if "b" in request.members else ""

    def the_rest_does_its_part() -> None:
        if "c" not in roll.ready and not roll.members:
            roll.take(Join("b", 1, roll.latest))
            roll.take(Ready("c", len(roll.rounds), 5))
            roll.take(Ready("b", len(roll.rounds), 5))
        if "a" in roll.done:
            roll.take(Done("c", *roll.key))

    member = Member("a", 0, roll, lambda: time_s, Rules(alone_s=30.0))
    for _ in range(4):
        assert driven(member.meet(5), roll, without_b, the_rest_does_its_part).members == ("a", "c")
