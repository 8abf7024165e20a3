"""The command `lowcomm`: train runs, list them, prepare their corpora, ask which method suits some machines."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

#: Command -> the module whose `main` it is, and what it does.
COMMANDS = {
    "train": ("lowcomm.train", "train a run of params.yaml"),
    "runs": ("lowcomm.__main__", "list the runs of params.yaml, and what is trained of them"),
    "prepare": ("lowcomm.__main__", "prepare a corpus of params.yaml"),
    "plan": ("lowcomm.cost.planner", "which method for which machines: time, bytes, memory and loss"),
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


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see `--help`. Each command has a `--help` of its own."""
    words = list(sys.argv[1:] if argv is None else argv)
    told = "\n".join(f"  {name:9}{what}" for name, (_, what) in COMMANDS.items())
    if not words or words[0] not in COMMANDS:
        asked = "--help" in words
        print(f"{__doc__}\n\nusage: lowcomm COMMAND ...\n\n{told}", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    name, *rest = words
    if name in ("runs", "prepare"):
        from lowcomm.settings import ConfigError

        try:
            return (_runs if name == "runs" else _prepare)(rest)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
    return importlib.import_module(COMMANDS[name][0]).main(rest)


if __name__ == "__main__":
    sys.exit(main())
