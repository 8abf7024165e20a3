"""Replicas that come and go, over sockets and a real store: threads where nothing dies, else processes."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowcomm import elastic_store
from lowcomm.codecs import make_codec
from lowcomm.comm.elastic import Elastic, Messenger, NoAnswer, Payload, SharedLog
from lowcomm.comm.membership import Exchange, Ready, Roll, Rules
from lowcomm.comm.notes import Notes
from lowcomm.comm.shares import encoded_mean_bytes
from tests.harness import clean_environment, in_threads

#: A busy machine must not make anybody late, but where that is what is tested.
PATIENT, QUICK = Rules(timeout_s=10.0, grace_s=3.0), Rules(timeout_s=2.0, grace_s=0.5)


@pytest.fixture
def toy(store: Notes) -> Iterator[Callable[..., Toy]]:
    """Makes replicas, whose connections end with the test."""
    made = []

    def make(who: str, slot: int, **grid: Any) -> Toy:
        made.append(Toy(elastic_store(f"127.0.0.1:{store.port}"), who, slot, **grid))
        return made[-1]

    yield make
    for one in made:
        one.elastic.close()


class Toy:
    """A replica whose parameters go towards tokens that are a function of its slot and their index."""

    def __init__(self, notes: Notes, who: str, slot: int, *, slots: int, quorum: int, end: int, rules: Rules = PATIENT):
        self.agreed, self.momentum = torch.zeros(500), torch.zeros(500)
        self.slot, self.version, self.lock = slot, 0, threading.Lock()
        self.told: list[dict] = []
        grid = {"slots": slots, "quorum": quorum, "end": end, "rules": rules}
        self.elastic = Elastic(notes, who, slot, serve=self.serve, load=self.load, **grid)

    def serve(self, wanted: int, has: int) -> tuple[int, bytes]:
        with self.lock:
            return self.version, torch.cat([self.agreed, self.momentum]).numpy().tobytes()

    def load(self, raw: bytes) -> None:
        with self.lock:
            both = torch.frombuffer(bytearray(raw), dtype=torch.float32)
            self.agreed, self.momentum = (part.clone() for part in both.chunk(2))

    def delta(self, tokens: int, counted: int) -> Tensor:
        theta = self.agreed.clone()
        for index in range(counted, counted + tokens):
            generator = torch.Generator().manual_seed(self.slot * 100_003 + index)
            theta += 0.1 * (1 + torch.randn(theta.numel(), generator=generator) - theta)
        return self.agreed - theta

    def run(self, *, tokens: int = 5, codec: str = "fp32", rest: Callable[[int], float] = lambda n: 0) -> list[dict]:
        """Train to the end; returns what each round was."""
        elastic = self.elastic
        elastic.join()
        while elastic.catch_up():
            self.version = elastic.member.version
            if elastic.roll.is_over:
                break
            delta = self.delta(tokens, elastic.roll.tokens(self.slot))
            time.sleep(rest(len(elastic.roll.rounds)))
            if (met := elastic.meet([Payload(delta, make_codec(codec), "outer")], tokens)) is not None:
                committed, (mean,) = met
                with self.lock:
                    self.momentum = 0.5 * self.momentum + mean
                    self.agreed = self.agreed - 0.7 * self.momentum
                    self.version = committed.id
                self.told.append({"members": committed.members, "digest": float(self.agreed.double().sum())})
        return self.told


@pytest.mark.parametrize("codec", ["fp32", "e3m0"])
def test_without_faults_rounds_are_means_of_all(toy: Callable[..., Toy], codec: str) -> None:
    toys = [toy(f"{s}.0", s, slots=3, quorum=2, end=4) for s in range(3)]
    told = in_threads(*(lambda one=one: one.run(codec=codec) for one in toys))
    assert told[0] == told[1] == told[2]
    assert [row["members"] for row in told[0]] == [("0.0", "1.0", "2.0")] * 4
    alone = toy("x", 0, slots=3, quorum=2, end=4)
    for number in range(4):
        deltas = []
        for slot in range(3):
            alone.slot = slot
            deltas.append(make_codec(codec).decode(make_codec(codec).encode(alone.delta(5, 5 * number), 0), 500))
        alone.momentum = 0.5 * alone.momentum + (deltas[0] + deltas[1] + deltas[2]) / 3
        alone.agreed = alone.agreed - 0.7 * alone.momentum
    assert torch.equal(alone.agreed, toys[0].agreed)
    sent = toys[0].elastic.ledger.total("replica", "outer")
    assert sent == 4 * encoded_mean_bytes(500, make_codec(codec), 3, 0)


def test_members_weigh_as_the_tokens_they_trained_on(toy: Callable[..., Toy]) -> None:
    toys = [toy(f"{s}.0", s, slots=2, quorum=2, end=1) for s in range(2)]
    in_threads(lambda: toys[0].run(tokens=3), lambda: toys[1].run(tokens=9))
    deltas = [toy(f"x{s}", s, slots=2, quorum=2, end=1).delta(n, 0) for s, n in enumerate((3, 9))]
    assert torch.equal(toys[0].agreed, toys[1].agreed)
    torch.testing.assert_close(toys[0].agreed, -0.7 * (deltas[0] + 3 * deltas[1]) / 4)


@pytest.mark.fault(
    "a replica is too late for the last round",
    "the others wait for it, and it has the end from one of them",
)
def test_a_member_waits_at_the_end_for_one_that_missed_it(toy: Callable[..., Toy]) -> None:
    first, late = (toy(f"{s}.0", s, slots=2, quorum=1, end=1, rules=QUICK) for s in range(2))

    def to_the_end() -> int:
        first.run()
        first.elastic.wait_for_the_late()
        return first.elastic.roll.version["1.0"]

    version, _ = in_threads(to_the_end, lambda: late.run(rest=lambda n: 1.2))
    assert late.told == []
    assert version == first.version
    assert torch.equal(late.agreed, first.agreed)


def test_the_log_is_one_whoever_writes(store: Notes) -> None:
    logs = [SharedLog(elastic_store(f"127.0.0.1:{store.port}")) for _ in range(3)]

    def write(i: int) -> None:
        for n in range(20):
            logs[i].append(Ready(str(i), n, n))

    in_threads(*(lambda i=i: write(i) for i in range(3)))
    found = []
    for log in logs:
        entries = []
        while (entry := log.read(len(entries))) is not None:
            entries.append(entry)
        found.append(entries)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 60
    for i in range(3):
        assert [e.round for e in found[0] if e.who == str(i)] == list(range(20))


def two_messengers() -> tuple[Messenger, Messenger]:
    """Two that reach each other: "a" and "b"."""
    places: dict[str, tuple[str, int]] = {}
    a, b = (
        Messenger(
            who,
            host="127.0.0.1",
            timeout_s=1.0,
            address_of=places.get,
            serve=lambda wanted, has: b"state of %d" % wanted,
        )
        for who in "ab"
    )
    places |= {"a": a.address, "b": b.address}
    return a, b


@pytest.mark.fault(
    "a message that comes slowly, a sender that is alive and sends nothing yet, one that has ended",
    "the first two are waited for, the third is named at once",
)
def test_who_moves_or_is_alive_is_waited_for_and_who_has_ended_is_not() -> None:
    a, b = two_messengers()
    whole = bytes(5 * 1000)
    header = {"source": "c", "kind": "values", "key": [0, 1, 0], "nbytes": len(whole), "crc": zlib.crc32(whole)}
    packed = json.dumps(header).encode()

    def slowly() -> None:
        """Send in five parts; all of it takes longer than silence may, each part does not."""
        for part in range(5):
            time.sleep(0.2)
            raw.sendall(whole[1000 * part : 1000 * (part + 1)])

    def beating() -> None:
        """Say for a while that there is somebody, and then what is waited for."""
        for _ in range(6):
            time.sleep(0.2)
            a.beat(["b", "nobody"])
        a.send("b", "values", (0, 2, 0), b"late")

    def take(source: str, number: int, within_s: float = 0.6) -> bytes:
        return b.take(source, "values", (0, number, 0), within_s=within_s, go_on=lambda: True)

    with socket.create_connection(b.address) as raw:
        raw.sendall(len(packed).to_bytes(4, "big") + packed)
        assert in_threads(slowly, lambda: take("c", 1))[1] == whole
        with pytest.raises(NoAnswer, match="c: no word from it"):
            take("c", 2)
    a.send("b", "values", (0, 1, 0), b"known from now on")
    assert in_threads(beating, lambda: take("a", 2))[1] == b"late"

    def end() -> None:
        time.sleep(0.2)
        a.close()

    def wait() -> None:
        with pytest.raises(NoAnswer, match="a: it has ended"):
            take("a", 3, within_s=60)

    in_threads(end, wait)
    b.close()


@pytest.mark.fault(
    "a new connection takes the place of one, and what is to be sent over it takes a while to pack",
    "the sender is not taken for one that has ended",
)
def test_a_connection_that_is_replaced_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = two_messengers()
    a.send("b", "values", (0, 1, 0), b"known from now on")
    of_bytes = zlib.crc32

    def slowly(data: bytes) -> int:
        time.sleep(0.5 if len(data) > 100 else 0)
        return of_bytes(data)

    monkeypatch.setattr(zlib, "crc32", slowly)

    def wait() -> bytes:
        return b.take("a", "values", (0, 2, 0), within_s=10, go_on=lambda: True)

    def send() -> None:
        time.sleep(0.1)
        a.send("b", "values", (0, 2, 0), bytes(1000), anew=True)

    assert in_threads(send, wait)[1] == bytes(1000)
    a.close()
    b.close()


@pytest.mark.fault(
    "the log does not answer while a message of one who is gone is waited for", "the one is named all the same"
)
def test_silence_ends_though_the_log_is_slow() -> None:
    a, b = two_messengers()

    def go_on() -> bool:
        time.sleep(1.0)
        return True

    begin = time.monotonic()
    with pytest.raises(NoAnswer, match="a: no word from it"):
        b.take("a", "values", (0, 1, 0), within_s=0.4, go_on=go_on)
    assert time.monotonic() - begin < 10
    a.close()
    b.close()


def test_whoever_is_reached_hears_before_anything_is_sent() -> None:
    a, b = two_messengers()
    a.beat(["b"])  # there is no connection that it could go over
    time.sleep(0.1)
    assert b.heard("a") == -math.inf
    a.reach(["b", "nobody"])
    end = time.monotonic() + 10
    while b.heard("a") == -math.inf and time.monotonic() < end:
        time.sleep(0.01)
    assert b.heard("a") > -math.inf
    a.close()
    b.close()


def test_a_connection_that_breaks_between_two_beats_is_made_anew() -> None:
    a, b = two_messengers()
    a.send("b", "values", (0, 1, 0), b"known from now on")
    a._to["b"].connection.shutdown(socket.SHUT_RDWR)
    begin, end = time.monotonic(), time.monotonic() + 10
    while b.heard("a") < begin and time.monotonic() < end:
        a.reach(["b"])
        a.beat(["b"])
        time.sleep(0.02)
    assert b.heard("a") >= begin
    a.close()
    b.close()


def test_beats_go_on_while_connections_are_let_go_of() -> None:
    a, b = two_messengers()
    until = time.monotonic() + 0.5

    def beat() -> None:
        while time.monotonic() < until:
            a.reach(["b"])
            a.beat(["b"])

    def forget() -> None:
        while time.monotonic() < until:
            a.forget(0, set())

    in_threads(beat, beat, forget)
    a.close()
    b.close()


def test_stages_do_not_say_of_each_other_that_an_exchange_moves(store: Notes) -> None:
    """A stage that hears from another knows that it is alive, but does not take that for values that move."""
    rules = Rules(timeout_s=0.5, silence_s=0.4)
    given = {"slots": 1, "quorum": 1, "rules": rules, "stages": 2, "serve": lambda wanted, has: None, "load": print}
    stages = [Elastic(elastic_store(f"127.0.0.1:{store.port}"), "a", 0, stage=stage, **given) for stage in (0, 1)]
    try:
        for one in stages:
            one._under_way, one.messenger.moved = Exchange(one.roll.key, ("a",)), time.monotonic()
        begin = time.monotonic()
        time.sleep(3)
        assert all(one.messenger.heard(f"a/{1 - stage}") > begin + 2 for stage, one in enumerate(stages))
        assert all(one.messenger.moved < begin + 2 for one in stages)
    finally:
        for one in stages:
            one.close_connections()


def test_connections_to_those_who_are_gone_are_let_go_of() -> None:
    a, b = two_messengers()
    others = [
        Messenger(
            f"c{i}", host="127.0.0.1", timeout_s=1.0, address_of=lambda who: a.address, serve=lambda wanted, has: b""
        )
        for i in range(5)
    ]
    a._address_of = {"b": b.address, **{one.who: one.address for one in others}}.get
    for one in [b, *others]:
        a.send(one.who, "values", (0, 1, 0), b"x")
    a.forget(1, {"b"})
    assert list(a._to) == ["b"]
    for one in [a, b, *others]:
        one.close()


@pytest.mark.fault(
    "damaged frames, garbage, a receiver that takes nothing",
    "each is an answer that did not come, by name",
)
def test_frames_that_are_damaged_are_no_answers() -> None:
    a, b = two_messengers()
    a.send("b", "values", (0, 1, 0), b"whole")

    assert b.take("a", "values", (0, 1, 0), within_s=1, go_on=lambda: True) == b"whole"
    with socket.create_connection(b.address) as raw:
        packed = json.dumps({"source": "a", "kind": "values", "key": [0, 2, 0], "nbytes": 3, "crc": 1}).encode()
        raw.sendall(len(packed).to_bytes(4, "big") + packed + b"abc")
        with pytest.raises(NoAnswer, match="a: its message is damaged"):
            b.take("a", "values", (0, 2, 0), within_s=1, go_on=lambda: True)
        raw.sendall(b"\xff" * 100)  # no header: the connection ends, and nothing else
    with pytest.raises(NoAnswer, match="a: no word from it"):
        b.take("a", "values", (0, 3, 0), within_s=0, go_on=lambda: True)
    with pytest.raises(NoAnswer, match="c: has no address"):
        a.send("c", "values", (0, 1, 0), b"")
    a.send("b", "want", (7, 1), (3).to_bytes(8, "big") + (0).to_bytes(8, "big"))
    assert a.take("b", "state", (7, 1), within_s=1, go_on=lambda: True) == b"state of 3"
    b.close()

    def keep_on() -> None:
        for _ in range(100):  # the first may still find room on this side
            a.send("b", "values", (0, 1, 0), b"x" * 100_000)
            time.sleep(0.01)

    with pytest.raises(NoAnswer, match="b: takes nothing"):
        keep_on()
    a.close()


CHILD = """
import json, sys
from pathlib import Path
import torch
from lowcomm import elastic_store
from tests.test_elastic import QUICK, Toy
torch.set_num_threads(1)
port, who, slot, out = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
notes = elastic_store(f"127.0.0.1:{port}")
toy = Toy(notes, who, slot, slots=4, quorum=2, end=40, rules=QUICK)
toy.run(rest=lambda n: 0.02 if (out.parent / "go").exists() else 0.7)
told = {"digest": float(toy.agreed.double().sum()), "all": [r.members for r in toy.elastic.roll.rounds]}
out.write_text(json.dumps(told))
"""


@pytest.mark.fault(
    "of four processes one is killed, and one stands still for longer than others wait",
    "rounds go on with two, both come back, all end with the same bits",
)
@pytest.mark.longest
@pytest.mark.skipif(sys.platform != "linux", reason="sends signals")
def test_a_run_outlives_a_kill_and_a_pause(store: Notes, tmp_path: Path) -> None:
    """Of four processes one is killed and comes back as another, and one stands still for longer than others wait."""

    def begin(who: str, slot: int) -> subprocess.Popen:
        words = [sys.executable, "-c", CHILD, str(store.port), who, str(slot), str(tmp_path / f"{who}.json")]
        return subprocess.Popen(words, env=clean_environment())

    log, roll = SharedLog(elastic_store(f"127.0.0.1:{store.port}")), Roll(4, 2, 40)

    def wait_for(members: set[str]) -> None:
        """Wait for a round of these members."""
        deadline = time.monotonic() + 120
        while not any(set(r.members) == members for r in roll.rounds):
            assert time.monotonic() < deadline
            if (entry := log.read(roll.length)) is not None:
                roll.take(entry)
            else:
                time.sleep(0.02)

    children = {f"{slot}.0": begin(f"{slot}.0", slot) for slot in range(4)}
    try:
        wait_for({"0.0", "1.0", "2.0", "3.0"})
        children["1.0"].kill()
        os.kill(children["2.0"].pid, signal.SIGSTOP)
        wait_for({"0.0", "3.0"})
        children["1.1"] = begin("1.1", 1)
        os.kill(children["2.0"].pid, signal.SIGCONT)
        wait_for({"0.0", "1.1", "2.0", "3.0"})
        (tmp_path / "go").touch()  # until here all have taken their time
        for who, child in children.items():
            assert child.wait(120) == (-signal.SIGKILL if who == "1.0" else 0), who
    finally:
        for child in children.values():
            child.kill()
    told = {who: json.loads((tmp_path / f"{who}.json").read_text()) for who in children if who != "1.0"}
    rounds = told["0.0"]["all"]
    assert len(rounds) == 40
    assert all(t["all"] == rounds for t in told.values())
    assert len({t["digest"] for t in told.values()}) == 1
