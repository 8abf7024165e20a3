"""Several machines on one: network namespaces, joined by links that the kernel really shapes.

    with Testbed(2, mbit_per_s=80) as bed:
        ranks = [bed.start(node, [sys.executable, "-m", "lowcomm.train", ...], rank=node) for node in range(2)]
        bed.shape(1, up=20)                    from now on
        bed.shape_pair(0, 1, 10)               what node 0 sends to node 1
        bed.cut(1); bed.mend(1)                its cable
        sent, received = bed.counters(0)       bytes, as the kernel counts them

Each node has one interface, `eth0`, by which it reaches all others through a switch, with a rate up and a rate down
(token buckets, `tc tbf`), so it is the link model of `wire` made of a kernel's queues. Packets are of 1,500 bytes, none
is put together or taken apart by offloading, and queues hold `QUEUE_S` seconds of a link's rate; then packets are
dropped.

A latency, and packets that are lost, need `tc netem`. Where the kernel lacks it, nodes' interfaces are TUN devices, and
a process forwards their packets by the same rules, late or not at all; it takes a fifth of a core at 80 Mbit/s.

Linux, iproute2 and root are needed; `missing` says what of these is not there.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import ipaddress
import itertools
import json
import math
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lowcomm.settings import ConfigError

#: What a link's queue holds, in seconds of its rate; and the packets' size.
QUEUE_S, MTU = 0.1, 1500
#: Bits per second that stand for a rate without a limit, where a bucket must have one.
_FASTEST = 10e9
_NETWORK = ipaddress.ip_network("10.77.0.0/24")


def missing(*, latency: bool = False, pairs: bool = False) -> str:
    """Return, in words, what this machine lacks for a testbed; "" where it lacks nothing.

    latency: whether the testbed is to have a latency, or lose packets. pairs: whether pairs of nodes are to have rates
    of their own.
    """
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if absent := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(absent)} (iproute2) cannot be found"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not _accepts("true"):
        return "no network namespace can be made here, root or not"
    if not _accepts(*_bucket("lo", 1e6)):
        return "the kernel has no token bucket (sch_tbf)"
    by_source = "tc filter add dev lo parent 2: protocol ip u32 match ip src 10.0.0.1/32 flowid 2:1"
    if pairs and not _accepts("sh", "-c", f"tc qdisc add dev lo root handle 2: htb && {by_source}"):
        return "the kernel cannot shape packets by their source (sch_htb, cls_u32)"
    return (
        "" if not latency or has_netem() or os.path.exists("/dev/net/tun") else "the kernel has neither netem nor TUN"
    )


def has_netem() -> bool:
    """Tell whether the kernel can delay packets by itself."""
    return _accepts("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")


def _accepts(*words: str) -> bool:
    """Tell whether a command succeeds in a network namespace, which is made for it and gone afterwards."""
    name = f"lowcomm-{os.getpid()}-try"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    try:
        return subprocess.run([*_inside(name), *words], capture_output=True).returncode == 0
    finally:
        _run("ip", "netns", "del", name)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _clear_up() -> None:
    """Remove the namespaces of testbeds whose process was killed, with whatever still runs in them."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0] if line.strip() else ""
        _, pid, *_ = [*name.split("-"), "", ""]
        if name.startswith("lowcomm-") and pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
            _remove(name)


