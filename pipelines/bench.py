"""Measure the speed of training, exchanges and codecs as ratios, side by side in one run.

    python -m pipelines.bench
    python -m pipelines.bench --small     a few steps of small models, only to check that all of it runs

1. The trainer's tokens/s over those of a bare PyTorch loop with the same model, batch and optimizer.
2. The engine's share of a step without exchange.
3. The seconds of an fp32 outer exchange over those of torch.distributed's all-reduce of the same tensor, like for
   like: `World.sum` over the bare all-reduce, `World.mean` over the all-reduce and a division. Each verb of the library
   costs up to a millisecond before its first byte: for the headers by which ranks find out that they disagree, and for
   the way to the thread that lets computing go on. This shows at 4 MB between processes of one machine, which take
   4 ms, so this size has a bound of its own; over the links that this library is for, 4 MB take seconds.
4. The encoding and decoding of E3M0, on the GPU or on one core: its speed as a share of that of a memory copy of the
   fp32 values, and the seconds of a plain PyTorch expression of the same over its own.
5. The seconds of a training step in which 1/4 of the MLPs and heads are trained over those of a full one, at a width
   where computing is all there is; beside it the ratio of their FLOPs.
6. What keeping to a subspace of a hundredth of the stream's dimensions takes, in shares of a training step (Protocol
   Models' "about 1 %"): compression at all boundaries, projection of gradients, watching those at the last
   compressed layer, an update every 500 steps; and the seconds of AdamW with one second moment per row over those of
   torch's fused one.
7. The seconds of a round of DiLoCo, inner steps and exchange, among replicas that may leave (`ElasticUpdates`) over
   those of one among fixed ranks (`LocalUpdates`); the parameters of both are equal bit for bit.

In 1 the two alternate in blocks inside one process, in 3 call by call inside the same ranks, in 4 call by call, in 5
and 6 step by step, in 7 round by round, so that a machine whose speed drifts slows both. Medians are quoted, with the
quartiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lowcomm.codecs import make_codec
from lowcomm.codecs.bits import BLOCK as CODEC_BLOCK
from lowcomm.codecs.small_float import SmallFloat
from lowcomm.comm.membership import Rules
from lowcomm.comm.processes import elastic_store
from lowcomm.comm.start import default_device, run_threads, world_from_torchrun
from lowcomm.comm.world import World
from lowcomm.experiment.batches import TokenData
from lowcomm.experiment.config import TrainConfig
from lowcomm.experiment.data import prepare
from lowcomm.experiment.inner import inner_optimizer
from lowcomm.experiment.train import train_in_threads
from lowcomm.experiment.trainer import Trainer
from lowcomm.methods.boundary import make_boundary
from lowcomm.methods.config import BoundaryConfig
from lowcomm.methods.elastic import ElasticUpdates
from lowcomm.methods.local_updates import LocalUpdates
from lowcomm.methods.partial import pieces, train_slice
from lowcomm.methods.subspace import Subspace
from lowcomm.model.accounting import parameter_shapes, training_flops
from lowcomm.model.config import ModelConfig
from lowcomm.model.decoder import Decoder
from pipelines.launch import torchrun_command
from pipelines.project import ROOT, corpus_configs, prepared, run_config
from pipelines.timing import in_turns, seconds

#: What item 5 cuts into slices, and the number of slices, of which it trains one.
SLICED, SLICES = ("mlp", "heads"), 4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much each benchmark measures; items are those of the module's docstring.

    Attributes:
        scale: the scale of params.yaml at which items 1, 2 and 7 run.
        block, blocks: the steps of a block, and the number of blocks, in which trainer and bare loop alternate. In
            item 7 a round has `block` steps, and there are twice as many rounds as `blocks`.
        codec_values: how many fp32 values item 4 encodes and decodes on the CPU, and how many on a GPU.
        codec_calls: how often item 4 does so.
        wide: the model of item 5, wide enough that products of matrices are all that takes time, and of a small
            vocabulary, so that layers count.
        pairs: how many pairs of steps, one sliced and one full, item 5 times.
        thin: the model of item 6, as wide as a laptop allows.
        steps: how many steps item 6 times.
        payloads: pairs of the number of fp32 values in an exchange of item 3 and the number of calls, of which the
            first two warm up.
        ranks: the numbers of ranks among which item 3 exchanges; item 7 runs where there are two.
    """

    scale: str
    block: int
    blocks: int
    codec_values: tuple[int, int]
    codec_calls: int
    wide: ModelConfig
    pairs: int
    thin: ModelConfig
    steps: int
    payloads: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]


