"""What the Hopper kernels whose rows are pixels are asked on a CPU, and their measurements.

The numbers are small and whole, so that TF32 makes no error at all and 16 bits only that of their
output.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import sm90_on_cpu
from benchmark_scripts import FOLDER, script
from sm90_references import expected, expected_grad_input

from upconv.planner import H200, Problem

MULTIPROCESSORS = 3


def check(
    library: ctypes.CDLL, record: tuple[int, ...], problem: Problem, seed: int, nans: int = 0
) -> None:
    """The kernel computes what PyTorch does; so many channels begin and end with a NaN."""
    rng = np.random.default_rng(seed)
    whole = lambda *shape: rng.integers(-3, 4, shape).astype(np.float64)  # noqa: E731
    w = whole(problem.in_channels, problem.out_channels, *problem.kernel)
    bias = None
    if problem.direction == "forward":
        x = whole(problem.batch, problem.in_channels, *problem.in_size)
        spoil(x, nans, rng)
        bias = whole(problem.out_channels) if problem.bias else None
        none = np.zeros(problem.out_channels)
        wanted = expected(problem, x, w, none if bias is None else bias)
    else:
        x = whole(problem.batch, problem.out_channels, *problem.out_size)
        spoil(x, nans, rng)
        wanted = expected_grad_input(problem, x, w)
    last = problem.channels_last
    y = sm90_on_cpu.run(library, record, x, w, bias, wanted.shape, MULTIPROCESSORS, seed, last)
    tolerance = 0 if problem.dtype == "float32" else 2**-8
    np.testing.assert_allclose(y, wanted, rtol=tolerance, atol=0)


def spoil(x: np.ndarray, channels: int, rng: np.random.Generator) -> None:
    planes = x.reshape(x.shape[0] * x.shape[1], -1)
    planes[rng.choice(len(planes), channels, replace=False)[:, None], [0, -1]] = np.nan


def measurements(name: str) -> list[tuple[Problem, dict[str, Any], list[tuple[Any, float]]]]:
    """Layers, what was measured, and their tilings with what they took, as far as the planner still
    has them."""
    measure = script("measure_pixels")
    lines = measure.read_rows(FOLDER / "results" / name)
    return [(measure.problem_of(line), line, measure.tilings_of(line)) for line in lines]


def picked(choices: list[tuple[Any, float]]) -> float:
    """What the tiling took that the planner would take."""
    assert choices, "the planner has none of the tilings that were measured"
    return min(choices, key=lambda choice: choice[0].microseconds(H200))[1]


def lost(choices: list[tuple[Any, float]]) -> float:
    """By how much longer that is than the fastest."""
    return picked(choices) / min(ms for _, ms in choices) - 1