def _remove(name: str) -> None:
    """Remove a namespace, with whatever still runs in it."""
    for child in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
        with contextlib.suppress(OSError):
            os.kill(int(child), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _inside(namespace: str) -> list[str]:
    return ["ip", "netns", "exec", namespace]


def _bucket(device: str, bits_per_s: float) -> list[str]:
    """Return the command that makes a device send at a rate; infinity is as fast as it goes."""
    if math.isinf(bits_per_s):
        return ["tc", "qdisc", "replace", "dev", device, "root", "pfifo", "limit", "10000"]
    queue = ["latency", f"{QUEUE_S * 1e3:.0f}ms"]
    return ["tc", "qdisc", "replace", "dev", device, "root", "handle", "1:", "tbf", *_rate(bits_per_s), *queue]


def _rate(bits_per_s: float) -> list[str]:
    return ["rate", f"{bits_per_s:.0f}bit", "burst", str(max(2 * MTU, int(bits_per_s / 8 * 2e-3)))]


@dataclass(frozen=True)
class Rates:
    """The rates of a node's link in Mbit/s: `up`, at which the node sends, and `down`, at which it receives.

    Raises ConfigError where one of them is not above 0; infinity is as fast as it goes.
    """

    up: float
    down: float

    def __post_init__(self) -> None:
        for rate in (self.up, self.down):
            if not rate > 0:
                raise ConfigError(f"a link of {rate:g} Mbit/s: it must be above 0 (`cut` takes a link down)")


class Testbed:
    """Nodes on shaped links, a context manager: they are there from `with` to its end.

    Args:
        nodes: the number of nodes, 1 to 200; they are numbered from 0.
        mbit_per_s: the rate of all links, both ways; infinity is as fast as it goes.
        latency_ms: the latency from each node to each other.
        loss_percent: how many per cent of the packets that a node sends are lost, from 0 to below 100.
        congestion: TCP's congestion control (net.ipv4.tcp_congestion_control); by default the one that every kernel has
            and lets be chosen.

    Attributes: `names` of the nodes' namespaces; `rates` of their links; `nodes`.

    Raises ConfigError for nodes, a rate or a loss out of these bounds, and where this machine lacks something
    (`missing`), before anything is made. Entering it raises ConfigError for a command that fails.
    """

    __test__ = False  # pytest is to take it for no test

    def __init__(
        self,
        nodes: int,
        *,
        mbit_per_s: float = math.inf,
        latency_ms: float = 0.0,
        loss_percent: float = 0.0,
        congestion: str = "reno",
    ):
        if not 1 <= nodes <= 200:
            raise ConfigError(f"{nodes} nodes: a testbed has 1 to 200")
        if not 0 <= latency_ms < math.inf:
            raise ConfigError(f"latency_ms = {latency_ms:g}: it must be at least 0, and finite")
        if not 0 <= loss_percent < 100:
            raise ConfigError(f"loss_percent = {loss_percent:g}: it must be at least 0 and below 100")
        self._is_delayed = latency_ms > 0 or loss_percent > 0
        if why := missing(latency=self._is_delayed):
            raise ConfigError(f"no testbed here: {why}")
        self.nodes, self.latency_ms, self.loss_percent, self.congestion = nodes, latency_ms, loss_percent, congestion
        self.rates = [Rates(mbit_per_s, mbit_per_s)] * nodes
        self._pairs: list[dict[int, float]] = [{} for _ in range(nodes)]  # to a node: from another -> Mbit/s
        self.names = [f"lowcomm-{os.getpid()}-{i}" for i in range(nodes)]
        self._switch = f"lowcomm-{os.getpid()}-switch"
        self._in_user_space = self._is_delayed and not has_netem()
        self._forwarder: subprocess.Popen[str] | None = None
        self._started: list[subprocess.Popen] = []
        self._made: list[str] = []  # namespaces, of which another testbed of this process may have others

    @staticmethod
    def address(node: int) -> str:
        """Return the IPv4 address of a node."""
        return str(_NETWORK[node + 1])

    def __enter__(self) -> Testbed:
        _clear_up()
        try:
            for name in [*self.names, self._switch]:
                _run("ip", "netns", "add", name)
                self._made.append(name)
                _run(*_inside(name), "ip", "link", "set", "lo", "up")
                _run(*_inside(name), "sysctl", "-qw", f"net.ipv4.tcp_congestion_control={self.congestion}")
            if self._in_user_space:
                self._forward()
            else:
                self._wire()
            for node in range(self.nodes):
                self._shape(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for child in [*self._started, *([self._forwarder] if self._forwarder else [])]:
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout, child.stderr):
                if stream is not None:
                    stream.close()
        for name in self._made:
            _remove(name)
        self._made.clear()

    def _wire(self) -> None:
        _run(*_inside(self._switch), "ip", "link", "add", "br0", "type", "bridge")
        _run(*_inside(self._switch), "ip", "link", "set", "br0", "up")
        for node, name in enumerate(self.names):
            port, limits = self._port(node), ["gso_max_segs", "1", "gro_max_size", str(MTU)]
            peer = ["peer", "name", port, "netns", self._switch]
            _run(*_inside(name), "ip", "link", "add", "eth0", "type", "veth", *peer)
            for where, device in ((name, "eth0"), (self._switch, port)):
                _run(*_inside(where), "ip", "link", "set", device, *limits, "mtu", str(MTU), "up")
            _run(*_inside(self._switch), "ip", "link", "set", port, "master", "br0")
            _run(*_inside(name), "ip", "addr", "add", f"{self.address(node)}/{_NETWORK.prefixlen}", "dev", "eth0")

    def _forward(self) -> None:
        words = [sys.executable, "-m", "lowcomm.comm.testbed", str(self.latency_ms), str(self.loss_percent)]
        words += self.names
        self._forwarder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._forwarder.stdout.readline() != "ready\n":
            raise ConfigError("the process that forwards packets between TUN devices did not start")
        for node, name in enumerate(self.names):
            _run(*_inside(name), "ip", "addr", "add", f"{self.address(node)}/{_NETWORK.prefixlen}", "dev", "eth0")
            _run(*_inside(name), "ip", "link", "set", "eth0", "mtu", str(MTU), "up")

    @staticmethod
    def _port(node: int) -> str:
        return f"port{node}"

    def shape(self, node: int, *, up: float | None = None, down: float | None = None) -> None:
        """Give a node's link other rates, in Mbit/s, from now on; None leaves a rate as it is.

        Raises ConfigError for a rate that is not above 0.
        """
        told = {name: rate for name, rate in (("up", up), ("down", down)) if rate is not None}
        self.rates[node] = replace(self.rates[node], **told)
        self._shape(node)

    def _shape(self, node: int) -> None:
        rates = self.rates[node]
        if self._forwarder is not None:
            pairs = {source: rate * 1e6 for source, rate in self._pairs[node].items()}
            self._forwarder.stdin.write(json.dumps([node, rates.up * 1e6, rates.down * 1e6, pairs]) + "\n")
            self._forwarder.stdin.flush()
            return
        down = rates.down if not self._pairs[node] else min(rates.down, _FASTEST / 1e6)  # a bucket, in which others are
        for where, device, rate in ((self.names[node], "eth0", rates.up), (self._switch, self._port(node), down)):
            _run(*_inside(where), *_bucket(device, rate * 1e6))
        if self._is_delayed:  # below the bucket of what the node sends
            delay = ["netem", "delay", f"{self.latency_ms}ms", "loss", f"{self.loss_percent}%", "limit", "100000"]
            inside = _inside(self.names[node])
            parent = ["parent", "1:1"] if math.isfinite(rates.up) else ["root"]
            _run(*inside, "tc", "qdisc", "replace", "dev", "eth0", *parent, "handle", "10:", *delay)
        if self._pairs[node]:
            self._class(node, "fff", math.inf)  # of all others
        for source, rate in self._pairs[node].items():
            self._class(node, f"{source + 1:x}", rate)

    def shape_pair(self, source: int, to: int, mbit_per_s: float) -> None:
        """Give what one node sends to another a rate of its own from now on, beside those of their links.

        With infinity only the links' rates hold. Raises ConfigError where `source` and `to` are not two nodes, for a
        rate that is not above 0, and where the kernel cannot tell packets apart (`missing`).
        """
        if not mbit_per_s > 0:
            raise ConfigError(f"{mbit_per_s:g} Mbit/s from node {source} to {to}: a rate must be above 0")
        if source == to or not {source, to} <= set(range(self.nodes)):
            raise ConfigError(f"a rate from node {source} to {to}: nodes are two of 0 to {self.nodes - 1}")
        if self._forwarder is None and not self._pairs[to]:
            if why := missing(pairs=True):
                raise ConfigError(f"no rates of pairs here: {why}")
            _run(*_inside(self._switch), *_bucket(self._port(to), min(self.rates[to].down * 1e6, _FASTEST)))
            self._below(to, "qdisc", "add", "parent", "1:1", "handle", "2:", "htb", "default", "fff")
        is_new = source not in self._pairs[to]
        self._pairs[to][source] = mbit_per_s
        self._shape(to)
        if self._forwarder is None and is_new:
            match = ["u32", "match", "ip", "src", f"{self.address(source)}/32", "flowid", f"2:{source + 1:x}"]
            self._below(to, "filter", "add", "parent", "2:", "protocol", "ip", *match)

    def _class(self, to: int, name: str, mbit_per_s: float) -> None:
        """Give a class of the packets that a node receives a rate, below that of all, and a queue as of a link."""
        rate = min(mbit_per_s * 1e6, _FASTEST)
        queue = max(2 * MTU, int(min(rate, self.rates[to].down * 1e6, 1e9) / 8 * QUEUE_S))
        bucket = ["htb", *_rate(rate), "cburst", _rate(rate)[-1], "quantum", str(MTU + 14)]
        self._below(to, "class", "replace", "parent", "2:", "classid", f"2:{name}", *bucket)
        handle = ["handle", f"{int(name, 16) + 0x100:x}:"]
        self._below(to, "qdisc", "replace", "parent", f"2:{name}", *handle, "bfifo", "limit", str(queue))

    def _below(self, to: int, what: str, how: str, *words: str) -> None:
        _run(*_inside(self._switch), "tc", what, how, "dev", self._port(to), *words)

    def cut(self, node: int) -> None:
        """Take a node's link down."""
        _run(*_inside(self.names[node]), "ip", "link", "set", "eth0", "down")

    def mend(self, node: int) -> None:
        """Put a node's link up again."""
        _run(*_inside(self.names[node]), "ip", "link", "set", "eth0", "up")

    def counters(self, node: int) -> tuple[int, int]:
        """Return the bytes that a node's interface has sent and received, link headers included where it has them."""
        (found,) = json.loads(_run(*_inside(self.names[node]), "ip", "-s", "-j", "link", "show", "eth0"))
        return found["stats64"]["tx"]["bytes"], found["stats64"]["rx"]["bytes"]

    def start(
        self,
        node: int,
        words: Sequence[str],
        *,
        rank: int | None = None,
        port: int = 29500,
        environment: Mapping[str, str] | None = None,
        **popen: object,
    ) -> subprocess.Popen:
        """Start a command on a node and return its process, which ends with the testbed, as do those that it starts.

        words: the command and its arguments. rank: where given, torchrun's variables make the process this rank, one
        per node, which meets the others on `port` of the first node. environment: the variables, by default those of
        this process. popen: further arguments of `subprocess.Popen`.
        """
        told = dict(os.environ if environment is None else environment)
        if rank is not None:
            told |= {"RANK": str(rank), "WORLD_SIZE": str(self.nodes), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            told |= {"MASTER_ADDR": self.address(0), "MASTER_PORT": str(port)}
        child = self._begin(self.names[node], words, told, **popen)
        self._started.append(child)
        return child

    def _begin(
        self, namespace: str, words: Sequence[str], environment: dict[str, str], **popen: object
    ) -> subprocess.Popen:
        return subprocess.Popen([*_inside(namespace), *words], env=environment, **popen)


# Where the kernel cannot delay packets

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000


def _tun(namespace: str) -> int:
    """Make the TUN device eth0 in a namespace, and return the descriptor by which its packets are read and written."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as home, open(f"/run/netns/{namespace}") as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"no way into the namespace {namespace}")
        try:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TUN | _IFF_NO_PI))
        finally:
            libc.setns(home.fileno(), _CLONE_NEWNET)
    return device


class _Forwarder:
    """A forwarder of packets between TUN devices, each with a rate up and a rate down.

    lost: the share of the packets that is lost, from 0 to 1; the others take `latency_s`. Rates are in bits per second.
    """

    def __init__(self, devices: Sequence[int], latency_s: float, lost: float = 0.0):
        self.devices, self.latency_s, self.lost = devices, latency_s, lost
        self._draw = random.Random(0)
        self.up = [math.inf] * len(devices)
        self.down = [math.inf] * len(devices)
        self._left = [0.0] * len(devices)  # when what a node has sent so far is on its way
        self._arrived = [0.0] * len(devices)  # ... and what has been sent to it is there
        self.pairs: list[dict[str, float]] = [{} for _ in devices]  # to a node: from another -> bits/s
        self._crossed: dict[tuple[int, int], float] = {}  # when what one has sent to another is past that
        self._order = itertools.count()
        #: (when, order, to whom, packet, whether it is past the rate at which that node receives)
        self._flying: list[tuple[float, int, int, bytes, bool]] = []

    def take(self, node: int, packet: bytes, now: float) -> None:
        """Take a packet that a node has sent at the time `now`, to be given to its destination or dropped."""
        to = packet[19] - 1 if len(packet) >= 20 and packet[0] >> 4 == 4 else -1
        if not 0 <= to < len(self.devices):
            return
        bits = 8 * len(packet)
        left = max(now, self._left[node]) + bits / self.up[node]
        crossed = max(left, self._crossed.get((node, to), 0.0) + bits / self.pairs[to].get(str(node), math.inf))
        if left - now > QUEUE_S:
            return
        self._left[node] = left
        if crossed - left > QUEUE_S:
            return
        self._crossed[node, to] = crossed
        if self._draw.random() >= self.lost:
            heapq.heappush(self._flying, (crossed + self.latency_s, next(self._order), to, packet, False))

    def give(self, now: float) -> float | None:
        """Hand over the packets that have arrived, and return after how many seconds the next is due; None for none."""
        while self._flying and self._flying[0][0] <= now:
            when, _, to, packet, is_received = heapq.heappop(self._flying)
            if not is_received:
                there = max(when, self._arrived[to] + 8 * len(packet) / self.down[to])
                if there - when > QUEUE_S:
                    continue
                self._arrived[to] = there
                if there > now:
                    heapq.heappush(self._flying, (there, next(self._order), to, packet, True))
                    continue
            with contextlib.suppress(OSError):  # the device is down, or full
                os.write(self.devices[to], packet)
        return max(0.0, self._flying[0][0] - now) if self._flying else None

    def run(self) -> None:
        """Forward until the standard input ends, by whose lines links get other rates in bits/s.

        A line has a node's number, its rates up and down, and those of what others send to it, by their numbers.
        """
        told = b""
        while True:
            wait = self.give(time.monotonic())
            ready, _, _ = select.select([*self.devices, 0], [], [], wait)
            for device in ready:
                if device == 0:
                    if not (more := os.read(0, 1 << 16)):
                        return
                    *lines, told = (told + more).split(b"\n")
                    for line in lines:
                        node, *rates = json.loads(line)
                        self.up[node], self.down[node], self.pairs[node] = rates
                    continue
                with contextlib.suppress(OSError):  # nothing more, or the device is down
                    for _ in range(64):
                        packet = os.read(device, MTU + 100)
                        self.take(self.devices.index(device), packet, time.monotonic())


if __name__ == "__main__":
    _latency_ms, _loss_percent, *_names = sys.argv[1:]
    _forwarder = _Forwarder([_tun(name) for name in _names], float(_latency_ms) / 1e3, float(_loss_percent) / 100)
    print("ready", flush=True)
    _forwarder.run()
