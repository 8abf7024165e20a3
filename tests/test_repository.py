"""The repository as a whole: notebooks, stages, results and README tell one story."""

from __future__ import annotations

import json
import math
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
from pipelines import staleness
from pipelines.clean import cleaned
from pipelines.index import index, pages
from pipelines.ladder.plan import LADDER, base_of
from pipelines.project import ROOT, load_params
from pipelines.readme import (
    BEGIN,
    END,
    FAMILIES,
    family,
    losses,
    minutes,
    of_one_size,
    readme_block,
    stages,
    with_blocks,
)
from pipelines.report import markdown, paper
from pipelines.run_notebook import check_parameters
from pipelines.settings import write as write_settings
from tests.harness import clean_environment

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
STAGES = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
WITHOUT_NOTEBOOK = ("sources", "settings", "probes", "ladder_rows", "headline_probes", "headline", "index")


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


@pytest.mark.parametrize("stage", [name for name in STAGES if name not in WITHOUT_NOTEBOOK])
def test_a_table_depends_on_the_code_that_it_reaches_and_training_on_what_decides_its_bits(stage: str) -> None:
    entry = STAGES[stage].get("do", STAGES[stage])
    notebook = Path(re.search(r"notebooks/\S+\.ipynb", entry["cmd"]).group()).stem
    deps = set(entry["deps"])
    if stage == "train":
        assert {"build/settings/${scale}/runs/${key}.json", "build/probes/${key}.json"} <= deps
        assert not any(d.startswith("build/sources") for d in deps)
    elif stage == "data":
        assert deps == {"build/settings/${scale}/corpora/${key}.json", "build/probes/corpora/${key}.json"}
    else:
        assert f"build/sources/{notebook}.txt" in deps
    assert "params" not in entry  # whole sections of parameters would be copied into the lock


def test_a_table_depends_on_all_runs_that_it_reads() -> None:
    for name, stage in STAGES.items():
        if name in WITHOUT_NOTEBOOK or "foreach" in stage:
            continue
        notebook = ROOT / re.search(r"notebooks/\S+\.ipynb", stage["cmd"]).group()
        code = "\n".join(c.source for c in nbformat.read(notebook, as_version=4).cells if c.cell_type == "code")
        named = {run for run in load_params()["runs"] if f'"{run}"' in code}
        listed = {d.rsplit("/", 1)[1].removesuffix(".json") for d in stage["deps"] if "/runs/" in d}
        on_the_ladder = {row.run for row in LADDER.plan.rows.values()}  # of which a table reads points
        assert named - on_the_ladder <= listed, name
        read = {run for run in named if f'read_run("{run}"' in code}
        assert read <= listed, name


def test_a_table_depends_on_all_rows_of_the_ladder_that_it_reads() -> None:
    """It depends on a file for each of them and of what they are held against, or on all points."""
    configs, read = LADDER.configs("0.33M"), 0
    for name, stage in STAGES.items():
        if name in WITHOUT_NOTEBOOK or "foreach" in stage:
            continue
        notebook = ROOT / re.search(r"notebooks/\S+\.ipynb", stage["cmd"]).group()
        code = "\n".join(c.source for c in nbformat.read(notebook, as_version=4).cells if c.cell_type == "code")
        listed = {row for row in LADDER.plan.rows if f"build/ladder/rows/{row}.json" in stage["deps"]}
        assert len(listed) == sum(dep.startswith("build/ladder/rows") for dep in stage["deps"])
        if "LADDER" in code and "results/ladder/points" not in stage["deps"]:
            named = {row for row in LADDER.plan.rows if f'"{row}"' in code}
            assert named
            assert named <= listed <= named | {base_of(row, configs) for row in named & configs.keys()}, name
            read += 1
    assert read >= 5


def test_lists_of_sources_follow_what_a_notebook_reaches() -> None:
    theory = {f"{module}:{name}" for module, name in staleness.of_notebook(ROOT / "notebooks/43_noloco_theory.ipynb")}
    assert {"cells:*", "lowcomm.methods.noloco:contraction_bound", "pipelines.report:write"} <= theory
    assert not any(place.startswith(("lowcomm.comm.", "lowcomm.experiment.train")) for place in theory)
    data = {module for module, _ in staleness.of_command("lowcomm.experiment.data")}
    assert {"lowcomm.experiment.data", "lowcomm.experiment.corpora"} <= data
    training = staleness.modules_of_training()
    assert {"lowcomm.methods.noloco", "lowcomm.codecs.sparse", "lowcomm.comm.world"} <= set(training)
    assert not any(module.startswith(("lowcomm.cost", "pipelines")) for module in training)


