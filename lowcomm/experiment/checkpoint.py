"""Checkpoints: atomic, checksummed, read without executing code.

A checkpoint is a folder `step-00000120` with, for each rank, `rank-000.safetensors` (its tensors), `rank-000.json`
(what else it needs) and `rank-000.sha256` (of both), and one `manifest.json` (of which run). It is written
under another name and renamed when every rank's files are on disk, so a folder of that name is whole. All ranks
see one folder (a shared file system, where they are on several machines).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowcomm.comm.world import World
from lowcomm.experiment.source import sha256
from lowcomm.settings import ConfigError

log = logging.getLogger("lowcomm")
VERSION = 1


def _flush(path: Path) -> None:
    """Put a file or a folder's entries on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file to disk."""
    save_file({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, path)
    _flush(path)


def _remove(folder: Path) -> None:
    """Remove a folder; one that a kill leaves half removed is not taken for a checkpoint."""
    gone = folder.with_name(folder.name + ".gone")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone)


class Checkpoints:
    """The checkpoints of one run. Every rank calls every method."""

    def __init__(self, folder: Path, world: World, keep: int = 2):
        if keep < 1:
            raise ConfigError(f"checkpoint.keep must be at least 1, got {keep}")
        self.folder, self.world, self.keep = folder, world, keep

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a whole checkpoint, oldest first."""
        return sorted(int(p.name[5:]) for p in self.folder.glob("step-????????") if p.is_dir())

    def save(self, step: int, tensors: dict[str, Tensor], meta: dict[str, Any], run: dict[str, Any]) -> None:
        """Write checkpoint `step`: this rank's tensors and meta, and `run`, which all ranks share."""
        final = self._path(step)
        partial = final.with_name(final.name + ".partial")
        partial.mkdir(parents=True, exist_ok=True)
        names = [f"{self._rank(self.world.rank)}.{kind}" for kind in ("safetensors", "json")]
        save_tensors(tensors, partial / names[0])
        self._write_json(partial / names[1], meta)
        (partial / f"{self._rank(self.world.rank)}.sha256").write_text("\n".join(sha256(partial / n) for n in names))
        self.world.barrier()
        if self.world.rank == 0:
            manifest = {"version": VERSION, "step": step, "ranks": self.world.size, "run": run}
            self._write_json(partial / "manifest.json", manifest)
            if final.exists():
                _remove(final)
            partial.rename(final)
            _flush(self.folder)
            for old in self.steps()[: -self.keep]:
                _remove(self._path(old))
        self.world.barrier()

    @staticmethod
    def _rank(rank: int) -> str:
        return f"rank-{rank:03d}"

    @staticmethod
    def _write_json(path: Path, value: Any) -> None:
        path.write_text(json.dumps(value) + "\n")
        _flush(path)

    def newest(self, run: dict[str, Any]) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
        """(step, tensors, meta) of the newest checkpoint that every rank can read, or None if there is none.

        A damaged one is logged and the one before taken. Raises ConfigError if all are damaged, or if
        one is of another run (`run` is compared key by key) or rank count.
        """
        if self.world.rank == 0:
            for left in self.folder.glob("step-*.partial"):
                shutil.rmtree(left)
        self.world.barrier()
        mine = torch.tensor(self.steps(), dtype=torch.int64)
        common = set.intersection(*(set(s.tolist()) for s in self.world.exchange(mine, purpose="resume", axis="world")))
        for step in sorted(common, reverse=True):
            found: tuple[dict, dict] | None = None
            try:
                found = self._read(step, run)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
                if isinstance(error, ConfigError):
                    raise
                log.warning("checkpoint %s is damaged (%s); falling back to the one before", self._path(step), error)
            readable = self.world.sum(torch.tensor([int(found is not None)]), purpose="resume", axis="world")
            if int(readable) == self.world.size:
                return step, *found
            if found is not None:
                log.warning("checkpoint %s is damaged on another rank; falling back", self._path(step))
        if common:
            raise ConfigError(f"no checkpoint in {self.folder} can be read; delete the folder to start over")
        return None

    def _read(self, step: int, run: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        path = self._path(step)
        manifest = json.loads((path / "manifest.json").read_text())
        if manifest["version"] != VERSION:
            raise ConfigError(f"checkpoint {path} has format {manifest['version']}, this code reads {VERSION}")
        if differ := [k for k in sorted(run.keys() | manifest["run"]) if run.get(k) != manifest["run"].get(k)]:
            k = differ[0]
            raise ConfigError(
                f"checkpoint {path} is of another run: {k} is {manifest['run'].get(k)!r} there and {run.get(k)!r} here"
                + (f" (and {len(differ) - 1} more differ)" if len(differ) > 1 else "")
            )
        if manifest["ranks"] != self.world.size:
            raise ConfigError(
                f"checkpoint {path} was written by {manifest['ranks']} ranks, this run has {self.world.size}"
            )
        name = self._rank(self.world.rank)
        names = [f"{name}.{kind}" for kind in ("safetensors", "json")]
        for file, digest in zip(names, (path / f"{name}.sha256").read_text().split(), strict=True):
            if sha256(path / file) != digest:
                raise ValueError(f"{file} does not match its checksum")
        return load_file(path / f"{name}.safetensors"), json.loads((path / f"{name}.json").read_text())

    def clear(self) -> None:
        """Remove all, when the run is complete."""
        self.world.barrier()
        if self.world.rank == 0 and self.folder.exists():
            for step in self.steps():
                _remove(self._path(step))
            shutil.rmtree(self.folder)
