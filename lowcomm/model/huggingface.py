"""Reading and writing decoders as Hugging Face folders: `config.json` and safetensors, of Llama and Qwen3 models.

Both are decoders with RMSNorm, a gated MLP and rotary positions whose pairs are the two halves of a head, as here;
Qwen3 norms queries and keys too. Whatever a folder needs and `Decoder` cannot do is refused before a weight is read.
No code of a folder runs: it is read as JSON and safetensors alone, and the library transformers is not needed.

    Hugging Face's                   here
    hidden_size D                    dim
    intermediate_size F              ffn_dim
    num_key_value_heads K            kv_heads
    max_position_embeddings          seq_len
    rms_norm_eps                     norm_eps
    model.embed_tokens [V, D]        embedding
    ...self_attn.{q,k,v,o}_proj      attention.{q,k,v,out}
    ...mlp.{gate,up,down}_proj       mlp.{gate,up,down}
    lm_head [V, D]                   head
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lowcomm.model.accounting import parameter_shapes
from lowcomm.model.config import Constraint, ModelConfig
from lowcomm.model.decoder import Decoder, rotary_tables
from lowcomm.settings import ConfigError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class _Family:
    """A family of models, by `model_type`: the defaults of its configuration, and the keys that it alone has."""

    architecture: str
    qk_norm: bool
    kv_heads: int | None  # None: as many as heads
    head_dim: int | None  # None: hidden_size / num_attention_heads
    more: dict[str, Any]  # keys that it alone has


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", False, None, None, {"mlp_bias": False, "pretraining_tp": 1}),
    "qwen3": _Family("Qwen3ForCausalLM", True, 32, 128, {"sliding_window": None, "use_sliding_window": False}),
}

#: Keys of a configuration with the only values that a decoder of ours has; the first is meant where the key is absent.
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu",), "the gated MLP has no other activation"),
    "attention_bias": ((False, None), "attention has no biases"),
    "mlp_bias": ((False, None), "the MLP has no biases"),
    "attention_dropout": ((0, None), "nothing is dropped"),
    "partial_rotary_factor": ((None, 1), "positions turn the whole head"),
    "quantization_config": ((None,), "quantised weights cannot be read"),
    "auto_map": ((None, {}), "code of a folder is never run"),
}

#: Names of a block's parts, ours and Hugging Face's; then those of the rest.
_PARTS = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_REST = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_DTYPES = ("F64", "F32", "F16", "BF16")


def public_name(name: str) -> str:
    """Return Hugging Face's name of a parameter of `Decoder`."""
    owner, _, kind = name.rpartition(".")
    if owner in _REST:
        return f"{_REST[owner]}.{kind}"
    _, layer, part = owner.split(".", 2)
    return f"model.layers.{layer}.{_PARTS[part]}.{kind}"


