"""Exact resume, stopping, determinism, and what a run folder holds."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lowcomm.comm.start import run_threads
from lowcomm.comm.start import world as this_process
from lowcomm.comm.world import World
from lowcomm.experiment import stop
from lowcomm.experiment.batches import TokenData
from lowcomm.experiment.checkpoint import Checkpoints
from lowcomm.experiment.config import RunConfig
from lowcomm.experiment.inner import learning_rate
from lowcomm.experiment.run_folder import Metrics, RunFolder, read_metrics, recorded_steps
from lowcomm.experiment.source import sha256, source_digest
from lowcomm.experiment.train import digests, train, train_in_threads
from lowcomm.experiment.trainer import Trainer, initial_model, saved_model
from lowcomm.model.decoder import Decoder
from lowcomm.model.huggingface import save_folder
from lowcomm.settings import ConfigError
from pipelines.launch import torchrun_command
from tests.conftest import command_line, small_run
from tests.harness import Crash, Group, clean_environment, command, train_in_processes

DETERMINED = ("summary.json", "model.safetensors", "metrics/rank-000.jsonl", "metrics/rank-001.jsonl")


def same_run(a: Path, b: Path) -> bool:
    """Everything that a run determines, byte for byte; the transport's name apart."""

    def read(out: Path, name: str) -> bytes:
        return (out / name).read_bytes().replace(b"ProcessTransport", b"ThreadTransport")

    return all(read(a, name) == read(b, name) for name in DETERMINED)


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted DiLoCo run of 60 steps."""
    out = tmp_path_factory.mktemp("reference") / "run"
    train_in_threads(LONG, corpus, out)
    return out


LONG = small_run("diloco_m2", train={"steps": 60, "eval_every": 20})


def test_twice_the_same_is_the_same(reference: Path, corpus: Path, tmp_path: Path) -> None:
    train_in_threads(LONG, corpus, tmp_path / "again")
    assert same_run(reference, tmp_path / "again")


@pytest.mark.parametrize("run", ["diloco_m2", "data_parallel"])
def test_threads_and_processes_give_the_same_run(run: str, corpus: Path, tmp_path: Path) -> None:
    config = small_run(run)
    train_in_threads(config, corpus, tmp_path / "threads")
    done = train_in_processes(2, *command_line(config, corpus, tmp_path / "processes"))
    assert done.returncode == 0, done.stderr
    assert same_run(tmp_path / "threads", tmp_path / "processes")


@pytest.mark.parametrize("run", ["diloco_m2", "data_parallel"])
@pytest.mark.parametrize("crash_at", range(1, 13))
def test_resume_at_any_step_is_the_uninterrupted_run(run: str, crash_at: int, corpus: Path, tmp_path: Path) -> None:
    plain = small_run(run)
    train_in_threads(plain, corpus, tmp_path / "plain")
    config = small_run(run, checkpoint={"every_steps": 3})

    def crash(trainer: Trainer, row: dict) -> None:
        if row["step"] == crash_at and trainer.world.rank == crash_at % 2:
            raise Crash

    with pytest.raises((Crash, RuntimeError)):
        train_in_threads(config, corpus, tmp_path / "run", on_row=crash)
    steps = sorted(int(p.name[5:]) for p in (tmp_path / "run" / "checkpoints").glob("step-????????"))
    assert steps == [s for s in (3, 6, 9) if s < crash_at][-2:]
    train_in_threads(config, corpus, tmp_path / "run")
    for name in DETERMINED[1:]:
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    a, b = (json.loads((tmp_path / n / "summary.json").read_text()) for n in ("run", "plain"))
    assert a.pop("run") != b.pop("run")  # only the checkpoint interval differs
    assert a == b
    assert not (tmp_path / "run" / "checkpoints").exists()


def _wait_for_step(out: Path, step: int, lives: Callable[[], bool]) -> None:
    metrics = out / "metrics" / "rank-000.jsonl"
    deadline = time.monotonic() + 60
    while lives() and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= step:
            return
        time.sleep(0.001)


def _kill_at(step: int, started: Group, out: Path, rng: random.Random) -> None:
    """SIGKILL a run, all ranks or one and then the others, when it has come to `step`."""
    _wait_for_step(out, step, lambda: started.is_alive)
    if rng.random() < 0.5:
        started.kill(rng.choice(started.processes))
        time.sleep(0.1)  # in which the others may notice
    started.kill(*started.processes)
    assert not (out / "summary.json").exists()


@pytest.mark.fault("a whole job is killed at a random step", "the same command goes on, bit for bit")
@pytest.mark.parametrize("ranks", [None, 2], ids=["threads", "processes"])
@pytest.mark.parametrize("attempt", range(int(os.environ.get("LOWCOMM_KILLS", "3"))))
def test_a_run_killed_at_a_random_step_resumes_exactly(
    ranks: int | None, attempt: int, reference: Path, corpus: Path, tmp_path: Path
) -> None:
    """SIGKILL, to one rank or to all; LOWCOMM_KILLS sets how many times for each transport."""
    rng = random.Random(f"{ranks} {attempt}")
    config = small_run("diloco_m2", train={"steps": 60, "eval_every": 20}, checkpoint={"every_steps": 7})
    words = command_line(config, corpus, tmp_path / "run")
    step = rng.randint(1, 58)
    _kill_at(step, Group(command, *words, ranks=ranks), tmp_path / "run", rng)
    done = Group(command, *words, ranks=ranks).wait()
    assert done.returncode == 0, done.stderr
    if step > 8:
        assert "resuming diloco_m2 at step" in done.stderr
    for name in DETERMINED[1:]:
        assert (tmp_path / "run" / name).read_bytes() == (reference / name).read_bytes(), name


def test_a_sharded_run_resumes_exactly(corpus: Path, tmp_path: Path) -> None:
    config = small_run("data_parallel", method={"exchange": "fsdp"}, train={"steps": 40}, checkpoint={"every_steps": 7})
    whole, killed = (command_line(config, corpus, tmp_path / name) for name in ("whole", "killed"))
    _kill_at(25, Group(command, *killed, ranks=2), tmp_path / "killed", random.Random(0))
    for words in (whole, killed):
        done = train_in_processes(2, *words)
        assert done.returncode == 0, done.stderr
    assert "resuming data_parallel at step 2" in done.stderr
    assert same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.fault("SIGTERM to a job", "a checkpoint is written, and the job ends with 0")
@pytest.mark.parametrize("transport", ["threads", "processes"])
def test_sigterm_writes_a_checkpoint_and_exits_cleanly(transport: str, corpus: Path, tmp_path: Path) -> None:
    config = small_run("diloco_m2", train={"steps": 3000})
    words = command_line(config, corpus, tmp_path / "run")
    plain = [sys.executable, "-m", "lowcomm.train", *words]
    starts = plain if transport == "threads" else torchrun_command(2, "lowcomm.train", *words)
    child = subprocess.Popen(starts, env=clean_environment(), stderr=subprocess.PIPE, text=True)
    _wait_for_step(tmp_path / "run", 20, lambda: child.poll() is None)
    # Under torchrun only one rank is told; the other hears of it from its peer.
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    told = child.pid if transport == "threads" else int(children[0])
    os.kill(told, signal.SIGTERM)
    _, log = child.communicate(timeout=60)
    assert child.returncode == 0, log
    assert "stopped diloco_m2 after step" in log
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    rows = read_metrics(tmp_path / "run" / "metrics" / "rank-000.jsonl")
    assert int(checkpoint.name[5:]) == rows[-1]["step"] >= 20
    assert len(read_metrics(tmp_path / "run" / "metrics" / "rank-001.jsonl")) == len(rows)


def test_a_stopped_run_goes_on_where_it_stopped(reference: Path, corpus: Path, tmp_path: Path) -> None:
    def ask(trainer: Trainer, row: dict) -> None:
        if row["step"] == 5:
            stop.requested.set()
        time.sleep(0.02)  # so that the watcher sees it before the run is over

    try:
        stopped = train_in_threads(LONG, corpus, tmp_path / "run", on_row=ask)
    finally:
        stop.requested.clear()
    assert not stopped["complete"]
    assert 5 <= stopped["step"] < 60
    train_in_threads(LONG, corpus, tmp_path / "run")
    assert same_run(reference, tmp_path / "run")


def _stopped(corpus: Path, out: Path, *, at: int = 9, **override) -> RunConfig:
    """A run that crashed after step `at`, with checkpoints every 3 steps."""
    config = small_run("diloco_m2", checkpoint={"every_steps": 3}, **override)

    def crash(trainer: Trainer, row: dict) -> None:
        if row["step"] == at:
            raise Crash

    with pytest.raises((Crash, RuntimeError)):
        train_in_threads(config, corpus, out, on_row=crash)
    return config


def test_a_checkpoint_is_replaced_by_a_whole_one_before_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path) -> None:
        raise Crash

    world = this_process()
    checkpoints = Checkpoints(tmp_path, world, keep=1)
    checkpoints.save(5, {"x": torch.zeros(2)}, {}, {"run": "mine"})
    with monkeypatch.context() as patch:
        patch.setattr("lowcomm.experiment.checkpoint.remove_checkpoint", killed)
        with pytest.raises(Crash):
            checkpoints.save(5, {"x": torch.ones(2)}, {}, {"run": "mine"})
    step, tensors, _ = Checkpoints(tmp_path, world, keep=1).newest({"run": "mine"})
    assert (step, tensors["x"].tolist()) == (5, [1.0, 1.0])


def test_a_run_does_not_go_on_with_another_corpus(corpus: Path, tmp_path: Path) -> None:
    config = _stopped(corpus, tmp_path / "run")
    other = tmp_path / "other"
    shutil.copytree(corpus, other)
    shard = other / "train-00000.bin"
    shard.write_bytes(np.fromfile(shard, "<u2")[::-1].tobytes())
    card = json.loads((other / "card.json").read_text())
    card["splits"]["train"]["shards"][0]["sha256"] = sha256(shard)
    (other / "card.json").write_text(json.dumps(card))
    with pytest.raises(ConfigError, match="holds another run: corpus, train is .* there and .* here"):
        train_in_threads(config, other, tmp_path / "run")
    assert train_in_threads(config, corpus, tmp_path / "run")["complete"]


def test_a_run_that_goes_on_with_other_code_counts_as_no_run_of_either(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, folder = _stopped(corpus, tmp_path / "run"), RunFolder.beside(tmp_path / "run")
    folder.source.write_text("earlier code")
    assert train_in_threads(config, corpus, folder)["complete"]
    assert "the code is another than the run in" in caplog.text
    assert folder.made_with not in ("earlier code", source_digest(), None)


def _damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)


@pytest.mark.fault(
    "checkpoints cut short, swapped between ranks, renamed, of other steps, without a tensor, or with another one",
    "each is refused by name, and the one before is taken",
)
@pytest.mark.parametrize(
    "what",
    [
        "flipped bit",
        "flipped ledger",
        "truncated",
        "missing file",
        "bad manifest",
        "odd manifest",
        "ranks swapped",
        "rank of another step",
        "renamed",
        "lacks a tensor",
        "a tensor of another shape",
        "metrics cut short",
        "metrics lost",
    ],
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(what: str, corpus: Path, tmp_path: Path, caplog) -> None:
    config = _stopped(corpus, tmp_path / "run", at=8)
    (tmp_path / "run" / "checkpoints" / "step-backup01").mkdir()  # somebody's own
    newest = tmp_path / "run" / "checkpoints" / "step-00000006"
    file = newest / "rank-001.safetensors"
    if what == "flipped bit":
        _damage(file)
    elif what == "flipped ledger":
        _damage(newest / "rank-001.json")
    elif what == "truncated":
        file.write_bytes(file.read_bytes()[:100])
    elif what == "missing file":
        file.unlink()
    elif what == "ranks swapped":
        other, between = newest / "rank-000.safetensors", newest / "between"
        file.rename(between)
        other.rename(file)
        between.rename(other)
    elif what == "rank of another step":
        shutil.copy(newest.with_name("step-00000003") / file.name, file)
    elif what == "renamed":
        shutil.rmtree(newest)
        shutil.copytree(newest.with_name("step-00000003"), newest)
    elif "tensor" in what:
        tensors = load_file(file)
        name = next(iter(sorted(tensors)))
        tensors |= {name: torch.zeros(1)}
        save_file({n: t for n, t in tensors.items() if n != name or what != "lacks a tensor"}, file)
        manifest = json.loads((newest / "manifest.json").read_text())
        manifest["sha256"][file.name] = sha256(file)
        (newest / "manifest.json").write_text(json.dumps(manifest))
    elif what.startswith("metrics"):
        rows = tmp_path / "run" / "metrics" / "rank-001.jsonl"
        lines = rows.read_text().splitlines(keepends=True)
        rows.write_text("".join(lines[:4] if what == "metrics cut short" else [*lines[:3], *lines[4:]]))
    else:
        (newest / "manifest.json").write_text("{" if what == "bad manifest" else "[]")
    caplog.set_level("INFO", "lowcomm")
    train_in_threads(config, corpus, tmp_path / "run")
    assert "step-00000006 is damaged" in caplog.text
    assert "resuming diloco_m2 at step 3" in caplog.text
    assert [path.name for path in newest.parent.iterdir()] == ["step-backup01"]
    train_in_threads(small_run("diloco_m2"), corpus, tmp_path / "plain")
    for name in DETERMINED[1:]:
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


@pytest.mark.fault("all checkpoints are damaged", "an error, and no fresh start")
def test_all_checkpoints_damaged_is_an_error_not_a_fresh_start(corpus: Path, tmp_path: Path) -> None:
    config = _stopped(corpus, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").rglob("rank-000.safetensors"):
        _damage(path)
    with pytest.raises(ConfigError, match="no checkpoint in .* can be read; delete the folder to start over"):
        train_in_threads(config, corpus, tmp_path / "run")


@pytest.mark.fault("a checkpoint of other settings", "refused, by the name of the setting")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"train": {"lr": 0.5}}, "train.lr is 0.01 there and 0.5 here"),
        ({"model": {"dim": 24, "heads": 2}}, "model.dim is 16 there and 24 here"),
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"replicas": 1}, "replicas is 2 there and 1 here"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(override: dict, message: str, corpus: Path, tmp_path: Path) -> None:
    _stopped(corpus, tmp_path / "run")
    kept = {path: path.read_bytes() for path in tmp_path.rglob("step-*/*")}
    other = small_run("diloco_m2", checkpoint={"every_steps": 3}, **override)
    if "seed" in override:
        other = dataclasses.replace(small_run("diloco_m2", checkpoint={"every_steps": 3}), seed=1)
    with pytest.raises(ConfigError, match=f"holds another run: {message}"):
        train_in_threads(other, corpus, tmp_path / "run")
    shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / "other" / "checkpoints")
    card = json.loads((corpus / "card.json").read_text())
    (tmp_path / "other" / "run.json").write_text(json.dumps(other.identity() | digests(card)))
    for rank in range(other.ranks):
        rows = tmp_path / "other" / "metrics" / f"rank-{rank:03d}.jsonl"
        rows.parent.mkdir(exist_ok=True)
        shutil.copy(tmp_path / "run" / "metrics" / rows.name, rows)
    with pytest.raises(ConfigError, match=f"is of another run: {message}"):
        train_in_threads(other, corpus, tmp_path / "other")
    assert kept
    assert all(path.read_bytes() == content for path, content in kept.items())


def test_checkpoints_hold_no_pickles_and_only_the_last_are_kept(corpus: Path, tmp_path: Path) -> None:
    _stopped(corpus, tmp_path / "run", at=12)
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000006", "step-00000009"]
    assert {p.suffix for p in folder.rglob("*") if p.is_file()} == {".safetensors", ".json"}


def test_checkpoints_of_steps_that_a_run_has_gone_back_behind_are_not_kept(tmp_path: Path) -> None:
    def saved(world: World) -> list[int]:
        checkpoints = Checkpoints(tmp_path / "checkpoints", world)
        for step in (36, 40, 32, 34, 36):
            checkpoints.save(step, {"x": torch.tensor(step)}, {}, {})
        return checkpoints.steps()

    assert run_threads(saved, replicas=1) == [[34, 36]]


@pytest.mark.fault("a run is killed while it puts its metrics back to a checkpoint", "the rows up to there are kept")
def test_rows_are_put_back_without_being_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank-000.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 6)) + '{"step": 6')

    def killed(path: Path, text: str) -> None:
        path.open("w").close()
        raise Crash

    monkeypatch.setattr(Path, "write_text", killed)
    for resumed_at, left in ((None, 5), (3, 3), (0, 0)):
        metrics = Metrics(path, resumed_at)
        assert recorded_steps(path) == left
        metrics.add({"step": left + 1})
        metrics.write()
        metrics.close()
        assert recorded_steps(path) == left + 1


@pytest.mark.fault("a folder that cannot be written", "named at the start")
def test_an_unwritable_output_folder_is_named(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="output folder .*/file/run cannot be written"):
        train_in_threads(small_run(), corpus, tmp_path / "file" / "run")


@pytest.mark.fault("a corpus that was prepared otherwise", "refused, by the name of the setting")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"model": {"vocab_size": 999}, "data": {"vocab_size": 999}}, "data.vocab_size = 999, but .* with 400"),
        ({"data": {"validation_percent": 7}}, "data.validation_percent = 7.0, but the corpus was prepared with 5.0"),
        ({"data": {"corpus": "python"}}, "data.corpus = python, but the corpus was prepared with docstrings"),
    ],
)
def test_a_corpus_prepared_with_other_settings_is_refused(
    override: dict, message: str, corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train_in_threads(small_run(**override), corpus, tmp_path)


def test_too_few_validation_windows_are_told_before_anything_is_trained(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = torch.zeros(1, 33, dtype=torch.long)
    monkeypatch.setattr(TokenData, "held_out", lambda self, sequences, split="validation": few)

    def trained(trainer: Trainer, row: dict) -> None:
        raise AssertionError("a step was trained")

    with pytest.raises(ConfigError, match="1 validation windows are too few for 2 replicas"):
        train_in_threads(
            small_run("data_parallel", replicas=2, method={"exchange": "none"}), corpus, tmp_path, on_row=trained
        )


def test_a_fresh_start_leaves_nothing_of_the_run_before(corpus: Path, tmp_path: Path) -> None:
    train_in_threads(small_run("diloco_m2"), corpus, tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    summary = tmp_path / "run" / "summary.json"

    def crash(trainer: Trainer, row: dict) -> None:
        assert not summary.exists()
        raise Crash

    with pytest.raises(Crash):
        train_in_threads(small_run("diloco_m2", replicas=1), corpus, tmp_path / "run", on_row=crash, again=True)
    names = {str(p.relative_to(tmp_path / "run")) for p in (tmp_path / "run").rglob("*")}
    assert names == {"notes.txt", "metrics", "metrics/rank-000.jsonl", "run.json", ".lock"}
    assert RunFolder.beside(tmp_path / "run").made_with == source_digest()


def test_a_run_is_marked_with_the_source_as_it_was_loaded(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source may be another by the time a run trains; and reading it would hold up rank 0, for whom others wait."""

    def read_now() -> str:
        raise AssertionError("the source was read when it was trained")

    monkeypatch.setattr("lowcomm.experiment.train.source_digest", read_now)
    folder = RunFolder.beside(tmp_path / "run")
    train_in_threads(small_run("diloco_m2"), corpus, folder)
    assert folder.made_with == source_digest()


