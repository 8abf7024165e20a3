"""Replicas as processes that may leave and come back: the wire of `membership`.

torch.distributed ends with the first process that dies, so nothing here uses its groups. The log is in a store that
outlives replicas (`SharedLog`), over a connection that carries nothing else; what replicas send each other goes over
sockets of their own (`Messenger`), from each to each, and whoever does not answer is named instead of waited for.
`Elastic` carries out what a `membership.Member` asks for.

Links are assumed to be of a trusted network: nothing is encrypted or authenticated.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import socket
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lowcomm.codecs import Codec
from lowcomm.comm.encoded import EncodedMean
from lowcomm.comm.membership import (
    Close,
    Done,
    Entry,
    Exchange,
    Fetch,
    Join,
    Look,
    Lost,
    Member,
    Ready,
    Request,
    Roll,
    Rollback,
    Round,
    Rules,
    Say,
)
from lowcomm.comm.notes import Notes
from lowcomm.comm.shares import Section
from lowcomm.comm.transport import CommError
from lowcomm.comm.wire import Ledger
from lowcomm.settings import ConfigError

_ENTRIES = {kind.__name__: kind for kind in (Join, Ready, Close, Done, Lost, Rollback)}
#: Seconds between two looks at the log, and at what has arrived.
_LOOK_S, _ARRIVED_S = 0.02, 0.5
_LONGEST_HEADER, _PIECE = 1 << 16, 1 << 20
#: A connection that ends may be replaced by another, which begins in less than this.
_REPLACED_S = 0.2
#: Told of a frame's header, and then of its payload's bytes as they leave or come: their sender and number.
Told = Callable[[str, int], None]


class NoAnswer(CommError):
    """A replica does not answer, or what came from it is damaged. `who` it is."""

    def __init__(self, who: str, why: str):
        super().__init__(f"{who}: {why}")
        self.who = who


class SharedLog:
    """The log of `membership` in a store: entry i is the note "log/i", which is written once."""

    def __init__(self, notes: Notes):
        self._notes = notes
        self._entries: list[Entry] = []

    def read(self, index: int) -> Entry | None:
        """The entry at an index; None where the log ends. Raises CommError where the store does not answer."""
        if index < len(self._entries):
            return self._entries[index]
        if (text := self._notes.look(f"log/{index}")) is None:
            raise CommError("the log does not answer")
        if text:
            self._entries.append(_unpacked(text))
            return self._entries[index]
        return None

    def append(self, entry: Entry) -> None:
        """Write an entry at the end, wherever that is. Raises CommError where the store does not answer."""
        mine = json.dumps([type(entry).__name__, asdict(entry)])
        while True:
            while self.read(len(self._entries)) is not None:
                pass
            there = self._notes.write_once(f"log/{len(self._entries)}", mine)
            if there is None:
                raise CommError("the log does not answer")
            self._entries.append(_unpacked(there))
            if there == mine:
                return


def _unpacked(text: str) -> Entry:
    name, fields = json.loads(text)
    return _ENTRIES[name](**fields)


@dataclass(frozen=True)
class Frame:
    """A message as it goes over a socket: its sender, its kind, the key it is taken by, and its bytes."""

    source: str
    kind: str
    key: tuple[int, ...]
    payload: bytes

    def send(self, to: socket.socket, told: Told) -> None:
        """Write it to a socket, whose time-out says how long the other end may leave bytes untaken."""
        header = {"source": self.source, "kind": self.kind, "key": self.key, "nbytes": len(self.payload)}
        packed = json.dumps(header | {"crc": zlib.crc32(self.payload)}).encode()
        to.sendall(struct.pack("!I", len(packed)) + packed)
        left = memoryview(self.payload)
        while left:
            sent = to.send(left[:_PIECE])
            left = left[sent:]
            told(self.source, sent)

    @classmethod
    def receive(cls, source: socket.socket, told: Told) -> tuple[Frame, bool] | None:
        """Read one from a socket, and whether it is as it was sent; None at the end of the stream, or of sense."""
        if (size := _exactly(source, 4)) is None:
            return None
        (length,) = struct.unpack("!I", size)
        if length > _LONGEST_HEADER or (packed := _exactly(source, length)) is None:
            return None
        try:
            header = json.loads(packed)
            who, kind, key = str(header["source"]), str(header["kind"]), tuple(map(int, header["key"]))
            nbytes, crc = int(header["nbytes"]), int(header["crc"])
        except (ValueError, KeyError, TypeError):
            return None
        told(who, 0)
        if (payload := _exactly(source, nbytes, lambda n: told(who, n))) is None:
            return None
        return cls(who, kind, key, payload), zlib.crc32(payload) == crc


def _exactly(source: socket.socket, nbytes: int, each: Callable[[int], None] = lambda n: None) -> bytes | None:
    found = bytearray()
    while len(found) < nbytes:
        if not (more := source.recv(min(nbytes - len(found), _PIECE))):
            return None
        found += more
        each(len(more))
    return bytes(found)


class Messenger:
    """Sends frames to others by their addresses, and keeps what has come until it is taken.

    Args:
        who: this replica.
        host: the interface to listen on.
        timeout_s: how long the other end may leave bytes untaken.
        address_of: (host, port) of a replica; None where it is not known.
        serve: answers a request for the agreed state of a version or a later one: bytes; None where it has none.

    Attributes: `moved`, when a payload's bytes last left or came, by the monotonic clock.
    """

    def __init__(
        self,
        who: str,
        *,
        host: str,
        timeout_s: float,
        address_of: Callable[[str], tuple[str, int] | None],
        serve: Callable[[int], bytes | None],
    ):
        self.who, self.timeout_s, self.serve = who, timeout_s, serve
        self._address_of = address_of
        self._arrived = threading.Condition()
        self._boxes: dict[tuple[str, str, tuple[int, ...]], bytes | None] = {}
        self._heard: dict[str, float] = {}
        self._ways: Counter[str] = Counter()  # the connections that each of the others has to here ...
        self._ended: dict[str, float] = {}  # ... and when it was left with none
        self.moved = time.monotonic()
        self._to: dict[str, tuple[socket.socket, threading.Lock]] = {}
        self._from: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if hasattr(socket, "TCP_KEEPIDLE"):  # else one whose other end is gone stays for two hours
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, math.ceil(self.timeout_s)))
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, math.ceil(self.timeout_s)))
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
                self._from.add(connection)
                threading.Thread(target=self._read, args=(connection,), name="read", daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        source = None

        def told(who: str, nbytes: int) -> None:
            nonlocal source
            if source is None:
                source = who
                with self._arrived:
                    self._ways[source] += 1
            self._note(who, nbytes)

        with connection, contextlib.suppress(OSError):
            while (found := Frame.receive(connection, told)) is not None:
                frame, whole = found
                if frame.kind == "want":
                    threading.Thread(target=self._answer, args=(frame,), name="serve", daemon=True).start()
                elif frame.kind != "beat":
                    with self._arrived:
                        self._boxes[frame.source, frame.kind, frame.key] = frame.payload if whole else None
                        self._arrived.notify_all()
        self._from.discard(connection)
        if source is not None:
            with self._arrived:
                self._ways[source] -= 1
                if not self._ways[source]:
                    self._ended[source] = time.monotonic()
                self._arrived.notify_all()

    def _note(self, source: str, nbytes: int) -> None:
        self._heard[source] = now = time.monotonic()
        if nbytes:
            self.moved = now

    def heard(self, who: str) -> float:
        """When there was the last sign of a replica, by the monotonic clock; minus infinity where there was none."""
        return self._heard.get(who, -math.inf)

    def beat(self, to: Sequence[str]) -> None:
        """Say that this replica is alive to those of `to` that it is connected with; nobody is waited for."""
        with self._lock:
            ways = [self._to[who] for who in to if who in self._to]
        for connection, lock in ways:
            if lock.acquire(blocking=False):  # else there are bytes on their way, which say as much
                try:
                    if select.select([], [connection], [], 0)[1]:
                        Frame(self.who, "beat", (), b"").send(connection, self._note)
                except (OSError, ValueError):  # found out by whoever sends something
                    pass
                finally:
                    lock.release()

    def _answer(self, frame: Frame) -> None:
        if len(frame.payload) == 8 and (state := self.serve(*struct.unpack("!q", frame.payload))) is not None:
            with contextlib.suppress(NoAnswer):
                self.send(frame.source, "state", frame.key, state, anew=True)

    def send(self, to: str, kind: str, key: tuple[int, ...], payload: bytes, *, anew: bool = False) -> None:
        """Send a frame. Raises NoAnswer where nobody takes it.

        anew: over a new connection, as the one there is may be of before a link was down, and lose it.
        """
        frame = Frame(self.who, kind, key, payload)
        if not anew and to in self._to:
            with contextlib.suppress(OSError):
                return self._send(to, frame)
            anew = True
        try:
            if anew:
                self._connect(to)
            self._send(to, frame)
        except OSError as error:
            with self._lock:
                if to in self._to:
                    self._to.pop(to)[0].close()
            raise NoAnswer(to, f"takes nothing ({error})") from None

    def _send(self, to: str, frame: Frame) -> None:
        with self._lock:
            way = self._to.get(to)
        connection, lock = way or self._connect(to)
        with lock:
            frame.send(connection, self._note)

    def _connect(self, to: str) -> tuple[socket.socket, threading.Lock]:
        """Make a connection, in the place of the one there may be; nobody who sends to others waits for that."""
        if (address := self._address_of(to)) is None:
            raise NoAnswer(to, "has no address")
        connection = socket.create_connection(address, self.timeout_s)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # so that no link that was down is waited for longer than it was
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * self.timeout_s))
        way = connection, threading.Lock()
        with self._lock:
            before, self._to[to] = self._to.get(to), way
        if before is not None:
            before[0].close()
        return way

    def take(
        self, source: str, kind: str, key: tuple[int, ...], *, within_s: float, go_on: Callable[[], bool]
    ) -> bytes:
        """Return what has come, waiting for it.

        within_s: how long there may be no sign of its source, in seconds. go_on: asked now and then; where it is False
        nobody wants it any more. Raises NoAnswer where it does not come, is damaged, or is not wanted, and as soon as
        the last connection of its source ends.
        """
        box, begin = (source, kind, key), time.monotonic()

        def is_gone() -> bool:
            ended = self._ended.get(source, -math.inf)
            return not self._ways[source] and begin <= ended < time.monotonic() - _REPLACED_S

        while True:
            now = time.monotonic()
            left = within_s - (now - max(begin, self.heard(source)))
            with self._arrived:
                self._arrived.wait_for(lambda: box in self._boxes or is_gone(), max(0.0, min(_ARRIVED_S, left)))
                if box in self._boxes:
                    if (payload := self._boxes.pop(box)) is None:
                        raise NoAnswer(source, "its message is damaged")
                    return payload
            if not go_on():
                raise NoAnswer(source, "it is not wanted any more")
            if is_gone():
                raise NoAnswer(source, "it has ended")
            if left <= 0:
                raise NoAnswer(source, "no word from it")
            if time.monotonic() - now > _ARRIVED_S + within_s / 2:  # it was this process that stood still
                begin = time.monotonic()

    def forget(self, before: int) -> None:
        """Let go of what has come for rounds before one, and was not taken."""
        with self._arrived:
            for box in [box for box in self._boxes if box[2][0] < before]:
                del self._boxes[box]

    def close(self) -> None:
        """Listen no more, and end all connections."""
        with self._lock:
            ours = [self._listener, *self._from, *(connection for connection, _ in self._to.values())]
            self._to.clear()
        for end in ours:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # which wakes whoever reads or accepts, as closing does not
            end.close()


@dataclass(frozen=True)
class Payload:
    """Values of which a round is to find a mean.

    x: flat fp32. sections: of it in order, each with the slots that own it; None where all own everything. codec, seed:
    how they are encoded. purpose: what the ledger bills them as.
    """

    x: Tensor
    codec: Codec
    purpose: str
    seed: int = 0
    sections: Sequence[Section] | None = None


#: Of the slots that a round is of, those whose means one wants: itself among them, in ascending order.
Group = Callable[[list[int]], list[int]]


class _Attempt:
    """Stands for `axis.Op` in an encoded mean: swaps tensors with the members of an attempt."""

    def __init__(self, elastic: Elastic, request: Exchange):
        self.elastic, self.request, self.purpose = elastic, request, ""
        self.axis = SimpleNamespace(ranks=request.members)
        self.phase = 0

    def swap(
        self, out: Sequence[tuple[int, Tensor]], into: Sequence[tuple[int, Tensor | None]], *, agreed: bool = False
    ) -> list[Tensor]:
        """Send and take; `into` names the buffer, where there is one. Raises NoAnswer."""
        messenger, members = self.elastic.messenger, self.request.members
        key, self.phase = (*self.request.key, self.phase), self.phase + 1
        for i, x in out:
            raw = x.contiguous().view(-1).view(torch.uint8).cpu()
            self.elastic.ledger.bill("replica", self.purpose, self.elastic.step, raw.numel())
            messenger.send(members[i], "values", key, raw.numpy().tobytes())
        wait = {"within_s": self.elastic.rules.silence_s, "go_on": lambda: self.elastic.is_at(self.request)}
        taken = []
        for i, buffer in into:
            raw = messenger.take(members[i], "values", key, **wait)
            x = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            if buffer is not None:
                if x.numel() != buffer.numel() * buffer.element_size():
                    raise NoAnswer(members[i], f"sent {x.numel()} bytes")
                x = buffer.copy_(x.view(buffer.dtype).view(buffer.shape))
            taken.append(x)
        return taken


class Elastic:
    """One replica among those that come and go.

    Args:
        notes: a store that all replicas reach, and that outlives them.
        who: its name, which no other start of any replica has.
        slot: its share of the data.
        slots, quorum, end: as for `membership.Roll`.
        rules: how long it waits.
        host: the address by which others reach it; by default that by which it reaches the store.
        serve: gives the agreed state to whoever asks: its version and bytes. It is told the version that is wanted, for
            which it may wait a while; None where it has none as late.
        load: takes the bytes of such a state.

    Attributes: `roll`, `ledger`, `step`, to which the ledger bills.
    """

    def __init__(
        self,
        notes: Notes,
        who: str,
        slot: int,
        *,
        slots: int,
        quorum: int,
        serve: Callable[[int], tuple[int, bytes] | None],
        load: Callable[[bytes], None],
        end: int | None = None,
        rules: Rules | None = None,
        host: str | None = None,
    ):
        if not 0 <= slot < slots or not 1 <= quorum <= slots:
            raise ConfigError(f"slot {slot} and a quorum of {quorum} do not go with {slots} slots")
        self.rules = rules or Rules()
        self.notes, self.log = notes, SharedLog(notes)
        self.roll = Roll(slots, quorum, end)
        self.ledger, self.step = Ledger(), 0
        self._load, self._wants, self._closed = load, 0, False
        self._payloads: Sequence[Payload] = ()
        self._group: Group = list
        self._means: tuple[tuple[str, ...], list[Tensor]] | None = None

        def packed(wanted: int) -> bytes | None:
            if (found := serve(wanted)) is None:
                return None
            version, state = found
            return struct.pack("!q", version) + state

        self.messenger = Messenger(
            who, host=host or notes.here, timeout_s=self.rules.silence_s, address_of=self._address_of, serve=packed
        )
        self.member = Member(who, slot, self.roll, time.monotonic, self.rules, self.messenger.heard)
        self._under_way: Exchange | None = None
        self._left = threading.Event()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        notes.write(f"address/{who}", json.dumps(self.messenger.address))

    def _address_of(self, who: str) -> tuple[str, int] | None:
        found = self.notes.read(f"address/{who}")
        return None if found is None else tuple(json.loads(found))

    def _beat(self) -> None:
        """Say to the members of an attempt that this one is alive, as long as its exchange moves."""
        while not self._left.wait(self.rules.silence_s / 4):
            if (attempt := self._under_way) is None or attempt.key != self.roll.key:
                continue
            if time.monotonic() - self.messenger.moved < self.rules.timeout_s:
                self.messenger.beat([who for who in attempt.members if who != self.member.who])

    def join(self, version: int = 0) -> None:
        """Take the slot, with parameters of a version."""
        self._drive(self.member.join(version))

    def catch_up(self) -> bool:
        """Come to the latest round, as `Member.catch_up` says, and load the state that a donor gives."""
        return self._drive(self.member.catch_up())

    def meet(self, payloads: Sequence[Payload], tokens: int, group: Group = list) -> tuple[Round, list[Tensor]] | None:
        """Take part in the round under way with values that so many tokens have made.

        Returns the round, and of each payload the mean over those of its members that are in this replica's group, each
        weighing as its tokens do; None where the round went on without this replica.
        """
        self._payloads, self._group = payloads, group
        self._means = None
        committed = self._drive(self.member.meet(tokens))
        self.messenger.forget(len(self.roll.rounds) - 1)
        if committed is None:
            return None
        if self._means is None or self._means[0] != committed.members:
            raise CommError(f"{self.member.who} lacks the mean of a round that it is a member of: {committed.members}")
        return committed, self._means[1]

    def wait_for_the_late(self) -> None:
        """After the last round: stay as a donor until every slot's holder has it, or for as long as a time-out."""
        until, roll = time.monotonic() + self.rules.timeout_s, self.roll
        while time.monotonic() < until:
            if self.read() and all(roll.version.get(roll.holder.get(s)) == roll.latest for s in range(roll.slots)):
                return
            time.sleep(_LOOK_S)

    def stop(self) -> None:
        """End what another thread of this replica is in: that raises CommError."""
        self._closed = True

    def close(self) -> None:
        """Leave, so that nobody waits for this replica, and end its connections."""
        self._closed = False
        self._drive(self.member.leave())
        self.stop()
        self._left.set()
        self.messenger.close()

    def is_at(self, request: Exchange) -> bool:
        """Tell whether an attempt is still under way, as far as the log can be read."""
        self.read()
        return self.roll.key == request.key and not self._closed

    def _drive(self, steps: Generator[Request, Any, Any]) -> Any:
        """Carry out requests. Raises CommError where nothing moves for `Rules.alone_s`, or this replica has left."""
        answer: Any = None
        moved = time.monotonic(), self.roll.length
        while True:
            try:
                request = steps.send(answer)
            except StopIteration as end:
                return end.value
            if self._closed:
                raise CommError(f"{self.member.who} has left")
            if self.roll.length != moved[1]:
                moved = time.monotonic(), self.roll.length
            if time.monotonic() - moved[0] > self.rules.alone_s:
                raise CommError(self._why_alone())
            if isinstance(request, Exchange):
                answer = self._exchange(request)
            elif isinstance(request, Fetch):
                answer = self._fetch(request.donor)
            elif isinstance(request, Say):
                answer = self._say(request.entry)
            else:
                assert isinstance(request, Look)
                time.sleep(_LOOK_S)
                answer = self.read()

    def _why_alone(self) -> str:
        waited = f"{self.member.who} has waited for {self.rules.alone_s:g} s"
        if not self.read():
            return f"{waited} for the store of the replicas' membership to answer"
        roll = self.roll
        there = f"{len(roll.ready)} of the {roll.quorum} replicas that a round needs are ready"
        return f"{waited} in round {len(roll.rounds)}: {there}"

    def read(self) -> bool:
        """Read on in the log; False where it cannot be reached."""
        try:
            while (entry := self.log.read(self.roll.length)) is not None:
                self.roll.take(entry)
        except CommError:
            return False
        return True

    def _say(self, entry: Entry) -> bool:
        try:
            self.log.append(entry)
        except CommError:
            time.sleep(_LOOK_S)
            return False
        return self.read()

    def _exchange(self, request: Exchange) -> str:
        self._under_way, self.messenger.moved = request, time.monotonic()
        members, roll = request.members, self.roll
        slots = [roll.slot[who] for who in members]
        met = self._group(sorted(slots))
        group = sorted((i for i, slot in enumerate(slots) if slot in met), key=lambda i: slots[i])
        me, tokens = members.index(self.member.who), [roll.ready[members[i]] for i in group]
        attempt, means = _Attempt(self, request), []
        try:
            for payload in self._payloads:
                attempt.purpose = payload.purpose
                owned = payload.sections or [(payload.x.numel(), slots)]
                sections = [(numel, [i for i in group if slots[i] in owners]) for numel, owners in owned]
                mean = EncodedMean(payload.x.clone(), payload.codec, payload.seed, sections, group, me, tokens)
                means.append(mean.alone() if len(group) == 1 else mean.over(attempt))
        except NoAnswer as error:
            return error.who
        self._means = members, means
        return ""

    def _fetch(self, donor: str) -> int | None:
        self._wants += 1
        key = (len(self.roll.rounds), self._wants)
        try:
            self.messenger.send(donor, "want", key, struct.pack("!q", self.roll.latest), anew=True)
            raw = self.messenger.take(donor, "state", key, within_s=self.rules.timeout_s, go_on=lambda: True)
        except NoAnswer:
            return None
        (version,) = struct.unpack("!q", raw[:8])
        if self.roll.rounds_of(version) > self.roll.rounds_of(self.member.version):
            self._load(raw[8:])
        return version
