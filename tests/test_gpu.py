"""The command for a GPU, on the CPU: every part runs, with no tokenizer and no data library, and is done once."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines import gpu, launch
from pipelines.ladder.__main__ import prepare
from pipelines.ladder.plan import Ladder
from tests.harness import as_if_predicted, clean_environment, small_ladder

METHODS = """
methods:
  data_parallel: {exchange: none}
  diloco: &diloco {exchange: parameters, sync_every_steps: 4, outer: nesterov, outer_lr: 0.7, outer_momentum: 0.9}
  streaming:
    <<: *diloco
    fragments: strided
    layers_per_fragment: 1
    overlap_steps: [1]
    mixing: 0.5
    codec: e3m0
runs:
  data_parallel: {method: data_parallel, corpus: rows, replicas: 1, sizes: ladder, seeds: [0], variants: {batch: {}}}
  diloco: {method: diloco, corpus: rows, replicas: 2, sizes: ladder, seeds: [0], variants: {m2: {}}}
  streaming: {method: streaming, corpus: rows, replicas: 2, sizes: ladder, seeds: [0], variants: {h30: {}}}
"""
PLAN = """
rungs:
  a: {seeds: 1, tuned_at: a}
  b: {seeds: 1, tuned_at: a, rows: [data_parallel/batch, diloco/m2], gpu: true}
rows:
  data_parallel/batch: {lines: [lr]}
  diloco/m2: {from: data_parallel/batch}
  streaming/h30: {from: data_parallel/batch, lines: [lr]}
lines:
  lr: {begin: 0.01, values: [0.01]}
"""
#: What a GPU's machine need not have.
MISSING = ["sentencepiece", "datasets", "pyarrow", "transformers", "seaborn", "matplotlib", "papermill", "nbformat"]
MISSING += ["IPython", "ipywidgets", "dvc"]
THERE = """
import sys
sys.modules.update(dict.fromkeys({missing!r}))
from pathlib import Path
from pipelines import gpu
from pipelines.ladder.plan import Ladder
if __name__ == "__main__":  # workers import this file
    here = Path({here!r})
    ladder = Ladder(here / "ladder", here / "there", here / "results")
    sys.exit(gpu.main({words!r}, ladder, here / "ladder.tar.xz", here / "gpu"))
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a ladder that has been prepared, tuned and packed."""
    folder = tmp_path_factory.mktemp("packed")
    ladder = small_ladder(folder, tmp_path_factory.mktemp("build") / "ladder", METHODS, PLAN)
    ladder.tuned_file("a").parent.mkdir(parents=True)
    found = {name: {"values": {"lr": 0.01}, "trials": 1} for name in ("data_parallel/batch", "diloco/m2")}
    ladder.tuned_file("a").write_text(json.dumps(found))
    as_if_predicted(ladder)
    assert gpu.main(["pack"], ladder, folder / "ladder.tar.xz", folder / "gpu") == 1  # there is nothing to pack yet
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "cores", lambda: 1)
        prepare(ladder)
    assert gpu.main(["pack"], ladder, folder / "ladder.tar.xz", folder / "gpu") == 0
    return folder


@pytest.fixture
def here(packed: Path, tmp_path: Path) -> Path:
    """A copy of it, as a GPU's machine has it: what the ladder has built is in the archive alone."""
    return Path(shutil.copytree(packed, tmp_path / "here"))


