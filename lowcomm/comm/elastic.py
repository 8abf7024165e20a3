"""Replicas as processes that may leave and come back: the communication that `membership` needs.

torch.distributed ends with the first process that dies, so nothing here uses its groups. The log is in a store that
outlives replicas (`SharedLog`), over a connection that carries nothing else; what replicas send each other goes over
sockets of their own (`Messenger`), from each to each, and one that does not answer is named instead of waited for.
`Elastic` carries out the requests of a `membership.Member`; where a replica is a pipeline, at all of its stages
(`stages`).

The network is assumed to be trusted: nothing is encrypted or authenticated.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import logging
import math
import numbers
import select
import socket
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Container, Generator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lowcomm.codecs import Codec
from lowcomm.comm.encoded import EncodedMean, Reduce, weighted_mean
from lowcomm.comm.membership import (
    NO_ANSWER,
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
from lowcomm.comm.stages import Stages
from lowcomm.comm.transport import CommError
from lowcomm.comm.wire import Ledger
from lowcomm.settings import ConfigError

log = logging.getLogger("lowcomm")

_ENTRIES = {kind.__name__: kind for kind in (Join, Ready, Close, Done, Lost, Rollback)}
#: Seconds between two looks at the log, and at what has arrived.
_LOOK_S, _ARRIVED_S = 0.02, 0.5
#: Where a look finds nothing new, the next waits twice as long, from this many seconds up to `_LOOK_S`.
_FIRST_LOOK_S = 0.001
_LONGEST_HEADER, _PIECE = 1 << 16, 1 << 20
#: Entries of the log that are read at once by one who is new.
_AT_ONCE = 64
#: A connection that ends may be replaced by another, which begins in less than this.
_REPLACED_S = 0.2
#: Called with a sender and a number of bytes: 0 when a header has come, then that of each piece of payload that left
#: or came.
Told = Callable[[str, int], None]


class NoAnswer(CommError):
    """Raised where a replica does not answer, or what came from it is damaged.

    Attributes: `who`, its name.
    """

    def __init__(self, who: str, why: str):
        super().__init__(f"{who}: {why}")
        self.who = who


class SharedLog:
    """The log of `membership` in a store: entry i is the note "log/i", which is written once."""

    def __init__(self, notes: Notes):
        self._notes, self._is_new = notes, True
        self._entries: list[Entry] = []

    def read(self, index: int) -> Entry | None:
        """Return the entry at an index, from 0; None where the log ends before it.

        index: of an entry that was read before, or of the next. Raises CommError where the store does not answer.
        """
        if self._is_new:  # and has all that others have said to catch up with
            while texts := self._notes.look_all([f"log/{len(self._entries) + i}" for i in range(_AT_ONCE)]):
                self._entries += map(_unpacked, texts)
            self._is_new = False
        if index < len(self._entries):
            return self._entries[index]
        if (text := self._notes.look(f"log/{index}")) is None:
            raise CommError("the log does not answer")
        if text:
            self._entries.append(_unpacked(text))
            return self._entries[index]
        return None

    def append(self, entry: Entry) -> None:
        """Append an entry, after all that others have appended meanwhile.

        Raises CommError where the store does not answer; the entry may then be there nevertheless.
        """
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
    """A message as it goes over a socket: its sender, its kind, the key by which it is taken, and its bytes."""

    source: str
    kind: str
    key: tuple[int, ...]
    payload: bytes

    @functools.cached_property
    def header(self) -> bytes:
        """The bytes that go before the payload; they state its sender, kind, key, length and checksum."""
        told = {"source": self.source, "kind": self.kind, "key": self.key, "nbytes": len(self.payload)}
        packed = json.dumps(told | {"crc": zlib.crc32(self.payload)}).encode()
        return struct.pack("!I", len(packed)) + packed

    def send(self, to: socket.socket, told: Told) -> None:
        """Write the frame to a socket, whose time-out says for how long the other end may leave bytes untaken.

        told: called with this frame's own source after each piece of the payload. Raises OSError where that fails.
        """
        to.sendall(self.header)
        left = memoryview(self.payload)
        while left:
            sent = to.send(left[:_PIECE])
            left = left[sent:]
            told(self.source, sent)

    @classmethod
    def receive(cls, source: socket.socket, told: Told) -> tuple[Frame, bool] | None:
        """Read a frame from a socket, and return it with whether its payload is as it was sent.

        Return None where the stream ends or holds no valid header. told: called with the sender when the header has
        come, and after each piece of the payload.
        """
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


class _Way:
    """The connection to another replica, once there is one; `lock` is held by whoever makes it or sends over it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connection: socket.socket | None = None
        self.is_over = False

    def end(self, *, for_good: bool = False) -> None:
        """End the connection; another may be made, unless this is for good."""
        self.is_over = self.is_over or for_good
        connection, self.connection = self.connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # which wakes whoever sends over it
            connection.close()


