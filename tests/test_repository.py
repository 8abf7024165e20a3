"""The repository as a whole: notebooks, stages, results and README tell one story."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest
import yaml

from lowcomm.settings import ConfigError
from pipelines import sources
from pipelines.clean import cleaned
from pipelines.index import BEGIN, END, FAMILIES, family, index, minutes, readme_block, stages, with_block
from pipelines.project import ROOT, load_params
from pipelines.report import paper
from pipelines.run_notebook import check_parameters
from tests.harness import clean_environment

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
STAGES = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
WITHOUT_NOTEBOOK = ("sources", "index")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_clean_on_disk(path: Path) -> None:
    assert path.read_text() == cleaned(path.read_text()), "run `make lint`"


def test_cleaning_is_deterministic_and_keeps_only_checked_outputs() -> None:
    notebook = nbformat.v4.new_notebook()
    stream = nbformat.v4.new_output("stream", name="stdout", text="42\n")
    for source in ("print(42)", "# NBVAL_CHECK_OUTPUT\nprint(42)"):
        notebook.cells.append(nbformat.v4.new_code_cell(source, outputs=[stream], execution_count=7))
    once = cleaned(nbformat.writes(notebook))
    assert cleaned(once) == once
    dropped, kept = nbformat.reads(once, as_version=4).cells
    assert (dropped.outputs, dropped.execution_count) == ([], None)
    assert kept.outputs[0]["text"] == "42\n"


def test_the_runner_refuses_unknown_parameters() -> None:
    with pytest.raises(ConfigError, match=r"20_train.ipynb has no parameter 'rum'; did you mean 'run'"):
        check_parameters(ROOT / "notebooks" / "20_train.ipynb", {"rum": "x"})


def test_the_runner_reports_a_failing_cell(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("raise ValueError('no such thing')")])
    path = tmp_path / "fails.ipynb"
    path.write_text(cleaned(nbformat.writes(notebook)))
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.run_notebook", str(path), "fails-test"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "fails.ipynb failed in cell 1: ValueError: no such thing" in done.stderr


@pytest.mark.parametrize("stage", [name for name in STAGES if name != "sources"])
def test_a_stage_depends_on_the_modules_that_it_imports(stage: str) -> None:
    entry = STAGES[stage].get("do", STAGES[stage])
    source = "pipelines/index.py" if stage == "index" else re.search(r"notebooks/\S+\.ipynb", entry["cmd"]).group()
    assert source in entry["deps"]
    assert f"build/sources/{Path(source).stem}.txt" in entry["deps"]


def test_sources_are_listed_with_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BUILD", tmp_path)
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "of_a_notebook_that_is_no_more.txt").write_text("")
    sources.main()
    assert {p.stem for p in (tmp_path / "sources").iterdir()} == {p.stem for p in NOTEBOOKS} | {"index"}
    listed = dict(line.split()[::-1] for line in (tmp_path / "sources" / "20_train.txt").read_text().splitlines())
    assert {"lowcomm/__init__.py", "lowcomm/train.py", "lowcomm/comm.py"} <= set(listed)  # comm: train's, not its own
    assert "lowcomm/simulate.py" not in listed
    assert listed["lowcomm/comm.py"] == hashlib.sha256((ROOT / "lowcomm" / "comm.py").read_bytes()).hexdigest()


def test_reading_results_and_launching_runs_needs_no_torch() -> None:
    """Two seconds of every notebook, and of everything that depends on it, otherwise."""
    modules = "report", "runs", "launch", "data", "plots", "simulate"
    code = f"import sys; from lowcomm import {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=clean_environment(), check=False).returncode == 0


def test_training_stages_cache_all_and_tables_are_in_git() -> None:
    for name, stage in STAGES.items():
        outs = stage.get("do", stage)["outs"]
        uncached = [isinstance(o, dict) and next(iter(o.values())).get("cache") is False for o in outs]
        paths = [next(iter(o)) if isinstance(o, dict) else o for o in outs]
        assert all(uncached) == all(p.startswith("results/") for p in paths), name
        assert all(uncached) or not any(uncached), f"{name}: one uncached output switches off the run cache"


def test_the_index_lists_every_table() -> None:
    listed = {d for d in STAGES["index"]["deps"] if d.endswith(".md")}
    made = set()
    for name, stage in STAGES.items():
        if name in WITHOUT_NOTEBOOK:
            continue
        keys = load_params()["corpora"] if stage.get("foreach") == "${corpora}" else [""]
        for out in stage.get("do", stage)["outs"]:
            path = next(iter(out)) if isinstance(out, dict) else out
            made |= {path.replace("${key}", k) for k in keys if path.endswith(".md")}
    assert listed == made


def test_committed_results_are_those_of_the_committed_code() -> None:
    dvc = Path(sys.executable).with_name("dvc")
    done = subprocess.run(
        [dvc, "repro", "--dry", "--allow-missing"],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Running stage" not in done.stdout, done.stdout


def test_readme_and_index_show_the_results() -> None:
    assert (ROOT / "results" / "README.md").read_text() == index()
    readme = (ROOT / "README.md").read_text()
    assert BEGIN in readme
    assert END in readme
    assert with_block(readme) == readme
    assert "All four papers" in readme_block()


def test_minutes_of_all_stages_are_shown_paper_by_paper() -> None:
    names = stages()
    assert {family(name, load_params()["runs"]) for name in names if name not in WITHOUT_NOTEBOOK} == set(FAMILIES)
    some = [("train@diloco_m2", 60.0), ("streaming_diloco_table5", 30.0), ("train@noloco", 120.0), ("all", 210.0)]
    shown = minutes(pd.DataFrame(some, columns=["stage", "seconds"])).set_index("")
    assert list(shown.loc["Streaming DiLoCo"]) == ["1.0", "0.5", "1.5"]
    assert list(shown.loc["NoLoCo"]) == ["2.0", "0.0", "2.0"]
    assert list(shown.loc["all"]) == ["3.0", "0.5", "3.5"]


def test_readme_lists_every_module() -> None:
    readme = (ROOT / "README.md").read_text()
    for folder in ("lowcomm", "pipelines", "notebooks"):
        for path in (ROOT / folder).iterdir():
            if path.suffix in (".py", ".ipynb") and path.stem not in ("__init__", "conftest"):
                assert path.name in readme, f"{folder}/{path.name} is not in the README's tree"


def test_environment_yml_has_the_pins_of_pyproject() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {*project["dependencies"], *project["optional-dependencies"]["dev"]}
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(d["pip"] for d in conda if isinstance(d, dict))
    assert {p for p in pip if not p.startswith("-")} == pins
    assert "-e .[dev]" in pip
    locked = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    for pin in pins:
        name, version = pin.split("==")
        assert locked[name] == version


def test_published_numbers_say_where_they_stand_and_how_sure_they_are() -> None:
    for path in (ROOT / "results" / "papers").glob("*.yaml"):
        for name, table in paper(path.stem)["tables"].items():
            assert table["where"], name
            assert table["certainty"] in ("printed", "derived", "inferred"), name
            columns = {frozenset(r) for r in table["rows"]}
            assert len(columns) == 1, f"{path.stem}, {name}: rows have different columns"


def test_a_paper_without_a_file_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match="no paper named 'streaming_dilocko'; did you mean 'streaming_diloco'"):
        paper("streaming_dilocko")


def test_the_graph_reproduces_at_smoke_scale(tmp_path: Path) -> None:
    """In a copy of the checkout: a table and all that it needs, and a sweep; a clean status; and then nothing to do.

    The other tables are run at smoke scale by nbval.
    """
    targets = ["streaming_diloco_table5", "train@overtraining_data_parallel"]
    copy = tmp_path / "copy"
    ignore = shutil.ignore_patterns(".git", ".venv", "build", "dvc.lock", "laptop", "*.egg-info", "tmp", "cache")
    shutil.copytree(ROOT, copy, ignore=ignore)
    params = (copy / "params.yaml").read_text()
    params = params.replace("\nscale: laptop\n", "\nscale: smoke\n").replace("seeds: [0, 1, 2]", "seeds: [0]")
    (copy / "params.yaml").write_text(params)
    subprocess.run(["git", "init", "-q"], cwd=copy, check=True)
    path = f"{Path(sys.executable).parent}:{clean_environment()['PATH']}"
    environment = clean_environment(PATH=path, PYTHONPATH=str(copy))

    def dvc(*words: str) -> str:
        done = subprocess.run(["dvc", *words], cwd=copy, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "Running stage 'streaming_diloco_table5'" in dvc("repro", *targets)
    assert "Data and pipelines are up to date" in dvc("status", "--with-deps", *targets)
    for folder in ("lowcomm/__pycache__", "notebooks/.ipynb_checkpoints"):  # what Python and JupyterLab leave behind
        (copy / folder).mkdir(exist_ok=True)
        (copy / folder / "left").touch()
    assert "Running stage" not in dvc("repro", *targets)
    assert (copy / "results" / "smoke" / "streaming_diloco" / "table5.csv").exists()
    assert "DiLoCo, M=4" in (copy / "results" / "smoke" / "streaming_diloco" / "table5.md").read_text()
