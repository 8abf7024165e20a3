"""Probes: every run trained at smoke scale, as digests of its final weights, losses and bytes.

    python -m pipelines.probes

What a training stage depends on is what decides its bits: its settings, its corpus, and its probe. A refactoring that
changes no bit of any probe retrains nothing, one that does retrains exactly those runs. (This trusts that a change
which shows at the larger size shows at smoke scale too; `dvc repro -f` trains anyway.)

Probes are trained in a portable arithmetic: MKL, ATen and oneDNN keep to instructions that every x86-64 processor has,
so that the digests are those of the code and not of the machine. A small part of each corpus is prepared anew, too.

    build/probes/<run>.json             a digest for each variant (of the first seed)
    build/probes/corpora/<corpus>.json  a digest of the tokenizer and the shards
    build/probe-runs/                   the runs themselves, which notebooks at smoke scale read too
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from lowcomm.experiment.run_folder import RunFolder
from lowcomm.experiment.source import sha256, source_digest
from pipelines.project import BUILD, PROJECT, record_seconds

if TYPE_CHECKING:
    from lowcomm.experiment.config import RunConfig

SCALE = "smoke"
RUNS, CORPORA = BUILD / "probe-runs", BUILD / "data" / SCALE
#: Arithmetic that does not depend on the processor; read by the libraries when they are loaded.
PORTABLE = {
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
}


def folder_of(config: RunConfig) -> RunFolder:
    """Where the probe of a run lies."""
    inner = Path(config.name) / config.variant / f"seed{config.seed}"
    return RunFolder(RUNS / inner, BUILD / "probe-times" / inner)


def _train(config: RunConfig) -> None:
    from lowcomm.experiment.train import train_in_threads

    train_in_threads(config, CORPORA / config.data.corpus, folder_of(config))


def _prepare(corpus: str) -> None:
    from lowcomm.experiment.data import prepared

    shutil.rmtree(PROJECT.data_dir(corpus, SCALE), ignore_errors=True)
    prepared(PROJECT, corpus, SCALE)
    _stamp(corpus).write_text(source_digest())


def _stamp(corpus: str) -> Path:
    """The digest of the code that has prepared a corpus at smoke scale."""
    return BUILD / "data" / SCALE / f"{corpus}.sha256"


def corpus_digest(folder: Path) -> str:
    """Digest a prepared corpus: its tokenizer and the shards of both splits."""
    card = json.loads((folder / "card.json").read_text())
    shards = [shard["sha256"] for split in card["splits"].values() for shard in split["shards"]]
    return hashlib.sha256("\n".join([card["tokenizer_sha256"], *shards]).encode()).hexdigest()


def run_digest(folder: RunFolder) -> str:
    """Digest a finished run: its evaluated parameters, the metrics of all ranks, and the bytes that they sent."""
    summary = folder.read_summary()
    sent = [summary[key] for key in ("sent_bytes", "sent_bytes_per_rank", "routed_bytes_per_rank")]
    files = [sha256(path) for path in (folder.model, *sorted((folder.out / "metrics").iterdir()))]
    return hashlib.sha256("\n".join([*files, json.dumps(sent, sort_keys=True)]).encode()).hexdigest()


def train_all() -> list[RunConfig]:
    """Train the probes that this code and these settings have not trained already, a run per core; returns all."""
    params, source = PROJECT.load_params(), source_digest()
    runs = [PROJECT.run_points(run, scale=SCALE, params=params) for run in params["runs"]]
    configs = [config for points in runs for config in points]
    corpora = [c for c in params["corpora"] if not (s := _stamp(c)).exists() or s.read_text() != source]
    todo = [c for c in configs if c.data.corpus in corpora or not folder_of(c).is_complete(c.to_dict(), source)]
    if not corpora and not todo:
        return configs
    begin, before = time.perf_counter(), {name: os.environ.get(name) for name in PORTABLE}
    os.environ |= PORTABLE  # of the processes that are spawned, before they load torch
    try:
        with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(_prepare, corpora))
            for config in todo:
                folder_of(config).clear()
            longest = sorted(todo, key=lambda c: -c.ranks * c.train.steps)
            list(tqdm(pool.map(_train, longest), total=len(todo), desc="probes", mininterval=5.0))
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    record_seconds("probes", params["scale"], time.perf_counter() - begin)
    return configs


def main() -> int:
    """Train what is to be trained, and write the digests."""
    folder, found = BUILD / "probes", {}
    for config in train_all():
        found.setdefault(config.name, {})[config.variant] = run_digest(folder_of(config))
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "corpora").mkdir(parents=True)
    for run, digests in found.items():
        (folder / f"{run}.json").write_text(json.dumps(digests, indent=1) + "\n")
    for corpus in PROJECT.load_params()["corpora"]:
        told = {"digest": corpus_digest(PROJECT.data_dir(corpus, SCALE))}
        (folder / "corpora" / f"{corpus}.json").write_text(json.dumps(told) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
