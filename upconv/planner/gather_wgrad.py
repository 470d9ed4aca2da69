"""The mma.sync kernel for the weight's gradient: when it may serve, how it is divided, its cost.

csrc/cuda/gather_wgrad.cuh tells the idea and the two forms of a product. This module picks the
form, the tile of a warp, how many warps lie along each side, and how much a unit holds, by the
least expected time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from . import gather
from .candidate import Candidate, Refusal
from .gather import Box, Job, TapClass
from .operands import OPERANDS, SPLIT
from .problem import Hardware, Problem, three

KERNEL = "gather_wgrad"

TILES = ((1, 1), (1, 3), (3, 1), (2, 4), (4, 3), (5, 3), (2, 7), (3, 7))
"""Rows in 16s and columns in 8s of a warp. The kernel is compiled for these."""
WARPS = ((1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (1, 4), (4, 1))
"""Warps along the rows and the columns; others divide the pixels."""
ROWS = (1, 2, 4, 8, 16, 32)
COLUMNS = (32, 64, 128, 256)
UNIT_PIXELS = (128, 1024)
STAGE_BYTES = 56 * 1024
WORKSPACE_BYTES = 32 << 20

LAUNCH_MICROSECONDS = 15.0
COPY = 12.0
ROW_COPY = 33.0
"""Instructions of a warp for one copy of all its lanes, and for each row that these are of."""
UNIT_INSTRUCTIONS = 165.0
ROW_INSTRUCTIONS = 11.0
"""Of a warp for each row of a unit, beside its products."""
UNIT_CYCLES = 1630.0
"""Of a unit that nothing hides: the barrier, and what a warp waits for its first operands."""
SPLIT_INSTRUCTIONS, CUT, SPLIT_PRODUCTS = 7.0, 2.0, 4.6
"""Where float32 must not be rounded: instructions for three products and their addition, those that
cut a number in two beside what rounding takes, and cycles of a multiprocessor for the products."""
LONE_WARP = 2.1
"""How many times its share of the multiprocessor's cycles a warp takes at the least."""
ISSUE = 0.62
"""Share of the issue slots that are used."""
STAGED_BYTES = 64.0
"""A cycle and multiprocessor, from the second-level cache."""
UNHIDDEN = 0.07
DRAM_SHARE = 1.0
"""Of the memory's rate."""
WORKSPACE_TERABYTES = 1.5
ADDING_ROWS, ADD_NANOSECONDS = 16, 0.24
"""Rows of threads that add up the blocks of a job, at most, and what each weight takes with so
many: 0.22 to 0.29 over 8 layers of 0.5 to 3 million weights. With fewer rows a block has more
weights."""

# Fitted to 480 runs of 20 layers on an H200, with a standard deviation of 11 %; of the divisions
# that were measured of a layer, the rule picks one that takes 4 % more than the best, in
# geometric mean (benchmarks/fit_gather.py).