def test_digests_of_code_know_no_comments_no_docstrings_and_no_names_of_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digests(source: str) -> list[str]:
        file = tmp_path / f"{hash(source)}.py"
        file.write_text(source)
        return list(staleness.Reach(staleness.parsed(file)).found.values())

    monkeypatch.setattr(staleness, "renamable", lambda: frozenset("fgh"))
    plain = "def f(x):\n    return x + 1\n\nclass A:\n    def g(self):\n        return f(f(2)) - len('')\n\nA().g()\n"
    told = plain.replace("(x):\n", '(x):\n    """Add one."""  # one\n').replace(
        "class A:\n", 'class A:\n    """A."""\n'
    )
    assert digests(plain) == digests(told) == digests(plain.replace("f(", "h("))
    for change in (("+ 1", "+ 2"), ("f(f(2))", "f(2)"), ("f(f(2))", "g(f(2))"), ("len", "sum"), ("A", "B")):
        assert digests(plain) != digests(plain.replace(*change)), change


def test_a_renamed_function_is_no_text_and_no_field() -> None:
    names = staleness.renamable()
    assert {"contraction_bound", "unflatten_into"} <= names
    assert not names & {"__init__", "load_folder", "steps"}  # Python's own, the API's text, a field of settings


def test_settings_of_a_run_hold_what_differs_from_the_defaults(tmp_path: Path) -> None:
    write_settings("smoke", tmp_path)
    points = json.loads((tmp_path / "runs" / "diloco_m2.json").read_text())
    assert [p["seed"] for p in points if "seed" in p] or len(points) == 1
    assert points[0]["method"]["sync_every_steps"] == 30
    assert "mixing" not in points[0]["method"]
    assert {p.stem for p in (tmp_path / "runs").iterdir()} == set(load_params()["runs"])


def test_the_lock_holds_no_dead_stage_and_no_parameters() -> None:
    lock = yaml.safe_load((ROOT / "dvc.lock").read_text())["stages"]
    assert set(lock) == set(stages())
    assert not any("params" in entry for entry in lock.values())


def test_reading_results_and_launching_runs_needs_no_torch() -> None:
    """Two seconds of every notebook, and of everything that depends on it, otherwise."""
    code = "import sys; from pipelines import launch, plots, project, report; import lowcomm.cost.tables;"
    code += " sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=clean_environment(), check=False).returncode == 0


def test_imports_between_rooms_go_one_way(tmp_path: Path) -> None:
    """The contract is kept, and one that a toy breaks is reported."""
    lint = Path(sys.executable).with_name("lint-imports")

    def run(folder: Path) -> subprocess.CompletedProcess[str]:
        environment = clean_environment(PYTHONPATH=str(folder))
        words = [lint, "--no-cache", "--config", str(folder / "pyproject.toml")]
        return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)

    assert run(ROOT).returncode == 0
    for name in ("lowcomm", "pipelines"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "lowcomm" / "codecs" / "upwards.py").write_text("from lowcomm.methods.plan import Plan\n")
    broken = run(tmp_path)
    assert broken.returncode == 1
    assert "lowcomm.codecs.upwards -> lowcomm.methods.plan" in broken.stdout


def test_training_stages_cache_all_and_tables_are_in_git() -> None:
    for name, stage in STAGES.items():
        outs = stage.get("do", stage)["outs"]
        uncached = [isinstance(o, dict) and next(iter(o.values())).get("cache") is False for o in outs]
        paths = [next(iter(o)) if isinstance(o, dict) else o for o in outs]
        assert all(uncached) == all(p.startswith("results/") for p in paths), name
        assert all(uncached) or not any(uncached), f"{name}: one uncached output switches off the run cache"


def test_the_index_depends_on_the_tables_of_all_stages() -> None:
    made = set()
    for name, stage in STAGES.items():
        keys = load_params()["corpora"] if stage.get("foreach") == "${corpora}" else [""]
        for out in stage.get("do", stage)["outs"] if name not in WITHOUT_NOTEBOOK else []:
            path = next(iter(out)) if isinstance(out, dict) else out
            made |= {path.replace("${key}", key) for key in keys if path.startswith("results/")}
    assert {d for d in STAGES["index"]["deps"] if d.startswith("results/")} == made


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


