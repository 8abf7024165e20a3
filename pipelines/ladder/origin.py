"""The origin of the points in git: the corpora and the probes of the code that they were made with.

The ladder's text is Python source, of the standard library and of pinned packages. Another release of Python has
another standard library, and so another text, whose points would not be pairs with those in git. With such a release
the points are shown as they are, and none is added.

Probes tell whether a change of the code changes what a row computes. Where the code is that of the origin there is
nothing to tell, and the origin's digests are taken as they are: a machine on which points are added needs no probes of
those rows, and one whose processor rounds otherwise does not train anew what is done.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowcomm.experiment.source import source_digest
from lowcomm.settings import ConfigError
from pipelines.probes import SCALE
from pipelines.project import write_whole

if TYPE_CHECKING:
    from pathlib import Path

    from pipelines.ladder.plan import Ladder


@dataclass(frozen=True)
class Origin:
    """The release of Python, the corpora and the probes that points were made with; it is kept beside them.

    python: the release. corpora: the digests of the tokenizer and the shards of each corpus. smoke: the same of the
    text that probes are trained on. probes: the digests of the variants of each run. source: the digest of the code
    that trained them (`source_digest`); "" where that is not known.
    """

    python: str
    corpora: dict[str, list[str]]
    smoke: dict[str, list[str]]
    probes: dict[str, dict[str, str]]
    source: str = ""

    @classmethod
    def here(cls, ladder: Ladder) -> Origin:
        """Return what a point that is trained here would be made with.

        Raises ConfigError where a corpus is missing.
        """
        corpora = {name: ladder.corpus(name, ladder.first_rung) for name in ladder.params["corpora"]}
        return cls.of_probes(ladder, platform.python_version(), corpora)

    @classmethod
    def of_probes(cls, ladder: Ladder, python: str, corpora: dict[str, list[str]]) -> Origin:
        """Return an origin with the probes, their text and the code as they are here, and corpora that are known."""
        smoke = {name: ladder.corpus(name, SCALE) for name in ladder.params["corpora"]}
        files = {path.stem: path for path in sorted((ladder.build / "probes").glob("*.json"))}
        probes = {run: json.loads(path.read_text()) for run, path in files.items()}
        return cls(python, corpora, smoke, probes, source_digest())

    @classmethod
    def read(cls, results: Path) -> Origin | None:
        """Return the origin that is kept beside the points of a results folder; None where none is."""
        file = results / "origin.json"
        return cls(**json.loads(file.read_text())) if file.exists() else None

    def write(self, results: Path) -> None:
        """Write the origin beside the points of a results folder, as origin.json."""
        write_whole(results / "origin.json", json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @property
    def digests(self) -> dict[tuple[str, str], str]:
        """The digest of each probe, by the names of the run and of its variant."""
        return {(run, variant): digest for run, some in self.probes.items() for variant, digest in some.items()}

    @property
    def is_of_this_code(self) -> bool:
        """Tell whether its probes were trained by the code as it is here."""
        return self.source == source_digest()

    def has_text_of(self, ladder: Ladder) -> bool:
        """Tell whether probes are trained on the same text here, so that their digests can be compared."""
        return self.smoke == {name: ladder.corpus(name, SCALE) for name in self.smoke}

    def is_of_text(self, ladder: Ladder, corpus: str) -> bool:
        """Tell whether a corpus here is the same as that of the points."""
        return self.corpora[corpus] == ladder.corpus(corpus, ladder.first_rung)

    def check(self, ladder: Ladder, corpus: str) -> None:
        """Raise ConfigError where a corpus here is not the same as that of the points."""
        if not self.is_of_text(ladder, corpus):
            raise ConfigError(
                f"the corpus {corpus} was made with Python {platform.python_version()} here, but that of the points in"
                f" {ladder.results} with {self.python}, and is another: train with that, or remove origin.json, points,"
                " tuning and tuned there, to begin anew"
            )


def keep_origin(ladder: Ladder) -> None:
    """Write down what points are made with here, unless the points that are there are of another text.

    Where probes differ from those of the origin, it is said which.
    """
    kept, here = ladder.origin, Origin.here(ladder)
    if kept is not None and (kept.corpora, kept.smoke) != (here.corpora, here.smoke):
        return
    before = kept.digests if kept else {}
    changed = ["/".join(filter(None, key)) for key, digest in here.digests.items() if before.get(key, digest) != digest]
    if changed:
        print(f"other probes than those of the points, which count as not done: {', '.join(changed)}", flush=True)
        print("whether it is the code or the processor that changed: python -m pipelines.ladder.carry", flush=True)
    if kept != here:
        here.write(ladder.results)
