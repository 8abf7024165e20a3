"""The launcher: it returns what the run returned, fails when a rank fails, and takes its ranks along."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest

from lowcomm import train as training
from lowcomm.experiment.config import RunConfig
from lowcomm.experiment.project import overrides
from lowcomm.experiment.run_folder import RunFolder
from lowcomm.experiment.train import digests
from lowcomm.settings import ConfigError
from pipelines import launch as launching
from pipelines.launch import (
    Job,
    LaunchError,
    Tail,
    _clear_others,
    _digest,
    curve_svg,
    launch,
    launch_all,
    launch_in_turn,
    make_job,
    torchrun_command,
)
from pipelines.project import BUILD, run_points
from tests.conftest import command_line, settings_of, small_run
from tests.harness import ROOT, Group, clean_environment, command, refused

SETTINGS = settings_of(small_run("diloco_m2"))


def test_launch_returns_the_summary(corpus: Path, tmp_path: Path) -> None:
    folders = {"out": tmp_path / "out", "times": tmp_path / "times", "data": corpus}
    summary = launch("diloco_m2", scale="smoke", settings=SETTINGS, **folders)
    assert summary == json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["environment"]["transport"] == "ProcessTransport"
    times = json.loads((tmp_path / "times" / "times.json").read_text())
    assert times["tokens_per_s"] > 0


def test_jobs_in_turn_are_those_of_single_launches(corpus: Path, tmp_path: Path) -> None:
    """The same processes train two different runs, and end with each as a launch of its own does."""
    jobs = [
        make_job(
            run,
            scale="smoke",
            settings=settings_of(small_run(run, **more)),
            out=tmp_path / run,
            times=tmp_path / f"{run}-times",
            data=corpus,
        )
        for run, more in (("diloco_m2", {}), ("protocol", {"method": {"boundary": {"update_every_steps": 6}}}))
    ]
    two, four = jobs
    assert (two.config.ranks, four.config.ranks) == (2, 4)
    with pytest.raises(LaunchError, match=r"must have equally many ranks, got \[2, 4\]"):
        launch_in_turn(jobs)
    assert not list(tmp_path.glob("protocol*"))
    faster = make_job(
        "diloco_m2",
        scale="smoke",
        settings=[*two.overridden, "train.lr=0.01"],
        out=tmp_path / "faster",
        times=tmp_path / "faster-times",
        data=corpus,
    )
    found = launch_in_turn([two, faster])
    assert [s["run"]["train"]["lr"] for s in found] == [two.config.train.lr, 0.01]
    assert launch_in_turn([faster]) == found[1:]


def test_launch_refuses_bad_settings_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key diloco_m2.train.stepz; did you mean 'steps'"):
        launch("diloco_m2", scale="smoke", settings=["train.stepz=3"], out=tmp_path / "out", times=tmp_path / "times")
    assert not (tmp_path / "out").exists()


def test_a_failing_rank_fails_the_launch_with_its_message(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"(?s)diloco_m2, seed 0 failed with exit code 1.*no corpus in .*nowhere"):
        launch(
            "diloco_m2",
            scale="smoke",
            settings=SETTINGS,
            out=tmp_path / "out",
            times=tmp_path / "times",
            data=tmp_path / "nowhere",
        )


@pytest.mark.fault("the notebook that trains is killed", "its ranks end, with a checkpoint")
def test_ranks_stop_when_their_launcher_is_killed(corpus: Path, tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from pipelines.launch import launch;"
        f"launch('diloco_m2', scale='smoke', settings={SETTINGS} + ['train.steps=100000'],"
        f"out=Path({str(tmp_path / 'out')!r}), times=Path({str(tmp_path / 'times')!r}), data=Path({str(corpus)!r}))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], env=clean_environment(), stderr=subprocess.DEVNULL)
    metrics = tmp_path / "out" / "metrics" / "rank-001.jsonl"
    while not (metrics.exists() and metrics.stat().st_size > 500):
        assert child.poll() is None
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    deadline = time.monotonic() + 30
    while not list((tmp_path / "out").glob("checkpoints/step-????????")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list((tmp_path / "out").glob("checkpoints/step-????????"))
    time.sleep(1.0)
    size = metrics.stat().st_size
    time.sleep(0.5)
    assert metrics.stat().st_size == size  # nobody trains on


def _wait_until_it_trains(out: Path, child: subprocess.Popen) -> None:
    metrics = out / "metrics" / "rank-001.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.exists() and metrics.stat().st_size > 500):
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _ends_within(seconds: float, processes: list[psutil.Process]) -> bool:
    """Tell whether all end; who has ended and waits for init to take notice has ended."""

    def lives(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + seconds
    while (alive := [p for p in processes if lives(p)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in alive:
        process.kill()
    return not alive


@pytest.mark.fault("`dvc repro` is stopped or killed", "its notebook and ranks end with it")
@pytest.mark.longest
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_dvc_runs_ends_with_it(number: int, corpus: Path, tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\nfrom pipelines.launch import launch\n"
        f"launch('diloco_m2', scale='smoke', settings={SETTINGS} + ['train.steps=100000'],"
        f"out=Path({str(tmp_path / 'out')!r}), times=Path({str(tmp_path / 'times')!r}), data=Path({str(corpus)!r}))"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbformat.write(notebook, tmp_path / "trains.ipynb")
    stage = f"{sys.executable} -m pipelines.run_notebook trains.ipynb trains-test"
    (tmp_path / "dvc.yaml").write_text(json.dumps({"stages": {"trains": {"cmd": stage}}}))
    dvc = [sys.executable, "-m", "dvc"]
    shutil.copy(ROOT / "params.yaml", tmp_path)
    silent = {"cwd": tmp_path, "env": clean_environment(), "stderr": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    subprocess.run([*dvc, "init", "--no-scm", "-q"], check=True, **silent)
    child = subprocess.Popen([*dvc, "repro"], **silent)
    _wait_until_it_trains(tmp_path / "out", child)
    started = psutil.Process(child.pid).children(recursive=True)
    assert len(started) >= 4  # the runner, its kernel, the agent and the ranks
    child.send_signal(number)
    child.wait(120)
    assert _ends_within(120, started)
    for executed in BUILD.glob("notebooks/*/trains-test.ipynb"):
        executed.unlink()
    assert list((tmp_path / "out").glob("checkpoints/step-????????"))


@pytest.mark.fault("torchrun itself is killed (SIGKILL)", "its ranks end")
@pytest.mark.longest
def test_ranks_end_when_torchrun_is_killed(corpus: Path, tmp_path: Path) -> None:
    """Their store is gone with it, so that they cannot agree where to stop."""
    config = small_run("diloco_m2", train={"steps": 10**6}, checkpoint={"every_steps": 20})
    words = torchrun_command(2, "lowcomm.train", *command_line(config, corpus, tmp_path / "out"))
    child = subprocess.Popen(words, env=clean_environment(), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    _wait_until_it_trains(tmp_path / "out", child)
    ranks = psutil.Process(child.pid).children(recursive=True)
    child.kill()
    child.wait()
    assert _ends_within(120, ranks)


def test_a_run_made_by_other_source_starts_over(corpus: Path, tmp_path: Path, capsys) -> None:
    out, times = tmp_path / "out", tmp_path / "times"
    (out / "checkpoints").mkdir(parents=True)
    (out / "run.json").write_text("{}")
    times.mkdir()
    (times / "source.sha256").write_text("another")
    launch("diloco_m2", scale="smoke", settings=SETTINGS, out=out, times=times, data=corpus)
    assert "the source has changed since its checkpoint was written; starting over" in capsys.readouterr().out


def test_a_folder_that_holds_other_things_is_left_alone(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(LaunchError, match="holds thesis.tex, which no run puts there: choose another one"):
        launch("diloco_m2", scale="smoke", settings=SETTINGS, out=tmp_path, times=tmp_path.with_name("t"), data=corpus)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


SWEEP = ["train.steps=12", "train.warmup_steps=3", "method.sync_every_steps=4"]
SWEEP += [s for s in SETTINGS if s.startswith(("model", "data", "train.eval"))]
NAMES = [f"m{m}_budget_{b}" for m in (2, 4) for b in (1, 2, 4)]


def test_a_sweep_is_trained_whole_and_goes_on_where_it_was_interrupted(corpus: Path, tmp_path: Path) -> None:
    """Two replica counts: on two cores, those of two ranks are processes, and two of those of four are threads."""

    def launched() -> list[dict]:
        data = ["data.corpus=docstrings"]
        return launch_all("overtraining_streaming", scale="smoke", settings=SWEEP + data, out=out, data=corpus)

    out, times = tmp_path / "out", tmp_path / "out-times"
    first = launched()
    assert [s["run"]["variant"] for s in first] == NAMES
    assert [s["run"]["replicas"] for s in first] == [2, 2, 2, 4, 4, 4]
    assert sorted(p.name for p in out.iterdir()) == sorted(NAMES)
    assert len({s["val_loss"] for s in first}) == 2  # all settings that differ are overridden but the replicas
    # As an interruption leaves it: a marker, some points complete, one under way, one of another source, and one under
    # way with other settings, whose checkpoint is of no use.
    other, gone, changed, kept = (out / n / "seed0" for n in (*NAMES[:3], NAMES[5]))
    card = hashlib.sha256((corpus / "card.json").read_bytes()).hexdigest()
    settings = overrides([*SWEEP, "data.corpus=docstrings"])
    points = [p for p in run_points("overtraining_streaming", scale="smoke", **settings) if p.variant != NAMES[2]]
    source = RunFolder(kept, times / NAMES[5] / "seed0").made_with
    assert source
    (times / "unfinished").write_text("".join(f"{source} {card} {_digest(p)}\n" for p in points))
    (changed / "summary.json").rename(changed / "run.json")
    (changed / "checkpoints" / "step-00000004").mkdir(parents=True)
    (times / other.relative_to(out) / "source.sha256").write_text("another")
    (under_way,) = (p for p in points if p.variant == NAMES[1])
    (gone / "summary.json").unlink()
    made_from = digests(json.loads((corpus / "card.json").read_text()))
    (gone / "run.json").write_text(json.dumps(under_way.identity() | made_from))
    for folder in (out, times):
        (folder / "m2_budget_3" / "seed0").mkdir(parents=True)
    (times / "m2_budget_3" / "seed0" / "source.sha256").write_text("of a variant that is no more")
    before = {n: (out / n / "seed0" / "summary.json").stat().st_mtime_ns for n in NAMES if n not in NAMES[1:3]}
    assert launched() == first
    after = {n: (out / n / "seed0" / "summary.json").stat().st_mtime_ns for n in NAMES}
    assert [n for n in before if after[n] == before[n]] == NAMES[3:]
    assert sorted(p.name for p in out.iterdir()) == sorted(NAMES)
    assert not (times / "unfinished").exists()


def test_only_what_runs_have_left_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Folders that are called as a run's may be anybody's: a summary of the run, or its digest, must say whose."""
    root, times = tmp_path / "out", tmp_path / "out-times"
    old, begun, own, other = (root / name / "seed0" for name in ("old", "begun", "own", "another_tool"))
    for folder in (old, begun, own, other):
        for inner in ("metrics", "checkpoints"):
            (folder / inner).mkdir(parents=True)
    for folder in (old, own):
        (folder / "summary.json").write_text('{"complete": true, "run": {"name": "diloco_m2"}}')
    (other / "summary.json").write_text('{"accuracy": 1.0}')
    for folder in (begun, own, root / "gone"):
        (mark := times / folder.relative_to(root) / "source.sha256").parent.mkdir(parents=True)
        mark.write_text("a digest")
    _clear_others(root, times, "diloco_m2", {own})
    assert sorted(p.name for p in root.iterdir()) == ["another_tool", "own"]
    assert all((other / name).exists() for name in ("metrics", "checkpoints", "summary.json"))
    assert sorted(capsys.readouterr().out.splitlines()) == [
        f"{name}/seed0 is no variant and seed of diloco_m2 any more: removed" for name in ("begun", "old")
    ]


