"""Write the settings of each run and corpus, on which its stage of dvc.yaml depends in place of `params.yaml`.

    python -m pipelines.settings

There is a file for each run in build/settings/<scale>/runs/, with all its points, and one for each corpus in
build/settings/<scale>/corpora/: for the scale that `params.yaml` names, the smoke scale, at which probes run, and the
papers' own, of which tables speak. Files hold what differs from the defaults, so that a new setting changes no file;
what a default does, the probes tell. Settings that break a rule stop the command, before any training.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from pipelines.project import BUILD, PROJECT


def set_values(config: Any) -> dict[str, Any]:
    """Return the fields of a settings dataclass that differ from their defaults; sections are dictionaries within."""
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            if inner := set_values(value):
                found[field.name] = inner
            continue
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if value != default:
            found[field.name] = value
    return found


def write(scale: str, folder: Path) -> None:
    """Write the settings of all runs and corpora at a scale, a file for each in `folder`.

    Raises ConfigError where settings break a rule.
    """
    params = PROJECT.load_params()
    for kind in ("runs", "corpora"):
        (folder / kind).mkdir(parents=True)
    for run in params["runs"]:
        points = [set_values(config) for config in PROJECT.run_points(run, scale=scale, params=params)]
        (folder / "runs" / f"{run}.json").write_text(json.dumps(points, indent=1) + "\n")
    for corpus in params["corpora"]:
        source, data = PROJECT.corpus_configs(corpus, scale=scale, params=params)
        both = {"source": set_values(source), "data": set_values(data)}
        (folder / "corpora" / f"{corpus}.json").write_text(json.dumps(both, indent=1) + "\n")


def main() -> None:
    """Remove the files in build/settings, and write all of them anew."""
    root = BUILD / "settings"
    shutil.rmtree(root, ignore_errors=True)
    for scale in dict.fromkeys((PROJECT.load_params()["scale"], "smoke", "paper")):
        write(scale, root / scale)


if __name__ == "__main__":
    main()
