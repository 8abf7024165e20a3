"""Training by transformers.Trainer: the callback against a plain loop, checkpoints, evaluations, refusals."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowcomm
from pipelines.launch import torchrun_command
from tests.harness import clean_environment, refused
from tests.test_api import digest, llama

transformers = pytest.importorskip("transformers")
SETTINGS = {"sync_every_steps": 6, "overlap_steps": 3, "mixing": 0.5, "codec": "e3m0", "record_cosine": True}
STEPS, MICRO_BATCHES, SEQUENCES = 14, 2, 2


def sequences(seed: int) -> Tensor:
    return torch.randint(64, (20, 8), generator=torch.Generator().manual_seed(seed))


def dataset(seed: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": ids, "labels": ids} for ids in sequences(seed)]


def arguments(folder: Path, **more: Any) -> Any:
    """Two epochs and a half of ten micro-batches, two a step."""
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "log_level": "error"}
    loop = {
        "max_steps": STEPS,
        "per_device_train_batch_size": SEQUENCES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "train_sampling_strategy": "sequential",
        "optim": "adamw_torch",
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
    }
    return transformers.TrainingArguments(output_dir=str(folder), **(quiet | loop | more))


def trainer(world: lowcomm.World, args: Any, *more: Any, evaluated: Any = None) -> Any:
    """A Trainer of a Llama by Streaming DiLoCo, on the replica's own data."""
    from lowcomm.transformers import SyncCallback

    sync = SyncCallback(lowcomm.StreamingDiLoCo, world, **SETTINGS)
    model, data = llama(seed=world.replica), dataset(seed=world.replica)
    return transformers.Trainer(
        model, args, train_dataset=data, eval_dataset=evaluated or dataset(seed=9), callbacks=[sync, *more]
    )


def logged(found: Any, key: str) -> dict[int, float]:
    """Return what a Trainer has logged under a key, by step."""
    return {entry["step"]: entry[key] for entry in found.state.log_history if key in entry}


def cosines(found: Any) -> list[dict[str, float]]:
    """Return the cosines that the engine has logged in a Trainer's training, in order."""
    said = [{k: v for k, v in entry.items() if k.startswith("cosine")} for entry in found.state.log_history]
    return [entry for entry in said if entry]


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    """Return the loss on the sequences that the Trainer evaluates, in batches of eight."""
    losses = [model(input_ids=ids, labels=ids).loss.repeat(8)[: len(ids)] for ids in sequences(9).split(8)]
    return torch.cat(losses).numpy().mean().item()


def by_hand(world: lowcomm.World) -> dict[str, Any]:
    """The same training as a plain loop."""
    model = llama(seed=world.replica)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    sync = lowcomm.StreamingDiLoCo(model, world, steps=STEPS, **SETTINGS)
    batches = sequences(world.replica).split(SEQUENCES)
    losses, evaluated, cosines = {}, {}, []
    for step in range(1, STEPS + 1):
        losses[step] = 0.0
        for i in range(MICRO_BATCHES):
            ids = batches[(MICRO_BATCHES * (step - 1) + i) % len(batches)]
            items = torch.tensor(MICRO_BATCHES * SEQUENCES * (ids.shape[1] - 1))
            loss = model(input_ids=ids, labels=ids, num_items_in_batch=items).loss
            loss.backward()
            losses[step] = (torch.tensor(losses[step]) + loss.detach()).item()
        optimizer.step()
        optimizer.zero_grad()
        cosines += [sync.step()]
        with sync.evaluated():
            evaluated[step] = evaluate(model)
    cosines += [sync.finish()]
    with sync.evaluated():
        return {
            "losses": losses,
            "evaluated": evaluated,
            "cosines": [c for c in cosines if c],
            "final": evaluate(model),
            "agreed": digest(list(model.parameters())),
        }


