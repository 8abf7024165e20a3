"""Hugging Face folders: the same logits as transformers has, both ways, and what is refused."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lowcomm
from lowcomm.model.accounting import parameter_shapes
from lowcomm.model.config import Constraint, ModelConfig
from lowcomm.model.decoder import Decoder
from lowcomm.model.huggingface import CONFIG, INDEX, WEIGHTS, load_folder, public_config, read_config, save_folder
from lowcomm.settings import ConfigError

V, T = 50, 20
LLAMA = ModelConfig(dim=24, layers=3, heads=4, ffn_dim=40, vocab_size=V, seq_len=T, kv_heads=2)
QWEN3 = dataclasses.replace(LLAMA, qk_norm=True, head_dim=10)
MODELS = {
    "Llama": LLAMA,
    "Llama, tied": dataclasses.replace(LLAMA, tied=True),
    "Llama, other theta and eps": dataclasses.replace(LLAMA, rope_theta=500.0, norm_eps=0.05, kv_heads=1),
    "Qwen3": QWEN3,
    "Qwen3, tied": dataclasses.replace(QWEN3, tied=True, kv_heads=4),
    "Qwen3, other theta and eps": dataclasses.replace(QWEN3, rope_theta=1e6, norm_eps=0.05),
}


@pytest.fixture
def transformers() -> ModuleType:
    """The library of Hugging Face, which nothing but these tests uses."""
    return pytest.importorskip("transformers")


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return request.param


def ids() -> torch.Tensor:
    """Token ids [3, T]."""
    return torch.randint(V, (3, T), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def drawn(model: torch.nn.Module, seed: int = 0) -> Any:
    """The model with other weights: large enough that logits are near one, and norms that differ from one."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.normal_(1.0 if p.dim() < 2 else 0.0, 0.3 if p.dim() < 2 else p.shape[-1] ** -0.5, generator=generator)
    return model


