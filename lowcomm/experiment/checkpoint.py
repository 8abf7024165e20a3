"""Checkpoints: atomic, checksummed, read without executing code.

A checkpoint is a folder `step-00000120` with, for each rank, `rank-000.safetensors` (its tensors) and `rank-000.json`
(what else it needs), and one `manifest.json` (of which run and step, which tensors there are, and the digests of all
files). It is written under another name and renamed when every rank's files are on disk, so a folder of that name is
whole. All ranks see one folder (a shared file system, where they are on several machines).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowcomm.comm.world import World
from lowcomm.experiment.run_folder import checkpoint_folders, remove_checkpoint, set_aside
from lowcomm.experiment.source import sha256
from lowcomm.settings import ConfigError, first_difference

log = logging.getLogger("lowcomm")
VERSION = 3


def flush(path: Path) -> None:
    """Force a file, or the entries of a folder, to disk (fsync)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors by name to a safetensors file, and force it to disk."""
    save_file({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, path)
    flush(path)


class Checkpoints:
    """The checkpoints of one run, of which the newest `keep` are kept. Every rank must call each method but `steps`.

    Raises ConfigError where `keep` is below 1.
    """

    def __init__(self, folder: Path, world: World, keep: int = 2):
        if keep < 1:
            raise ConfigError(f"checkpoint.keep must be at least 1, got {keep}")
        self.folder, self.world, self.keep = folder, world, keep

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps that have a whole checkpoint, in ascending order."""
        return [int(path.name[5:]) for path in checkpoint_folders(self.folder) if not path.suffix]

    def save(self, step: int, tensors: dict[str, Tensor], meta: dict[str, Any], run: dict[str, Any]) -> None:
        """Write the checkpoint of `step`: this rank's tensors and `meta`, and `run`, which is the same on all ranks.

        `meta` and `run` hold what JSON can hold. Of the checkpoints up to this step all but the newest `keep` are
        removed, and so are those of later steps, from which the run has gone back.
        """
        final = self._path(step)
        partial = final.with_name(final.name + ".partial")
        partial.mkdir(parents=True, exist_ok=True)
        names = self._names()
        save_tensors(tensors, partial / names[0])
        self._write_json(partial / names[1], meta)
        everyone = self.world.tell({name: sha256(partial / name) for name in names})
        shapes = self.world.tell({name: list(tensor.shape) for name, tensor in tensors.items()})
        if self.world.rank == 0:
            files = {name: digest for digests in everyone for name, digest in digests.items()}
            manifest = {"version": VERSION, "step": step, "ranks": self.world.size, "run": run, "sha256": files}
            manifest["tensors"] = shapes
            self._write_json(partial / "manifest.json", manifest)
            replaced = set_aside(final) if final.is_dir() and not final.is_symlink() else None
            partial.rename(final)
            flush(self.folder)
            if replaced is not None:
                remove_checkpoint(replaced)
            kept = [there for there in self.steps() if there <= step][-self.keep :]
            for old in set(self.steps()).difference(kept):
                remove_checkpoint(self._path(old))
        self.world.barrier()

    def _names(self) -> list[str]:
        """Return the names of this rank's two files: that of its tensors, and that of what else it needs."""
        return [f"rank-{self.world.rank:03d}.{kind}" for kind in ("safetensors", "json")]

    @staticmethod
    def _write_json(path: Path, value: Any) -> None:
        path.write_text(json.dumps(value) + "\n")
        flush(path)

    def newest(
        self, run: dict[str, Any], recorded: int | None = None
    ) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
        """Return (step, tensors, meta) of the newest checkpoint that every rank can read, or None where there is none.

        recorded: the last step of which this rank has metrics, or None where that does not matter. A checkpoint of a
        later step is not used, as the metrics in between would be missing for ever.

        A damaged checkpoint is logged, and the one before it is tried. Raises ConfigError on every rank where none of
        them can be read, where ranks see different folders, and where one is of another run (`run` is compared key by
        key), another number of ranks or another format.
        """
        if self.world.rank == 0:
            for left in checkpoint_folders(self.folder):
                if left.suffix:
                    remove_checkpoint(left)
        self.world.barrier()
        there = self.world.tell(self.steps())
        if differ := [rank for rank, steps in enumerate(there) if steps != there[0]]:
            raise ConfigError(
                f"checkpoints in {self.folder} are of steps {there[0]} for rank 0 and {there[differ[0]]} for rank"
                f" {differ[0]}: all ranks must see one folder"
            )
        for step in reversed(there[0]):
            found, problem = None, ""
            try:
                found = self._read(step, run)
                if recorded is not None and recorded < step:
                    raise ValueError(f"metrics end at step {recorded}")
            except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
                if isinstance(error, ConfigError):
                    raise
                problem = f"rank {self.world.rank}: {error}"
            problems = [told for told in self.world.tell(problem) if told]
            if not problems:
                return step, *found
            if self.world.rank == 0:
                log.warning("checkpoint %s is damaged (%s); trying the one before", self._path(step), problems[0])
        if there[0]:
            raise ConfigError(f"no checkpoint in {self.folder} can be read; delete the folder to start over")
        return None

    def _read(self, step: int, run: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        path = self._path(step)
        manifest = json.loads((path / "manifest.json").read_text())
        if manifest["version"] != VERSION:
            raise ConfigError(f"checkpoint {path} has format {manifest['version']}, this code reads {VERSION}")
        if differs := first_difference(manifest["run"], run):
            raise ConfigError(f"checkpoint {path} is of another run: {differs}")
        if manifest["ranks"] != self.world.size:
            raise ConfigError(
                f"checkpoint {path} was written by {manifest['ranks']} ranks, this run has {self.world.size}"
            )
        if manifest["step"] != step:
            raise ValueError(f"its manifest is of step {manifest['step']}")
        names = self._names()
        for name in names:
            if sha256(path / name) != manifest["sha256"][name]:
                raise ValueError(f"{name} does not match its checksum")
        tensors = load_file(path / names[0])
        there = {name: list(tensor.shape) for name, tensor in tensors.items()}
        if differs := first_difference(manifest["tensors"][self.world.rank], there, "in the manifest"):
            raise ValueError(f"{names[0]}: the shape of tensor {differs}")
        return tensors, json.loads((path / names[1]).read_text())

    def clear(self) -> None:
        """Remove all checkpoints, as the run is complete, and the folder where nothing else is in it."""
        self.world.barrier()
        if self.world.rank == 0 and self.folder.exists():
            for path in checkpoint_folders(self.folder):
                remove_checkpoint(path)
            with contextlib.suppress(OSError):  # a link, or somebody keeps something else there
                self.folder.rmdir()
