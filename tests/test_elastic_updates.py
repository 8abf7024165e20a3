"""Local updates of replicas that leave and come back: without faults they are `LocalUpdates`, with them all agree."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from lowcomm import CommError, ConfigError, LocalUpdates, elastic_store, run_threads, slice_parameters
from lowcomm.__main__ import main
from lowcomm.comm.elastic import Frame, SharedLog
from lowcomm.comm.membership import Lost, Roll, Rules
from lowcomm.comm.notes import Notes
from lowcomm.comm.world import World
from lowcomm.methods.elastic import ElasticUpdates
from lowcomm.methods.local_updates import RESIDUAL
from tests.harness import clean_environment, in_threads

STEPS = 25
#: A busy machine must not make anybody late.
PATIENT = Rules(timeout_s=10.0, grace_s=8.0)
NOLOCO = {
    "sync_every_steps": 4,
    "peers": "group",
    "group_size": 2,
    "outer": "noloco",
    "outer_lr": 0.7,
    "outer_momentum": 0.5,
    "outer_pull": 0.7,
}
METHODS: dict[str, dict[str, Any]] = {
    "diloco": {"sync_every_steps": 4},
    "sparse": {"sync_every_steps": 4, "codec": "chunk_topk_2bit", "codec_keep": 0.005, "error_feedback": 0.9},
    "clipped": {"sync_every_steps": 4, "mean": "clipped", "byzantine": 1},
    # As Decoupled DiLoCo: learners that wait for none, balanced fragments, radial means of what tokens weigh.
    "decoupled": {
        "sync_every_steps": 6,
        "fragments": "balanced",
        "fragment_count": 2,
        "overlap_steps": 1,
        "mean": "radial",
    },
    "streaming": {
        "sync_every_steps": 6,
        "fragments": "strided",
        "layers_per_fragment": 1,
        "overlap_steps": 1,
        "mixing": 0.5,
        "codec": "e3m0",
    },
}
#: In which replicas have parameters of their own, or train different ones.
APART: dict[str, dict[str, Any]] = {
    "noloco": NOLOCO,
    "noloco in two messages": NOLOCO | {"outer_pull": 0.4, "overlap_steps": 2},
    "partial": {"sync_every_steps": 4, "trainable": "slice", "slices": 2, "sliced": ("*.weight:0",)},
}
ALL = METHODS | APART


def most(method: str) -> int:
    """Return the number of replicas of a test: clipped messages need three, so four where one may leave."""
    return 4 if method == "clipped" else 3


class Net(nn.Sequential):
    """Two linear layers, equal wherever they are made. `trained`: what a replica trains of them."""

    def __init__(self, replica: int = 0, method: str = "diloco"):
        super().__init__(*(nn.Linear(8, 8) for _ in range(2)))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(0.3 * torch.randn(p.shape, generator=generator))
        self.trained = list(self.parameters())
        if (choices := ALL[method]).get("trainable") == "slice":
            self.trained = list(slice_parameters(self, replica, choices["sliced"], choices["slices"]).values())


def batch(slot: int, index: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * slot + index))


def train_step(net: Net, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    (net(x) - x.flip(1)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def replica(store: Notes) -> Iterator[Callable[..., tuple[Net, ElasticUpdates]]]:
    """Makes replicas, whose connections end with the test."""
    made: list[ElasticUpdates] = []

    def make(slot: int, method: str, **more: Any) -> tuple[Net, ElasticUpdates]:
        net, resume = more.pop("model", None) or Net(slot, method), more.pop("resume", None)
        notes = elastic_store(f"127.0.0.1:{store.port}")
        grid = (
            {"slots": most(method), "steps": STEPS, "quorum": most(method) - 1, "rules": PATIENT} | ALL[method] | more
        )
        sync = ElasticUpdates(net, notes, slot=slot, **grid)
        made.append(sync)
        if resume is not None:
            sync.load_state_dict(resume)
        sync.join()
        return net, sync

    yield make
    for one in made:
        one.close()


def trained(net: Net, sync: ElasticUpdates, *, until: int = STEPS, wait: threading.Event | None = None) -> list[int]:
    """Train to the end, or until a step; returns which batches were used. wait: for it, eight steps before the end."""
    optimizer, used = torch.optim.SGD(net.trained, lr=0.05), []
    while sync.is_training and sync.steps_done < until:
        if wait is not None and sync.steps_done == STEPS - 8:  # where no round is under way
            assert wait.wait(60)
        used.append(sync.tokens_read)
        train_step(net, optimizer, batch(sync.slot, sync.tokens_read))
        sync.step()
    if until == STEPS:
        sync.finish()
    return used


def plain(net: Net, method: str, world: World) -> list[Tensor]:
    """Train a replica, or a stage of one, among fixed ranks; returns its parameters and those last agreed."""
    sync = LocalUpdates(net, world, steps=STEPS, **ALL[method])
    optimizer = torch.optim.SGD(net.trained, lr=0.05)
    for index in range(STEPS):
        train_step(net, optimizer, batch(world.replica, index))
        sync.step()
    sync.finish()
    return [*net.parameters(), *(f.agreed for f in sync.fragments)]


@pytest.mark.parametrize("method", ALL)
def test_without_faults_it_is_local_updates_bit_for_bit(method: str, replica: Callable) -> None:
    slots = 4 if method in APART else most(method)

    def whole(slot: int) -> list[Tensor]:
        net, sync = replica(slot, method, slots=slots)
        assert trained(net, sync) == list(range(STEPS))
        return [*net.parameters(), *(f.agreed for f in sync.fragments)]

    elastic = in_threads(*(lambda slot=slot: whole(slot) for slot in range(slots)))
    for ours, theirs in zip(
        elastic,
        run_threads(lambda world: plain(Net(world.replica, method), method, world), replicas=slots),
        strict=True,
    ):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


def test_a_message_of_fewer_values_than_replicas_is_averaged_too(replica: Callable) -> None:
    """A mean that is reduced in shares leaves some replicas with an empty share, which travels all the same."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.zeros(2))

    def one(slot: int) -> Tensor:
        model, sync = replica(slot, "diloco", slots=4, model=Two())
        while sync.is_training:
            with torch.no_grad():
                model.x += slot
            sync.step()
        sync.finish()
        return model.x.detach()

    first, *others = in_threads(*(lambda slot=slot: one(slot) for slot in range(4)))
    assert first[0] != 0
    assert all(torch.equal(first, x) for x in others)


