"""Measures tilings of the Hopper kernel on this GPU, for `benchmarks/fit_sm90.py`.

    python benchmarks/measure_sm90.py OUT.jsonl.gz [--split] [CASE ...]

Without cases: all of them, and layers of known networks. Forward, the input's gradient and the
forward pass on channels_last, in TF32 and BF16, or in float32 that is not rounded (--split); for
each the tilings that the planner expects most of, 60 at most, in two rounds of different order.
Every result is compared with PyTorch's. It takes some minutes. Large layers in TF32 run into the
power limit on the way: their times are up to 13 % above those of a cool GPU.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from statistics import median
from typing import Any, NamedTuple

import torch

from upconv import autograd, ops, plans
from upconv.cases import CASES
from upconv.planner import Hardware, Problem, sm90
from upconv.planner.sm90_area import GROUP
from upconv.planner.sm90_cost import CYCLES
from upconv.planner.sm90_search import tilings
from upconv.planner.sm90_task import Task, forward_task, input_gradient_task, shapes
from upconv.planner.sm90_tiling import Tiling, memory_cycles
from upconv.stopwatch import GpuClock

# batch, in, out, size, kernel, stride, padding, output padding, dilation
LAYERS: list[tuple[Any, ...]] = [
    (64, 1024, 512, (4, 4), 4, 2, 1),  # DCGAN
    (64, 512, 256, (8, 8), 4, 2, 1),
    (64, 256, 128, (16, 16), 4, 2, 1),
    (64, 128, 64, (32, 32), 4, 2, 1),
    (32, 64, 3, (64, 64), 4, 2, 1),
    (8, 512, 256, (32, 32), 4, 2, 1),  # pix2pix
    (8, 256, 128, (64, 64), 4, 2, 1),
    (8, 128, 64, (128, 128), 4, 2, 1),
    (4, 256, 128, (64, 64), 3, 2, 1, 1),  # CycleGAN
    (4, 128, 64, (128, 128), 3, 2, 1, 1),
    (4, 512, 256, (64, 64), 2, 2, 0),  # U-Net
    (4, 256, 128, (128, 128), 2, 2, 0),
    (2, 128, 64, (256, 256), 2, 2, 0),
    (64, 256, 256, (14, 14), 2, 2, 0),  # masks
    (8, 256, 21, (32, 32), 4, 2, 1),
    (4, 64, 64, (96, 96), 3, 1, 1),  # super-resolution
    (2, 64, 64, (180, 320), 4, 2, 1),
    (2, 64, 32, (360, 640), 3, 1, 1),
    (16, 128, 128, (32, 32), 5, 2, 2, 1),  # learned compression
    (16, 192, 192, (16, 16), 5, 2, 2, 1),
    (8, 256, 128, (2048,), 16, 8, 4),  # vocoders
    (8, 128, 64, (8192,), 4, 2, 1),
    (8, 512, 256, (200,), 20, 10, 5),
    (4, 64, 64, (60000,), 7, 1, 3),
    (2, 128, 64, (16, 16, 16), 2, 2, 0),  # volumes
    (2, 64, 32, (32, 32, 32), 3, 2, 1, 1),
    (2, 32, 32, (48, 48, 48), 3, 1, 1),
    (1, 256, 128, (12, 12, 12), 4, 2, 1),
    (16, 96, 96, (56, 56), 3, 1, 1),  # sizes that divide by nothing
    (16, 48, 80, (100, 75), 5, 1, 2),
    (8, 32, 64, (300, 301), 3, 1, 0),
    (8, 128, 128, (65, 129), 3, 1, 0),
    (8, 64, 64, (64, 64), 3, 1, 2, 0, 2),
    (8, 64, 64, (50, 50), 3, 3, 0),
    (8, 64, 64, (40, 100), (4, 3), (2, 1), 1),
    (8, 128, 64, (32, 32), 8, 4, 2),
]
NAMES = [name for name in CYCLES if name not in ("unit", "start")]
IDENTITY = (
    *("shape", "n", "blocks", "alternate", "rings", "stages", "resident", "copy", "images"),
    *("height", "width", "slice_blocks", "slots", "raw_blocks", "raw_chunks", "turn_slices"),
    "strip",
)
MOST = 60
LIMIT = {"float32": 2e-3, "bfloat16": 1.5e-2}
SPLIT_LIMIT = 4e-6
"""Relative difference of two results, ours and PyTorch's."""


