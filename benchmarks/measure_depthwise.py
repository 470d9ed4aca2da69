"""Measures the kernels for the gradients of depthwise layers on this GPU.

    python benchmarks/measure_depthwise.py --out FILE [--most DIVISIONS] [--seconds SECONDS]

Layers with a stride, TF32 and BF16: the input's gradient, and the weight's with the bias's. A line
of JSON for each division that is worth a look, for the kernel that the planner would take without
these, and for PyTorch's: the plan's integers, expected and measured microseconds (medians, L2
flushed before each call), and the distance from float64.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from upconv import autograd, ops, plans
from upconv.planner import ATEN, Problem, depthwise, depthwise_igrad, depthwise_wgrad, make_plan
from upconv.stopwatch import GpuClock

# batch, channels, size, kernel, stride, padding, output padding
LAYERS: list[tuple[Any, ...]] = [
    (8, 21, (64, 64), 16, 8, 4),  # bilinear upsampling to classes
    (8, 21, (16, 16), 64, 32, 16),
    (8, 21, (32, 32), 32, 16, 8),
    (8, 21, (32, 32), 4, 2, 1),
    (8, 21, (128, 128), 8, 4, 2),
    (2, 21, (64, 64), 16, 8, 4),
    (64, 512, (4, 4), 4, 2, 1),  # decoders
    (32, 512, (7, 7), 4, 2, 1),
    (32, 512, (14, 14), 4, 2, 1),
    (16, 256, (32, 32), 4, 2, 1),
    (16, 128, (64, 64), 4, 2, 1),
    (4, 64, (128, 128), 4, 2, 1),
    (16, 512, (16, 16), 4, 2, 1),
    (1, 128, (64, 64), 4, 2, 1),
    (16, 256, (28, 28), 3, 2, 1, 1),
    (16, 128, (56, 56), 3, 2, 1, 1),
    (8, 128, (56, 56), 3, 2, 1),  # rows of 111
    (16, 256, (28, 28), 2, 2, 0),
    (16, 64, (112, 112), 2, 2, 0),
    (8, 96, (56, 56), 4, 4, 0),
    (8, 64, (50, 50), 6, 3, 1),
    (8, 512, (4096,), 4, 2, 1),  # signals
    (16, 256, (1024,), 16, 8, 4),
    (1, 512, (8192,), 4, 2, 1),
    (2, 64, (16, 32, 32), 4, 2, 1),  # volumes
    (2, 32, (32, 32, 32), 2, 2, 0),
    (4, 128, (8, 14, 14), (3, 4, 4), (1, 2, 2), 1),
]
PLANNERS = {"grad_input": depthwise_igrad, "grad_weight": depthwise_wgrad}
LIMIT = {"float32": 3e-6, "bfloat16": 5e-3}
CHOSEN = (
    *("rows", "lanes", "row_groups", "teams", "block_channels", "tile", "tiles_x"),
    *("strip", "strips", "shares", "sums", "vector"),
)
Call = Callable[[], tuple[torch.Tensor, ...]]


def problems() -> Iterator[Problem]:
    for batch, channels, *rest in LAYERS:
        for dtype in ("float32", "bfloat16"):
            for direction in PLANNERS:
                layer = (batch, channels, channels, *rest)
                problem = Problem.of(*layer, groups=channels, dtype=dtype, tf32=dtype == "float32")
                yield replace(problem, direction=direction, bias=direction == "grad_weight")


def operands(problem: Problem) -> list[torch.Tensor]:
    """Input, weight and grad_output."""
    shapes = (
        (problem.batch, problem.in_channels, *problem.in_size),
        (problem.in_channels, 1, *problem.kernel),
        (problem.batch, problem.out_channels, *problem.out_size),
    )
    number = getattr(torch, problem.dtype)
    return [torch.randn(shape, device="cuda").to(number) for shape in shapes]


def both_calls(problem: Problem, tensors: list[torch.Tensor]) -> tuple[Call, Call]:
    """Ours and PyTorch's."""
    x, w, gy = tensors
    lists = (problem.stride, problem.padding, problem.output_padding)
    rest = (*lists, problem.groups, problem.dilation)
    others = [0, *range(2, gy.dim())]
    if problem.direction == "grad_input":
        ours = ops.GRADIENTS["grad_input"]
        return (
            lambda: (ours(gy, w, x.shape, *rest),),
            lambda: (ops._aten_gradient("grad_input", gy, w, x.shape, *rest),),
        )
    together = torch.ops.upconv._grad_weight_and_bias
    return (
        lambda: tuple(together(gy, x, w.shape, *rest)),
        lambda: (autograd.aten_weight_gradient(gy, x, w.shape, *rest), gy.sum(others)),
    )


