"""Measures the Hopper kernels whose rows are pixels on this GPU, and fits their cost rules.

    python benchmarks/measure_pixels.py measure patches|phases|walks OUT.jsonl [DIRECTION ...]
    python benchmarks/measure_pixels.py fit RESULTS.jsonl ...

`measure`: every tiling of layers whose kernel is their stride (patches), of those with stride 2 and
3 or 4 taps and the like (phases), or of those of stride 1 (walks), in all directions, TF32, BF16
and, for patches, strict float32, with what the other Hopper kernel and PyTorch take. Every result
is compared with PyTorch's; a wrong one is said, is not timed, and makes the command fail at its
end. A minute or two each. `fit` needs no GPU; what it prints belongs into
upconv/planner/sm90_patch.py, sm90_phases.py and their likes for the weight's gradient.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from statistics import fmean, median
from types import ModuleType
from typing import Any

import torch
from measure_sm90 import LIMIT, SPLIT_LIMIT, calls
from rows import read_rows

from upconv import autograd, ops, plans
from upconv.planner import (
    DIRECTIONS,
    H200,
    Hardware,
    Problem,
    sm90,
    sm90_patch,
    sm90_patch_wgrad,
    sm90_phases,
    sm90_phases_wgrad,
    sm90_walk,
    sm90_wgrad,
)
from upconv.stopwatch import GpuClock

# batch, in, out, size, kernel
PATCHES: list[tuple[Any, ...]] = [
    (16, 1024, 512, (32, 32), 2),  # U-Net
    (16, 512, 256, (64, 64), 2),
    (16, 256, 128, (128, 128), 2),
    (16, 128, 64, (256, 256), 2),
    (4, 1024, 512, (16, 16), 2),
    (4, 512, 256, (32, 32), 2),
    (4, 256, 128, (64, 64), 2),
    (4, 128, 64, (128, 128), 2),
    (1, 512, 256, (32, 32), 2),
    (1, 256, 128, (64, 64), 2),
    (1, 64, 32, (256, 256), 2),
    (8, 64, 32, (128, 128), 2),
    (8, 32, 16, (256, 256), 2),
    (512, 256, 256, (14, 14), 2),  # masks
    (100, 256, 256, (14, 14), 2),
    (64, 256, 256, (28, 28), 2),
    (32, 256, 128, (56, 56), 2),
    (16, 768, 192, (16, 16), 2),  # decoders of vision transformers
    (16, 768, 96, (32, 32), 4),
    (4, 256, 64, (64, 64), 4),
    (8, 192, 48, (24, 24), 4),
    (2, 64, 32, (64, 80, 64), 2),  # volumes
    (2, 320, 256, (10, 12, 16), 2),
    (2, 128, 64, (32, 40, 32), 2),
    (4, 128, 64, (16, 32, 32), (1, 2, 2)),
    (16, 128, 64, (16384,), 2),  # signals
    (32, 100, 50, (20, 32), 2),  # sizes that divide by nothing
    (3, 72, 40, (10, 12), 2),
]
# batch, in, out, size, kernel, stride, padding, output padding
PHASES: list[tuple[Any, ...]] = [
    (128, 1024, 512, (4, 4), 4, 2, 1),  # DCGAN
    (128, 512, 256, (8, 8), 4, 2, 1),
    (128, 256, 128, (16, 16), 4, 2, 1),
    (128, 128, 64, (32, 32), 4, 2, 1),
    (16, 512, 256, (16, 16), 4, 2, 1),  # pix2pix
    (1, 512, 256, (32, 32), 4, 2, 1),
    (1, 256, 128, (64, 64), 4, 2, 1),
    (4, 128, 64, (128, 128), 4, 2, 1),
    (64, 256, 256, (64, 48), 4, 2, 1),  # pose heads
    (32, 256, 256, (16, 16), 4, 2, 1),
    (32, 256, 256, (16, 12), 4, 2, 1),
    (16, 256, 128, (64, 64), 3, 2, 1, 1),  # CycleGAN, decoders
    (16, 128, 64, (128, 128), 3, 2, 1, 1),
    (1, 256, 128, (64, 64), 3, 2, 1, 1),
    (1, 128, 64, (128, 128), 3, 2, 1, 1),
    (8, 64, 32, (256, 256), 3, 2, 1, 1),
    (8, 64, 64, (128, 128), 4, 2, 1),  # super-resolution
    (2, 64, 64, (180, 320), 4, 2, 1),
    (16, 128, 64, (32768,), 4, 2, 1),  # vocoders
    (16, 256, 128, (8192,), 4, 2, 1),
    (16, 512, 256, (512,), 16, 8, 4),
    (16, 256, 128, (4096,), 16, 8, 4),
    (16, 768, 96, (32, 32), 4, 4, 0),  # decoders of vision transformers
    (8, 192, 48, (24, 24), 4, 4, 0),
    (2, 128, 64, (16, 16, 16), 4, 2, 1),  # volumes
    (2, 64, 32, (32, 32, 32), 3, 2, 1, 1),
    (32, 100, 50, (20, 32), 4, 2, 1),  # sizes that divide by nothing
    (3, 72, 40, (10, 16), 3, 2, 1, 1),
    (8, 128, 128, (24, 40), (3, 4), (1, 2), (1, 1)),
]
# batch, in, out, size, kernel, stride, padding, output padding, dilation
WALKS: list[tuple[Any, ...]] = [
    (8, 64, 64, (1024, 1024), 3),  # images
    (8, 32, 32, (512, 1024), 3),
    (16, 64, 64, (256, 256), 3, 1, 1),
    (16, 128, 64, (128, 128), 3, 1, 1),
    (32, 64, 128, (64, 64), 3, 1, 1),
    (16, 32, 16, (512, 512), 3, 1, 1),
    (4, 48, 40, (200, 304), 3, 1, 1),
    (64, 64, 128, (128, 256), (5, 3)),
    (64, 64, 128, (128, 256), (3, 5)),
    (8, 64, 64, (512, 512), (3, 7)),
    (8, 32, 32, (512, 1024), (3, 7), 1, (1, 3)),
    (8, 48, 48, (64, 64, 64), 3),  # volumes
    (8, 48, 24, (96, 96, 96), 3),
    (2, 64, 64, (32, 64, 64), 3, 1, 1),
    (4, 32, 32, (64, 64, 64), 3, 1, 1),
    (2, 16, 16, (128, 128, 128), 3, 1, 1),
    (2, 128, 128, (16, 32, 32), 3, 1, 1),
    (2, 320, 320, (8, 16, 16), 3, 1, 1),
    (64, 128, 128, (65536,), 3),  # signals
    (16, 256, 256, (8192,), 3, 1, 1),
    (16, 64, 64, (65536,), 3, 1, 1),
    (16, 128, 128, (16384,), 7, 1, 3),
]
CHOSEN = (
    *("tile_n", "resident", "workers", "weight_stages", "box_stages", "input_stages"),
    *("blocks", "flat", "octets"),
)
WALK_CHOSEN = ("tile_c", "blocks", "resident", "weight_stages", "box_stages", "strip", "in_d")
"""Likewise of a walk; `in_d` tells what was walked through when images could be planes."""
CONSTANTS = {
    sm90_phases: (
        *("LAUNCH", "UNIT_CYCLES", "STEP_FACTOR", "ROW_CYCLES", "TURN_CYCLES"),
        *("READ_BYTES", "STORE_BYTES"),
    ),
    sm90_walk: (
        *("LAUNCH", "UNIT_CYCLES", "STEP_FACTOR", "TURN_CYCLES", "STAGE_CYCLES", "WINDOW_CYCLES"),
        *("ROW_CYCLES", "LINE_CYCLES", "PLANE_CYCLES", "SUM_CYCLES", "LAY_CYCLES"),
        *("SINGLE_CYCLES", "STORE_CYCLES", "SEGMENT_CYCLES", "MOVED_BYTES"),
    ),
    sm90_patch: (
        *("LAUNCH", "UNIT_CYCLES", "STAGE_FACTOR", "READ_BYTES", "STORE_BYTES", "HIDDEN"),
        *("CUT_CYCLES", "CUT_FACTOR"),
    ),
    sm90_patch_wgrad: (
        *("LAUNCH", "UNIT_CYCLES", "STAGE_FACTOR", "LINE_CYCLES", "READ_BYTES", "SUM_BYTES"),
    ),
    sm90_phases_wgrad: (
        *("LAUNCH", "UNIT_CYCLES", "STAGE_FACTOR", "WIDE_FACTOR"),
        *("RUN_BYTES", "WHOLE_CYCLES", "RAGGED_CYCLES"),
        *("READ_BYTES", "SUM_BYTES", "HIDDEN"),
    ),
}


PLANNERS = {
    "patches": (sm90_patch, sm90_patch_wgrad, sm90_phases_wgrad),
    "phases": (sm90_phases, sm90_phases_wgrad),
    "walks": (sm90_walk,),
}


def planners(problem: Problem) -> tuple[ModuleType, ModuleType]:
    """The kernel for such layers, and the one for all layers."""
    patches = problem.kernel == problem.stride
    if problem.direction == "grad_weight":
        rows = patches and problem.kernel[-1] == 2 and not sm90_phases_wgrad.square_rows(problem)
        return sm90_patch_wgrad if rows else sm90_phases_wgrad, sm90_wgrad
    if patches:
        return sm90_patch, sm90
    return sm90_phases if max(problem.stride) > 1 else sm90_walk, sm90


def problems(kind: str, directions: Sequence[str] = DIRECTIONS) -> Iterator[Problem]:
    patches = [(*layer, layer[-1]) for layer in PATCHES]  # the kernel is the stride
    for layer in {"patches": patches, "phases": PHASES, "walks": WALKS}[kind]:
        for dtype, tf32 in (("float32", True), ("bfloat16", True), ("float32", False)):
            for direction in directions:
                problem = Problem.of(*layer, tf32=tf32, dtype=dtype)
                problem = replace(problem, direction=direction, bias=direction == "forward")
                last = [True] * (direction == "forward" and problem.ndim > 1)
                for each in (replace(problem, channels_last=on) for on in [False, *last]):
                    planner, _ = planners(each)
                    fits = planner in PLANNERS[kind] and planner.refusal(each, H200) is None
                    if fits and any(tilings(planner, each, H200)):
                        yield each


def tilings(planner: ModuleType, problem: Problem, hardware: Hardware) -> Iterator[Any]:
    """Walks go through images as they do through volumes; to all others an image is a slice."""
    if planner is sm90_walk:
        return sm90_walk.tilings(problem, hardware)
    found: Iterator[Any] = planner.tilings(problem.in_three(), hardware)
    return found


def both_calls(problem: Problem) -> tuple[Any, Any]:
    """Ours and PyTorch's, on drawn tensors."""
    if problem.direction != "grad_weight":
        return calls(problem)
    number, ndim = getattr(torch, problem.dtype), problem.ndim
    x = torch.randn(problem.batch, problem.in_channels, *problem.in_size, device="cuda").to(number)
    outputs = (problem.batch, problem.out_channels, *problem.out_size)
    gy = torch.randn(outputs, device="cuda").to(number)
    size = (problem.in_channels, problem.out_channels, *problem.kernel)
    steps = (problem.stride, problem.padding, problem.output_padding)
    rest = (size, *steps, 1, [1] * ndim)
    ours = ops.GRADIENTS["grad_weight"]
    return lambda: ours(gy, x, *rest), lambda: autograd.aten_weight_gradient(gy, x, *rest)


