"""Low-communication training of language models: the algorithms of four papers, composable."""

from pathlib import Path

#: Root of the checkout: nothing relies on the working directory.
ROOT = Path(__file__).resolve().parent.parent
#: Everything heavy: corpora, shards, runs, executed notebooks. DVC tracks it, git ignores it.
BUILD = ROOT / "build"
#: Set by a launcher to its process id: ranks stop when it is gone.
LAUNCHER_VARIABLE = "LOWCOMM_LAUNCHER"
#: Seconds that ranks have to write a checkpoint once they are told to stop.
SAVING_S = 300