def worth_a_look(problem: Problem, most: int) -> list[Any]:
    """The best by the planner's estimate, and others spread over those of up to twice its time."""
    machine = plans.cuda_hardware(0)
    ways = sorted(
        PLANNERS[problem.direction].divisions(problem, machine), key=lambda way: way.microseconds
    )
    near = [way for way in ways if way.microseconds <= 2 * ways[0].microseconds]
    places = {round(i * (len(near) - 1) / max(1, most - 1)) for i in range(most)}
    first = set(range(min(len(near), most // 3)))
    return [near[i] for i in sorted(first | places)[:most]]


def distance(results: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> float:
    pairs = zip(results, wanted, strict=True)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)


def without_ours(problem: Problem) -> tuple[str, float]:
    """The kernel that the planner would take without these, and what it expects of it."""
    machine, ours = plans.cuda_hardware(0), PLANNERS[problem.direction].KERNEL
    plan = make_plan(problem, machine)
    if plan.kernel != ours:
        return plan.kernel, plan.chosen.microseconds
    expected = {ATEN: plan.chosen.microseconds + plan.saved_microseconds} | {
        refusal.kernel: float(refusal.reason.split(": ")[1].split(" us")[0])
        for refusal in plan.refused
        if refusal.reason.startswith("slower here: ") and "least" not in refusal.reason
    }
    kernel = min(expected, key=lambda name: expected[name])
    return kernel, expected[kernel]


def measure(problem: Problem, most: int, clock: GpuClock) -> Iterator[dict[str, Any]]:
    planner = PLANNERS[problem.direction]
    tensors = operands(problem)
    ours, theirs = both_calls(problem, tensors)
    _, exact = both_calls(problem, [each.double() for each in tensors])
    wanted = exact()

    def timed(call: Call, runs: int) -> float:
        call()
        return 1e3 * median(clock.milliseconds(call) for _ in range(runs))

    if depthwise.legality(problem, plans.cuda_hardware(0)) is None:
        for way in worth_a_look(problem, most):
            with plans.given(planner.KERNEL, planner.record(way)):
                error = distance(ours(), wanted)
                assert error <= LIMIT[problem.dtype], (way, error)
                microseconds = round(timed(ours, 5), 2)
            fields = planner.scalar_fields(way)
            yield {
                "kernel": planner.KERNEL,
                "plan": {name: fields[name] for name in CHOSEN},
                "blocks": way.blocks,
                "expected": round(way.microseconds, 1),
                "us": microseconds,
                "error": error,
            }
    kernel, expected = without_ours(problem)
    if kernel != ATEN:
        with ops.forced(kernel):
            row = {"us": round(timed(ours, 5), 2), "error": distance(ours(), wanted)}
        yield {"kernel": kernel, "expected": expected, **row}
    row = {"us": round(timed(theirs, 3), 2), "error": distance(theirs(), wanted)}
    yield {"kernel": ATEN, "expected": expected if kernel == ATEN else None, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--most", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=95.0)
    options = parser.parse_args()
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
    clock, end = GpuClock(), time.monotonic() + options.seconds
    with open(options.out, "w") as file, torch.no_grad():
        for problem in problems():
            if time.monotonic() > end:
                print("out of time at", problem)
                break
            rows = list(measure(problem, options.most, clock))
            for row in rows:
                print(json.dumps({"problem": vars(problem), **row}), file=file, flush=True)
            mine = [row for row in rows if row["kernel"] == PLANNERS[problem.direction].KERNEL]
            rest = [f"{row['kernel']} {row['us']}" for row in rows if row not in mine]
            fastest = min(mine, key=lambda row: row["us"], default=None)
            print(
                problem.batch, problem.in_channels, problem.in_size, problem.kernel, problem.stride,
                problem.dtype, problem.direction, f"floor {problem.bytes / 4.27e6:.1f}:",
                *((mine[0]["us"], "expected", mine[0]["expected"], "best", fastest["us"],
                   json.dumps(fastest["plan"])) if fastest else ("not served",)),
                *rest, flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
