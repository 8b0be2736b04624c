"""Reads the measured times of NVIDIA's kernels, from the CSV files in `measured`.

Each file says who measured what, and where.
"""

import csv
import functools
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxremat.chips.nvidia.gpu import load_gpu
from jaxremat.chips.tables import Direction, Grid, Tables

FOLDER = Path(__file__).parent / "measured"
#: By generation, the peak FLOP/s of the GPUs that were measured: an H100 SXM or H200, and a B200 or GB200.
PEAKS = {"sm_90": {"bf16": 989.5e12, "f32": 494.7e12}, "sm_100": {"bf16": 2250e12, "f32": 1125e12}}
#: By generation without tables, the one whose tables stand for it: a B300 has the multiprocessors of a B200.
LIKE = {"sm_103": "sm_100"}
#: By generation, the GPUs of the nodes whose collectives were measured.
NODES = {"sm_90": "h100-80gb", "sm_100": "b200"}
#: Seconds of a launch in the times of `matmul.csv`. With it, they agree with 61 bf16 matmuls that the profiler timed on an H200,
#: the median within 3.5 % (python -m experiments.kernel_tables).
MATMUL_LAUNCH_S = 3e-6
#: What three matmuls with a vocabulary of 50,257 reach together in a step on an H200 (experiments/profiles/nvidia-h200-gpt2).
UNALIGNED_SHARE = 0.335
#: Fitted to the published steps of H100s (python -m experiments.published --parts fits).
TRAINING_SHARE = 0.83
#: Half way from 1 to the 2.07 times that the slowest matmuls took beside an all-gather, in a trace of 64 H100 (Llama 3 70B,
#: PyTorch's FSDP). The published steps alone can't tell this number from `TRAINING_SHARE`.
BESIDE_COLLECTIVE = 1.5


@functools.cache
def load_tables(compute_capability: tuple[int, int]) -> Tables | None:
    """The tables for GPUs of a compute capability, such as (9, 0) for an H100.

    None if there are none.
    """
    generation = "sm_{}{}".format(*compute_capability)
    generation = LIKE.get(generation, generation)
    if generation not in PEAKS:
        return None
    matmuls: dict[str, dict[tuple[int, ...], float]] = defaultdict(dict)
    for row in _rows("matmul", generation):
        sizes = tuple(int(row[name]) for name in "bmnk")
        matmuls[row["type"]][sizes] = _without_launch(2 * math.prod(sizes), 1e12 * float(row["tflops"]))
    attention: dict[tuple[Direction, int], dict[int, float]] = defaultdict(dict)
    for row in _rows("attention", generation):
        attention[row["direction"], int(row["head_size"])][int(row["length"])] = 1e12 * float(row["tflops"])
    collectives: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for row in _rows("collective", generation):
        collectives[row["kind"], int(row["devices"])][int(row["bytes"])] = 1e-6 * float(row["microseconds"])
    return Tables(
        peak_flops=PEAKS[generation],
        matmuls={
            kind: Grid(tuple(tuple(sorted({*axis})) for axis in zip(*rates, strict=True)), rates)
            for kind, rates in matmuls.items()
        },
        attention=attention,
        collectives=collectives,
        node_bytes_per_s=load_gpu(NODES[generation])[1].node_link_bandwidth,
        unaligned_share=UNALIGNED_SHARE,
        training_share=TRAINING_SHARE,
        beside_collective=BESIDE_COLLECTIVE,
    )


def _without_launch(flops: int, flops_per_s: float) -> float:
    """FLOP/s without the launch, which is at most 70 % of a measured time."""
    seconds = flops / flops_per_s
    return flops / max(seconds - MATMUL_LAUNCH_S, 0.3 * seconds)


def _rows(name: str, generation: str) -> Iterator[dict[str, Any]]:
    lines = (line for line in (FOLDER / f"{name}.csv").read_text().splitlines() if not line.startswith("#"))
    return (row for row in csv.DictReader(lines) if row["generation"] == generation)
