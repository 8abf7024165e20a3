"""Links that the kernel shapes: no faster than they say, counted, cut and mended, and gone when they are done with."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from lowcomm import ConfigError
from lowcomm.comm import testbed
from lowcomm.comm.testbed import Testbed, missing
from lowcomm.comm.wire import Span
from lowcomm.cost.replay import replay
from lowcomm.cost.tcp import FRAMING, INITIAL, LEAST_TIMEOUT_S, Connection
from lowcomm.experiment.run_folder import recorded_steps
from lowcomm.experiment.train import train_in_threads
from pipelines import links
from tests.conftest import command_line, small_run
from tests.harness import ForkingTestbed, clean_environment

here = pytest.mark.skipif(bool(missing()), reason=f"no testbed here: {missing()}")
far = pytest.mark.skipif(bool(missing(latency=True)), reason=f"no testbed here: {missing(latency=True)}")
SERVER = """
import socket
listener = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
while True:
    connection, _ = listener.accept()
    while size := int.from_bytes(connection.recv(8, socket.MSG_WAITALL)):
        left = size
        while left:
            left -= len(connection.recv(min(left, 1 << 20)))
        connection.sendall(b"k")
"""
CLIENT = """
import socket, sys, time
connection = socket.create_connection(("10.77.0.1", 5000), timeout=20)
for size in map(int, sys.argv[1:]):
    begin = time.monotonic()
    connection.sendall(size.to_bytes(8) + bytes(size))
    connection.recv(1)
    print(time.monotonic() - begin, flush=True)
"""


def served(bed: Testbed) -> None:
    """Let node 0 take what others send it."""
    server = bed.start(0, [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout.readline() == "listening\n"


def sent(bed: Testbed, *sizes: int, source: int = 1) -> list[float]:
    """Send node 0 so many bytes, one time after the other; returns the seconds until it has them."""
    child = bed.start(source, [sys.executable, "-c", CLIENT, *map(str, sizes)], stdout=subprocess.PIPE, text=True)
    said, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    return [float(line) for line in said.split()]


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


@here
def test_nothing_is_faster_than_its_link_and_all_of_it_is_counted() -> None:
    with Testbed(2, mbit_per_s=20) as bed:
        served(bed)
        before = bed.counters(1)[0]
        (took,) = sent(bed, 300_000)
        assert took > 0.95 * 300_000 * 8 / 20e6
        assert 1.04 < (bed.counters(1)[0] - before) / 300_000 < 1.1
        bed.shape(1, up=4)  # one way alone, and the other end's stays what it was
        (slower,) = sent(bed, 300_000)
        assert slower > 0.9 * 300_000 * 8 / 4e6
        assert bed.rates[1] == testbed.Rates(4, 20)
        bed.shape(1, up=200)
        bed.shape(0, down=4)
        (slower,) = sent(bed, 300_000)
        assert slower > 0.9 * 300_000 * 8 / 4e6
        with pytest.raises(ConfigError, match="a link of 0 Mbit/s: it must be above 0"):
            bed.shape(0, up=0)
        mine = bed.names
        assert mine[0] in namespaces()
    assert not any(name in namespaces() for name in mine)


@pytest.mark.parametrize(
    "latency_ms",
    [
        pytest.param(0.0, marks=pytest.mark.skipif(bool(missing(pairs=True)), reason=missing(pairs=True))),
        pytest.param(1.0, marks=far),
    ],
)
def test_a_pair_has_a_rate_of_its_own(latency_ms: float) -> None:
    with Testbed(3, latency_ms=latency_ms) as bed:
        served(bed)
        bed.shape_pair(1, 0, 4)
        (slow,), (fast,) = sent(bed, 300_000), sent(bed, 300_000, source=2)
        assert 4 * 300_000 * 8 / 4e6 > slow > 0.9 * 300_000 * 8 / 4e6 > 2 * fast
        bed.shape(0, down=2)  # what it receives of all, beside that
        (slower,) = sent(bed, 300_000, source=2)
        assert slower > 0.9 * 300_000 * 8 / 2e6
        bed.shape(0, down=400)
        bed.shape_pair(1, 0, math.inf)
        bed.shape_pair(2, 0, 4)
        (fast,), (slow,) = sent(bed, 300_000), sent(bed, 300_000, source=2)
        assert slow > 0.9 * 300_000 * 8 / 4e6 > 2 * fast
        with pytest.raises(ConfigError, match="0 Mbit/s from node 1 to 0: a rate must be above 0"):
            bed.shape_pair(1, 0, 0)
        with pytest.raises(ConfigError, match="a rate from node 3 to 0: nodes are two of 0 to 2"):
            bed.shape_pair(3, 0, 1)


@pytest.mark.fault("a link is cut, and mended", "nothing passes, and then all does")
@here
def test_a_link_that_is_cut_carries_nothing_until_it_is_mended() -> None:
    ping = [sys.executable, "-c", "import socket; socket.create_connection(('10.77.0.1', 5000), timeout=0.5)"]
    with Testbed(2) as bed:
        served(bed)
        assert bed.start(1, ping).wait(30) == 0
        bed.cut(1)
        assert bed.start(1, ping, stderr=subprocess.DEVNULL).wait(30) != 0
        bed.mend(1)
        assert bed.start(1, ping).wait(30) == 0


@far
def test_a_latency_is_between_all() -> None:
    with Testbed(2, mbit_per_s=50, latency_ms=30) as bed:
        served(bed)
        cold, warm = sent(bed, 100_000, 100_000)
        assert min(cold, warm) > 2 * 0.03 + 100_000 * 8 / 50e6 - 0.002
        assert bed.counters(1)[0] > 200_000


COUNTS = """
import socket
there = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
there.bind(("10.77.0.1", 5001))
print("ready", flush=True)
there.settimeout(20)
count = 0
while there.recv(100) != b"end":
    count += 1
