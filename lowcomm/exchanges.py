"""When a finished run exchanged its fragments, from its summary."""

from __future__ import annotations

from typing import Any

from lowcomm.streaming import Schedule, layer_fragments


def last_exchanges(run: dict[str, Any]) -> list[int]:
    """The step at which each fragment of layers, and then what is in none, is exchanged last, from a summary's `run`.

    The last step of all where the last round is closed.
    """
    m, steps = run["method"], run["train"]["steps"]
    if m["close_last_round"]:
        return [steps]
    count = len(layer_fragments(run["model"]["layers"], m["layers_per_fragment"], m["fragments"])) + 1
    schedule = Schedule(count, m["sync_every_steps"])
    return [schedule.offset(p) + schedule.turns_of(p, steps) * m["sync_every_steps"] for p in range(count)]