FULL = Sizes(
    scale="laptop",
    block=50,
    blocks=12,
    codec_values=(2**22, 2**27),
    codec_calls=20,
    wide=ModelConfig(dim=768, layers=4, heads=12, ffn_dim=3072, vocab_size=2048, seq_len=512, mlp="relu"),
    pairs=12,
    thin=ModelConfig(dim=1024, layers=4, heads=16, ffn_dim=2816, vocab_size=2048, seq_len=512),
    steps=8,
    payloads=((1_000_000, 100), (16_000_000, 30)),  # 4 MB and 64 MB
    ranks=(2, 4),
)
SMALL = Sizes(
    scale="smoke",
    block=4,
    blocks=5,
    codec_values=(2**18, 2**18),
    codec_calls=3,
    wide=ModelConfig(dim=64, layers=2, heads=4, ffn_dim=256, vocab_size=64, seq_len=64, mlp="relu"),
    pairs=3,
    thin=ModelConfig(dim=64, layers=2, heads=4, ffn_dim=176, vocab_size=64, seq_len=64),
    steps=3,
    payloads=((10_000, 5),),
    ranks=(2,),
)


def quartiles(values: list[float]) -> str:
    """Return the median and the quartiles of two values or more as text: "1.002 (0.995 to 1.010)"."""
    low, mid, high = statistics.quantiles(values, n=4)
    return f"{mid:.3f} ({low:.3f} to {high:.3f})"


def trainer_and_engine(sizes: Sizes) -> tuple[list[float], list[float]]:
    """Return the trainer's speed over the bare loop's, block by block, and the engine's share of time, step by step."""
    with tempfile.TemporaryDirectory() as out:
        return _trainer_and_engine(sizes, Path(out))


def _corpus(corpus: str, sizes: Sizes, out: Path) -> Path:
    """Return the folder of the prepared corpus: the project's own, or at small sizes one that is made in `out`."""
    if sizes is FULL:
        return prepared(corpus, sizes.scale)
    source, data = corpus_configs(corpus, scale=sizes.scale)
    prepare(source, data, out / "data", ROOT)
    return out / "data"