print(count, flush=True)
"""
SENDS = """
import socket, time
here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for word in [b"x"] * 1000 + [b"end"] * 20:
    here.sendto(word, ("10.77.0.1", 5001))
    time.sleep(0.0002)
"""


@far
def test_so_many_packets_are_lost() -> None:
    with Testbed(2, loss_percent=30) as bed:
        counts = bed.start(0, [sys.executable, "-c", COUNTS], stdout=subprocess.PIPE, text=True)
        assert counts.stdout.readline() == "ready\n"
        assert bed.start(1, [sys.executable, "-c", SENDS]).wait(30) == 0
        assert 600 < int(counts.stdout.readline()) < 800
    with pytest.raises(ConfigError, match="loss_percent = 100: it must be at least 0 and below 100"):
        Testbed(2, loss_percent=100)


@here
def test_what_a_killed_testbed_has_left_is_cleared_up_by_the_next() -> None:
    words = "import time; from lowcomm.comm.testbed import Testbed\n"
    words += "with Testbed(1) as bed:\n  print(bed.names[0], flush=True)\n  time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE, text=True)
    left = child.stdout.readline().strip()
    child.kill()
    child.wait()
    child.stdout.close()
    assert left in namespaces()
    with Testbed(1):
        assert left not in namespaces()


def test_what_a_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(testbed.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert missing() == "tc (iproute2) cannot be found"
    monkeypatch.setattr(testbed.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="no testbed here: network namespaces need root"):
        Testbed(2)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert missing() == "network namespaces are Linux's"
    with pytest.raises(ConfigError, match="0 nodes: a testbed has 1 to 200"):
        Testbed(0)
    with pytest.raises(ConfigError, match="latency_ms = -5: it must be at least 0, and finite"):
        Testbed(2, latency_ms=-5)


@here
def test_a_testbed_that_cannot_be_leaves_another_of_this_process_as_it_is() -> None:
    with Testbed(2) as bed:
        child = bed.start(0, ["sleep", "60"])
        with pytest.raises(ConfigError, match="File exists"), Testbed(2):
            pass
        assert child.poll() is None
        assert all(name in namespaces() for name in bed.names)


@here
def test_a_congestion_control_that_is_not_there_is_named_and_nothing_is_left() -> None:
    bed = Testbed(2, congestion="telepathy")
    with pytest.raises(ConfigError, match="telepathy"), bed:
        pass
    assert not any(name in namespaces() for name in bed.names)


def test_a_connection_opens_by_doubling_and_closes_in_pauses() -> None:
    """200 kB at 80 Mbit/s over 40 ms: windows of 14, 29 and 58 kB leave the link idle, the fourth is the rest."""
    rate, one = 80e6, Connection()
    wire = FRAMING * 8 * 200_000 / rate
    opening = 3 * 0.08 - 8 * 7 * INITIAL / rate
    assert one.seconds(200_000, rate, 0.04, 0.0) == pytest.approx(opening + wire)
    assert one.window == 8 * INITIAL
    assert one.seconds(100_000, rate, 0.04, one.ended) == pytest.approx(FRAMING * 8 * 100_000 / rate)
    again = one.ended + 3.5 * (0.08 + LEAST_TIMEOUT_S)  # three time-outs: as it began
    assert one.seconds(200_000, rate, 0.04, again) == pytest.approx(opening + wire)
    one.resume(0.04, one.ended + 0.2)  # a word, before the time-out; the payload follows when the other rank has come
    one.resume(0.04, one.ended + 0.2)
    assert one.seconds(100_000, rate, 0.04, one.ended + 0.2) == pytest.approx(FRAMING * 8 * 100_000 / rate)
    two = Connection(2)
    assert two.seconds(40_000, rate, 0.04, 0.0) == pytest.approx(0.08 - 16 * INITIAL / rate + FRAMING * 0.004)
    near = Connection()
    assert np.allclose(near.seconds(200_000, np.array([20e6, 80e6, math.inf]), 0.0, 0.0), [4 * wire, wire, 0])


def test_a_verb_waits_for_the_word_of_its_receivers() -> None:
    """Rank 1 comes a second late: what it is to have leaves when its word has come, what it gives when it comes."""
    known = {"axis": "replica", "ranks": (0, 1), "verb": "mean #0", "purpose": "outer", "step": 1, "nbytes": 8_000}

    def traces(phases: int) -> list[list[Span]]:
        more = known | {"taken": 8_000, "phases": phases, "finished": 9.0, "left_wait": 9.0}
        return [[Span(rank=r, submitted=at, entered_wait=at, **more)] for r, at in ((0, 0.0), (1, 1.0))]

    def seconds(phases: int) -> float:
        return float(replay(traces(phases), 0.08, latency_s=0.04, tcp=True).seconds)

    one, half = FRAMING * 8 * 8_000 / 80e6, FRAMING * 8 * 4_000 / 80e6
    assert seconds(1) == pytest.approx(1 + 0.04 + one + 0.04)  # at rank 1; rank 0 has its part a latency before
    assert seconds(2) == pytest.approx(1 + 3 * 0.04 + 2 * half)
    assert float(replay(traces(1), 0.08, latency_s=0.04).seconds) == pytest.approx(1 + 0.04 + 8 * 8_000 / 80e6)


@pytest.mark.fault(
    "of two machines under one torchrun each, one dies with all that runs on it, and is started anew",
    "torchrun starts the other's ranks again too; both go on from the last checkpoint, bit for bit",
)
@here
@pytest.mark.longest
def test_a_machine_that_dies_and_is_started_anew_joins_again(corpus: Path, tmp_path: Path) -> None:
    """Machines are namespaces with one name, which resolves to none of them; the interface is found."""
    config = small_run(train={"steps": 300}, checkpoint={"every_steps": 20})
    rendezvous = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "10.77.0.1:29400",
        "--nnodes",
        "2",
        "--max-restarts",
        "5",
    ]

    def start(node: int) -> subprocess.Popen:
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", *rendezvous]
        words += ["--local-addr", bed.address(node), "--rdzv-conf", f"is_host={int(node == 0)}", "-m", "lowcomm.train"]
        words += command_line(config, corpus, tmp_path / "run")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        told = clean_environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        return bed.start(node, words, environment=told, start_new_session=True, **pipes)

    def step() -> int:
        return recorded_steps(tmp_path / "run" / "metrics" / "rank-000.jsonl")

    def wait_for(reached: int) -> None:
        end = time.monotonic() + 60
        while step() < reached:
            assert time.monotonic() < end
            assert all(child.poll() is None for child in machines)
            time.sleep(0.1)

    with ForkingTestbed(2) as bed:
        machines = [start(node) for node in range(2)]
        wait_for(60)
        for child in psutil.Process(machines[1].pid).children(recursive=True):
            child.kill()
        machines[1].kill()
        machines[1].wait()
        died_at = step()
        machines[1] = start(1)
        for child in machines:
            said, _ = child.communicate(timeout=120)
            assert child.returncode == 0, said
            if child is machines[0]:
                assert "resuming diloco_m2 at step" in said
    assert died_at < 300
    train_in_threads(config, corpus, tmp_path / "plain")
    for name in ("model.safetensors", "metrics/rank-000.jsonl", "metrics/rank-001.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


@here
def test_all_threads_that_ask_after_a_forked_process_are_told_how_it_ended() -> None:
    def ask(child: subprocess.Popen) -> int:
        while (status := child.poll()) is None:
            time.sleep(0.001)
        return status

    with ForkingTestbed(1) as bed, ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            child = bed.start(0, [sys.executable, "-m", "http.server", "0"])
            asking = [pool.submit(ask, child) for _ in range(4)]
            child.kill()
            assert {child.wait(), *(a.result() for a in asking)} == {-signal.SIGKILL}


@here
@pytest.mark.longest
def test_a_run_over_real_links_has_the_losses_of_one_over_a_free_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "Testbed", ForkingTestbed)
    data = links.corpus(tmp_path / "data")
    point = links.point("streaming", "200", data, times=1)  # whose exchanges are waited for, busy machine or not
    assert point["losses_equal"]
    assert point["counted_steps"] == 36
    least, most = links.framed_bytes(point)
    assert 0.95 * least < point["counter_bytes"] < 1.05 * most
    assert point["own_s"][0] > point["plain_s"][0]
    assert json.loads(json.dumps(point)) == point
    assert "losses equal" in links.told(point)