def chosen(planner: ModuleType, tiling: Any) -> dict[str, int]:
    """What of a plan is the planner's choice, and not the layer's."""
    names = (*WALK_CHOSEN, "chunk") if planner is sm90_walk else CHOSEN
    return {name: value for name, value in planner.fields(tiling).items() if name in names}


def measure(kind: str, path: str, directions: Sequence[str]) -> None:
    hardware, clock = plans.cuda_hardware(0), GpuClock()
    wrong = 0
    with open(path, "w") as file, torch.no_grad():
        for problem in problems(kind, directions):
            precision = "ieee" if problem.strict else "tf32"
            torch.backends.cudnn.conv.fp32_precision = precision  # type: ignore[attr-defined]
            planner, other = planners(problem)
            ours, theirs = both_calls(problem)
            expected = theirs().float()
            line: dict[str, Any] = {"problem": vars(problem), "times": []}

            def timed(call: Any = ours) -> float:
                return median(clock.milliseconds(lambda: (call(),)) for _ in range(6))

            for tiling in tilings(planner, problem, hardware):
                with plans.given(planner.KERNEL, planner.record(tiling)):
                    error = float((ours().float() - expected).norm() / expected.norm())
                    if error <= (SPLIT_LIMIT if problem.strict else LIMIT[problem.dtype]):
                        line["times"].append([chosen(planner, tiling), timed()])
                        continue
                wrong += 1
                print("wrong by", error, planner.KERNEL, chosen(planner, tiling), problem)
            with ops.forced(other.KERNEL):
                line["other"] = timed()
            line["pytorch"] = timed(theirs)
            print(json.dumps(line), file=file, flush=True)
    sys.exit(f"{wrong} results were wrong" if wrong else 0)


