"""Run a notebook with parameters, as most DVC stages do.

    python -m pipelines.run_notebook notebooks/20_train.ipynb train@diloco_m2 -p run diloco_m2

The executed copy goes to build/notebooks/ and its wall-clock time to build/times/; both differ from run to run, so
nothing depends on them. A parameter that the notebook does not declare is refused. A notebook ends with the `dvc` that
runs its stage, however that ends, and what it trains writes a checkpoint.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import papermill
import psutil
import yaml

from lowcomm.settings import ConfigError, nearest
from pipelines.project import BUILD, ROOT, load_params, record_seconds

#: The names of shells, one of which stands between dvc and the command of a stage.
_SHELLS = {"sh", "bash", "dash", "zsh", "fish"}


def _end_with_dvc() -> None:
    """Interrupt this process once the `dvc` that runs its stage is gone, which ends no children when it is killed."""
    dvc = psutil.Process().parent()
    while dvc is not None and dvc.name() in _SHELLS:
        dvc = dvc.parent()

    def watch() -> None:
        while dvc is not None and dvc.is_running():
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell that puts dvc into the background ignores
    threading.Thread(target=watch, name="dvc", daemon=True).start()


def check_parameters(notebook: Path, parameters: dict[str, Any]) -> None:
    """Raise ConfigError where a parameter is not in the notebook's parameters cell."""
    declared = papermill.inspect_notebook(str(notebook))
    for name in parameters:
        if name not in declared:
            raise ConfigError(f"{notebook.name} has no parameter {name!r}{nearest(name, declared)}")


def run(notebook: Path, name: str, parameters: dict[str, Any]) -> float:
    """Execute a notebook with parameters, and record and return the seconds that it took.

    name: that of the stage. Raises ConfigError where there is no such notebook or it does not declare a parameter, and
    what papermill raises where a cell fails.
    """
    if not notebook.exists():
        raise ConfigError(f"no notebook {notebook}")
    check_parameters(notebook, parameters)
    scale = parameters.get("scale") or load_params()["scale"]
    executed = BUILD / "notebooks" / scale / f"{name.replace('@', '-')}.ipynb"
    executed.parent.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    begin = time.perf_counter()
    papermill.execute_notebook(
        str(notebook),
        str(executed),
        parameters=parameters,
        cwd=str(notebook.parent),
        kernel_name="python3",
        progress_bar=sys.stderr.isatty(),
        request_save_on_cell_execute=True,
    )
    seconds = time.perf_counter() - begin
    record_seconds(name, scale, seconds)
    return seconds


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv`, by default the process's own, and return its exit status; see `--help`."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.run_notebook", description=__doc__.split("\n")[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("name", help="name of the stage")
    parser.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), dest="parameters")
    args = parser.parse_args(argv)
    if "DVC_STAGE" in os.environ:
        _end_with_dvc()
    try:
        seconds = run(args.notebook.resolve(), args.name, {k: yaml.safe_load(v) for k, v in args.parameters})
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except papermill.PapermillExecutionError as error:
        print(f"{args.notebook} failed in cell {error.exec_count}: {error.ename}: {error.evalue}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{args.notebook} was interrupted", file=sys.stderr)
        return 130
    print(f"{args.name}: {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