def _budgets(out: Path, corpus: Path, *settings: str) -> list[dict]:
    """Train a sweep of three runs, which have one rank each unless `settings` say otherwise."""
    settings = [*SWEEP[:2], *SWEEP[3:], "replicas=1", "data.corpus=docstrings", *settings]
    return launch_all("overtraining_data_parallel", scale="smoke", settings=settings, out=out, data=corpus)


def test_runs_side_by_side_are_those_of_one_after_the_other(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "cores", lambda: 2)
    together = _budgets(tmp_path / "two", corpus)
    assert [s["run"]["variant"] for s in together] == ["budget_1", "budget_2", "budget_4"]
    logs = sorted(p.name for p in (tmp_path / "two-times").glob("log*.txt"))
    assert logs == ["log-1-0.txt", "log-1-1.txt"]
    monkeypatch.setattr(launching, "cores", lambda: 1)
    assert _budgets(tmp_path / "one", corpus) == together


def test_runs_of_more_ranks_than_cores_are_the_same_as_threads(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks on one core: threads, one run after the other; on two: processes."""
    found = {}
    for cores, log in ((1, "log-threads-0.txt"), (2, "log-2-0.txt")):
        monkeypatch.setattr(launching, "cores", lambda cores=cores: cores)
        found[cores] = _budgets(tmp_path / f"on-{cores}", corpus, "replicas=2")
        assert [p.name for p in (tmp_path / f"on-{cores}-times").glob("log*.txt")] == [log]
        for name in ("budget_1", "budget_4"):
            model = tmp_path / f"on-{cores}" / name / "seed0" / "model.safetensors"
            found[cores].append(hashlib.sha256(model.read_bytes()).hexdigest())
    by = [s.pop("environment")["transport"] for some in found.values() for s in some[:3]]
    assert by == 3 * ["ThreadTransport"] + 3 * ["ProcessTransport"]
    assert found[1] == found[2]


@pytest.mark.fault("one of two runs side by side fails", "the other keeps its checkpoint")
def test_where_one_of_two_fails_the_other_keeps_its_checkpoint(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "cores", lambda: 2)
    times = tmp_path / "out-times"
    times.mkdir()
    (times / "budget_2").write_text("in the way")
    with pytest.raises(LaunchError, match="(?s)budget_2, seed 0 failed with exit code 1.*cannot be written"):
        _budgets(tmp_path / "out", corpus, "train.steps=100000", "train.log_every=1")
    assert not (tmp_path / "out" / "budget_4" / "seed0" / "summary.json").exists()
    begun = (tmp_path / "out" / "budget_1" / "seed0" / "metrics").exists()
    assert begun == bool(list((tmp_path / "out" / "budget_1" / "seed0").glob("checkpoints/step-????????")))
    assert "forcefully" not in (times / "log-1-0.txt").read_text()


def _job(config: RunConfig) -> Job:
    return Job(config, launching.PROJECT.run_folder(config), Path("corpus"))


def test_jobs_are_dealt_to_sides_of_equal_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two cores: of three runs of eight ranks and more, the one of most, which would be left over, is processes."""
    monkeypatch.setattr(launching, "cores", lambda: 2)
    jobs = [_job(c) for c in run_points("noloco", scale="laptop")]
    ((ranks, ((longest,),)), (threads, sides)) = launching._side_by_side(jobs)
    assert (ranks, longest.config.ranks, threads) == (16, 16, 0)
    assert [[job.config.ranks for job in side] for side in sides] == [[8], [8]]
    budgets = run_points("overtraining_data_parallel", scale="laptop")
    dealt = launching._dealt([_job(c) for c in budgets], 2)
    assert [[job.config.variant for job in side] for side in dealt] == [["budget_4"], ["budget_2", "budget_1"]]


def test_a_sweep_leaves_other_runs_alone(corpus: Path, tmp_path: Path) -> None:
    folders = {"out": tmp_path / "mine", "times": tmp_path.with_name("times"), "data": corpus}
    launch("diloco_m2", scale="smoke", settings=SETTINGS, **folders)
    with pytest.raises(LaunchError, match="holds runs that are none of data_parallel's: mine; choose another folder"):
        launch_all("data_parallel", scale="smoke", settings=["data.corpus=docstrings"], data=corpus, out=tmp_path)
    assert (tmp_path / "mine" / "model.safetensors").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ranks_that_are_told_through_the_launcher_end_at_once(number: int, corpus: Path, tmp_path: Path) -> None:
    words = [*command_line(small_run("diloco_m2", train={"steps": 10**6}), corpus, tmp_path / "out"), "--seed", "0"]
    log = tmp_path / "log.txt"
    with log.open("w") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "pipelines.forked", "2", *words],
            env=clean_environment(),
            stderr=file,
            start_new_session=True,
        )
    while not list((tmp_path / "out").glob("metrics/rank-001.jsonl")):
        assert child.poll() is None, log.read_text()
        time.sleep(0.05)
    child.send_signal(number)
    assert child.wait(60) == 0, log.read_text()
    assert list((tmp_path / "out").glob("checkpoints/step-????????"))
    assert "stopped diloco_m2 after step" in log.read_text()