@dataclass(frozen=True)
class Shape:
    """A form of the product, a tile, and what of the weight a block has."""

    problem: Problem
    by_input: bool
    tile: tuple[int, int]
    warps: tuple[int, int]
    taps_z: int
    taps_y: int
    """By rows of the input: taps of a job along depth and height."""
    tap_block: int
    out_block: int
    in_block: int

    @cached_property
    def classes(self) -> tuple[list[TapClass], list[TapClass]]:
        return classes_of(self.problem)

    @cached_property
    def parts(self) -> int:
        """Blocks' parts of the weight for each job."""
        problem = self.problem
        channels_in = problem.in_channels // problem.groups
        channels_out = problem.out_channels // problem.groups
        return (
            problem.groups
            * -(-channels_out // self.out_block)
            * -(-channels_in // self.in_block)
            * -(-problem.kernel[-1] // self.tap_block)
        )

    @property
    def large(self) -> bool:
        """A tile that takes 168 registers, for 4 warps a block."""
        return prod(self.tile) > 16

    @property
    def sums(self) -> int:
        return prod(self.tile) * prod(self.warps) * 128


def classes_of(problem: Problem) -> tuple[list[TapClass], list[TapClass]]:
    """Of depth and height."""
    each = [
        gather.tap_classes(*dimension)
        for dimension in zip(
            three(problem.out_size, 1)[:2],
            three(problem.kernel, 1)[:2],
            three(problem.stride, 1)[:2],
            three(problem.padding, 0)[:2],
            three(problem.dilation, 1)[:2],
            strict=True,
        )
    ]
    return each[0], each[1]


@dataclass(frozen=True)
class Division:
    """A way to divide the work."""

    shape: Shape
    warps_k: int
    rows: int
    columns: int
    hardware: Hardware

    @property
    def problem(self) -> Problem:
        return self.shape.problem

    @property
    def threads(self) -> int:
        return 32 * prod(self.shape.warps) * self.warps_k

    # --- boxes

    @cached_property
    def gy_box(self) -> Box:
        if self.shape.by_input:
            return gather.rows_by_input(self.problem, self.rows, self.shape.taps_y)
        return Box(self.rows, 0, three(self.problem.stride, 1)[1], 0, 1)

    @cached_property
    def x_box(self) -> Box:
        if self.shape.by_input:
            return Box(self.rows, 0, 1, 0, 1)
        deep, high = self.shape.classes
        apart = high[0].apart
        more = (max(c.taps for c in high) - 1) * apart
        return Box(self.rows + more, -deep[0].apart, 1, apart, 1)

    @property
    def gy_lines(self) -> int:
        planes = self.shape.taps_z if self.shape.by_input else 1
        return self.shape.out_block * planes * self.gy_box.rows

    @property
    def x_lines(self) -> int:
        planes = 1 if self.shape.by_input else max(c.taps for c in self.shape.classes[0])
        return self.shape.in_block * planes * self.x_box.rows

    @cached_property
    def gy_pitch(self) -> int:
        return gather.output_pitch(self.columns, self.problem, self.shape.tap_block)

    @cached_property
    def x_pitch(self) -> int:
        return gather.input_pitch(self.columns, self.problem.element_bytes)

    @property
    def gy_bytes(self) -> int:
        return -(-self.gy_lines * self.gy_pitch * self.problem.element_bytes // 128) * 128

    @property
    def x_bytes(self) -> int:
        return -(-self.x_lines * self.x_pitch * self.problem.element_bytes // 128) * 128

    @property
    def table_bytes(self) -> int:
        return -(-(self.gy_lines + self.x_lines) * 8 // 128) * 128

    @cached_property
    def shared_bytes(self) -> int:
        boxes = self.table_bytes + 2 * (self.gy_bytes + self.x_bytes)
        if self.problem.strict:  # and each thread's sums of earlier units
            boxes += self.threads * prod(self.shape.tile) * 16
        return max(boxes, self.shape.sums * 4)

    # --- jobs

    def units(self, count_z: int, count_y: int) -> int:
        across = -(-self.problem.in_size[-1] // self.columns)
        return self.problem.batch * count_z * -(-count_y // self.rows) * across

    @cached_property
    def open_jobs(self) -> tuple[Job, ...]:
        """The jobs before blocks are given to them."""
        return tuple(self._jobs_by_input() if self.shape.by_input else self._jobs_by_output())

    def _jobs_by_input(self) -> Iterator[Job]:
        problem, shape = self.problem, self.shape
        kernel, padding = three(problem.kernel, 1), three(problem.padding, 0)
        dilation, (deep, high, _) = three(problem.dilation, 1), three(problem.in_size, 1)
        units = self.units(deep, high)
        for z in range(0, kernel[0], shape.taps_z):
            for y in range(0, kernel[1], shape.taps_y):
                taps = min(shape.taps_z, kernel[0] - z), min(shape.taps_y, kernel[1] - y)
                outputs = z * dilation[0] - padding[0], y * dilation[1] - padding[1]
                yield Job(0, 1, z, taps[0], y, taps[1], *outputs, 0, 0, deep, high, units)

    def _jobs_by_output(self) -> Iterator[Job]:
        for z, y in product(*self.shape.classes):
            units = self.units(z.count, y.count)
            inputs = z.shift, y.shift - (y.taps - 1) * y.apart
            counts = max(z.count, 1), max(y.count, 1)
            firsts = z.first, y.first
            yield Job(0, 1, z.tap, z.taps, y.tap, y.taps, *firsts, *inputs, *counts, units)

    @cached_property
    def together(self) -> int:
        """Blocks that a multiprocessor holds."""
        registers = 168 if self.shape.large else min(128, 72 + 4 * prod(self.shape.tile))
        return max(
            1,
            min(
                gather.SHARED_BYTES // (self.shared_bytes + 1024),
                65536 // (registers * self.threads),
                2048 // self.threads,
                16,
            ),
        )

    @cached_property
    def jobs(self) -> tuple[Job, ...]:
        """One wave of blocks, given to the jobs by their units."""
        places = self.hardware.multiprocessors * self.together
        total = sum(job.units for job in self.open_jobs)
        block, jobs = 0, []
        for job in self.open_jobs:
            fair = places * job.units // max(1, total * self.shape.parts)
            shares = max(1, min(fair, job.units))
            counts = (job.tap_z, job.taps_z, job.tap_y, job.taps_y, job.gy_z, job.gy_y)
            rest = (job.x_z, job.x_y, job.count_z, job.count_y, job.units)
            jobs.append(Job(block, shares, *counts, *rest))
            block += shares * self.shape.parts
        return tuple(jobs)

    @cached_property
    def blocks(self) -> int:
        last = self.jobs[-1]
        return last.block + last.shares * self.shape.parts

    @property
    def workspace_bytes(self) -> int:
        return self.blocks * self.shape.sums * 4

    # --- the cost

    @cached_property
    def cycles(self) -> tuple[float, ...]:
        """Of one unit on a multiprocessor: instructions, shared memory, copies, and products where
        each is three."""
        m, n = self.shape.tile
        size, split = self.problem.element_bytes, self.problem.strict
        step = 16 if size == 2 else 8
        steps = self.rows * -(-self.columns // step) * prod(self.shape.warps)
        loads = m * (8 if size == 2 else 4)
        one = (
            2 * loads
            + m * 4
            + n * (2 if size == 2 else 6)
            + m * n * (SPLIT_INSTRUCTIONS if split else 1)
            + 8
            + (0 if size == 2 else 4 * m)
            + (CUT * (4 * m + 2 * n) if split else 0)
        )
        boxes = (
            gather.copies(self.gy_lines, self.gy_pitch, self.problem.out_size[-1], size),
            gather.copies(self.x_lines, self.columns, self.problem.in_size[-1], size),
        )
        passes, copies = (sum(box[i] for box in boxes) for i in range(2))
        warps = self.threads // 32
        lines = max(self.rows, self.warps_k) * prod(self.shape.warps)
        rest = warps * UNIT_INSTRUCTIONS + lines * ROW_INSTRUCTIONS + passes * ROW_COPY
        issue = (steps * one + copies * COPY + rest) / 4 / ISSUE
        shared = steps * (1.2 * loads + 2 * n) + 4 * copies
        staged = (self.gy_bytes + self.x_bytes) / STAGED_BYTES
        return issue, shared, staged, steps * m * n * SPLIT_PRODUCTS if split else 0.0

    @cached_property
    def microseconds(self) -> float:
        unit = max(self.cycles) + UNHIDDEN * (sum(self.cycles) - max(self.cycles))
        places = self.hardware.multiprocessors * self.together
        waves = -(-self.blocks // places)
        longest = max(-(-job.units // job.shares) for job in self.jobs)
        held = min(self.together, -(-self.blocks // self.hardware.multiprocessors))
        chain = longest * (LONE_WARP * unit * 128 / self.threads + UNIT_CYCLES)
        busy = waves * max(longest * unit * held, chain)
        rate = DRAM_SHARE * gather.DRAM_BYTES * self.hardware.multiprocessors
        memory = self.problem.bytes / rate
        adding = 2 * self.workspace_bytes / WORKSPACE_TERABYTES / 1e6
        most = max(job.shares for job in self.jobs)
        rows = min(1 << (most - 1).bit_length(), ADDING_ROWS)
        weights = len(self.jobs) * self.shape.parts * self.shape.sums
        adding += weights * ADD_NANOSECONDS * rows / ADDING_ROWS / 1e3
        whole = max(busy, memory) + UNHIDDEN * min(busy, memory)
        return whole / gather.CLOCK_MHZ + adding + LAUNCH_MICROSECONDS

    @property
    def notes(self) -> tuple[str, ...]:
        shape = self.shape
        tile = f"{16 * shape.tile[0]} x {8 * shape.tile[1]}"
        form = "the input" if shape.by_input else "grad_output"
        return (
            f"products of pixels by rows of {form}; a warp has {tile} sums,"
            f" {shape.warps[0]} x {shape.warps[1]} x {self.warps_k} warps a block",
            f"{self.blocks} blocks for {len(self.jobs)} sets of taps, units of {self.rows} rows of"
            f" {self.columns} pixels;"
            f" a workspace of {self.workspace_bytes / 2**20:.3g} MiB, added up in a fixed order",
        )


def shapes(problem: Problem) -> Iterator[Shape]:
    """Every form and tile that is worth a look; no two with the same part of the weight."""
    kernel = three(problem.kernel, 1)
    each_in, each_out = (c // problem.groups for c in (problem.in_channels, problem.out_channels))
    deep, high = classes_of(problem)
    together = max(c.taps for c in deep) * max(c.taps for c in high)
    for tile, warps in product(TILES, WARPS):
        rows, columns = 16 * tile[0] * warps[0], 8 * tile[1] * warps[1]
        # By rows of grad_output: the taps are columns.
        tap_block = min(kernel[2], rows)
        out_block = min(each_out, rows // tap_block)
        in_block = min(each_in, columns // together)
        if in_block and len(deep) * len(high) <= gather.MOST_JOBS:
            yield Shape(problem, False, tile, warps, 1, 1, tap_block, out_block, in_block)
        # By rows of the input: the taps are rows.
        taps_y = min(kernel[1], rows // tap_block)
        taps_z = min(kernel[0], rows // (tap_block * taps_y)) if taps_y == kernel[1] else 1
        jobs = -(-kernel[0] // taps_z) * -(-kernel[1] // taps_y)
        if jobs <= gather.MOST_JOBS:
            out_block = min(each_out, rows // (tap_block * taps_y * taps_z))
            in_block = min(each_in, columns)
            yield Shape(problem, True, tile, warps, taps_z, taps_y, tap_block, out_block, in_block)


def useful(shape: Shape) -> float:
    """Share of a block's sums that belong to the weight."""
    problem = shape.problem
    jobs = len(shape.classes[0]) * len(shape.classes[1])
    if shape.by_input:
        kernel = three(problem.kernel, 1)
        jobs = -(-kernel[0] // shape.taps_z) * -(-kernel[1] // shape.taps_y)
    weights = problem.in_channels * problem.out_channels // problem.groups * prod(problem.kernel)
    return weights / (shape.sums * shape.parts * jobs)


def divisions(problem: Problem, hardware: Hardware) -> Iterator[Division]:
    """Every way to divide the work that is worth a look."""
    found = list(shapes(problem))
    best = max(map(useful, found), default=0.0)
    whole = -(-problem.in_size[-1] // 16) * 16
    widths = sorted({whole} & set(range(16, 513, 16)) | {c for c in COLUMNS if c < whole})
    for shape in found:
        if useful(shape) < 0.4 * best:
            continue
        counts = [c.count for c in shape.classes[1]]
        tallest = three(problem.in_size, 1)[1] if shape.by_input else max([*counts, 1])
        heights = [r for r in ROWS if r < 2 * tallest]
        around = prod(shape.warps)
        for total, columns, rows in product((4,) if shape.large else (4, 8), widths, heights):
            if UNIT_PIXELS[0] <= rows * columns <= UNIT_PIXELS[1] or rows * columns == whole:
                way = Division(shape, max(1, total // around), rows, columns, hardware)
                if legal(way):
                    yield way


def legal(way: Division) -> bool:
    stage = way.gy_bytes + way.x_bytes
    far = max(
        way.gy_box.rows * way.gy_box.row_step,
        three(way.problem.kernel, 1)[0] * three(way.problem.dilation, 1)[0],
        way.x_box.rows,
    )
    return (
        stage <= STAGE_BYTES
        and way.shared_bytes <= min(way.hardware.shared_memory, gather.SHARED_BYTES)
        and way.workspace_bytes <= WORKSPACE_BYTES
        and far < gather.FARTHEST
    )


def consider(problem: Problem, hardware: Hardware) -> Candidate | Refusal:
    reason = gather.legality(problem, hardware)
    if reason:
        return Refusal(KERNEL, reason)
    best = min(divisions(problem, hardware), key=lambda way: way.microseconds, default=None)
    if best is None:
        return Refusal(KERNEL, "no unit of this layer fits into shared memory, or too many jobs")
    return Candidate(KERNEL, best.microseconds, record(best), best.notes)


def scalar_fields(way: Division) -> dict[str, int]:
    """The scalars of csrc/cuda/gather_params.h by name, in its order."""
    problem, shape = way.problem, way.shape
    element = problem.element_bytes
    return {
        "type": SPLIT if problem.strict else OPERANDS[problem.dtype],
        "by_weight": 1,
        "by_input": int(shape.by_input),
        "tiles_m": shape.tile[0],
        "tiles_n": shape.tile[1],
        "warps_m": shape.warps[0],
        "warps_n": shape.warps[1],
        "warps_k": way.warps_k,
        **gather.common_fields(problem),
        "step_z": 1 if shape.by_input else shape.classes[0][0].step,
        "step_y": 1 if shape.by_input else shape.classes[1][0].step,
        "rows": way.rows,
        "columns": way.columns,
        "run": 1,
        "out_block": shape.out_block,
        "in_block": shape.in_block,
        "tap_block": shape.tap_block,
        "gy_rows": way.gy_box.rows,
        "gy_plane_step": way.gy_box.plane_step,
        "gy_row_step": way.gy_box.row_step,
        "gy_tap_rows": way.gy_box.tap_rows,
        "gy_row_advance": way.gy_box.row_advance,
        "gy_pitch": way.gy_pitch,
        "gy_vector": gather.copy_bytes(problem.out_size[-1], element),
        "x_rows": way.x_box.rows,
        "x_plane_step": way.x_box.plane_step,
        "x_tap_rows": way.x_box.tap_rows,
        "x_pitch": way.x_pitch,
        "x_vector": gather.copy_bytes(problem.in_size[-1], element),
        "gy_bytes": way.gy_bytes,
        "x_bytes": way.x_bytes,
        "table_bytes": way.table_bytes,
        "shared_bytes": way.shared_bytes,
        "blocks": way.blocks,
        "jobs": len(way.jobs),
    }


def record(way: Division) -> tuple[int, ...]:
    return gather.record(scalar_fields(way), way.jobs)
