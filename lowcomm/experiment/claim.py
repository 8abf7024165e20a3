"""A run's claim to its folder: one job at a time, and no other run's results under it.

    claim = Claim(folder, run, again=False)     raises ConfigError where the folder is another's
    ...                                         train; `run.json` says whose folder it is
    claim.done()                                the run is complete, and its summary says so

A finished run is left as it is unless `again` is true. Files that no run has put into a folder are never touched.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import uuid
from typing import IO, Any

from lowcomm.experiment.run_folder import RunFolder
from lowcomm.settings import ConfigError, first_difference


class Claim:
    """One job's hold on a run's folder, from its construction to `release` or `done`. Rank 0 makes it, for all ranks.

    Args:
        folder: the run's folder.
        run: what decides the run's losses, by name (`RunConfig.identity`, and the digests of the corpus).
        again: whether to replace a finished run, or one of other settings.

    Raises ConfigError where another job trains there, where the folder holds a finished or another run and `again` is
    false, and where it holds files of a run but nothing that says of which run.
    """

    def __init__(self, folder: RunFolder, run: dict[str, Any], *, again: bool = False):
        self.folder = folder
        folder.check_own()
        self.token = uuid.uuid4().hex
        self._file = _locked(folder)
        try:
            self._check(run, again=again)
        except BaseException:
            self.folder.lock.unlink(missing_ok=True)
            self.release()
            raise
        self._file.seek(0)
        self._file.truncate()
        json.dump({"process": os.getpid(), "host": socket.gethostname(), "token": self.token}, self._file)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _check(self, run: dict[str, Any], *, again: bool) -> None:
        folder = self.folder
        folder.check_times()
        complete = folder.read_summary() is not None
        there = _read(folder.settings.read_text()) if folder.settings.exists() else run
        differs = first_difference(there, run)
        if again and (complete or differs):
            folder.clear()
        elif complete:
            raise ConfigError(f"{folder.out} holds a finished run: --again trains it anew, or choose another one")
        elif differs:
            raise ConfigError(f"{folder.out} holds another run: {differs}; --again replaces it, or choose another one")
        self._run = run
        self._write_settings()

    def _write_settings(self) -> None:
        partial = self.folder.settings.with_suffix(".tmp")
        partial.write_text(json.dumps(self._run, indent=1) + "\n")
        partial.rename(self.folder.settings)

    def begin(self) -> None:
        """Remove what an earlier attempt has left, as the run begins at its first step."""
        self.folder.clear()
        self.folder.times_of.write_text(f"{self.folder.from_times}\n")
        self._write_settings()

    def done(self) -> None:
        """Release the folder of a complete run and remove `run.json`: the summary says from now on what is here."""
        self.folder.settings.unlink(missing_ok=True)
        self.folder.lock.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Release the folder; the run in it can be resumed."""
        self._file.close()


def is_held(folder: RunFolder, token: str) -> bool:
    """Tell whether the folder, as this machine sees it, is the one whose claim has this token."""
    try:
        return _read(folder.lock.read_text()).get("token") == token
    except OSError:
        return False


def clear(folder: RunFolder) -> None:
    """Remove the files that a run has left in its folder. Raises ConfigError where a job trains there."""
    if not folder.out.exists():
        return folder.clear()
    with _locked(folder):
        folder.clear()
        folder.lock.unlink()


def _locked(folder: RunFolder) -> IO[str]:
    """Return the folder's lock file, locked until it is closed.

    Raises ConfigError, with the process that holds the lock, where another one does.
    """
    lock = folder.lock
    while True:
        file = lock.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            held = _read(file.read())
            file.close()
            raise ConfigError(
                f"{folder.out} is in use: process {held.get('process')} on {held.get('host')} trains there"
            ) from None
        try:
            if lock.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        except FileNotFoundError:
            pass
        file.close()  # whoever had it was done and has removed it, just now


def _read(text: str) -> dict[str, Any]:
    """Return the JSON object that a text holds; {} where it holds none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
