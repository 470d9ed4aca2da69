"""Fits the cost of the Hopper kernel to measured tilings and prints it beside the planner's.

    python benchmarks/fit_sm90.py [RESULTS.jsonl]

A line of the file is one tiling of one case: case, dt (dtype), cl (channels_last), ms, and the
tiling (n, blocks, alternate, images, h, w, px = pixels of the tile, sb = channel blocks of a slice,
folds, turn = slices of a turn, boxes = channel blocks of a TMA box and boxes in their ring, split
and sum_pairs where float32 was split into two TF32 numbers). The constants belong into
upconv/planner/sm90_cost.py.
"""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from upconv.cases import CASES
from upconv.planner import H200
from upconv.planner.sm90 import jobs
from upconv.planner.sm90_area import Area, Box, up
from upconv.planner.sm90_cost import CLOCK_MHZ, CYCLES, SPLIT_CYCLES, UnitWork
from upconv.planner.sm90_load import Load
from upconv.planner.sm90_task import forward_task, warp_shapes
from upconv.planner.sm90_tiling import tile_counts, unit_work

RESULTS = Path(__file__).resolve().parent / "results"
MEASURED = RESULTS / "h200-tilings-2026-11-15.jsonl"
SPLIT_MEASURED = RESULTS / "h200-split-tilings-2026-11-15.jsonl"
SLOW_STORES = ("kb77_3d", "kb79_1d", "kb81")
"""Cases with phases without taps, measured with stores that the kernel does not have any more."""
NEAR = 1.2
NAMES = [name for name in CYCLES if name != "unit"]


def work_of(row: dict[str, Any]) -> tuple[UnitWork, int]:
    """The work of one unit of a measured tiling, and how many units a multiprocessor did."""
    case = next(case for case in CASES if case.name == row["case"])
    split = row.get("split", False)
    problem = case.problem(dtype=row["dt"], channels_last=row["cl"], tf32=not split)
    known = warp_shapes(forward_task(problem))
    shape = next(shape for shape in known if shape.folds == row["folds"])
    job_list = jobs(shape, row["blocks"])
    assert job_list is not None
    elements = 16 // problem.element_bytes
    slices = -(-up(-(-problem.in_channels // elements), 2) // row["sb"])
    area = Area(row["images"], row["h"], row["w"], row["pitch"], 0, row["px"], 1, row["copy"], 0)
    load = Load.of(job_list, row["alternate"], row["sb"], split, row.get("sum_pairs", 0))
    units = prod(tile_counts(shape, area)) * load.groups
    form = (row["n"], row["blocks"], row["alternate"], row["sb"])
    rings = (row.get("rings", 1), row.get("resident", False))
    blocks, chunks = row.get("boxes", (1, 0))
    depth = (slices, row.get("turn", 1), *rings, Box(0, 0, blocks, 0, chunks))
    work = unit_work(shape, load, job_list[0], form, area, depth, units)
    return work, -(-units // H200.multiprocessors)


def fitted(rows: list[dict[str, Any]]) -> tuple[dict[str, float], float]:
    """The constants, and the standard deviation of predicted over measured."""
    works = [work_of(row) for row in rows]
    table = np.array([[getattr(work, name) for name in NAMES] + [1.0] for work, _ in works])
    measured = np.array(
        [row["ms"] * 1e3 * CLOCK_MHZ / units for row, (_, units) in zip(rows, works, strict=True)]
    )
    # Relative errors count, and no stage gives time back: projected gradient on scaled columns.
    relative = table / measured[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1  # a stage that no run has
    relative /= scale
    step = 1 / np.linalg.norm(relative, 2) ** 2
    solution = np.zeros(len(scale))
    for _ in range(40_000):
        gradient = relative.T @ (relative @ solution - 1)
        solution = np.maximum(0, solution - step * gradient)
    constants = solution / scale
    spread = float(np.std(table @ constants / measured))
    return dict(zip([*NAMES, "unit"], map(float, constants), strict=True)), spread


def read(path: Path) -> list[dict[str, Any]]:
    """The measured tilings that count: those near the best one of their problem. What is far from
    it is never chosen, and must not bend the rule."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row for row in rows if row["case"] not in SLOW_STORES]
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        key = row["case"], row["dt"]
        best[key] = min(row["ms"], best.get(key, row["ms"]))
    return [row for row in rows if row["ms"] <= NEAR * best[row["case"], row["dt"]]]


def main(arguments: list[str]) -> int:
    paths = [Path(argument) for argument in arguments] or [MEASURED, SPLIT_MEASURED]
    for path in paths:
        rows = read(path)
        constants, spread = fitted(rows)
        known = SPLIT_CYCLES if rows[0].get("split") else CYCLES
        print(path.name)
        for name, value in constants.items():
            print(f"  {name:10} {value:12.4f}   in the planner {known[name]:12.4f}")
        print(f"  standard deviation {spread:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
