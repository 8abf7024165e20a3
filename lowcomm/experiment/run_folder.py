"""The folder of a run: what is in it, by name, and the reading of finished ones.

A run's folder holds what the run determined and nothing that depends on the machine's mood, so that two runs of one
configuration are equal byte for byte: metrics (a row per step and rank), a summary, which is there only when the run is
complete, the evaluated parameters, and checkpoints until then. What depends on the machine (times, traces, and with
which code it was made) is in a second folder beside it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowcomm.settings import ConfigError


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
        """Put the rows kept so far into the file."""
        for row in self._held:
            plain = {k: v.item() if hasattr(v, "item") else v for k, v in row.items()}
            self._file.write(json.dumps(plain) + "\n")
        self._held.clear()
        self._file.flush()

    def close(self) -> None:
        """Let go of the file; rows that were not written are dropped, as by a kill."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@dataclass(frozen=True)
class RunFolder:
    """Where the files of a run are.

    out: its folder. times: that of what depends on the machine.
    """

    out: Path
    times: Path

    @classmethod
    def beside(cls, out: Path) -> RunFolder:
        """The folder `out`, with its times in a folder beside it."""
        return cls(out, out.with_name(f"{out.name}-times"))

    @property
    def summary(self) -> Path:
        """The results of the run; the file is there only when the run is complete."""
        return self.out / "summary.json"

    @property
    def model(self) -> Path:
        """The evaluated parameters."""
        return self.out / "model.safetensors"

    @property
    def checkpoints(self) -> Path:
        """State to resume from, until the run is complete."""
        return self.out / "checkpoints"

    @property
    def source(self) -> Path:
        """The digest of the code that has made what is here (`source.source_digest`)."""
        return self.times / "source.sha256"

    def metrics(self, rank: int) -> Path:
        """The metrics of a rank."""
        return self.out / "metrics" / f"rank-{rank:03d}.jsonl"

    def clock(self, rank: int) -> Path:
        """The seconds of a rank's steps."""
        return self.times / f"rank-{rank:03d}.jsonl"

    def trace(self, rank: int) -> Path:
        """The trace of a rank (`comm.trace`)."""
        return self.times / f"trace-{rank:03d}.jsonl"

    def losses(self, run: dict[str, Any], replica: int = 0) -> Path:
        """The metrics of a replica's last stage, where losses are known; `run` as in a summary."""
        return self.metrics((run["stages"] - 1) * run["replicas"] + replica)

    @property
    def made_with(self) -> str | None:
        """The digest of the code that has made what is here; None where nothing has."""
        return self.source.read_text() if self.source.exists() else None

    def read_summary(self) -> dict[str, Any] | None:
        """The summary of a complete run, None where there is none. Raises ConfigError that names a damaged file."""
        try:
            return json.loads(self.summary.read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ConfigError(f"{self.summary} is damaged ({error}): delete the folder to train the run anew") from None

    def is_complete(self, run: dict[str, Any], source: str) -> bool:
        """Tell whether the whole run of these settings (`RunConfig.to_dict`), made with this code, is here."""
        summary = self.read_summary()
        return summary is not None and self.made_with == source and summary["run"] == run

    def strangers(self) -> list[str]:
        """Names in the folder that no run puts there."""
        own = {"metrics", "checkpoints", "summary.json", "summary.tmp", "model.safetensors"}
        return sorted(p.name for p in self.out.iterdir() if p.name not in own) if self.out.exists() else []

    def clear(self) -> None:
        """Remove what a run left here, and nothing else."""
        for folder in (self.out / "metrics", self.checkpoints):
            shutil.rmtree(folder, ignore_errors=True)
        left = (self.summary, self.out / "summary.tmp", self.model, self.source)
        for file in (*left, *self.times.glob("trace-*.jsonl")):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                file.unlink()

    def read(self) -> dict[str, Any] | None:
        """The summary with metrics rows under "rows", None where there is none.

        Rows are the first replica's, but validation losses: where replicas have models of their own, their mean.
        """
        if (summary := self.read_summary()) is None:
            return None
        run = summary["run"]
        files = [read_metrics(self.losses(run, replica)) for replica in range(run["replicas"])]
        rows = files[0]
        for row, *others in zip(*files, strict=True):
            if "val_loss" in row:
                row["val_loss"] = sum(r["val_loss"] for r in (row, *others)) / run["replicas"]
        return summary | {"rows": rows}
