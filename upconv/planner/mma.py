"""The mma.sync kernel's side of the planner: when it may serve, how it is tiled, what it is told.

The kernel (csrc/cuda/mma_fprop.cuh) multiplies a box of input pixels, at one shift after the other,
with the weights of up to 32 column tiles of 8; a column is a phase and an output channel.
mma_columns.py turns lattices into

    kinds   the (depth, height) phases that one block computes, each with all its width phases
    steps   one product each: two 16-byte channel blocks at a shift, and the column tiles that have
            a tap there
    stages  runs of steps whose weights travel together

mma_tiling.py chooses the box and the warps; `record` writes it all as the integers that
csrc/cuda/mma_params.h reads.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd, prod

from .candidate import Candidate, Refusal
from .lattice import Lattice
from .legality import first_refusal
from .mma_columns import Work, stages_of, uniform
from .mma_tiling import Tiling, best_tiling
from .operands import OPERANDS, SPLIT
from .problem import Hardware, Problem

KERNEL = "mma_fprop"

LEAST_CHANNELS = 4
FOLDS = (1, 2, 4)
"""Neighbouring outputs of a row that may count as phases, so that few channels fill the columns."""


MOST_STRICT_PRODUCTS = 2048
"""Of strict float32: 1024 left an error of 0.7 times PyTorch's (unet_up1), 3360 one of 2.7 times
(kb58_3d)."""


def legality(problem: Problem, hardware: Hardware) -> str | None:
    """Why the kernel cannot serve, or None."""
    reason = first_refusal(problem, hardware, OPERANDS)
    if reason:
        return reason
    for name, channels in (("in", problem.in_channels), ("out", problem.out_channels)):
        each = channels // problem.groups
        if each < LEAST_CHANNELS:
            return f"{each} {name}_channels a group: below {LEAST_CHANNELS}, the tiles stay empty"
    products = most_products(problem)
    if problem.strict and products > MOST_STRICT_PRODUCTS:
        return (
            f"float32 without TF32, {products} products an output: above {MOST_STRICT_PRODUCTS} the"
            " tensor cores' truncated sums cost more than twice PyTorch's error"
        )
    if max(prod(problem.in_size), prod(problem.out_size)) >= 2**31:
        return "an image of 2^31 pixels or more"
    if prod(problem.kernel) > 2**15:
        return f"{prod(problem.kernel)} taps: weight positions are 16-bit numbers"
    if (
        problem.in_channels * problem.out_channels // problem.groups**2 * prod(problem.kernel)
        >= 2**31
    ):
        return "a group's weight has 2^31 elements or more"
    return None


def most_products(problem: Problem) -> int:
    """Products that are summed up for one output, of the phase that has most."""
    if problem.direction == "grad_input":
        return problem.out_channels // problem.groups * prod(problem.kernel)
    dimensions = zip(problem.kernel, problem.stride, problem.dilation, strict=True)
    taps = prod(-(-k // (s // gcd(s, d))) for k, s, d in dimensions)
    return problem.in_channels // problem.groups * taps


def forward_work(problem: Problem) -> Work:
    """Of a problem of three dimensions."""
    in_channels = problem.in_channels // problem.groups
    out_channels = problem.out_channels // problem.groups
    taps = prod(problem.kernel)
    return Work(
        lattices=(Lattice.of(problem, 0), Lattice.of(problem, 1), Lattice.of(problem, 2)),
        in_size=(problem.in_size[0], problem.in_size[1], problem.in_size[2]),
        kernel=(problem.kernel[0], problem.kernel[1], problem.kernel[2]),
        batch=problem.batch,
        groups=problem.groups,
        in_channels=in_channels,
        out_channels=out_channels,
        weight_in=out_channels * taps,
        weight_out=taps,
        weight_group=in_channels * out_channels * taps,
        operand=SPLIT if problem.strict else OPERANDS[problem.dtype],
        element_bytes=problem.element_bytes,
    )


def input_gradient_work(problem: Problem) -> Work:
    """Reads grad_output, writes grad_input, with the same weight."""
    forward = forward_work(problem)
    depth, rows, columns = (Lattice.of_input_gradient(problem, i) for i in range(3))
    return replace(
        forward,
        lattices=(depth, rows, columns),
        in_size=(problem.out_size[0], problem.out_size[1], problem.out_size[2]),
        in_channels=forward.out_channels,
        out_channels=forward.in_channels,
        weight_in=forward.weight_out,
        weight_out=forward.weight_in,
    )


def works(problem: Problem) -> list[Work]:
    """What is to be computed, with one, two or four neighbours of a row folded into phases."""
    problem = problem.in_three()
    back = problem.direction == "grad_input"
    work = input_gradient_work(problem) if back else forward_work(problem)
    depth, rows, columns = work.lattices
    return [
        replace(work, lattices=(depth, rows, columns.stacked(fold)))
        for fold in FOLDS
        if fold == 1
        or (work.out_channels * fold * columns.out_step <= 128 and problem.in_size[2] >= 16)
    ]


def consider(problem: Problem, hardware: Hardware) -> Candidate | Refusal:
    reason = legality(problem, hardware)
    if reason:
        return Refusal(KERNEL, reason)
    best = best_tiling(works(problem), hardware)
    if best is None:
        return Refusal(KERNEL, "no tile fits: too many taps or phases, or too wide a margin")
    return Candidate(KERNEL, best.microseconds, record(best.work, best), best.notes())


def record(work: Work, tiling: Tiling) -> tuple[int, ...]:
    """The plan as integers, in the order of csrc/cuda/mma_params.h."""
    layout = tiling.layout
    kind_fields: list[int] = []
    row_fields: list[int] = []
    phase_fields: list[int] = []
    step_fields: list[int] = []
    stage_fields: list[int] = []
    tap_fields: list[int] = []
    rows = phases = steps = stages = weights = 0
    units = work.groups * layout.chunks * tiling.slices
    lattice_z, lattice_y, lattice_x = work.lattices
    row_size = layout.chunk * tiling.channel_pitch
    bare = len(work.columns) < len(lattice_x.firsts)
    for kind, kind_steps in zip(layout.kinds, layout.steps(tiling.slice_blocks), strict=True):
        for index, (z, y) in enumerate(kind.rows):
            base = index * row_size if kind.phases else -1
            row_fields += [lattice_z.firsts[z], lattice_y.firsts[y], base]
        phase_fields += [row * row_size + lattice_x.firsts[x] for row, x in kind.phases]
        first = 0
        for (shift0, block0, shift1, block1), tiles in kind_steps:
            offsets = [
                tiling.offset(kind.taps[shift][0], max(block, 0))
                for shift, block in ((shift0, block0), (shift1, block1))
            ]
            step_fields += [*offsets, tiles, shift0, shift1, block0, block1, first]
            first += tiles.bit_count()
        masks = [tiles for _, tiles in kind_steps]
        cuts = stages_of(work, masks, tiling.stage_bytes)
        vectors = work.tile_bytes // 16
        for begin, end, before, count in cuts:
            stage_fields += [before * vectors, count * vectors, steps + begin, steps + end]
        taps = len(tap_fields)
        tap_fields += [position for _, positions in kind.taps for position in positions]
        kind_fields += [
            *(rows, rows + len(kind.rows), phases, phases + len(kind.phases)),
            *(steps, steps + len(kind_steps), stages, stages + len(cuts)),
            *(int(uniform(work, masks, tiling.stage_bytes)), taps),
            *(int(bool(kind.phases) and bare), first, weights),
        ]
        rows += len(kind.rows)
        phases += len(kind.phases)
        steps += len(kind_steps)
        stages += len(cuts)
        weights += units * first
    fields = tiling.fields()
    fields.update(kinds=len(layout.kinds), rows=rows, phases=phases)
    fields.update(steps=steps, stages=stages, taps=len(tap_fields))
    tables = kind_fields + row_fields + phase_fields + step_fields + stage_fields + tap_fields
    return (*fields.values(), *tables)