def test_a_stop_ends_a_sweep_between_its_points_too(corpus: Path, tmp_path: Path) -> None:
    words = ["overtraining_streaming", "--scale", "smoke", "--all", "--data", str(corpus)]
    words += ["--out", str(tmp_path), "--set", "data.corpus=docstrings", "--set", "train.log_every=1"]
    words += [w for s in SWEEP for w in ("--set", s)]
    command = torchrun_command(2, "lowcomm.train", *words)
    child = subprocess.Popen(command, env=clean_environment(), stderr=subprocess.DEVNULL)
    while not (tmp_path / NAMES[0] / "seed0" / "metrics" / "rank-001.jsonl").exists():
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGTERM)
    child.wait(120)
    times = RunFolder.beside(tmp_path).times
    begun = [n for n in NAMES[:3] if (times / n / "seed0" / "source.sha256").exists()]
    assert len(begun) < 3
    for name in begun:  # complete, or a checkpoint to go on from
        folder = tmp_path / name / "seed0"
        assert (folder / "summary.json").exists() or list(folder.glob("checkpoints/step-????????"))


def test_the_command_line_refuses_what_contradicts_all(tmp_path: Path) -> None:
    def told(*words: str, **environment: str) -> str:
        done = Group(command, *words, **environment).wait()
        assert done.returncode == 1
        return done.stdout

    sweep = ("overtraining_streaming", "--scale", "smoke")
    assert "run overtraining_streaming is a sweep: choose one of its variants, m2_budget_1" in told(*sweep)
    assert "--variant, --seed and --times mean nothing with it" in told(*sweep, "--all", "--seed", "1")
    assert "no point of run overtraining_streaming has 3 ranks" in told(*sweep, "--all", WORLD_SIZE="3")
    jobs = tmp_path / "jobs.json"
    jobs.write_text('["overtraining_streaming"]')
    assert "jobs.json must be a JSON list of lists of words" in told("--jobs", str(jobs))


