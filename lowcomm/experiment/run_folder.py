"""The folder of a run: what is in it, by name, and the reading of finished ones.

A run's folder holds what the run determined and nothing that depends on the machine's mood, so that two runs of one
configuration are equal byte for byte: metrics (a row per step and rank), a summary, which is there only when the run is
complete, the evaluated parameters, and checkpoints until then. While the run is under way, `run.json` says whose folder
this is. What depends on the machine (times, traces, and with which code it was made) is in a second folder beside it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowcomm.settings import ConfigError


class Metrics:
    """A file of rows, a JSON object per line, to which a run adds as it goes.

    resumed_at: the step of the checkpoint from which the run goes on (0: it begins); rows after it are dropped. With
    None all whole rows are kept, as those of a replica that comes back to where the others are.
    """

    def __init__(self, path: Path, resumed_at: int | None):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")
        if resumed_at is None:
            kept = path.read_bytes().rfind(b"\n") + 1
        else:
            kept = sum(len(line) for step, line in _whole_rows(path) if step <= resumed_at)
        os.truncate(path, kept)  # not written anew: a kill in between would leave checkpoints without their rows
        self._held: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """Take a row; its tensors are read when rows are written, so that a GPU need not be waited for."""
        self._held.append(row)

    def write(self) -> None:
        """Write the rows taken so far to the file. Raises NotFinite where a loss in them is not finite."""
        for row in self._held:
            plain = {k: v.item() if hasattr(v, "item") else v for k, v in row.items()}
            for key in ("loss", "val_loss"):
                if not math.isfinite(plain.get(key, 0.0)):
                    from lowcomm.codecs.bits import NotFinite  # with torch, which the reading of results does without

                    raise NotFinite(f"the {key} of step {plain['step']} is {plain[key]}: training has diverged")
            self._file.write(json.dumps(plain) + "\n")
        self._held.clear()
        self._file.flush()

    def keep(self) -> None:
        """Write the rows and force them to disk: they are then there if a checkpoint is that was written after them."""
        self.write()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; rows that were not written are dropped, as by a kill."""
        self._file.close()


def _whole_rows(path: Path) -> list[tuple[int, bytes]]:
    """Return (step, line) of a metrics file's rows, as far as they are whole and of one step after the other."""
    found: list[tuple[int, bytes]] = []
    for line in path.read_bytes().splitlines(True) if path.exists() else []:
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            break
        if step != len(found) + 1 or not line.endswith(b"\n"):  # a kill has cut it short
            break
        found.append((step, line))
    return found


def recorded_steps(path: Path) -> int:
    """Return the last step up to which a metrics file has a whole row of every step; 0 where the first has none."""
    return len(_whole_rows(path))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file.

    Raises ConfigError, with the line's number, where a line is not valid JSON, and where the file cannot be read.
    """
    rows = []
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): train the run anew") from None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}, is no row of metrics ({error}): train the run anew") from None
    return rows


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, by step: whole, half written (`.partial`) and half removed (`.gone`) ones."""
    there = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}(\.partial|\.gone)?", path.name)]
    return sorted((path for path in there if path.is_dir()), key=lambda path: int(path.stem[5:]))


def set_aside(path: Path) -> Path:
    """Rename the folder of a checkpoint, so that it is not taken for a whole one, and return its new path."""
    gone = path.with_name(path.name + ".gone")
    shutil.rmtree(gone, ignore_errors=True)
    return path.rename(gone)