class Choice(NamedTuple):
    tiling: Tiling
    identity: tuple[int, ...]
    params: tuple[int, ...]


def task_of(problem: Problem) -> Task:
    return (input_gradient_task if problem.direction == "grad_input" else forward_task)(problem)


def identity_of(number: int, tiling: Tiling) -> tuple[int, ...]:
    """What IDENTITY names, of a tiling of the `number`-th shape."""
    area, weights, box = tiling.area, tiling.weights, tiling.box
    return (
        *(number, tiling.n, tiling.blocks, int(tiling.alternate), weights.rings, weights.stages),
        *(int(weights.resident), area.copy, area.images, area.height, area.width),
        *(tiling.slice_blocks, tiling.slots, box.raw_blocks, box.raw_chunks, tiling.turn_slices),
        area.strip,
    )


def chosen(problem: Problem, hardware: Hardware) -> list[Choice]:
    """The tilings to measure, the best by the planner's own estimate first."""
    found = []
    for number, shape in enumerate(shapes(task_of(problem))):
        by_blocks = {blocks: sm90.jobs(shape, blocks) for blocks in sm90.BLOCKS}
        for tiling in tilings(shape, by_blocks, hardware):
            identity = identity_of(number, tiling)
            found.append((tiling.cycles, identity, shape, by_blocks[tiling.blocks], tiling))
    found.sort(key=lambda each: each[:2])
    return [
        Choice(tiling, identity, sm90.record(shape, job_list or [], tiling))
        for _, identity, shape, job_list, tiling in varied(found)
    ]


