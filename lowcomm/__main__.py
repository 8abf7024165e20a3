"""The command `lowcomm`: train runs, list them, prepare corpora, ask which method suits some machines, keep a store."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from lowcomm.settings import ConfigError, nearest

#: Command -> the module whose `main` it is, what it does, and the extra of the package that has what it needs.
COMMANDS = {
    "train": ("lowcomm.train", "train a run of params.yaml", "train"),
    "runs": ("lowcomm.__main__", "list the runs of params.yaml, and what is trained of them", "train"),
    "prepare": ("lowcomm.__main__", "prepare a corpus of params.yaml", "train"),
    "plan": ("lowcomm.cost.planner", "which method for which machines: time, bytes, memory and loss", "plan"),
    "store": ("lowcomm.__main__", "keep the store by which elastic replicas agree on who takes part", ""),
}


def _runs(words: Sequence[str]) -> int:
    from lowcomm.train import main as train

    return train(["--list", *words])


def _prepare(words: Sequence[str]) -> int:
    from lowcomm.experiment.data import prepared
    from lowcomm.experiment.project import Project

    parser = argparse.ArgumentParser(prog="lowcomm prepare", description=COMMANDS["prepare"][1])
    parser.add_argument("corpus")
    parser.add_argument("--scale", help="default: params.yaml's")
    args = parser.parse_args(words)
    print(prepared(Project.find(), args.corpus, args.scale))
    return 0


def _store(words: Sequence[str]) -> int:
    import signal
    import threading

    from lowcomm.comm.processes import elastic_store

    parser = argparse.ArgumentParser(prog="lowcomm store", description=COMMANDS["store"][1])
    parser.add_argument("port", type=int, help="0: any that is free")
    args = parser.parse_args(words)
    store = elastic_store(f"0.0.0.0:{args.port}", hosts=True)
    told_to_end = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: told_to_end.set())
    print(f"a store for elastic replicas, on port {store.port}; Ctrl-C ends it", flush=True)
    told_to_end.wait()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default the process's own, and return its exit status; see `--help`.

    Each command has a `--help` of its own.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    told = "\n".join(f"  {name:9}{what}" for name, (_, what, _) in COMMANDS.items())
    if not words or words[0] not in COMMANDS:
        asked = "--help" in words or "-h" in words
        print(f"{__doc__}\n\nusage: lowcomm COMMAND ...\n\n{told}", file=sys.stdout if asked else sys.stderr)
        if words and not asked:
            print(f"\nthere is no command {words[0]!r}{nearest(words[0], COMMANDS)}", file=sys.stderr)
        return 0 if asked else 2
    name, *rest = words
    module, _, extra = COMMANDS[name]
    try:
        if here := {"runs": _runs, "prepare": _prepare, "store": _store}.get(name):
            return here(rest)
        return importlib.import_module(module).main(rest)
    except ConfigError as error:
        print(error, file=sys.stderr)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lowcomm"):
            raise
        print(f"lowcomm {name} needs {error.name}: pip install 'lowcomm[{extra}]'", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
