"""World: the same answers and the same bytes on both transports, and no hang when ranks disagree."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from lowcomm.codecs import make_codec
from lowcomm.comm import axis, processes
from lowcomm.comm.config import CommConfig
from lowcomm.comm.notes import Notes
from lowcomm.comm.processes import PIECE_BYTES, PIECES_AHEAD, elastic_store
from lowcomm.comm.shares import encoded_mean_bytes, encoded_mean_in_shares, mean_bytes, ring_seconds, shares
from lowcomm.comm.start import run_threads
from lowcomm.comm.threads import ThreadHub, ThreadTransport
from lowcomm.comm.transport import CommError, Header
from lowcomm.comm.wire import Span, Trace
from lowcomm.comm.world import World
from lowcomm.settings import ConfigError
from pipelines.project import ROOT
from tests.harness import Group, OnlyTheLink, as_processes, as_threads, clean_environment, in_threads, refused, run_case


@pytest.fixture(scope="module")
def verbs(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return as_threads("verbs", 4, tmp_path_factory.mktemp("verbs"))


def test_threads_equal_processes_bit_for_bit(verbs: list[dict], tmp_path: Path) -> None:
    assert as_processes("verbs", 4, tmp_path) == verbs


def _expected(numel: int, ranks: int, seed: int = 0) -> torch.Tensor:
    parts = [torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + r)) for r in range(ranks)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.parametrize("numel", [1, 2, 7, 1001])
def test_a_mean_adds_in_rank_order(verbs: list[dict], numel: int) -> None:
    expected = _expected(numel, 4) / 4
    for out in verbs:
        assert torch.equal(torch.tensor(out[f"mean {numel}"]), expected)


def test_a_mean_in_many_pieces_adds_in_rank_order(tmp_path: Path) -> None:
    numel = 3 * PIECE_BYTES // 4 * (PIECES_AHEAD + 2) + 11
    expected = hashlib.sha256((_expected(numel, 3) / 3).numpy()).hexdigest()
    assert as_threads("large", 3, tmp_path) == as_processes("large", 3, tmp_path) == [expected] * 3


def test_a_reduce_scatter_gives_each_rank_its_share(verbs: list[dict]) -> None:
    total = _expected(1001, 4)
    for rank, (begin, end) in enumerate(shares(1001, 4)):
        assert torch.equal(torch.tensor(verbs[rank]["scatter 1001"]), total[begin:end])


def test_exchange_message_and_broadcast_carry_what_was_given(verbs: list[dict]) -> None:
    ones = torch.randn(5, generator=torch.Generator().manual_seed(1))
    for out in verbs:
        assert out["exchange"] == [[r] * (r + 1) for r in range(4)]
        assert out["empty"] == [[], [], [], []]
        assert torch.equal(torch.tensor(out["broadcast"]), ones)
    assert verbs[1]["message"] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert verbs[2]["pair"] == verbs[3]["pair"] != verbs[0]["pair"]


def test_asynchronous_verbs_may_be_waited_for_in_any_order(verbs: list[dict]) -> None:
    for out in verbs:
        assert torch.equal(torch.tensor(out["async"][1]), _expected(50, 4, seed=1) / 4)
        assert torch.equal(torch.tensor(out["async"][0]), _expected(60, 4, seed=2) / 4)


def test_ledger_bytes_equal_the_closed_form(verbs: list[dict]) -> None:
    sizes = (1, 2, 7, 1001)
    for rank, out in enumerate(verbs):
        assert out["ledger"]["replica/mean"] == sum(mean_bytes(n, 4, 4, rank) for n in sizes)
        assert out["ledger"].get("replica/sum", 0) == sum(mean_bytes(n, 8, 4, rank) for n in sizes)
        assert out["ledger"]["replica/exchange"] == 3 * 4 * (rank + 1)
        assert out["ledger"]["replica/pair"] == 12
        assert out["ledger"]["replica/async"] == mean_bytes(50, 4, 4, rank) + mean_bytes(60, 4, 4, rank)
        assert out["ledger"].get("replica/broadcast", 0) == (3 * 20 if rank == 1 else 0)
        assert out["ledger"].get("replica/message", 0) == (24 if rank == 0 else 0)


def test_axes_are_the_lines_of_the_grid(tmp_path: Path) -> None:
    threads = as_threads("grid", 2, tmp_path, stages=2)
    assert [r["place"] for r in threads] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert [r["replica"] for r in threads] == [1.0, 1.0, 5.0, 5.0]
    assert [r["stage"] for r in threads] == [2.0, 4.0, 2.0, 4.0]
    assert [r["world"] for r in threads] == [6.0] * 4
    assert as_processes("grid", 2, tmp_path, stages=2) == threads


def test_native_reductions_agree_to_rounding(tmp_path: Path) -> None:
    ours = as_threads("native", 2, tmp_path)[0]
    native = as_processes("native", 2, tmp_path, reduction="native")[0]
    # Two summands commute, so even another order gives the same bits.
    assert native == ours
    with pytest.raises(ConfigError, match="native needs processes"):
        as_threads("native", 2, tmp_path, reduction="native")
    for unknown in ({"link_mbit_per_s": 10.0}, {"link_latency_ms": 1.0}, {"clock": "virtual"}):
        with pytest.raises(
            RuntimeError, match="ConfigError: comm.reduction = native knows no link and no virtual clock"
        ):
            as_processes("native", 2, tmp_path, reduction="native", **unknown)


@pytest.mark.parametrize("run", [as_threads, as_processes])
def test_messages_come_in_order_where_one_is_awaited_without_its_shape(run: Callable, tmp_path: Path) -> None:
    assert run("of_any_shape_first", 2, tmp_path) == [[], [1.0, 2.0]]


@pytest.mark.parametrize(
    ("gpus", "told"),
    [
        (["a", "b", "c"], ""),
        (["a", "", "c"], "rank 1 of 3 has none"),
        (["a", "b", "b"], "ranks 1 and 2 of 3 share one"),
    ],
)
def test_nccl_is_for_ranks_that_each_have_a_gpu_of_their_own(
    gpus: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many of them a process sees: what is asked for is refused on every rank, else all take gloo."""
    store, mine = dist.HashStore(), threading.local()
    monkeypatch.setattr(processes, "_own_gpu", lambda: mine.gpu)

    def rank(number: int, needed: bool) -> bool | str:
        mine.gpu = gpus[number]
        try:
            return processes._all_have_gpus(dist.PrefixStore(str(needed), store), number, len(gpus), needed=needed)
        except CommError as error:
            return str(error)

    for needed in (False, True):
        found = in_threads(*(functools.partial(rank, number, needed) for number in range(len(gpus))))
        why = f"comm.backend = nccl needs a GPU for each rank: {told}; use gloo to share GPUs or the CPU"
        assert found == [why if told and needed else not told] * len(gpus)