def problem_of(line: dict[str, Any]) -> Problem:
    values = line["problem"].items()
    return Problem(**{k: tuple(v) if isinstance(v, list) else v for k, v in values})


def tilings_of(line: dict[str, Any]) -> list[tuple[Any, float]]:
    """The tilings of a line, as the planner has them now, and their times."""

    def key(fields: dict[str, int]) -> frozenset[tuple[str, int]]:
        return frozenset(item for item in fields.items() if item[0] != "chunk")

    problem = problem_of(line)
    planner, _ = planners(problem)
    every = tilings(planner, problem, H200)
    ours = {key(chosen(planner, tiling)): tiling for tiling in every}
    found = []
    for fields, ms in line["times"]:
        tiling = ours.get(key(fields))
        if tiling is not None and "chunk" in fields:
            # How long a walk is follows from the rule that is to be judged: as it was then.
            tiling = replace(tiling, chunk=fields["chunk"])
        if tiling is not None:
            found.append((tiling, ms))
    return found


def fit(planner: ModuleType, lines: list[dict[str, Any]]) -> None:
    found = [tilings_of(line) for line in lines]
    names = CONSTANTS[planner]
    start = [getattr(planner, name) for name in names]

    def errors(values: list[float], best_only: bool = False) -> Iterator[float]:
        for name, value, first in zip(names, values, start, strict=True):
            setattr(planner, name, value * first)
        for choices in found:
            expected = [tiling.microseconds(H200) for tiling, _ in choices]
            least = min(ms for _, ms in choices)
            if best_only:
                yield choices[expected.index(min(expected))][1] / least - 1
                continue
            for (_, ms), us in zip(choices, expected, strict=True):
                # What is far from the fastest need not be known well.
                yield (us / (ms * 1e3) - 1) ** 2 / (ms / least) ** 2

    draw, values = random.Random(0), [1.0] * len(names)
    least = fmean(errors(values))
    for step in range(4000):  # a random walk downhill, of ever smaller steps
        width = 0.3 * 0.999**step
        tried = [value * (1 + width * draw.uniform(-1, 1)) for value in values]
        if (now := fmean(errors(tried))) < least:
            least, values = now, tried
    lost = list(errors(values, best_only=True))
    print(planner.KERNEL)
    for name, value, first in zip(names, values, start, strict=True):
        print(f"{name} = {value * first:.4g}")
    print(f"standard deviation {least**0.5:.1%}; picked {fmean(lost):.1%} above the fastest")
    for line, choices in zip(lines, found, strict=True):
        print(described(line, choices))


