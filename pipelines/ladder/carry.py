"""Carry the origin of the points over a change of the code, on any kind of processor.

    git worktree add ../before COMMIT                    the code of which the origin's probes are
    python -m pipelines.ladder.carry ../before

Points are done for as long as the digest of their row's probe is the one that they were made with (`origin`). Most
probes are the same on every processor, but not all: where pipelines are compressed, or Muon computes, another kind may
round otherwise. A change of the code that is made on such a machine would seem to change those rows. So this trains all
probes twice here, by the code as it was and as it is. What both have alike the change has not touched, and it keeps its
digest; what differs gets a new one, and its points count as not done.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from lowcomm.experiment.source import source_digest
from lowcomm.settings import ConfigError
from pipelines.ladder.origin import Origin
from pipelines.ladder.plan import LADDER, Ladder
from pipelines.probes import write_digests
from pipelines.project import locked

#: What the code as it was is asked: to train its probes, and to say which code it is and what their digests are.
ASKED = """
import json, sys
from lowcomm.experiment.source import source_digest
from pipelines.ladder.plan import LADDER
from pipelines.probes import write_digests
write_digests(LADDER.project)
probes = {file.stem: json.loads(file.read_text()) for file in (LADDER.build / "probes").glob("*.json")}
print(json.dumps({"source": source_digest(), "probes": probes}))
"""


def probes_of(checkout: Path) -> tuple[str, dict[str, dict[str, str]]]:
    """Train the probes of the code in another checkout on this machine, with the packages that are installed here.

    Returns the digest of that code, and those of its probes, by run and variant. Raises ConfigError where it fails.
    """
    words = [sys.executable, "-c", ASKED]
    done = subprocess.run(words, cwd=checkout, env=os.environ | {"PYTHONPATH": str(checkout)}, stdout=subprocess.PIPE)
    if done.returncode:
        raise ConfigError(f"the code in {checkout} has not trained its probes: exit status {done.returncode}")
    told = json.loads(done.stdout.splitlines()[-1])
    return told["source"], told["probes"]


def carried(origin: Origin, before: Origin, after: Origin) -> tuple[Origin, list[str]]:
    """Return the origin over a change of the code, and the names of the rows whose probes the change has touched.

    Args:
        origin: that of the points.
        before: what the code as it was makes here.
        after: what the code as it is makes here.

    Raises:
        ConfigError: the code as it was is not that of the origin, or their texts differ.
    """
    if before.source != origin.source:
        raise ConfigError(
            f"the code as it was has the digest {before.source[:12]}, and the probes of the points are of"
            f" {origin.source[:12]}: check out the commit that wrote origin.json"
        )
    if after.smoke != origin.smoke:
        raise ConfigError("probes are trained on another text here than those of the points: nothing can be carried")
    was, changed, probes = before.digests, [], {}
    for (run, variant), digest in after.digests.items():
        name = "/".join(filter(None, (run, variant)))
        same = was.get((run, variant)) == digest and (run, variant) in origin.digests
        if not same and (run, variant) in origin.digests:
            changed.append(name)
        probes.setdefault(run, {})[variant] = origin.digests[run, variant] if same else digest
    return dataclasses.replace(origin, probes=probes, source=after.source), changed


def carry(ladder: Ladder, checkout: Path) -> list[str]:
    """Carry the origin of a ladder's points over the change from another checkout, and return the rows that it touched.

    Raises ConfigError as `probes_of` and `carried` do, and where there are no points.
    """
    if ladder.origin is None:
        raise ConfigError(f"no origin.json in {ladder.results}: there are no points yet")
    source, probes = probes_of(checkout)
    with locked(ladder.build / "prepare.lock"):
        origin = ladder.origin  # as it is by now
        write_digests(ladder.project)
        after = Origin.of_probes(ladder, origin.python, origin.corpora)  # which it needs no points' text for
        found, changed = carried(origin, dataclasses.replace(after, source=source, probes=probes), after)
        found.write(ladder.results)
        write_digests(ladder.project, known=found.digests)
    return changed


def main() -> int:
    """Run the command line and return its exit status; see `--help`."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.ladder.carry", description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="the code of which the origin's probes are")
    try:
        changed = carry(LADDER, parser.parse_args().checkout.resolve())
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return 1
    print(
        f"{source_digest()[:12]}: " + (f"changed, and not done: {', '.join(changed)}" if changed else "nothing changed")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
