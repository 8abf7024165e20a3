"""The simulator: hand-computed schedules, limits, and Streaming DiLoCo's Table 4."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lowcomm.codecs import make_codec
from lowcomm.cost.simulate import (
    Exchange,
    Stages,
    Timeline,
    Workload,
    bandwidth_needed,
    compute_utilisation,
    data_parallel,
    decode_seconds,
    diloco,
    gpipe_step,
    streaming,
    train_steps,
)
from lowcomm.methods.pipeline import bubble
from lowcomm.methods.streaming import layer_fragments
from pipelines.report import published

SMALL = Workload(layers=2, parameters=2.0, step_seconds=5.0)  # 3 L - 1 nodes of a second each


def test_a_resource_serves_in_order_and_a_node_waits() -> None:
    timeline = Timeline(keep=True)
    first = timeline.add("a", 2.0)
    second = timeline.add("b", 1.0, [first])
    third = timeline.add("a", 1.0, [second])
    timeline.add("a", 1.0)
    assert (first, second, third, timeline.free("a")) == (2.0, 3.0, 4.0, 5.0)
    assert [(n.resource, n.begin, n.end) for n in timeline.nodes] == [
        ("a", 0.0, 2.0),
        ("b", 2.0, 3.0),
        ("a", 3.0, 4.0),
        ("a", 4.0, 5.0),
    ]


def test_an_encoded_exchange_takes_what_world_sends() -> None:
    """Gathered by two or four replicas, in shares by sixteen: 4 bits and a byte a block of 256, and sums in fp32."""
    coded = streaming(4, 20, layers_per_fragment=2, codec=make_codec("e3m0"))
    numel = 256 * 1600
    once = numel / 2 + numel / 256
    assert coded.reduction(numel, 1, 8.0, 1.0) == 0
    assert coded.reduction(numel, 2, 8.0, 1.0) == once + 1
    assert coded.reduction(numel, 4, 8.0, 1.0) == 3 * once + 1
    assert coded.reduction(numel, 16, 8.0, 1.0) == 15 / 16 * (once + 4 * numel) + 2
    ring = streaming(4, 20, layers_per_fragment=2, bits_per_parameter=8 * once / numel)
    work, grid = Workload(4, 4 * numel, 0.1), np.logspace(-3, 0, 7)
    assert np.allclose(compute_utilisation(work, coded, grid), compute_utilisation(work, ring, grid))
    more = {e: compute_utilisation(work, e, grid, replicas=4) for e in (coded, ring)}
    assert (more[coded] <= more[ring]).all()
    assert (more[coded] < more[ring]).any()


def _began(exchange: Exchange, reduction: float, steps: range) -> list[float]:
    return train_steps(Timeline(), SMALL, exchange, steps, reduction)


def test_schedules_of_two_layers_are_those_drawn_by_hand() -> None:
    """F1 F2 A2 P2 P1, and reductions of 4 s: layer 2 may go after P2 (4 s), layer 1 after P1 (5 s)."""
    assert _began(data_parallel(2), 4.0, range(1, 4)) == [0, 12, 24]  # the link is busy from 4 to 12
    assert _began(diloco(2, 2), 4.0, range(2, 6)) == [0, 12, 17, 29]
    one_layer_each = layer_fragments(2, 1, "sequential")
    # Layer 1 is sent at 5 and back at 9; layer 2 then leaves after P2 at 13, so forward 2 waits until 17.
    assert _began(Exchange(one_layer_each, 2), 4.0, range(4, 8)) == [0, 9, 14, 25]
    assert _began(Exchange(one_layer_each, 2, overlap_steps=1), 4.0, range(4, 8)) == [0, 5, 10, 15]


def test_a_step_of_data_parallel_training_has_4l_minus_1_nodes() -> None:
    timeline = Timeline(keep=True)
    train_steps(timeline, Workload(7, 1.0, 1.0), data_parallel(7), range(1, 4), 0.1)
    assert len(timeline.nodes) == 3 * (4 * 7 - 1)
    computing = sum(n.end - n.begin for n in timeline.nodes if n.resource == "compute")
    assert computing == pytest.approx(3.0)


METHODS: dict[str, Exchange] = {
    "data_parallel": data_parallel(12),
    "diloco": diloco(12, 20),
    "streaming": streaming(12, 20, layers_per_fragment=3),
    "overlapped": streaming(12, 20, layers_per_fragment=3, overlap_steps=1),
}


@pytest.mark.parametrize("exchange", METHODS.values(), ids=METHODS.keys())
def test_utilisation_at_both_ends_of_the_bandwidths(exchange: Exchange) -> None:
    work = Workload(12, 1e9, 0.1)
    slow, *_, fast = compute_utilisation(work, exchange, np.logspace(-4, 6, 50))
    assert fast == pytest.approx(1, abs=1e-4)
    rounds_seconds = 16e9 / 1e5  # all parameters, once a round: what a link that never rests allows
    assert slow == pytest.approx(exchange.sync_every_steps * 0.1 / rounds_seconds, rel=2e-3)


def test_utilisation_grows_with_bandwidth_and_overlap_and_falls_with_latency_and_replicas() -> None:
    work, grid = Workload(12, 1e9, 0.1), np.logspace(-1, 3, 50)
    by_tau = [
        compute_utilisation(work, streaming(12, 20, layers_per_fragment=3, overlap_steps=t), grid) for t in (0, 1, 2)
    ]
    for curve in by_tau:
        assert (np.diff(curve) >= -1e-12).all()
    assert (by_tau[1] >= by_tau[0] - 1e-12).all()
    assert (by_tau[2] >= by_tau[1] - 1e-12).all()
    base = compute_utilisation(work, data_parallel(12), grid)
    assert (compute_utilisation(work, data_parallel(12), grid, latency_s=0.01) < base).all()
    # A ring of 8 moves 2 x 7/8 of the payload, a pair all of it once.
    assert np.allclose(compute_utilisation(work, data_parallel(12), grid * 1.75, replicas=8), base)
    assert np.allclose(compute_utilisation(work, data_parallel(12), grid, replicas=1), 1)


def test_one_pass_over_many_bandwidths_is_each_bandwidth_alone() -> None:
    work, exchange, grid = Workload(12, 1e9, 0.1), METHODS["overlapped"], np.logspace(-1, 3, 7)
    alone = [compute_utilisation(work, exchange, float(g)) for g in grid]
    assert compute_utilisation(work, exchange, grid).tolist() == [float(a) for a in alone]


def test_bandwidth_needed_is_the_smallest_that_reaches_a_level() -> None:
    grid, curve = np.array([1.0, 2.0, 4.0]), np.array([0.2, 0.5, 0.9])
    assert bandwidth_needed(curve, grid, 0.5) == 2.0
    assert bandwidth_needed(curve, grid, 0.95) == float("inf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fragments": ((0,),), "sync_every_steps": 4, "overlap_steps": 4}, "overlap_steps = 4 must be at least 0 and"),
        ({"fragments": ((0,), (0, 1)), "sync_every_steps": 4}, "share a layer"),
    ],
)
def test_impossible_exchanges_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Exchange(**arguments)


def test_impossible_workloads_are_refused() -> None:
    with pytest.raises(ValueError, match="needs a layer, a positive step_seconds"):
        Workload(0, 1e9, 0.1)
    with pytest.raises(ValueError, match="a fragment holds layer 23, the model has 12"):
        compute_utilisation(Workload(12, 1e9, 0.1), data_parallel(24), 1.0)
    with pytest.raises(ValueError, match="replicas must be at least 1, got 0"):
        compute_utilisation(Workload(12, 1e9, 0.1), data_parallel(12), 1.0, replicas=0)


# Streaming DiLoCo's Table 4

GRID = np.logspace(-1, 3, 50)
BITS = 13.375  # a parameter, found in notebook 32 from the rows without fragments


def _points_off(work: Workload, exchange: Exchange, row: dict) -> list[int]:
    """Return by how many points of the grid our bandwidths exceed those of a printed row."""
    curve = compute_utilisation(work, exchange, GRID)
    needed = [bandwidth_needed(curve, GRID, level / 100) for level in row["utilization"]]
    pairs = zip(needed, row["gbit_per_s"], strict=True)
    return [round(np.log(ours / theirs) / np.log(GRID[1] / GRID[0])) for ours, theirs in pairs]


def test_table_4_of_streaming_diloco() -> None:
    equal = near = 0
    models = {r["model"]: r for r in published("streaming_diloco", "table4_models")}
    for row in published("streaming_diloco", "table4"):
        model, method = models[row["model"]], row["method"]
        layers = model["layers"]
        exchange = {
            "data_parallel": data_parallel(layers, bits_per_parameter=BITS),
            "diloco": diloco(layers, 100, bits_per_parameter=BITS),
        }.get(method) or streaming(
            layers,
            100,
            layers_per_fragment=3,
            overlap_steps=int("overlapped" in method),
            bits_per_parameter=BITS / 4 if "fp4" in method else BITS,
        )
        for off in _points_off(Workload(layers, model["parameters"], model["step_seconds"]), exchange, row):
            equal += off == 0
            near += abs(off) <= 1
    assert equal >= 62
    assert near >= 73


def test_the_constant_of_table_4_does_not_carry_over_to_the_later_paper() -> None:
    """It asks for more in nearly every cell, though rarely by more than a point of the grid: notebook 32 says so."""
    work = Workload(48, 1e10, 0.8)
    off = []
    for row in published("streaming_diloco", "table4_later"):
        every = row["H"]
        exchange = diloco(48, every, bits_per_parameter=BITS) if every else data_parallel(48, bits_per_parameter=BITS)
        off += _points_off(work, exchange, row)
    assert min(off) >= 0
    assert np.mean(off) > 0.5
    assert sum(o <= 1 for o in off) >= 23


# Pipelines


def _equal(stages: int, forward: float, backward: float, wire: float = 0.0, latency: float = 0.0) -> Stages:
    between = (wire,) * (stages - 1)
    return Stages((forward,) * stages, (backward,) * stages, between, between, (latency,) * (stages - 1))


@pytest.mark.parametrize(("stages", "count"), [(1, 1), (1, 5), (2, 1), (4, 1), (4, 8), (8, 3)])
def test_a_pipeline_over_free_wires_has_gpipes_bubble(stages: int, count: int) -> None:
    assert gpipe_step(_equal(stages, 1.0, 2.0), count) == pytest.approx((count + stages - 1) * 3.0)
    assert gpipe_step(_equal(stages, 1.0, 2.0), count) == pytest.approx(count * 3.0 / (1 - bubble(stages, count)))


def test_a_pipeline_over_slow_wires_by_hand() -> None:
    """Two stages, two micro-batches, F = 1, B = 2, 3 on the wire, latency 1/2.

    Forward: stage 0 is done at 1 and 2; arrivals at 4.5 and 7.5; stage 1 from 4.5 to 5.5 and 7.5 to 8.5. Backward:
    stage 1 from 8.5 to 10.5 and to 12.5; gradients leave at 13.5 and 16.5, arrive at 14 and 17; stage 0 ends at 19.
    """
    p = _equal(2, 1.0, 2.0, 3.0, 0.5)
    assert gpipe_step(p, 2) == pytest.approx(19.0)
    # A stage that stands still while it sends: stage 0 sends from 1 to 4 and from 5 to 8, stage 1 begins its last
    # forward at 8.5, its backward passes at 9.5, sends to 14.5, then from 16.5 to 19.5; stage 0 from 20 to 22.
    assert gpipe_step(p, 2, overlap=False) == pytest.approx(22.0)


def test_what_is_sent_while_computing_costs_only_the_fill() -> None:
    """Wires faster than stages: each boundary adds its two transfers once."""
    assert gpipe_step(_equal(4, 1.0, 1.0, 0.5), 8) == pytest.approx(22.0 + 3 * 2 * 0.5)


def test_times_may_be_arrays() -> None:
    wire = np.array([0.0, 0.5])
    p = Stages((1.0,) * 4, (1.0,) * 4, (wire,) * 3, (wire,) * 3, (0.0,) * 3)
    np.testing.assert_allclose(gpipe_step(p, 8), [22.0, 25.0])


def test_decoding_takes_a_round_trip_or_as_long_as_the_busiest() -> None:
    p = _equal(4, 1.0, 0.0, 0.25, 0.1)
    assert decode_seconds(p, 1, 0.5) == pytest.approx(4 + 3 * 0.35 + 0.5)
    assert decode_seconds(p, 8, 0.5) == pytest.approx(8.0)  # stages are always busy
    assert decode_seconds(_equal(4, 1.0, 0.0, 3.0), 8, 0.0) == pytest.approx(24.0)  # so are wires


def test_a_pipeline_must_have_a_time_for_everything() -> None:
    with pytest.raises(ValueError, match="2 forward and 1 backward times"):
        Stages((1.0, 1.0), (1.0,), (0.0,), (0.0,), (0.0,))
    with pytest.raises(ValueError, match="2 activations for 2 stages: one for each of 1 boundaries"):
        Stages((1.0, 1.0), (1.0, 1.0), (0.0, 0.0), (0.0,), (0.0,))
