"""The benchmarks run, and print every ratio; what the ratios are is for a machine that does nothing else."""

from __future__ import annotations

import math
import re
import subprocess
import sys

from tests.harness import clean_environment

RATIOS = [
    "trainer tokens/s over a bare loop's",
    "engine's share of a step without exchange, %",
    "E3M0 encode over a memory copy of the fp32 values, speed",
    "plain PyTorch's seconds over ours, E3M0 encode",
    "E3M0 decode over a memory copy of the fp32 values, speed",
    "plain PyTorch's seconds over ours, E3M0 decode",
    "seconds of a step with 1/4 MLP + 1/4 heads over a full one's",
    "subspace, % of a step: watching",
    "subspace, % of a step: projection",
    "subspace, % of a step: compression",
    "subspace, % of a step: update, every 500 steps",
    "subspace, % of a step: all",
    "seconds of AdamW with a second moment a row over the fused one's",
    "fp32 sum of 0.04 MB over all-reduce, 2 ranks",
    "fp32 mean of 0.04 MB over all-reduce and division, 2 ranks",
    "seconds of a round among replicas that may leave over a fixed one's, parameters equal bit for bit",
]


def test_every_ratio_is_printed_and_is_a_number() -> None:
    command = [sys.executable, "-m", "pipelines.bench", "--small"]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    head, rule, *rows = done.stdout.splitlines()
    assert (head, rule) == ("| benchmark | ratio: median (quartiles) | asked for |", "|---|---|---|")
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [name for name, *_ in cells] == RATIOS
    for name, ratio, _ in cells:
        found = re.fullmatch(r"(\S+) \((\S+) to (\S+)\)", ratio)
        assert found, (name, ratio)
        middle, low, high = map(float, found.groups())
        assert 0 < low <= middle <= high < math.inf, (name, ratio)
