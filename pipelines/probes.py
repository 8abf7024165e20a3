"""Train the probes: every run at smoke scale, of which digests of its final weights, losses and bytes are kept.

    python -m pipelines.probes

What a training stage depends on is what decides its bits: its settings, its corpus, and its probe. A refactoring that
changes no bit of any probe retrains nothing, one that does retrains exactly those runs. (This trusts that a change
which shows at the larger size shows at smoke scale too; `dvc repro -f` trains anyway.)

Probes are trained in a portable arithmetic: MKL, ATen and oneDNN keep to instructions that every x86-64 processor has,
so that the digests are those of the code and not of the machine. A small part of each corpus is prepared anew, too.

    build/probes/<run>.json             a digest for each variant (of the first seed)
    build/probes/corpora/<corpus>.json  a digest of the tokenizer and the shards
    build/probe-runs/                   the runs themselves, which notebooks at smoke scale read too

Another project's probes (`pipelines.ladder`) lie in its own `build` in the same way.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from lowcomm.experiment.run_folder import RunFolder
from lowcomm.experiment.source import sha256, source_digest
from pipelines.launch import environment, pool_of_cores
from pipelines.project import PROJECT, record_seconds

if TYPE_CHECKING:
    from lowcomm.experiment.config import RunConfig
    from lowcomm.experiment.project import Project

SCALE = "smoke"
#: Variables that make arithmetic independent of the processor; the libraries read them when they are loaded.
PORTABLE = {
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
}


def folder_of(config: RunConfig, project: Project = PROJECT) -> RunFolder:
    """Return the folder of the probe with this configuration."""
    inner = Path(config.name) / config.variant / f"seed{config.seed}"
    return RunFolder(project.build / "probe-runs" / inner, project.build / "probe-times" / inner)


def _train(project: Project, config: RunConfig) -> None:
    from lowcomm.experiment.train import train_in_threads

    train_in_threads(config, project.data_dir(config.data.corpus, SCALE), folder_of(config, project))


def _prepare(project: Project, corpus: str) -> None:
    from lowcomm.experiment.data import prepared

    shutil.rmtree(project.data_dir(corpus, SCALE), ignore_errors=True)
    prepared(project, corpus, SCALE)
    _stamp(project, corpus).write_text(source_digest())


def _stamp(project: Project, corpus: str) -> Path:
    """Return the path of the file with the digest of the code that has prepared a corpus at smoke scale."""
    folder = project.data_dir(corpus, SCALE)
    return folder.with_name(f"{folder.name}.sha256")


def corpus_digests(folder: Path) -> list[str]:
    """Return the SHA-256 of the tokenizer of a prepared corpus, and those of the shards of all splits."""
    card = json.loads((folder / "card.json").read_text())
    shards = [shard["sha256"] for split in card["splits"].values() for shard in split["shards"]]
    return [card["tokenizer_sha256"], *shards]


def corpus_digest(folder: Path) -> str:
    """Return one SHA-256 of a prepared corpus, of its tokenizer and the shards of all splits."""
    return hashlib.sha256("\n".join(corpus_digests(folder)).encode()).hexdigest()


def run_digest(folder: RunFolder) -> str:
    """Return one SHA-256 of a complete run: its evaluated parameters, all ranks' metrics, and the bytes they sent."""
    summary = folder.read_summary()
    sent = [summary[key] for key in ("sent_bytes", "sent_bytes_per_rank", "routed_bytes_per_rank")]
    files = [sha256(path) for path in (folder.model, *sorted((folder.out / "metrics").iterdir()))]
    return hashlib.sha256("\n".join([*files, json.dumps(sent, sort_keys=True)]).encode()).hexdigest()


#: Some runs, as pairs of a name and a variant ("" for a run that has none).
Wanted = Collection[tuple[str, str]]


def train_all(project: Project = PROJECT, wanted: Wanted | None = None) -> list[RunConfig]:
    """Train the probes that this code has not trained with these settings yet, one run per core.

    Corpora that this code has not prepared at smoke scale are prepared anew first. The configurations of all probes
    are returned. wanted: the runs whose probes are trained and returned, by default all.
    """
    params, source = project.load_params(), source_digest()
    runs = [project.run_points(run, scale=SCALE, params=params) for run in params["runs"]]
    configs = [c for points in runs for c in points if wanted is None or (c.name, c.variant) in wanted]
    stamps = {corpus: _stamp(project, corpus) for corpus in params["corpora"]}
    corpora = [corpus for corpus, s in stamps.items() if not s.exists() or s.read_text() != source]
    todo = [
        c for c in configs if c.data.corpus in corpora or not folder_of(c, project).is_complete(c.to_dict(), source)
    ]
    if not corpora and not todo:
        return configs
    with (
        environment(PORTABLE),  # of the processes that are spawned, before they load torch
        pool_of_cores() as pool,
    ):
        list(pool.map(functools.partial(_prepare, project), corpora))
        for config in todo:
            folder_of(config, project).clear()
        longest = sorted(todo, key=lambda c: -c.ranks * c.train.steps)
        done = pool.map(functools.partial(_train, project), longest)
        list(tqdm(done, total=len(todo), desc="probes", mininterval=5.0))
    return configs


def write_digests(
    project: Project = PROJECT, wanted: Wanted | None = None, known: Mapping[tuple[str, str], str] | None = None
) -> None:
    """Train the probes that are not trained yet, and write all digests into `probes` of the project's build folder.

    What is there is removed first, but for digests of this code where only some runs are `wanted`: those of others may
    be in use.

    Args:
        project: whose runs, and whose build folder.
        wanted: the runs whose digests are written, by default all.
        known: digests that are known, by run and variant: their probes are not trained.
    """
    folder, found, source, params = project.build / "probes", {}, project.build / "probes.source", project.load_params()
    points = (point for run in params["runs"] for point in project.run_points(run, scale=SCALE, params=params))
    asked = {(point.name, point.variant) for point in points if wanted is None or (point.name, point.variant) in wanted}
    known = {name: digest for name, digest in (known or {}).items() if name in asked}
    for (run, variant), digest in known.items():
        found.setdefault(run, {})[variant] = digest
    for config in train_all(project, asked - known.keys()):
        found.setdefault(config.name, {})[config.variant] = run_digest(folder_of(config, project))
    if wanted is None or not source.exists() or source.read_text() != source_digest():
        shutil.rmtree(folder, ignore_errors=True)
    (folder / "corpora").mkdir(parents=True, exist_ok=True)
    source.write_text(source_digest())
    for run, digests in found.items():
        file = folder / f"{run}.json"
        there = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(there | digests, indent=1) + "\n")
    for corpus in params["corpora"]:
        told = {"digest": corpus_digest(project.data_dir(corpus, SCALE))}
        (folder / "corpora" / f"{corpus}.json").write_text(json.dumps(told) + "\n")


def main() -> int:
    """Write the digests of this repository's probes, record how long that took, and return the exit status 0."""
    begin = time.perf_counter()
    write_digests()
    record_seconds("probes", PROJECT.load_params()["scale"], time.perf_counter() - begin)
    return 0


if __name__ == "__main__":
    sys.exit(main())
