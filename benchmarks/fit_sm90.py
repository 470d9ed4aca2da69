"""Fits the cost of the Hopper kernel to measured tilings and prints it beside the planner's.

    python benchmarks/fit_sm90.py

A line of TILINGS, as `benchmarks/measure_sm90.py` writes them, is one problem: layer (batch,
channels, size, kernel, stride, padding, output padding, groups, dilation), dtype, direction,
channels_last, and rows, one for each tiling: ms, how many units a multiprocessor did, the cycles
that the memory needs for a unit and for what is filled besides, and the work of a unit (`names`,
fields of `UnitWork`). `tilings` tells which tilings they were, by what `identity` names.

What the planner needs is not the time but the fastest tiling. So the constants are those with which
the tiling picked is fastest on average, and the times are right as far as that costs little. Which
is picked jumps from one to another, so that they are found by random walks; it takes two minutes.
SPLIT_TILINGS has float32 that is not rounded, STRIPS tilings whose rows lie in strips beside some
that do not, and what was picked for 169 input gradients in float32 that is not rounded; DRAWN
layers that nobody chose, 14 tilings of each, which nothing is fitted to.

The constants belong into upconv/planner/sm90_cost.py.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import read_rows

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
STEPS, WALKS, FAR, CLOSE, HEAT, STAY = 16_000, 12, 0.15, 0.05, 8e-4, 3e-3
"""Of the random walks: how many and how long, standard deviation of a change to a logarithm in the
first and in the second half, what may be lost by one at first, and what keeps constants where they
are that hardly any run has to do with."""
TIMES_WEIGHT = 0.35


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
    found = [problem for each in paths for problem in read_rows(each)]
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


def loss(runs: Runs, constants: torch.Tensor) -> float:
    """How much slower what is picked is, and how wrong the times of near tilings are."""
    expected, problem, total = runs.expected(constants), runs.problem, runs.weight.sum()
    near = (runs.slower < log(NEAR)).double()
    count = torch.zeros_like(runs.weight).index_add(0, problem, near)
    errors = (expected / runs.cycles).log().square() * near / count[problem]
    wrong = (errors * runs.weight[problem]).sum() / total
    return float((runs.picked(constants) * runs.weight).sum() / total + TIMES_WEIGHT * wrong)


def known(names: list[str], column: int) -> torch.Tensor:
    return torch.tensor([CYCLES[name][column] for name in names], dtype=torch.float64)


def annealed(runs: Runs, start: torch.Tensor, steps: int, seed: int) -> torch.Tensor:
    """The best constants on a random walk from `start` on: one to three of them change a little,
    and what is worse is taken now and then, ever more rarely."""
    rng = random.Random(seed)
    at = best = first = start.log()
    now = low = loss(runs, start)
    counted = [i for i in range(len(start) - 1) if runs.work[:, i].any()] + [len(start) - 1]
    for step in range(steps):
        cool = 1 - step / steps
        tried = at.clone()
        for _ in range(rng.choice((1, 1, 2, 3))):
            tried[rng.choice(counted)] += rng.gauss(0, FAR if cool > 0.5 else CLOSE)
        found = loss(runs, tried.exp()) + STAY * float((tried - first).square().mean())
        if found < now or rng.random() < exp(max((now - found) / (HEAT * cool**2), -50.0)):
            at, now = tried, found
        if found < low:
            best, low = tried, found
    return best.exp()


def fitted(
    column: int, steps: int = STEPS, walks: int = WALKS
) -> tuple[list[str], torch.Tensor, Runs]:
    """From the planner's constants on."""
    names, runs = read(column)
    start = known(names, column).clamp_min(1e-6)
    found = [annealed(runs, start, steps, seed) for seed in range(walks)]
    return names, min(found, key=lambda constants: loss(runs, constants)), runs


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
