"""Fits the cost of the Hopper kernel to measured tilings and prints it beside the planner's.

    python benchmarks/fit_sm90.py

A line of TILINGS, as `benchmarks/measure_sm90.py` writes them, is one problem: layer (batch,
channels, size, kernel, stride, padding, output padding, groups, dilation), dtype, direction,
channels_last, and rows, one for each tiling: ms, how many units a multiprocessor did, the cycles
that the memory needs for a unit and for what is filled besides, and the work of a unit (`names`,
fields of `UnitWork`). `tilings` tells which tilings they were, by what `identity` names.

What the planner needs is not the time but the fastest tiling. So the constants are those with which
the tiling picked, softly (each counts by a power of its expected time), is fastest on average, and
the times are right as far as that costs little. A line of SPLIT_TILINGS is one tiling of one case;
split float32 has few tilings, which differ by their work alone: least squares.

The constants belong into upconv/planner/sm90_cost.py.
"""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import dataclass
from math import log, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from upconv.cases import CASES, select
from upconv.planner import H200
from upconv.planner.sm90 import jobs
from upconv.planner.sm90_area import Area, Box, up
from upconv.planner.sm90_cost import CLOCK_MHZ, COLUMNS, CYCLES, UnitWork
from upconv.planner.sm90_load import Load
from upconv.planner.sm90_task import forward_task, warp_shapes
from upconv.planner.sm90_tiling import tile_counts, unit_work

RESULTS = Path(__file__).resolve().parent / "results"
TILINGS = RESULTS / "h200-sm90-tilings-2026-11-15.jsonl.gz"
SPLIT_TILINGS = RESULTS / "h200-split-tilings-2026-11-15.jsonl"
SPLIT_NAMES = ("operands", "placed", "slices", "boxes", "turns", "stored", "segments", "weights")
SPLIT_NEAR, SLOW_STORES = 1.2, ("kb77_3d", "kb79_1d", "kb81")
"""Of those: cases with phases without taps, measured with stores that are no more."""
NEAR = 1.4
"""Times of tilings that take longer than so many times the fastest are not fitted."""
LONG, SHORT_WEIGHT = 0.05, 0.3
"""Milliseconds below which a problem counts less: there the measurement is no better than 5 %."""
FIRST, FIRST_WEIGHT = ("kb57", "kb65", "kb69"), 3.0
"""The cases that this project began from, which count more."""
STEPS, RATE, POWER, TIMES_WEIGHT = 2500, 0.03, 40.0, 0.7


@dataclass
class Runs:
    """The measured tilings of one column of constants."""

    work: torch.Tensor
    """Of all units of a multiprocessor, a column for each name, and one for the units."""
    memory: torch.Tensor
    filled: torch.Tensor
    cycles: torch.Tensor
    """As measured."""
    problem: torch.Tensor
    """Its number."""
    slower: torch.Tensor
    """Logarithm: than the fastest tiling of the problem."""
    weight: torch.Tensor
    """Of each problem."""

    def expected(self, constants: torch.Tensor) -> torch.Tensor:
        """Cycles, by constants for each column of the work and the start."""
        return torch.maximum(self.work @ constants[:-1], self.memory) + self.filled + constants[-1]

    def picked(self, constants: torch.Tensor) -> torch.Tensor:
        """How much slower than the fastest tiling of each problem the one expected to be is."""
        expected = self.expected(constants)
        least = torch.full_like(self.weight, torch.inf)
        least = least.scatter_reduce(0, self.problem, expected, "amin")
        slower = torch.full_like(self.weight, torch.inf)
        chosen = torch.where(expected <= least[self.problem], self.slower, torch.inf)
        return slower.scatter_reduce(0, self.problem, chosen, "amin")


def column_of(problem: dict[str, Any]) -> int:
    return (problem["dtype"] != "float32") + 2 * problem["channels_last"]


def problems_of(path: Path = TILINGS) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def read(column: int, path: Path = TILINGS) -> tuple[list[str], Runs]:
    """The names of what counts in a column, and its runs."""
    problems = [problem for problem in problems_of(path) if column_of(problem) == column]
    names: list[str] = problems[0]["names"]
    rows = np.array([row for problem in problems for row in problem["rows"]])
    number = np.repeat(np.arange(len(problems)), [len(problem["rows"]) for problem in problems])
    milliseconds, waves = rows[:, 0], rows[:, 1]
    fastest = np.full(len(problems), np.inf)
    np.minimum.at(fastest, number, milliseconds)
    weight = np.where(fastest < LONG, SHORT_WEIGHT, 1.0)
    first = [[c.batch, c.in_channels, c.out_channels, [*c.in_size]] for c in select(FIRST)]
    weight *= [FIRST_WEIGHT if p["layer"][:4] in first else 1.0 for p in problems]
    used = [name for name in names if CYCLES[name][column] and rows[:, 4 + names.index(name)].any()]
    work = np.stack([rows[:, 4 + names.index(name)] for name in used] + [np.ones(len(rows))], 1)
    runs = Runs(
        *(torch.tensor(each) for each in (work * waves[:, None], rows[:, 2] * waves, rows[:, 3])),
        torch.tensor(milliseconds * 1e3 * CLOCK_MHZ),
        torch.tensor(number),
        torch.tensor(np.log(milliseconds / fastest[number])),
        torch.tensor(weight),
    )
    return [*used, "unit", "start"], runs


