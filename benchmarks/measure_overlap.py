"""Measures the kernel for few output channels on this GPU, and fits its cost rule.

    python benchmarks/measure_overlap.py measure OUT.jsonl
    python benchmarks/measure_overlap.py fit RESULTS.jsonl ...

`measure`: up to 32 divisions of each layer in TF32, BF16 and strict float32, with what the planner
takes without this kernel and what PyTorch takes; every result is compared with PyTorch's. A minute.
`fit` needs no GPU; what it prints belongs into upconv/planner/overlap.py.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import log
from statistics import fmean, median
from typing import Any

import torch
from measure_sm90 import LIMIT, SPLIT_LIMIT, calls
from rows import read_rows

from upconv import plans
from upconv.planner import H200, Problem, make_plan, overlap
from upconv.planner import plan as planning
from upconv.stopwatch import GpuClock

# batch, in, out, size, kernel, stride, padding, output padding
LAYERS: list[tuple[Any, ...]] = [
    (8, 56, 1, (256, 256), 9, 3, 4, 2),  # super-resolution
    (8, 64, 1, (256, 256), 9, 1, 4),
    (4, 56, 1, (180, 320), 9, 2, 4, 1),
    (8, 32, 3, (128, 128), 9, 4, 4, 3),
    (16, 64, 3, (256, 256), 3, 1, 1),
    (4, 64, 3, (512, 512), 5, 1, 2),
    (128, 64, 3, (32, 32), 4, 2, 1),  # generators
    (32, 64, 3, (64, 64), 4, 2, 1),
    (16, 64, 3, (128, 128), 4, 2, 1),
    (64, 128, 1, (14, 14), 4, 2, 1),
    (8, 128, 3, (128, 128), 4, 2, 1),
    (16, 64, 3, (128, 128), 3, 2, 1, 1),
    (16, 32, 3, (128, 128), 5, 2, 2, 1),
    (16, 64, 2, (256, 256), 2, 2, 0),  # segmentation
    (16, 64, 1, (128, 128), 4, 2, 1),
    (8, 64, 5, (128, 128), 4, 2, 1),
    (8, 21, 21, (64, 64), 4, 2, 1),
    (16, 32, 1, (65536,), 7, 1, 3),  # vocoders
    (16, 64, 1, (16384,), 16, 8, 4),
    (16, 64, 2, (16000,), 4, 2, 1),
    (2, 32, 3, (64, 64, 64), 3, 1, 1),  # volumes
    (2, 32, 2, (48, 48, 48), 4, 2, 1),
    (2, 16, 1, (64, 64, 64), 2, 2, 0),
    (7, 45, 3, (99, 101), 5, 3, 1),  # sizes that divide by nothing
    (3, 100, 4, (75, 50), 3, 2, 0),
    (16, 12, 3, (256, 256), 3, 1, 1),  # few on both sides
    (16, 3, 3, (256, 256), 4, 2, 1),
]
TYPES = (("float32", True), ("bfloat16", False), ("float32", False))
IDENTITY = ("tiles_m", "tiles_n", "warps", "warps_x", "stages", "steps", "together")
CONSTANTS = (
    *("LAUNCH_MICROSECONDS", "SETUP_CYCLES", "PRODUCT_CYCLES", "COPY"),
    *("ROW_COPY", "BOX_INSTRUCTIONS", "UNIT_INSTRUCTIONS", "ADD", "ADD_TAP", "ISSUE"),
    *("BOX_CYCLES", "THIN", "PASS_INSTRUCTIONS", "PASS_COLUMN"),
    *("STAGED_BYTES", "CACHE_BYTES", "UNHIDDEN"),
)
MOST = 32


def problems() -> Iterator[Problem]:
    for layer in LAYERS:
        for dtype, tf32 in TYPES:
            problem = Problem.of(*layer, dtype=dtype, tf32=tf32)
            if any(overlap.divisions(problem, H200)):
                yield problem


def identity(way: overlap.Division) -> list[int]:
    return [getattr(way, name) for name in IDENTITY]


def some(ways: list[overlap.Division]) -> list[overlap.Division]:
    """The most promising ones, and others of all kinds."""
    ways = sorted(ways, key=lambda way: way.microseconds)
    rest = [way for way in ways[MOST // 2 :] if way.microseconds < 2.5 * ways[0].microseconds]
    return ways[: MOST // 2] + random.Random(1).sample(rest, min(MOST // 2, len(rest)))


def measure(path: str) -> None:
    hardware, clock = plans.cuda_hardware(0), GpuClock()
    others = {name: ask for name, ask in planning.KERNELS.items() if name != overlap.KERNEL}
    with open(path, "w") as file, torch.no_grad():
        for problem in problems():
            precision = "ieee" if problem.strict else "tf32"
            torch.backends.cudnn.conv.fp32_precision = precision  # type: ignore[attr-defined]
            ours, theirs = calls(problem)
            expected = theirs().float()
            line: dict[str, Any] = {"problem": vars(problem), "times": []}

            def timed(call: Any = ours) -> float:
                return median(clock.milliseconds(lambda: (call(),)) for _ in range(6))

            for way in some(list(overlap.divisions(problem, hardware))):
                with plans.given(overlap.KERNEL, overlap.record(way)):
                    error = float((ours().float() - expected).norm() / expected.norm())
                    limit = SPLIT_LIMIT if problem.strict else LIMIT[problem.dtype]
                    assert error <= limit, (way, error)
                    line["times"].append([identity(way), timed()])
            known, planning.KERNELS = planning.KERNELS, others
            make_plan.cache_clear()
            before = make_plan(problem, hardware)
            planning.KERNELS = known
            with plans.given(before.kernel, before.chosen.params):
                line["before"] = [before.kernel, timed()]
            make_plan.cache_clear()
            line["pytorch"] = timed(theirs)
            print(json.dumps(line), file=file, flush=True)
            print(described(line), flush=True)


def problem_of(line: dict[str, Any]) -> Problem:
    values = line["problem"].items()
    return Problem(**{k: tuple(v) if isinstance(v, list) else v for k, v in values})


def measured(line: dict[str, Any]) -> list[tuple[overlap.Division, float]]:
    times = {tuple(numbers): ms for numbers, ms in line["times"]}
    ways = overlap.divisions(problem_of(line), H200)
    known = ((way, times.get(tuple(identity(way)))) for way in ways)
    return [(way, ms) for way, ms in known if ms is not None]


def described(line: dict[str, Any]) -> str:
    problem, ways = problem_of(line), measured(line)
    picked, ms = min(ways, key=lambda each: each[0].microseconds)
    best, least = min(ways, key=lambda each: each[1])
    floor = problem.bytes / 4.27e9
    kind = "strict" if problem.strict else problem.dtype
    return (
        f"{problem.batch} x {problem.in_channels} -> {problem.out_channels}, {problem.in_size},"
        f" k {problem.kernel} s {problem.stride} {kind}: {ms:.4f} {identity(picked)}"
        f" ({picked.microseconds / 1e3:.4f} expected), best {least:.4f} {identity(best)},"
        f" before {line['before'][1]:.4f} {line['before'][0]}, PyTorch {line['pytorch']:.4f},"
        f" memory {floor:.4f}"
    )


def fit(lines: list[dict[str, Any]]) -> None:
    found = [measured(line) for line in lines]
    start = [getattr(overlap, name) for name in CONSTANTS]

    def errors(values: list[float]) -> float:
        for name, value, first in zip(CONSTANTS, values, start, strict=True):
            setattr(overlap, name, value * first)
        total = []
        for choices in found:
            least = min(ms for _, ms in choices)
            for way, ms in choices:
                fresh = replace(way)  # which forgets what it had computed
                # What is far from the fastest need not be known well.
                total.append(log(fresh.microseconds / ms / 1e3) ** 2 / (ms / least) ** 2)
        return fmean(total)

    draw, values = random.Random(0), [1.0] * len(CONSTANTS)
    least = errors(values)
    for step in range(900):  # a random walk downhill, of ever smaller steps
        width = 0.4 * 0.996**step
        tried = [
            value * (1 + width * draw.uniform(-1, 1)) if draw.random() < 0.4 else value
            for value in values
        ]
        if (now := errors(tried)) < least:
            least, values = now, tried
    errors(values)
    for name, value, first in zip(CONSTANTS, values, start, strict=True):
        print(f"{name} = {value * first:.4g}")
    lost = []
    for line in lines:
        print(described(line))
        ways = measured(line)
        picked = min(ways, key=lambda each: each[0].microseconds)[1]
        lost.append(picked / min(ms for _, ms in ways) - 1)
    print(f"standard deviation {least**0.5:.1%}; picked {fmean(lost):.1%} above the fastest")


def main() -> None:
    if sys.argv[1:2] == ["measure"] and len(sys.argv) == 3:
        measure(sys.argv[2])
    elif sys.argv[1:2] == ["fit"] and len(sys.argv) > 2:
        fit([row for path in sys.argv[2:] for row in read_rows(path)])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
