"""Choices find their values by themselves: each value, of whatever choice, is a file."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lowcomm.choices import Choice, check_settings, choose, options
from lowcomm.codecs import Codec
from lowcomm.methods.bases import Basis
from lowcomm.methods.boundary import Boundary
from lowcomm.methods.config import MethodConfig
from lowcomm.methods.engine import Engine
from lowcomm.methods.means import Mean
from lowcomm.methods.outer import OuterOptimizer
from lowcomm.methods.peers import Peers
from lowcomm.settings import ConfigError
from pipelines.project import ROOT
from tests.harness import clean_environment

#: What somebody writes who adds one of each: the file, and all that stands in it.
TOYS = {
    "lowcomm/codecs/two_bits.py": '''
"""Multiples -1, 0 and 1 of a block's largest magnitude, in two bits."""

import torch

from lowcomm.codecs.bits import BLOCK, blocks, blocks_nbytes, pack, refuse_non_finite, unpack
from lowcomm.codecs.codec import Codec


class TwoBits(Codec):
    names = ("two_bits",)
    name = "two_bits"
    block = BLOCK

    def encode(self, x, seed=0):
        refuse_non_finite(x, x.abs())
        packed = torch.empty(self.nbytes(x.numel()), dtype=torch.uint8)
        for values, scale, codes in blocks(x, packed, 2, torch.float32):
            scale.copy_(values.abs().amax(1))
            step = scale.where(scale > 0, 1.0)[:, None]
            pack(((values / step).round() + 1).to(torch.uint8), codes, 2)
        return packed

    def decode(self, packed, numel):
        x = torch.empty(numel)
        for values, scale, codes in blocks(x, packed.clone(), 2, torch.float32):
            values.copy_((unpack(codes, values.shape[1], 2).float() - 1) * scale[:, None])
        return x

    def nbytes(self, numel):
        return blocks_nbytes(numel, 2, torch.float32)
''',
    "lowcomm/methods/outer_sign.py": '''
"""agreed <- agreed - lr sign(delta)."""

from lowcomm.methods.outer import OuterOptimizer


class OuterSign(OuterOptimizer):
    names = ("toy_sign",)

    def __init__(self, lr):
        self.lr = lr

    @classmethod
    def of(cls, method):
        return cls(method.outer_lr)

    def buffers(self, agreed):
        return {}

    def step(self, agreed, delta, buffers, peers=None):
        agreed.add_(delta.sign_(), alpha=-self.lr)
''',
    "lowcomm/methods/neighbours.py": '''
"""Replicas 2 k and 2 k + 1 meet, and at the next turn 2 k - 1 and 2 k."""

from lowcomm.methods.peers import Peers


class Neighbours(Peers):
    names = ("neighbours",)

    @classmethod
    def of(cls, method, seed):
        return cls()

    def members(self, turn, replicas, replica):
        shift = turn[1] % 2
        first = (replica - shift) // 2 * 2 + shift
        return sorted(r % replicas for r in (first, first + 1))

    def most(self, replicas):
        return 2
''',
    "lowcomm/methods/halves.py": '''
"""The first half of the stream's columns; the others arrive as zeros."""

import torch

from lowcomm.methods.boundary import Boundary