def _shown(value: Any) -> str:
    """Return a value as JSON on one line, cut to at most 80 characters."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file} is missing: give the folder of a Hugging Face model") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds {_shown(value)}, which must be a JSON object")
    return value


class _Keys:
    """The keys of a config.json, checked as they are read."""

    def __init__(self, file: Path):
        self.file, self.values = file, _read_json(file)

    def refuse(self, key: str, value: Any, rule: str) -> ConfigError:
        """Return the error to raise where the value of a key breaks a rule."""
        return ConfigError(f"{self.file}: {key} = {_shown(value)}: {rule}")

    def count(self, key: str, absent: int | None = None) -> int:
        """Return the value of a key that must be a whole number, at least 1; `absent` where it is missing or null.

        Raises ConfigError where it is anything else, and where it is missing and `absent` is None.
        """
        value = self.values.get(key)
        if value is None:
            if absent is None:
                raise ConfigError(f"{self.file} lacks {key}, which must be a whole number")
            return absent
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(key, value, "it must be a whole number, at least 1")
        return value

    def positive(self, key: str, value: Any) -> float:
        """Return the value of a key as a float. Raises ConfigError where it is no finite number above 0."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.refuse(key, value, "it must be a finite number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return the value of a key, false where it is missing or null. Raises ConfigError where it is no boolean."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(key, value, "it must be true or false")
        return bool(value)

    def check_only(self) -> None:
        """Raise ConfigError where a key has a value for which `Decoder` has no part."""
        for key, (allowed, rule) in _ONLY.items():
            if (value := self.values.get(key, allowed[0])) not in allowed:
                raise self.refuse(key, value, f"only {_shown(allowed[0])} can be loaded, as {rule}")

    def family(self) -> _Family:
        """Return the family that model_type names.

        Raises ConfigError where it is not known, or the architecture is not that with the head of a language model.
        """
        kind = self.values.get("model_type")
        if not isinstance(kind, str) or kind not in _FAMILIES:
            raise self.refuse("model_type", kind, f"it must be {' or '.join(_FAMILIES)}")
        family = _FAMILIES[kind]
        if (made := self.values.get("architectures")) not in (None, [family.architecture]):
            raise self.refuse("architectures", made, f'it must be ["{family.architecture}"], which has a language head')
        return family

    def theta(self) -> float:
        """Return the base of the rotary angles, 10,000 by default.

        Raises ConfigError where angles are rescaled, or keys contradict each other.
        """
        said: dict[str, Any] = {}
        if self.values.get("rope_theta") is not None:
            said["rope_theta"] = self.values["rope_theta"]
        for key in ("rope_parameters", "rope_scaling"):
            rope = self.values.get(key)
            if rope is None:
                continue
            if not isinstance(rope, dict):
                raise self.refuse(key, rope, "it must be an object or null")
            for name, value in rope.items():
                if name in ("rope_type", "type"):
                    if value != "default":
                        raise self.refuse(f"{key}.{name}", value, 'only "default" can be loaded: angles are not scaled')
                elif name == "rope_theta":
                    said[f"{key}.rope_theta"] = value
                elif name != "partial_rotary_factor" or value not in _ONLY[name][0]:
                    raise self.refuse(f"{key}.{name}", value, "only rope_type and rope_theta can be loaded")
        for key, value in said.items():
            if self.positive(key, value) != next(iter(said.values())):
                first = next(iter(said))
                raise self.refuse(key, value, f"it must be {first} = {_shown(said[first])}, which is given too")
        return float(next(iter(said.values()), 10_000.0))

    def check_windows(self, layers: int) -> None:
        """Raise ConfigError where a layer attends to a window."""
        kinds = self.values.get("layer_types")
        if kinds is not None:
            if not isinstance(kinds, list) or len(kinds) != layers:
                raise self.refuse("layer_types", kinds, f"it must be a list of num_hidden_layers = {layers}")
            for i, kind in enumerate(kinds):
                if kind != "full_attention":
                    raise self.refuse(f"layer_types[{i}]", kind, "only full_attention can be loaded")
        elif self.flag("use_sliding_window") and (window := self.values.get("sliding_window", 4096)) is not None:
            first = self.values.get("max_window_layers", 28)
            if not isinstance(first, int) or first < layers:
                rule = f"layers from max_window_layers = {_shown(first)} on attend to a window; each must attend to all"
                raise self.refuse("sliding_window", window, rule)

    def model(self) -> ModelConfig:
        """Return the model that the configuration describes. Raises ConfigError where `Decoder` cannot be that."""
        family = self.family()
        self.check_only()
        heads, dim, layers = (self.count(k) for k in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
        # Null means as many as heads, and a missing key the family's own number.
        silent = heads if "num_key_value_heads" in self.values else family.kv_heads or heads
        kv_heads = self.count("num_key_value_heads", silent)
        if heads % kv_heads:
            rule = f"it must divide num_attention_heads = {heads}"
            raise self.refuse("num_key_value_heads", self.values.get("num_key_value_heads", kv_heads), rule)
        if self.values.get("head_dim") is None and family.head_dim is None and dim % heads:
            raise self.refuse(
                "num_attention_heads", heads, f"it must divide hidden_size = {dim}, as no head_dim is given"
            )
        head_dim = self.count("head_dim", family.head_dim or dim // heads)
        if head_dim % 2:
            raise self.refuse("head_dim", head_dim, "it must be even, as positions turn the halves of a head")
        self.check_windows(layers)
        eps = self.values.get("rms_norm_eps")
        return ModelConfig(
            dim=dim,
            layers=layers,
            heads=heads,
            ffn_dim=self.count("intermediate_size"),
            vocab_size=self.count("vocab_size"),
            seq_len=self.count("max_position_embeddings"),
            kv_heads=kv_heads,
            head_dim=head_dim,
            qk_norm=family.qk_norm,
            tied=self.flag("tie_word_embeddings"),
            rope_theta=self.theta(),
            norm_eps=1e-6 if eps is None else self.positive("rms_norm_eps", eps),
        )


def read_config(folder: Path) -> ModelConfig:
    """Return the model that the config.json of a folder describes.

    Raises ConfigError, which names the file, the key, its value and the rule, where `Decoder` cannot be that model.
    """
    return _Keys(folder / CONFIG).model()


def _header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return (shape, dtype) of each tensor of a safetensors file, by name, without reading its values."""
    try:
        with safe_open(file, framework="pt") as tensors:
            parts = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (no dictionary)
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is no readable safetensors file: {error}") from None


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """Return the files of a folder that hold weights, each with the tensors that the index names (None: no index).

    Raises ConfigError where there are none, or both a single file and an index, and where the index cannot be right.
    """
    single, index = folder / WEIGHTS, folder / INDEX
    if single.exists() and index.exists():
        raise ConfigError(f"{folder} holds both {WEIGHTS} and {INDEX}: only one of them can be the model")
    if single.exists():
        return {single: None}
    if not index.exists():
        raise ConfigError(f"{folder} holds no {WEIGHTS} and no {INDEX}: other formats, and pickles, are not read")
    placed = _read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ConfigError(f"{index}: weight_map = {_shown(placed)}: it must map names of tensors to files")
    found: dict[Path, list[str] | None] = {}
    for name, file in placed.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ConfigError(f"{index}: weight_map[{name!r}] = {_shown(file)}: it must name a file of the same folder")
        if not (folder / file).is_file():
            raise ConfigError(f"{index}: weight_map[{name!r}] = {_shown(file)}: this file is missing")
        found.setdefault(folder / file, []).append(name)
    return found


def _some(names: set[str]) -> str:
    """Return up to three of some names as text, and how many more there are."""
    first = [repr(n) for n in sorted(names)[:3]]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _place(folder: Path, shapes: dict[str, tuple[int, ...]], spare: dict[str, tuple[int, ...]]) -> dict[str, Path]:
    """Return the file of each tensor, by its name: of all in `shapes`, perhaps of some in `spare`, and of no other.

    Raises ConfigError where one is missing or superfluous, or has another shape or a dtype that is no float.
    """
    placed: dict[str, Path] = {}
    source = folder / WEIGHTS
    for file, listed in _files(folder).items():
        held = _header(file)
        if listed is not None:
            source = folder / INDEX
            if odd := held.keys() ^ set(listed):
                raise ConfigError(f"{file} does not hold what weight_map of {INDEX} says: {_some(odd)}")
        for name, (shape, dtype) in held.items():
            wanted = shapes.get(name, spare.get(name))
            if wanted is None:
                continue
            if shape != wanted:
                rule = f"it must be {list(wanted)} by {CONFIG}"
                raise ConfigError(f"{file}: the shape of {name} = {list(shape)}: {rule}")
            if dtype not in _DTYPES:
                raise ConfigError(f"{file}: the dtype of {name} = {dtype}: it must be one of {', '.join(_DTYPES)}")
        placed |= dict.fromkeys(held, file)
    if missing := shapes.keys() - placed.keys():
        raise ConfigError(f"{source} lacks {_some(missing)}, which the model of {CONFIG} has")
    if extra := placed.keys() - shapes.keys() - spare.keys():
        raise ConfigError(f"{source} holds {_some(extra)}, which the model of {CONFIG} does not have")
    return placed


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name)


def _blank(config: ModelConfig, constraint: Constraint | None, dtype: torch.dtype) -> Decoder:
    """Return a decoder on the CPU whose weights have no values yet; rotary tables and basis are fp32, as ever."""
    with torch.device("meta"):
        model = Decoder(config, constraint)
    model = model.to(dtype).to_empty(device="cpu")
    if config.tied:
        model.head.weight = model.embedding.weight
    model.cos_TC, model.sin_TC = rotary_tables(config.seq_len, config.width_of_head, config.rope_theta)
    if constraint is not None:
        model.basis_DR = model.basis_DR.float()
    return model


def load_folder(
    folder: Path, *, constraint: Constraint | None = None, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Decoder:
    """Return a decoder, on the CPU, with the weights of a Hugging Face folder of a Llama or a Qwen3 model.

    Args:
        folder: holds config.json, and model.safetensors or the files that model.safetensors.index.json names.
        constraint: projects what writes into the residual stream on a subspace, in fp32. The trainable embedding begins
            as the table's projection, or as zero, and the fixed one is the rest, so that both together are the table.
        seed: what the basis of the subspace is drawn from, as `Decoder.initialise` does.
        dtype: of the weights.

    Raises ConfigError, of one line that names the file, the key, its value and the rule, where the folder needs what
    `Decoder` does not have, where a tensor is missing, is superfluous or has another shape, and where a file is missing
    or corrupt.
    """
    folder = Path(folder)
    config = read_config(folder)
    if constraint is not None:
        if config.tied:
            rule = "it must be false with a constraint, as the embedding keeps to the subspace"
            raise ConfigError(f"{folder / CONFIG}: tie_word_embeddings = true: {rule}")
        if not 1 <= constraint.rank <= config.dim:
            rule = f"the constraint's rank must be at least 1 and at most that, got {constraint.rank}"
            raise ConfigError(f"{folder / CONFIG}: hidden_size = {config.dim}: {rule}")
    shapes = {public_name(name): shape for name, shape in parameter_shapes(config).items()}
    table, head = public_name("embedding.weight"), public_name("head.weight")
    # Files of tied models may hold the head once more.
    placed = _place(folder, shapes, {head: shapes[table]} if config.tied else {})
    if config.tied and head in placed:
        first, second = (_read(placed[name], name) for name in (table, head))
        if first.dtype != second.dtype or not torch.equal(first, second):
            raise ConfigError(f"{placed[head]}: {head} differs from {table}: tie_word_embeddings = true makes them one")
    model = _blank(config, constraint, dtype)
    model.draw_basis(seed)
    on_basis = {"embedding.weight", *model.constrained()} if constraint is not None else set()
    for name in parameter_shapes(config):
        public = public_name(name)
        w = _read(placed[public], public)
        model.put(name, w.float() if name in on_basis else w, split=True)
    if constraint is not None:
        model.basis_DR = model.basis_DR.to(dtype)
    return model


def _whole(model: Decoder) -> dict[str, Tensor]:
    """Return the weights of a decoder, by Hugging Face's names and as they are without a constraint.

    Raises ConfigError where the decoder is not whole.
    """
    shapes = parameter_shapes(model.config)
    held = {name for name, _ in model.named_parameters()}
    if held != shapes.keys():
        raise ConfigError(
            f"the model lacks, or has besides, {_some(held ^ shapes.keys())}: only a whole one can be saved"
        )
    weights = {public_name(name): model.whole(name).cpu().contiguous() for name in shapes}
    for (name, shape), w in zip(shapes.items(), weights.values(), strict=True):
        if tuple(w.shape) != shape:
            raise ConfigError(f"the shape of {name} = {list(w.shape)}: it must be {list(shape)} to be saved")
    return weights


def public_config(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return the config.json of the same model: of a Qwen3 where queries and keys are normed, else of a Llama.

    `z_loss` is of training alone and is not in it. Raises ConfigError for what neither model has.
    """
    for key, value, only in (("mlp", config.mlp, "gated"), ("norm", config.norm, "rms")):
        if value != only:
            raise ConfigError(f"model.{key} = {value!r}: only {only!r} can be saved as a Llama or Qwen3 model")
    kind = "qwen3" if config.qk_norm else "llama"
    if kind == "llama" and config.dim % config.heads:
        raise ConfigError(f"model.heads = {config.heads}: it must divide model.dim = {config.dim} in a Llama model")
    family, more = _FAMILIES[kind], dict(_FAMILIES[kind].more)
    if kind == "qwen3":
        more |= {"layer_types": ["full_attention"] * config.layers, "max_window_layers": config.layers}
    said = more | {
        "architectures": [family.architecture],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": None,
        "head_dim": config.width_of_head,
        "hidden_act": "silu",
        "hidden_size": config.dim,
        "initializer_range": 0.02,
        "intermediate_size": config.ffn_dim,
        "max_position_embeddings": config.seq_len,
        "model_type": kind,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.key_value_heads,
        "pad_token_id": None,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rope_theta": config.rope_theta,  # for readers older than transformers 5
        "tie_word_embeddings": config.tied,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }
    return dict(sorted(said.items()))


def save_folder(model: Decoder, folder: Path) -> None:
    """Write a decoder as a Hugging Face folder: config.json and model.safetensors, which replace those that are there.

    Of a constrained model, what each parameter stands for is written (`Decoder.whole`); the subspace is not. Raises
    ConfigError for what is no Llama or Qwen3 model (one whose stream is projected is none), for a stage of a pipeline
    or another part of a model, and for a folder that holds a model of several files.
    """
    folder = Path(folder)
    if model.projecting_layers:
        raise ConfigError("a model whose stream is projected between its layers is no Llama or Qwen3 model")
    weights = _whole(model)
    config = public_config(model.config, next(iter(weights.values())).dtype)
    if (folder / INDEX).exists():
        raise ConfigError(
            f"{folder / INDEX} is of a model of several files, which is not overwritten: give another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{WEIGHTS}.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    os.replace(partial, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
