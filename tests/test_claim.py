"""A run's folder is its own: of one job at a time, never of another run, and one for all ranks, which agree."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowcomm.comm.start import run_threads
from lowcomm.comm.world import World
from lowcomm.experiment.claim import Claim, clear
from lowcomm.experiment.config import RunConfig
from lowcomm.experiment.run_folder import RunFolder
from lowcomm.experiment.train import train, train_in_threads
from lowcomm.experiment.trainer import Trainer
from lowcomm.settings import ConfigError
from tests.conftest import command_line, small_run
from tests.harness import Crash, as_processes, refused, train_in_processes

DILOCO = small_run("diloco_m2")


def test_times_of_another_run_are_left_alone(corpus: Path, tmp_path: Path) -> None:
    """A folder of times is of one run; both may be moved together."""
    first = RunFolder(tmp_path / "one" / "run", tmp_path / "one" / "times")
    train_in_threads(DILOCO, corpus, first)
    kept = files_of(first.times)
    for folder, message in (
        (
            RunFolder(tmp_path / "other", first.times),
            f"holds the times of the run in {first.out}: choose another folder",
        ),
        (RunFolder(tmp_path / "other", first.out / "metrics"), "holds the metrics of a run: choose another folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            train_in_threads(DILOCO, corpus, folder)
    assert files_of(first.times) == kept
    (tmp_path / "one").rename(tmp_path / "moved")
    moved = RunFolder(tmp_path / "moved" / "run", tmp_path / "moved" / "times")
    assert train_in_threads(DILOCO, corpus, moved, again=True)["complete"]


def test_what_is_left_of_a_folder_that_was_cleared_is_no_finished_run(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_in_threads(DILOCO, corpus, tmp_path / "run")
    folder = RunFolder.beside(tmp_path / "run")

    def killed(path: Path) -> None:
        raise Crash

    monkeypatch.setattr(Path, "rmdir", killed)
    with pytest.raises(Crash):
        folder.clear()
    assert folder.read_summary() is None


def test_metrics_that_are_a_row_short_are_named(corpus: Path, tmp_path: Path) -> None:
    train_in_threads(DILOCO, corpus, tmp_path / "run")
    folder = RunFolder.beside(tmp_path / "run")
    rows = folder.metrics(1).read_text().splitlines(keepends=True)
    folder.metrics(1).write_text("".join(rows[:-1]))
    with pytest.raises(ConfigError, match=rf"rank-001.jsonl is damaged \({len(rows) - 1} rows, {len(rows)} needed\)"):
        folder.read()
    folder.metrics(1).unlink()
    with pytest.raises(ConfigError, match="rank-001.jsonl cannot be read"):
        folder.read()


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def crash_at(step: int) -> Callable[[Trainer, dict], None]:
    def crash(trainer: Trainer, row: dict) -> None:
        if row["step"] == step:
            raise Crash

    return crash


@pytest.mark.fault("a finished run is started again", "refused unless `--again` is said")
def test_a_finished_run_is_trained_again_only_when_told(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train_in_threads(DILOCO, corpus, out)
    before = files_of(out)
    assert not {"run.json", ".lock"} & before.keys()
    with pytest.raises(ConfigError, match="holds a finished run: --again trains it anew, or choose another one"):
        train_in_threads(DILOCO, corpus, out)
    done = train_in_processes(2, *command_line(DILOCO, corpus, out))
    assert done.returncode == 1
    assert done.stderr.count("holds a finished run: --again trains it anew") == 2  # each rank's word
    assert "Traceback" not in done.stderr
    assert files_of(out) == before
    again = train_in_processes(2, *command_line(DILOCO, corpus, out), "--again")
    assert again.returncode == 0, again.stderr
    assert files_of(out).keys() == before.keys()
    assert files_of(out)["model.safetensors"] == before["model.safetensors"]


@pytest.mark.fault("another run's folder", "refused unless `--again` is said")
def test_another_run_is_replaced_only_when_told(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(Crash):
        train_in_threads(DILOCO, corpus, tmp_path / "run", on_row=crash_at(5))
    before = files_of(tmp_path / "run") | {".lock": b""}
    other = small_run("diloco_m2", train={"lr": 0.002})
    with pytest.raises(ConfigError, match="holds another run: train.lr is 0.01 there and 0.002 here; --again replaces"):
        train_in_threads(other, corpus, tmp_path / "run")
    assert files_of(tmp_path / "run") | {".lock": b""} == before
    train_in_threads(other, corpus, tmp_path / "run", again=True)
    train_in_threads(other, corpus, tmp_path / "alone")
    assert files_of(tmp_path / "run") == files_of(tmp_path / "alone")


@pytest.mark.fault("a folder that holds other things", "refused, and nothing in it is touched")
@pytest.mark.parametrize("name", ["checkpoints", "metrics", "model.safetensors", "summary.json"])
def test_what_others_have_is_left_alone(name: str, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "theirs"
    mine = out / name if "." in name else out / name / "mine.bin"
    mine.parent.mkdir(parents=True)
    mine.write_text("years of work")
    rule = "is damaged" if name == "summary.json" else f"holds {name}, but no run.json that says of which run"
    with pytest.raises(ConfigError, match=rule):
        train_in_threads(DILOCO, corpus, out, again=True)
    assert mine.read_text() == "years of work"


@pytest.mark.fault("a second job on the same folder", "refused, with the process and the host that train there")
def test_a_folder_has_one_job_at_a_time(corpus: Path, tmp_path: Path) -> None:
    folder = RunFolder.beside(tmp_path / "run")
    said = []

    def second(trainer: Trainer, row: dict) -> None:
        if row["step"] == 3 and trainer.world.rank == 0:
            with pytest.raises(ConfigError) as error:
                Claim(folder, {}, again=True)
            told = train_in_processes(2, *command_line(DILOCO, corpus, folder.out), "--again")
            said.extend([str(error.value), told.stderr, str(told.returncode)])

    train_in_threads(DILOCO, corpus, folder, on_row=second)
    here, there, status = said
    assert re.search(f"is in use: process {os.getpid()} on .* trains there", here)
    assert f"is in use: process {os.getpid()} on" in there
    assert status == "1"
    train_in_threads(DILOCO, corpus, tmp_path / "alone")
    assert files_of(folder.out) == files_of(tmp_path / "alone")


def test_checkpoints_may_be_a_link_to_another_disk(corpus: Path, tmp_path: Path) -> None:
    disk, out = tmp_path / "disk", tmp_path / "run"
    disk.mkdir()
    config = small_run("diloco_m2", checkpoint={"every_steps": 3})
    with pytest.raises(Crash):
        train_in_threads(config, corpus, out, on_row=crash_at(1))
    (out / "checkpoints").symlink_to(disk)
    with pytest.raises(Crash):
        train_in_threads(config, corpus, out, on_row=crash_at(8))
    assert sorted(path.name for path in disk.iterdir()) == ["step-00000003", "step-00000006"]
    train_in_threads(config, corpus, out)
    assert (out / "checkpoints").is_symlink()
    assert not list(disk.iterdir())


def told_to_each(configs: list[RunConfig], corpora: list[Path], outs: list[Path]) -> list[str]:
    """Train on two ranks, and return the message of the ConfigError that each of them gets."""

    def work(world: World) -> str:
        return refused(train, configs[world.rank], world, corpora[world.rank], outs[world.rank])

    return run_threads(work, replicas=2)


@pytest.mark.fault("the run's folder is not shared between machines", "all ranks stop at the start")
def test_ranks_that_do_not_share_the_folder_are_told(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowcomm.experiment.train._SEEN_WITHIN_S", 0.2)
    for told in told_to_each([DILOCO] * 2, [corpus] * 2, [tmp_path / "a", tmp_path / "b"]):
        assert "of rank 1 is not the folder that rank 0 writes to: it must be one that all machines share" in told


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "learning rate": ({"train": {"lr": 0.002}}, "train.lr is 0.01 on rank 0 and 0.002 on rank 1"),
    "outer rate": ({"method": {"outer_lr": 0.3}}, "method.outer_lr is 0.4 on rank 0 and 0.3 on rank 1"),
    "clipping": ({"train": {"clip_norm": 0.5}}, "train.clip_norm is 1.0 on rank 0 and 0.5 on rank 1"),
    "evaluation": ({"train": {"eval_every": 7}}, "train.eval_every is .* on rank 0 and 7 on rank 1"),
    "checkpoints": ({"checkpoint": {"every_steps": 5}}, "checkpoint.every_steps is 0 on rank 0 and 5 on rank 1"),
    "period": ({"method": {"sync_every_steps": 5}}, "method.sync_every_steps is .* on rank 0 and 5 on rank 1"),
}


@pytest.mark.fault(
    "ranks with other settings, source or checkpoints",
    "all stop before the first step, and the key that differs is named",
)
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_were_started_differently_all_stop(what: str, corpus: Path, tmp_path: Path) -> None:
    override, message = DIFFERENT[what]
    told = told_to_each([DILOCO, small_run("diloco_m2", **override)], [corpus] * 2, [tmp_path / "run"] * 2)
    assert told[0] == told[1]
    assert re.fullmatch(f"ranks were started differently: {message}", told[0])
    assert not files_of(tmp_path / "run")


@pytest.mark.fault("ranks with another seed or corpus", "all stop before the first step, and what differs is named")
def test_ranks_of_another_seed_or_corpus_stop_too(corpus: Path, tmp_path: Path) -> None:
    outs = [tmp_path / "run"] * 2
    told = told_to_each([DILOCO, dataclasses.replace(DILOCO, seed=1)], [corpus] * 2, outs)
    assert set(told) == {"ranks were started differently: seed is 0 on rank 0 and 1 on rank 1"}
    shutil.copytree(corpus, tmp_path / "corpus")
    card = json.loads((tmp_path / "corpus" / "card.json").read_text())
    card["splits"]["train"]["shards"] *= 2
    (tmp_path / "corpus" / "card.json").write_text(json.dumps(card))
    told = told_to_each([DILOCO] * 2, [corpus, tmp_path / "corpus"], outs)
    assert told[0] == told[1]
    assert told[0].startswith("ranks were started differently: corpus, train is ")


def test_processes_hear_of_it_on_every_rank(tmp_path: Path) -> None:
    told = as_processes("started_differently", 3, tmp_path)
    assert told == ["ranks were started differently: source is 'a' on rank 0 and 'b' on rank 2 (and 1 more differ)"] * 3


@pytest.mark.fault("the loss becomes NaN", "the run ends with a word, and is not complete")
def test_training_that_diverges_ends_with_a_word(corpus: Path, tmp_path: Path) -> None:
    config = small_run("data_parallel", train={"lr": 1e30, "clip_norm": 0.0})
    done = train_in_processes(2, *command_line(config, corpus, tmp_path / "run"))
    assert done.returncode == 1
    assert "training has diverged" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_folder_in_which_a_job_trains_is_not_cleared_by_others(tmp_path: Path) -> None:
    folder = RunFolder.beside(tmp_path / "run")
    clear(folder)  # where there is nothing
    folder.make()
    held = Claim(folder, {"lr": 1})
    with pytest.raises(ConfigError, match="is in use: process .* trains there"):
        clear(folder)
    assert folder.settings.exists()
    held.release()
    clear(folder)
    assert not list(folder.out.iterdir())