class Sampling(transformers.TrainerCallback):
    """A user's callback that looks at the model after an evaluation, and at its parameters in every step."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        evaluate(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        self.seen.append(digest(list(model.parameters())))


def under_torchrun(folder: Path) -> dict[str, Any]:
    """Return what one rank under torchrun finds."""
    world = lowcomm.world()
    found: dict[str, Any] = {}
    found["not alone"] = refused(lambda: trainer(world, arguments(folder / "x")))
    lowcomm.transformers.alone()
    found["one folder"] = refused(lambda: trainer(world, arguments(folder / "x")).train())
    unlike = arguments(folder / "x", max_steps=10 + world.replica, save_strategy="no")
    found["unlike"] = refused(lambda: trainer(world, unlike).train())
    loop = by_hand(world)

    out, looks = folder / f"{world.replica}", Sampling()
    args = arguments(out, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=8)
    first = trainer(world, args, looks)
    first.train()
    assert logged(first, "loss") == loop["losses"]
    assert logged(first, "eval_loss") == {s: loop["evaluated"][s] for s in range(2, STEPS + 1, 2)}
    assert cosines(first) == loop["cosines"] != []
    assert digest(list(first.model.parameters())) == loop["agreed"]
    assert first.evaluate()["eval_loss"] == loop["final"]
    assert not first.model._forward_pre_hooks

    checkpoint = out / "checkpoint-8"
    state = lowcomm.transformers.SyncCallback(lowcomm.StreamingDiLoCo, world)._file
    from safetensors.torch import load_file

    assert any(name.endswith("under_way") for name in load_file(checkpoint / state))  # sent after 6, due after 9
    looks_again = Sampling()
    two = {"a": dataset(9), "b": dataset(9)}
    args = arguments(out, eval_strategy="epoch", eval_on_start=True, save_strategy="epoch")
    second = trainer(world, args, looks_again, evaluated=two)
    second.train(resume_from_checkpoint=str(checkpoint))
    assert looks_again.seen == looks.seen[8:]
    assert logged(second, "loss") == loop["losses"]
    for name in ("a", "b"):
        evaluated = logged(second, f"eval_{name}_loss")
        assert evaluated == {s: loop["evaluated"][s] for s in (8, 10, STEPS)}
    assert digest(list(second.model.parameters())) == loop["agreed"]

    (checkpoint / state).rename(checkpoint / "elsewhere")
    again = trainer(world, args)
    found["no state"] = refused(lambda: again.train(resume_from_checkpoint=str(checkpoint)))
    (out / "checkpoint-10" / state).rename(checkpoint / state)
    found["unlike state"] = refused(lambda: again.train(resume_from_checkpoint=str(checkpoint)))
    world.close()
    return found | {"agreed": loop["agreed"], "losses": loop["losses"]}


def test_a_trainer_is_a_plain_loop_bit_for_bit_also_resumed_with_a_transfer_in_flight(tmp_path: Path) -> None:
    command = torchrun_command(2, "tests.test_transformers", str(tmp_path))
    environment = clean_environment(CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["agreed"] == second["agreed"]
    assert first["losses"] != second["losses"]  # each has data of its own
    for found in (first, second):
        assert "world_size = 2): call lowcomm.transformers.alone() before TrainingArguments" in found["not alone"]
        assert "is that of several replicas" in found["one folder"]
        assert "max_steps must be the same on all replicas, got [10, 11]; set max_steps" in found["unlike"]
        assert "is missing: to resume" in found["no state"]
        assert "other parameters than those that the Trainer has resumed" in found["unlike state"]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (lowcomm.DiLoCo, {"sync_every": 30}, "no setting of a method is named 'sync_every'; did you mean"),
        (lowcomm.DiLoCo, {"codec": "e3mo"}, "method.codec = 'e3mo' is not a valid choice"),
        (lowcomm.DiLoCo, {"overlap_steps": 30}, "method.overlap_steps = 30 must be at least 0 and below"),
        (lowcomm.DataParallel, {}, "SyncCallback takes lowcomm.LocalUpdates or a class derived from it, got"),
        (lowcomm.DiLoCo, {"trainable": "slice", "sliced": ["*:0"]}, "trainable = slice needs a loop of its own"),
    ],
)
def test_wrong_settings_are_refused_when_the_callback_is_made(kind: Any, settings: Any, message: str) -> None:
    from lowcomm.transformers import SyncCallback

    assert message in refused(lambda: SyncCallback(kind, lowcomm.world(), **settings))


@pytest.mark.parametrize(
    ("settings", "asked", "message"),
    [
        ({"fragments": "patterns", "fragment_patterns": ["x.*"]}, {}, "fragment 'x.*' holds no parameter"),
        ({}, {"auto_find_batch_size": True}, "TrainingArguments.auto_find_batch_size does not go with SyncCallback"),
        ({}, {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 500}, "load_best_model_at_end"),
    ],
)
def test_what_cannot_work_is_refused_when_the_trainer_is_made(
    settings: Any, asked: Any, message: str, tmp_path: Path
) -> None:
    from lowcomm.transformers import SyncCallback

    sync = SyncCallback(lowcomm.DiLoCo, lowcomm.world(), **settings)
    args = arguments(tmp_path, **asked)
    assert message in refused(lambda: transformers.Trainer(llama(0), args, eval_dataset=dataset(9), callbacks=[sync]))


def test_threads_are_refused_as_trainers_in_them_skip_steps() -> None:
    from lowcomm.transformers import SyncCallback

    with pytest.raises(lowcomm.ConfigError, match="start a process for each replica with torchrun"):
        lowcomm.run_threads(lambda world: SyncCallback(lowcomm.DiLoCo, world), replicas=2)


def test_alone_is_called_after_the_world_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowcomm.transformers import alone

    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "call lowcomm.world() first" in refused(alone)
    assert os.environ["LOCAL_RANK"] == "1"


def test_only_who_asks_for_it_imports_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import lowcomm, sys; [getattr(lowcomm, name) for name in lowcomm.__all__]"
    code += "; sys.exit('transformers' in sys.modules or 'lowcomm.transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env=clean_environment(), check=True)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "lowcomm.transformers", raising=False)
    with pytest.raises(ImportError, match=r"pip install lowcomm\[transformers\]"):
        importlib.import_module("lowcomm.transformers")


if __name__ == "__main__":
    import lowcomm.transformers

    results = under_torchrun(Path(sys.argv[1]))
    (Path(sys.argv[1]) / f"{os.environ['RANK']}.json").write_text(json.dumps(results))
