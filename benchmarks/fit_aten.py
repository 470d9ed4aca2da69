"""Fits the time of PyTorch's own operator on a GPU to measured calls, and prints the table.

    python benchmarks/fit_aten.py [RESULTS.jsonl.gz]

A line of the file is one call: which it is ("forward", "channels_last", "grad_input" or
"grad_weight"), dtype, whether TF32 was allowed, the layer, and the microseconds that it took, with
cudnn.benchmark where that was faster. The table belongs into upconv/planner/cuda_aten.py.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rows import read_rows

from upconv.planner import Problem, cuda_aten

MEASURED = Path(__file__).resolve().parent / "results" / "h200-aten-2026-11-16.jsonl.gz"
LEAST, MOST = np.array([0.05, 0.05, 2.0]), np.array([100.0, 40.0, 60.0])
"""Bounds of the three numbers of a row."""
STARTS = ((1.5, 2.0, 10.0), (3.0, 3.0, 30.0), (1.0, 5.0, 20.0), (8.0, 1.0, 10.0))
FEWEST, SURE = 3, 8
"""Calls that a row of the table needs, and those from which on it is the median; with fewer it is
below all of them."""


@dataclass(frozen=True)
class Measured:
    problem: Problem
    microseconds: float


def read(path: Path) -> list[Measured]:
    return [Measured(problem_of(row), row["us"]) for row in read_rows(path)]


def problem_of(row: dict[str, Any]) -> Problem:
    call = row["call"]
    forward = call in ("forward", "channels_last")
    return Problem.of(
        **row["layer"],
        dtype=row["dtype"],
        tf32=row["tf32"],
        direction="forward" if forward else call,
        bias=forward,
        channels_last=call == "channels_last",
    )


def fitted(calls: list[Measured]) -> tuple[np.ndarray, float]:
    """The row with the least mean distance of logarithms, and that distance: by steps along one
    number at a time, smaller and smaller ones. The median, so that single calls which PyTorch
    serves by a far slower kernel do not count for more than others."""
    work = np.array([(*cuda_aten.least(call.problem), 1.0) for call in calls])
    measured = np.log([call.microseconds for call in calls])

    def distance(logs: np.ndarray) -> float:
        return float(np.abs(np.log(work @ np.exp(logs)) - measured).mean())

    best = min((descend(distance, np.log(start)) for start in STARTS), key=distance)
    row = np.exp(best)
    if len(calls) < SURE:
        row *= np.exp(np.min(measured - np.log(work @ row)))
    return row, distance(best)


def descend(distance: Callable[[np.ndarray], float], at: np.ndarray) -> np.ndarray:
    step, low = 1.0, distance(at)
    while step > 0.01:
        moved = False
        for i in range(len(at)):
            for sign in (step, -step):
                tried = at.copy()
                tried[i] += sign
                tried = np.clip(tried, np.log(LEAST), np.log(MOST))
                if distance(tried) < low - 1e-9:
                    at, low, moved = tried, distance(tried), True
        if not moved:
            step /= 2
    return at


def grouped(path: Path = MEASURED) -> dict[tuple[str, str], list[Measured]]:
    """The calls of each row of the table."""
    rows: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    for call in read(path):
        rows[cuda_aten.call_of(call.problem), cuda_aten.kind_of(call.problem)].append(call)
    return rows


def main(path: Path) -> None:
    for (call, kind), calls in sorted(grouped(path).items()):
        if len(calls) < FEWEST:
            print(f"{call:24} {kind:20} {len(calls):4} calls: too few")
            continue
        (arithmetic, traffic, fixed), distance = fitted(calls)
        print(
            f'{call:24} "{kind}": Call({arithmetic:.3g}, {traffic:.3g}, {fixed:.3g}),'
            f"  # {len(calls)} calls, {distance:.2f}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else MEASURED)
