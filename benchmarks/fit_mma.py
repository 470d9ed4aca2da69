"""Fits the cost of the mma.sync kernel to measured tilings and prints it beside the planner's.

    python benchmarks/fit_mma.py [RESULTS.jsonl ...]

A line of a file is one tiling of one case: case, dtype, tf32, ms, how it was tiled, the number of
blocks, and the warps that share a multiprocessor. What a block has to do is what the planner counts
today. The constants belong into upconv/planner/mma_cost.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from rows import read_rows

from upconv.cases import CASES
from upconv.planner import H200, mma
from upconv.planner.mma_columns import layouts
from upconv.planner.mma_cost import CLOCK_MHZ, CYCLES, LONE_BLOCK, BlockWork, rounds, slower
from upconv.planner.mma_tiling import block_work, make_box, tables_fit, totals

NEAR = 1.6
"""Tilings that take more than so many times the best of their problem do not count: nobody is to
choose between them."""
RESULTS = Path(__file__).resolve().parent / "results"
MEASURED = (
    RESULTS / "h200-mma-tilings-2026-11-15.jsonl",
    RESULTS / "h200-mma-tilings-2026-11-19.jsonl.gz",
)
"""Of 64 pixels a warp, all cases; of 32 and 64, the cases that mostly wait."""


@dataclass(frozen=True)
class Measured:
    problem: tuple[Any, ...]
    """Of one file: machines differ."""
    ms: float
    blocks: int
    warps: int
    """Of a block."""
    resident_warps: int
    work: BlockWork

    @property
    def predictors(self) -> list[float]:
        """Milliseconds of the whole problem for each unit of the constants."""
        scale = rounds(self.blocks, H200) / CLOCK_MHZ / 1e3
        if self.resident_warps == self.warps:
            scale *= LONE_BLOCK
        return [
            scale * getattr(self.work, name) * slower(STAGE[name], self.resident_warps)
            for name in CYCLES
        ]

    @property
    def expected(self) -> float:
        """Milliseconds by the planner's constants, without those that each problem takes once."""
        return sum(
            each * cycles for each, cycles in zip(self.predictors, CYCLES.values(), strict=True)
        )


def stages() -> dict[str, str]:
    """The stage (of `BlockWork.terms`) that each field of the work counts for."""
    result = {}
    for name in CYCLES:
        alone = BlockWork(**{field.name: float(field.name == name) for field in fields(BlockWork)})
        (result[name],) = (stage for stage, cycles in alone.terms.items() if cycles)
    return result


STAGE = stages()


def direction_of(row: dict[str, Any]) -> str:
    return str(row.get("direction", "forward"))  # the first file has this one alone


def work_of(row: dict[str, Any]) -> BlockWork:
    """What a block of a measured tiling has to do."""
    case = next(case for case in CASES if case.name == row["case"])
    problem = case.problem(dtype=row["dtype"], tf32=row["tf32"])
    problem = replace(problem, direction=direction_of(row))
    warps_m, warps_n = row["warps"]
    pixels = row.get("warp_pixels", 64)  # the first file has these alone
    for work in mma.works(problem):
        for layout in filter(tables_fit, layouts(work)):
            shape = (work.lattices[2].in_step, layout.warps_n, layout.chunk)
            if shape == (row["fold"], warps_n, row["chunk"]):
                box = make_box(work, tuple(row["tile"]))
                total = totals(work, layout, row["slice_blocks"], row["stage_bytes"])
                warps = (pixels, warps_m)
                return block_work(work, layout, box, warps, row["slice_blocks"], total)
    raise ValueError(f"the planner has no such tiling any more: {row}")


def read(*paths: Path) -> list[Measured]:
    """All tilings, the slow ones too."""
    return [
        Measured(
            (path.name, row["case"], row["dtype"], row["tf32"], direction_of(row)),
            row["ms"],
            row["blocks"],
            row["warps"][0] * row["warps"][1],
            row["resident_warps"],
            work_of(row),
        )
        for path in paths
        for row in read_rows(path)
    ]


def by_problem(every: Iterable[Measured]) -> dict[tuple[Any, ...], list[Measured]]:
    result: dict[tuple[Any, ...], list[Measured]] = {}
    for each in every:
        result.setdefault(each.problem, []).append(each)
    return result


def near(every: list[Measured]) -> list[Measured]:
    best = {key: min(each.ms for each in of) for key, of in by_problem(every).items()}
    return [each for each in every if each.ms <= NEAR * best[each.problem]]


def fitted(every: list[Measured]) -> tuple[dict[str, float], float]:
    """The constants, and the standard deviation of predicted over measured."""
    measured = np.array([each.ms for each in every])
    relative = np.array([each.predictors for each in every]) / measured[:, None]
    # Relative errors count, and no stage gives time back: coordinate descent with a floor.
    products, target = relative.T @ relative, relative.sum(axis=0)
    x = np.zeros(len(CYCLES))
    for _ in range(3000):
        for j in range(len(x)):
            x[j] = max(0.0, x[j] + (target[j] - products[j] @ x) / products[j, j])
    spread = float(np.std(np.log(relative @ x)))
    return dict(zip(CYCLES, map(float, x), strict=True)), spread


def lost(every: list[Measured]) -> dict[tuple[Any, ...], float]:
    """By problem: how much longer the tiling takes that the rule picks than the best, as a part."""
    return {
        key: min(of, key=lambda each: each.expected).ms / min(each.ms for each in of) - 1
        for key, of in by_problem(every).items()
    }


if __name__ == "__main__":
    tilings = read(*map(Path, sys.argv[1:]) if sys.argv[1:] else MEASURED)
    constants, deviation = fitted(near(tilings))
    for name, value in constants.items():
        print(f"{name:12} {value:10.4g}   in the planner: {CYCLES[name]:.4g}")
    print(f"standard deviation {deviation:.1%}")
    for key, part in lost(tilings).items():
        print(f"{part:6.1%} lost:", *key)
    print(f"{np.mean(list(lost(tilings).values())):6.1%} lost on average")
