"""Fits the cost of the Hopper kernel to measured tilings and prints it beside the planner's.

    python benchmarks/fit_sm90.py

A line of TILINGS, as `benchmarks/measure_sm90.py` writes them, is one problem: layer (batch,
channels, size, kernel, stride, padding, output padding, groups, dilation), dtype, direction,
channels_last, and rows, one for each tiling: ms, how many units a multiprocessor did, the cycles
that the memory needs for a unit and for what is filled besides, and the work of a unit (`names`,
fields of `UnitWork`). `tilings` tells which tilings they were, by what `identity` names.

What the planner needs is not the time but the fastest tiling. So the constants are those with which
the tiling picked, softly (each counts by a power of its expected time), is fastest on average, and
the times are right as far as that costs little. SPLIT_TILINGS has float32 that is not rounded,
STRIPS tilings whose rows lie in strips beside some that do not, DRAWN layers that nobody chose, 14
tilings of each, which nothing is fitted to.

The constants belong into upconv/planner/sm90_cost.py.
"""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import torch

from upconv.cases import select
from upconv.planner.sm90_cost import CLOCK_MHZ, COLUMNS, CYCLES

RESULTS = Path(__file__).resolve().parent / "results"
TILINGS = RESULTS / "h200-sm90-tilings-2026-11-15.jsonl.gz"
DRAWN = [RESULTS / f"h200-sm90-{name}-2026-11-16.jsonl.gz" for name in ("drawn", "strips-drawn")]
SPLIT_TILINGS = RESULTS / "h200-sm90-split-2026-11-16.jsonl.gz"
STRIPS = RESULTS / "h200-sm90-strips-2026-11-16.jsonl.gz"
SPLIT = len(COLUMNS) - 1
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
    if problem.get("split"):
        return SPLIT
    return (problem["dtype"] != "float32") + 2 * problem["channels_last"]


def problems_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def rows_of(problem: dict[str, Any], names: list[str]) -> list[list[float]]:
    """The rows of a problem with the work that `names` names: 0 for what was not known then."""
    given: list[str] = problem["names"]
    return [
        [*row[:4], *(row[4 + given.index(name)] if name in given else 0.0 for name in names)]
        for row in problem["rows"]
    ]


def read(column: int, paths: list[Path] | None = None) -> tuple[list[str], Runs]:
    """The names of what counts in a column, and its runs."""
    paths = paths or [SPLIT_TILINGS if column == SPLIT else TILINGS, STRIPS]
    found = [problem for each in paths for problem in problems_of(each)]
    problems = [problem for problem in found if column_of(problem) == column]
    names = [name for name in CYCLES if name not in ("unit", "start")]
    rows = np.array([row for problem in problems for row in rows_of(problem, names)])
    number = np.repeat(np.arange(len(problems)), [len(problem["rows"]) for problem in problems])
    milliseconds, waves = rows[:, 0], rows[:, 1]
    fastest = np.full(len(problems), np.inf)
    np.minimum.at(fastest, number, milliseconds)
    weight = np.where(fastest < LONG, SHORT_WEIGHT, 1.0)
    first = [[c.batch, c.in_channels, c.out_channels, [*c.in_size]] for c in select(FIRST)]
    weight *= [FIRST_WEIGHT if p["layer"][:4] in first else 1.0 for p in problems]
    used = [name for name in names if CYCLES[name][column]]
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


def main() -> int:
    for column, title in enumerate(COLUMNS):
        names, constants, runs = fitted(column)
        print(title)
        for name, value, old in zip(names, constants, known(names, column), strict=True):
            print(f"  {name:14} {value:12.4g}   in the planner {old:12.4g}")
        slower = runs.picked(constants).mean().exp()
        print(f"  what is picked is {slower - 1:.1%} slower than the fastest")
        if column != SPLIT:
            slower = read(column, DRAWN)[1].picked(constants).mean().exp()
            print(f"  and {slower - 1:.1%} on drawn layers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
