"""params.yaml: coercion by declared type, and errors that name the value and the rule."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lowcomm.comm.config import CommConfig
from lowcomm.experiment.project import Project, overrides
from lowcomm.model.config import ModelConfig
from lowcomm.model.decoder import Decoder
from lowcomm.model.presets import PRESETS
from lowcomm.settings import ConfigError, build
from pipelines.project import ROOT, load_params, run_config, run_folder, run_points
from tests.conftest import small_run

PARAMS = load_params()


def test_every_run_is_valid_at_every_scale_and_every_method_is_of_one() -> None:
    assert {run["method"] for run in PARAMS["runs"].values()} == set(PARAMS["methods"])
    runs = [run_points(run, scale=scale, params=PARAMS) for scale in PARAMS["scales"] for run in PARAMS["runs"]]
    assert all(runs)
    for model in {config.model for points in runs for config in points}:
        with torch.device("meta"):  # the paper's sizes are built, not run
            Decoder(model)


def test_numbers_that_yaml_reads_as_strings_are_numbers() -> None:
    assert yaml.safe_load("lr: 1e-4") == {"lr": "1e-4"}
    config = run_config("data_parallel", scale="smoke", train={"lr": "1e-4", "steps": "1e2"})
    assert config.train.lr == 1e-4
    assert config.train.steps == 100


def _changed(path: str, value: Any) -> dict:
    params = copy.deepcopy(PARAMS)
    *sections, last = path.split("/")
    level = params
    for section in sections:
        level = level[section]
    level[last] = value
    return params


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "methods/diloco/sync_evry_steps",
            3,
            "unknown key diloco_m2.method.sync_evry_steps; did you mean 'sync_every_",
        ),
        ("scales/smoke/train/warmupsteps", 3, "unknown key diloco_m2.train.warmupsteps; did you mean 'warmup_steps'"),
        ("runs/diloco_m2/replica", 3, "unknown key runs.diloco_m2.replica; did you mean 'replicas'"),
        ("runs/diloco_m2/method", "dilco", "no method named 'dilco'; did you mean 'diloco'"),
        ("methods/diloco/outer", "nestrov", "method.outer = 'nestrov' is not a valid choice; did you mean 'nesterov'"),
        ("methods/diloco/codec", "fp31", "method.codec = 'fp31' is not a valid choice; did you mean 'fp32'"),
        ("scales/smoke/train/lr", "fast", "train.lr = 'fast' must be a number"),
        ("scales/smoke/train/steps", 2.5, "train.steps = 2.5 must be a whole number"),
        ("scales/smoke/model/qk_norm", "yes", "model.qk_norm = 'yes' must be true or false"),
        ("scales/smoke/train", 7, "train must be a mapping of settings, got 7"),
        ("methods/diloco/sync_every_steps", 0, "method.sync_every_steps must be at least 1, got 0"),
        ("methods/diloco/sync_every_steps", 201, r"\(H\) = 201 must be between 1 and train.steps = 200"),
        ("runs/diloco_m2/replicas", 3, "global_batch = 4 does not split into 3 replicas x 1 micro-batches; .* of 3"),
        ("runs/diloco_m2/replicas", 0, "replicas must be at least 1, got 0"),
        ("scales/smoke/train/global_batch", 0, "train.global_batch must be at least 1, got 0"),
        ("scales/smoke/train/seq_len", 64, "train.seq_len = 64 is longer than model.seq_len = 32"),
        ("scales/smoke/data/vocab_size", 300, "data.vocab_size = 300 and model.vocab_size = 512 must be equal"),
        ("methods/diloco/outer_momentum", 1.0, "method.outer_momentum must be below 1, got 1.0"),
        ("scales/smoke/train/lr", -1, "train.lr must be at least 0, got -1.0"),
        ("scales/smoke/train/clip_norm", -1, "train.clip_norm must be at least 0, got -1.0"),
        ("scales/smoke/train/lr", float("nan"), "train.lr = nan must be finite"),
        ("scales/smoke/train/steps", float("inf"), "train.steps = inf must be finite"),
        ("scales/smoke/train/beta2", 1, "train.beta2 must be below 1, got 1.0"),
        ("scales/smoke/data/shard_tokens", 0, "data.shard_tokens must be at least 1, got 0"),
        ("scales/smoke/data/validation_percent", 0, "data.validation_percent must be above 0, got 0.0"),
        ("scales/smoke/model/kv_heads", -2, "model.kv_heads must be at least 0, got -2"),
        ("runs/diloco_m2/seeds", [], r"runs.diloco_m2.seeds = \[\] must be a list of at least one whole number"),
        ("runs/diloco_m2/variants", {}, "runs.diloco_m2.variants must name at least one variant, each a mapping"),
        ("runs/diloco_m2/variants", {"a": None}, "runs.diloco_m2.variants must name at least one variant"),
        ("runs/diloco_m2/seeds", [1 << 63], "seed must be below 9223372036854775808, got 9223372036854775808"),
        ("runs/diloco_m2/seeds", 3, "runs.diloco_m2.seeds = 3 must be a list"),
        ("runs/diloco_m2/seeds", [0, 0], r"runs.diloco_m2.seeds = \[0, 0\] has a seed twice"),
        ("runs/diloco_m2/variants", {4: {}}, "runs.diloco_m2.variants: the name 4 must be text, in quotes"),
        ("scales/smoke/model/rope_theta", 0.0, "model.rope_theta must be above 0, got 0.0"),
        ("runs/diloco_m2/corpus", "docstring", "no corpus named 'docstring'; did you mean 'docstrings'"),
        ("runs/diloco_m2", None, "runs.diloco_m2 must be a mapping of settings, got None"),
        ("runs/diloco_m2/sizes", ["diloco"], r"runs.diloco_m2.sizes = \['diloco'\] must be a name"),
        ("runs/diloco_m2/size", ["base"], r"no size of \w+ named \['base'\]; did you mean 'base'"),
        ("runs/diloco_m2/override", None, "runs.diloco_m2.override must be a mapping of settings, got None"),
        ("runs/diloco_m2/override", {"train": None}, "runs.diloco_m2.override.train must be a mapping of settings"),
        ("scales/smoke", None, "scales.smoke must be a mapping of settings, got None"),
        ("scales/smoke", {}, "no family of sizes at the smoke scale named"),
        ("scales/smoke/sizes", None, "scales.smoke.sizes must be a mapping of settings, got None"),
        ("scales/smoke/model", None, "scales.smoke.model must be a mapping of settings, got None"),
        ("methods/diloco", None, "methods.diloco must be a mapping of settings, got None"),
        ("methods/diloco/outer", "average", "method.outer = average exchanges the parameters themselves"),
        (
            "methods/diloco/exchange",
            "gradients",
            "method.sync_every_steps means nothing with method.exchange = gradients",
        ),
        ("scales/smoke/model/heads", 3, "diloco_m2.model: model.heads = 3 does not divide model.dim = 16"),
    ],
)
def test_bad_settings_are_refused_by_name(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config("diloco_m2", scale="smoke", params=_changed(path, value))


@pytest.mark.fault(
    "params.yaml is empty, has tabs, a key twice, or a section that is none",
    "one line with the file and the rule",
)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lacks corpora, methods, runs, scale, scales"),
        ("a:\n\tb: 1", "is not YAML: while scanning"),
        ("runs: {a: 1, b: 2, a: 3}", "is not YAML: key 'a' is named twice"),
        (
            "{scale: a, corpora: {}, scales: {}, methods: {}, runs: }",
            "runs in .*params.yaml must be a mapping of names",
        ),
    ],
)
def test_a_file_that_cannot_be_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"params.yaml.*{message}" if not message.startswith("runs") else message):
        Project(tmp_path).load_params()


def test_merged_keys_may_be_named_again(tmp_path: Path) -> None:
    sections = "scale: a\ncorpora: {}\nmethods: {}\nruns: {}\n"
    scales = "scales: {a: &a {b: 1, c: 2}, d: &d {<<: *a, b: 3}, e: {<<: *d}}\n"
    (tmp_path / "params.yaml").write_text(sections + scales)
    scales = Project(tmp_path).load_params()["scales"]
    assert scales["d"] == scales["e"] == {"b": 3, "c": 2}


@pytest.mark.parametrize("seed", [2**53 + 1, 2**63 - 1])
def test_whole_numbers_are_kept_as_they_are(seed: int) -> None:
    assert run_config("diloco_m2", scale="smoke", seed=seed).seed == seed
    assert run_config("diloco_m2", scale="smoke", params=_changed("runs/diloco_m2/seeds", [seed])).seed == seed


def test_a_value_of_any_size_is_refused_in_a_line() -> None:
    with pytest.raises(ConfigError, match="train.lr = 1000.*000 must be a number"):
        run_config("diloco_m2", scale="smoke", train={"lr": 10**400})
    bomb: Any = "x"
    for _ in range(40):
        bomb = [bomb] * 10
    with pytest.raises(ConfigError) as error:
        build(ModelConfig, {"dim": bomb}, "model")
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", ".hidden", ""])
def test_a_runs_name_is_that_of_a_folder(name: str) -> None:
    params = copy.deepcopy(PARAMS)
    params["runs"][name] = params["runs"]["diloco_m2"]
    with pytest.raises(ConfigError, match="a name is that of a folder"):
        run_config(name, scale="smoke", params=params)
    params["runs"]["sweep"] = params["runs"]["diloco_m2"] | {"variants": {name or "..": {}}}
    with pytest.raises(ConfigError, match="a name is that of a folder"):
        run_config("sweep", variant=name or "..", scale="smoke", params=params)


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        ({"timeout_s": 1e30}, "comm.timeout_s must be at most 1000000.0, got 1e\\+30"),
        ({"timeout_s": 0}, "comm.timeout_s must be above 0, got 0"),
        ({"link_mbit_per_s": -1}, "comm.link_mbit_per_s must be at least 0, got -1"),
        ({"link_latency_ms": math.inf}, "comm.link_latency_ms must be finite, got inf"),
    ],
)
def test_a_wire_that_cannot_be_is_refused(wire: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CommConfig(**wire)


def test_a_run_slices_parts_of_its_decoder_alone() -> None:
    """A run refuses patterns, which may slice any model: the closed forms of FLOPs and memory do not know them."""
    method = {"trainable": "slice", "slices": 2, "sliced": ["*.mlp.up.weight:0", "*.mlp.down.weight:1"]}
    told = r"method.sliced names '\*.mlp.up.weight:0': a run slices parts of its decoder, mlp, heads, out, layers"
    with pytest.raises(ConfigError, match=told):
        run_config("diloco_m2", scale="smoke", method=method)


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no run named 'diloko_m2'; did you mean 'diloco_m2'"):
        run_config("diloko_m2")
    with pytest.raises(ConfigError, match="no scale named 'labtop'; did you mean 'laptop'"):
        run_config("diloco_m2", scale="labtop")
    with pytest.raises(ConfigError, match="no preset named 'streaming_diloco/1c'; did you mean 'streaming_diloco/1b'"):
        run_config("diloco_m2", scale="smoke", model={"preset": "streaming_diloco/1c"})


def test_missing_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="model lacks layers, ffn_dim, vocab_size, seq_len"):
        build(ModelConfig, {"dim": 8, "heads": 2}, "model")


def test_a_preset_is_a_base_that_settings_override() -> None:
    preset = {"preset": "streaming_diloco/35m", "vocab_size": 512, "seq_len": 32}
    expected = dataclasses.replace(PRESETS["streaming_diloco/35m"], vocab_size=512, seq_len=32)
    for way in (
        run_config("diloco_m2", scale="smoke", model=preset),  # a preset hides the scale's own model
        run_config("diloco_m2", scale="smoke", params=_changed("scales/smoke/model", preset)),
        run_config("diloco_m2", scale="smoke", params=_changed("runs/diloco_m2/override", {"model": preset})),
    ):
        assert way.model == expected


def test_a_run_may_override_any_section() -> None:
    over = {"method": {"sync_every_steps": 10}, "train": {"lr": 0.5}, "replicas": 4}
    config = run_config("diloco_m2", scale="smoke", params=_changed("runs/diloco_m2/override", over))
    assert (config.method.sync_every_steps, config.train.lr, config.replicas) == (10, 0.5, 4)


def test_arguments_are_not_settings() -> None:
    with pytest.raises(ConfigError, match="--set seed=1: seed is not a setting but an argument of its own"):
        overrides(["seed=1"])
    with pytest.raises(ConfigError, match="--set train.steps=1: train has been set to 5 already"):
        overrides(["train=5", "train.steps=1"])


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("method.fragment_patterns=[*.mlp.*]", "the value is not YAML .a text that begins with . wants quotes"),
        ("model=5", "diloco_m2.model must be a mapping of settings, got 5"),
        ("model=", "diloco_m2.model must be a mapping of settings, got None"),
        ("model.preset=[1]", r"no preset named \[1\]"),
        ("params.x=1", "--set params.x=1: no section or setting is named 'params'"),
        ("run.x=1", "--set run.x=1: no section or setting is named 'run'"),
        ("scale.x=1", "--set scale.x=1: no section or setting is named 'scale'"),
        ("trian.steps=1", "named 'trian'; did you mean 'train'"),
    ],
)
def test_what_cannot_be_set_is_refused_in_a_line(pair: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        run_config("diloco_m2", scale="smoke", **overrides([pair]))
    assert "\n" not in str(error.value)


def test_identity_leaves_out_the_wire() -> None:
    quick, slow = small_run(), small_run(comm={"link_mbit_per_s": 80, "clock": "virtual"})
    assert quick != slow
    assert quick.identity() == slow.identity()
    assert quick.identity() != small_run(train={"lr": 0.5}).identity()


def test_the_smoke_scale_takes_one_seed() -> None:
    assert [c.seed for c in run_points("streaming_h30", scale="laptop")] == [0, 1, 2]
    assert [c.seed for c in run_points("streaming_h30", scale="smoke")] == [0]


def test_variants_make_a_sweep() -> None:
    params = copy.deepcopy(PARAMS)
    params["scales"]["smoke"]["sizes"]["streaming"]["short"] = {"train": {"steps": 60}}
    variants = {"often": {"method": {"sync_every_steps": 5}}, "short": {"size": "short", "replicas": 4}}
    params["runs"]["diloco_m2"] |= {"variants": variants, "seeds": [3, 4]}
    points = run_points("diloco_m2", scale="laptop", params=params | {"scales": {"laptop": params["scales"]["smoke"]}})
    assert [(c.variant, c.seed) for c in points] == [("often", 3), ("often", 4), ("short", 3), ("short", 4)]
    assert [c.method.sync_every_steps for c in points] == [5, 5, 30, 30]
    assert [(c.train.steps, c.replicas) for c in points[1:3]] == [(200, 2), (60, 4)]
    assert len({run_folder(c).out for c in points}) == 4
    assert run_folder(points[0]).out.parts[-3:] == ("diloco_m2", "often", "seed3")
    with pytest.raises(ConfigError, match="run diloco_m2 is a sweep: choose one of its variants, often, short"):
        run_config("diloco_m2", scale="smoke", params=params)
    with pytest.raises(ConfigError, match="no variant of diloco_m2 named 'shrt'; did you mean 'short'"):
        run_config("diloco_m2", variant="shrt", scale="smoke", params=params)
    with pytest.raises(ConfigError, match="run streaming_h30 has no variants, so none is named 'often'"):
        run_config("streaming_h30", variant="often", scale="smoke", params=params)


def test_params_file_keys_are_checked(tmp_path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text((ROOT / "params.yaml").read_text() + "\nrunz: {}\n")
    with pytest.raises(ConfigError, match="unknown key runz in params.yaml; did you mean 'runs'"):
        Project(tmp_path).load_params()
    path.unlink()
    with pytest.raises(ConfigError, match="params.yaml cannot be read: No such file"):
        Project(tmp_path).load_params()


def test_a_size_may_change_numbers_of_methods() -> None:
    """NoLoCo's rounds are as long as the paper's at its sizes, and shorter where runs are."""
    assert run_config("noloco", variant="dp8_pp1", scale="paper").method.sync_every_steps == 50
    assert run_config("noloco", variant="dp8_pp1", scale="laptop").method.sync_every_steps == 10
    typo = _changed("scales/paper/sizes/noloco/base/methods", {"nolocco": {"sync_every_steps": 50}})
    with pytest.raises(ConfigError, match="no method named 'nolocco'; did you mean 'noloco'"):
        run_config("noloco", variant="dp8_pp1", scale="paper", params=typo)


def test_a_run_may_multiply_numbers_of_its_size() -> None:
    variants = ("m4_h30", "m4_whole_batch")
    whole, doubled = (run_config("ablation_diloco", variant=v, scale="laptop").train for v in variants)
    assert (doubled.steps, doubled.warmup_steps) == (whole.steps / 2, whole.warmup_steps / 2)
    assert doubled.global_batch == 2 * whole.global_batch
    asked = run_config("ablation_diloco", variant="m4_whole_batch", scale="laptop", train={"steps": 70})
    assert asked.train.steps == 70
    for factors, message in (
        ({"train": {"stepz": 2}}, "no number in runs.diloco_m2.times.train named 'stepz'; did you mean 'steps'"),
        ({"train": {"steps": "2x"}}, "runs.diloco_m2.times.train.steps = '2x' must be a number, and multiply a number"),
        ({"train": 2}, "runs.diloco_m2.times.train = 2 must be a mapping of sections to the factors of their numbers"),
        (2, "runs.diloco_m2.times = 2 must be a mapping of sections to the factors of their numbers"),
        ({"train": {"steps": {"more": 2}}}, "times.train.steps = {'more': 2} must be a number, and multiply a number"),
        ({"train": {"steps": True}}, "times.train.steps = True must be a number, and multiply a number"),
        ({"train": {"steps": math.inf}}, "times.train.steps = inf must be a number, and multiply a number"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_config("diloco_m2", scale="smoke", params=_changed("runs/diloco_m2/times", factors))


@pytest.mark.parametrize("scale", ["smoke", "laptop", "gpu", "paper"])
def test_noloco_has_the_papers_mlp_at_every_scale(scale: str) -> None:
    for run in PARAMS["runs"]:
        for point in run_points(run, scale=scale) if run.startswith("noloco") else []:
            assert (point.model.mlp, point.model.qk_norm, point.model.z_loss) == ("gated", False, 0.0), run


@pytest.mark.parametrize("scale", ["gpu", "paper"])
def test_larger_scales_have_the_papers_fragments(scale: str) -> None:
    for run in ("streaming_h30", "overtraining_streaming"):
        for point in run_points(run, scale=scale):
            assert point.method.layers_per_fragment == 3
