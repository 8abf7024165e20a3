"""Every pair of values of two choices that go together is trained, and resumes bit for bit; other pairs are refused."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import itertools
import math
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from lowcomm.choices import options
from lowcomm.codecs import Codec
from lowcomm.experiment.config import RunConfig
from lowcomm.experiment.train import train_in_threads
from lowcomm.experiment.trainer import Trainer
from lowcomm.methods.config import MethodConfig
from lowcomm.settings import ConfigError, build
from pipelines.ladder import frontier
from pipelines.ladder.plan import LADDER
from tests.conftest import small_run

SLICED = {"trainable": "slice", "slices": 2}
SUBSPACE = {"kind": "subspace", "rank": 4, "update_every_steps": 3, "update_lr": 1.0}
#: Of each kind of codec one or two; `test_codecs` has all.
CODECS = ("fp32", "int8", "e3m0", "topk", "dropout", "dare", "chunk_topk", "chunk_topk_2bit", "levels")
#: The choices of a method, and a value of each kind.
CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    "trainable": {
        "all": {},
        "mlp": SLICED | {"sliced": ["mlp"]},
        "mlp_heads": SLICED | {"sliced": ["mlp", "heads"]},
        "heads_out": SLICED | {"sliced": ["heads", "out"]},
        "layers": SLICED | {"sliced": ["layers"]},
        "detached": SLICED | {"sliced": ["mlp"], "input_gradients": "own_and_random"},
        "next_fragment": {"trainable": "next_fragment"},
    },
    "fragments": {
        "whole": {},
        "sequential": {"fragments": "sequential", "layers_per_fragment": 1},
        "strided": {"fragments": "strided", "layers_per_fragment": 1},
        "slices": {"fragments": "slices"},
        "balanced": {"fragments": "balanced", "fragment_count": 2},
    },
    "schedule": {
        "at_once": {},
        "overlapped": {"overlap_steps": [2], "close_last_round": False},
        "mixed": {"overlap_steps": [2], "mixing": 0.5},
        "tau_each": {"overlap_steps": [0, 1, 2, 2], "mixing": 0.5},
    },
    "peers": {"everyone": {}, "pairs": {"peers": "group", "group_size": 2}},
    "codec": {name: {"codec": name} | ({"codec_keep": 0.5} if options(Codec)[name].sparse else {}) for name in CODECS},
    "feedback": {"without": {}, "with": {"error_feedback": 0.9}},
    "basis": {name: {"basis": name} for name in ("values", "tiles", "cosines")},
    "mean": {
        "ordinary": {},
        "senders": {"mean": "senders"},
        "median": {"mean": "median"},
        "trimmed": {"mean": "trimmed", "mean_trim": 0.25},
        "clipped": {"mean": "clipped"},
        "radial": {"mean": "radial"},
    },
    "liar": {"none": {}, "one": {"byzantine": 1}},
    "points": {
        "none": {},
        "rate": {"outer_lr_shape": ["0@0", "1@0.5", "0.5@1"]},
        "momentum": {"outer_momentum_points": ["0@0", "0.9@0.5"]},
    },
    "outer": {
        "nesterov": {},
        "average": {"outer": "average", "outer_lr": 1.0, "outer_momentum": 0.0},
        "heavy_ball": {"outer": "heavy_ball"},
        "noloco": {"outer": "noloco", "outer_momentum": 0.5, "outer_pull": 0.7},
        "sign": {"outer": "sign", "outer_lr": 0.001, "outer_momentum": 0.0},
        "gasloc": {"outer": "gasloc"},
    },
    "boundary": {
        "dense": {},
        "subspace": {"boundary": SUBSPACE},
        "reparametrised": {"boundary": SUBSPACE | {"mode": "reparametrised"}},
        "quantised_subspace": {"boundary": SUBSPACE | {"codec": "int8", "error_feedback": True}},
        "low_rank": {"boundary": {"kind": "low_rank", "rank": 4, "error_feedback": True}},
        "projection": {"boundary": {"kind": "projection", "rank": 4, "codec": "e3m0"}},
        "topk": {"boundary": {"codec": "topk", "codec_keep": 0.25}},
        "some_subspace": {"boundary": {"kind": "subspace", "rank": 4, "replicas": 2}},
        "some_quantised": {"boundary": {"codec": "int8", "replicas": 1}},
    },
    "route": {name: {"route": name} for name in ("fixed", "random_step", "random_micro_batch")},
    # Of the section `train`.
    "inner": {"adamw": {}, "muon": {"train": {"optimizer": "muon", "muon_lr": 0.02}}},
    "text": {"alike": {}, "unlike": {"train": {"alike": 0.25}}},
}
#: Choices without whose values others mean nothing.
NEEDED = ("trainable", "fragments", "peers", "codec")
#: Without local updates, two choices are left.
WITHOUT = {
    "exchange": {"gradients": {}, "none": {}},
    "boundary": {name: value for name, value in CHOICES["boundary"].items() if not name.startswith("some_")},
    "route": CHOICES["route"],
}
#: Pairs that no method has, as patterns, and why. With four replicas a slice has two owners, or one.
REFUSED = {
    ("codec=[!f]*", "outer=average"): "method.outer = average exchanges the parameters themselves",
    ("codec=[!f]*", "outer=gasloc"): "method.outer = gasloc sends parameters",
    ("codec=fp32", "feedback=with"): "means nothing with method.codec = fp32, which loses nothing",
    ("codec=fp32", "basis=[!v]*"): "means nothing with method.codec = fp32, which loses nothing",
    ("codec=dare", "feedback=with"): "grows without bound",
    ("feedback=with", "outer=average"): "means nothing with method.codec = fp32, which loses nothing",
    ("feedback=with", "outer=gasloc"): "means nothing with method.codec = fp32, which loses nothing",
    ("basis=[!v]*", "outer=average"): "means nothing with method.codec = fp32, which loses nothing",
    ("basis=[!v]*", "outer=gasloc"): "means nothing with method.codec = fp32, which loses nothing",
    ("mean=[!o]*", "outer=average"): "of which parameters travel",
    ("mean=[!o]*", "outer=gasloc"): "of which parameters travel",
    ("liar=one", "outer=average"): "of which parameters travel",
    ("liar=one", "outer=gasloc"): "of which parameters travel",
    ("mean=[mc]*", "outer=noloco"): "needs method.peers = group",
    ("mean=trimmed", "outer=noloco"): "needs method.peers = group",
    ("peers=pairs", "mean=[mc]*"): "needs 3 members or more",
    ("peers=pairs", "mean=trimmed"): "must leave out one at each end",
    ("trainable=[!an]*", "mean=[mc]*"): "needs 3 members or more",
    ("trainable=[!an]*", "mean=trimmed"): "must leave out one at each end",
    ("fragments=slices", "mean=[mc]*"): "means nothing with method.trainable = all",
    ("fragments=slices", "mean=trimmed"): "means nothing with method.trainable = all",
    ("points=[!n]*", "outer=average"): "method.outer = average exchanges the parameters themselves",
    ("points=[!n]*", "outer=noloco"): "method.outer",
    ("points=momentum", "outer=sign"): "means nothing with method.outer = sign",
    ("outer=sign", "boundary=*subspace"): "is not linear in outer gradients",
    ("outer=sign", "boundary=reparametrised"): "is not linear in outer gradients",
    ("outer=average", "boundary=some_*"): "of which parameters travel",
    ("outer=gasloc", "boundary=some_*"): "of which parameters travel",
    ("boundary=some_*", "route=random_*"): "as routes mix replicas",
    ("boundary=*subspace", "inner=muon"): "makes whole matrices orthogonal",
    ("boundary=reparametrised", "inner=muon"): "makes whole matrices orthogonal",
    ("trainable=[!an]*", "inner=muon"): "makes whole matrices orthogonal",
    ("fragments=slices", "inner=muon"): "means nothing with method.trainable = all",
    ("peers=everyone", "outer=noloco"): "method.outer = noloco needs method.peers = group",
    ("schedule=tau_each", "outer=noloco"): "must be one value with method.outer = noloco",
    ("trainable=next_fragment", "fragments=whole"): "next_fragment means nothing with method.fragments = whole",
    ("trainable=layers", "boundary=reparametrised"): "method.sliced = layers does not go with",
    ("trainable=all", "fragments=slices"): "fragments = slices means nothing with method.trainable = all",
    ("trainable=next_fragment", "fragments=slices"): "next_fragment means nothing with method.fragments = slices",
}
PLAIN = ("mean=", "trainable=", "fragments=")  # refused with everyone too
STEPS, SAVED = 6, 4  # saved after an update of the subspace, and with transfers in flight


@functools.cache
def _base() -> RunConfig:
    return small_run(
        "diloco_m2",
        replicas=4,
        stages=2,
        model={"layers": 2, "heads": 4, "ffn_dim": 32},
        train={"steps": STEPS, "global_batch": 8, "accumulation": 2, "seq_len": 16, "eval_sequences": 4, "lr": 0.003},
    )


def _config(row: dict[str, str]) -> RunConfig:
    """The run that has these values of choices, each named as in CHOICES or WITHOUT. Raises ConfigError."""
    settings: dict[str, Any] = {"exchange": row.get("exchange", "parameters")}
    if settings["exchange"] == "parameters":
        settings |= {"sync_every_steps": 3, "outer": "nesterov", "outer_lr": 0.4, "outer_momentum": 0.9}
    train: dict[str, Any] = {}
    for choice, value in row.items():
        found = {} if choice == "exchange" else dict(CHOICES[choice][value])
        train |= found.pop("train", {})
        settings |= found
    base = _base()
    return dataclasses.replace(
        base, method=build(MethodConfig, settings, "method"), train=dataclasses.replace(base.train, **train)
    )


def _allowed(row: dict[str, str]) -> bool:
    try:
        _config(row)
    except ConfigError:
        return False
    return True


def _pairs(row: dict[str, str]) -> set[tuple[str, str]]:
    return set(itertools.combinations([f"{choice}={value}" for choice, value in row.items()], 2))


def _all_pairs(choices: dict[str, dict[str, dict[str, Any]]]) -> set[tuple[str, str]]:
    """Return all pairs of values of two choices."""
    names = [[f"{choice}={value}" for value in some] for choice, some in choices.items()]
    return {p for a, b in itertools.combinations(names, 2) for p in itertools.product(a, b)}


def _values(pair: tuple[str, str]) -> dict[str, str]:
    """Return the values of a pair by their choices."""
    return dict(name.split("=") for name in pair)


def _why_refused(pair: tuple[str, str]) -> str | None:
    """Return the reason why no method has a pair of CHOICES; None where one has."""
    return next((why for of, why in reversed(REFUSED.items()) if all(map(fnmatch.fnmatch, pair, of))), None)


def _begin(pair: tuple[str, str], choices: dict[str, dict[str, dict[str, Any]]]) -> dict[str, str] | None:
    """Return the plainest row that holds a pair: the first value of other choices, but of up to two of NEEDED another.

    Returns None where there is none.
    """
    fixed = _values(pair)
    plain = {choice: next(iter(some)) for choice, some in choices.items()} | fixed
    needed = [(choice, value) for choice in NEEDED if choice not in fixed for value in choices.get(choice, ())]
    others = itertools.chain.from_iterable(itertools.combinations(needed, count) for count in range(3))
    return next((row for some in others if _allowed(row := plain | dict(some))), None)


@functools.cache
def covering(exchange: bool) -> list[dict[str, str]]:
    """Return rows that hold every pair of values which is not refused.

    A row begins as the plainest that holds a pair; then it takes what other values add pairs and are allowed. Of
    several such rows the one is taken that adds most.
    """
    choices, draw = CHOICES if exchange else WITHOUT, random.Random(0)
    values = [(choice, value) for choice, some in choices.items() for value in some]
    missing = {pair for pair in _all_pairs(choices) if not exchange or _why_refused(pair) is None}
    rows = []
    for pair in sorted(missing):
        if pair not in missing:
            continue
        begin, fixed, found = _begin(pair, choices), _values(pair), []
        assert begin is not None, pair
        free = [(choice, value) for choice, value in values if choice not in fixed]
        for _ in range(4):
            row = begin
            for choice, value in draw.sample(free, len(free)):
                other = row | {choice: value}
                if len(_pairs(other) & missing) > len(_pairs(row) & missing) and _allowed(other):
                    row = other
            found.append(row)
        rows.append(max(found, key=lambda row: len(_pairs(row) & missing)))
        missing -= _pairs(rows[-1])
    return rows


def _trained_whole_and_cut(row: dict[str, str], corpus: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that stops right after a checkpoint and goes on is the run that never stopped, to the byte."""
    config = _config(row)
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, every_steps=SAVED))

    def copy(trainer: Trainer, row: dict) -> None:  # what SIGKILL would leave behind
        if row["step"] == SAVED + 1 and trainer.world.rank == 0:
            shutil.copytree(folder / "whole", folder / "cut")

    whole = train_in_threads(config, corpus, folder / "whole", on_row=copy)
    caplog.clear()
    with caplog.at_level("INFO", logger="lowcomm"):
        assert train_in_threads(config, corpus, folder / "cut") == whole
    assert f"resuming diloco_m2 at step {SAVED}" in caplog.text
    files = sorted(p.relative_to(folder / "whole") for p in (folder / "whole").rglob("*") if p.is_file())
    assert any("metrics" in str(f) for f in files)
    assert any(f.name == "model.safetensors" for f in files)
    for file in files:
        assert (folder / "cut" / file).read_bytes() == (folder / "whole" / file).read_bytes(), file
    assert math.isfinite(whole["val_loss"])
    closed = {purpose: sent for purpose, sent in whole["sent_bytes_closed_form"].items() if sent}
    assert closed == {purpose: sent for purpose, sent in whole["sent_bytes"].items() if purpose in closed}