def test_the_readme_shows_rows_of_one_size() -> None:
    """Rows that leave a choice out are of another size, so that their losses must not stand beside the others'."""
    shown = pd.DataFrame({"": ["one", "all", "all", "without"], "size": ["b", "b", "a", "a"], "loss": [1, 2, 3, 4]})
    told = of_one_size(f"**Title**\n\n{markdown(shown)}\n")
    assert told == f"**Title**\n\n{markdown(shown[:2])}\n"


def test_readme_and_index_show_the_results() -> None:
    assert (ROOT / "results" / "README.md").read_text() == index(pages())
    readme = (ROOT / "README.md").read_text()
    assert BEGIN in readme
    assert END in readme
    assert with_blocks(readme) == readme
    with pytest.raises(ConfigError, match=r"README.md must have '<!-- end of results -->' once, got it 0 times"):
        with_blocks(readme.replace(END, ""))
    assert "All four papers" in readme_block()


def test_losses_with_few_seeds_have_no_interval_and_small_sizes_are_not_told() -> None:
    rows = [
        ("diloco/m2", "0.12M", 116128, 37.3, 5, 9.9, 8.8, 11.1),
        ("diloco/m2", "0.33M", 326336, 107.0, 3, 1.25, 0.5, 2.0),
        ("noloco/m4", "0.33M", 326336, 107.0, 2, 3.0, -1.0, 7.0),
        ("diloco/m2", "1.05M", 1053952, 343.0, 1, 2.0, math.nan, math.nan),
        ("honest/mean", "0.33M", 326336, 107.0, 3, 1.0, 0.5, 1.5),
    ]
    columns = ["method", "rung", "parameters", "rounds", "seeds", "gap_pct", "low_pct", "high_pct"]
    told = losses(pd.DataFrame(rows, columns=columns)).set_index("")
    assert list(told.index) == ["DiLoCo on 2 replicas", "NoLoCo on 4"]
    small, large = (f"loss over data-parallel's at {size}" for size in ("0.33M", "1.05M, with the rates of 0.33M"))
    assert list(told.columns[2:]) == [small, large]
    assert told.loc["DiLoCo on 2 replicas", small] == "+1.2 (0.5 to 2.0) %"
    assert told.loc["DiLoCo on 2 replicas", large] == "+2.0 % (1 seed)"
    assert told.loc["NoLoCo on 4", small] == "+3.0 % (2 seeds)"
    assert told.loc["NoLoCo on 4", large] == ""
    assert told.loc["DiLoCo on 2 replicas", "times fewer bytes among replicas"] == "30"


