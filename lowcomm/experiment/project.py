"""A project: a folder with a `params.yaml`, which names runs, and where their corpora and results lie.

`params.yaml` holds four dictionaries. `scales.<scale>` gives every number a run needs, and families of `sizes` that
change some of them (and, under `methods`, numbers of methods at that size); `methods.<method>` names a combination of
the independent choices; `corpora.<corpus>` says where text comes from. `runs.<run>` names a method, a corpus, a replica
count, a family of sizes (and one of it, `base` by default) and seeds, and may override any section; `times` multiplies
numbers instead, whatever they are at a scale. With `variants` a run is a sweep: each variant overrides once more, its
size, seeds and factors too.
"""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lowcomm.experiment.run_folder import RunFolder
from lowcomm.model.presets import PRESETS
from lowcomm.settings import ConfigError, brief, build, check_bounds, nearest

if TYPE_CHECKING:  # it imports torch, for which the reading of results need not wait
    from lowcomm.experiment.config import CorpusConfig, DataConfig, RunConfig


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # libyaml's, where it is, is ten times as fast
    """YAML whose mappings name each key once; what `<<` merges may be named again."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Take in the mappings that `<<` merges, once. Raises ConstructorError where the node names a key twice."""
        if getattr(node, "is_flat", False):
            return
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is named twice", key.start_mark)
            seen.add(key.value)
        super().flatten_mapping(node)
        node.is_flat = True


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file.

    Raises ConfigError where it cannot be read or is not YAML, or a mapping in it names a key twice.
    """
    try:
        return yaml.load(path.read_text(), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


Params = dict[str, Any]
_REQUIRED = ("method", "corpus", "replicas", "sizes", "seeds")
_RUN_KEYS = {*_REQUIRED, "size", "override", "times", "variants"}


def pick(section: dict[str, Any], key: str, what: str) -> Any:
    """Return section[key]. Raises ConfigError, with the nearest key, where there is none; `what` names its kind."""
    try:
        return section[key]
    except (KeyError, TypeError):  # the section may be none, or the key a list
        there = map(str, section) if isinstance(section, dict) else ()
        raise ConfigError(f"no {what} named {brief(key)}{nearest(key, there)}") from None


def merge(base: dict, over: Any, where: str = "settings") -> dict:
    """Return the settings of `base` as `over`, which stands at `where`, overrides them, section by section.

    Neither is changed. Raises ConfigError where `over` has a single value, or nothing, in place of a section.
    """
    if not isinstance(over, dict):
        raise ConfigError(f"{where} must be a mapping of settings, got {brief(over)}")
    out = dict(base)
    for key, value in over.items():
        out[key] = merge(out[key], value, f"{where}.{key}") if isinstance(out.get(key), dict) else value
    return out


def _times(sections: dict, factors: dict, where: str) -> dict:
    """Return the sections with some of their numbers multiplied; whole numbers stay whole and are rounded down."""
    if not isinstance(factors, dict):
        raise ConfigError(f"{where} = {factors!r} must be a mapping of sections to the factors of their numbers")
    out = dict(sections)
    for key, factor in factors.items():
        value = pick(sections, key, f"number in {where}")
        if isinstance(value, dict):
            out[key] = _times(value, factor, f"{where}.{key}")
        elif all(type(x) in (int, float) and math.isfinite(x) for x in (value, factor)):
            out[key] = type(value)(value * factor)
        else:
            raise ConfigError(f"{where}.{key} = {factor!r} must be a number, and multiply a number, got {value!r}")
    return out


def _layer(base: dict, over: Any, where: str) -> dict:
    """Return the sections of `base` as those of `over` override them; a model with a preset replaces that of `base`."""
    merged = merge(base, over, where)
    return merged | {"model": over["model"]} if "preset" in over.get("model", {}) else merged


def _check_name(name: str, where: str) -> None:
    """Raise ConfigError for a name that cannot be that of a folder."""
    if not isinstance(name, str):
        raise ConfigError(f"{where}: the name {name!r} must be text, in quotes")
    if not name or name.startswith(".") or {"/", "\\"} & set(name):
        raise ConfigError(f"{where}.{name}: a name is that of a folder, so it has no slash and begins with no dot")


def _entry(run: str, params: Params) -> dict[str, Any]:
    """Return the entry of a run in `params.yaml`, its keys and seeds checked, always with `variants`."""
    entry = pick(params["runs"], run, "run")
    _check_name(run, "runs")
    if not isinstance(entry, dict):
        raise ConfigError(f"runs.{run} must be a mapping of settings, got {brief(entry)}")
    for key in _REQUIRED:
        if key not in entry:
            raise ConfigError(f"runs.{run} lacks {key}")
    for key in entry:
        if key not in _RUN_KEYS:
            raise ConfigError(f"unknown key runs.{run}.{key}{nearest(key, _RUN_KEYS)}")
    for key in ("method", "corpus", "sizes"):
        if not isinstance(entry[key], str):
            raise ConfigError(f"runs.{run}.{key} = {brief(entry[key])} must be a name")
    variants = entry.get("variants", {"": {}})
    if not isinstance(variants, dict) or not variants or not all(isinstance(c, dict) for c in variants.values()):
        raise ConfigError(f"runs.{run}.variants must name at least one variant, each a mapping ({{}} changes nothing)")
    for name in entry.get("variants", ()):
        _check_name(name, f"runs.{run}.variants")
    named = {f"{run}.variants.{name}": change for name, change in variants.items()}
    for name, change in {run: entry, **named}.items():
        seeds = change.get("seeds", [0])
        if not isinstance(seeds, list) or not seeds or not all(type(s) is int and s >= 0 for s in seeds):
            raise ConfigError(f"runs.{name}.seeds = {seeds!r} must be a list of at least one whole number from 0")
        if len(set(seeds)) < len(seeds):
            raise ConfigError(f"runs.{name}.seeds = {seeds!r} has a seed twice")
    return {"variants": variants} | entry


def points(run: str, params: Params, scale: str) -> list[tuple[str, int]]:
    """Return the (variant, seed) pairs that make up a run, in order; the smoke scale takes each variant's first seed.

    The variant is "" where the run is no sweep. Raises ConfigError where there is no such scale, and where the entry of
    the run is missing or malformed.
    """
    pick(params["scales"], scale, "scale")
    entry = _entry(run, params)
    return [
        (variant, seed)
        for variant, change in entry["variants"].items()
        for seed in change.get("seeds", entry["seeds"])[: 1 if scale == "smoke" else None]
    ]


def overrides(pairs: list[str]) -> dict[str, Any]:
    """Return command-line settings as nested sections: {"train": {"steps": 60}} for ["train.steps=60"].

    Raises ConfigError for a name that is no setting of a run, and for a value that YAML cannot read.
    """
    from lowcomm.experiment.config import RunConfig

    arguments = {"name", "variant", "scale", "seed"}
    known = {field.name for field in fields(RunConfig)} - arguments
    out: dict[str, Any] = {}
    for pair in pairs:
        key, eq, value = pair.partition("=")
        if not eq:
            raise ConfigError(f"--set {pair} must be section.key=value")
        if key in arguments:
            raise ConfigError(f"--set {pair}: {key} is not a setting but an argument of its own")
        *sections, last = key.split(".")
        if (first := [*sections, last][0]) not in known:
            raise ConfigError(f"--set {pair}: no section or setting is named {first!r}{nearest(first, known)}")
        level = out
        for section in sections:
            level = level.setdefault(section, {})
            if not isinstance(level, dict):
                raise ConfigError(f"--set {pair}: {section} has been set to {level!r} already")
        try:
            level[last] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            why = " ".join(str(error).split())
            raise ConfigError(
                f"--set {pair}: the value is not YAML (a text that begins with * wants quotes): {why}"
            ) from None
    return out


class Project:
    """The folder `root` with its `params.yaml`; corpora, runs and times are in `build`, by default the one below it."""

    def __init__(self, root: Path, build: Path | None = None):
        self.root, self.build = root, build or root / "build"

    @classmethod
    def find(cls, start: Path | None = None) -> Project:
        """Return the project of the nearest folder with a `params.yaml`, from `start` upwards.

        start: by default the working directory. Raises ConfigError where there is no such folder.
        """
        start = (start or Path.cwd()).resolve()
        for folder in (start, *start.parents):
            if (folder / "params.yaml").exists():
                return cls(folder)
        raise ConfigError(f"no params.yaml in {start} or above it: run this in the folder of a project")

    def load_params(self) -> Params:
        """Read the whole of `params.yaml` as plain dictionaries.

        Raises ConfigError where it cannot be read or is not YAML, or its top-level keys are not those of a project.
        """
        path = self.root / "params.yaml"
        params = read_yaml(path)
        valid = {"scale", "scales", "methods", "runs", "corpora"}
        if not isinstance(params, dict) or not valid <= set(params):
            missing = valid - set(params) if isinstance(params, dict) else valid
            raise ConfigError(f"{path} lacks {', '.join(sorted(missing))}")
        for key, section in params.items():
            if key not in valid:
                raise ConfigError(f"unknown key {key} in {path.name}{nearest(key, valid)}")
            if key == "scale" and not isinstance(section, str):
                raise ConfigError(f"scale in {path} must be the name of one, got {brief(section)}")
            if key != "scale" and not isinstance(section, dict):
                raise ConfigError(f"{key} in {path} must be a mapping of names, got {brief(section)}")
        return params

    def run_config(
        self,
        run: str,
        *,
        variant: str = "",
        seed: int | None = None,
        scale: str | None = None,
        params: Params | None = None,
        **override: Any,
    ) -> RunConfig:
        """Return the configuration of a run, at one variant and seed.

        `scale` defaults to the file's, `seed` to the run's first, `params` to what `load_params` reads; `variant` must
        be one of the run's, if it has any. `override` merges into sections, e.g. ``run_config("diloco_m2",
        train={"steps": 60})``. Raises ConfigError for a name that there is not, and for settings that break a rule.
        """
        from lowcomm.experiment.config import RunConfig

        params = params or self.load_params()
        scale = scale or params["scale"]
        entry = _entry(run, params)
        pick(params["corpora"], entry["corpus"], "corpus")
        numbers = merge({"model": {}, "sizes": {}}, pick(params["scales"], scale, "scale"), f"scales.{scale}")
        family = pick(numbers.pop("sizes"), entry["sizes"], f"family of sizes at the {scale} scale")
        sizes = merge({"base": {}}, family, f"scales.{scale}.sizes.{entry['sizes']}")
        variants = entry["variants"]
        if variant not in variants and not variant:
            raise ConfigError(f"run {run} is a sweep: choose one of its variants, {', '.join(variants)}")
        if variant and "" in variants:
            raise ConfigError(f"run {run} has no variants, so none is named {variant!r}")
        change = dict(pick(variants, variant, f"variant of {run}"))
        seeds = change.pop("seeds", entry["seeds"])
        where = f"runs.{run}.variants.{variant}.times" if "times" in change else f"runs.{run}.times"
        factors = change.pop("times", entry.get("times", {}))
        named = change.pop("size", entry.get("size", "base"))
        at_size = f"scales.{scale}.sizes.{entry['sizes']}.{named}"
        size = merge({"methods": {}}, pick(sizes, named, f"size of {entry['sizes']}"), at_size)
        methods_there = size.pop("methods")
        for name in methods_there:
            pick(params["methods"], name, "method")
        method = merge({}, pick(params["methods"], entry["method"], "method"), f"methods.{entry['method']}")
        title = f"{run}.{variant}" if variant else run
        layers = {
            at_size: size,
            f"runs.{run}": {"data": {"corpus": entry["corpus"]}, "replicas": entry["replicas"], "method": method},
            f"{at_size}.methods.{entry['method']}": {"method": methods_there.get(entry["method"], {})},
            f"runs.{run}.override": entry.get("override", {}),
            f"runs.{run}.variants.{variant}": change,
        }
        sections = numbers
        for at, layer in layers.items():
            sections = _layer(sections, layer, at)
        sections = _layer(_times(sections, factors, where), override, title)
        model = dict(sections["model"])
        if "preset" in model:
            model = asdict(pick(PRESETS, model.pop("preset"), "preset")) | model
        sections["model"] = model
        sections |= {"name": run, "variant": variant, "scale": scale, "seed": seeds[0] if seed is None else seed}
        return build(RunConfig, sections, title)

    def run_points(
        self, run: str, *, scale: str | None = None, params: Params | None = None, **override: Any
    ) -> list[RunConfig]:
        """Return the configurations of all `points` of a run, its variants and seeds; arguments as for `run_config`."""
        params = params or self.load_params()
        scale = scale or params["scale"]
        return [
            self.run_config(run, variant=variant, seed=seed, scale=scale, params=params, **override)
            for variant, seed in points(run, params, scale)
        ]

    def corpus_configs(
        self, corpus: str, *, scale: str | None = None, params: Params | None = None
    ) -> tuple[CorpusConfig, DataConfig]:
        """Return where a corpus comes from, and how it becomes token shards at a scale (by default the file's).

        Raises ConfigError for a name that there is not, and for settings that break a rule.
        """
        from lowcomm.experiment.config import CorpusConfig, DataConfig

        params = params or self.load_params()
        source = build(CorpusConfig, pick(params["corpora"], corpus, "corpus"), f"corpora.{corpus}")
        scale = scale or params["scale"]
        numbers = merge({"data": {}}, pick(params["scales"], scale, "scale"), f"scales.{scale}")
        config = build(DataConfig, numbers["data"] | {"corpus": corpus}, "data")
        check_bounds("data", config)
        return source, config

    def runs_dir(self, run: str, scale: str) -> Path:
        """Return the folder of all variants and seeds of a run."""
        return self.build / "runs" / scale / run

    def run_folder(self, config: RunConfig, out: Path | None = None) -> RunFolder:
        """Return the folder of a configuration: `[variant/]seedN` below the run's own, or below `out`.

        Its times are in the project's `build/times`, or in a folder beside `out`.
        """
        return self.folder(config.name, config.scale, config.variant, config.seed, out)

    def folder(self, run: str, scale: str, variant: str, seed: int, out: Path | None = None) -> RunFolder:
        """Return what `run_folder` does, for a run that is given by names; `variant` is "" where it is no sweep."""
        times = self.build / "times" / scale / "runs" / run if out is None else RunFolder.beside(out).times
        inner = Path(variant) / f"seed{seed}"
        return RunFolder((out or self.runs_dir(run, scale)) / inner, times / inner)

    def data_dir(self, corpus: str, scale: str) -> Path:
        """Return the folder of a corpus' tokenizer, shards and card."""
        return self.build / "data" / scale / corpus

    def read_run(self, run: str, scale: str) -> list[dict[str, Any]]:
        """Return what `RunFolder.read` gives of each variant and seed of a run, in order, with "variant" and "seed".

        Raises ConfigError where one has not been trained.
        """
        found = []
        for variant, seed in points(run, self.load_params(), scale):
            folder = self.folder(run, scale, variant, seed)
            if (summary := folder.read()) is None:
                raise ConfigError(
                    f"{folder.out.relative_to(self.build)} has not been trained: dvc repro train@{run} (scale {scale})"
                )
            found.append(summary | {"variant": variant, "seed": seed})
        return found