@pytest.mark.parametrize("codec", CHOICES["codec"])
def test_every_pair_of_choices_trains_and_resumes(
    codec: str, corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [row for row in covering(True) if row["codec"] == codec]
    assert rows
    for number, row in enumerate(rows):
        print(row)
        _trained_whole_and_cut(row, corpus, tmp_path / str(number), caplog)


@pytest.mark.parametrize("exchange", WITHOUT["exchange"])
def test_every_boundary_and_route_goes_without_local_updates(
    exchange: str, corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, row in enumerate(r for r in covering(False) if r["exchange"] == exchange):
        print(row)
        _trained_whole_and_cut(row, corpus, tmp_path / str(number), caplog)


def test_pairs_that_no_method_has_are_refused_with_the_reason() -> None:
    wanted = {pair: why for pair in _all_pairs(CHOICES) if (why := _why_refused(pair)) is not None}
    assert wanted
    for pair, why in sorted(wanted.items()):
        assert _begin(pair, CHOICES) is None
        with pytest.raises(ConfigError, match=re.escape(why)):
            _config({"peers": "everyone" if pair[0].startswith(PLAIN) else "pairs"} | _values(pair))


#: The choices of the page's table, as they are named here.
SHOWN: dict[str, dict[str, str]] = {
    "sparse, 2 bits, feedback": {"codec": "chunk_topk_2bit", "feedback": "with"},
    "4 bits": {"codec": "e3m0"},
    "cosines, sparse": {"codec": "chunk_topk", "basis": "cosines"},
    "streaming": {"fragments": "strided", "schedule": "mixed"},
    "balanced fragments": {"fragments": "balanced"},
    "NoLoCo": {"peers": "pairs", "outer": "noloco"},
    "GASLoC": {"peers": "pairs", "outer": "gasloc"},
    "sign descent": {"outer": "sign"},
    "median": {"mean": "median"},
    "trimmed mean": {"mean": "trimmed"},
    "clipped": {"mean": "clipped"},
    "radial": {"mean": "radial"},
    "outer rate by points": {"points": "rate"},
    "outer momentum by points": {"points": "momentum"},
    "half of the MLPs": {"trainable": "mlp"},
    "subspace pipeline": {"boundary": "subspace"},
    "half of them compress": {"boundary": "some_subspace"},
    "low-rank pipeline": {"boundary": "low_rank"},
    "projecting pipeline": {"boundary": "projection"},
    "Muon": {"inner": "muon"},
    "unlike text": {"text": "unlike"},
    "a replica that lies": {"liar": "one"},
}
#: Pairs of which the table says another thing, and why: it has 8 replicas, so that a slice has four owners; its NoLoCo
#: has a pull that is its rate, so that parameters travel; its momentum rises to what NoLoCo's pull still allows; and
#: its GASLoC is over pairs, in which the owners of a slice never meet (here a row with slices has everyone as peers).
APART = {
    ("median", "half of the MLPs"),
    ("trimmed mean", "half of the MLPs"),
    ("clipped", "half of the MLPs"),
    ("NoLoCo", "half of them compress"),
    ("NoLoCo", "a replica that lies"),
    ("NoLoCo", "outer momentum by points"),
    ("GASLoC", "half of the MLPs"),
}


def test_the_page_says_of_each_pair_what_is_refused_here() -> None:
    beside = {frontier.ELASTIC}  # of which this file has no choice
    assert set(SHOWN) == set(frontier.CHOICES) - beside
    seen, untrained = set(), set()
    for pair in frontier.composes(LADDER, "smoke"):
        one, other, why_not = pair["one"], pair["other"], pair["why_not"]
        if {one, other} & beside:
            continue
        values = [[f"{choice}={value}" for choice, value in SHOWN[name].items()] for name in (one, other)]
        both = [pair for a, b in itertools.product(*values) for pair in ((a, b), (b, a))]
        wanted = [why for of, why in REFUSED.items() if any(all(map(fnmatch.fnmatch, pair, of)) for pair in both)]
        is_one = any(a.split("=")[0] == b.split("=")[0] for a, b in both if a != b)
        if (one, other) in APART:
            assert bool(why_not) != bool(wanted), pair
            untrained |= {(one, other)} if wanted else set()
        elif why_not == "one choice":
            assert is_one, pair
        elif why_not:
            assert any(why in why_not for why in wanted), pair
        else:
            assert not wanted, (pair, wanted)
        seen.add(bool(why_not))
    assert seen == {True, False}
    assert untrained == frontier.UNTRAINED