@pytest.mark.parametrize("method", ALL)
def test_without_faults_pipelines_are_local_updates_bit_for_bit(method: str, replica: Callable) -> None:
    """Each of two stages has parameters of its own; they send and apply after the same steps, as the first one says."""
    slots = 3 if method == "clipped" else 2

    def of_stage(net: Net, stage: int) -> Net:
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.1 * stage)
        return net

    def whole(slot: int, own: World) -> list[Tensor]:
        model = of_stage(Net(slot, method), own.stage)
        net, sync = replica(slot, method, slots=slots, quorum=slots if slots > 2 else 1, model=model, world=own)
        assert trained(net, sync) == list(range(STEPS))
        assert sync.rounds_done == len(sync.rounds)
        return [*net.parameters(), *(f.agreed for f in sync.fragments)]

    def fixed(world: World) -> list[Tensor]:
        return plain(of_stage(Net(world.replica, method), world.stage), method, world)

    def pipeline(slot: int) -> list[list[Tensor]]:
        return run_threads(lambda own: whole(slot, own), replicas=1, stages=2)

    elastic = in_threads(*(lambda slot=slot: pipeline(slot) for slot in range(slots)))
    ranks = run_threads(fixed, replicas=slots, stages=2)  # the replicas of the first stage, then those of the second
    for rank, theirs in enumerate(ranks):
        stage, slot = divmod(rank, slots)
        for a, b in zip(elastic[slot][stage], theirs, strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(ranks[0][-1], ranks[slots][-1])


def test_stages_that_would_take_turns_apart_are_refused(store: Notes, replica: Callable) -> None:
    def one(own: World) -> None:
        net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3 - own.stage)))
        replica(0, "streaming", model=net, world=own)

    with pytest.raises(ConfigError, match="after the same steps, but stage 1 has 2 fragments and the first 3"):
        run_threads(one, replicas=1, stages=2)
    assert store.read("elastic/settings/0") is None