def described(line: dict[str, Any], choices: list[tuple[Any, float]]) -> str:
    """A layer, what the rule picks for it, and what others take."""
    problem = choices[0][0].problem
    tiling, ms = min(choices, key=lambda choice: choice[0].microseconds(H200))
    size = "x".join(map(str, problem.in_size))
    channels = f"{problem.batch} x {problem.in_channels} -> {problem.out_channels}"
    return (
        f"{problem.direction:11} {problem.dtype:8} {'last ' * problem.channels_last}{channels},"
        f" {size}, {prod(problem.kernel)} taps:"
        f" {ms:.4f} ({tiling.microseconds(H200) / 1e3:.4f} expected),"
        f" best {min(m for _, m in choices):.4f};"
        f" the other kernel {line['other']:.4f}, PyTorch {line['pytorch']:.4f}"
    )


def main() -> None:
    if sys.argv[1:2] == ["measure"] and sys.argv[2] in PLANNERS:
        measure(sys.argv[2], sys.argv[3], sys.argv[4:] or DIRECTIONS)
    elif sys.argv[1:2] == ["fit"] and len(sys.argv) > 2:
        lines = [row for path in sys.argv[2:] for row in read_rows(path)]
        for planner in CONSTANTS:
            its = [line for line in lines if planners(problem_of(line))[0] is planner]
            if its:
                fit(planner, its)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