class Messenger:
    """The sockets of one replica: it sends frames to others by name, and keeps those that come until they are taken.

    Args:
        who: the name of this replica.
        host: the address to listen on.
        timeout_s: for how many seconds a connection may take to be made, and its other end may leave bytes untaken.
        address_of: returns the (host, port) of a replica by its name; None where it is not known.
        serve: called with two versions of the agreed state, the one that another replica needs and the one that it has;
            returns the bytes of the former or of a later one, or None where there is none to give.

    Attributes: `address`, the (host, port) at which it listens; `moved`, when a payload's bytes last left or came, by
    the monotonic clock.

    Raises ConfigError where `host` is no address of this machine.
    """

    def __init__(
        self,
        who: str,
        *,
        host: str,
        timeout_s: float,
        address_of: Callable[[str], tuple[str, int] | None],
        serve: Callable[[int, int], bytes | None],
    ):
        self.who, self.timeout_s, self.serve = who, timeout_s, serve
        self._address_of = address_of
        self._arrived = threading.Condition()
        self._boxes: dict[tuple[str, str, tuple[int, ...]], bytes | None] = {}
        self._heard: dict[str, float] = {}
        self._ways: Counter[str] = Counter()  # the connections that each of the others has to here ...
        self._ended: dict[str, float] = {}  # ... and when it was left with none
        self.moved = time.monotonic()
        self._to: dict[str, _Way] = {}
        self._from: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise ConfigError(f"host = {host} is no address of this machine that others could reach: {error}") from None
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        if ipaddress.ip_address(self.address[0]).is_unspecified:
            self._listener.close()
            raise ConfigError(f"host = {host} is no address of this machine that others could reach: it stands for all")
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def _accept(self) -> None:
        each_s = max(1, math.ceil(self.timeout_s))
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if hasattr(socket, "TCP_KEEPIDLE"):  # else one whose other end is gone stays for two hours
                    for option, value in (("IDLE", each_s), ("INTVL", each_s), ("CNT", 5)):
                        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{option}"), value)
            except OSError:  # closed, or there are too many for now
                time.sleep(0.05)
                continue
            self._from.add(connection)
            if self._closed:
                connection.close()
                return
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
        """Return when there was the last sign of a replica, by the monotonic clock; minus infinity for none."""
        return self._heard.get(who, -math.inf)

    def reach(self, to: Sequence[str]) -> None:
        """Connect with those of `to` to whom there is no connection yet, without waiting, so that they hear beats."""

        def connect(who: str) -> None:
            way = self._way(who)
            with way.lock, contextlib.suppress(OSError, NoAnswer):
                if way.connection is None:
                    self._connect(who, way)

        for who in to:
            if (way := self._way(who)).connection is None and not way.lock.locked():
                threading.Thread(target=connect, args=(who,), name="reach", daemon=True).start()

    def beat(self, to: Sequence[str], word: bytes = b"") -> None:
        """Say, without waiting, that this replica is alive to those of `to` that it is connected with.

        word: a payload, which sets `moved` at the receivers; none by default.
        """
        frame = Frame(self.who, "beat", (), word)
        for way in map(self._way, to):
            if way.lock.acquire(blocking=False):  # else there are bytes on their way, which say as much
                try:
                    if (connection := way.connection) is not None and _takes(connection):
                        frame.send(connection, lambda who, nbytes: None)
                except (OSError, ValueError):  # the next one goes over another connection
                    way.end()
                finally:
                    way.lock.release()

    def _answer(self, frame: Frame) -> None:
        if len(frame.payload) == 16 and (state := self.serve(*struct.unpack("!qq", frame.payload))) is not None:
            with contextlib.suppress(NoAnswer):
                self.send(frame.source, "state", frame.key, state, anew=True)

    def send(self, to: str, kind: str, key: tuple[int, ...], payload: bytes, *, anew: bool = False) -> None:
        """Send `payload` to a replica, which takes it by its kind and key. Raises NoAnswer where that fails.

        anew: whether to do so over a new connection, as an old one may look open after a link was down, and lose what
        is sent over it.
        """
        frame, way = Frame(self.who, kind, key, payload), self._way(to)
        _ = frame.header  # made before there is anything that waits for it
        with way.lock:
            if (connection := way.connection) is not None and not anew:
                with contextlib.suppress(OSError):
                    return frame.send(connection, self._note)
            try:
                frame.send(self._connect(to, way), self._note)
            except OSError as error:
                way.end()
                raise NoAnswer(to, f"takes nothing ({error})") from None

    def _way(self, to: str) -> _Way:
        with self._lock:
            way = self._to.setdefault(to, _Way())
            way.is_over = way.is_over or self._closed
            return way

    def _connect(self, to: str, way: _Way) -> socket.socket:
        """Connect with another replica anew, and return the connection. Raises NoAnswer where it is not to be reached.

        An earlier connection ends only after a first word has gone over the new one, so that the other replica, who
        takes the end of all connections for the end of this replica, is never left without any.
        """
        if (address := self._address_of(to)) is None:
            raise NoAnswer(to, "has no address")
        connection = socket.create_connection(address, self.timeout_s)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # so that no link that was down is waited for longer than it was
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * self.timeout_s))
        Frame(self.who, "beat", (), b"").send(connection, self._note)
        way.end()
        way.connection = connection
        if way.is_over:  # whoever has ended it meanwhile may not have seen this one
            way.end()
            raise NoAnswer(to, "is not to be reached any more")
        return connection

    def take(
        self, source: str, kind: str, key: tuple[int, ...], *, within_s: float, go_on: Callable[[], bool]
    ) -> bytes:
        """Wait for the frame of a source, kind and key, and return its payload, which is forgotten here.

        within_s: for how many seconds there may be no sign of the source. go_on: called now and then; where it returns
        False, the frame is not needed any more. Raises NoAnswer where the frame does not come, is damaged, or is not
        needed any more, and soon after the last connection of its source has ended.
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
                stood = time.monotonic() - now > _ARRIVED_S + within_s / 2
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
            if stood:  # this process itself
                begin = time.monotonic()

    def forget(self, before: int, present: Container[str]) -> None:
        """Drop the values and states that have come for rounds before the number `before`.

        Connections to others than `present` end.
        """
        with self._arrived:
            for box in [box for box in self._boxes if box[1] in ("values", "state") and box[2][0] < before]:
                del self._boxes[box]
        with self._lock:
            gone = [self._to.pop(who) for who in list(self._to) if who not in present]
        for way in gone:
            way.end(for_good=True)

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._closed = True
        for end in [self._listener, *self._from]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # which wakes whoever reads or accepts, as closing does not
            end.close()
        with self._lock:
            ways = list(self._to.values())
        for way in ways:
            way.end(for_good=True)


def _takes(connection: socket.socket) -> bool:
    """Tell whether a connection takes bytes at once."""
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    return bool(poll.poll(0))


@dataclass(frozen=True)
class Payload:
    """Values of one replica, whose mean over the members of a round is to be found.

    x: the values, flat fp32, which are not changed. codec, seed: how they are encoded. purpose: what the ledger bills
    them as. sections: the sections of `x` in order, each with the slots that own it; None where all own everything.
    packed: the sections as `encoded` has returned them, where that has been called. reduce: the reduction in the place
    of the mean, as for `EncodedMean`.
    """

    x: Tensor
    codec: Codec
    purpose: str
    seed: int = 0
    sections: Sequence[Section] | None = None
    packed: Sequence[Tensor] | None = None
    reduce: Reduce = weighted_mean


#: Takes the slots of a round's members, in ascending order, and returns those over which this replica's mean is, its
#: own among them.
Group = Callable[[list[int]], list[int]]


class _Attempt:
    """The part of `axis.Op` that an encoded mean uses, between the members of an attempt."""

    def __init__(self, elastic: Elastic, request: Exchange):
        self.elastic, self.request, self.purpose = elastic, request, ""
        self.phase = 0

    def swap(
        self, out: Sequence[tuple[int, Tensor]], into: Sequence[tuple[int, Tensor | None]], *, agreed: bool = False
    ) -> list[Tensor]:
        """Send the tensors of `out` and receive those of `into`, by index among the attempt's members.

        Return the received in that order: in their buffers, or as uint8 on the CPU where a buffer is None. Raises
        NoAnswer where a member does not answer, or sends another number of bytes.
        """
        messenger, members = self.elastic.messenger, self.request.members
        key, self.phase = (*self.request.key, self.phase), self.phase + 1
        for i, x in out:
            raw = x.contiguous().view(-1).view(torch.uint8).cpu()
            self.elastic.ledger.bill("replica", self.purpose, self.elastic.step, raw.numel())
            messenger.send(self.elastic.name_of(members[i]), "values", key, raw.numpy().tobytes())
        wait = {"within_s": self.elastic.rules.silence_s, "go_on": lambda: self.elastic.is_at(self.request)}
        taken = []
        for i, buffer in into:
            raw = messenger.take(self.elastic.name_of(members[i]), "values", key, **wait)
            x = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
            if buffer is not None:
                if x.numel() != buffer.numel() * buffer.element_size():
                    raise NoAnswer(self.elastic.name_of(members[i]), f"sent {x.numel()} bytes")
                x = buffer.copy_(x.view(buffer.dtype).view(buffer.shape))
            taken.append(x)
        return taken


def check_place(slot: int, slots: int, quorum: int) -> None:
    """Raise ConfigError where `slot` is not from 0 to `slots` - 1, or `quorum` is not from 1 to `slots`."""
    for name, value in (("slots", slots), ("slot", slot), ("quorum", quorum)):
        if not isinstance(value, numbers.Integral):
            raise ConfigError(f"{name} must be a whole number, got {value!r}")
    if not 0 <= slot < slots or not 1 <= quorum <= slots:
        rule = f"slots count from 0 to {slots - 1}, and a quorum is of 1 to {slots}"
        raise ConfigError(f"slot {slot} and a quorum of {quorum} do not go with {slots} slots: {rule}")


class Elastic:
    """One replica among those that come and go.

    Args:
        notes: a store that all replicas reach, and that outlives them.
        who: the replica's name, which no other start of any replica has.
        slot: its share of the data, from 0.
        slots, quorum, end: as for `membership.Roll`.
        serve: returns the version and the bytes of the agreed state, for another replica; None where it has none that
            is late enough. It is called with the version that is needed at least, for which it may wait a while, and
            the version that the other replica has, since which what has not changed may be left out; 0 where nothing
            may.
        load: called with the bytes of a state that `serve` of another replica has returned.
        rules: for how long the replica waits; by default `Rules()`.
        host: the address by which others reach it; by default that by which it reaches the store.
        stage, stages: where a replica is a pipeline, the index of this stage, from 0, and their number. All of them
            have the same `who` and do everything here together, the same calls in the same order, and get the same
            results.

    Attributes: `roll`; `member`, its `membership.Member`; `messenger`; `ledger` of what it sends, states that it gives
    included; `step`, set by the caller, to which the ledger bills.

    Raises ConfigError as `check_place` and `Messenger` do, and CommError where the store does not answer for
    `Rules.alone_s`.
    """

    def __init__(
        self,
        notes: Notes,
        who: str,
        slot: int,
        *,
        slots: int,
        quorum: int,
        serve: Callable[[int, int], tuple[int, bytes] | None],
        load: Callable[[bytes], None],
        end: int | None = None,
        rules: Rules | None = None,
        host: str | None = None,
        stage: int = 0,
        stages: int = 1,
    ):
        check_place(slot, slots, quorum)
        self.rules = rules or Rules()
        self.notes, self.log = notes, SharedLog(notes)
        self._reading = threading.Lock()
        self._addresses: dict[str, tuple[str, int]] = {}
        self.roll, self.stage = Roll(slots, quorum, end), stage
        self.ledger, self.step = Ledger(), 0
        self._load, self._wants, self._closed = load, 0, False
        self._payloads: Sequence[Payload] = ()
        self._group: Group = list
        self._means: tuple[tuple[str, ...], list[Tensor]] | None = None
        self._given = b""  # the state that a donor has sent, until it is loaded

        def given(wanted: int, has: int) -> bytes | None:
            # Versions of another history, as before all went back, say nothing of what the other has.
            if (found := serve(wanted, has if self.roll.rounds_of(has) > 0 else 0)) is None:
                return None
            version, state = found
            packed = struct.pack("!q", version) + state
            self.ledger.bill("replica", "state", self.step, len(packed))
            return packed

        name, address = self.name_of(who), host or notes.here
        self.messenger = Messenger(
            name, host=address, timeout_s=self.rules.silence_s, address_of=self._address_of, serve=given
        )

        def heard(other: str) -> float:
            return self.messenger.heard(self.name_of(other))

        self.member = Member(who, slot, self.roll, time.monotonic, self.rules, heard)
        self._names = [self.name_of(who, s) for s in range(stages)]
        self._stages = Stages(self.messenger, self._names, stage, within_s=self.rules.timeout_s, go_on=self._stays)
        self._under_way: Exchange | None = None
        self._left = threading.Event()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        told, until = json.dumps(self.messenger.address), time.monotonic() + self.rules.alone_s
        while notes.write_once(f"address/{name}", told) != told:
            if time.monotonic() > until:
                self.close_connections()
                raise CommError(self._why_waiting(self.rules.alone_s))
            time.sleep(_LOOK_S)

    def name_of(self, who: str, stage: int | None = None) -> str:
        """Return the name by which messages reach a stage of a replica; by default the stage that this one is."""
        return f"{who}/{self.stage if stage is None else stage}"

    def _address_of(self, name: str) -> tuple[str, int] | None:
        if name not in self._addresses and (found := self.notes.read(f"address/{name}")) is not None:
            self._addresses[name] = tuple(json.loads(found))  # for good: another start has another name
        return self._addresses.get(name)

    def _beat(self) -> None:
        """Tell the other stages that this one is alive, and an attempt's members while its exchange moves."""
        stages = self._names[1:] if self._stages.leads else self._names[:1]
        while not self._left.wait(self.rules.silence_s / 4):
            self.messenger.reach(stages)
            attempt = self._under_way
            moves = attempt is not None and attempt.key == self.roll.key
            moves = moves and time.monotonic() - self.messenger.moved < self.rules.timeout_s
            self.messenger.beat(stages, b"moves" if moves and not self._stages.leads else b"")
            if moves:  # also for those who stand by, and wait for it to end
                others = {*attempt.members, *list(self.roll.holder.values())} - {self.member.who}
                names = [self.name_of(who) for who in others]
                self.messenger.reach(names)
                self.messenger.beat(names)

    def _others(self, attempt: Exchange) -> list[str]:
        return [self.name_of(who) for who in attempt.members if who != self.member.who]

    def join(self, version: int = 0) -> None:
        """Take the slot, with parameters of a version, as `Member.join` does.

        Raises CommError where nothing moves for `Rules.alone_s`, and where `stop` was called.
        """
        self._together(lambda: self._drive(self.member.join(version)))

    def catch_up(self) -> tuple[int, int] | None:
        """Come to the latest round, as `Member.catch_up` does, and load the state that a donor gives.

        Returns how many rounds are committed now, and how many tokens of this slot they count; None where
        `Member.catch_up` returns False. Raises CommError as that does, where nothing moves for `Rules.alone_s`, and
        where `stop` was called.
        """

        def led() -> tuple[int, int] | None:
            if not self._drive(self.member.catch_up()):
                return None
            return len(self.roll.rounds), self.roll.tokens(self.member.slot)

        found = self._together(led)
        return None if found is None else tuple(found)

    def meet(
        self, payloads: Sequence[Payload], tokens: int, group: Group = list, weight: int | None = None
    ) -> tuple[Round, list[Tensor]] | None:
        """Take part in the round under way, having trained on so many tokens since the one before.

        Returns the round and, for each payload, the mean over those of its members that are in this replica's group,
        with their weights (`membership.Ready`); None where the round went on without this replica. Raises CommError as
        `Member.meet` does, where nothing moves for `Rules.alone_s`, and where `stop` was called.
        """
        self._payloads, self._group = payloads, group
        self._means = None

        def led() -> dict[str, Any] | None:
            committed = self._drive(self.member.meet(tokens, weight))
            return None if committed is None else asdict(committed)

        found = self._together(led)
        self.read()  # a stage that follows may not know yet who has come
        holders = {self.name_of(who) for who in self.roll.holder.values()}
        self.messenger.forget(len(self.roll.rounds) - 1, holders.union(self._names))
        if found is None:
            return None
        committed = Round.of(found)
        if self._means is None or self._means[0] != committed.members:
            raise CommError(f"{self.member.who} lacks the mean of a round that it is a member of: {committed.members}")
        return committed, self._means[1]

    def wait_for_the_late(self) -> None:
        """Stay as a donor after the last round until the holder of every slot has it, at most for `Rules.timeout_s`."""
        until, roll = time.monotonic() + self.rules.timeout_s, self.roll

        def led() -> None:
            while time.monotonic() < until and not self._closed:
                if self.read() and all(roll.version.get(roll.holder.get(s)) == roll.latest for s in range(roll.slots)):
                    return
                time.sleep(_LOOK_S)

        self._together(led)
        self.read()

    def stop(self) -> None:
        """End the call that another thread of this replica is in, which raises CommError.

        `wait_for_the_late` returns instead.
        """
        self._closed = True

    def close(self) -> None:
        """Give the slot up, so that nobody waits for this replica, and end its connections."""
        self._closed = False
        if self._stages.leads:
            self._drive(self.member.leave())
        self.stop()
        self.close_connections()

    def close_connections(self) -> None:
        """End all connections without giving the slot up."""
        self._left.set()
        self.messenger.close()

    def _stays(self) -> bool:
        return not self._closed

    def is_at(self, request: Exchange) -> bool:
        """Tell whether an attempt is still under way, as far as the log can be read, and `stop` was not called."""
        self.read()
        return self.roll.key == request.key and not self._closed

    def _together(self, led: Callable[[], Any]) -> Any:
        """Return, at all stages, the result of `led`, which the first calls while the others carry out its orders.

        Where it raises CommError, all stages do.
        """
        if not self._stages.leads:
            return self._stages.follow({"exchange": self._swap_at, "fetch": self._ask, "load": self._load_given})
        try:
            found = led()
        except CommError as error:
            with contextlib.suppress(CommError):
                self._stages.fail(str(error))
            raise
        self._stages.end(found)
        return found

    def _drive(self, steps: Generator[Request, Any, Any]) -> Any:
        """Carry out the requests of a generator of `Member`, and return what it returns.

        Raises CommError where nothing moves for `Rules.alone_s`, or this replica has left. Where nothing has moved for
        `Rules.timeout_s`, a warning says once what is waited for.
        """
        answer: Any = None
        is_told = False
        moved, pause_s = (time.monotonic(), self.roll.length), _FIRST_LOOK_S
        while True:
            try:
                request = steps.send(answer)
            except StopIteration as end:
                return end.value
            if self._closed:
                raise CommError(f"{self.member.who} has left")
            if self.roll.length != moved[1]:
                moved, pause_s, is_told = (time.monotonic(), self.roll.length), _FIRST_LOOK_S, False
            waited_s = time.monotonic() - moved[0]
            if waited_s > self.rules.alone_s:
                raise CommError(self._why_waiting(self.rules.alone_s))
            if waited_s > self.rules.timeout_s and not is_told:
                is_told = True
                log.warning("%s; it gives up after %g s", self._why_waiting(self.rules.timeout_s), self.rules.alone_s)
            if isinstance(request, Exchange):
                answer = self._exchange(request)
                moved = time.monotonic(), self.roll.length
            elif isinstance(request, Fetch):
                answer = self._fetch(request.donor)
                moved = time.monotonic(), self.roll.length
            elif isinstance(request, Say):
                answer = self._say(request.entry)
            else:
                assert isinstance(request, Look)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LOOK_S)
                answer = self.read()

    def _why_waiting(self, waited_s: float) -> str:
        waited = f"{self.member.who} has waited for {waited_s:g} s"
        if not self.read():
            return f"{waited} for the store of the replicas' membership to answer"
        roll = self.roll
        if roll.rounds and not roll.donors():
            who = f"who has the parameters of round {len(roll.rounds)}, or a checkpoint of one before"
            return f"{waited} for {who}; where nobody has, a store that is started anew begins the run anew"
        there = f"{len(roll.ready)} of the {roll.quorum} replicas that a round needs are ready"
        return f"{waited} in round {len(roll.rounds)}: {there}"

    def read(self) -> bool:
        """Fold the log's new entries into `roll`, and return whether the log could be reached."""
        with self._reading:
            try:
                while (entry := self.log.read(self.roll.length)) is not None:
                    self.roll.take(entry)
            except CommError:
                return False
            return True

    def _say(self, entry: Entry) -> bool:
        try:
            with self._reading:
                self.log.append(entry)
        except CommError:
            time.sleep(_LOOK_S)
            return False
        return self.read()

    def _exchange(self, request: Exchange) -> str:
        self._stages.order("exchange", length=self.roll.length, key=request.key, members=request.members)
        lost = self._swap(request)
        return next(filter(None, [lost, *self._stages.answers()]), "")

    def _swap_at(self, length: int, key: list[int], members: list[str]) -> str:
        """Swap values as a stage that follows, after it has read as far in the log as the first stage had."""
        until = time.monotonic() + self.rules.alone_s
        self.read()
        while self.roll.length < length:
            if time.monotonic() > until or self._closed:
                raise CommError(self._why_waiting(self.rules.alone_s))
            time.sleep(_LOOK_S)
            self.read()
        request = Exchange(tuple(key), tuple(members))
        return self._swap(request) if self.roll.key == request.key else ""  # else what is done of it counts nowhere

    def _swap(self, request: Exchange) -> str:
        """Swap values with the same stage of all members; return the replica that does not answer, "" for none."""
        self._under_way, self.messenger.moved = request, time.monotonic()
        self.messenger.reach(self._others(request))
        members, roll = request.members, self.roll
        slots = [roll.slot[who] for who in members]
        met = self._group(sorted(slots))
        group = sorted((i for i, slot in enumerate(slots) if slot in met), key=lambda i: slots[i])
        me, weights = members.index(self.member.who), [roll.weights[members[i]] for i in group]
        attempt, means = _Attempt(self, request), []
        try:
            for payload in self._payloads:
                attempt.purpose = payload.purpose
                owned = payload.sections or [(payload.x.numel(), slots)]
                sections = [(numel, [i for i in group if slots[i] in owners]) for numel, owners in owned]
                x, codec, seed = payload.x.clone(), payload.codec, payload.seed
                mean = EncodedMean(x, codec, seed, sections, group, me, weights, payload.packed, payload.reduce)
                means.append(mean.alone() if len(group) == 1 else mean.over(attempt))
        except NoAnswer as error:
            return error.who.rpartition("/")[0]
        self._means = members, means
        return ""

    def _fetch(self, donor: str) -> int | None:
        wanted, has = self.roll.latest, self.member.version
        self._stages.order("fetch", donor=donor, wanted=wanted, has=has)
        versions = {self._ask(donor, wanted, has), *self._stages.answers()}
        for none in (None, NO_ANSWER):
            if none in versions:
                return none
        if len(versions) > 1:  # a round has been agreed on between two stages' answers: ask again
            return self.member.version
        (version,) = versions
        self.read()  # the donor may have been a round ahead
        if self.roll.rounds_of(version) > self.roll.rounds_of(self.member.version):
            self._stages.order("load")
            self._load_given()
            self._stages.answers()
        return version

    def _ask(self, donor: str, wanted: int, has: int) -> int | None:
        """Request this stage's state from a donor and keep its bytes. Return what a `Fetch` is answered."""
        self._wants += 1
        name, key = self.name_of(donor), (len(self.roll.rounds), self._wants)
        try:
            self.messenger.send(name, "want", key, struct.pack("!qq", wanted, has), anew=True)
        except NoAnswer:
            return None
        try:
            raw = self.messenger.take(name, "state", key, within_s=self.rules.timeout_s, go_on=self._stays)
        except NoAnswer:
            return NO_ANSWER
        (version,) = struct.unpack("!q", raw[:8])
        self._given = raw[8:]
        return version

    def _load_given(self) -> None:
        self._load(self._given)
        self._given = b""
