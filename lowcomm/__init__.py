"""Low-communication training of language models: the algorithms of four papers, composable.

    import lowcomm

    world = lowcomm.world()                            torchrun's ranks, or this process alone
    sync = lowcomm.StreamingDiLoCo(model, world, sync_every_steps=30)
    for batch in loader:                               of this replica: world.replica of world.replicas
        loss = model(**batch).loss
        loss.backward()
        sync.average_gradients()                       what lowcomm.DataParallel needs; with others it does nothing
        optimizer.step()
        optimizer.zero_grad()
        sync.step()
    sync.finish()
    with sync.evaluated():                             the parameters that replicas have agreed on
        evaluate(model)

It takes any module, any inner optimizer, any loop: H counts steps of the inner optimizer, so micro-batches and gradient
accumulation stay the loop's own affair. `lowcomm.run_threads(fn, replicas=4)` runs as many ranks in one process, for a
notebook or a test. Where machines leave and come back, `lowcomm.ElasticUpdates` goes on with whoever is there.

The subpackages, each of which imports only those before it: `model`, `codecs`, `comm`, `methods`, `experiment`, `cost`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowcomm.comm.config import CommConfig
    from lowcomm.comm.membership import Rules
    from lowcomm.comm.processes import elastic_store
    from lowcomm.comm.start import run_threads, world
    from lowcomm.comm.transport import CommError
    from lowcomm.comm.world import World
    from lowcomm.methods.config import BoundaryConfig, MethodConfig
    from lowcomm.methods.elastic import ElasticUpdates
    from lowcomm.methods.engine import DataParallel
    from lowcomm.methods.local_updates import LocalUpdates
    from lowcomm.methods.named import DeMo, DiLoCo, FederatedAveraging, GASLoC, NoLoCo, SparseLoCo, StreamingDiLoCo
    from lowcomm.methods.partial import slice_parameters
    from lowcomm.methods.plan import Plan
    from lowcomm.model.config import ModelConfig
    from lowcomm.model.decoder import Decoder
    from lowcomm.model.huggingface import load_folder, save_folder
    from lowcomm.settings import ConfigError

#: Public name -> the module that it is in. Imported when asked for, as most need torch, and reading results does not.
_PUBLIC = {
    "BoundaryConfig": "methods.config",
    "CommConfig": "comm.config",
    "CommError": "comm.transport",
    "ConfigError": "settings",
    "DataParallel": "methods.engine",
    "DeMo": "methods.named",
    "Decoder": "model.decoder",
    "DiLoCo": "methods.named",
    "ElasticUpdates": "methods.elastic",
    "FederatedAveraging": "methods.named",
    "GASLoC": "methods.named",
    "LocalUpdates": "methods.local_updates",
    "MethodConfig": "methods.config",
    "ModelConfig": "model.config",
    "NoLoCo": "methods.named",
    "Plan": "methods.plan",
    "Rules": "comm.membership",
    "SparseLoCo": "methods.named",
    "StreamingDiLoCo": "methods.named",
    "World": "comm.world",
    "elastic_store": "comm.processes",
    "load_folder": "model.huggingface",
    "run_threads": "comm.start",
    "save_folder": "model.huggingface",
    "slice_parameters": "methods.partial",
    "world": "comm.start",
}

__all__ = [
    "BoundaryConfig",
    "CommConfig",
    "CommError",
    "ConfigError",
    "DataParallel",
    "DeMo",
    "Decoder",
    "DiLoCo",
    "ElasticUpdates",
    "FederatedAveraging",
    "GASLoC",
    "LocalUpdates",
    "MethodConfig",
    "ModelConfig",
    "NoLoCo",
    "Plan",
    "Rules",
    "SparseLoCo",
    "StreamingDiLoCo",
    "World",
    "elastic_store",
    "load_folder",
    "run_threads",
    "save_folder",
    "slice_parameters",
    "world",
]


def __getattr__(name: str) -> Any:
    """Import a public name on its first use. Raises AttributeError for any other name."""
    if name == "transformers":
        return importlib.import_module("lowcomm.transformers")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'lowcomm' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"lowcomm.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value