def _trainer_and_engine(sizes: Sizes, out: Path) -> tuple[list[float], list[float]]:
    steps = sizes.block * sizes.blocks
    config = run_config(
        "diloco_m2",
        scale=sizes.scale,
        replicas=1,
        train={"steps": steps, "eval_every": 0},
        method={"sync_every_steps": steps},  # one exchange, after the last step: none is timed
    )
    folder = _corpus(config.data.corpus, sizes, out)
    t = config.train
    data = TokenData(folder, seq_len=t.seq_len, global_batch=t.global_batch, seed=0)
    model = Decoder(config.model).initialise(0)
    optimizer = inner_optimizer(dict(model.named_parameters()), t)
    parameters = list(model.parameters())

    def bare_block() -> float:
        begin = time.perf_counter()
        for step in range(1, sizes.block + 1):
            tokens = data.batch(step)
            loss, entropy = model.losses(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, t.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            entropy.item()
        return time.perf_counter() - begin

    ratios: list[float] = []
    shares: list[float] = []
    mark = [time.perf_counter()]

    def on_row(trainer: Trainer, row: dict) -> None:
        if row["step"] == 1:
            _time_engine(trainer, shares)
        if row["step"] % sizes.block == 0:
            ours = time.perf_counter() - mark[0]
            ratios.append(bare_block() / ours)
            mark[0] = time.perf_counter()

    train_in_threads(config, folder, out / "run", on_row=on_row)
    return ratios[1:-1], shares[1:-1]  # the first block warms up, the last holds the exchange


def _time_engine(trainer: Trainer, shares: list[float]) -> None:
    """Wrap a trainer's step and its engine's calls, so that each step adds the engine's share of it to `shares`."""
    engine, spent = trainer.engine, [0.0]

    def timed(call):
        def wrapper(*args):
            begin = time.perf_counter()
            result = call(*args)
            spent[0] += time.perf_counter() - begin
            return result

        return wrapper

    engine.average_gradients = timed(engine.average_gradients)
    engine.step = timed(engine.step)
    step = trainer.step

    def timed_step(number: int) -> dict:
        spent[0], begin = 0.0, time.perf_counter()
        row = step(number)
        shares.append(spent[0] / (time.perf_counter() - begin))
        return row

    trainer.step = timed_step


def sliced_step(sizes: Sizes) -> tuple[list[float], float]:
    """Return the seconds of a sliced step over those of a full one, pair by pair, and the ratio of their FLOPs."""
    device, wide = default_device(), sizes.wide
    tokens = torch.randint(0, wide.vocab_size, (2, wide.seq_len + 1), device=device)
    steps = []
    for sliced in ((), SLICED):
        model = Decoder(wide).initialise(0).to(device)
        trained = train_slice(model, pieces(parameter_shapes(wide), sliced, SLICES, wide.layers), 0)
        optimizer = torch.optim.AdamW(trained.values(), fused=True)

        def step(model: Decoder = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            model.losses(tokens[:, :-1], tokens[:, 1:])[0].backward()
            optimizer.step()
            optimizer.zero_grad()

        steps.append(step)
    ratios = [part / full for full, part in in_turns(steps, sizes.pairs, device)]
    flops = training_flops(wide, 2, wide.seq_len, sliced=SLICED, slices=SLICES)
    return ratios, flops / training_flops(wide, 2, wide.seq_len)


#: The boundaries of item 6: a subspace of 10 dimensions.
SUBSPACE = BoundaryConfig("subspace", 10, update_every_steps=500, update_lr=1.0)


def subspace_shares(sizes: Sizes) -> dict[str, list[float]]:
    """Return the share of a training step that each part of item 6, and "all" of them, takes, step by step, by name.

    "adamw" has the seconds of AdamW with one second moment per row over those of the plain one.
    """
    device, thin = default_device(), sizes.thin
    model = Decoder(thin, SUBSPACE.constraint(stages=1)).initialise(0).to(device)
    trained, found = dict(model.named_parameters()), {}

    def work(world: World) -> None:
        subspace = Subspace(model, SUBSPACE, world, trained, (2, thin.seq_len))
        boundary = make_boundary(SUBSPACE, thin, model)
        train = TrainConfig(1, 2, thin.seq_len, 1e-4, 0, 0, 1)
        rows = inner_optimizer(trained, train, subspace.mean_dims())
        plain = inner_optimizer(trained, train)
        tokens = torch.randint(0, thin.vocab_size, (2, thin.seq_len + 1), device=device)
        ids, x = tokens[:, :-1], torch.randn(2, thin.seq_len, thin.dim, device=device)

        def there_and_back() -> None:
            for _ in range(thin.layers - 1):
                boundary.read_activations(boundary.activations(x, ids), ids.shape)
                boundary.read_gradients(boundary.gradients(x), ids.shape)

        for number in range(1, sizes.steps + 3):
            step = seconds(lambda: model.losses(ids, tokens[:, 1:])[0].backward(), device)
            parts = {
                "watching": seconds(subspace.watch, device),
                "projection": seconds(subspace.project_gradients, device),
                "compression": seconds(there_and_back, device),
            }
            times = {name: seconds(optimizer.step, device) for name, optimizer in (("plain", plain), ("rows", rows))}
            move = seconds(lambda: subspace.update(500, rows, lambda change: None), device)
            parts["update, every 500 steps"] = move / 500
            step += times["rows"] + sum(parts.values())
            for p in trained.values():
                p.grad = None
            if number > 2:
                for name, value in (parts | {"all": sum(parts.values())}).items():
                    found.setdefault(name, []).append(value / step)
                found.setdefault("adamw", []).append(times["rows"] / times["plain"])

    run_threads(work, replicas=1)
    return found


def exchange_ranks(sizes: Sizes, world: World) -> None:
    """Time exchanges under torchrun (item 3); rank 0 prints a JSON line with the ratios for each payload and verb."""

    def raw(x: torch.Tensor, verb: str) -> None:
        dist.all_reduce(x)
        if verb == "mean":
            x.div_(world.size)

    for numel, calls in sizes.payloads:
        x, y = torch.randn(numel), torch.randn(numel)
        for verb, ours in {"sum": world.sum, "mean": world.mean}.items():
            ratios = []
            for call in range(calls):
                spent = {}
                for what in ("ours", "theirs") if call % 2 else ("theirs", "ours"):
                    world.barrier()
                    begin = time.perf_counter()
                    if what == "ours":
                        ours(x, purpose="bench")
                    else:
                        raw(y, verb)
                    world.barrier()
                    spent[what] = time.perf_counter() - begin
                if call >= 2:
                    ratios.append(spent["ours"] / spent["theirs"])
                x.normal_(), y.normal_()  # else the sums grow without end
            if world.rank == 0:
                found = {"verb": verb, "ranks": world.size, "megabytes": 4 * numel / 1e6, "ratios": ratios}
                print(json.dumps(found), flush=True)


def elastic_rounds(sizes: Sizes, world: World) -> None:
    """Time rounds under torchrun (item 7); rank 0 prints a JSON line of the ratios and whether parameters are equal."""
    config, rounds = run_config("diloco_m2", scale=sizes.scale), 2 * sizes.blocks
    hosted = elastic_store("127.0.0.1:0", hosts=True) if world.rank == 0 else None
    port = world.tell(hosted.port if hosted else 0)[0]
    fixed, other = (Decoder(config.model).initialise(0) for _ in range(2))
    known = {"steps": sizes.block * rounds, "sync_every_steps": sizes.block}
    elastic = ElasticUpdates(
        other, elastic_store(f"127.0.0.1:{port}"), slot=world.rank, slots=world.size, rules=Rules(grace_s=30), **known
    )
    elastic.join()
    both = {"fixed": (fixed, LocalUpdates(fixed, world, **known)), "elastic": (other, elastic)}
    optimizers = {name: inner_optimizer(dict(m.named_parameters()), config.train) for name, (m, _) in both.items()}
    draw = torch.Generator().manual_seed(world.rank)
    ratios = []
    for number in range(rounds):
        shape = (sizes.block, config.local_batch, config.model.seq_len + 1)
        batches = torch.randint(0, config.model.vocab_size, shape, generator=draw)
        spent = {}
        for name in ("fixed", "elastic") if number % 2 else ("elastic", "fixed"):
            (model, sync), optimizer = both[name], optimizers[name]
            world.barrier()
            begin = time.perf_counter()
            for tokens in batches:
                model.losses(tokens[:, :-1], tokens[:, 1:])[0].backward()
                optimizer.step()
                optimizer.zero_grad()
                sync.step(tokens.numel())
            world.barrier()
            spent[name] = time.perf_counter() - begin
        if number:
            ratios.append(spent["elastic"] / spent["fixed"])
    for _, sync in both.values():
        sync.finish()
    equal = all(torch.equal(a, b) for a, b in zip(fixed.parameters(), other.parameters(), strict=True))
    world.barrier()
    elastic.close()
    if world.rank == 0:
        print(json.dumps({"elastic": ratios, "equal": equal}), flush=True)
    world.barrier()


def _plain_encode(x: torch.Tensor, codec: SmallFloat) -> torch.Tensor:
    """Return what `SmallFloat.encode` returns for whole blocks of 4-bit codes, by a plain PyTorch expression."""
    blocks = x.view(-1, CODEC_BLOCK)
    exponent = torch.floor(torch.log2(blocks.abs().amax(1, keepdim=True) / 1.5)) + 1  # 1.5 rounds up to 2
    magnitudes = codec.values[: codec.values.numel() // 2].to(x.device)
    code = torch.bucketize(blocks.abs() / 2**exponent, (magnitudes[1:] + magnitudes[:-1]) / 2, right=True)
    code = (code + 8 * torch.signbit(blocks)).to(torch.uint8)
    packed = code[:, ::2] | code[:, 1::2] << 4
    return torch.cat([(exponent[:, 0] + 127).to(torch.uint8), packed.view(-1)])


def _plain_decode(packed: torch.Tensor, numel: int, codec: SmallFloat) -> torch.Tensor:
    blocks = numel // CODEC_BLOCK
    bytes_ = packed[blocks:].view(blocks, -1)
    code = torch.stack([bytes_ & 15, bytes_ >> 4], dim=2).view(blocks, -1)
    return (codec.values.to(packed.device)[code.long()] * 2.0 ** (packed[:blocks].float() - 127)[:, None]).view(-1)


def codec_speed(sizes: Sizes) -> dict[str, tuple[list[float], list[float]]]:
    """Return, for "encode" and for "decode", the two ratios of item 4, call by call.

    They are the speed as a share of a memory copy's, and the seconds of plain PyTorch over ours.
    """
    device = default_device()
    numel = sizes.codec_values[device.type != "cpu"]
    codec = make_codec("e3m0")
    x, there = torch.randn(numel, device=device), torch.empty(numel, device=device)
    packed = codec.encode(x)
    assert torch.equal(_plain_encode(x, codec), packed)
    assert torch.equal(_plain_decode(packed, numel, codec), codec.decode(packed, numel))
    pairs = {
        "encode": (lambda: codec.encode(x), lambda: _plain_encode(x, codec)),
        "decode": (lambda: codec.decode(packed, numel), lambda: _plain_decode(packed, numel, codec)),
    }

    found = {}
    for name, (ours, plain) in pairs.items():
        turns = in_turns([ours, lambda: there.copy_(x), plain], sizes.codec_calls, device)
        found[name] = [copy / own for own, copy, _ in turns], [other / own for own, _, other in turns]
    return found


def main(argv: list[str] | None = None) -> int:
    """Run all benchmarks, print a table of them and return 0; see `--help`.

    Under torchrun, run this rank's part of items 3 and 7 alone. argv: the command line, by default the process's own.
    """
    parser = argparse.ArgumentParser(prog="python -m pipelines.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="a few steps of small models, whose ratios say nothing")
    sizes = SMALL if parser.parse_args(argv).small else FULL
    if "RANK" in os.environ:
        world = world_from_torchrun(replicas=int(os.environ["WORLD_SIZE"]))
        exchange_ranks(sizes, world)
        if world.size == 2:  # with a core each
            elastic_rounds(sizes, world)
        world.close()
        return 0
    torch.set_num_threads(1)
    ratios, shares = trainer_and_engine(sizes)
    print("| benchmark | ratio: median (quartiles) | asked for |\n|---|---|---|")
    print(f"| trainer tokens/s over a bare loop's | {quartiles(ratios)} | at least 0.97 |")
    print(f"| engine's share of a step without exchange, % | {quartiles([100 * s for s in shares])} | at most 0.5 |")
    for name, (share, faster) in codec_speed(sizes).items():
        print(f"| E3M0 {name} over a memory copy of the fp32 values, speed | {quartiles(share)} | at least 0.25 |")
        print(f"| plain PyTorch's seconds over ours, E3M0 {name} | {quartiles(faster)} | at least 3 |")
    ratios, flops = sliced_step(sizes)
    print(
        f"| seconds of a step with 1/4 MLP + 1/4 heads over a full one's | {quartiles(ratios)} | FLOPs: {flops:.3f} |"
    )
    shares = subspace_shares(sizes)
    ratios = shares.pop("adamw")
    for name, values in shares.items():
        print(f"| subspace, % of a step: {name} | {quartiles([100 * v for v in values])} | about 1 in all |")
    print(f"| seconds of AdamW with a second moment a row over the fused one's | {quartiles(ratios)} | - |")
    for ranks in sizes.ranks:
        command = torchrun_command(ranks, "pipelines.bench", *(["--small"] if sizes is SMALL else []))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        for line in done.stdout.splitlines():
            found = json.loads(line)
            if "elastic" in found:
                said = "equal bit for bit" if found["equal"] else "NOT EQUAL"
                what = f"seconds of a round among replicas that may leave over a fixed one's, parameters {said}"
                print(f"| {what} | {quartiles(found['elastic'])} | at most 1.02 |")
                continue
            raw = "all-reduce" if found["verb"] == "sum" else "all-reduce and division"
            what = f"fp32 {found['verb']} of {found['megabytes']:g} MB over {raw}, {ranks} ranks"
            print(f"| {what} | {quartiles(found['ratios'])} | at most {1.1 if found['megabytes'] > 50 else 1.3} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