def loss(runs: Runs, constants: torch.Tensor) -> torch.Tensor:
    expected, problem, total = runs.expected(constants), runs.problem, runs.weight.sum()
    power = -POWER * expected.log()
    most = torch.full_like(runs.weight, -torch.inf).scatter_reduce(0, problem, power, "amax")
    share = (power - most[problem]).exp()
    sums = torch.zeros_like(runs.weight).index_add(0, problem, share)
    picked = (share / sums[problem] * runs.slower * runs.weight[problem]).sum() / total
    near = (runs.slower < log(NEAR)).double()
    count = torch.zeros_like(runs.weight).index_add(0, problem, near)
    errors = (expected / runs.cycles).log().square() * near / count[problem]
    return picked + TIMES_WEIGHT * (errors * runs.weight[problem]).sum() / total


def known(names: list[str], column: int) -> torch.Tensor:
    return torch.tensor([CYCLES[name][column] for name in names], dtype=torch.float64)


def fitted(column: int, steps: int = STEPS) -> tuple[list[str], torch.Tensor, Runs]:
    """From the planner's constants on."""
    names, runs = read(column)
    logarithms = known(names, column).clamp_min(1e-6).log().requires_grad_()
    optimizer = torch.optim.Adam([logarithms], lr=RATE)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - step / steps) + RATE / 30
        optimizer.zero_grad()
        loss(runs, logarithms.exp()).backward()
        optimizer.step()
    return names, logarithms.detach().exp(), runs


def split_work(row: dict[str, Any]) -> tuple[UnitWork, int]:
    """The work of one unit of a measured tiling, and how many units a multiprocessor did."""
    case = next(case for case in CASES if case.name == row["case"])
    problem = case.problem(dtype=row["dt"], channels_last=row["cl"], tf32=False)
    shape = next(s for s in warp_shapes(forward_task(problem)) if s.folds == row["folds"])
    job_list = jobs(shape, row["blocks"])
    assert job_list is not None
    slices = -(-up(-(-problem.in_channels // 4), 2) // row["sb"])
    area = Area(row["images"], row["h"], row["w"], row["pitch"], 0, row["px"], 1, row["copy"], 0)
    load = Load.of(job_list, row["alternate"], row["sb"], True, row["sum_pairs"])
    units = prod(tile_counts(shape, area)) * load.groups
    form = (row["n"], row["blocks"], row["alternate"], row["sb"])
    blocks, chunks = row.get("boxes", (1, 0))
    depth = (slices, row.get("turn", 1), 1, False, False, Box(0, 0, blocks, 0, chunks))
    work = unit_work(shape, load, job_list[0], form, area, depth, units)
    return work, -(-units // H200.multiprocessors)


def split_fitted() -> tuple[dict[str, float], float]:
    """The constants of split float32, and the standard deviation of expected over measured."""
    rows = [json.loads(line) for line in SPLIT_TILINGS.read_text().splitlines()]
    rows = [row for row in rows if row["case"] not in SLOW_STORES]
    best: dict[str, float] = {}
    for row in rows:
        best[row["case"]] = min(row["ms"], best.get(row["case"], row["ms"]))
    rows = [row for row in rows if row["ms"] <= SPLIT_NEAR * best[row["case"]]]
    works = [split_work(row) for row in rows]
    table = np.array([[getattr(work, name) for name in SPLIT_NAMES] + [1.0] for work, _ in works])
    units = np.array([units for _, units in works])
    measured = np.array([row["ms"] for row in rows]) * 1e3 * CLOCK_MHZ / units
    # Relative errors count, and no stage gives time back: projected gradient on scaled columns.
    relative = table / measured[:, None]
    scale = np.linalg.norm(relative, axis=0)
    relative /= scale
    step = 1 / np.linalg.norm(relative, 2) ** 2
    solution = np.zeros(len(scale))
    for _ in range(40_000):
        solution = np.maximum(0, solution - step * (relative.T @ (relative @ solution - 1)))
    constants = dict(zip([*SPLIT_NAMES, "unit"], map(float, solution / scale), strict=True))
    return constants, float(np.std(table @ (solution / scale) / measured))


def main() -> int:
    for column, title in enumerate(COLUMNS[:-1]):
        names, constants, runs = fitted(column)
        print(title)
        for name, value, old in zip(names, constants, known(names, column), strict=True):
            print(f"  {name:14} {value:12.4g}   in the planner {old:12.4g}")
        slower = runs.picked(constants).mean().exp()
        print(f"  what is picked is {slower - 1:.1%} slower than the fastest")
    constants, spread = split_fitted()
    print(COLUMNS[-1])
    for name, value in constants.items():
        print(f"  {name:14} {value:12.4g}   in the planner {CYCLES[name][-1]:12.4g}")
    print(f"  standard deviation {spread:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