@pytest.mark.fault(
    "one of three machines is ten times slower", "it is in every round, with fewer tokens, and nobody waits"
)
def test_a_slow_machine_takes_fewer_steps_and_is_in_every_round(replica: Callable) -> None:
    """Its turns come when the others have waited for half of the grace window, and then without that."""
    rules = Rules(timeout_s=10.0, grace_s=1.0)
    all_there = threading.Barrier(3)

    def one(slot: int) -> tuple[ElasticUpdates, list[int], float]:
        net, sync = replica(slot, "diloco", steps=400, sync_every_steps=40, rules=rules)
        optimizer, used = torch.optim.SGD(net.trained, lr=0.05), []
        all_there.wait(60)
        begin = time.monotonic()
        while sync.is_training:
            used.append(sync.tokens_read)
            time.sleep(0.05 if slot == 2 else 0.005)
            train_step(net, optimizer, batch(slot, sync.tokens_read))
            sync.step()
        took = time.monotonic() - begin
        sync.finish()
        return sync, used, took

    (first, _, took), (second, _, _), (slow, used, _) = in_threads(*(lambda slot=slot: one(slot) for slot in range(3)))
    assert [sync.missed for sync in (first, second, slow)] == [0, 0, 0]
    assert (first.pace, second.pace) == (1.0, 1.0)
    assert slow.pace < 0.5
    tokens = [r["tokens"] for r in first.told()]
    assert all(len(t) == 3 for t in tokens)
    assert all(t[:2] == (40, 40) and 1 <= t[2] < 30 for t in tokens)
    assert used == list(range(sum(t[2] for t in tokens)))
    assert took < 0.5 * 400 * 0.05
    for a, b in zip(first.fragments, slow.fragments, strict=True):
        assert torch.equal(a.agreed, b.agreed)


@pytest.mark.fault(
    "a replica of DiLoCo or Streaming leaves between two rounds, and another start of it comes back",
    "rounds go on without it; it begins from what the others have agreed",
)
@pytest.mark.parametrize("method", METHODS)
def test_one_that_leaves_is_done_without_and_another_start_of_it_comes_back(method: str, replica: Callable) -> None:
    heard: list[tuple[str, int, tuple[int, ...]]] = []
    gone, back, last = threading.Event(), threading.Event(), most(method) - 1

    def on_leave(slot: int, slots: tuple[int, ...]) -> None:
        heard.append(("left", slot, slots))
        gone.set()

    def stays(slot: int) -> tuple[Net, ElasticUpdates]:
        net, sync = replica(
            slot,
            method,
            on_leave=lambda r, slots: on_leave(slot, slots),
            on_join=lambda r, slots: heard.append(("joined", slot, slots)),
        )
        trained(net, sync, wait=back)
        return net, sync

    def leaves() -> tuple[Net, ElasticUpdates]:
        net, sync = replica(last, method)
        trained(net, sync, until=11)
        sync.close()
        assert gone.wait(60)
        other = Net()
        with torch.no_grad():
            other[0].weight.fill_(7.0)  # whatever it begins with
        net, sync = replica(last, method, model=other)
        back.set()
        assert 0 < sync.steps_done < STEPS
        trained(net, sync)
        return net, sync

    found = in_threads(*(lambda slot=slot: stays(slot) for slot in range(last)), leaves)
    rounds = found[0][1].elastic.roll.rounds
    slots = [r.slots for r in rounds]
    assert slots[0] == slots[-1] == (*range(last), last)
    assert (*range(last),) in slots
    assert {event[0] for event in heard} == {"left", "joined"}
    assert {event[2] for event in heard} == {(last,)}
    for _, sync in found:
        for mine, theirs in zip(sync.fragments, found[0][1].fragments, strict=True):
            assert torch.equal(mine.agreed, theirs.agreed)


@pytest.mark.fault(
    "a round goes on without a replica that stands still", "it comes to where the others are, without another start"
)
@pytest.mark.parametrize("offload", [False, True])
def test_one_that_has_missed_a_round_comes_to_where_the_others_are(offload: bool, replica: Callable) -> None:
    back = threading.Event()

    def one(slot: int) -> ElasticUpdates:
        net, sync = replica(slot, "diloco", offload_outer=offload)
        trained(net, sync, until=6)

        def one_was_missing() -> bool:
            return any(len(r.slots) == 2 for r in sync.elastic.roll.rounds)

        if slot == 2:
            while not one_was_missing():
                sync.elastic.read()
                time.sleep(0.02)
            while not sync.missed:  # and from then on it is awaited again
                trained(net, sync, until=sync.steps_done + 1)
            back.set()
        else:
            while not one_was_missing():
                trained(net, sync, until=sync.steps_done + 1)
            assert back.wait(60)  # before another round could go on without it
        trained(net, sync)
        return sync

    found = in_threads(*(lambda slot=slot: one(slot) for slot in range(3)))
    assert [sync.missed for sync in found] == [0, 0, 1]
    for sync in found:
        assert sync.elastic.roll.rounds[-1].slots == (0, 1, 2)
        assert torch.equal(sync.fragments[0].agreed, found[0].fragments[0].agreed)