def theirs(transformers: ModuleType, config: ModelConfig, **more: Any) -> Any:
    """A model of transformers, made from its own configuration class."""
    kind = "Qwen3" if config.qk_norm else "Llama"
    made = getattr(transformers, f"{kind}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.ffn_dim,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.key_value_heads,
        head_dim=config.width_of_head,
        max_position_embeddings=config.seq_len,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tied,
        **{"rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta}} | more,
    )
    return drawn(getattr(transformers, f"{kind}ForCausalLM")(made).eval())


@torch.no_grad()
def assert_equal_logits(ours: Decoder, model: Any, tolerance: float = 1e-5) -> None:
    """Logits [3, T, V] in fp32, of some size, differ by `tolerance` at most."""
    expected = model(ids()).logits
    assert expected.std() > 0.3
    assert (ours(ids()) - expected).abs().max() <= tolerance


def assert_same(a: Decoder, b: Decoder) -> None:
    """Bit-identical parameters of the same names."""
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


# --- the same logits


def test_a_folder_of_transformers_gives_its_logits(
    transformers: ModuleType, config: ModelConfig, tmp_path: Path
) -> None:
    model = theirs(transformers, config)
    model.save_pretrained(tmp_path)
    ours = load_folder(tmp_path)
    assert ours.config == dataclasses.replace(config, head_dim=config.width_of_head)
    assert (ours.head.weight is ours.embedding.weight) == config.tied
    assert_equal_logits(ours, model)


def test_a_folder_of_several_files_gives_the_same_decoder(transformers: ModuleType, tmp_path: Path) -> None:
    model = theirs(transformers, QWEN3)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert_same(load_folder(tmp_path / "one"), load_folder(tmp_path / "many"))


def test_a_configuration_of_older_transformers_says_the_same(transformers: ModuleType, tmp_path: Path) -> None:
    model = theirs(transformers, MODELS["Llama, other theta and eps"])
    model.save_pretrained(tmp_path)
    said = json.loads((tmp_path / CONFIG).read_text())
    old = {"rope_theta": said.pop("rope_parameters")["rope_theta"], "rope_scaling": None, "torch_dtype": "float32"}
    del said["dtype"], said["head_dim"], said["attention_bias"], said["mlp_bias"]
    (tmp_path / CONFIG).write_text(json.dumps(said | old))
    assert_equal_logits(load_folder(tmp_path), model)
    assert_equal_logits(load_folder(tmp_path), transformers.AutoModelForCausalLM.from_pretrained(tmp_path))


def test_transformers_reads_what_is_written(transformers: ModuleType, config: ModelConfig, tmp_path: Path) -> None:
    ours = drawn(Decoder(config))
    save_folder(ours, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model).__name__ == ("Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM")
    assert_equal_logits(ours, model)


def test_what_is_written_has_the_keys_of_transformers(transformers: ModuleType, tmp_path: Path) -> None:
    for config in (LLAMA, QWEN3):
        theirs(transformers, config).save_pretrained(tmp_path)
        expected = json.loads((tmp_path / CONFIG).read_text())
        expected |= {"bos_token_id": None, "eos_token_id": None, "rope_theta": 10_000.0}
        expected |= {"max_window_layers": 3} if config.qk_norm else {}
        del expected["transformers_version"]
        assert public_config(config) == expected


def test_a_folder_that_is_written_is_read_bit_by_bit(config: ModelConfig, tmp_path: Path) -> None:
    model = drawn(Decoder(config))
    save_folder(model, tmp_path / "a" / "b")
    again = load_folder(tmp_path / "a" / "b")
    assert again.config == dataclasses.replace(config, head_dim=config.width_of_head)
    assert_same(model, again)
    with torch.no_grad():
        assert torch.equal(model(ids()), again(ids()))
    save_folder(again, tmp_path / "a" / "b")
    assert_same(model, load_folder(tmp_path / "a" / "b"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_of_the_dtype_that_is_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    model = drawn(Decoder(QWEN3))
    save_folder(model, tmp_path)
    found = load_folder(tmp_path, dtype=dtype)
    assert {p.dtype for p in found.parameters()} == {dtype}
    with torch.no_grad():
        assert (found(ids()).float() - model(ids())).abs().max() < 0.3
    assert_same(found, model.to(dtype))
    save_folder(found, tmp_path / "again")
    assert json.loads((tmp_path / "again" / CONFIG).read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert_same(load_folder(tmp_path / "again", dtype=dtype), found)


def test_reading_draws_nothing(tmp_path: Path) -> None:
    save_folder(drawn(Decoder(LLAMA)), tmp_path)
    before = torch.get_rng_state()
    load_folder(tmp_path, constraint=Constraint(4))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_head_of_a_tied_model_may_be_written_again(tmp_path: Path) -> None:
    model = drawn(Decoder(MODELS["Llama, tied"]))
    save_folder(model, tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / WEIGHTS)
    assert_same(load_folder(tmp_path), model)
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, tmp_path / WEIGHTS)
    with pytest.raises(ConfigError, match="lm_head.weight differs from model.embed_tokens.weight: tie_word_embeddings"):
        load_folder(tmp_path)


# --- in a subspace


CONSTRAINTS = {
    f"rank {rank}{', reparametrised' if reparametrised else ''}, {basis}, {table}": Constraint(
        rank, reparametrised=reparametrised, basis=basis, table=table
    )
    for rank, reparametrised, basis, table in itertools.product(
        (4, 24), (False, True), ("gaussian", "coordinates"), ("projection", "zero")
    )
}


@pytest.fixture(params=CONSTRAINTS.values(), ids=CONSTRAINTS.keys())
def constraint(request: pytest.FixtureRequest) -> Constraint:
    return request.param


@torch.no_grad()
def test_a_loaded_model_keeps_to_the_subspace(constraint: Constraint, tmp_path: Path) -> None:
    free = drawn(Decoder(QWEN3))
    save_folder(free, tmp_path)
    model = load_folder(tmp_path, constraint=constraint, seed=5)
    u = model.basis_DR
    assert torch.equal(u, Decoder(QWEN3, constraint).initialise(5).basis_DR)
    # Whatever the rank, the embedding is the one that was loaded, and the last layer is free.
    assert torch.allclose(model.embed(ids()), free.embed(ids()), atol=1e-5)
    assert torch.equal(model.blocks["2"].mlp.down.weight, free.blocks["2"].mlp.down.weight)
    x, cos, sin = model.embed(ids()), model.cos_TC, model.sin_TC
    for i in range(3):
        moving = x - model.fixed_VD[ids()]
        assert (moving - moving @ u @ u.T).norm() <= 1e-5 * x.norm()
        if i < 2:
            x = model.blocks[str(i)](x, cos, sin, u)
            assert not torch.allclose(x, model.embed(ids()), atol=0.1)
    weight = u @ u.T @ free.blocks["0"].attention.out.weight
    assert torch.allclose(model.whole("blocks.0.attention.out.weight"), weight, atol=1e-5)
    difference = (model(ids()) - free(ids())).abs().max()
    assert difference <= 1e-4 if constraint.rank == 24 else difference > 0.1


@torch.no_grad()
def test_a_constrained_model_is_written_as_what_it_computes(
    transformers: ModuleType, constraint: Constraint, tmp_path: Path
) -> None:
    model = drawn(Decoder(LLAMA, constraint).initialise(3))
    save_folder(model, tmp_path / "fp32")
    # U (Z x) and (U Z) x are rounded differently.
    assert_equal_logits(model, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fp32"), tolerance=1e-4)
    model = model.double()
    save_folder(model, tmp_path / "fp64")
    assert torch.allclose(load_folder(tmp_path / "fp64", dtype=torch.float64)(ids()), model(ids()), rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_constrained_model_has_the_dtype_that_is_asked_for(constraint: Constraint, tmp_path: Path) -> None:
    free = drawn(Decoder(LLAMA))
    save_folder(free, tmp_path)
    model = load_folder(tmp_path, constraint=constraint, dtype=torch.bfloat16)
    assert {t.dtype for t in (*model.parameters(), model.basis_DR, model.fixed_VD)} == {torch.bfloat16}
    assert model(ids()).isfinite().all()


def test_drawn_weights_are_put_as_loaded_ones_but_for_the_table() -> None:
    constraint = Constraint(4)
    whole = Decoder(LLAMA).initialise(0)
    model = Decoder(LLAMA, constraint).initialise(0)
    again = Decoder(LLAMA, constraint)
    again.draw_basis(0)
    for name in parameter_shapes(LLAMA):
        assert again.full_shape(name) == parameter_shapes(LLAMA)[name]
        again.put(name, whole.get_parameter(name).detach())
    assert_same(model, again)
    assert torch.equal(model.fixed_VD, again.fixed_VD)


def test_a_constraint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    save_folder(drawn(Decoder(MODELS["Llama, tied"])), tmp_path / "tied")
    with pytest.raises(ConfigError, match=r"config.json: tie_word_embeddings = true: it must be false with a constr"):
        load_folder(tmp_path / "tied", constraint=Constraint(4))
    save_folder(drawn(Decoder(LLAMA)), tmp_path)
    for rank in (0, 25):
        with pytest.raises(ConfigError, match=rf"config.json: hidden_size = 24: the constraint's rank .* got {rank}$"):
            load_folder(tmp_path, constraint=Constraint(rank))


# --- what is refused


def assert_refused(folder: Path, message: str) -> None:
    """One line that begins with a path in the folder, or the folder itself, and goes on with `message`."""
    with pytest.raises(ConfigError) as caught:
        load_folder(folder)
    text = str(caught.value)
    assert text.startswith(str(folder))
    assert message in text
    assert "\n" not in text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Qwen3 folder, which may be spoiled."""
    save_folder(drawn(Decoder(QWEN3)), tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, 'config.json: model_type = "mistral": it must be llama or qwen3'),
        ({"model_type": None}, "config.json: model_type = null: it must be llama or qwen3"),
        ({"architectures": ["Qwen3Model"]}, 'architectures = ["Qwen3Model"]: it must be ["Qwen3ForCausalLM"]'),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu": only "silu" can be loaded'),
        ({"attention_bias": True}, "attention_bias = true: only false can be loaded, as attention has no biases"),
        ({"mlp_bias": True}, "mlp_bias = true: only false can be loaded"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1: only 0 can be loaded"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: only null can be loaded"),
        ({"quantization_config": {"bits": 4}}, 'quantization_config = {"bits": 4}: only null can be loaded'),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map = "),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
            'rope_parameters.rope_type = "llama3": only "default" can be loaded',
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 'rope_scaling.type = "linear": only "default"'),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor = 2.0: only rope_type and rope_theta"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention = {}: only rope_type and"),
        ({"rope_parameters": [1]}, "rope_parameters = [1]: it must be an object or null"),
        ({"rope_theta": 5e5}, "rope_parameters.rope_theta = 10000.0: it must be rope_theta = 500000.0"),
        ({"rope_theta": 0, "rope_parameters": None}, "rope_theta = 0: it must be a finite number above 0"),
        ({"rope_theta": 10**400, "rope_parameters": None}, "it must be a finite number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = NaN: it must be a finite number above 0"),
        ({"rms_norm_eps": "1e-6"}, 'rms_norm_eps = "1e-6": it must be a finite number above 0'),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types[1] = "),
        ({"layer_types": ["full_attention"]}, "it must be a list of num_hidden_layers = 3"),
        (
            {"layer_types": None, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            "sliding_window = 8: layers from max_window_layers = 2 on attend to a window",
        ),
        ({"use_sliding_window": "yes", "layer_types": None}, 'use_sliding_window = "yes": it must be true or false'),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1: it must be true or false"),
        ({"hidden_size": None}, "config.json lacks hidden_size, which must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0: it must be a whole number, at least 1"),
        ({"vocab_size": 50.0}, "vocab_size = 50.0: it must be a whole number, at least 1"),
        ({"intermediate_size": True}, "intermediate_size = true: it must be a whole number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3: it must divide num_attention_heads = 4"),
        ({"head_dim": 7}, "head_dim = 7: it must be even"),
        ({"head_dim": None}, "self_attn.k_norm.weight = [10]: it must be [128] by config.json"),
        ({"num_attention_heads": 5, "num_key_value_heads": None}, "_proj.weight = "),
        (
            {"model_type": "llama", "architectures": None, "num_attention_heads": 7, "head_dim": None},
            "num_key_value_heads = 2: it must divide num_attention_heads = 7",
        ),
        (
            {"model_type": "llama", "architectures": None, "num_attention_heads": 10, "head_dim": None},
            "num_attention_heads = 10: it must divide hidden_size = 24, as no head_dim is given",
        ),
        (
            {"model_type": "llama", "architectures": None},
            "q_norm.weight', 'model.layers.1.self_attn.k_norm.weight' and 3 more, which the model of config.json does",
        ),
        ({"num_hidden_layers": 4, "layer_types": None}, "lacks 'model.layers.3.input_layernorm.weight', "),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
    ],
    ids=str,
)
def test_what_a_decoder_cannot_do_is_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    said = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(said | change))
    assert_refused(folder, message)


def test_windows_that_no_layer_uses_are_no_obstacle(folder: Path) -> None:
    said = json.loads((folder / CONFIG).read_text())
    for change in (
        {"sliding_window": 8},
        {"sliding_window": 8, "layer_types": None},
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": None, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": None, "layer_types": None, "max_window_layers": 0},
        {"rope_scaling": {"rope_type": "default"}, "partial_rotary_factor": 1.0},
    ):
        (folder / CONFIG).write_text(json.dumps(said | change))
        assert read_config(folder) == QWEN3


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(UP), f"model.safetensors lacks '{UP}', which the model of config.json has"),
        (lambda w: w.update(q=torch.ones(2)), "model.safetensors holds 'q', which the model of config.json does not"),
        (
            lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(40)}),
            "holds 'model.layers.0.self_attn.q_proj.bias', which",
        ),
        (lambda w: w.update({UP: w[UP].T.contiguous()}), f"the shape of {UP} = [24, 40]: it must be [40, 24]"),
        (lambda w: w.update({UP: w[UP].to(torch.int8)}), f"the dtype of {UP} = I8: it must be one of F64, F32, F16"),
        (lambda w: w.clear(), "lacks 'lm_head.weight', 'model.embed_tokens.weight', "),
    ],
    ids=["missing", "extra", "bias", "shape", "dtype", "empty"],
)
def test_tensors_that_do_not_fit_are_refused(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    change_weights(folder, change)
    assert_refused(folder, message)


@pytest.mark.parametrize(
    "spoil",
    [lambda b: b[:-1], lambda b: b[:4], lambda b: b"", lambda b: b"\xff" * 64, lambda b: b[:20] + b"\0" + b[21:]],
)
def test_corrupt_files_are_refused(folder: Path, spoil: Callable[[bytes], bytes]) -> None:
    file = folder / WEIGHTS
    file.write_bytes(spoil(file.read_bytes()))
    assert_refused(folder, "model.safetensors is no readable safetensors file: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "config.json is no JSON: "),
        (b"", "config.json is no JSON: "),
        (b"\xff\xfe", "config.json is no JSON: "),
        (b"[" * 100_000, "config.json is no JSON: "),
        (b"[1]", "config.json holds [1], which must be a JSON object"),
        (None, "config.json is missing: give the folder of a Hugging Face model"),
    ],
    ids=["cut", "empty", "binary", "deep", "list", "missing"],
)
def test_a_folder_without_a_configuration_is_refused(folder: Path, content: bytes | None, message: str) -> None:
    (folder / CONFIG).unlink()
    if content is not None:
        (folder / CONFIG).write_bytes(content)
    assert_refused(folder, message)


def test_a_folder_that_is_none_is_refused(folder: Path) -> None:
    assert_refused(folder / "nowhere", "config.json is missing")
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    assert_refused(folder, "holds no model.safetensors and no model.safetensors.index.json")
    (folder / CONFIG).unlink()
    (folder / CONFIG).mkdir()
    assert_refused(folder, "config.json cannot be read: Is a directory")


@pytest.fixture
def parts(folder: Path) -> dict[str, str]:
    """The folder's weights in two files with an index; the map of the index."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(weights)
    placed = {}
    for file, some in (("a.safetensors", names[:7]), ("b.safetensors", names[7:])):
        save_file({n: weights[n] for n in some}, folder / file)
        placed |= dict.fromkeys(some, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))
    assert_same(load_folder(folder), drawn(Decoder(QWEN3)))
    return placed


def test_an_index_that_does_not_fit_is_refused(folder: Path, parts: dict[str, str]) -> None:
    def index(value: Any) -> None:
        (folder / INDEX).write_text(json.dumps(value))

    index({})
    assert_refused(folder, "index.json: weight_map = null: it must map names of tensors to files")
    index([])
    assert_refused(folder, "index.json holds [], which must be a JSON object")
    for file in ("../a.safetensors", "..", "", "/etc/passwd", 3, None):
        index({"weight_map": parts | {UP: file}})
        assert_refused(folder, f"index.json: weight_map['{UP}'] = {json.dumps(file)}: ")
    index({"weight_map": parts | {UP: "c.safetensors"}})
    assert_refused(folder, f"index.json: weight_map['{UP}'] = \"c.safetensors\": this file is missing")
    index({"weight_map": parts | {UP: "a.safetensors"}})
    assert_refused(folder, f"a.safetensors does not hold what weight_map of {INDEX} says: '{UP}'")
    index({"weight_map": {k: v for k, v in parts.items() if k != UP}})
    assert_refused(folder, f"b.safetensors does not hold what weight_map of {INDEX} says: '{UP}'")
    save_file({"x": torch.ones(1)}, folder / "c.safetensors")
    index({"weight_map": parts | {"x": "c.safetensors"}})
    assert_refused(folder, f"{INDEX} holds 'x', which the model of config.json does not have")
    index({"weight_map": {k: v for k, v in parts.items() if v == "a.safetensors"}})
    assert_refused(folder, f"{INDEX} lacks 'model.layers.0.")


def test_two_models_in_a_folder_are_refused(folder: Path, parts: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"index.json is of a model of several files, which is not overwritten"):
        save_folder(drawn(Decoder(QWEN3)), folder)
    save_file({"x": torch.ones(1)}, folder / WEIGHTS)
    assert_refused(folder, f"holds both {WEIGHTS} and {INDEX}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp": "gelu"}, "model.mlp = 'gelu': only 'gated' can be saved as a Llama or Qwen3 model"),
        ({"norm": "layer"}, "model.norm = 'layer': only 'rms' can be saved"),
        ({"heads": 5, "kv_heads": 5, "head_dim": 4}, "model.heads = 5: it must divide model.dim = 24 in a Llama model"),
    ],
)
def test_other_models_are_not_written(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        save_folder(Decoder(dataclasses.replace(LLAMA, **change)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_that_projects_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a model whose stream is projected between its layers is no Llama"):
        save_folder(Decoder(LLAMA, Constraint(4, table="zero", stages=2)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_stage_of_a_pipeline_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the model lacks, or has besides, 'blocks.1.*only a whole one can be saved"):
        save_folder(Decoder(LLAMA).cut(0, 2), tmp_path)


# --- what the decoder needs for it


def test_the_eps_of_norms_is_that_of_the_configuration() -> None:
    model = Decoder(dataclasses.replace(QWEN3, norm_eps=0.5))
    norms = [m for m in model.modules() if isinstance(m, torch.nn.RMSNorm)]
    assert len(norms) == 3 * 4 + 1
    assert {m.eps for m in norms} == {0.5}
    assert {m.eps for m in Decoder(QWEN3).modules() if isinstance(m, torch.nn.RMSNorm)} == {1e-6}
    assert Decoder(dataclasses.replace(LLAMA, norm="layer", norm_eps=0.5)).norm.eps == 0.5
    for eps in (0.0, -1e-6, float("nan")):
        with pytest.raises(ValueError, match=f"model.norm_eps must be above 0, got {eps}"):
            dataclasses.replace(LLAMA, norm_eps=eps)


def test_the_package_imports_neither_transformers_nor_pickle() -> None:
    found = set()
    package = Path(lowcomm.__file__).parent
    for file in set(package.rglob("*.py")) - {package / "transformers.py"}:  # the extra, imported by whoever uses it
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    assert "safetensors" in found
    assert not found & {"transformers", "accelerate", "pickle"}