def varied(found: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Of each kind of tiling (N, order, rings, strips) some areas: more of what promises most."""
    if not found:
        return []
    best, kinds, seen, result = found[0][0], {}, set(), []
    for each in found:
        cycles, identity = each[:2]
        if cycles > 2 * best and len(result) >= 10:
            break
        kind = identity[:5] + identity[6:8] + (identity[IDENTITY.index("strip")] > GROUP,)
        area = kind + identity[8:12] + identity[13:14]
        room = 8 if cycles < 1.12 * best else 3 if cycles < 1.35 * best else 1
        if area in seen or kinds.get(kind, 0) >= room or len(result) >= MOST:
            continue
        seen.add(area)
        kinds[kind] = kinds.get(kind, 0) + 1
        result.append(each)
    return result


def row_of(problem: Problem, tiling: Tiling, hardware: Hardware, ms: float) -> list[float]:
    task = task_of(problem)
    groups = tiling.job_groups * task.groups
    units, blocks = prod(tiling.tiles) * groups, hardware.multiprocessors
    if tiling.weights.resident:
        blocks -= blocks % groups
    memory = memory_cycles(task, units, hardware)
    work = [getattr(tiling.work, name) for name in NAMES]
    return [float(f"{value:.6g}") for value in (ms, -(-units // blocks), *memory, *work)]


def calls(problem: Problem) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """Ours and PyTorch's, on drawn tensors."""
    ndim, number = problem.ndim, getattr(torch, problem.dtype)
    each = problem.out_channels // problem.groups
    x = torch.randn(problem.batch, problem.in_channels, *problem.in_size, device="cuda").to(number)
    w = torch.randn(problem.in_channels, each, *problem.kernel, device="cuda").to(number)
    lists = (problem.stride, problem.padding, problem.output_padding)
    rest: tuple[Any, ...] = (*lists, problem.groups, problem.dilation)
    if problem.channels_last:
        layout = torch.channels_last if ndim == 2 else torch.channels_last_3d
        x, w = (tensor.to(memory_format=layout) for tensor in (x, w))
    if problem.direction == "forward":
        b = torch.randn(problem.out_channels, device="cuda").to(number)
        return (
            lambda: ops.FORWARD[ndim - 1](x, w, b, *rest),
            lambda: autograd.ATEN_CONV[ndim - 1](x, w, b, *rest),
        )
    outputs = (problem.batch, problem.out_channels, *problem.out_size)
    gy = torch.randn(outputs, device="cuda").to(number)
    ours = ops.GRADIENTS["grad_input"]
    return (
        lambda: ours(gy, w, x.shape, *rest),
        lambda: autograd.aten_input_gradient(gy, w, x.shape, *rest),
    )


def measure(problem: Problem, hardware: Hardware, clock: GpuClock) -> dict[str, Any] | None:
    choices = chosen(problem, hardware) if sm90.legality(problem, hardware) is None else []
    if not choices:
        return None
    ours, theirs = calls(problem)
    expected = theirs().float()
    times: dict[tuple[int, ...], list[float]] = {choice.identity: [] for choice in choices}
    for number in range(2):
        for choice in random.Random(number).sample(choices, len(choices)):
            with plans.given(sm90.KERNEL, choice.params):
                error = float((ours().float() - expected).norm() / expected.norm())
                limit = SPLIT_LIMIT if problem.strict else LIMIT[problem.dtype]
                assert error <= limit, (problem, choice.identity, error)
                times[choice.identity] += [clock.milliseconds(lambda: (ours(),)) for _ in range(4)]
    medians = [median(times[choice.identity]) for choice in choices]
    return line_of(problem, choices, medians, hardware)


def line_of(
    problem: Problem, choices: list[Choice], times: list[float], hardware: Hardware
) -> dict[str, Any]:
    rows = [
        row_of(problem, choice.tiling, hardware, ms)
        for choice, ms in zip(choices, times, strict=True)
    ]
    lists = (problem.in_size, problem.kernel, problem.stride, problem.padding)
    more = (problem.output_padding, problem.groups, problem.dilation)
    return {
        "layer": (problem.batch, problem.in_channels, problem.out_channels, *lists, *more),
        "dtype": problem.dtype,
        "direction": problem.direction,
        "channels_last": problem.channels_last,
        **({"split": True} if problem.strict else {}),
        "names": NAMES,
        "identity": IDENTITY,
        "tilings": [choice.identity for choice in choices],
        "rows": rows,
    }


def problems(names: Sequence[str], tf32: bool = True) -> list[Problem]:
    layers = [case.problem(tf32=tf32) for case in CASES if not names or case.name in names]
    if not names:
        layers += [Problem.of(*layer, tf32=tf32) for layer in LAYERS]
    return [
        replace(layer, dtype=dtype, direction=direction, channels_last=last)
        for layer in layers
        for dtype in (("float32", "bfloat16") if tf32 else ("float32",))
        for direction, last in (("grad_input", False), ("forward", False), ("forward", True))
        if layer.ndim > 1 or not last
    ]


if __name__ == "__main__":
    tf32 = "--split" not in sys.argv
    names = [name for name in sys.argv[2:] if name != "--split"]
    torch.backends.cudnn.conv.fp32_precision = "tf32" if tf32 else "ieee"  # type: ignore[attr-defined]
    machine = plans.cuda_hardware(0)
    gpu_clock = GpuClock()
    with gzip.open(sys.argv[1], "wt") as file, torch.no_grad():
        for each_problem in problems(names, tf32):
            line = measure(each_problem, machine, gpu_clock)
            if line is not None:
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
                fastest = min(row[0] for row in line["rows"])
                print(f"{each_problem}: {len(line['rows'])} tilings, fastest {fastest:.3f} ms")
