"""Measures tilings of the mma.sync kernel on this GPU, for `benchmarks/fit_mma.py`.

    python benchmarks/measure_mma.py OUT.jsonl [CASE:TYPE ...]     TYPE: tf32, bfloat16, strict

Every tiling is compared with float64 before it is timed. Medians, L2 flushed before each call.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import upconv
from upconv import plans
from upconv.cases import CASES
from upconv.planner import Hardware, Problem, mma
from upconv.planner.mma_tiling import MAX_WARPS, Tiling, fits, tilings

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
    every = sorted(tilings(mma.forward_works(problem), hardware), key=lambda tiling: tiling.cycles)
    seen: dict[tuple[int, ...], int] = {}
    result = []
    for tiling in every:
        step = tiling.work.lattices[2].in_step
        family = (tiling.warps_m, tiling.layout.warps_n, step, tiling.layout.chunk)
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
    return {
        "tile": tiling.box.size,
        "warps": [tiling.warps_m, tiling.layout.warps_n],
        "fold": tiling.work.lattices[2].in_step,
        "chunk": tiling.layout.chunk,
        "slice_blocks": tiling.slice_blocks,
        "stage_bytes": tiling.stage_bytes,
        "resident_warps": min(max(min(room, MAX_WARPS // warps), 1), share) * warps,
        "blocks": blocks,
        "work": {name: round(value, 3) for name, value in vars(tiling.block).items()},
    }


def milliseconds(call: Any, repeat: int = 7) -> float:
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeat + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[1:])[repeat // 2]


def measure(name: str, kind: str, hardware: Hardware, out: Path) -> None:
    dtype, tf32 = PRECISION[kind]
    torch.backends.cudnn.conv.fp32_precision = "tf32" if tf32 else "ieee"  # type: ignore[attr-defined]
    case = next(case for case in CASES if case.name == name)
    problem = case.problem(dtype=dtype, tf32=tf32)
    number = getattr(torch, dtype)
    x = torch.randn(problem.batch, problem.in_channels, *problem.in_size, device="cuda").to(number)
    each = problem.out_channels // problem.groups
    w = torch.randn(problem.in_channels, each, *problem.kernel, device="cuda").to(number)
    rest = (problem.stride, problem.padding, problem.output_padding, problem.groups)
    native = getattr(torch.nn.functional, f"conv_transpose{problem.ndim}d")
    wanted = native(x[-1:].double(), w.double(), None, *rest, problem.dilation)
    for tiling in chosen(problem, hardware):
        record = [plans.KERNEL_IDS[mma.KERNEL], *mma.record(tiling.work, tiling)]
        plans.record = lambda key, record=record: record  # type: ignore[misc]
        plans.clear()
        y = CALLS[problem.ndim - 1](x, w, None, *rest, problem.dilation)
        error = float((y[-1:].double() - wanted).norm() / wanted.norm())
        assert error <= LIMIT[kind], (name, kind, error, tiling.notes())
        ms = milliseconds(lambda: CALLS[problem.ndim - 1](x, w, None, *rest, problem.dilation))
        row = {"case": name, "dtype": dtype, "tf32": tf32, "ms": round(ms, 4)}
        with out.open("a") as file:
            file.write(json.dumps({**row, **row_of(tiling, hardware)}) + "\n")
        print(
            f"{name} {kind} {ms:.3f} ms, expected {tiling.cycles / 1.7e6:.3f}: {tiling.notes()[0]}"
        )


if __name__ == "__main__":
    machine = plans.cuda_hardware(0)
    with torch.no_grad():
        for each_case in sys.argv[2:] or DEFAULT:
            measure(*each_case.split(":"), machine, Path(sys.argv[1]))
