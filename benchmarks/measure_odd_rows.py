"""Measures the weight's gradient on Hopper of layers whose rows have an odd number of elements.

    python benchmarks/measure_odd_rows.py OUT.jsonl [SECONDS] [DTYPE]

For each layer: the plans that are expected to be the fastest of those that load single elements and
of those that bring rows as they lie in memory, with what PyTorch takes; each result is compared
with float64, and with itself. A line has what benchmarks/fit_wgrad.py reads of a plan, and the
expected milliseconds and the error beside the measured ones.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from fit_wgrad import RUNS, Measure, row_of

from upconv import ops
from upconv.planner import H200, Problem
from upconv.planner.sm90_wgrad import Option, options
from upconv.stopwatch import GpuClock

# batch, in, out, size, kernel, stride, padding, output padding, dilation
LAYERS: dict[str, tuple[Any, ...]] = {
    "kb79_1d": (16, 32, 64, (131072,), 3, 2, 1, 0, 2),
    "kb77_3d": (16, 32, 64, (16, 32, 32), 3, 2, 1, 0, 2),
    "k3s2 32": (64, 64, 64, (32, 32), 3, 2, 1),
    "k3s2 56": (32, 64, 64, (56, 56), 3, 2, 1),
    "k3s2 112": (16, 64, 64, (112, 112), 3, 2, 1),
    "k3s2 256-128": (16, 256, 128, (64, 64), 3, 2, 1),
    "k3s2 128-32": (16, 128, 32, (128, 128), 3, 2, 1),
    "k3s2 small": (64, 512, 256, (16, 16), 3, 2, 1),
    "k3s2 p0": (16, 64, 64, (64, 64), 3, 2, 0),
    "k5s2": (16, 128, 64, (64, 64), 5, 2, 2),
    "k3s1 13": (64, 128, 128, (13, 13), 3, 1, 1),
    "k3s1 27": (32, 128, 128, (27, 27), 3, 1, 1),
    "k3s1 65": (16, 128, 128, (65, 65), 3, 1, 1),
    "k4s1 to odd": (32, 64, 64, (64, 64), 4, 1, 1),
    "k3s2 1d": (16, 64, 64, (32768,), 3, 2, 1),
    "k7s1 1d": (16, 128, 128, (8191,), 7, 1, 3),
    "k3s2 3d": (2, 64, 64, (16, 32, 32), 3, 2, 1),
    "k3s2 3d 128": (2, 128, 64, (16, 16, 16), 3, 2, 1),
    "k3s2 96": (16, 96, 96, (56, 56), 3, 2, 1),
}
OLD, NEW = 2, 4
"""Plans of either kind."""


def layer_of(name: str, dtype: str) -> Problem:
    problem = Problem.of(*LAYERS[name])
    return replace(problem, dtype=dtype, tf32=True, direction="grad_weight", bias=False)


def chosen(problem: Problem) -> list[Option]:
    """Of each kind the plans with the least expected time, each of another form or chunk."""
    found: dict[Any, Option] = {}
    for option in options(problem, H200):
        form, _, chunk, split = option
        kind = form, chunk.boxes, chunk.segment if form.odd else 0, chunk.together
        if kind not in found or split.microseconds < found[kind][3].microseconds:
            found[kind] = option
    ranked = sorted(found.values(), key=lambda option: option[3].microseconds)
    old = [option for option in ranked if not option[0].odd]
    new = [option for option in ranked if option[0].odd]
    return old[:OLD] + new[:NEW]


def by_pytorch(this: Measure) -> Callable[..., torch.Tensor]:
    stride, padding, extra, groups, dilation = this.rest
    rest = (stride, padding, dilation, True, extra, groups, [False, True, False])

    def call(gy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        weight = torch.empty(this.shape, device="cuda", dtype=x.dtype)
        return torch.ops.aten.convolution_backward(gy, x, weight, None, *rest)[1]

    return call


def measure(out: Path, seconds: float, dtype: str) -> None:
    assert ops.serve("cuda_wgrad")  # until then the planner's own choice is asked for
    clock, end = GpuClock(), time.monotonic() + seconds
    with out.open("w") as file, torch.no_grad():
        for name in LAYERS:
            if time.monotonic() > end:
                break
            layer = layer_of(name, dtype)
            torch.manual_seed(0)
            this, which = Measure(layer), {"case": name, "layer": LAYERS[name], "dtype": dtype}
            pytorch = by_pytorch(this)
            wanted = pytorch(this.gy.double(), this.x.double())
            call = lambda f=pytorch, m=this: (f(m.gy, m.x),)  # noqa: E731
            call()
            ms = median(clock.milliseconds(call) for _ in range(RUNS))
            error = float((call()[0] - wanted).norm() / wanted.norm())
            lines: list[dict[str, Any]] = [{**which, "by": "PyTorch", "ms": ms, "error": error}]
            for option in chosen(this.problem):
                row = row_of(which, option)
                row["expected"] = option[3].microseconds / 1e3
                row["ms"] = this.milliseconds(clock, row)
                result = this.call()
                row["error"] = float((result - wanted).norm() / wanted.norm())
                row["same"] = bool(torch.equal(result, this.call()))
                lines.append(row)
            for line in lines:
                file.write(json.dumps(line) + "\n")
            file.flush()
            del this, wanted, pytorch, call


if __name__ == "__main__":
    given = sys.argv[2:]
    measure(
        Path(sys.argv[1]),
        float(given[0]) if given else 80.0,
        given[1] if len(given) > 1 else "bfloat16",
    )
