"""Fits the cost of the gradients on the CUDA cores to measured divisions, and prints it.

    python benchmarks/fit_direct_grads.py [RESULTS.jsonl [TRIALS]]

A line of the file is one division of one layer, with the microseconds that it took and PyTorch's.
The constants belong into upconv/planner/direct_wgrad.py. The search is random: a constant at a
time, kept where the errors get smaller.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from math import exp, log
from pathlib import Path
from typing import Any

from rows import read_rows

from upconv.planner import Problem
from upconv.planner import direct_wgrad as rule

MEASURED = Path(__file__).resolve().parent / "results" / "h200-direct-gradients-2026-11-15.jsonl"
LIMITS = {
    "ISSUE": (0.3, 0.95),
    "NARROW_ISSUE": (0.2, 0.95),
    "COPY": (5.0, 16.0),
    "CHUNK_WAIT": (300.0, 6000.0),
    "STEP_WAIT": (100.0, 3000.0),
    "LONE_CYCLES": (1.0, 8.0),
    "CACHE_BYTES": (8.0, 40.0),
    "DRAM_BYTES": (6.0, 18.0),
    "UNHIDDEN": (0.05, 0.8),
    "UNIT_INSTRUCTIONS": (50.0, 800.0),
    "LAUNCH_MICROSECONDS": (5.0, 15.0),
}
MULTIPROCESSORS = 132


def division(row: dict[str, Any]) -> rule.Division:
    """The measured division; made anew each time, since it keeps what it has computed."""
    problem = Problem.of(*row["layer"], dtype=row["dtype"], bias=False, direction=row["direction"])
    way = (row["inputs"], row["columns"], row["segment"], row["shares"])
    return rule.Division(problem, *way, MULTIPROCESSORS)


def error(row: dict[str, Any]) -> float:
    return log(division(row).microseconds / row["us"])


def spread(rows: list[dict[str, Any]]) -> float:
    """Standard deviation of the estimates; one that is far off counts no more than two-fold."""
    return float((sum(min(error(row) ** 2, 0.5) for row in rows) / len(rows)) ** 0.5)


def fitted(rows: list[dict[str, Any]], trials: int) -> float:
    choose = random.Random(0)
    best = spread(rows)
    for _ in range(trials):
        name = choose.choice(list(LIMITS))
        before = getattr(rule, name)
        low, high = LIMITS[name]
        setattr(rule, name, min(max(before * exp(choose.gauss(0, 0.25)), low), high))
        tried = spread(rows)
        if tried < best:
            best = tried
        else:
            setattr(rule, name, before)
    return best


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else MEASURED
    trials = int(sys.argv[2]) if len(sys.argv) > 2 else 700
    rows = read_rows(path)
    print(f"{len(rows)} runs: {spread(rows):.1%} with the constants as they are")
    print(f"{fitted(rows, trials):.1%} with")
    for name in LIMITS:
        print(f"  {name} = {getattr(rule, name):.3g}")
    groups = defaultdict(list)
    for row in rows:
        groups[row["name"], row["dtype"], row["direction"]].append(row)
    for (name, dtype, direction), group in groups.items():
        picked = min(group, key=lambda row: division(row).microseconds)
        least = min(row["us"] for row in group)
        print(
            f"{name:14} {dtype:9} {direction:12} picks {picked['us']:5.0f} us, expects"
            f" {division(picked).microseconds:5.0f}, best {least:5.0f},"
            f" PyTorch {picked['torch']:5.0f}"
        )


if __name__ == "__main__":
    main()
