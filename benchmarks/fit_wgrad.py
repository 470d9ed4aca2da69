"""Fits the cost of the weight's gradient on Hopper to measured plans, and prints it.

    python benchmarks/fit_wgrad.py [RESULTS.jsonl]

A line of the file is one plan of one case: the form (consumers, n, groups, run, pairs), the chunk
(segment to lag), how many chunks a block went through, and three times in milliseconds: the whole
kernel, without its copies, and without its products. The constants belong into
upconv/planner/sm90_wgrad_cost.py.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from upconv.cases import CASES
from upconv.planner.sm90_cost import CLOCK_MHZ
from upconv.planner.sm90_wgrad import Chunk, chunk_work, flat, jobs_of
from upconv.planner.sm90_wgrad_cost import CONSUMER_CYCLES, PRODUCER_CYCLES, ChunkWork
from upconv.planner.sm90_wgrad_jobs import Form

MEASURED = Path(__file__).resolve().parent / "results" / "h200-wgrad-2026-11-15.jsonl"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def work_of(row: dict[str, Any]) -> list[ChunkWork]:
    """The work of one chunk, for every job of a measured plan."""
    case = next(case for case in CASES if case.name == row["case"])
    problem = flat(case.problem(dtype=row["dtype"], tf32=True))
    form = Form(*(row[field.name] for field in fields(Form)))
    chunk = Chunk(*(row[field.name] for field in fields(Chunk)))
    return [chunk_work(problem, form, job, chunk) for job in jobs_of(problem, form)]


def solve(table: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Relative least squares."""
    relative = table / measured[:, None]
    return np.linalg.lstsq(relative, np.ones(len(measured)), rcond=None)[0]


def fitted(rows: list[dict[str, Any]]) -> tuple[dict[str, float], dict[str, float], float]:
    """Constants of producers and consumers, and the spread of predicted over measured wholes.

    Plans that copy element by element are left out: the latency of memory hides all else.
    """
    works = [(row, work_of(row)) for row in rows]
    works = [(row, work) for row, work in works if not any(each.waits for each in work)]
    constants = []
    for known, column in (
        (PRODUCER_CYCLES, "without_products"),
        (CONSUMER_CYCLES, "without_copies"),
    ):
        names = [name for name in known if name != "chunk"]
        table = [
            [np.mean([getattr(each, name) for each in work]) for name in names] + [1.0]
            for _, work in works
        ]
        measured = [row[column] * 1e3 * CLOCK_MHZ / row["chunks"] for row, _ in works]
        solution = solve(np.array(table), np.array(measured))
        constants.append(dict(zip([*names, "chunk"], map(float, solution), strict=True)))
    ratios = [
        np.mean([each.cycles for each in work]) * row["chunks"] / (row["ms"] * 1e3 * CLOCK_MHZ)
        for row, work in works
    ]
    return constants[0], constants[1], float(np.std(ratios))


if __name__ == "__main__":
    rows = read(Path(sys.argv[1]) if len(sys.argv) > 1 else MEASURED)
    producers, consumers, spread = fitted(rows)
    for title, found, known in (
        ("producers", producers, PRODUCER_CYCLES),
        ("consumers", consumers, CONSUMER_CYCLES),
    ):
        print(title, {name: (round(value, 4), known[name]) for name, value in found.items()})
    print(
        f"standard deviation of predicted over measured, with the planner's constants: {spread:.3f}"
    )