def test_the_digest_of_the_source_is_kept_for_the_same_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest() -> str:
        source_digest.cache_clear()
        return source_digest()

    def kept() -> set[Path]:
        return set(tmp_path.glob("__pycache__/*"))

    monkeypatch.setattr("lowcomm.experiment.source.PACKAGE", tmp_path)
    (tmp_path / "cost").mkdir()
    (tmp_path / "a.py").write_text('"""Prose."""\nx = 1\n')
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    first = digest()
    assert not kept()
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    assert digest() == first
    (file,) = kept()
    file.write_text("what is kept")
    assert digest() == "what is kept"
    (tmp_path / "cost" / "b.py").write_text("y = 1\n")
    assert digest() == "what is kept"
    (tmp_path / "a.py").write_text('"""Other prose."""\nx = 1  # one\n')
    assert digest() == first
    (tmp_path / "a.py").write_text("x = 2\n")
    assert digest() != first
    assert len(kept()) == 3
    source_digest.cache_clear()


def test_an_interrupted_cell_stops_its_ranks_with_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal; from pathlib import Path; from lowcomm.experiment.train import train_in_threads;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # a shell's background jobs ignore it
        "from tests.conftest import small_run;"
        "config = small_run('diloco_m2', train={'steps': 10**6});"
        "hit = lambda trainer, row: row['step'] == 20 and trainer.world.rank == 0 and os.kill(os.getpid(), 2);"
        f"train_in_threads(config, Path({str(corpus)!r}), Path({str(tmp_path / 'run')!r}), on_row=hit)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert "KeyboardInterrupt" in done.stderr
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    rows = [read_metrics(tmp_path / "run" / "metrics" / f"rank-{r:03d}.jsonl") for r in (0, 1)]
    assert int(checkpoint.name[5:]) == len(rows[0]) == len(rows[1]) >= 20