def test_messages_wait_for_their_receiver_and_not_their_sender(tmp_path: Path) -> None:
    assert as_threads("many_messages", 2, tmp_path) == [[float(k) for k in range(100)]] * 2
    assert as_processes("many_messages", 2, tmp_path) == [[float(k) for k in range(100)]] * 2


@pytest.mark.parametrize(
    ("verb", "message"),
    [
        (lambda w: w.mean(torch.ones(4, dtype=torch.int64), purpose="x"), "a mean of torch.int64 is not of that type"),
        (lambda w: w.sum(torch.ones(4, dtype=torch.bfloat16), purpose="x"), "loses bits when summed"),
        (lambda w: w.sum(torch.ones(4, 4).T[:2], purpose="x"), "must be contiguous"),
        (lambda w: w.exchange(torch.ones(4, 4)[:, :2], purpose="x"), "must be contiguous"),
        (lambda w: w.send(torch.ones(4, 4)[:, :2], 1 - w.rank, purpose="x", axis="route"), "must be contiguous"),
        (lambda w: w.broadcast(torch.ones(4, 4)[:, :2], purpose="x"), "must be contiguous"),
        (
            lambda w: w.encoded_mean_async(torch.ones(4, 4), make_codec("e3m0"), purpose="x").wait(),
            r"encoded means are of flat float32 tensors, got float32\[4, 4\]",
        ),
    ],
)
def test_what_cannot_travel_is_refused_before_anything_does(verb: Callable, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        run_threads(verb, replicas=2)


def test_members_that_disagree_on_codec_or_owners_find_out() -> None:
    """Their messages are as long as each other's."""

    def codecs(world: World) -> None:
        codec = make_codec(("e3m0", "e2m1")[world.rank])
        world.encoded_mean_async(torch.ones(1000), codec, purpose="x").wait()

    with pytest.raises(CommError, match=r"is in encoded mean #0 of float32\[1000\] in e(3m0|2m1)"):
        run_threads(codecs, replicas=2)

    def owners(world: World) -> None:
        sections = [(500, [0, 1]), (500, [0, 1] if world.rank else [1, 0, 2])]
        world.encoded_mean_async(torch.ones(1000), make_codec("fp32"), purpose="x", sections=sections).wait()

    with pytest.raises(CommError, match="is in encoded mean #0"):
        run_threads(owners, replicas=3)


def test_who_owns_nothing_finds_out_too_that_it_is_out_of_step() -> None:
    """Owners sum in shares and meet each other first; the third replica takes nothing but their sums."""
    sections, codec = [(600, [0, 1])], make_codec("fp32")
    assert encoded_mean_in_shares(600, codec, 3, 2)

    def work(world: World) -> None:
        for purpose in ("first", "second")[world.rank // 2 :]:
            world.encoded_mean_async(torch.ones(600), codec, purpose=purpose, sections=sections).wait()

    with pytest.raises(CommError, match="is in encoded mean #0 .* for '(first|second)'"):
        run_threads(work, replicas=3)


def test_the_order_in_which_a_group_is_named_changes_nothing() -> None:
    def work(world: World) -> list[float]:
        x = torch.randn(999, generator=torch.Generator().manual_seed(world.rank))
        group = [0, 1, 2] if world.rank else [2, 1, 0]
        return world.encoded_mean_async(x, make_codec("fp32"), purpose="x", group=group).wait().tolist()

    results = run_threads(work, replicas=3)
    assert results[0] == results[1] == results[2]


def test_utilisation_counts_no_wait_from_before_the_start() -> None:
    trace = Trace()
    known = {"rank": 0, "axis": "replica", "verb": "v", "purpose": "p", "step": 1, "ranks": (0, 1), "phases": 1}
    for entered, left in ((0.0, 5.0), (9.0, 12.0), (14.0, 15.0)):
        trace.spans.append(
            Span(**known, nbytes=1, taken=1, submitted=entered, finished=left, entered_wait=entered, left_wait=left)
        )
    assert trace.utilisation(10.0, 20.0) == 1 - (2.0 + 1.0) / 10


@pytest.mark.fault(
    "ranks call verbs that do not fit: other shapes, purposes, axes",
    "all end, and the ranks and what differs are named",
)
@pytest.mark.parametrize(
    ("case", "theirs"),
    [
        ("shapes_disagree", {0: r"mean #0 of float32\[4\] for 'outer'", 1: r"mean #0 of float32\[5\] for 'outer'"}),
        ("verbs_disagree", {0: r"mean #0 of float32\[4\] for 'outer'", 1: r"exchange #0 of torch.float32"}),
    ],
)
def test_ranks_that_disagree_hear_of_it_by_name(case: str, theirs: dict[int, str], tmp_path: Path) -> None:
    # Either rank may notice first; its message names what it does itself and what the other does.
    message = "|".join(
        rf"rank {r} \(replica {r} of 2\), step 0, {theirs[r]}.*: rank {1 - r} is in {theirs[1 - r]}" for r in (0, 1)
    )
    with pytest.raises(CommError, match=message):
        as_threads(case, 2, tmp_path)
    with pytest.raises(RuntimeError, match=message) as processes:
        as_processes(case, 2, tmp_path)
    for rank in (0, 1):
        assert f"rank {rank}: CommError: rank {rank} (replica {rank} of 2)" in str(processes.value)


@pytest.mark.fault("a message of no time, of an unknown device or of an unknown type", "all end, and it is named")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"begin": math.nan}, "sent at nan s, which is no time"),
        ({"begin": math.inf}, "sent at inf s, which is no time"),
        ({"device": "abacus"}, "sent from device abacus, and this rank has"),
        ({"dtype": "torch.uuid"}, "sent values of type torch.uuid, which is none of torch's"),
    ],
)
def test_messages_that_cannot_be_are_named(change: dict, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(axis, "Header", lambda *fields: dataclasses.replace(Header(*fields), **change))
    with pytest.raises(CommError, match=f"rank . {message}"):
        run_threads(lambda world: world.exchange(torch.zeros(4), purpose="outer"), replicas=2)


@pytest.mark.fault("a rank of a fixed group fails", "all ranks end, with its reason")
def test_a_rank_that_raises_ends_all_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="this rank has had enough"):
        as_threads("peer_raises", 2, tmp_path)
    with pytest.raises(RuntimeError) as processes:
        as_processes("peer_raises", 2, tmp_path)
    assert "rank 1: ValueError: this rank has had enough" in str(processes.value)