@pytest.mark.fault("a replica misses a round as it finishes", "it takes the inner steps that are left, then finishes")
def test_one_that_misses_a_round_as_it_finishes_trains_on(replica: Callable) -> None:
    net, sync = replica(0, "decoupled", slots=1, quorum=1, overlap_steps=2)
    trained(net, sync, until=23)
    meet, catch_up, donor = sync.elastic.meet, sync.elastic.catch_up, sync._serve(0)[1]

    def caught_up() -> tuple[int, int]:
        sync._load(donor)
        return catch_up()

    sync.elastic.meet, sync.elastic.catch_up = lambda *args: None, caught_up
    trained(net, sync, until=24)  # where a message is sent that is due after the last step, and nobody hears it
    optimizer = torch.optim.SGD(net.trained, lr=0.05)
    train_step(net, optimizer, batch(0, sync.tokens_read))
    sync.step()
    assert not sync.is_training
    sync.finish()
    assert (sync.missed, sync.steps_done, sync.tokens_read) == (1, 21, 21)
    sync.elastic.meet, sync.elastic.catch_up = meet, catch_up
    assert trained(net, sync) == [21, 22, 23, 24]
    assert not sync.is_training
    told = [(r["step"], r["tokens"]) for r in sync.told()]
    assert told[-3:] == [(24, (3,)), (25, (1,)), (25, (0,))]


@pytest.mark.parametrize("peers", [{"peers": "all"}, {"peers": "group", "group_size": 6}])
def test_a_robust_mean_needs_owners_whoever_is_there(peers: dict[str, Any], store: Notes) -> None:
    """A round needs 6 of 12 slots that train 2 slices, and all of these 6 may be owners of one and the same slice."""
    notes, robust = elastic_store(f"127.0.0.1:{store.port}"), {"mean": "median"} | peers | {"outer": "heavy_ball"}
    grid = {"slots": 12, "steps": STEPS, "quorum": 6, "rules": PATIENT} | ALL["partial"] | robust
    with pytest.raises(ConfigError, match="method.mean = median needs 3 members or more"):
        ElasticUpdates(Net(0, "partial"), notes, slot=0, **grid)