def test_replicas_and_ranks_must_agree(corpus: Path, tmp_path: Path) -> None:
    config = small_run("diloco_m2", replicas=4)
    with pytest.raises(ConfigError, match="run diloco_m2 has 4 replicas, the world has 2"):
        run_threads(lambda w: train(config, w, corpus, tmp_path), replicas=2)
    done = train_in_processes(1, *command_line(small_run("diloco_m2"), corpus, tmp_path))
    assert done.returncode != 0
    assert "1 ranks cannot form 2 replicas x 1 stages; start 2 ranks or change replicas" in done.stderr


def test_nccl_needs_a_gpu_for_each_rank(corpus: Path, tmp_path: Path) -> None:
    if torch.cuda.device_count() >= 2:
        pytest.skip("this machine has a GPU for each rank")
    done = train_in_processes(2, *command_line(small_run("diloco_m2", comm={"backend": "nccl"}), corpus, tmp_path))
    assert done.returncode != 0
    assert "comm.backend = nccl needs a GPU for each rank: rank" in done.stderr


def test_the_saved_model_is_the_evaluated_one(reference: Path, corpus: Path) -> None:
    weights = load_file(reference / "model.safetensors")
    summary = json.loads((reference / "summary.json").read_text())
    rows = read_metrics(reference / "metrics" / "rank-000.jsonl")
    assert [r["step"] for r in rows if "val_loss" in r] == [20, 40, 60]
    assert rows[-1]["val_loss"] == summary["val_loss"]

    def evaluate(world: World) -> float:
        t = LONG.train
        data = TokenData(corpus, seq_len=t.seq_len, global_batch=t.global_batch, seed=0)
        trainer = Trainer(LONG, world, data)
        trainer.model.load_state_dict(weights, strict=True)
        own = torch.cat([p.flatten() for p in trainer.model.parameters()]).detach()
        trainer.engine.state_dict()["0/agreed"].copy_(own)
        return trainer.evaluate()

    assert run_threads(evaluate, replicas=2) == [summary["val_loss"]] * 2
    assert set(weights) == set(dict(Decoder(LONG.model).named_parameters()))