@pytest.mark.fault("a rank never sends", "the others name it after `comm.timeout_s`")
def test_a_silent_rank_times_out_by_name(tmp_path: Path) -> None:
    with pytest.raises(CommError, match=r"rank 0 .*mean #0 of float32\[4\] for 'outer': no word from rank 1 in 1 s"):
        as_threads("peer_is_silent", 2, tmp_path, timeout_s=1)
    with pytest.raises(RuntimeError, match=r"rank 0 .*for 'outer': waiting for rank 1: .*[Tt]imed out"):
        as_processes("peer_is_silent", 2, tmp_path, timeout_s=3)


@pytest.mark.fault("a rank of a fixed group is killed", "the others name it")
def test_a_killed_rank_is_missed_by_name(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"rank 0 .*for 'outer': (waiting for|sending to) rank 1"):
        as_processes("peer_is_killed", 2, tmp_path, timeout_s=60)


@pytest.mark.fault("a rank is never started", "the others end after `comm.timeout_s`, and say that it is not there")
def test_a_rank_that_is_never_started_is_not_waited_for_for_ever() -> None:
    """The first rank, who would keep the store, and another one."""
    words = "from lowcomm.comm.processes import ProcessTransport; ProcessTransport('gloo', 3.0)"
    for rank in ("0", "1"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        told = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        child = subprocess.run(
            [sys.executable, "-c", words], env=clean_environment(**told), capture_output=True, text=True, timeout=60
        )
        assert child.returncode == 1
        assert "CommError: the ranks' store at 127.0.0.1:" in child.stderr.splitlines()[-1]


def test_ranks_of_one_start_find_each_other_and_say_who_is_missing() -> None:
    store = dist.HashStore()
    for rank in range(3):
        store.set(f"start/{rank}", "an earlier start's")
    store.set("start/call", "an earlier start's")
    late = threading.Timer(0.5, store.set, ("start/1", "an earlier start's, which comes late"))
    late.start()
    found = in_threads(*(lambda rank=rank: processes._of_this_start(store, rank, 3, 20.0) for rank in range(3)))
    found[0].set("here", "yes")
    assert [part.get("here") for part in found] == [b"yes"] * 3
    with pytest.raises(CommError, match=r"of 3 ranks only \[0\] have started in 0.5 s"):
        processes._of_this_start(dist.HashStore(), 0, 3, 0.5)
    with pytest.raises(CommError, match=r"rank 1 has waited for rank 0, which has not started in 0.5 s"):
        processes._of_this_start(dist.HashStore(), 1, 3, 0.5)


def test_processes_that_torchrun_starts_side_by_side_are_stages_of_one_replica() -> None:
    """torchrun numbers processes replica by replica, the World's grid stage by stage.

    Where processes were started with unlike numbers of stages, each of them gets an error that says so.
    """
    store = dist.HashStore()
    places = in_threads(*(lambda i=i: processes._place(store, i, 6, 2) for i in range(6)))
    assert places == [0, 3, 1, 4, 2, 5]
    stage_and_replica = [divmod(place, 3) for place in places]
    assert stage_and_replica == [(stage, replica) for replica in range(3) for stage in range(2)]
    store = dist.HashStore()
    told = in_threads(*(lambda i=i: refused(processes._place, store, i, 4, (2, 2, 1, 1)[i]) for i in range(4)))
    assert told == ["ranks were started differently: 2 stages on rank 0, 1 on rank 2"] * 4


def test_the_first_machine_finds_its_interface_though_its_own_name_is_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian gives a machine's own name the address 127.0.1.1."""
    there = [(name, a) for name, addresses in psutil.net_if_addrs().items() for a in addresses]
    ours = [(name, a.address) for name, a in there if a.family == socket.AF_INET]
    mine = [(name, address) for name, address in ours if not address.startswith("127.")]
    if not mine:
        pytest.skip("this machine is on no network")
    name, address = mine[0]
    monkeypatch.setattr(processes, "_address_towards", lambda host, _: "127.0.1.1" if host == "me" else address)
    assert processes._interface_towards("me", 29500) == name
    monkeypatch.setattr(processes, "_address_towards", lambda host, _: "127.0.1.1")
    assert processes._interface_towards("me", 29500) == ""


def test_whoever_reaches_a_store_by_its_own_name_tells_others_an_address_that_they_reach(store: Notes) -> None:
    """A machine reaches 0.0.0.0 over its loopback, as it does its own name where that stands for 127.0.1.1."""
    families = (socket.AF_INET, socket.AF_INET6)
    ours = {a.address for addresses in psutil.net_if_addrs().values() for a in addresses if a.family in families}
    assert processes._is_loopback(processes._address_towards("0.0.0.0", store.port))
    here = elastic_store(f"0.0.0.0:{store.port}").here
    if processes._is_loopback(here):
        pytest.skip("this machine is on no network")
    assert here in ours
    assert elastic_store(f"127.0.0.1:{store.port}").here == "127.0.0.1"


@pytest.mark.fault("the machine with torchrun's store freezes", "all ranks end after `comm.timeout_s`")
@pytest.mark.skipif(sys.platform != "linux", reason="stops processes")
def test_a_store_that_freezes_keeps_nobody(tmp_path: Path) -> None:
    """Its machine is cut off, and a rank with it: the other one waits as long as its time-out says, and ends."""
    serve = (
        "import time; from torch.distributed import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); print(store.port, flush=True)\n"
        "time.sleep(600)"
    )
    server = subprocess.Popen([sys.executable, "-c", serve], stdout=subprocess.PIPE, text=True, env=clean_environment())
    (tmp_path / "store.pid").write_text(str(server.pid))
    comm = {"timeout_s": 3.0}
    started = Group(run_case, "store_freezes", 2, 1, tmp_path, comm, ranks=2, store=int(server.stdout.readline()))
    try:
        started.processes[1].join(60)
        assert started.processes[1].exitcode == 3
    finally:
        server.kill()
        server.communicate()
        started.kill(*started.processes)
    assert "rank 1 (replica 1 of 2)" in (said := started.said())
    assert "waiting for rank 0" in said


def test_the_first_vector_function_is_called_by_one_thread_alone() -> None:
    """Two threads that both come first get different cosines in 3 % of processes: too rarely for a test to wait for."""
    with torch.profiler.profile() as profile:
        run_threads(lambda world: None, replicas=2)
    assert [e.name for e in profile.events() if e.name == "aten::cos"] == ["aten::cos"]


def test_a_rank_has_no_message_for_itself_or_for_nobody() -> None:
    def work(world: World) -> None:
        with pytest.raises(ValueError, match="index 0 of axis 'stage' is no peer of index 0: the axis has size 1"):
            world.send(torch.ones(1), 0, purpose="x")
        with pytest.raises(ValueError, match="index 2 of axis 'replica' is no peer of index"):
            world.recv(2, purpose="x", axis="replica")
        with pytest.raises(ValueError, match="root 2 is not on axis 'replica' of size 2"):
            world.broadcast(torch.ones(1), purpose="x", root=2)

    run_threads(work, replicas=2)


def test_without_a_link_clocks_of_other_machines_do_not_matter() -> None:
    def work(world: World) -> float:
        now = world.clock.now
        world.clock.now = lambda: now() + 1000 * world.rank  # as if this machine had been up for longer
        begin = time.monotonic()
        world.barrier()
        world.mean(torch.ones(10), purpose="x")
        return time.monotonic() - begin

    assert max(run_threads(work, replicas=2)) < 10


def test_threads_have_no_backend() -> None:
    with pytest.raises(ConfigError, match="comm.backend = nccl is for processes"):
        run_threads(lambda world: None, replicas=2, comm=CommConfig(backend="nccl"))


def test_no_thread_outlives_its_run(tmp_path: Path) -> None:
    """One that lives on aborts the interpreter as it ends, some of the time."""
    as_threads("verbs", 2, tmp_path)
    with pytest.raises(ValueError, match="enough"):
        as_threads("peer_raises", 2, tmp_path)
    assert [t.name for t in threading.enumerate() if "wire" in t.name or "rank" in t.name] == []


def test_an_interrupt_waits_for_all_ranks() -> None:
    """The interpreter may end once it is raised, so no rank may still be at work, nor its thread alive."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    ended = []

    def work(world: World) -> None:
        if world.rank == 1:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.5 if world.rank == 0 else 0.2)
        ended.append(world.rank)

    try:
        with pytest.raises(KeyboardInterrupt):
            run_threads(work, replicas=2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(ended) == [0, 1]
    assert not [t for t in threading.enumerate() if t.name.startswith("rank-")]


def test_headers_hold_the_names_of_large_groups() -> None:
    ranks, half = 160, list(range(0, 160, 2))

    def work(world: World) -> int:
        group = half if world.rank in half else [world.rank]
        parts = world.exchange(torch.tensor([world.rank]), purpose="large", group=group)
        return int(torch.cat(parts).sum())

    assert run_threads(work, replicas=ranks) == [sum(half) if r in half else r for r in range(ranks)]


def test_ranks_must_fill_the_grid() -> None:
    with pytest.raises(ConfigError, match="4 ranks cannot form 3 replicas x 1 stages"):
        World(ThreadTransport(ThreadHub(4, 1.0), 0), replicas=3)


def test_narrow_floats_are_not_summed() -> None:
    with pytest.raises(TypeError, match="bfloat16 loses bits when summed"):
        run_threads(lambda w: w.mean(torch.zeros(4, dtype=torch.bfloat16), purpose="x"), replicas=2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_virtual_link_takes_what_the_closed_form_says(ranks: int) -> None:
    payload, rate, latency_s = 1_000_000, 80e6, 0.01

    def work(world: World) -> list[float]:
        world.clock = OnlyTheLink()
        world.mean(torch.zeros(payload // 4), purpose="outer")
        once = world.clock.now()
        handles = [world.mean_async(torch.zeros(payload // 4), purpose="outer") for _ in range(2)]
        for handle in handles:
            handle.wait()
        return [once, world.clock.now()]

    comm = CommConfig(clock="virtual", link_mbit_per_s=rate / 1e6, link_latency_ms=latency_s * 1e3)
    expected = ring_seconds(payload, ranks, rate, latency_s)
    for once, thrice in run_threads(work, replicas=ranks, comm=comm):
        assert once == pytest.approx(expected, rel=1e-12)
        assert thrice == pytest.approx(3 * expected, rel=1e-12)  # an axis' wire does one thing at a time


def test_only_processes_talk_to_torch_distributed() -> None:
    allowed = {
        "lowcomm/comm/processes.py": "import torch.distributed as dist",
        "lowcomm/methods/fsdp.py": "from torch.distributed.",
        "pipelines/forked.py": "from torch.distributed.",  # starts ranks, which then talk through processes.py
    }
    paths = sorted((ROOT / "lowcomm").rglob("*.py")) + sorted((ROOT / "pipelines").glob("*.py"))
    paths.remove(ROOT / "pipelines" / "bench.py")  # measures World against it
    assert {ROOT / name for name in allowed} <= set(paths)
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text()
        if name == "lowcomm/transformers.py":  # asks whether there are processes, which is no talk
            text = text.replace("torch.distributed.is_initialized()", "")
        for line in text.splitlines():
            if re.match(r"\s*(import|from) torch\.distributed|.*torch\.distributed\.\w+\(", line):
                assert line.strip().startswith(allowed.get(name, "never")), f"{name}: {line}"
    fsdp = (ROOT / "lowcomm" / "methods" / "fsdp.py").read_text()
    assert not re.search(r"all_reduce|all_gather_into|isend|irecv|dist\.", fsdp)


def test_means_over_groups_on_both_transports(tmp_path: Path) -> None:
    """Three of five replicas and the other two: the mean of each, the bytes of each, and nothing from anybody else."""
    threads, processes = as_threads("groups", 5, tmp_path), as_processes("groups", 5, tmp_path)
    assert threads == processes
    codec = make_codec("int8")
    for members in ([0, 2, 4], [1, 3]):
        values = [torch.randn(3000, generator=torch.Generator().manual_seed(1000 + r)) for r in members]
        mean = sum(codec.decode(codec.encode(v), 3000) for v in values) / len(members)
        for index, r in enumerate(members):
            assert torch.allclose(torch.tensor(threads[r]["now"]), mean, atol=1e-6)
            for got, seed in zip(threads[r]["early"], (4, 3), strict=True):
                early = [torch.randn(700, generator=torch.Generator().manual_seed(1000 * seed + m)) for m in members]
                assert torch.allclose(torch.tensor(got), sum(early) / len(members), atol=1e-6)
            sent = threads[r]["ledger"]
            assert sent["replica/group"] == encoded_mean_bytes(3000, codec, len(members), index)
            assert sent["replica/early"] == 2 * encoded_mean_bytes(700, make_codec("fp32"), len(members), index)


def test_what_is_ahead_holds_up_nothing() -> None:
    """A partner that comes late to what is not needed yet does not delay what is."""

    def work(world: World) -> float:
        if world.replica == 0:
            early = world.encoded_mean_async(
                torch.ones(10), make_codec("fp32"), purpose="early", group=[0, 1], ahead=True
            )
        begin = time.monotonic()
        world.encoded_mean_async(torch.ones(10), make_codec("fp32"), purpose="now", group=[0, 1]).wait()
        took = time.monotonic() - begin
        if world.replica == 1:
            time.sleep(2)
            early = world.encoded_mean_async(
                torch.ones(10), make_codec("fp32"), purpose="early", group=[0, 1], ahead=True
            )
        early.wait()
        return took

    assert max(run_threads(work, replicas=2)) < 1.5


def test_partners_that_are_out_of_step_find_out() -> None:
    def work(world: World) -> None:
        for k in range(2 - world.replica):
            world.encoded_mean_async(torch.ones(10 + k), make_codec("fp32"), purpose="ahead", group=[0, 1], ahead=True)
        world.encoded_mean_async(torch.ones(11), make_codec("fp32"), purpose="last", group=[0, 1], ahead=True).wait()

    with pytest.raises(CommError, match=r"is in encoded mean ahead #1 of float32\[11\]"):
        run_threads(work, replicas=2)


@pytest.mark.parametrize("group", [[0, 0], [1], [0, 7]])
def test_groups_that_cannot_be_are_refused(group: list[int]) -> None:
    def work(world: World) -> None:
        if world.replica == 0:
            world.exchange(torch.ones(1), purpose="x", group=group)

    with pytest.raises(
        ValueError, match="must name each member once, hold this rank's index 0 and be of axis 'replica'"
    ):
        run_threads(work, replicas=2)