class Halves(nn.Module):
    """Two parameters of one size, each a fragment of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(64))


OF_HALVES = {"sync_every_steps": 4, "fragments": "balanced", "fragment_count": 2}


def test_a_fragment_weighs_as_what_it_was_trained_on_since_its_own_turn(replica: Callable) -> None:
    """Where one slot moves by 1 on 10 tokens in each step, and the other stays on 30, a mean moves by 1/4 per step."""
    plain_sum = {"outer": "heavy_ball", "outer_lr": 1.0, "outer_momentum": 0.0}

    def one(slot: int) -> tuple[list[float], ElasticUpdates]:
        model, sync = replica(slot, "diloco", slots=2, quorum=2, steps=9, model=Halves(), **OF_HALVES | plain_sum)
        while sync.is_training:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 1.0 - slot
            sync.step((10, 30)[slot])
        sync.finish()
        return [float(p.detach()[0]) for p in model.parameters()], sync

    for values, sync in in_threads(*(lambda slot=slot: one(slot) for slot in range(2))):
        assert values == pytest.approx([9 / 4, 9 / 4])
        rounds = sync.told()
        assert [r["tokens"] for r in rounds[-2:]] == [(10, 30), (0, 0)]  # of which the last two are of both fragments
        assert [sum(r["tokens"][slot] for r in rounds) for slot in range(2)] == [90, 270]


def test_a_residual_is_kept_unless_an_earlier_start_has_said_it_since(replica: Callable) -> None:
    """A slot that comes back from a checkpoint drops what it kept of fragments that have met since, and no other."""
    sparse = {"codec": "topk", "codec_keep": 0.1, "error_feedback": 0.9}
    model, sync = replica(0, "diloco", slots=1, quorum=1, model=Halves(), **OF_HALVES | sparse)
    generator = torch.Generator().manual_seed(0)

    def move(steps: int) -> None:
        for _ in range(steps):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += torch.randn(64, generator=generator)
            sync.step()

    def residuals() -> list[float]:
        own = sync._own()
        return [float(own[f"{index}/{RESIDUAL}"].norm()) for index in range(2)]

    move(8)
    kept, met = sync.state_dict(), len(sync.told())
    before = residuals()
    assert all(before)
    move(2)
    (since,) = sync.told()[met:]
    donor = sync._serve(0)[1]
    sync.load_state_dict(kept)
    sync._load(donor)
    assert residuals() == [0.0 if index == since["fragment"] else norm for index, norm in enumerate(before)]


@pytest.mark.parametrize("offload", [False, True])
def test_a_message_that_nobody_has_heard_is_not_said(offload: bool, replica: Callable) -> None:
    """With error feedback what a message loses is kept, and taken back where its round went on without it."""
    net, sync = replica(0, "sparse", slots=1, quorum=1, offload_outer=offload)
    trained(net, sync, until=6)
    (fragment,) = sync.fragments
    before = fragment.outer_state()[RESIDUAL].clone()
    assert before.abs().max() > 0
    meet, sync.elastic.meet = sync.elastic.meet, lambda *args: None
    trained(net, sync, until=8)  # where a round is met, for nothing
    sync.elastic.meet = meet
    assert sync.missed == 1
    assert torch.equal(fragment.outer_state()[RESIDUAL], before)
    trained(net, sync)
    assert not torch.equal(fragment.outer_state()[RESIDUAL], before)


def test_a_checkpoint_holds_the_residual_of_its_version(replica: Callable) -> None:
    """Taken while a message is under way, it is as before that message, which its version does not contain."""
    net, sync = replica(0, "sparse", slots=1, quorum=1, overlap_steps=2)
    trained(net, sync, until=7)
    kept = sync.fragments[0].outer_state()[RESIDUAL].clone()
    gate = threading.Event()
    meet = sync.elastic.meet
    sync.elastic.meet = lambda *args: (gate.wait(30), meet(*args))[1]
    trained(net, sync, until=8)  # its message is made, and waits
    assert not torch.equal(sync.fragments[0].outer_state()[RESIDUAL], kept)
    state = sync.state_dict()
    assert int(state["version"]) == sync.rounds[-1].id
    assert torch.equal(state[f"0/{RESIDUAL}"], kept)
    gate.set()
    sync._under_way[1].result()  # it is met, and not applied yet: then others have heard the message
    state, said = sync.state_dict(), sync.fragments[0].outer_state()[RESIDUAL].clone()
    assert int(state["version"]) > sync.rounds[-1].id
    assert not torch.equal(said, kept)
    assert torch.equal(state[f"0/{RESIDUAL}"], said)
    trained(net, sync)


@pytest.mark.fault(
    "one pair of NoLoCo takes longer to exchange than others may be silent", "the other pair waits for it"
)
def test_a_slow_pair_is_waited_for(replica: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = Rules(timeout_s=10.0, grace_s=8.0, silence_s=0.5)
    send = Frame.send

    def slowly(frame: Frame, to: socket.socket, told: Callable) -> None:
        """The second round's values of one slot come in small parts, over longer than silence may last."""
        if frame.kind == "values" and frame.source.startswith("3.") and frame.key[0] == 1:
            to.sendall(frame.header)
            for at in range(0, len(frame.payload), len(frame.payload) // 8 + 1):
                time.sleep(0.2)
                to.sendall(frame.payload[at : at + len(frame.payload) // 8 + 1])
            return
        send(frame, to, told)

    monkeypatch.setattr(Frame, "send", slowly)

    def one(slot: int) -> ElasticUpdates:
        net, sync = replica(slot, "noloco", slots=4, rules=rules)
        trained(net, sync)
        return sync

    found = in_threads(*(lambda slot=slot: one(slot) for slot in range(4)))
    assert all(r.slots == (0, 1, 2, 3) and r.attempt == 1 for r in found[0].elastic.roll.rounds)


@pytest.mark.fault("all replicas end at once", "they go on from their checkpoints' latest round")
@pytest.mark.parametrize("method", METHODS)
def test_all_leave_at_once_and_go_on_from_what_they_have_kept(method: str, replica: Callable) -> None:
    kept: dict[int, dict[str, Tensor]] = {}

    def before(slot: int) -> None:
        net, sync = replica(slot, method, quorum=3)  # so that those who are back first wait for the others
        trained(net, sync, until=13 + slot)  # one may have sent for the next round
        kept[slot] = sync.state_dict()
        sync.close()

    def after(slot: int) -> tuple[list[int], ElasticUpdates]:
        net, sync = replica(slot, method, quorum=3, resume=kept[slot])
        return trained(net, sync), sync

    in_threads(*(lambda slot=slot: before(slot) for slot in range(3)))
    found = in_threads(*(lambda slot=slot: after(slot) for slot in range(3)))
    roll = found[0][1].elastic.roll
    assert len(roll.rounds) == len(found[0][1]._turns)
    for used, sync in found:
        assert used[0] == 12  # from the last round, in the data too
        assert roll.tokens(sync.slot) == STEPS
        for mine, theirs in zip(sync.fragments, found[0][1].fragments, strict=True):
            assert torch.equal(mine.agreed, theirs.agreed)


@pytest.mark.fault("NoLoCo's partner is gone", "partners are drawn among those who are there")
@pytest.mark.parametrize("method", APART)
def test_a_group_does_without_one_that_is_gone_and_another_start_of_it_begins_as_one_of_the_others(
    method: str, replica: Callable
) -> None:
    gone, back = threading.Event(), threading.Event()
    had: dict[int, list[Tensor]] = {}  # of each round, what replicas had agreed after it
    begins: list[tuple[int, Tensor]] = []  # the round that the newcomer came to, and with what

    def keep(sync: ElasticUpdates) -> None:
        had.setdefault(sync.rounds[-1].id, []).append(sync.fragments[0].agreed.clone())

    def stays(slot: int) -> ElasticUpdates:
        net, sync = replica(slot, method, slots=4, on_leave=lambda r, slots: gone.set())
        tell = sync._tell
        sync._tell = lambda committed: (keep(sync), tell(committed))
        trained(net, sync, wait=back)
        return sync

    def leaves() -> ElasticUpdates:
        net, sync = replica(3, method, slots=4)
        trained(net, sync, until=11)
        sync.close()
        assert gone.wait(60)
        net, sync = replica(3, method, slots=4)
        begins.append((sync.elastic.member.version, sync.fragments[0].agreed.clone()))
        back.set()
        trained(net, sync)
        return sync

    found = in_threads(*(lambda slot=slot: stays(slot) for slot in range(3)), leaves)
    ((version, agreed_there),) = begins
    assert any(torch.equal(agreed_there, agreed) for agreed in had[version])
    slots = [tuple(sorted(r.slots)) for r in found[0].elastic.roll.rounds]
    assert slots[0] == slots[-1] == (0, 1, 2, 3)
    assert (0, 1, 2) in slots
    agreed = [sync.fragments[0].agreed for sync in found]
    assert all(torch.equal(one, agreed[0]) for one in agreed) == found[0].one_model
    assert all(torch.isfinite(one).all() for one in agreed)


@pytest.mark.fault(
    "a newcomer asks one whose training stands still",
    "it has the round agreed last, which the donor has not applied yet",
)
def test_a_donor_whose_training_stands_still_gives_what_is_agreed_and_not_applied_yet(
    store: Notes, replica: Callable
) -> None:
    """Two have met and not come to the step at which they apply it: whoever joins meanwhile has it of them, at once."""
    rules = Rules(timeout_s=2.0, grace_s=0.5)
    met, back, billed = threading.Semaphore(0), threading.Event(), []
    log = SharedLog(elastic_store(f"127.0.0.1:{store.port}"))

    def stays(slot: int) -> ElasticUpdates:
        net, sync = replica(slot, "streaming", rules=rules)
        trained(net, sync, until=6)  # where a round is sent that is applied a step later
        met.release()
        assert back.wait(60)
        billed.append(sync.elastic.ledger.total("replica", "state"))
        trained(net, sync)
        return sync

    def comes_late() -> ElasticUpdates:
        for _ in range(2):
            assert met.acquire(timeout=60)
        roll = Roll(3, 2)
        while not roll.rounds:
            if (entry := log.read(roll.length)) is not None:
                roll.take(entry)
        net, sync = replica(2, "streaming", rules=rules)
        assert sync.steps_done == 6
        back.set()
        trained(net, sync)
        return sync

    in_threads(lambda: stays(0), lambda: stays(1), comes_late)
    state = 2 * 4 * sum(p.numel() for p in Net().parameters())  # parameters and momentum
    assert sum(billed) > state  # and a header
    index = 0
    while (entry := log.read(index)) is not None:
        assert not isinstance(entry, Lost)
        index += 1


@pytest.mark.fault(
    "elastic replicas with other settings or other initial weights",
    "refused, by the name of what differs",
)
def test_replicas_that_were_started_differently_are_refused(replica: Callable) -> None:
    other = Net()
    with torch.no_grad():
        other[0].weight[0, 0] += 1

    begun = threading.Event()

    def first() -> None:
        net, sync = replica(0, "diloco")
        begun.set()
        trained(net, sync)

    def second() -> None:
        begun.wait()
        with pytest.raises(ConfigError, match="started differently: method.sync_every_steps is 4 there and 5 here"):
            replica(1, "diloco", sync_every_steps=5)
        with pytest.raises(ConfigError, match="started differently: quorum is 2 there and 1 here"):
            replica(1, "diloco", quorum=1)
        with pytest.raises(ConfigError, match="started differently: initial weights is"):
            replica(1, "diloco", model=other)
        trained(*replica(1, "diloco"))

    def third() -> None:
        begun.wait()
        trained(*replica(2, "diloco"))

    in_threads(first, second, third)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainable": "next_fragment"}, "elastic replicas do not freeze fragments"),
        ({"record_cosine": True}, "method.record_cosine asks for what other replicas have"),
        (
            {"trainable": "slice", "sliced": ("*.weight:0",), "outer": "average", "codec": "fp32", "outer_lr": 1.0}
            | {"outer_momentum": 0.0, "overlap_steps": 0, "mixing": 0.0},
            "elastic replicas that train slices send outer gradients: not method.outer = average",
        ),
        ({"overlap_steps": 3}, "method.overlap_steps = 3 is no less than the 3 steps between two turns"),
        ({"slot": 3}, "slot 3 and a quorum of 2 do not go with 3 slots"),
        ({"quorum": 0}, "slot 0 and a quorum of 0 do not go with 3 slots"),
        ({"quorum": 4}, "slot 0 and a quorum of 4 do not go with 3 slots"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict, message: str, store: Notes, replica: Callable) -> None:
    with pytest.raises(ConfigError, match=message):
        replica(settings.pop("slot", 0), "streaming", **settings)
    assert store.read("elastic/settings/0") is None  # nobody else is held to it


@pytest.mark.fault("no quorum comes together", "the replica ends after `alone_s` and says why")
def test_one_that_is_left_alone_gives_up_with_a_word(replica: Callable, caplog: pytest.LogCaptureFixture) -> None:
    rules = Rules(timeout_s=0.5, grace_s=0.2, alone_s=1.0)

    def goes() -> None:
        net, sync = replica(1, "diloco", rules=rules)
        trained(net, sync, until=5)
        sync.close()

    def stays() -> None:
        net, sync = replica(0, "diloco", rules=rules)
        with pytest.raises(CommError, match="has waited for 1 s in round 1: 1 of the 2 replicas .* are ready"):
            trained(net, sync)

    in_threads(goes, stays)
    (told,) = [record.getMessage() for record in caplog.records if "has waited" in record.getMessage()]
    assert "has waited for 0.5 s in round 1: 1 of the 2 replicas that a round needs are ready; it gives up" in told
    with pytest.raises(ConfigError, match="rules.grace_s = 0 must be above 0 and finite"):
        Rules(grace_s=0)


@pytest.mark.fault("the store of the membership is gone", "the replica ends and says so")
def test_one_whose_store_is_gone_gives_up_with_a_word() -> None:
    words = [sys.executable, "-m", "lowcomm", "store", "0"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=clean_environment())
    port = re.search(r"on port (\d+)", child.stdout.readline()).group(1)
    notes = elastic_store(f"127.0.0.1:{port}", timeout_s=1.0)
    net, rules = Net(), Rules(timeout_s=0.5, grace_s=0.2, alone_s=1.0)
    sync = ElasticUpdates(net, notes, slot=0, slots=1, steps=STEPS, sync_every_steps=4, rules=rules)
    sync.join()
    trained(net, sync, until=6)
    child.kill()
    child.wait()
    child.stdout.close()
    with pytest.raises(CommError, match="has waited for 1 s for the store of the replicas' membership to answer"):
        trained(net, sync)
    sync.close()


def test_what_is_no_store_is_named() -> None:
    for address in ("head", "head:", "head:x", "head:70000"):
        with pytest.raises(ConfigError, match=f"{address!r} is no address of a store: HOST:PORT is wanted"):
            elastic_store(address)
    with pytest.raises(CommError, match="no store of elastic replicas at 127.0.0.1:1: .*lowcomm store 1 starts one"):
        elastic_store("127.0.0.1:1", timeout_s=0.5)


def test_a_store_may_have_an_ipv6_address() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine knows no IPv6")
    notes = elastic_store("[::1]:0", hosts=True)
    other = elastic_store(f"[::1]:{notes.port}")
    sync = ElasticUpdates(Net(), other, slot=0, slots=1, steps=4, sync_every_steps=4)
    assert sync.elastic.messenger.address[0] == "::1"
    sync.join()
    sync.close()


@pytest.mark.fault("an address (--host) that the machine does not have", "refused by that address")
def test_an_address_of_another_machine_is_refused(store: Notes) -> None:
    for host in ("203.0.113.7", "no.such.name.invalid", "0.0.0.0", "::"):
        with pytest.raises(ConfigError, match=f"host = {host} is no address of this machine that others could reach"):
            ElasticUpdates(Net(), store, slot=0, slots=1, steps=4, sync_every_steps=4, host=host)


@pytest.mark.fault("`lowcomm store` at a port that is in use", "one line with the port and the reason")
def test_a_port_in_use_is_named(store: Notes, capsys: pytest.CaptureFixture) -> None:
    assert main(["store", str(store.port)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"no store of elastic replicas can be kept on port {store.port}: ")
    assert said.count("\n") == 1


def test_the_command_keeps_a_store() -> None:
    words = [sys.executable, "-m", "lowcomm", "store", "0"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=clean_environment())
    try:
        said = child.stdout.readline()
        port = re.search(r"on port (\d+)", said).group(1)
        one, other = (elastic_store(f"127.0.0.1:{port}") for _ in range(2))
        assert one.write_once("who", "one") == "one"
        assert other.write_once("who", "other") == "one"
    finally:
        child.terminate()
    assert child.wait(30) == 0
    child.stdout.close()


STEP_THAT_FAILS = """
import sys

from torch import nn

import lowcomm

store, model = lowcomm.elastic_store("127.0.0.1:0", hosts=True), nn.Linear(2, 1)
sync = lowcomm.ElasticUpdates(model, store, slot=0, slots=2, steps=100, quorum=1, sync_every_steps=5)
sync.join()
sync.step()
raise RuntimeError("the data is gone")
"""


def test_a_process_whose_step_fails_ends() -> None:
    words = [sys.executable, "-c", STEP_THAT_FAILS]
    done = subprocess.run(words, env=clean_environment(), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "RuntimeError: the data is gone" in done.stderr


def test_a_donor_gives_only_the_fragments_that_have_changed(replica: Callable) -> None:
    """A newcomer that is a round late is so again and again if it is given everything each time."""
    net, sync = replica(0, "streaming", slots=1, quorum=1)
    trained(net, sync)
    turns = [row["fragment"] for row in sync.told()]
    ids = [done.id for done in sync.elastic.roll.rounds]
    count = len(sync.plan.fragments)
    assert count > 1
    assert len(turns) > 1

    def fragments(has: int) -> set[int]:
        version, raw = sync._serve(ids[-1], has)
        assert version == ids[-1]
        return {int(name.partition("/")[0]) for name in safetensors.torch.load(raw) if "/" in name}

    assert fragments(0) == set(range(count))
    assert fragments(ids[-1]) == set()
    assert fragments(ids[-2]) == {turns[-1]}
    sync.close()
