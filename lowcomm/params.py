"""`params.yaml`: from names to configurations and folders.

It holds four dictionaries. `scales.<scale>` gives every number a run needs, and families of `sizes` that change some of
them (and, under `methods`, numbers of methods at that size); `methods.<method>` names a combination of the independent
choices; `corpora.<corpus>` says where text comes from.
`runs.<run>` names a method, a corpus, a replica count, a family of sizes (and one of it, `base` by default) and seeds,
and may override any section; with `variants` it is a sweep: each variant overrides once more, its size and seeds too.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from lowcomm import BUILD, ROOT
from lowcomm.config import CorpusConfig, DataConfig, RunConfig
from lowcomm.presets import PRESETS
from lowcomm.rules import check_bounds
from lowcomm.settings import ConfigError, build, nearest


def load_params(path: Path | None = None) -> dict[str, Any]:
    """The whole of `params.yaml` as plain dictionaries, its top-level keys checked."""
    path = path or ROOT / "params.yaml"
    params = yaml.safe_load(path.read_text())
    valid = {"scale", "scales", "methods", "runs", "corpora"}
    for key in params:
        if key not in valid:
            raise ConfigError(f"unknown key {key} in {path.name}{nearest(key, valid)}")
    return params


def pick(section: dict[str, Any], key: str, what: str) -> Any:
    """section[key], or an error that names the nearest entry."""
    if key not in section:
        raise ConfigError(f"no {what} named {key!r}{nearest(key, section)}")
    return section[key]


def _merge(base: dict, over: dict) -> dict:
    out = dict(base)
    for key, value in over.items():
        out[key] = _merge(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def _layer(base: dict, over: dict) -> dict:
    """Sections of `over` on those of `base`. A preset is a whole model: nothing below it shines through."""
    if "preset" in over.get("model", {}):
        base = base | {"model": {}}
    return _merge(base, over)


_REQUIRED = ("method", "corpus", "replicas", "sizes", "seeds")
_RUN_KEYS = {*_REQUIRED, "size", "override", "variants"}


def _entry(run: str, params: dict[str, Any]) -> dict[str, Any]:
    """What `params.yaml` says of a run, its keys and seeds checked."""
    entry = pick(params["runs"], run, "run")
    for key in _REQUIRED:
        if key not in entry:
            raise ConfigError(f"runs.{run} lacks {key}")
    for key in entry:
        if key not in _RUN_KEYS:
            raise ConfigError(f"unknown key runs.{run}.{key}{nearest(key, _RUN_KEYS)}")
    variants = entry.get("variants", {"": {}})
    if not isinstance(variants, dict) or not variants or not all(isinstance(c, dict) for c in variants.values()):
        raise ConfigError(f"runs.{run}.variants must name at least one variant, each a mapping ({{}} changes nothing)")
    variants = {f"{run}.variants.{name}": change for name, change in variants.items()}
    for name, change in {run: entry, **variants}.items():
        seeds = change.get("seeds", [0])
        if not isinstance(seeds, list) or not seeds or not all(type(s) is int and s >= 0 for s in seeds):
            raise ConfigError(f"runs.{name}.seeds = {seeds!r} must be a list of at least one whole number from 0")
    return entry


def run_config(
    run: str,
    *,
    variant: str = "",
    seed: int | None = None,
    scale: str | None = None,
    params: dict | None = None,
    **override: Any,
) -> RunConfig:
    """The configuration of one run of `params.yaml`.

    `scale` defaults to the file's, `seed` to the run's first; `variant` must be one of the run's, if it has any.
    `override` merges into sections, e.g. ``run_config("diloco_m2", train={"steps": 60})``. Raises ConfigError.
    """
    params = params or load_params()
    scale = scale or params["scale"]
    entry = _entry(run, params)
    pick(params["corpora"], entry["corpus"], "corpus")
    numbers = dict(pick(params["scales"], scale, "scale"))
    sizes = {"base": {}} | pick(numbers.pop("sizes"), entry["sizes"], f"family of sizes at the {scale} scale")
    variants = entry.get("variants", {"": {}})
    if variant not in variants and not variant:
        raise ConfigError(f"run {run} is a sweep: choose one of its variants, {', '.join(variants)}")
    change = dict(pick(variants, variant, f"variant of {run}"))
    seeds = change.pop("seeds", entry["seeds"])
    size = dict(pick(sizes, change.pop("size", entry.get("size", "base")), f"size of {entry['sizes']}"))
    methods_there = size.pop("methods", {})
    for name in methods_there:
        pick(params["methods"], name, "method")
    at_this_size = methods_there.get(entry["method"], {})
    layers = (
        size,
        {"data": {"corpus": entry["corpus"]}, "replicas": entry["replicas"]},
        {"method": pick(params["methods"], entry["method"], "method")},
        {"method": at_this_size},
        entry.get("override", {}),
        change,
        override,
    )
    sections = numbers
    for layer in layers:
        sections = _layer(sections, layer)
    model = dict(sections["model"])
    if "preset" in model:
        model = asdict(pick(PRESETS, model.pop("preset"), "preset")) | model
    sections["model"] = model
    sections |= {"name": run, "variant": variant, "scale": scale, "seed": seeds[0] if seed is None else seed}
    return build(RunConfig, sections, f"{run}.{variant}" if variant else run)


def run_points(run: str, *, scale: str | None = None, params: dict | None = None, **override: Any) -> list[RunConfig]:
    """The configurations of all variants and seeds of a run; the smoke scale takes the first seed only."""
    params = params or load_params()
    scale = scale or params["scale"]
    entry = _entry(run, params)
    return [
        run_config(run, variant=variant, seed=seed, scale=scale, params=params, **override)
        for variant, change in entry.get("variants", {"": {}}).items()
        for seed in change.get("seeds", entry["seeds"])[: 1 if scale == "smoke" else None]
    ]


def overrides(pairs: list[str]) -> dict[str, Any]:
    """Command-line settings as nested sections: ["train.steps=60"] -> {"train": {"steps": 60}}."""
    out: dict[str, Any] = {}
    for pair in pairs:
        key, eq, value = pair.partition("=")
        if not eq:
            raise ConfigError(f"--set {pair} must be section.key=value")
        if key in ("name", "variant", "scale", "seed"):
            raise ConfigError(f"--set {pair}: {key} is not a setting but an argument of its own")
        *sections, last = key.split(".")
        level = out
        for section in sections:
            level = level.setdefault(section, {})
            if not isinstance(level, dict):
                raise ConfigError(f"--set {pair}: {section} has been set to {level!r} already")
        level[last] = yaml.safe_load(value)
    return out


def corpus_configs(
    corpus: str, *, scale: str | None = None, params: dict | None = None
) -> tuple[CorpusConfig, DataConfig]:
    """Where a corpus of `params.yaml` comes from, and how `scale` cuts it. Raises ConfigError."""
    params = params or load_params()
    source = build(CorpusConfig, pick(params["corpora"], corpus, "corpus"), f"corpora.{corpus}")
    data = pick(params["scales"], scale or params["scale"], "scale")["data"] | {"corpus": corpus}
    config = build(DataConfig, data, "data")
    check_bounds("data", config)
    return source, config


def run_dir(config: RunConfig, root: Path | None = None) -> Path:
    """Folder of a run's metrics, summary and checkpoints: `[root/][variant/]seedN`."""
    return (root or BUILD / "runs" / config.scale / config.name) / config.variant / f"seed{config.seed}"


def times_dir(config: RunConfig, root: Path | None = None) -> Path:
    """Folder of a run's times, which differ from machine to machine and are not tracked."""
    return run_dir(config, root or BUILD / "times" / config.scale / "runs" / config.name)


def data_dir(corpus: str, scale: str) -> Path:
    """Folder of a corpus' tokenizer, shards and card."""
    return BUILD / "data" / scale / corpus
