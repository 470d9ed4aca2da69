"""Measures tilings of the mma.sync kernel on this GPU, for `benchmarks/fit_mma.py`.

    python benchmarks/measure_mma.py OUT.jsonl [CASE:TYPE[:DIRECTION] ...]

TYPE is tf32, bfloat16 or strict, DIRECTION forward (the default) or grad_input. Every tiling is
compared with float64 before it is timed. Medians, L2 flushed before each call.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

import upconv
from upconv import ops, plans
from upconv.cases import CASES
from upconv.planner import Hardware, Problem, mma
from upconv.planner.mma_tiling import Tiling, fits, resident_warps, tilings
from upconv.stopwatch import GpuClock

PRECISION = {
    "tf32": ("float32", True),
    "bfloat16": ("bfloat16", True),
    "strict": ("float32", False),
}
LIMIT = {"tf32": 5e-4, "bfloat16": 4e-3, "strict": 1e-6}
DEFAULT = [f"{case}_3d:tf32" for case in ("kb58", "kb61", "kb70", "kb72", "kb77", "nnunet")]
DEFAULT += ["kb61_3d:bfloat16", "kb75:tf32", "kb69:tf32", "kb69:strict", "pose_head:strict"]
CALLS = (upconv.conv_transpose1d, upconv.conv_transpose2d, upconv.conv_transpose3d)


def chosen(problem: Problem, hardware: Hardware, each: int = 4, most: int = 40) -> list[Tiling]:
    """The best tilings of every arrangement of warps, by the planner's own estimate."""
    found = tilings(mma.works(problem), hardware)
    every = sorted(found, key=lambda tiling: tiling.cycles)
    seen: dict[tuple[int, ...], int] = {}
    result = []
    for tiling in every:
        step = tiling.work.lattices[2].in_step
        family = (
            tiling.warp_pixels,
            tiling.warps_m,
            tiling.layout.warps_n,
            step,
            tiling.layout.chunk,
        )
        if seen.get(family, 0) < each and fits(tiling, hardware):
            seen[family] = seen.get(family, 0) + 1
            result.append(tiling)
    return list(islice(result, most))


def row_of(tiling: Tiling, hardware: Hardware) -> dict[str, Any]:
    warps = tiling.warps_m * tiling.layout.warps_n
    shared = tiling.shared()["shared_bytes"]
    room = (hardware.shared_memory + 1024) // (shared + 1024)
    blocks = tiling.work.groups * tiling.layout.chunks * len(tiling.layout.kinds)
    for count in tiling.tiles:
        blocks *= count
    share = -(-blocks // hardware.multiprocessors)
    most = resident_warps(tiling.warp_pixels)
    return {
        "tile": tiling.box.size,
        "warps": [tiling.warps_m, tiling.layout.warps_n],
        "fold": tiling.work.lattices[2].in_step,
        "chunk": tiling.layout.chunk,
        "slice_blocks": tiling.slice_blocks,
        "stage_bytes": tiling.stage_bytes,
        "warp_pixels": tiling.warp_pixels,
        "resident_warps": min(max(min(room, most // warps), 1), share) * warps,
        "blocks": blocks,
        "work": {name: round(value, 3) for name, value in vars(tiling.block).items()},
    }


def milliseconds(clock: GpuClock, call: Callable[[], torch.Tensor]) -> float:
    return median(clock.milliseconds(lambda: (call(),)) for _ in range(6))


def operands(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """What is read, and the weight."""
    dtype = getattr(torch, problem.dtype)
    back = problem.direction == "grad_input"
    channels, size = (
        (problem.out_channels, problem.out_size) if back else (problem.in_channels, problem.in_size)
    )
    x = torch.randn(problem.batch, channels, *size, device="cuda")
    each = problem.out_channels // problem.groups
    w = torch.randn(problem.in_channels, each, *problem.kernel, device="cuda")
    return x.to(dtype), w.to(dtype)


def convolve(problem: Problem, x: torch.Tensor, w: torch.Tensor, ours: bool) -> torch.Tensor:
    steps = (problem.stride, problem.padding, problem.output_padding)
    rest = (*steps, problem.groups, problem.dilation)
    if problem.direction == "grad_input":
        size = (x.shape[0], problem.in_channels, *problem.in_size)
        if ours:
            return ops.GRADIENTS["grad_input"](x, w, size, *rest)  # type: ignore[no-any-return]
        return ops._aten_gradient("grad_input", x, w, size, *rest)
    native = getattr(torch.nn.functional, f"conv_transpose{problem.ndim}d")
    return (CALLS[problem.ndim - 1] if ours else native)(x, w, None, *rest)  # type: ignore[no-any-return]


def measure(clock: GpuClock, out: Path, name: str, kind: str, direction: str = "forward") -> None:
    hardware = plans.cuda_hardware(0)
    dtype, tf32 = PRECISION[kind]
    torch.backends.cudnn.conv.fp32_precision = "tf32" if tf32 else "ieee"  # type: ignore[attr-defined]
    case = next(case for case in CASES if case.name == name)
    problem = replace(case.problem(dtype=dtype, tf32=tf32), direction=direction)
    x, w = operands(problem)
    wanted = convolve(problem, x[-1:].double(), w.double(), ours=False)
    ours = lambda: convolve(problem, x, w, ours=True)  # noqa: E731
    now = milliseconds(clock, ours)
    print(f"{name} {kind} {direction} {now:.3f} ms by the planner's choice")
    for tiling in chosen(problem, hardware):
        with plans.given(mma.KERNEL, mma.record(tiling.work, tiling)):
            error = float((ours()[-1:].double() - wanted).norm() / wanted.norm())
            if not error <= LIMIT[kind]:
                print("wrong by", error, name, kind, direction, tiling.notes())
                continue
            ms = milliseconds(clock, ours)
        row = {"case": name, "dtype": dtype, "tf32": tf32, "direction": direction}
        row |= {"ms": round(ms, 4), "chosen_ms": round(now, 4)}
        with out.open("a") as file:
            file.write(json.dumps({**row, **row_of(tiling, hardware)}) + "\n")
        expected = tiling.cycles / 1.7e6
        print(f"{name} {kind} {ms:.3f} ms, expected {expected:.3f}: {tiling.notes()[0]}")


if __name__ == "__main__":
    with torch.no_grad():
        for each_case in sys.argv[2:] or DEFAULT:
            measure(GpuClock(), Path(sys.argv[1]), *each_case.split(":"))