def remove_checkpoint(path: Path) -> None:
    """Remove the folder of a checkpoint, unless it is a link; what a kill leaves of it is not taken for a whole one."""
    if not path.is_symlink():
        shutil.rmtree(path if path.suffix else set_aside(path), ignore_errors=True)


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run's files.

    out: the run's folder. times: the folder of what depends on the machine.
    """

    out: Path
    times: Path

    @classmethod
    def beside(cls, out: Path) -> RunFolder:
        """Return the folder of a run in `out`, with its times in the folder `OUT-times` beside it."""
        return cls(out, out.with_name(f"{out.name}-times"))

    def make(self) -> None:
        """Make both folders where they are missing. Raises ConfigError where they cannot be written."""
        try:
            for path in (self.out, self.times):
                path.mkdir(parents=True, exist_ok=True)
                if not os.access(path, os.W_OK):
                    raise PermissionError(f"no permission to write {path}")
        except OSError as error:
            raise ConfigError(f"output folder {self.out} cannot be written: {error}") from None

    @property
    def summary(self) -> Path:
        """The file of the run's results, which is there only when the run is complete."""
        return self.out / "summary.json"

    @property
    def model(self) -> Path:
        """The safetensors file of the evaluated parameters."""
        return self.out / "model.safetensors"

    @property
    def settings(self) -> Path:
        """The file of the settings of the run that is under way, which is gone when the run is complete."""
        return self.out / "run.json"

    @property
    def lock(self) -> Path:
        """The file that a job holds locked for as long as it trains here (`claim`)."""
        return self.out / ".lock"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints to resume from, until the run is complete."""
        return self.out / "checkpoints"

    @property
    def source(self) -> Path:
        """The file with the digest of the code that has made what is here (`source.source_digest`)."""
        return self.times / "source.sha256"

    def metrics(self, rank: int) -> Path:
        """Return the path of a rank's metrics."""
        return self.out / "metrics" / f"rank-{rank:03d}.jsonl"

    def clock(self, rank: int) -> Path:
        """Return the path of the seconds at which a rank's steps ended."""
        return self.times / f"rank-{rank:03d}.jsonl"

    def trace(self, rank: int) -> Path:
        """Return the path of a rank's trace (`comm.trace`)."""
        return self.times / f"trace-{rank:03d}.jsonl"

    def losses(self, run: dict[str, Any], replica: int = 0) -> Path:
        """Return the path of the metrics of a replica's last stage, which has the losses; `run` as in a summary."""
        return self.metrics((run["stages"] - 1) * run["replicas"] + replica)

    @property
    def made_with(self) -> str | None:
        """The digest of the code that has made what is here ("several" where it changed in between), or None."""
        return self.source.read_text() if self.source.exists() else None

    def read_summary(self) -> dict[str, Any] | None:
        """Return the summary of a complete run, or None where there is none. Raises ConfigError where it is damaged."""
        try:
            found = json.loads(self.summary.read_text())
            if not isinstance(found, dict) or "complete" not in found or not isinstance(found.get("run"), dict):
                raise ValueError("it does not say of which run it is")
            return found
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ConfigError(f"{self.summary} is damaged ({error}): delete the folder to train the run anew") from None

    def is_complete(self, run: dict[str, Any], source: str) -> bool:
        """Tell whether the whole run of these settings (`RunConfig.to_dict`), made with this code, is here."""
        summary = self.read_summary()
        return summary is not None and self.made_with == source and summary["run"] == run

    @property
    def _folders(self) -> tuple[Path, ...]:
        return self.out / "metrics", self.checkpoints

    @property
    def _files(self) -> tuple[Path, ...]:
        made = (self.summary, self.model, self.settings)
        return *made, *(file.with_suffix(".tmp") for file in (self.summary, self.settings))

    def strangers(self) -> list[str]:
        """Return the names of the folder's entries that no run puts there, sorted."""
        own = {path.name for path in (*self._folders, *self._files, self.lock)}
        return sorted(p.name for p in self.out.iterdir() if p.name not in own) if self.out.exists() else []

    def check_own(self) -> None:
        """Raise ConfigError where the folder holds what a run may leave behind, but nothing that says of which run.

        A damaged summary raises it too.
        """
        if self.read_summary() is not None or self.settings.exists():
            return
        if found := [path.name for path in (*self._folders, *self._files) if path.exists() or path.is_symlink()]:
            raise ConfigError(
                f"{self.out} holds {', '.join(found)}, but no {self.settings.name} that says of which run:"
                " choose another folder, or delete them"
            )

    @property
    def times_of(self) -> Path:
        """The file that says of which run the folder of times is: the path from there to that run's folder."""
        return self.times / "times-of.txt"

    @property
    def from_times(self) -> str:
        """The path from the folder of times to the run's folder, which stays when both are moved."""
        return os.path.relpath(self.out.absolute(), self.times.absolute())

    def check_times(self) -> None:
        """Raise ConfigError where the folder of times is another run's: it would lose them as this one begins."""
        parent = RunFolder(self.times.parent, self.times)
        if self.times.name == "metrics" and (parent.summary.exists() or parent.settings.exists()):
            raise ConfigError(f"{self.times} holds the metrics of a run: choose another folder for times")
        if self.times_of.exists() and (owner := self.times_of.read_text().strip()) != self.from_times:
            run = os.path.normpath(self.times / owner)
            raise ConfigError(f"{self.times} holds the times of the run in {run}: choose another folder for times")

    def clear(self) -> None:
        """Remove the files that a run has left here, and folders in which nothing else is.

        A checkpoint that is a link to another folder stays, and so do the files there.
        """
        self.summary.unlink(missing_ok=True)  # first, as without the rest it would speak of a whole run
        for path in checkpoint_folders(self.checkpoints):
            remove_checkpoint(path)
        for path in (self.out / "metrics").glob("rank-*.jsonl"):
            path.unlink()
        for folder in self._folders:
            with contextlib.suppress(OSError):
                folder.rmdir()
        measured = (*self.times.glob("trace-*.jsonl"), *self.times.glob("rank-*.jsonl"), self.times_of)
        for file in (*self._files, self.source, *measured):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                file.unlink()

    def read(self) -> dict[str, Any] | None:
        """Return the summary, with the rows of metrics as "rows", or None where there is no summary.

        The rows are those of the first replica, but for the validation losses, which are the mean over all replicas.
        Raises ConfigError where the summary or a row is damaged.
        """
        if (summary := self.read_summary()) is None:
            return None
        run = summary["run"]
        files = [read_metrics(self.losses(run, replica)) for replica in range(run["replicas"])]
        rows = files[0]
        if short := [replica for replica, file in enumerate(files) if len(file) != len(rows)]:
            file = self.losses(run, short[0])
            raise ConfigError(
                f"{file} is damaged ({len(files[short[0]])} rows, {len(rows)} needed): train the run anew"
            )
        for row, *others in zip(*files, strict=True):
            if "val_loss" in row:
                row["val_loss"] = sum(r["val_loss"] for r in (row, *others)) / run["replicas"]
        return summary | {"rows": rows}