def there(here: Path, *words: str) -> str:
    """Run the command on a machine that has what was packed and the source, and lacks what MISSING names."""
    (here / "there.py").write_text(THERE.format(missing=MISSING, here=str(here), words=list(words)))
    command = [sys.executable, str(here / "there.py")]
    environment = clean_environment(PYTHONPATH=str(Path(gpu.__file__).parents[1]), OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_part_runs_with_nothing_to_install_and_is_done_once(here: Path) -> None:
    said = there(here, "--small", "--parts", "codecs,offload,graph,ranks,speed")
    assert [line.split(":")[0] for line in said.splitlines()][-5:] == ["codecs", "offload", "graph", "ranks", "speed"]
    (file,) = (here / "gpu").glob("*.json")
    told = json.loads(file.read_text())
    assert told["small"]
    found = told["parts"]
    assert all(row["bit_equal"] for row in found["codecs"].values())
    assert found["offload"]["bit_equal"]
    assert found["graph"]["bit_equal"]
    assert found["ranks"]["bit_equal"]
    assert found["ranks"]["processes"]["ranks"] == 2
    timed = [(row["precision"], row["compiled"]) for row in found["speed"]["models"]]
    assert timed == [(some.precision, some.compiled) for some in gpu.SMALL.speeds]
    assert all(row["share_of_product"] > 0 for row in found["speed"]["models"])
    shown = (here / "gpu" / "README.md").read_text()
    assert f"## {told['device']}" in shown
    assert "sizes of a test" in shown
    assert there(here, "--parts", "codecs,offload").splitlines() == ["codecs: done before", "offload: done before"]


def test_points_go_on_where_time_was_up_and_are_trained_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ladder = Ladder(here / "ladder", here / "there", here / "results")

    def said(*words: str) -> str:
        assert gpu.main([*words], ladder, here / "ladder.tar.xz", here / "gpu") == 0
        return capsys.readouterr().out

    there(here, "--parts", "tuning", "--rungs", "a", "--rows", "streaming/h30")
    said("--parts", "points", "--minutes", "0.05")  # less than what is kept for writing a checkpoint
    (file,) = (here / "gpu").glob("*.json")
    told = json.loads(file.read_text())["parts"]
    assert (told["tuning"], told["points"]) == ({"a": {"trials": 1}}, {"b": {"done": 0, "of": 2}})
    assert (here / "results" / "tuning" / "a" / "streaming" / "h30" / "lr=0.01.json").exists()
    assert "not tuned yet: streaming/h30" not in said("--parts", "points", "--rungs", "a", "--minutes", "0.05")
    assert "data_parallel/batch at b, seed 0: " in said("--parts", "points")
    assert json.loads(file.read_text())["parts"]["points"] == {"b": {"done": 2, "of": 2}}
    points = sorted((here / "results" / "points" / "b").rglob("*.json"))
    assert [point.parent.name for point in points] == ["batch", "m2"]
    assert "| b | 2 of 2 |" in (here / "gpu" / "README.md").read_text()
    assert "data_parallel/batch" not in said("--parts", "points")


def test_a_row_that_is_not_tuned_yet_is_named(here: Path) -> None:
    assert "a: not tuned yet: streaming/h30" in there(here, "--parts", "points", "--rungs", "a", "--minutes", "0.05")


def test_a_part_that_fails_leaves_the_others(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(bench: gpu.Bench) -> dict[str, Any]:
        raise AssertionError("no such device")

    done = {"b": {"done": 1, "of": 2}}
    for name, measure in (("codecs", broken), ("points", lambda bench: done)):
        monkeypatch.setitem(gpu.PARTS, name, dataclasses.replace(gpu.PARTS[name], measure=measure))
    ladder = Ladder(here / "ladder", here / "there", here / "results")
    assert gpu.main(["--parts", "codecs,points"], ladder, here / "ladder.tar.xz", here / "gpu") == 1
    assert "codecs: AssertionError: no such device" in capsys.readouterr().err
    (file,) = (here / "gpu").glob("*.json")
    assert json.loads(file.read_text())["parts"] == {"points": done}


@pytest.mark.parametrize("starts", [True, False])
def test_processes_share_a_gpu_where_there_is_a_service_for_it(
    starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(
        f'#!/bin/sh\necho "$1 $(cat) $CUDA_MPS_PIPE_DIRECTORY" >> {tmp_path}/said\nexit {int(not starts)}\n'
    )
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with gpu.shared_gpu():
        place = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
        assert (place is not None) == starts
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    said = (tmp_path / "said").read_text().splitlines()
    if starts:
        assert said == [f"-d  {place}", f" quit {place}"]
    else:
        assert len(said) == 1
        assert "returned non-zero exit status 1.: processes take turns on the GPU" in capsys.readouterr().err


def test_what_is_wrong_is_said_in_a_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ladder = Ladder(here / "ladder", here / "elsewhere", here / "results")
    assert gpu.main(["--parts", "codec"], ladder, here / "ladder.tar.xz", here / "gpu") == 1
    assert "no part named 'codec'; did you mean 'codecs'" in capsys.readouterr().err
    assert gpu.main([], ladder, here / "none.tar.xz", here / "gpu") == 1
    assert "none.tar.xz is missing: `make gpu-pack` makes it" in capsys.readouterr().err
