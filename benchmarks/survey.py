"""Do the planner's choices hold on layers that nobody tuned for? Draws layers and measures them.

    python benchmarks/survey.py [--layers 40] [--seed 0] [--dtype tf32] [-o RESULTS.jsonl]

Each layer is drawn from families that networks use (stem, U-Net, GAN, segmentation head, vocoder,
volume), at a size that takes a GPU some tens of microseconds to a few milliseconds. The planner's
choice is timed beside PyTorch's default, then every kernel that it did not choose, forced. A line
for each pass that lost more than 5 % to one of these is printed; the file has all of them.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from upconv import accuracy, floor, gradients, ops
from upconv.bench import Settings, problem_of
from upconv.cases import CASES, Case
from upconv.contenders import contender
from upconv.explain import this_hardware
from upconv.planner import Plan, Problem, make_plan
from upconv.planner.plan import KERNELS, SERVED
from upconv.stopwatch import timed

LOST = 1.05
FAMILIES = (
    # dimensions, kernel, stride, padding, output padding, dilation
    (2, 2, 2, 0, 0, 1),  # U-Net
    (2, 3, 2, 1, 1, 1),  # ResNet decoders
    (2, 4, 2, 1, 0, 1),  # GAN generators, pose heads
    (2, 5, 2, 2, 1, 1),  # autoencoders
    (2, 3, 1, 1, 0, 1),
    (2, 3, 1, 0, 0, 1),
    (2, 7, 1, 3, 0, 1),
    (2, 3, 1, 2, 0, 2),
    (2, 4, 4, 0, 0, 1),  # patch decoders
    (2, 8, 4, 2, 0, 1),
    (2, 1, 1, 0, 0, 1),
    (1, 4, 2, 1, 0, 1),  # vocoders
    (1, 16, 8, 4, 0, 1),
    (1, 7, 1, 3, 0, 1),
    (3, 2, 2, 0, 0, 1),  # volumes
    (3, 3, 1, 1, 0, 1),
    (3, 4, 2, 1, 0, 1),
)
CHANNELS = (8, 12, 16, 24, 32, 48, 64, 64, 96, 128, 128, 192, 256, 256, 320, 512)
SIDES = (7, 8, 14, 16, 20, 28, 32, 33, 48, 56, 64, 80, 100, 112, 128, 160, 224, 256, 257, 320, 512)
LEAST_GFLOP, MOST_GFLOP, MOST_GB = 2.0, 200.0, 1.0


def drawn(number: int, rng: random.Random) -> Case:
    """A layer of some family whose work is within bounds."""
    while True:
        dimensions, *numbers = rng.choice(FAMILIES)
        kernel, stride, padding, output_padding, dilation = numbers
        side = rng.choice(SIDES)
        size = {1: (side * 64,), 2: (side, rng.choice((side, side, side + 4))), 3: (side,) * 3}
        groups = rng.choice((1, 1, 1, 1, 1, 2, 4))
        case = Case(
            f"layer{number}",
            rng.choice((1, 2, 4, 8, 16, 32, 64)),
            rng.choice(CHANNELS) * (groups if rng.random() < 0.5 else 1),
            rng.choice(CHANNELS),
            size[dimensions],
            (kernel,) * dimensions,
            stride,
            padding,
            output_padding,
            dilation,
            groups,
        )
        if case.in_channels % groups or case.out_channels % groups:
            continue
        problem = case.problem()
        if LEAST_GFLOP < problem.flops / 1e9 < MOST_GFLOP and problem.bytes / 1e9 < MOST_GB:
            return case


def plans_of(problem: Problem, backward: bool, forced: str | None = None) -> list[Plan]:
    directions = ("grad_input", "grad_weight") if backward else ("forward",)
    machine = this_hardware("cuda")
    return [
        make_plan(replace(problem, direction=direction, bias=not backward), machine, forced)
        for direction in directions
    ]


def measured(case: Case, settings: Settings) -> dict[str, Any]:
    """Milliseconds of PyTorch, of the planner's choice and of every other choice."""
    problem = problem_of(case, settings)
    backward = settings.direction == "backward"
    inputs = accuracy.make_inputs(problem, "cuda")
    grad_output = gradients.make_grad_output(problem, "cuda") if backward else None

    def times(names: list[str]) -> dict[str, float]:
        contenders = {name: contender(name, inputs, problem, grad_output) for name in names}
        return {name: t.median for name, t in timed(contenders, settings.seconds, "cuda").items()}

    plans = plans_of(problem, backward)
    chosen = [plan.kernel for plan in plans]
    milliseconds = times(["torch", "upconv"])
    for kernel in KERNELS:
        serves = set(SERVED[kernel]) & {p.problem.direction for p in plans}
        others = plans_of(problem, backward, kernel)
        if serves and chosen != [plan.kernel for plan in others]:
            with ops.forced(kernel):
                milliseconds[kernel] = times(["upconv"])["upconv"]
    return {
        "case": list(case),
        "dtype": settings.dtype,
        "layout": settings.layout,
        "direction": settings.direction,
        "chosen": chosen,
        "expected": [plan.chosen.microseconds / 1e3 for plan in plans],
        "refused": {r.kernel: r.reason for plan in plans for r in plan.refused},
        "milliseconds": milliseconds,
    }


def verdict(row: dict[str, Any]) -> str:
    """One line where something else was faster than the planner's choice; else nothing."""
    own = row["milliseconds"]["upconv"]
    faster = {k: ms for k, ms in row["milliseconds"].items() if ms * LOST < own}
    if not faster:
        return ""
    others = ", ".join(f"{name} {ms:.3f}" for name, ms in faster.items())
    choice = " + ".join(dict.fromkeys(row["chosen"]))
    return f"{row['direction']} {row['case'][1:]}: {choice} {own:.3f} ms, but {others}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--built-in", action="store_true", help="the benchmark's cases instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="tf32")
    parser.add_argument("--layout", default="contiguous")
    parser.add_argument("--direction", default="forward,backward")
    parser.add_argument("--seconds", type=float, default=0.02)
    parser.add_argument("-o", "--out", type=Path)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    cases = [drawn(number, rng) for number in range(arguments.layers)]
    if arguments.built_in:
        cases = list(CASES)
    if arguments.layout == "channels_last":
        cases = [case for case in cases if case.ndim > 1]
    rows = []
    ops.serve("cuda")
    for direction in arguments.direction.split(","):
        settings = Settings(
            "cuda", arguments.dtype, arguments.layout, arguments.seconds, direction=direction
        )
        with torch.no_grad(), floor.precision("cuda", arguments.dtype, "conv"):
            for case in cases:
                row = measured(case, settings)
                rows.append(row)
                print(verdict(row) or ".", flush=True)
                if arguments.out:
                    with arguments.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    lost = [row for row in rows if verdict(row)]
    slower = [r for r in rows if r["milliseconds"]["torch"] * LOST < r["milliseconds"]["upconv"]]
    print(
        f"{len(rows)} passes: {len(lost)} had a faster choice,"
        f" {len(slower)} were slower than PyTorch's operator"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
