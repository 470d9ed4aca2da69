"""Fits the cost of the mma.sync gradients to measured divisions, and prints it.

    python benchmarks/fit_gather.py [RESULTS.jsonl [TRIALS]]

A line of the file is one division of one layer, with the microseconds that it took and PyTorch's.
The constants belong into upconv/planner/gather_wgrad.py and gather_igrad.py. The search is random:
a constant at a time, kept where the errors get smaller.
"""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from math import exp, log
from pathlib import Path
from typing import Any

from rows import read_rows

from upconv.planner import H200, Problem, gather_igrad, gather_wgrad

MEASURED = Path(__file__).resolve().parent / "results" / "h200-gather-2026-11-15.jsonl"
LIMITS = {
    gather_wgrad: {
        "ISSUE": (0.15, 0.95),
        "COPY": (2.0, 40.0),
        "ROW_COPY": (2.0, 80.0),
        "UNIT_INSTRUCTIONS": (20.0, 400.0),
        "ROW_INSTRUCTIONS": (5.0, 400.0),
        "UNIT_CYCLES": (100.0, 4000.0),
        "LONE_WARP": (0.5, 4.0),
        "STAGED_BYTES": (10.0, 64.0),
        "UNHIDDEN": (0.0, 0.9),
        "DRAM_SHARE": (0.4, 1.0),
        "LAUNCH_MICROSECONDS": (5.0, 15.0),
    },
    gather_igrad: {
        "ISSUE": (0.15, 0.95),
        "COPY": (2.0, 40.0),
        "ROW_COPY": (2.0, 80.0),
        "UNIT_INSTRUCTIONS": (20.0, 400.0),
        "SEGMENT_INSTRUCTIONS": (50.0, 800.0),
        "UNIT_CYCLES": (100.0, 4000.0),
        "SETUP_CYCLES": (500.0, 12000.0),
        "THIN": (0.1, 1.5),
        "STAGED_BYTES": (10.0, 64.0),
        "UNHIDDEN": (0.0, 0.9),
        "DRAM_SHARE": (0.4, 1.0),
        "LAUNCH_MICROSECONDS": (3.0, 12.0),
    },
}
Division = gather_wgrad.Division | gather_igrad.Division


def problem_of(row: dict[str, Any]) -> Problem:
    rest = {"dtype": row["dtype"], "direction": row["direction"], "tf32": True, "bias": False}
    return Problem.of(*row["layer"], **rest)


def rule_of(row: dict[str, Any]) -> Any:
    return gather_wgrad if row["direction"] == "grad_weight" else gather_igrad


SHAPES: dict[str, gather_wgrad.Shape] = {}


def shape(row: dict[str, Any]) -> gather_wgrad.Shape:
    key = json.dumps([row[name] for name in ("layer", "dtype", "by_input", "tile", "warps")])
    if key not in SHAPES:
        wanted = (bool(row["by_input"]), tuple(row["tile"]), tuple(row["warps"]))
        SHAPES[key] = next(
            found
            for found in gather_wgrad.shapes(problem_of(row))
            if (found.by_input, found.tile, found.warps) == wanted
        )
    return SHAPES[key]


def division(row: dict[str, Any]) -> Division:
    """The measured division; made anew each time, since it keeps what it has computed."""
    if row["direction"] == "grad_weight":
        places = (row["warps_k"], row["rows"], row["columns"])
        return gather_wgrad.Division(shape(row), *places, H200)
    places = (row["tile"], row["warps"], row["rows"], row["columns"], row["run"])
    return gather_igrad.Division(problem_of(row), *places, H200)


def error(row: dict[str, Any]) -> float:
    return log(division(row).microseconds / row["us"])


def spread(rows: list[dict[str, Any]]) -> float:
    """Standard deviation of the estimates; one that is far off counts no more than two-fold."""
    return float((sum(min(error(row) ** 2, 0.5) for row in rows) / len(rows)) ** 0.5)


def fitted(rule: Any, rows: list[dict[str, Any]], trials: int) -> float:
    choose = random.Random(0)
    best = spread(rows)
    for _ in range(trials):
        name = choose.choice(list(LIMITS[rule]))
        before = getattr(rule, name)
        low, high = LIMITS[rule][name]
        setattr(rule, name, min(max(before * exp(choose.gauss(0, 0.25)), low), high))
        tried = spread(rows)
        if tried < best:
            best = tried
        else:
            setattr(rule, name, before)
    return best


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else MEASURED
    trials = int(sys.argv[2]) if len(sys.argv) > 2 else 400
    rows = read_rows(path)
    for rule in LIMITS:
        some = [row for row in rows if rule_of(row) is rule]
        print(f"{rule.KERNEL}, {len(some)} runs: {spread(some):.1%} as it is")
        print(f"{fitted(rule, some, trials):.1%} with")
        for name in LIMITS[rule]:
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