def test_each_job_of_a_file_says_whether_it_replaces_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, bool]] = []

    def trains(config: RunConfig, *_: Any, again: bool, **__: Any) -> dict[str, Any]:
        told.append((config.seed, again))
        return {"complete": False, "step": 1}

    monkeypatch.setattr(training, "train_in_threads", trains)
    jobs, words = tmp_path / "jobs.json", ["diloco_m2", "--scale", "smoke"]
    jobs.write_text(json.dumps([[*words, "--seed", "3", "--again"], [*words, "--seed", "4"]]))
    assert training.main(["--jobs", str(jobs)]) == 0
    assert told == [(3, True), (4, False)]
    jobs.write_text(json.dumps([[*words, "--slot", "0"]]))
    with pytest.raises(ConfigError, match=r"jobs.json: a job names a run and none of .*--slot.*, got 'diloco_m2 "):
        training._jobs(training._parser().parse_args(["--jobs", str(jobs)]))


def test_runs_in_turn_on_several_machines_have_equally_many_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are placed on machines once, for one number of stages; on a single machine their places do not matter."""
    jobs, words = tmp_path / "jobs.json", ["diloco_m2", "--scale", "smoke"]
    jobs.write_text(json.dumps([words, ["noloco_routing", "--variant", "dp4_fixed", "--scale", "smoke"]]))
    args = training._parser().parse_args(["--jobs", str(jobs)])
    stages = sorted({config.stages for config, *_ in training._jobs(args)})
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert len(training._jobs(args)) == len(stages) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    told = "runs in turn on several machines must have equally many stages, as each rank has one place, got "
    assert told + str(stages) in refused(training._jobs, args)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--list --scale larger", "no scale named 'larger'"),
        ("diloco_m2 --quorum 0 --grace 1", "--quorum, --grace: this means nothing without --store"),
        ("diloco_m2 --host 10.0.0.1", "--host: this means nothing without --store"),
        ("--jobs jobs.json --seed 0 --again", "--again, --seed: this means nothing beside --jobs"),
        ("--jobs jobs.json --set train.steps=3 --out a", "--out, --set: this means nothing beside --jobs"),
    ],
)
def test_options_that_mean_nothing_are_refused(words: str, message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        training.main(words.split())
    assert message in capsys.readouterr().err


def test_the_tail_gives_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tail = Tail(path)
    assert tail.rows() == []
    path.write_text('{"step": 1}\n{"st')
    assert tail.rows() == [{"step": 1}]
    assert tail.rows() == []
    path.write_text('{"step": 1}\n{"step": 2}\n')
    assert tail.rows() == [{"step": 2}]
    path.write_text("")  # a fresh start truncates
    assert tail.rows() == []


def test_the_live_curve_spans_the_run() -> None:
    assert curve_svg([(1, 5.0)], 100) == ""
    svg = curve_svg([(1, 6.0), (50, 4.0)], 100)
    assert 'points="4.8,2.0 240.0,88.0"' in svg