def test_links_of_all_pages_lead_somewhere() -> None:
    git = shutil.which("git")
    listed = subprocess.run([git, "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    followed, lost = 0, []
    for page in (ROOT / name for name in listed.splitlines()):
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for inline, attribute in re.findall(r"""\]\(<?([^)>\s]+)>?\)|(?:src|href)="([^"]+)\"""", text):
            link = inline or attribute
            if re.match(r"[a-z]+:", link):  # of another site
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            followed += 1
            if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
                lost.append(f"{page.relative_to(ROOT)}: {link}")
    assert followed > 150
    assert not lost


def anchors(page: str) -> set[str]:
    """Return what links into a page may end with: its named places, and its headings as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE)
    named = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return named | set(re.findall(r'id="([^"]+)"', page))


def test_no_page_shows_what_is_no_number() -> None:
    found = [*(ROOT / "results").rglob("*.md"), *(ROOT / "results").rglob("*.claims.json"), ROOT / "README.md"]
    pages = [page for page in found if "smoke" not in page.parts]  # which are not in git
    assert len(pages) > 100
    assert not [str(page.relative_to(ROOT)) for page in pages if re.search(r"\bnan\b", page.read_text())]


def test_minutes_of_all_stages_are_shown_paper_by_paper() -> None:
    names = stages()
    assert {family(name, load_params()["runs"]) for name in names if name not in WITHOUT_NOTEBOOK} == set(FAMILIES)
    some = [("train@diloco_m2", 60.0), ("streaming_diloco_table5", 30.0), ("train@noloco", 120.0)]
    some += [("train@a_run_that_is_no_more", 60.0), ("all", 270.0)]
    shown = minutes(pd.DataFrame(some, columns=["stage", "seconds"])).set_index("")
    assert list(shown.loc["Streaming DiLoCo"]) == ["1.0", "0.5", "1.5"]
    assert list(shown.loc["NoLoCo"]) == ["2.0", "0.0", "2.0"]
    assert list(shown.loc["all"]) == ["3.0", "0.5", "3.5"]


def test_the_readme_names_every_package_and_each_says_what_it_is() -> None:
    readme = (ROOT / "README.md").read_text()
    for path in (ROOT / "lowcomm").iterdir():
        if path.is_dir() and path.name != "__pycache__":
            assert f"{path.name}/" in readme, f"lowcomm/{path.name} is not in the README's tree"
            assert (path / "__init__.py").read_text().startswith('"""')


def test_environment_yml_and_constraints_pin_what_pyproject_names() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *(p for extra in project["optional-dependencies"].values() for p in extra)]
    wanted = {re.match(r"[\w.-]+", p).group() for p in named} - {"lowcomm", "numpy", "pandas", "pyyaml", "tqdm"}
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(d["pip"] for d in conda if isinstance(d, dict))
    pins = dict(p.split("==") for p in pip if not p.startswith("-"))
    assert set(pins) == wanted
    assert "-e .[dev]" in pip
    locked = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    assert pins.items() <= locked.items()
    assert not any("==" in p for p in named), "the library names lower bounds; constraints.txt pins"


def test_published_numbers_say_where_they_stand_and_how_sure_they_are() -> None:
    for path in (ROOT / "results" / "papers").glob("*.yaml"):
        for name, table in paper(path.stem)["tables"].items():
            assert table["where"], name
            assert table["certainty"] in ("printed", "derived", "inferred", "recalled"), name
            columns = {frozenset(r) for r in table["rows"]}
            assert len(columns) == 1, f"{path.stem}, {name}: rows have different columns"


def test_a_paper_without_a_file_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match="no paper named 'streaming_dilocko'; did you mean 'streaming_diloco'"):
        paper("streaming_dilocko")


@pytest.mark.longest
def test_the_graph_reproduces_at_smoke_scale(tmp_path: Path) -> None:
    """In a copy of the checkout: a table and the runs that it needs; a clean status; and then nothing to do.

    An edit of prose asks for new digests of the code and for nothing else, and a renamed function for new probes.

    The other tables are run at smoke scale by nbval.
    """
    target = "protocol_ranks"
    copy = tmp_path / "copy"
    ignore = shutil.ignore_patterns(".git", ".venv", "build", "dvc.lock", "laptop", "*.egg-info", "tmp", "cache")
    shutil.copytree(ROOT, copy, ignore=ignore)
    kept = ("protocol_dense", "protocol")
    params = load_params() | {"scale": "smoke"}
    for section, some in (("runs", kept), ("corpora", ("docstrings",))):
        params[section] = {name: params[section][name] for name in some}
    (copy / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    subprocess.run(["git", "init", "-q"], cwd=copy, check=True)
    path = f"{Path(sys.executable).parent}:{clean_environment()['PATH']}"
    environment = clean_environment(PATH=path, PYTHONPATH=str(copy))

    def dvc(*words: str) -> str:
        done = subprocess.run(["dvc", *words], cwd=copy, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert f"Running stage '{target}'" in dvc("repro", target)
    assert "Data and pipelines are up to date" in dvc("status", "--with-deps", target)
    deepest = copy / "lowcomm" / "settings.py"  # prose, in the module that all others import
    assert deepest.read_text().startswith('"""')
    deepest.write_text(deepest.read_text().replace('"""', '"""Prose. ', 1))
    said = dvc("repro", target)
    assert re.findall("Running stage '(.*)'", said) == ["sources"]
    modules = [path for path in (copy / "lowcomm").rglob("*.py") if "stage_layers" in path.read_text()]
    assert len(modules) >= 5
    for path in modules:
        path.write_text(path.read_text().replace("stage_layers", "layers_of_stage"))
    said = dvc("repro", target)
    assert re.findall("Running stage '(.*)'", said) == ["sources", "probes"]
    for folder in ("lowcomm/__pycache__", "notebooks/.ipynb_checkpoints"):  # what Python and JupyterLab leave behind
        (copy / folder).mkdir(exist_ok=True)
        (copy / folder / "left").touch()
    assert "Running stage" not in dvc("repro", target)
    made = copy / "results" / "smoke" / "protocol_models" / "ranks"
    assert (made / "figure1.png").exists()
    assert "| W_p1 (attention) | 0 |" in (made / "figure1.md").read_text()
