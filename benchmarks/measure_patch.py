"""Measures the Hopper kernel for patches on this GPU, and fits its cost rule to what was measured.

    python benchmarks/measure_patch.py measure OUT.jsonl
    python benchmarks/measure_patch.py fit RESULTS.jsonl ...

`measure`: every tiling of layers whose kernel is their stride, in both directions, TF32 and BF16,
with what the other Hopper kernel and PyTorch take; every result is compared with PyTorch's. A
minute. `fit` needs no GPU; what it prints belongs into upconv/planner/sm90_patch.py.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from measure_sm90 import LIMIT, calls

from upconv import ops, plans
from upconv.planner import H200, Problem, sm90, sm90_patch
from upconv.planner.sm90_wgrad import flat
from upconv.stopwatch import GpuClock

# batch, in, out, size, kernel
LAYERS: list[tuple[Any, ...]] = [
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
CONSTANTS = ("LAUNCH", "UNIT_CYCLES", "STAGE_FACTOR", "READ_BYTES", "STORE_BYTES")


def problems() -> Iterator[Problem]:
    for batch, cin, cout, size, kernel in LAYERS:
        for dtype in ("float32", "bfloat16"):
            for direction in ("forward", "grad_input"):
                problem = Problem.of(batch, cin, cout, size, kernel, kernel, tf32=True, dtype=dtype)
                problem = replace(problem, direction=direction)
                if sm90_patch.refusal(problem, H200) is None:
                    yield problem


def measure(path: str) -> None:
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
    hardware, clock = plans.cuda_hardware(0), GpuClock()
    asked = plans.record
    with open(path, "w") as file, torch.no_grad():
        for problem in problems():
            ours, theirs = calls(problem)
            expected = theirs().float()
            line: dict[str, Any] = {"problem": vars(problem), "times": []}

            def timed(call: Any = ours) -> float:
                return median(clock.milliseconds(lambda: (call(),)) for _ in range(6))

            for tiling in sm90_patch.tilings(flat(problem), hardware):
                record = [plans.KERNEL_IDS[sm90_patch.KERNEL], *sm90_patch.record(tiling)]
                plans.record = lambda key, record=record: record  # type: ignore[misc]
                plans.clear()
                error = float((ours().float() - expected).norm() / expected.norm())
                assert error <= LIMIT[problem.dtype], (tiling, error)
                line["times"].append([tiling.n, tiling.resident, timed()])
            plans.record = asked  # type: ignore[misc]
            with ops.forced(sm90.KERNEL):
                line[sm90.KERNEL] = timed()
            line["pytorch"] = timed(theirs)
            print(json.dumps(line), file=file, flush=True)


def fit(paths: list[str]) -> None:
    lines = [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]
    found = []
    for line in lines:
        lists = {k: tuple(v) if isinstance(v, list) else v for k, v in line["problem"].items()}
        tilings = sm90_patch.tilings(flat(Problem(**lists)), H200)
        found.append([(t, ms) for t, (*_, ms) in zip(tilings, line["times"], strict=True)])
    start = [getattr(sm90_patch, name) for name in CONSTANTS]

    def errors(values: Any, best_only: bool = False) -> Iterator[float]:
        for name, value, first in zip(CONSTANTS, values, start, strict=True):
            setattr(sm90_patch, name, float(value) * first)
        for choices in found:
            expected = [tiling.microseconds(H200) for tiling, _ in choices]
            least = min(ms for _, ms in choices)
            if best_only:
                yield choices[expected.index(min(expected))][1] / least - 1
                continue
            for (_, ms), us in zip(choices, expected, strict=True):
                # What is far from the fastest need not be known well.
                yield (us / (ms * 1e3) - 1) ** 2 / (ms / least) ** 2

    draw, values = random.Random(0), [1.0] * len(CONSTANTS)
    least = fmean(errors(values))
    for step in range(4000):  # a random walk downhill, of ever smaller steps
        width = 0.3 * 0.999**step
        tried = [value * (1 + width * draw.uniform(-1, 1)) for value in values]
        if (now := fmean(errors(tried))) < least:
            least, values = now, tried
    lost = list(errors(values, best_only=True))
    for name, value, first in zip(CONSTANTS, values, start, strict=True):
        print(f"{name} = {value * first:.4g}")
    print(f"standard deviation {least**0.5:.1%}; picked {fmean(lost):.1%} above the fastest")
    for line, choices in zip(lines, found, strict=True):
        print(described(line, choices))


def described(line: dict[str, Any], choices: list[tuple[sm90_patch.Tiling, float]]) -> str:
    """A layer, what the rule picks for it, and what others take."""
    problem = choices[0][0].problem
    tiling, ms = min(choices, key=lambda choice: choice[0].microseconds(H200))
    size = "x".join(map(str, problem.in_size))
    channels = f"{problem.batch} x {problem.in_channels} -> {problem.out_channels}"
    return (
        f"{problem.direction:10} {problem.dtype:8} {channels}, {size}, {prod(problem.kernel)} taps:"
        f" {ms:.4f} ({tiling.microseconds(H200) / 1e3:.4f} expected, N = {tiling.n},"
        f" {'stay' if tiling.resident else 'ring'}), best {min(m for _, m in choices):.4f};"
        f" other kernel {line[sm90.KERNEL]:.4f}, PyTorch {line['pytorch']:.4f}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"] and len(sys.argv) == 3:
        measure(sys.argv[2])
    elif sys.argv[1:2] == ["fit"] and len(sys.argv) > 2:
        fit(sys.argv[2:])
    else:
        sys.exit(__doc__)
