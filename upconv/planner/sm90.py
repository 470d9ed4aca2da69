"""The Hopper kernel's side of the planner: when it may serve, how it is tiled, what it is told.

The kernel (csrc/cuda/sm90_wgmma_fprop.cuh) multiplies 64-row blocks of weights with a tile of input
pixels in shared memory, at one place of the tile for each tap. The planner turns a task into

    kinds   tap lists by plane (sm90_task.py): a depth phase, and row and width phases folded
    pairs   entries of a tap list: a tap and two 16-byte channel blocks, one WGMMA each (three where
            float32 must not be rounded)
    jobs    what one warpgroup accumulates: blocks of 64 rows, each a kind and 64 channels
    visits  the planes that a unit of work loads, with the lists of its one or two jobs there
    tiling  which pixels make a tile (sm90_area.py), how it lies in shared memory, how deep the
            rings are (sm90_tiling.py, sm90_weights.py), what it costs (sm90_cost.py), and which
            is the fastest (sm90_search.py)

and picks the tiling with the least expected time. `record` writes it all as the integers that
csrc/cuda/sm90_params.h reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from .candidate import Candidate, Refusal
from .operands import OPERANDS
from .problem import Hardware, Problem
from .sm90_load import MAX_BLOCKS, step_count, visits
from .sm90_search import Opening, fastest, openings
from .sm90_task import (
    MAX_KINDS,
    MAX_WIDTH_PHASES,
    WARP_ROWS,
    Kind,
    Shape,
    Task,
    forward_task,
    input_gradient_task,
    shapes,
)
from .sm90_tiling import BLOCKS, Tiling
from .sm90_weights import STEP_PAIRS

KERNEL = "sm90_wgmma_fprop"

LEAST_CHANNELS = 8
MOST_SPLIT_TERMS = 1 << 17
"""Of one output, where float32 is split: twice as many of the largest numbers, all of one sign,
would leave the range of the sums (kSumScale in csrc/cuda/sm90_split.cuh)."""


@dataclass(frozen=True)
class Job:
    kinds: tuple[Kind, ...]
    channels: tuple[int, ...]
    together: bool
    """The blocks are the width phases of the same rows, stored together."""
    lines: bool
    """Stored by lines, not by one of the faster ways."""
    paired: bool = False
    """It and the next one, or the one before, are the two width phases of the same rows."""


def jobs(shape: Shape, blocks: int) -> list[Job] | None:
    """The jobs of `blocks` row blocks each, or None when the kernel cannot store them.

    Contiguous layout: the width phases of a row go into one job where possible, so that whole
    sectors are stored; phases without taps ride along as bias. Otherwise each block stands alone;
    where these are the two width phases of stride 2, the consumers have one each and store both.
    """
    task = shape.task
    span, phases = shape.columns.out_step, len(shape.width_phases)
    channels = [shape.fold_rows * i for i in range(shape.channel_blocks)]
    warps_apart = shape.fold_rows % WARP_ROWS == 0 and shape.width_folds == 1
    lines = shape.by_lines
    together = not task.channels_last and (span > 1 or lines) and 0 < phases <= MAX_WIDTH_PHASES
    fits = not lines or shape.line_columns > 0
    if together and fits and blocks == -(-phases // shape.width_folds):
        return [
            Job(group, (c,) * blocks, True, lines)
            for group in shape.blocks(together=True)
            for c in channels
        ]
    if not warps_apart or (blocks > 2 and not task.channels_last):
        return None
    if shape.kind_count(together=False) > MAX_KINDS:
        return None
    paired = together and blocks == 1 and phases == span == 2 and not task.split
    result: list[Job] = []
    for group in shape.blocks(together=False):
        singles = [(kind, c) for c in channels for kind in group]
        for i in range(0, len(singles), blocks):
            part = singles[i : i + blocks]
            part += [(replace(part[0][0], taps=()), task.out_channels)] * (blocks - len(part))
            kinds, firsts = tuple(k for k, _ in part), tuple(c for _, c in part)
            result.append(Job(kinds, firsts, False, False, paired))
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
    summed = "out" if problem.direction == "grad_input" else "in"
    for name, channels in (("in", problem.in_channels), ("out", problem.out_channels)):
        channels //= problem.groups
        of_group = " of a group" if problem.groups > 1 else ""
        if channels < LEAST_CHANNELS and name == summed:
            return (
                f"{name}_channels{of_group} = {channels}: "
                f"below {LEAST_CHANNELS}, the blocks stay empty"
            )
        terms = channels * prod(problem.kernel)
        if problem.strict and name == summed and terms > MOST_SPLIT_TERMS:
            return f"{terms} products for each output: too many for float32 that is split"
        vector = 16 // problem.element_bytes
        if problem.channels_last and channels % vector:
            return f"channels_last needs {name}_channels{of_group} in multiples of {vector}"
    big = any(o >= s for o, s in zip(problem.output_padding, problem.stride, strict=True))
    if problem.channels_last and big:
        # cuDNN does not take these, and PyTorch's other kernel writes the contiguous layout.
        return "output_padding >= stride: PyTorch answers channels_last with another layout"
    if problem.batch == 0 or min(problem.out_size) <= 0:
        return "nothing to compute"
    if problem.weight_elements // problem.groups >= 2**31:
        return "a group's weight has 2^31 elements or more"
    return None


def rounding_legality(problem: Problem, hardware: Hardware) -> str | None:
    """The same for kernels that have no form for float32 that must not be rounded."""
    reason = legality(problem, hardware)
    if reason is None and problem.strict:
        return "rounds float32 to TF32, which torch.backends.cudnn.conv.fp32_precision forbids"
    return reason


def consider(problem: Problem, hardware: Hardware) -> Candidate | Refusal:
    reason = legality(problem, hardware)
    if reason:
        return Refusal(KERNEL, reason)
    task_of = input_gradient_task if problem.direction == "grad_input" else forward_task
    return consider_task(task_of(problem), hardware)


def consider_task(task: Task, hardware: Hardware) -> Candidate | Refusal:
    """The fastest plan for a task that `legality` lets through."""
    every: list[Opening] = []
    for shape in shapes(task):
        by_blocks = {blocks: jobs(shape, blocks) for blocks in BLOCKS}
        every += openings(shape, by_blocks, hardware)
    best = fastest(every)
    if best is None:
        return Refusal(KERNEL, "no tile fits: too many taps or phases, or too wide a margin")
    (shape, _, chosen_jobs, *_), tiling = best
    planes = len({plane for job in chosen_jobs for kind in job.kinds for plane in kind.planes})
    return Candidate(
        KERNEL,
        tiling.microseconds,
        record(shape, chosen_jobs, tiling),
        tiling.notes(shape, planes),
    )


class Lists:
    """The kinds of a plan and their pairs, numbered as the kernel finds them."""

    def __init__(self, shape: Shape, job_list: list[Job], tiling: Tiling) -> None:
        self.index: dict[Kind, int] = {}
        self.kinds: list[int] = []
        self.pairs: list[int] = []
        self.ranges: dict[tuple[Kind, tuple[int, int, int]], tuple[int, int]] = {}
        self.count = 0
        self.sum_pairs = tiling.sum_pairs
        for kind in dict.fromkeys(kind for job in job_list for kind in job.kinds):
            self.index[kind] = len(self.index)
            self.kinds += [kind.first_z, kind.row, kind.first_x[0]]
            for plane, taps in kind.taps:
                entries = tiling.pairs(plane, taps, shape.steps)
                self.ranges[kind, plane] = self.count, len(entries)
                self.pairs += [value for entry in entries for value in entry]
                empty = -len(entries) % STEP_PAIRS  # lists begin on whole steps
                self.pairs += [0] * (5 * empty)
                self.count += len(entries) + empty

    def visit(self, plane: tuple[int, int, int], job: Job | None) -> tuple[list[int], int]:
        """First pair and number of pairs of each row block of a job in a plane, and its steps."""
        ranges = [self.ranges.get((kind, plane), (0, 0)) for kind in job.kinds] if job else []
        ranges += [(0, 0)] * (MAX_BLOCKS - len(ranges))
        flat = [value for each in ranges for value in each]
        return flat, sum(step_count(count, self.sum_pairs) for _, count in ranges)


def record(shape: Shape, job_list: list[Job], tiling: Tiling) -> tuple[int, ...]:
    """The plan as integers, in the order of csrc/cuda/sm90_params.h."""
    nowhere = shape.task.out_channels  # past the end: nothing is stored
    if not tiling.alternate and len(job_list) % 2:  # the second consumer of the last group idles
        last = job_list[-1]
        empty = tuple(replace(kind, taps=()) for kind in last.kinds)
        job_list = [*job_list, replace(last, kinds=empty, channels=(nowhere,) * len(empty))]
    lists = Lists(shape, job_list, tiling)
    visit_fields: list[int] = []
    job_fields: list[int] = []
    known: dict[tuple[tuple[Kind, ...], ...], int] = {}
    visit_count = weights = 0
    for group, planes in visits(job_list, tiling.alternate):
        members: list[Job | None] = [*group, *[None] * (2 - len(group))]
        tables = [[lists.visit(plane, job) for job in members] for plane in planes]
        key = tuple(job.kinds for job in group)
        if key not in known:
            known[key] = visit_count
            visit_count += len(planes)
            for plane, table in zip(planes, tables, strict=True):
                both = [steps for _, steps in table]
                visit_fields += [*table[0][0], *table[1][0], *both, *tiling.plane(plane)]
        for c, job in enumerate(group):
            steps = tiling.slices * sum(table[c][1] for table in tables)
            indices = [lists.index[kind] for kind in job.kinds]
            unused = MAX_BLOCKS - len(indices)
            job_fields += [*indices, *[0] * unused, *job.channels, *[nowhere] * unused]
            job_fields += [weights, steps, known[key], len(planes)]
            weights += steps
    fields = tiling.fields(shape)
    widths = shape.width_phases if job_list[0].together else ()
    fields.update(
        width_phases=len(widths),
        line_pitch=shape.line_pitch if job_list[0].lines else 0,
        line_columns=shape.line_columns if job_list[0].lines else 0,
        shifted=int(job_list[0].lines and tiling.shifted(shape)),
        kinds=len(lists.index),
        pairs=lists.count,
        visits=visit_count,
        jobs=len(job_list),
        weight_blocks=weights,
    )
    phases = phase_tables(shape, widths)
    return (*fields.values(), *phases, *lists.kinds, *lists.pairs, *visit_fields, *job_fields)


def phase_tables(shape: Shape, widths: tuple[int, ...]) -> list[int]:
    """Where the taps of a phase lie, for each dimension, and where row and width phases begin."""
    axes = zip(shape.task.kernel, shape.task.lattices, strict=True)
    result = [value for size, lattice in axes for value in (size, *lattice.rule)]
    result += [shape.rows.firsts[phase] for phase in shape.row_phases]
    result += [shape.columns.firsts[phase] for phase in widths]
    return result
