"""Fits the cost of the mma.sync kernel to measured tilings and prints it beside the planner's.

    python benchmarks/fit_mma.py [RESULTS.jsonl]

A line of the file is one tiling of one case: case, dtype, tf32, ms, how it was tiled, the number of
blocks, the warps that share a multiprocessor, and the work of one block as the planner counts it.
The constants belong into upconv/planner/mma_cost.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from rows import read_rows

from upconv.planner import H200
from upconv.planner.mma_cost import CLOCK_MHZ, CYCLES, FULL_WARPS, IDLE_POWER, LONE_BLOCK, rounds

NEAR = 1.6
"""Tilings that take more than so many times the best of their problem do not count: nobody is to
choose between them."""
MEASURED = Path(__file__).resolve().parent / "results" / "h200-mma-tilings-2026-11-15.jsonl"
STORES = ("stored", "runs")


def row_of(row: dict[str, Any]) -> list[float]:
    """Milliseconds of a whole problem for each unit of the constants."""
    idle = (FULL_WARPS / row["resident_warps"]) ** IDLE_POWER
    scale = rounds(row["blocks"], H200) / CLOCK_MHZ / 1e3
    if row["resident_warps"] == row["warps"][0] * row["warps"][1]:
        scale *= LONE_BLOCK
    return [scale * row["work"][name] * (1.0 if name in STORES else idle) for name in CYCLES]


def fitted(rows: list[dict[str, Any]]) -> tuple[dict[str, float], float]:
    """The constants, and the standard deviation of predicted over measured."""
    measured = np.array([row["ms"] for row in rows])
    relative = np.array([row_of(row) for row in rows]) / measured[:, None]
    # Relative errors count, and no stage gives time back: coordinate descent with a floor.
    products, target = relative.T @ relative, relative.sum(axis=0)
    x = np.zeros(len(CYCLES))
    for _ in range(3000):
        for j in range(len(x)):
            x[j] = max(0.0, x[j] + (target[j] - products[j] @ x) / products[j, j])
    spread = float(np.std(np.log(relative @ x)))
    return dict(zip(CYCLES, map(float, x), strict=True)), spread


def read(path: Path) -> list[dict[str, Any]]:
    rows = read_rows(path)
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        best[problem_of(row)] = min(best.get(problem_of(row), row["ms"]), row["ms"])
    return [row for row in rows if row["ms"] <= NEAR * best[problem_of(row)]]


def problem_of(row: dict[str, Any]) -> tuple[Any, ...]:
    direction = row.get("direction", "forward")  # the first file has this one alone
    return (row["case"], row["dtype"], row["tf32"], direction)


if __name__ == "__main__":
    constants, deviation = fitted(read(Path(sys.argv[1]) if len(sys.argv) > 1 else MEASURED))
    for name, value in constants.items():
        print(f"{name:12} {value:10.4g}   in the planner: {CYCLES[name]:.4g}")
    print(f"standard deviation {deviation:.1%}")