def test_a_saved_model_is_read_back(reference: Path, tmp_path: Path) -> None:
    weights, path = load_file(reference / "model.safetensors"), tmp_path / "other.safetensors"
    model = saved_model(LONG, reference / "model.safetensors")
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    tied = small_run(model={"tied": True})
    save_file(dict(initial_model(tied).named_parameters()), path)
    assert saved_model(tied, path).head.weight.equal(initial_model(tied).embedding.weight)
    for other, said in (
        (weights | {"more": torch.ones(2)}, r"more is \[2\], but missing in"),
        ({k: v for k, v in weights.items() if k != "norm.weight"}, r"norm.weight is missing, but \[\d+\] in"),
        (weights | {"norm.weight": torch.ones(3)}, r"norm.weight is \[3\], but \[\d+\] in"),
    ):
        save_file(other, path)
        with pytest.raises(ConfigError, match=f"other.safetensors: {said} the model of the configuration"):
            saved_model(LONG, path)


def test_a_run_begins_with_a_folder_of_its_own_model(tmp_path: Path) -> None:
    """Whatever a configuration leaves at 0, which a folder says; what is of training alone is the configuration's."""
    config = small_run(model={"z_loss": 0.01, "mlp": "gated", "norm": "rms"})
    model = initial_model(config)
    with torch.no_grad():
        model.head.weight.mul_(2)
    save_folder(model, tmp_path)
    begun = initial_model(dataclasses.replace(config, train=dataclasses.replace(config.train, weights=str(tmp_path))))
    ids = torch.arange(9)[None]
    losses = model.losses(ids[:, :-1], ids[:, 1:])
    assert all(map(torch.equal, begun.losses(ids[:, :-1], ids[:, 1:]), losses))
    assert losses[0] > losses[1]
    other = small_run(model={"heads": 4, "mlp": "gated", "norm": "rms"}, train={"weights": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"model.(heads|head_dim|kv_heads) = 4, but train.weights = "):
        initial_model(other)


def test_training_learns(reference: Path) -> None:
    rows = read_metrics(reference / "metrics" / "rank-000.jsonl")
    # ln 400 = 5.99 is knowing nothing; the unigram entropy of this corpus is near 5.1.
    assert rows[0]["loss"] > 5.8
    assert rows[-1]["val_loss"] < 5.4


def test_the_learning_rate_warms_up_and_decays() -> None:
    t = small_run(train={"steps": 100, "warmup_steps": 10, "lr": 1.0, "final_lr_fraction": 0.1}).train
    assert [learning_rate(s, t) for s in (1, 5, 10)] == [0.1, 0.5, 1.0]
    assert learning_rate(55, t) == pytest.approx(0.55)
    assert learning_rate(100, t) == pytest.approx(0.1)
    linear = small_run(train={"steps": 100, "warmup_steps": 0, "lr": 1.0, "decay": "linear"}).train
    assert learning_rate(50, linear) == pytest.approx(0.525)
    constant = small_run(train={"decay": "constant", "lr": 1.0}).train
    assert learning_rate(12, constant) == 1.0
