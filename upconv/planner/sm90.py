"""The Hopper kernel's side of the planner: when it may serve, how it is tiled, what it is told.

The kernel (csrc/cuda/sm90_wgmma_fprop.cuh) multiplies 64-row blocks of weights with a tile of input
pixels in shared memory, at one place of the tile for each tap. This module turns a problem into

    kinds   tap lists: a width phase, and the row phases stacked ("folded") in the 64 rows
    pairs   entries of a tap list: a tap and two 16-byte channel blocks, one WGMMA each
    jobs    what one warpgroup accumulates: up to 4 blocks of 64 rows, each a kind and 64 channels
    tiling  which pixels make a tile, how it lies in shared memory, how deep the rings are

and picks the tiling with the least expected time. `record` writes it all as the integers that
csrc/cuda/sm90_params.h reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from .candidate import Candidate, Refusal
from .lattice import Lattice
from .problem import Hardware, Problem
from .sm90_tiling import (
    MAX_BLOCKS,
    MAX_FOLDS,
    OPERANDS,
    STEP_PAIRS,
    Tiling,
    step_count,
    tilings,
    up,
)

KERNEL = "sm90_wgmma_fprop"

LEAST_CHANNELS = 8


@dataclass(frozen=True)
class Kind:
    """The taps of one width phase and of the row phases folded into a block of 64 rows.

    `taps` maps a shift (rows, columns) to the weight position of each fold, -1 where a fold has no
    tap there.
    """

    first_x: int
    first_y: tuple[int, ...]
    taps: tuple[tuple[tuple[int, int], tuple[int, ...]], ...]


@dataclass(frozen=True)
class Shape:
    """A problem on a lattice: everything that does not depend on the tiling."""

    problem: Problem
    rows: Lattice
    columns: Lattice
    folds: int
    mirrored: bool = False
    """The weight is read with its taps in reverse and its channels exchanged (`mirror`)."""

    @cached_property
    def kinds(self) -> tuple[tuple[Kind, ...], ...]:
        """[fold group][width phase]"""
        groups = [
            range(i, min(i + self.folds, len(self.rows.firsts)))
            for i in range(0, len(self.rows.firsts), self.folds)
        ]
        return tuple(
            tuple(self._kind(group, x) for x in range(len(self.columns.firsts))) for group in groups
        )

    def _kind(self, group: range, x: int) -> Kind:
        width = self.problem.kernel[1]
        taps: dict[tuple[int, int], list[int]] = {}
        for fold, y in enumerate(group):
            for ty, tx in product(self.rows.taps[y], self.columns.taps[x]):
                folds = taps.setdefault((ty.shift, tx.shift), [-1] * self.folds)
                position = ty.k * width + tx.k
                last = self.problem.kernel[0] * width - 1
                folds[fold] = last - position if self.mirrored else position
        first_y = [self.rows.firsts[y] for y in group]
        return Kind(
            self.columns.firsts[x],
            tuple(first_y + [-1] * (self.folds - len(first_y))),
            tuple((shift, tuple(folds)) for shift, folds in sorted(taps.items())),
        )

    @cached_property
    def shifts(self) -> tuple[int, int, int, int]:
        """Least and greatest row shift, least and greatest column shift."""
        every = [shift for group in self.kinds for kind in group for shift, _ in kind.taps]
        ys, xs = [y for y, _ in every] or [0], [x for _, x in every] or [0]
        return min(ys), max(ys), min(xs), max(xs)

    @property
    def weight_strides(self) -> dict[str, int]:
        """From one channel that is read, or written, to the next, in elements of the weight."""
        taps = self.problem.kernel[0] * self.problem.kernel[1]
        if self.mirrored:
            return {"weight_in": taps, "weight_out": self.problem.in_channels * taps}
        return {"weight_in": self.problem.out_channels * taps, "weight_out": taps}

    @property
    def fold_rows(self) -> int:
        return 64 // self.folds

    @property
    def channel_blocks(self) -> int:
        return 1 if self.folds > 1 else -(-self.problem.out_channels // 64)


@dataclass(frozen=True)
class Job:
    kinds: tuple[Kind, ...]
    channels: tuple[int, ...]
    interleave: bool
    columns: int

    @property
    def taps(self) -> int:
        return sum(len(kind.taps) for kind in self.kinds)


def shapes(problem: Problem, mirrored: bool = False) -> list[Shape]:
    """The ways to lay the problem out: folded when few output channels would leave rows empty."""
    columns = Lattice.of(problem, 1, 1)
    result = []
    for folds in (1, 2, 4):
        if folds > 1 and problem.out_channels > 64 // folds:
            continue
        stride = problem.stride[0]
        in_step = 1 if stride >= folds or folds % stride else folds // stride
        rows = Lattice.of(problem, 0, in_step)
        result.append(Shape(problem, rows, columns, folds, mirrored))
    return result


def jobs(shape: Shape, blocks: int) -> list[Job] | None:
    """The jobs of `blocks` row blocks each, or None when the kernel cannot store them.

    Contiguous layout: the width phases of a row go into one job where possible, so that whole
    sectors are stored; phases without taps ride along as bias. Otherwise each block stands alone.
    """
    problem = shape.problem
    span = shape.columns.out_step
    channels = [64 * i for i in range(shape.channel_blocks)]
    residues = len(shape.columns.firsts)
    everything = (1 << residues) - 1
    result: list[Job] = []
    if span > 1 and not problem.channels_last:
        tapped = max(sum(bool(kind.taps) for kind in group) for group in shape.kinds)
        if tapped <= blocks <= residues and span <= (2 if blocks == 2 else 8):
            for group in shape.kinds:
                chosen = sorted(group, key=lambda kind: not kind.taps)[:blocks]
                chosen.sort(key=lambda kind: kind.first_x)
                result += [Job(tuple(chosen), (c,) * blocks, True, everything) for c in channels]
            return result
    if blocks > 2 and not problem.channels_last:
        return None
    for group in shape.kinds:
        singles = [(kind, c) for c in channels for kind in group]
        for i in range(0, len(singles), blocks):
            part = singles[i : i + blocks]
            part += [(replace(part[0][0], taps=()), problem.out_channels)] * (blocks - len(part))
            result.append(Job(tuple(k for k, _ in part), tuple(c for _, c in part), False, 0))
    return result


def legality(problem: Problem, hardware: Hardware) -> str | None:
    """Why the kernel cannot serve, or None."""
    if hardware.kind != "cuda":
        return "needs a CUDA GPU"
    if hardware.capability != (9, 0):
        major, minor = hardware.capability
        return f"needs compute capability 9.0 (Hopper), this GPU has {major}.{minor}"
    if problem.dtype not in OPERANDS:
        return f"has no {problem.dtype} form"
    if problem.dtype == "float32" and not problem.tf32:
        return "computes float32 in TF32, which torch.backends.cudnn.conv.fp32_precision forbids"
    if problem.ndim == 3:
        return "3-D is not covered"
    if problem.ndim == 1 and problem.channels_last:
        return "1-D is covered in the contiguous layout only"
    if problem.groups != 1:
        return f"groups = {problem.groups}: covers groups = 1 only"
    for name, channels in (("in", problem.in_channels), ("out", problem.out_channels)):
        if channels < LEAST_CHANNELS:
            return f"{name}_channels = {channels}: below {LEAST_CHANNELS}, the blocks stay empty"
        vector = 16 // problem.element_bytes
        if problem.channels_last and channels % vector:
            return f"channels_last needs {name}_channels in multiples of {vector}"
    big = any(o >= s for o, s in zip(problem.output_padding, problem.stride, strict=True))
    if problem.channels_last and big:
        # cuDNN does not take these, and PyTorch's other kernel writes the contiguous layout.
        return "output_padding >= stride: PyTorch answers channels_last with another layout"
    if problem.batch == 0 or min(problem.out_size) <= 0:
        return "nothing to compute"
    return None


def flat(problem: Problem) -> Problem:
    """1-D as 2-D with one row."""
    if problem.ndim == 2:
        return problem
    return replace(
        problem,
        in_size=(1, *problem.in_size),
        kernel=(1, *problem.kernel),
        stride=(1, *problem.stride),
        padding=(0, *problem.padding),
        output_padding=(0, *problem.output_padding),
        dilation=(1, *problem.dilation),
    )


def mirror(problem: Problem) -> Problem | str:
    """The forward pass that computes a problem's grad_input, or why there is none.

    With stride 1, `gx[i] = sum of w[k] * gy[i - p + k * d]` is the transposed convolution of gy
    with the taps in reverse and a padding of `d * (K - 1) - p`.
    """
    if max(problem.stride) > 1:
        return f"grad_input with stride {max(problem.stride)}: covers stride 1 only"
    if max(problem.output_padding) > 0:
        return "grad_input with output_padding: not covered"
    padding = tuple(d * (k - 1) - p for _, k, _, p, _, d in problem.dimensions)
    if min(padding) < 0:
        return f"grad_input with padding beyond the kernel's reach: {problem.padding}"
    return replace(
        problem,
        in_channels=problem.out_channels,
        out_channels=problem.in_channels,
        in_size=problem.out_size,
        padding=padding,
        bias=False,
        direction="forward",
    )


def consider(problem: Problem, hardware: Hardware) -> Candidate | Refusal:
    mirrored = problem.direction == "grad_input"
    if mirrored:
        forward = mirror(problem)
        if isinstance(forward, str):
            return Refusal(KERNEL, forward)
        problem = forward
    reason = legality(problem, hardware)
    if reason:
        return Refusal(KERNEL, reason)
    problem = flat(problem)
    best: tuple[Shape, list[Job], Tiling] | None = None
    for shape in shapes(problem, mirrored):
        by_blocks = {blocks: jobs(shape, blocks) for blocks in range(1, MAX_BLOCKS + 1)}
        for tiling in tilings(shape, by_blocks, hardware):
            if best is None or tiling.cycles < best[2].cycles:
                chosen = by_blocks[tiling.blocks]
                assert chosen is not None
                best = (shape, chosen, tiling)
    if best is None:
        return Refusal(KERNEL, "no tile fits: too many taps or phases, or too wide a margin")
    shape, chosen_jobs, tiling = best
    return Candidate(
        KERNEL,
        tiling.microseconds,
        record(shape, chosen_jobs, tiling),
        tiling.notes(shape),
    )


def record(shape: Shape, job_list: list[Job], tiling: Tiling) -> tuple[int, ...]:
    """The plan as integers, in the order of csrc/cuda/sm90_params.h."""
    if not tiling.alternate and len(job_list) % 2:  # the second consumer of the last group idles
        last = job_list[-1]
        empty = tuple(replace(kind, taps=()) for kind in last.kinds)
        idle = (shape.problem.out_channels,) * len(empty)
        job_list = [*job_list, Job(empty, idle, last.interleave, last.columns)]
    kinds: list[Kind] = []
    kind_fields: list[int] = []
    pairs: list[int] = []
    ranges: dict[Kind, tuple[int, int]] = {}
    count = 0
    for kind in dict.fromkeys(kind for job in job_list for kind in job.kinds):
        entries = tiling.pairs(kind.taps, shape.shifts[0], shape.rows.in_step)
        first = count
        for offset, block, taps in entries:
            pairs += [offset, block, *taps, *[-1] * (MAX_FOLDS - len(taps))]
        ranges[kind] = (first, first + len(entries))
        count += up(len(entries), STEP_PAIRS)  # lists begin on whole steps
        pairs += [0, 0, *[-1] * MAX_FOLDS] * (count - ranges[kind][1])
        kinds.append(kind)
        padded = (*kind.first_y, *[-1] * (MAX_FOLDS - len(kind.first_y)))
        kind_fields += [kind.first_x, *padded, *ranges[kind]]
    job_fields: list[int] = []
    weights = 0
    for job in job_list:
        steps = sum(step_count(ranges[kind][1] - ranges[kind][0]) for kind in job.kinds)
        indices = [kinds.index(kind) for kind in job.kinds]
        job_fields += indices + [0] * (MAX_BLOCKS - len(indices))
        job_fields += [*job.channels, *[shape.problem.out_channels] * (MAX_BLOCKS - len(indices))]
        job_fields += [weights, steps, int(job.interleave), job.columns]
        weights += steps * tiling.slices
    fields = tiling.fields(shape)
    fields.update(kinds=len(kinds), pairs=count, jobs=len(job_list), **shape.weight_strides)
    return (*fields.values(), *kind_fields, *pairs, *job_fields)
