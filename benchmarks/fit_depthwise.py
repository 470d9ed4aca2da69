"""Fits the cost of the gradients of depthwise layers to measured divisions, and prints it.

    python benchmarks/fit_depthwise.py RESULTS.jsonl [TRIALS]

The file is what measure_depthwise.py writes. The constants belong into
upconv/planner/depthwise_igrad.py and depthwise_wgrad.py. The search is random: a constant at a
time, kept where the errors get smaller. Then, for each layer, what the rule picks of the measured
divisions, the fastest of them, and what the other kernels and PyTorch take.
"""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from math import exp, log
from statistics import fmean
from types import ModuleType
from typing import Any

from rows import read_rows

from upconv.planner import ATEN, H200, Problem, depthwise_igrad, depthwise_wgrad
from upconv.planner.cuda_aten import aten_microseconds, bias_microseconds
from upconv.planner.depthwise import Layer

PLANNERS = {"grad_input": depthwise_igrad, "grad_weight": depthwise_wgrad}
BOTH = {
    "LAUNCH_MICROSECONDS": (3.0, 9.0),
    "ISSUE": (0.2, 0.9),
    "MEMORY_BYTES": (2.0e6, 4.2e6),
    "CACHE_BYTES": (2.0e6, 9.0e6),
    "UNHIDDEN": (0.0, 0.9),
    "START_CYCLES": (500.0, 12000.0),
    "STEP_CYCLES": (20.0, 1500.0),
    "ARRIVAL_CYCLES": (100.0, 6000.0),
    "SINGLE_CYCLES": (100.0, 6000.0),
    "PIECE_CYCLES": (5.0, 1500.0),
    "START_INSTRUCTIONS": (100.0, 3000.0),
    "STEP_INSTRUCTIONS": (4.0, 100.0),
    "COPY_INSTRUCTIONS": (1.0, 30.0),
    "PIECE_INSTRUCTIONS": (0.5, 20.0),
    "WIDEN_INSTRUCTIONS": (0.3, 6.0),
}
LIMITS = {
    depthwise_igrad: {
        **BOTH,
        "GROUP_CYCLES": (50.0, 4000.0),
        "PIXEL_CYCLES": (10.0, 800.0),
        "GROUP_INSTRUCTIONS": (20.0, 400.0),
        "PIXEL_INSTRUCTIONS": (20.0, 160.0),
    },
    depthwise_wgrad: {
        **BOTH,
        "ADD_MICROSECONDS": (1.0, 6.0),
        "WORKSPACE_TERABYTES": (0.05, 4.0),
        "UNIT_CYCLES": (100.0, 8000.0),
        "PLACE_CYCLES": (20.0, 3000.0),
        "ROUND_CYCLES": (20.0, 2000.0),
        "UNIT_INSTRUCTIONS": (50.0, 1500.0),
        "PLACE_INSTRUCTIONS": (8.0, 80.0),
    },
}
FAR = 0.5
"""Squared error that an estimate far off counts as, at most."""
PICKED = 0.3
"""Weight of what is lost by what the rule picks, beside the squared errors."""


def problem_of(row: dict[str, Any]) -> Problem:
    values = row["problem"].items()
    return Problem(**{k: tuple(v) if isinstance(v, list) else v for k, v in values})


def division(problem: Problem, plan: dict[str, int]) -> Any:
    layer = Layer(problem)
    if problem.direction == "grad_input":
        return depthwise_igrad.Division(layer, plan["teams"], plan["tile"], plan["strip"], H200)
    names = ("block_channels", "teams", "lanes", "strip", "shares")
    return depthwise_wgrad.Division(layer, *(plan[name] for name in names), H200)


class Group:
    """A layer and direction: its measured divisions, and what others take."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.problem = problem_of(rows[0])
        self.rule = PLANNERS[self.problem.direction]
        ours = [row for row in rows if row["kernel"] == self.rule.KERNEL]
        self.ways = [(division(self.problem, row["plan"]), row["us"]) for row in ours]
        self.others = {row["kernel"]: row["us"] for row in rows if row not in ours}
        self.least = min((us for _, us in self.ways), default=0.0)

    def expected(self) -> list[float]:
        """By the constants as they are now; a division keeps what it has computed."""
        for way, _ in self.ways:
            for name in ("microseconds", "instructions"):
                way.__dict__.pop(name, None)
        return [way.microseconds for way, _ in self.ways]

    def picked(self) -> tuple[float, float]:
        """Measured and expected."""
        expected = self.expected()
        best = min(expected)
        return self.ways[expected.index(best)][1], best


def spread(groups: list[Group]) -> float:
    """Standard deviation of the estimates; what is far from the fastest counts less."""
    parts = [
        (min(log(guess / us) ** 2, FAR) * group.least / us, group.least / us)
        for group in groups
        for guess, (_, us) in zip(group.expected(), group.ways, strict=True)
    ]
    return float((sum(error for error, _ in parts) / sum(weight for _, weight in parts)) ** 0.5)


def lost(groups: list[Group]) -> list[float]:
    return [group.picked()[0] / group.least - 1 for group in groups]


def loss(groups: list[Group]) -> float:
    return spread(groups) ** 2 + PICKED * fmean(lost(groups))


def fit(rule: ModuleType, groups: list[Group], trials: int) -> None:
    print(f"{rule.KERNEL}, {sum(len(group.ways) for group in groups)} divisions:")
    print(f"{spread(groups):.1%} as it is, picked {fmean(lost(groups)):.1%} above the fastest")
    draw, best = random.Random(0), loss(groups)
    for trial in range(trials):
        name = draw.choice(list(LIMITS[rule]))
        before = getattr(rule, name)
        low, high = LIMITS[rule][name]
        width = 0.05 + 0.35 * (1 - trial / trials)
        setattr(rule, name, min(max(before * exp(draw.gauss(0, width)), low), high))
        tried = loss(groups)
        if tried < best:
            best = tried
        else:
            setattr(rule, name, before)
    for name in LIMITS[rule]:
        print(f"  {name} = {getattr(rule, name):.3g}")
    print(f"{spread(groups):.1%} with these, picked {fmean(lost(groups)):.1%} above the fastest")


def described(group: Group) -> str:
    problem, (took, expected) = group.problem, group.picked()
    size = "x".join(map(str, problem.in_size))
    least_other = min(group.others, key=lambda name: group.others[name])
    mark = "  *" if took > 1.1 * group.others[least_other] else ""
    theirs = aten_microseconds(problem)
    if problem.direction == "grad_weight":
        theirs += bias_microseconds(problem)
    chosen = "PyTorch expected" if theirs < expected else ""
    return (
        f"{problem.direction:11} {problem.dtype:8} {problem.batch:2} x {problem.in_channels:3},"
        f" {size:9} k{problem.kernel[-1]} s{problem.stride[-1]}: picks {took:6.1f}, expects"
        f" {expected:6.1f}, best {group.least:6.1f}; {least_other} {group.others[least_other]:.1f},"
        f" PyTorch {group.others[ATEN]:.1f} ({theirs:.1f} expected) {chosen}{mark}"
    )


def main() -> None:
    trials = int(sys.argv[2]) if len(sys.argv) > 2 else 1500
    found = defaultdict(list)
    for row in read_rows(sys.argv[1]):
        found[json.dumps(row["problem"])].append(row)
    groups = [group for group in map(Group, found.values()) if group.ways]
    for rule in LIMITS:
        its = [group for group in groups if group.rule is rule]
        if its:
            fit(rule, its, trials)
            print("\n".join(map(described, its)))


if __name__ == "__main__":
    main()