class Halves(Boundary):
    names = ("halves",)

    def numel(self, tokens):
        return tokens * self.width // 2

    def values(self, x_TD, ids_T):
        return x_TD[:, : self.width // 2].flatten()

    def rebuilt(self, values, ids_T, tokens):
        x = torch.zeros(tokens, self.width)
        x[:, : self.width // 2] = values.view(tokens, -1)
        return x
''',
    "lowcomm/methods/largest.py": '''
"""At each place the value that is furthest from zero."""

import torch

from lowcomm.methods.means import Mean


class Largest(Mean):
    names = ("largest",)

    def over(self, parts, weights):
        found = None
        for part in parts:
            found = part if found is None else torch.where(part.abs() > found.abs(), part, found)
        return found
''',
    "lowcomm/methods/backwards.py": '''
"""The last value first."""

from lowcomm.methods.bases import Basis


class Backwards(Basis):
    names = ("backwards",)

    def into(self, flat, shapes):
        return flat.flip(0)

    def back(self, flat, shapes):
        return flat.flip(0)
''',
    "lowcomm/methods/toy_signs.py": '''
"""Plain steps of the learning rate along the sign of each gradient."""

import torch

from lowcomm.methods.inner import InnerOptimizer


class Signs(InnerOptimizer):
    names = ("toy_signs",)
    moments = 0

    @classmethod
    def of(cls, trained, t, mean_dims=None):
        return Steps(trained.values(), {"lr": t.lr})


class Steps(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad.sign())
''',
    "lowcomm/methods/every_other.py": '''
"""Gradients are averaged in every other step; in the steps between them each replica keeps its own."""

from lowcomm.methods.engine import Engine


class EveryOther(Engine):
    names = ("every_other",)
    one_model = False
    local = True

    def __init__(self, model, world):
        self.named, self.world, self.steps = dict(model.named_parameters()), world, 0

    @classmethod
    def of(cls, model, world, method, **known):
        return cls(model, world)

    def average_gradients(self):
        self.steps += 1
        if self.steps % 2 == 0:
            for p in self.named.values():
                p.grad = self.world.mean(p.grad.flatten(), purpose="gradients").view(p.shape)

    def weights(self):
        return self.named
''',
}

USE = """
import torch
from torch import nn

import lowcomm
from lowcomm.choices import choose
from lowcomm.cost.footprint import stage_memory
from lowcomm.experiment.inner import inner_optimizer, set_learning_rate
from lowcomm.experiment.project import Project
from lowcomm.methods.boundary import make_boundary
from lowcomm.methods.engine import Engine
from pathlib import Path

project = Project(Path("."))
config = project.run_config(
    "protocol_dense",
    scale="smoke",
    stages=2,
    method={"exchange": "parameters", "sync_every_steps": 5, "peers": "neighbours", "outer": "toy_sign",
            "outer_lr": 0.01, "codec": "two_bits", "basis": "backwards", "mean": "largest",
            "boundary": {"kind": "halves"}},
    replicas=4,
    train={"global_batch": 16, "eval_sequences": 16, "optimizer": "toy_signs"},
)
weight = nn.Parameter(torch.ones(2))
weight.grad = torch.tensor([3.0, -0.5])
optimizer = inner_optimizer({"weight": weight}, config.train)
set_learning_rate(optimizer, config.train.steps // 2, config.train)
optimizer.step()
assert weight[0] < 1 < weight[1] and weight.sum() == 2
assert stage_memory(config, 0).optimizer == 0
boundary = make_boundary(config.method.boundary, config.model)
assert boundary.activation_bytes(10) == 10 * config.model.dim // 2 * 4


def work(world):
    model = nn.Linear(20, 20)
    sync = lowcomm.LocalUpdates(model, world, config.method)
    assert (type(sync.plan.mean).__name__, type(sync.plan.basis).__name__) == ("Largest", "Backwards")
    for _ in range(11):
        with torch.no_grad():
            model.weight.add_(0.1 * (world.replica + 1))
        sync.step()
    sync.finish()
    sent = world.ledger.total(purpose="outer")
    assert sent == sync.sent_bytes(11)["outer"] > 0, (sent, sync.sent_bytes(11))
    return sent


def averaged(world):
    model, found = nn.Linear(3, 1, bias=False), []
    engine = choose(Engine, other.method.exchange, "method.exchange").of(model, world, other.method)
    for _ in range(4):
        model.weight.grad = torch.full((1, 3), float(world.replica))
        engine.average_gradients()
        found.append(model.weight.grad.mean().item())
        engine.step()
    engine.finish()
    assert world.ledger.total(purpose="gradients") > 0
    return found


print(lowcomm.run_threads(work, replicas=4))
other = project.run_config("data_parallel", scale="smoke", method={"exchange": "every_other"}, replicas=2)
assert lowcomm.run_threads(averaged, replicas=2) == [[0.0, 0.5, 0.0, 0.5], [1.0, 0.5, 1.0, 0.5]]
"""


def test_one_file_adds_a_value_of_any_choice(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "lowcomm", tmp_path / "lowcomm", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "params.yaml", tmp_path)
    for name, source in TOYS.items():
        assert not (tmp_path / name).exists()
        (tmp_path / name).write_text(source)
    environment = clean_environment(PYTHONPATH=str(tmp_path))
    words = [sys.executable, "-c", USE]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("base", [Codec, Engine, OuterOptimizer, Peers, Boundary, Basis, Mean])
def test_every_value_of_a_choice_has_a_docstring_and_a_name_of_its_own(base: type[Choice]) -> None:
    found = options(base)
    assert found
    for name, value in found.items():
        assert value.__doc__, name


def test_an_unknown_value_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="method.outer = 'nesterow' is not a valid choice; did you mean 'nesterov'"):
        choose(OuterOptimizer, "nesterow", "method.outer")


def test_a_setting_of_another_value_is_refused() -> None:
    method, default = MethodConfig("parameters", outer_pull=0.5), MethodConfig("parameters")
    with pytest.raises(ConfigError, match="method.outer_pull means nothing with method.outer = average"):
        check_settings(OuterOptimizer, "average", "method.outer", method, default)


OF_A_SCRIPT = """
import torch
from torch import nn

import lowcomm
from lowcomm.codecs import Codec, make_codec

try:
    make_codec("rounded")
except lowcomm.ConfigError as error:
    assert "'rounded' is not a valid choice" in str(error)
for factor in (1.0, 2.0):  # as a notebook's cell that is run twice

    class Rounded(Codec):
        names = ("rounded",)
        scale = factor

        def encode(self, x, seed=0):
            return (x / self.scale).round().to(torch.uint8)

        def decode(self, packed, numel):
            return packed.float() * self.scale

        def nbytes(self, numel):
            return numel

    codec = make_codec("rounded")
    assert (codec.name, codec.scale, codec.block) == ("rounded", factor, 0)


def work(world):
    parameters = {"x": nn.Parameter(torch.arange(6.0))}
    sync = lowcomm.DiLoCo(parameters, world, codec="rounded", sync_every_steps=1, outer_lr=1.0, outer_momentum=0.0)
    with torch.no_grad():
        parameters["x"].sub_(4.0)
    sync.step()
    assert world.ledger.total(purpose="outer") == sync.sent_bytes(1)["outer"] > 0
    return parameters["x"].tolist()


first, second = lowcomm.run_threads(work, replicas=2)
assert first == second == [x - 4.0 for x in range(6)]
"""


def test_a_codec_of_a_script_is_known_from_where_it_is_defined(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OF_A_SCRIPT]  # in a process of its own: a class stays a choice
    subprocess.run(command, cwd=tmp_path, env=clean_environment(), check=True, timeout=120)


def test_two_values_of_one_name_are_refused() -> None:
    class Base(Choice):
        pass

    class One(Base):
        names = ("one",)

    class Other(Base):
        names = ("one",)

    Base.__module__ = "lowcomm.codecs.codec"  # so that it has a package
    with pytest.raises(ValueError, match=r"Other and .*One are both named 'one'"):
        options(Base)
