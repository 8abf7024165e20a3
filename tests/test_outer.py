"""The engine: identities first, then bytes. Runs are 12 steps on a real corpus."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lowcomm.codecs import Codec, make_codec
from lowcomm.comm.shares import encoded_mean_bytes, encoded_mean_in_shares
from lowcomm.comm.start import run_threads
from lowcomm.comm.world import World
from lowcomm.experiment.batches import TokenData
from lowcomm.experiment.config import RunConfig
from lowcomm.experiment.inner import inner_optimizer, learning_rate
from lowcomm.experiment.run_folder import read_metrics
from lowcomm.experiment.train import train, train_in_threads
from lowcomm.experiment.trainer import Trainer
from lowcomm.methods.config import MethodConfig
from lowcomm.methods.local_updates import LocalUpdates, pairwise_cosine
from lowcomm.methods.outer import HeavyBall, Nesterov
from lowcomm.methods.outer_state import flatten
from lowcomm.methods.peers import Peers
from lowcomm.model.decoder import Decoder
from tests.conftest import command_line, small_run
from tests.harness import train_in_processes

STREAMING = {"fragments": "strided", "layers_per_fragment": 1, "sync_every_steps": 5}
AVERAGE = {"outer": "average", "outer_lr": 1.0, "outer_momentum": 0.0}


def losses_of(out: Path, rank: int = 0) -> list[float]:
    return [r["loss"] for r in read_metrics(out / "metrics" / f"rank-{rank:03d}.jsonl")]


def weights_of(out: Path) -> torch.Tensor:
    return flatten(list(load_file(out / "model.safetensors").values()))


def plain_training(config: RunConfig, corpus: Path) -> tuple[list[float], torch.Tensor]:
    """The whole global batch in one bare PyTorch loop, nothing of the engine in it."""
    t = config.train
    data = TokenData(corpus, seq_len=t.seq_len, global_batch=t.global_batch, seed=config.seed)
    model = Decoder(config.model).initialise(config.seed)
    optimizer = inner_optimizer(dict(model.named_parameters()), t)
    losses = []
    for step in range(1, t.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, t)
        tokens = data.batch(step)
        loss, entropy = model.losses(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for g in grads:
            g.mul_((t.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(entropy.item())
    return losses, flatten([dict(model.named_parameters())[n] for n in sorted(dict(model.named_parameters()))])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_one_replica_averaging_is_plain_training_bit_for_bit(corpus: Path, tmp_path: Path) -> None:
    config = small_run("diloco_m2", replicas=1, method=AVERAGE | {"sync_every_steps": 4})
    train_in_threads(config, corpus, tmp_path)
    losses, weights = plain_training(config, corpus)
    assert losses_of(tmp_path) == losses
    assert torch.equal(weights_of(tmp_path), weights)


def test_one_replica_data_parallel_is_plain_training_bit_for_bit(corpus: Path, tmp_path: Path) -> None:
    config = small_run("data_parallel", replicas=1)
    train_in_threads(config, corpus, tmp_path)
    losses, weights = plain_training(config, corpus)
    assert losses_of(tmp_path) == losses
    assert torch.equal(weights_of(tmp_path), weights)


@pytest.mark.parametrize("replicas", [2, 4])
def test_data_parallel_is_plain_training_on_the_whole_batch(replicas: int, corpus: Path, tmp_path: Path) -> None:
    config = small_run("data_parallel", replicas=replicas, train={"eps": 1e-3})
    train_in_threads(config, corpus, tmp_path)
    _, weights = plain_training(config, corpus)
    # A mean of means rounds differently from one mean; eps keeps Adam from blowing the last bits up.
    assert torch.allclose(weights_of(tmp_path), weights, rtol=0, atol=2e-5)


def test_sgd_inside_averaged_at_every_step_is_data_parallel(corpus: Path, tmp_path: Path) -> None:
    sgd = {"optimizer": "sgd", "lr": 0.1, "clip_norm": 0.0}
    local = small_run("diloco_m2", method=AVERAGE | {"sync_every_steps": 1}, train=sgd)
    train_in_threads(local, corpus, tmp_path / "local")
    train_in_threads(small_run("data_parallel", train=sgd), corpus, tmp_path / "dp")
    # mean(theta - lr g_m) and theta - lr mean(g_m) round differently, once a step.
    assert torch.allclose(weights_of(tmp_path / "local"), weights_of(tmp_path / "dp"), rtol=0, atol=1e-6)


def test_lr_one_without_momentum_is_averaging(corpus: Path, tmp_path: Path) -> None:
    train_in_threads(small_run("diloco_m2", method=AVERAGE), corpus, tmp_path / "average")
    sgd = {"outer": "heavy_ball", "outer_lr": 1.0, "outer_momentum": 0.0}
    train_in_threads(small_run("diloco_m2", method=sgd), corpus, tmp_path / "sgd")
    # phi - mean(phi - theta) and mean(theta) round differently, once a round.
    assert torch.allclose(weights_of(tmp_path / "average"), weights_of(tmp_path / "sgd"), rtol=0, atol=2e-3)
    assert losses_of(tmp_path / "average")[:4] == losses_of(tmp_path / "sgd")[:4]


@pytest.mark.parametrize("nesterov", [True, False])
def test_outer_momentum_is_torch_sgd_bit_for_bit(nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    phi = torch.randn(100, generator=generator)
    theirs = phi.clone().requires_grad_()
    reference = torch.optim.SGD([theirs], lr=0.4, momentum=0.9, nesterov=nesterov)
    ours = (Nesterov if nesterov else HeavyBall)(0.4, 0.9)
    buffers = ours.buffers(phi)
    for _ in range(5):
        delta = torch.randn(100, generator=generator)
        theirs.grad = delta.clone()
        reference.step()
        ours.step(phi, delta, buffers)
    assert torch.equal(phi, theirs.detach())


def test_one_outer_step_by_hand() -> None:
    """Two replicas, one parameter, two rounds; sign and momentum worked out on paper.

    Round 1: phi 1, theta 0.8 and 0.4, Delta = mean(0.2, 0.6) = 0.4. Buffer 0.4; Nesterov step
    0.5 (0.4 + 0.9 * 0.4) = 0.38, phi = 0.62. Round 2: theta 0.52 and 0.32, Delta = mean(0.1, 0.3) = 0.2.
    Buffer 0.9 * 0.4 + 0.2 = 0.56; step 0.5 (0.2 + 0.9 * 0.56) = 0.352, phi = 0.268.
    """
    rounds = (((0.8, 0.4), 0.62), ((0.52, 0.32), 0.268))

    def work(world: World) -> list[tuple[float, float]]:
        theta, found = torch.tensor([1.0], requires_grad=True), []
        engine = LocalUpdates({"theta": theta}, world, outer_lr=0.5, outer_momentum=0.9, sync_every_steps=1)
        for thetas, _ in rounds:
            with torch.no_grad():
                theta.fill_(thetas[world.replica])  # what inner steps make of it
            engine.step()
            found.append((engine.fragments[0].agreed.item(), theta.item()))
        return found

    for found in run_threads(work, replicas=2):
        for (phi, theta), (_, expected) in zip(found, rounds, strict=True):
            assert phi == pytest.approx(expected, abs=1e-6)
            assert theta == phi


def test_replicas_are_equal_after_every_exchange_and_differ_between(corpus: Path, tmp_path: Path) -> None:
    config = small_run("diloco_m2")
    copies: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def keep(trainer: Trainer, row: dict) -> None:
        copies[trainer.world.replica].append(flatten(list(trainer.model.parameters())))

    train_in_threads(config, corpus, tmp_path, on_row=keep)
    for step, (a, b) in enumerate(zip(copies[0], copies[1], strict=True), start=1):
        assert torch.equal(a, b) == (step % 4 == 0)


def test_evaluation_sees_the_outer_parameters_and_puts_the_inner_back(corpus: Path, tmp_path: Path) -> None:
    config = small_run("diloco_m2")
    seen: list[tuple[bool, bool]] = []

    def look(trainer: Trainer, row: dict) -> None:
        before = flatten(list(trainer.model.parameters()))
        with trainer.engine.evaluated("agreed"):
            inside = flatten(list(trainer.model.parameters()))
        after = flatten(list(trainer.model.parameters()))
        seen.append((torch.equal(inside, trainer.engine.state_dict()["0/agreed"]), torch.equal(before, after)))

    train_in_threads(config, corpus, tmp_path, on_row=look)
    assert set(seen) == {(True, True)}


@pytest.mark.parametrize("block", [1, 0])  # in shares at three ranks, or gathered
def test_a_codec_that_loses_nothing_is_no_codec(block: int) -> None:
    pretend_lossy = copy.copy(make_codec("fp32"))
    pretend_lossy.lossless, pretend_lossy.block = False, block

    def averaged(world: World, codec: Codec) -> torch.Tensor:
        x = torch.randn(1001, generator=torch.Generator().manual_seed(world.rank)).requires_grad_()
        engine = LocalUpdates({"x": x}, world, MethodConfig("parameters"), broadcast=False)
        engine.plan.codec = codec
        assert engine.plan.is_plain == codec.lossless
        engine.step()
        return x.detach()

    def work(world: World) -> tuple[torch.Tensor, torch.Tensor]:
        return averaged(world, pretend_lossy), averaged(world, make_codec("fp32"))

    for gathered, reduced in run_threads(work, replicas=3):
        assert torch.equal(gathered, reduced)


class _PairsThenAll(Peers):
    """Neighbours in pairs, and at every second turn everyone."""

    @classmethod
    def of(cls, method: MethodConfig, seed: int) -> Peers:
        return cls()

    def members(self, turn: tuple[int, int], replicas: int, replica: int) -> list[int]:
        return list(range(replicas)) if turn[1] % 2 else [replica // 2 * 2, replica // 2 * 2 + 1]

    def most(self, replicas: int) -> int:
        return replicas


def test_groups_may_be_larger_at_some_turns_than_at_others() -> None:
    """Whoever is in the group of a turn is averaged over, and nobody else; in as many bytes as the plan says."""

    def work(world: World) -> tuple[list[float], int, int]:
        theta, found = torch.tensor([float(world.replica)] * 3).requires_grad_(), []
        engine = LocalUpdates({"theta": theta}, world, MethodConfig("parameters"), broadcast=False)
        engine.plan.peers = _PairsThenAll()
        for _ in range(2):
            engine.step()
            found.append(theta[0].item())
        return found, world.ledger.total(axis="replica"), engine.sent_bytes(2)["outer"]

    for replica, (found, sent, planned) in enumerate(run_threads(work, replicas=4)):
        assert found == [[0.5, 0.5, 2.5, 2.5][replica], 1.5]
        assert sent == planned


@pytest.mark.parametrize("name", ["e3m0", "e4m3", "int8", "bf16"])
@pytest.mark.parametrize("replicas", [2, 3, 12])
@pytest.mark.parametrize("numel", [1, 255, 20 * 256 + 77])  # of which few blocks leave some shares empty
def test_an_encoded_mean_is_the_mean_of_what_each_encoded(name: str, replicas: int, numel: int) -> None:
    """Gathered or in shares, the sum is in rank order, and bytes are the closed form."""
    codec = make_codec(name)

    def value(rank: int) -> torch.Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(rank))

    def work(world: World) -> tuple[torch.Tensor, int]:
        mean = world.encoded_mean_async(value(world.rank), codec, purpose="x").wait()
        return mean, world.ledger.total(axis="replica")

    expected = codec.decode(codec.encode(value(0)), numel)
    for rank in range(1, replicas):
        expected += codec.decode(codec.encode(value(rank)), numel)
    for rank, (mean, nbytes) in enumerate(run_threads(work, replicas=replicas)):
        assert torch.equal(mean, expected / replicas)
        assert nbytes == encoded_mean_bytes(numel, codec, replicas, rank)


def test_shares_are_taken_where_they_send_less() -> None:
    for name, fewest in (("e3m0", 9), ("int8", 5), ("bf16", 4)):  # R > 1 + 4 / b at b bytes a value
        assert [encoded_mean_in_shares(10**6, make_codec(name), r) for r in (fewest - 1, fewest)] == [False, True]
    assert not encoded_mean_in_shares(10**6, make_codec("topk", 0.1), 1000)


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize(
    ("run", "method"),
    [
        ("data_parallel", {}),
        ("diloco_m2", {}),
        ("diloco_m2", {"sync_every_steps": 5}),  # the last round is shorter
        ("diloco_m2", {"codec": "bf16"}),
        ("diloco_m2", {"codec": "e3m0"}),
        ("diloco_m2", {"codec": "topk", "codec_keep": 0.1}),
        ("diloco_m2", {"codec": "dare", "codec_keep": 0.1}),
        ("diloco_m2", STREAMING),
        ("diloco_m2", STREAMING | {"codec": "e3m0", "overlap_steps": [2], "close_last_round": False}),
        ("diloco_m2", AVERAGE),
    ],
)
def test_bytes_sent_are_the_closed_form(run: str, method: dict, replicas: int, corpus: Path, tmp_path: Path) -> None:
    config = small_run(run, replicas=replicas, method=method)
    for summary in run_threads(lambda w: train(config, w, corpus, tmp_path), replicas=replicas):
        ((purpose, expected),) = summary["sent_bytes_closed_form"].items()
        assert summary["sent_bytes"].get(purpose, 0) == expected
        assert (expected == 0) == (replicas == 1)


def test_outer_state_on_the_cpu_changes_nothing(corpus: Path, tmp_path: Path) -> None:
    train_in_threads(small_run("diloco_m2"), corpus, tmp_path / "device")
    train_in_threads(small_run("diloco_m2", method={"offload_outer": True}), corpus, tmp_path / "cpu")
    assert torch.equal(weights_of(tmp_path / "device"), weights_of(tmp_path / "cpu"))


def test_accumulated_micro_batches_are_one_batch(corpus: Path, tmp_path: Path) -> None:
    sgd = {"optimizer": "sgd", "lr": 0.1}
    train_in_threads(small_run("data_parallel", train=sgd), corpus, tmp_path / "one")
    train_in_threads(small_run("data_parallel", train=sgd | {"accumulation": 2}), corpus, tmp_path / "two")
    # Two halves summed round differently from the whole.
    assert torch.allclose(weights_of(tmp_path / "one"), weights_of(tmp_path / "two"), rtol=0, atol=1e-5)


def test_cosine_of_outer_gradients_is_logged_and_billed_apart(corpus: Path, tmp_path: Path) -> None:
    config = small_run("diloco_m2", method={"record_cosine": True})
    summary = train_in_threads(config, corpus, tmp_path / "on")
    rows = [r for r in read_metrics(tmp_path / "on" / "metrics" / "rank-000.jsonl") if "cosine" in r]
    assert [r["step"] for r in rows] == [4, 8, 12]
    assert all(-1 <= r["cosine"] <= 1 for r in rows)
    assert summary["sent_bytes"]["replica/analysis"] == 3 * 4 * summary["parameters"]
    train_in_threads(small_run("diloco_m2"), corpus, tmp_path / "off")
    assert torch.equal(weights_of(tmp_path / "on"), weights_of(tmp_path / "off"))
    assert pairwise_cosine([torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])]) == pytest.approx(0.5**0.5)


def test_a_link_changes_the_clock_and_never_a_loss(corpus: Path, tmp_path: Path) -> None:
    """80 Mbit/s in real and in virtual time.

    A step sends 2 MB in 0.2 s, in two messages that take 2 s more each, and computes for milliseconds: threads that
    wake from a real wait compute more slowly for a while, on a busy machine several times so, and virtual time knows
    nothing of that.
    """
    model, short = {"dim": 128, "ffn_dim": 512}, {"steps": 2, "seq_len": 16, "global_batch": 2}
    link = {"link_mbit_per_s": 80, "link_latency_ms": 2000}
    runs = {"none": {}, "real": link, "virtual": link | {"clock": "virtual"}}
    seconds: dict[str, float] = {}

    def run(name: str, folder: Path) -> None:
        def timed(trainer: Trainer, row: dict) -> None:
            if row["step"] == short["steps"] and trainer.world.rank == 0:
                seconds[name] = min(trainer.world.clock.elapsed(), seconds.get(name, float("inf")))

        config = small_run("data_parallel", model=model, train=short, comm=runs[name])
        train_in_threads(config, corpus, folder / name, on_row=timed)

    for name in runs:
        run(name, tmp_path)
    assert losses_of(tmp_path / "none") == losses_of(tmp_path / "real") == losses_of(tmp_path / "virtual")
    assert torch.equal(weights_of(tmp_path / "none"), weights_of(tmp_path / "real"))
    for again in range(3):  # other work on the machine only adds time: of several runs the least counts
        if seconds["virtual"] != pytest.approx(seconds["real"], rel=0.05):
            run("real", tmp_path / str(again))
            run("virtual", tmp_path / str(again))
    assert seconds["virtual"] == pytest.approx(seconds["real"], rel=0.05)
    assert seconds["real"] > 3 * seconds["none"]


def test_a_link_leaves_the_losses_of_processes(corpus: Path, tmp_path: Path) -> None:
    config = small_run("diloco_m2")
    train_in_threads(config, corpus, tmp_path / "none")
    for clock in ("real", "virtual"):
        linked = small_run("diloco_m2", comm={"link_mbit_per_s": 80, "link_latency_ms": 20, "clock": clock})
        done = train_in_processes(2, *command_line(linked, corpus, tmp_path / clock))
        assert done.returncode == 0, done.stderr
        assert losses_of(tmp_path / clock) == losses_of(tmp_path / "none")
        assert losses_of(tmp_path / clock, rank=1) == losses_of(tmp_path / "none", rank=1)
