"""Metrics as JSON lines, and the folder of a run that holds them."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

from lowcomm.config import RunConfig


class Metrics:
    """Rows of JSON, written as the run goes; a resume drops the rows after its checkpoint."""

    def __init__(self, path: Path, resumed_at: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if path.exists() and resumed_at:
            for line in path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:  # the row that a kill cut short
                    break
                if row["step"] <= resumed_at:
                    kept.append(line + "\n")
        path.write_text("".join(kept))
        self._file = path.open("a")
        self._held: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row; tensors are read when rows are written, so that a GPU need not be waited for."""
        self._held.append(row)

    def write(self) -> None:
        for row in self._held:
            plain = {k: v.item() if hasattr(v, "item") else v for k, v in row.items()}
            self._file.write(json.dumps(plain) + "\n")
        self._held.clear()
        self._file.flush()

    def close(self) -> None:
        """Let go of the file; rows that were not written are dropped, as by a kill."""
        self._file.close()


#: Holds `source.source_digest()`: marks a folder as a run's, and says what it was made with.
MADE_WITH = "source.sha256"

_FOLDERS = ("metrics", "checkpoints")
_FILES = ("summary.json", "summary.tmp", "model.safetensors", MADE_WITH)


def made_with(out: Path) -> str | None:
    """Digest of the source that made the run in a folder; None where there is none."""
    return (out / MADE_WITH).read_text() if (out / MADE_WITH).exists() else None


def complete(out: Path, config: RunConfig, source: str) -> bool:
    """Whether a folder holds the whole run of a configuration, made with the source of a digest."""
    path = out / "summary.json"
    return made_with(out) == source and path.exists() and json.loads(path.read_text())["run"] == config.to_dict()


def strangers(out: Path) -> list[str]:
    """Names in a folder that no run puts there."""
    return sorted(p.name for p in out.iterdir() if p.name not in (*_FOLDERS, *_FILES)) if out.exists() else []


def clear_run(out: Path) -> None:
    """Remove what a run left in its folder, and nothing else."""
    for name in _FOLDERS:
        shutil.rmtree(out / name, ignore_errors=True)
    for name in _FILES:
        with contextlib.suppress(FileNotFoundError):
            (out / name).unlink()


def loss_metrics(out: Path, config: RunConfig, replica: int = 0) -> Path:
    """The metrics file of a replica's last stage, where losses are known."""
    return out / "metrics" / f"rank-{(config.stages - 1) * config.replicas + replica:03d}.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
